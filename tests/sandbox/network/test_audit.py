"""Audit lines from a pipe: cut anywhere, bounded in number and length, and never trusted."""

from __future__ import annotations

import json

import pytest

from sandbox.network.audit import (
    LAST_LIVE_LINE,
    MOST_FIRST_LINES,
    MOST_LAST_LINES,
    MOST_LINE_BYTES,
    MOST_LIVE_LINES,
    AuditLog,
)
from sandbox.network.egress import AuditLine


def line(**fields: object) -> bytes:
    whole = {"kind": "connect", "name": "example.com", "port": 443, "verdict": "allowed", **fields}
    return json.dumps(whole).encode() + b"\n"


def fed(*pieces: bytes) -> AuditLog:
    log = AuditLog()
    for piece in pieces:
        log.feed(piece)
    return log


def test_a_line_becomes_a_value() -> None:
    log = fed(line(rule="example.com:443", sent=7, received=9, seconds=1, address="93.184.216.34"))
    (found,) = log.lines
    assert found == AuditLine(
        *("connect", "example.com", 443, "allowed", "example.com:443"), address="93.184.216.34", sent=7
    )._replace(received=9, seconds=1)
    assert log.totals == {("connect", "allowed"): 1}


def test_pieces_may_end_anywhere() -> None:
    whole = (
        line(name="a.example")
        + line(name="b.example", verdict="refused")
        + b'{"kind":"fault","reason":"why"}\n'
    )
    for size in (1, 7, 64):
        log = fed(*(whole[at : at + size] for at in range(0, len(whole), size)))
        assert [each.name for each in log.lines] == ["a.example", "b.example"]
        assert (log.fault, log.dropped) == ("why", 0)


def test_the_first_and_the_last_are_kept() -> None:
    total = MOST_FIRST_LINES + MOST_LAST_LINES + 30
    log = fed(*(line(port=n, verdict="refused" if n < 210 else "allowed") for n in range(total)))
    ports = [each.port for each in log.lines]
    assert ports == [*range(MOST_FIRST_LINES), *range(total - MOST_LAST_LINES, total)]
    assert log.left_out == {"refused": 10, "allowed": 20}
    assert sum(log.totals.values()) == total


def test_questions_do_not_push_connections_out() -> None:
    log = fed(*(line(kind="dns", port=0, name=f"x{n}.example") for n in range(250)))
    log.feed(line(name="evidence.example"))
    log.feed(b"".join(line(kind="dns", port=0, name=f"y{n}.example") for n in range(450)))
    assert [each.name for each in log.lines if each.kind == "connect"] == ["evidence.example"]
    questions = [each.name for each in log.lines if each.kind == "dns"]
    assert len(questions) == MOST_FIRST_LINES + MOST_LAST_LINES
    assert (questions[0], questions[-1], log.left_out) == ("x0.example", "y449.example", {"allowed": 300})


def test_one_line_more_than_fits_is_counted() -> None:
    full = MOST_FIRST_LINES + MOST_LAST_LINES
    assert not fed(line() * full).left_out
    assert fed(line() * (full + 1)).left_out == {"allowed": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        b"\n",
        b"no json\n",
        b"[]\n",
        b"[" * 4000 + b"\n",
        b"{}\n",
        line(kind="other"),
        line(verdict="maybe"),
        line(port="443"),
        line(port=True),
        line(name=None),
        line(seconds="1"),
        line(name="x" * MOST_LINE_BYTES),
        b"\xff\xfe\n",
    ],
)
def test_what_makes_no_sense_is_counted(wrong: bytes) -> None:
    log = fed(wrong, line())
    assert (log.dropped, [each.name for each in log.lines]) == (1, ["example.com"])


def test_a_line_without_end_takes_no_memory() -> None:
    log = AuditLog()
    for _ in range(100):
        log.feed(b"x" * MOST_LINE_BYTES)
        assert len(log._rest) <= MOST_LINE_BYTES
    log.feed(b"end\n" + line())
    assert (log.dropped, len(log.lines)) == (1, 1)


@pytest.mark.parametrize(("count", "dropped"), [(3, 3), (-3, 1), ("many", 1), (None, 1)])
def test_lines_that_the_gate_dropped(count: object, dropped: int) -> None:
    said = json.dumps({"kind": "dropped", "count": count}).encode() + b"\n"
    assert fed(said).dropped == dropped


def test_a_fault_is_told_and_bounded() -> None:
    log = fed(b'{"kind":"fault","reason":"%s"}\n' % (b"x" * 2000))
    assert (log.fault, log.lines) == ("x" * 1000, ())


def test_each_line_is_told_at_once() -> None:
    log = AuditLog()
    told: list[AuditLine] = []
    log.on_line = told.append
    log.feed(line(name="a.example") + line(name="b")[:-5])
    assert [each.name for each in told] == ["a.example"]


@pytest.mark.parametrize("more", [0, 1, 500])
def test_only_so_many_are_told_at_once(more: int) -> None:
    log = AuditLog()
    told: list[AuditLine] = []
    log.on_line = told.append
    log.feed(line() * (MOST_LIVE_LINES + more))
    assert len(told) == MOST_LIVE_LINES + (more > 0)
    assert (told[-1] == LAST_LIVE_LINE) is (more > 0) and str(MOST_LIVE_LINES) in LAST_LIVE_LINE.reason
    assert log.totals == {("connect", "allowed"): MOST_LIVE_LINES + more}


def test_the_gate_counts_what_has_no_line() -> None:
    log = fed(line(verdict="refused"), line(verdict="refused", times=2), line())
    assert log.totals == {("connect", "refused"): 2, ("connect", "allowed"): 1}
    log.feed(b'{"kind":"totals","connect refused":3,"dns allowed":7,"connect allowed":0,"odd one":9}\n')
    assert log.totals == {("connect", "refused"): 3, ("connect", "allowed"): 1, ("dns", "allowed"): 7}
    log.feed(b'{"kind":"totals","connect refused":"many"}\n')
    assert log.totals["connect", "refused"] == 3 and log.dropped == 0
