"""The audit lines of one plugin's gate, in bounded memory.

The plugin decides how many lines there are. The first and the last ones of each kind are stored, the others
are counted. So DNS questions cannot displace connections.
"""

from __future__ import annotations

from sandbox.network.egress import AuditLine
from sandbox.speed.typed import Any, Callable, Iterator

MOST_FIRST_LINES = 200  # of each kind
MOST_LAST_LINES = 200
MOST_LIVE_LINES = 10_000  # passed to `on_line`
_MOST_FAULT_CHARACTERS = 1000
MOST_LINE_BYTES = 8 << 10  # a longer one is malformed
_FAULT, _DROPPED, _TOTALS = "fault", "dropped", "totals"
_KINDS = ("connect", "dns", "request", "ssh")
_VERDICTS = ("allowed", "refused", "failed")

# Passed to `on_line` after MOST_LIVE_LINES.
LAST_LIVE_LINE = AuditLine(
    "end", "", 0, "", reason=f"{MOST_LIVE_LINES} lines were shown; later ones are only counted, in the report"
)


class FirstAndLastLines:
    """The first and the last lines, in order."""

    def __init__(self) -> None:
        self._first: list[AuditLine] = []
        self._last: list[AuditLine] = []

    def __iter__(self) -> Iterator[AuditLine]:
        yield from self._first
        yield from self._last

    def add(self, line: AuditLine) -> AuditLine | None:
        """Add a line. Returns the line that was dropped for it, if any."""
        if len(self._first) < MOST_FIRST_LINES:
            self._first.append(line)
            return None
        self._last.append(line)
        return self._last.pop(0) if len(self._last) > MOST_LAST_LINES else None


class _Counts(dict[Any, int]):
    """Like collections.Counter, without the imports."""

    def __missing__(self, _: object) -> int:
        return 0


class AuditLog:
    def __init__(self) -> None:
        self._lines = {kind: FirstAndLastLines() for kind in _KINDS}
        self.totals: dict[tuple[str, str], int] = _Counts()  # all lines, by kind and verdict
        self.left_out: dict[str, int] = _Counts()  # lines that were not stored, by verdict
        self.dropped = 0  # lines that were not read in time, or are malformed
        self.fault = ""  # why the gate could not start, or ended by itself
        # The gate ended before the plugin, or before it had delivered what the plugin sent. Connections were
        # reset, and refused from then on.
        self.gate_ended_early = False
        # Called with each line at once, and with one of kind "gate" if the gate ends early.
        self.on_line: Callable[[AuditLine], None] | None = None
        self._live = 0
        self._rest = b""
        self._skipping = False  # inside a line that is too long

    @property
    def lines(self) -> tuple[AuditLine, ...]:
        """The stored lines, by kind, in order."""
        return tuple(line for lines in self._lines.values() for line in lines)

    def feed(self, data: bytes) -> None:
        """Take bytes from the gate's pipe, which may end within a line."""
        *whole, rest = (self._rest + data).split(b"\n")
        for line in whole:
            if self._skipping:
                self._skipping = False  # this is the end of the line that is too long
            else:
                self._take(line)
        if len(rest) > MOST_LINE_BYTES:
            self.dropped += not self._skipping
            rest, self._skipping = b"", True
        self._rest = b"" if self._skipping else rest

    def end_early(self) -> None:
        """Record that the gate has ended before the plugin, or by its own fault."""
        self.gate_ended_early = True
        if self.on_line is not None:
            self.on_line(AuditLine("gate", "", 0, "failed", reason=self.describe_end()))

    def describe_end(self) -> str:
        """What happened, as the rest of a sentence that begins with the gate."""
        why = f" ({self.fault})" if self.fault else ""
        return f"ended too early{why}: open connections were reset, and new ones refused"

    def _take(self, raw: bytes) -> None:
        import json

        try:
            document = json.loads(raw) if len(raw) <= MOST_LINE_BYTES else None
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            self.dropped += 1
            return
        kind = document.get("kind")
        if kind == _FAULT:
            self.fault = str(document.get("reason", ""))[:_MOST_FAULT_CHARACTERS]
        elif kind == _DROPPED:
            count = document.get("count")
            self.dropped += count if isinstance(count, int) and count > 0 else 1
        elif kind == _TOTALS:
            self._count_all(document)
        elif (line := _read_line(document)) is not None:
            self.store(line)
        else:
            self.dropped += 1

    def _count_all(self, document: dict[str, Any]) -> None:
        """Take the gate's own totals, which it writes at its end: they include repetitions that got no
        line."""
        for kind in _KINDS:
            for verdict in _VERDICTS:
                count = document.get(f"{kind} {verdict}")
                if isinstance(count, int) and count > self.totals[kind, verdict]:
                    self.totals[kind, verdict] = count

    def store(self, line: AuditLine) -> None:
        self.totals[line.kind, line.verdict] += 1
        gone = self._lines[line.kind].add(line)
        if gone is not None:
            self.left_out[gone.verdict] += 1
        if self.on_line is not None:
            self._pass_on(self.on_line, line)

    def _pass_on(self, on_line: Callable[[AuditLine], None], line: AuditLine) -> None:
        self._live += 1
        if self._live <= MOST_LIVE_LINES:
            on_line(line)
        elif self._live == MOST_LIVE_LINES + 1:
            on_line(LAST_LIVE_LINE)


def _read_line(document: dict[str, Any]) -> AuditLine | None:
    """The line, or None if a field is missing or has a wrong type."""
    if document.get("kind") not in _KINDS or document.get("verdict") not in _VERDICTS:
        return None
    empty = {"kind": "", "name": "", "port": 0, "verdict": "", **AuditLine._field_defaults}
    fields: dict[str, Any] = {}
    for field in AuditLine._fields:
        value = document.get(field, AuditLine._field_defaults.get(field))
        wanted = (int, float) if isinstance(empty[field], float) else type(empty[field])
        if not isinstance(value, wanted) or isinstance(value, bool):
            return None
        fields[field] = value
    return AuditLine(**fields)
