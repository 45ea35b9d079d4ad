"""What a trial found, written down: bounded, and safe for terminals, JSON and XML."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from runner.conformance.report import (
    ConformanceReport,
    ContractRule,
    Transcript,
    Verdict,
    as_json,
    as_junit,
    as_text,
)

RULE = ContractRule("toy-01", "It answers <at once> & once.", "Toy §1")


def make_report(*verdicts: Verdict) -> ConformanceReport:
    return ConformanceReport("toy", "my plugin", verdicts)


def test_the_exit_depends_on_broken_rules_only() -> None:
    kept, none = Verdict(RULE, "pass"), Verdict(RULE, "n/a", "it has no tools")
    assert make_report(kept, none).ok
    assert not make_report(kept, Verdict(RULE, "fail", "silence"), none).ok


def test_text_shows_the_conversation_of_a_broken_rule_only() -> None:
    talk = Transcript()
    talk.sent(b'{"ask": 1}\n')
    talk.received(b'{"answer": 2}')
    talk.seen("it exited with status 0")
    report = make_report(
        Verdict(RULE, "pass", "", talk.lines), Verdict(RULE, "fail", "answer is 2, and not 1", talk.lines)
    )
    assert list(as_text(report)) == [
        "pass  toy-01  It answers <at once> & once.",
        "FAIL  toy-01  It answers <at once> & once.",
        "              answer is 2, and not 1",
        "              see Toy §1",
        '              -> {"ask": 1}',
        '              <- {"answer": 2}',
        "              -- it exited with status 0",
        "my plugin: 1 passed, 1 failed, 0 not applicable",
    ]


def test_a_transcript_is_bounded() -> None:
    talk = Transcript()
    for number in range(100_000):
        talk.received(b"%d" % number, 1 << 30)
    talk.received(b"x" * 10_000_000)
    lines = talk.lines
    assert len(lines) == 25 and lines[16].text == f"{100_001 - 24} more lines"
    assert [line.text[:1] for line in (lines[0], lines[-1])] == ["0", "x"]
    assert all(len(line.text) < 450 for line in lines)
    assert lines[-1].text.endswith("… (10000000 bytes)")


@given(st.binary(max_size=60), st.text(max_size=60))
def test_a_hostile_peer_cannot_spoil_a_report(frame: bytes, said: str) -> None:
    talk = Transcript()
    talk.sent(frame)
    talk.received(frame)
    talk.seen(said)
    verdicts = [Verdict(RULE, result, said, talk.lines) for result in ("pass", "fail", "n/a")]
    report = ConformanceReport("toy", said, tuple(verdicts))
    assert all(line.isprintable() for line in as_text(report))
    assert json.loads(as_json(report))["count"] == {"pass": 1, "fail": 1, "n/a": 1}
    [suite] = ElementTree.fromstring(as_junit(report).encode())
    assert {name: suite.attrib[name] for name in ("tests", "failures", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
    }
    assert [[child.tag for child in case] for case in suite] == [["system-out"], ["failure"], ["skipped"]]


def test_json_has_every_conversation() -> None:
    talk = Transcript()
    talk.received(b"\xff\x1b[2J")
    [row] = json.loads(as_json(make_report(Verdict(RULE, "pass", "", talk.lines, 0.25))))["rules"]
    assert row == {
        **RULE._asdict(),
        "result": "pass",
        "reason": "",
        "seconds": 0.25,
        "exchange": [{"direction": "received", "text": "\\xff\\x1b[2J", "size": 5}],
    }
