"""Audit lines: JSON on a pipe that the launching process reads. A line that does not fit into the pipe is
dropped and counted."""

from __future__ import annotations

import errno
import os

from sandbox.gate.loop import BROKEN, WRITE, Loop
from sandbox.network.egress import AuditLine
from sandbox.speed.signals import signal
from sandbox.speed.typed import Mapping

try:
    from _json import encode_basestring_ascii as _quote
except ImportError:  # another Python than CPython
    from json.encoder import encode_basestring_ascii as _quote

# PIPE_BUF: a write of up to so many bytes is atomic, so no line arrives in part.
MOST_LINE_BYTES = 4096
_MOST_TEXT_CHARACTERS = 300  # of a name, a rule or a reason
_REQUEST = "request"  # the kind of the broker's lines
_REQUEST_KEYS = frozenset(f"{_REQUEST} {verdict}" for verdict in ("allowed", "refused", "failed"))
_MOST_DIGITS = 9  # of a number of lines
_MOST_REPEATED = 1024  # different lines whose repetitions are counted


def encode_line(fields: Mapping[str, str | float]) -> bytes:
    """One line of JSON. Not by the module json: importing it takes half as long as all other imports."""
    pairs = (
        f"{_quote(key)}:{_quote(value) if isinstance(value, str) else repr(value)}"
        for key, value in fields.items()
    )
    return f"{{{','.join(pairs)}}}\n".encode("ascii")


class ReaderGone(Exception):
    """Nobody reads the audit lines any more."""


class AuditPipe:
    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._dropped = 0
        self._repeated: dict[AuditLine, int] = {}
        self._counts: dict[str, int] = {}  # of everything, by kind and verdict: "connect refused"

    def write(self, line: AuditLine) -> None:
        self._count(line)
        self._write(line)

    def _count(self, line: AuditLine) -> None:
        key = f"{line.kind} {line.verdict}"
        self._counts[key] = self._counts.get(key, 0) + 1

    def _write(self, line: AuditLine) -> None:
        fields = {
            key: value[:_MOST_TEXT_CHARACTERS] if isinstance(value, str) else round(value, 6)
            for key, value in line._asdict().items()
        }
        if self._dropped and not self._write_dropped():
            self._dropped += 1
        elif not self._put(fields):
            self._drop()

    def _drop(self, count: int = 1) -> None:
        self._dropped += count
        try:
            self._loop.watch(self._fd, WRITE, self._on_room)
        except OSError:
            pass  # the next line tries again

    def write_repeated(self, line: AuditLine) -> None:
        """Count the line, and write it the first, second, fourth, eighth time and so on, with that number in
        `times`."""
        self._count(line)
        count = self._repeated.pop(line, 0) + 1
        self._repeated[line] = count
        if len(self._repeated) > _MOST_REPEATED:
            del self._repeated[next(iter(self._repeated))]
        if count & (count - 1) == 0:
            self._write(line._replace(times=count))

    def pass_on(self, message: bytes) -> None:
        """Take what the broker says about a request: a verdict, a blank, and a line as encode_line() makes
        it. Who reads the pipe checks the line. Or `dropped` and the number of lines that there was no room
        for."""
        verdict, _, line = message.partition(b" ")
        if verdict == b"dropped" and line.isdigit() and len(line) <= _MOST_DIGITS:
            self._drop(int(line))
            return
        key = f"{_REQUEST} {verdict.decode('ascii', 'replace')}"
        if key not in _REQUEST_KEYS or line.find(b"\n") != len(line) - 1:
            return
        self._counts[key] = self._counts.get(key, 0) + 1
        if (self._dropped and not self._write_dropped()) or not self._put_line(line):
            self._drop()

    def wait_for_room(self) -> None:
        """Make writes block from now on, so that no line is dropped."""
        os.set_blocking(self._fd, True)
        if self._dropped:
            self._write_dropped()

    def write_totals(self) -> None:
        """Write how many events there were of each kind, with those that have no line."""
        if self._counts:
            self._put({"kind": "totals", **self._counts})

    def _on_room(self, mask: int) -> None:
        if mask & BROKEN:
            raise ReaderGone
        if self._write_dropped():
            self._loop.forget(self._fd)

    def _write_dropped(self) -> bool:
        # A line may have told it since the pipe was watched.
        if not self._dropped or self._put({"kind": "dropped", "count": self._dropped}):
            self._dropped = 0
            return True
        return False

    def _put(self, fields: Mapping[str, str | float]) -> bool:
        return self._put_line(encode_line(fields))

    def _put_line(self, line: bytes) -> bool:
        try:
            return len(line) <= MOST_LINE_BYTES and os.write(self._fd, line) == len(line)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise ReaderGone from None
            raise


def report_fault(audit: int, reason: str) -> None:
    """Write why a process beside a cell cannot start or go on, to the pipe of its audit lines."""
    line = encode_line({"kind": "fault", "reason": reason[:_MOST_TEXT_CHARACTERS]})
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.write(audit, line)
    except OSError:
        pass
