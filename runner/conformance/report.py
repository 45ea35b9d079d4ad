"""What a trial of a contract's rules found: the rules, a verdict on each, and three ways to write it down.

The plugin on trial is hostile: a transcript keeps a bounded number of lines of bounded length, and every text
of it is escaped, so that terminals, JSON and XML can show it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import escape, quoteattr

from runner import __version__
from sandbox.document.diagnostic import cut, printable

SCHEMA = "runner.conformance.v1"

Result = Literal["pass", "fail", "n/a"]
Direction = Literal["sent", "received", "seen"]

_LINE_CHARACTERS = 400  # of one line of a transcript
_FIRST_LINES, _LAST_LINES = 16, 8  # of a transcript: what is between them is only counted
_REASON_CHARACTERS = 600
_MARKS: dict[Direction, str] = {"sent": "->", "received": "<-", "seen": "--"}


class ContractRule(NamedTuple):
    """One rule of a contract."""

    id: str  # "NAME-07": the contract's name and a number that stays
    text: str  # one sentence: what a plugin does
    place: str  # in the contract's text, such as "spec.md §4"


class TranscriptLine(NamedTuple):
    direction: Direction  # "sent": by us; "received": from the plugin; "seen": neither, such as an exit
    text: str  # escaped and cut
    size: int = 0  # bytes of the whole frame; 0 for what was seen

    @property
    def shown(self) -> str:
        return f"{_MARKS[self.direction]} {self.text}"


class Transcript:
    """A bounded record of one conversation: the first lines, and the last ones."""

    def __init__(self) -> None:
        self._first: list[TranscriptLine] = []
        self._last: deque[TranscriptLine] = deque(maxlen=_LAST_LINES)
        self._count = 0

    def sent(self, frame: bytes) -> None:
        self._add(_frame_line("sent", frame))

    def received(self, frame: bytes, size: int = 0) -> None:
        """`size`: of the whole frame, if `frame` is only its beginning."""
        self._add(_frame_line("received", frame, size))

    def seen(self, text: str) -> None:
        """Something that is no frame: stdin was closed, the process has exited, nothing came in time."""
        self._add(TranscriptLine("seen", cut(printable(text), _LINE_CHARACTERS)))

    def _add(self, line: TranscriptLine) -> None:
        self._count += 1
        if len(self._first) < _FIRST_LINES:
            self._first.append(line)
        else:
            self._last.append(line)

    @property
    def lines(self) -> tuple[TranscriptLine, ...]:
        """The record so far. A later line does not change it."""
        left_out = self._count - len(self._first) - len(self._last)
        between = [TranscriptLine("seen", f"{left_out} more lines")] if left_out else []
        return (*self._first, *between, *self._last)


def _frame_line(direction: Direction, frame: bytes, size: int = 0) -> TranscriptLine:
    size = max(size, len(frame))
    head = frame[:_LINE_CHARACTERS].removesuffix(b"\n")
    text = cut(printable(head.decode("utf-8", "backslashreplace")), _LINE_CHARACTERS)
    if size > _LINE_CHARACTERS:
        text = f"{text.removesuffix('…')}… ({size} bytes)"
    return TranscriptLine(direction, text, size)


class Verdict(NamedTuple):
    rule: ContractRule
    result: Result
    reason: str = ""  # what was wrong, or why the rule does not apply; empty: the rule was kept
    exchange: tuple[TranscriptLine, ...] = ()  # the conversation that shows it
    seconds: float = 0.0


class ConformanceReport(NamedTuple):
    contract: str
    subject: str  # the manifest or the command
    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        return not self.count("fail")

    def count(self, result: Result) -> int:
        return sum(each.result == result for each in self.verdicts)


def as_text(report: ConformanceReport) -> Iterator[str]:
    """Lines for people: each rule with its verdict, and for a broken rule the conversation."""
    width = max((len(each.rule.id) for each in report.verdicts), default=0)
    for each in report.verdicts:
        mark = "FAIL" if each.result == "fail" else each.result
        yield f"{mark:4}  {each.rule.id:{width}}  {each.rule.text}"
        if each.reason:
            yield f"{'':{width + 8}}{_reason(each)}"
        if each.result == "fail":
            yield f"{'':{width + 8}}see {each.rule.place}"
            yield from (f"{'':{width + 8}}{line.shown}" for line in each.exchange)
    counts = f"{report.count('pass')} passed, {report.count('fail')} failed"
    yield f"{printable(report.subject)}: {counts}, {report.count('n/a')} not applicable"


def as_json(report: ConformanceReport) -> str:
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "version": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "contract": report.contract,
        "subject": printable(report.subject),
        "ok": report.ok,
        "count": {name: report.count(name) for name in ("pass", "fail", "n/a")},
        "rules": [
            {
                **each.rule._asdict(),
                "result": each.result,
                "reason": _reason(each),
                "seconds": round(each.seconds, 3),
                "exchange": [line._asdict() for line in each.exchange],
            }
            for each in report.verdicts
        ],
    }
    return json.dumps(document, indent=2)


def as_junit(report: ConformanceReport) -> str:
    """JUnit's XML, as CI services read it: one test case for each rule."""
    return "\n".join(_junit_lines(report)) + "\n"


def _junit_lines(report: ConformanceReport) -> Iterator[str]:
    suite = {
        "name": f"runner conformance {report.contract}: {printable(report.subject)}",
        "tests": len(report.verdicts),
        "failures": report.count("fail"),
        "errors": 0,
        "skipped": report.count("n/a"),
        "time": f"{sum(each.seconds for each in report.verdicts):.3f}",
    }
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield f"<testsuites><testsuite{_attributes(suite.items())}>"
    for each in report.verdicts:
        case = {
            "classname": f"conformance.{report.contract}",
            "name": f"{each.rule.id} {each.rule.text}",
            "time": f"{each.seconds:.3f}",
        }
        yield f"<testcase{_attributes(case.items())}>"
        if each.result == "n/a":
            yield f"<skipped{_attributes([('message', _reason(each))])}/>"
        elif each.result == "fail":
            message = _attributes([("message", _reason(each))])
            yield f"<failure{message}>{escape(each.rule.place)}\n{_exchange(each.exchange)}</failure>"
        else:
            yield f"<system-out>{_exchange(each.exchange)}</system-out>"
        yield "</testcase>"
    yield "</testsuite></testsuites>"


def _attributes(pairs: Iterable[tuple[str, Any]]) -> str:
    return "".join(f" {name}={quoteattr(str(value))}" for name, value in pairs)


def _exchange(lines: Sequence[TranscriptLine]) -> str:
    """What is printable is allowed in XML: no control characters, surrogates or unassigned ones."""
    return "\n".join(escape(line.shown) for line in lines)


def _reason(verdict: Verdict) -> str:
    return cut(printable(verdict.reason), _REASON_CHARACTERS)
