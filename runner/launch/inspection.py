"""Between a host and its plugin: what they say to each other is passed on byte for byte, and read on the way.

Only for `runner exec --inspect`. What the host says goes on at once, and is read only to know what was asked.
What the plugin says is held until a frame is whole and fine, so that a host never gets one that breaks the
contract; the first that does ends the plugin. A host that does not read slows the plugin down, a plugin that
does not read slows its host down, and neither keeps the other direction waiting: as if nobody stood between
them. What is held is bounded by the longest frame the contract allows.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from runner.outcome import Phase
from runner.protocol.dialect import Violation
from runner.protocol.frames import LineFramer
from runner.protocol.inspector import Inspector
from sandbox.limits.meter import VIOLATION, Meter
from sandbox.spec import Limits
from sandbox.streams.endpoints import PIECE, sink_for
from sandbox.streams.feed import Feed
from sandbox.streams.relay import Relay
from sandbox.value import NamedTuple

_BUFFER = 64 << 10
# Writes for one look: the loop has others to look after.
_PIECES = _BUFFER // PIECE
# How long to leave a sink alone that says it is ready, and is not.
_PAUSE = 0.05
# A longer one of the host's is passed on unread. It is the host's own, and no contract limits it.
_HOST_FRAME = 4 << 20

# Frames of a plugin: so many at once, and so many a second for ever. The stream of a language model is some
# hundred a second. A guard against floods, which cost a host more than the plugin, and no fine measure.
BURST = 20_000
PER_SECOND = 2_000.0


class Breach(NamedTuple):
    violation: Violation
    phase: Phase
    limit: str | None = None  # if it was not the contract's own measure but a limit


class Inspection(Meter):
    """`ends` are for the plugin; `release` them when it has them. `finish` is for when its last process is
    gone. `forget` is called with the number of a stream that the plugin has closed."""

    def __init__(
        self,
        inspector: Inspector,
        limits: Limits,
        beside: Relay | None = None,  # of stderr: what passes there counts for the same limits
        *,
        stdin: int = 0,
        stdout: int = 1,
        burst: float = BURST,
        per_second: float = PER_SECOND,
        forget: Callable[[int], None] = lambda fd: None,
    ) -> None:
        self.inspector = inspector
        self.breach: Breach | None = None
        self.exceeded: str | None = None  # the limit that ran out
        self.handshake: float | None = None  # seconds it took
        self._limits = limits
        self._beside = beside
        self._rate = _Rate(burst, per_second)
        self._asked = math.nan  # when the handshake was
        self._clock = math.inf  # when it has to be done
        self.to_plugin = _ToPlugin(stdin, inspector, forget)
        try:
            framer = LineFramer(inspector.limit, inspector.spare)
            self.to_host = _ToHost(stdout, framer, self._check, forget)
        except BaseException:
            self.to_plugin.close()
            raise

    @property
    def seconds(self) -> float:
        """For the handshake."""
        granted = self._limits.handshake
        return (
            self.inspector.handshake_seconds
            if granted is None
            else min(granted, self.inspector.handshake_seconds)
        )

    @property
    def ends(self) -> tuple[int, int]:
        """The plugin's stdin and stdout."""
        return self.to_plugin.end, self.to_host.end

    def release(self) -> None:
        """Close our copies of the plugin's ends. While we hold them, its pipes do not end."""
        self.to_plugin.release()
        self.to_host.release()

    # --- while it runs --------------------------------------------------------------------------------------

    def interest(self) -> Mapping[int, int]:
        return {**self.to_plugin.interest(), **self.to_host.interest()}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        # A host that is gone first: what it has said before, the plugin must not answer into the void. Then
        # what it says: the plugin's answer to that may be there already.
        self.to_host.notice(ready)
        self.to_plugin.look(ready, now)
        self._time(now)
        self.to_host.look(ready, now)
        self._time(now)
        if now >= self._clock:
            self._late()
        self.due = min(self._clock, self.to_host.due, self.to_plugin.due)
        self._count()
        return VIOLATION if self.breach is not None else self.exceeded

    def peaks(self) -> Mapping[str, float]:
        seen: dict[str, float] = {}
        if self._limits.output is not None:
            seen["output"] = self._printed[0]
        if self._limits.output_lines is not None:
            seen["output_lines"] = self._printed[1]
        if self._limits.handshake is not None and self.handshake is not None:
            seen["handshake"] = self.handshake
        return seen

    # --- afterwards -----------------------------------------------------------------------------------------

    def finish(self, patience: float) -> None:
        """Pass on what is still under way, as long as the host takes some of it within `patience` seconds."""
        self.to_host.finish(patience)
        self._time(time.monotonic())
        self._count()
        self.close()

    def close(self) -> None:
        """At once. What is under way is lost."""
        self.to_plugin.close()
        self.to_host.close()

    @property
    def left_waiting(self) -> bool:
        """The host waits for a handshake, and would read it."""
        return self.inspector.awaiting and self.to_plugin.has_asked and not self.to_host.abandoned

    def unanswered(self) -> Breach:
        """Of a plugin that ended by itself and left its host waiting for the handshake."""
        violation = Violation("crashed", "the plugin ended before it had shaken hands", "no_handshake")
        return Breach(violation, "handshake")

    def document(self) -> dict[str, Any]:
        """For the report."""
        violation = None if self.breach is None else self.breach.violation
        return {
            "to_plugin": {
                "frames": self.to_plugin.frames,
                "unread": self.to_plugin.unread,
                "bytes": self.to_plugin.passed,
            },
            "to_host": {
                "frames": self.to_host.frames,
                "bytes": self.to_host.passed,
                "withheld": self.to_host.bytes - self.to_host.passed,
            },
            "strays": dict(self.inspector.strays),
            "handshake": self.handshake,
            "violation": None
            if violation is None
            else {"code": violation.code, "cause": violation.cause, "message": violation.message},
        }

    # --- judging --------------------------------------------------------------------------------------------

    def _check(self, frame: bytes | None, fault: str = "") -> bool:
        """Whether a frame of the plugin's may be passed on. None: one that never ends."""
        if self.breach is not None:
            return False
        violation: Violation | None
        before = self.inspector.handshaken
        if frame is None:
            violation = Violation("malformed_response", fault, "frame_too_large")
        elif not self._rate.admits(time.monotonic()):
            message = f"more than {self._rate.per_second:.0f} messages a second, for longer than a burst"
            violation = Violation("malformed_response", message, "flood")
        else:
            violation = self.inspector.plugin_frame(frame)
        if violation is not None:
            self.breach = Breach(violation, "run" if before else "handshake")
        return violation is None

    def _time(self, now: float) -> None:
        """Start or stop the clock of the handshake."""
        if self.inspector.handshaken and self.handshake is None and not math.isnan(self._asked):
            self.handshake = now - self._asked
        # Also of a plugin that has closed its stdout, and cannot answer any more.
        if not self.inspector.awaiting or not (self.to_host.listening or self.to_host.closed):
            self._clock = math.inf
        elif self._clock == math.inf and (self.to_plugin.has_asked or self.to_plugin.is_deaf):
            self._asked, self._clock = now, now + self.seconds

    def _late(self) -> None:
        if self.breach is None:
            granted = self._limits.handshake
            limited = granted is not None and granted <= self.inspector.handshake_seconds
            hint = "give it more time, if it deserves more" if limited else "look why it is so slow to start"
            message = f"no handshake within {self.seconds:g} s"
            violation = Violation("timeout", message, "handshake", hint)
            self.breach = Breach(violation, "handshake", "handshake" if limited else None)
            self.to_host.stop()
        self._clock = math.inf

    @property
    def _printed(self) -> tuple[int, int]:
        beside = (0, 0) if self._beside is None else (self._beside.bytes, self._beside.lines)
        return self.to_host.bytes + beside[0], self.to_host.lines + beside[1]

    def _count(self) -> None:
        for name, amount in zip(("output", "output_lines"), self._printed, strict=True):
            limit = getattr(self._limits, name)
            if limit is not None and amount > limit and self.exceeded is None:
                self.exceeded = name
                self.to_host.stop()


class _Rate:
    """A bucket that fills with time and that each frame takes from."""

    def __init__(self, burst: float, per_second: float) -> None:
        self.per_second = per_second
        self._burst = self._left = burst
        self._then = -math.inf

    def admits(self, now: float) -> bool:
        self._left = min(self._burst, self._left + (now - self._then) * self.per_second)
        self._then = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _ToPlugin(Feed):
    """The host's stdin of ours, into the plugin's, and read on the way."""

    def __init__(self, stdin: int, inspector: Inspector, forget: Callable[[int], None]) -> None:
        super().__init__(stdin, forget)
        self.frames = 0
        self.unread = 0  # of these, by us
        self._inspector = inspector
        self._framer = LineFramer(_HOST_FRAME)
        self._skips = False  # the rest of a line that is too long
        self._taken = 0
        self._question: int | None = None  # where the one ends whose answer is the handshake

    @property
    def has_asked(self) -> bool:
        """Whether the plugin can know that its handshake is wanted."""
        return self._question is not None and self.passed >= self._question

    def _heard(self, data: bytes) -> None:
        if not data:
            for frame in self._framer.finish():
                self._note(frame)
            return
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._read(line + b"\n")
        self._read(rest)

    def _read(self, piece: bytes) -> None:
        """A line or a part of one. What is too long is not for us."""
        self._taken += len(piece)
        whole = piece.endswith(b"\n")
        if self._skips:
            self._skips = not whole
            return
        for frame in self._framer.feed(piece):
            self._note(frame)
        if self._framer.fault is not None:
            self._framer = LineFramer(_HOST_FRAME)
            self._skips = not whole
            self.unread += 1
            self._note(None)

    def _note(self, frame: bytes | None) -> None:
        self.frames += 1
        self._inspector.host_frame(frame)
        if not self._inspector.awaiting:
            self._question = None
        elif self._question is None:
            self._question = self._taken


class _ToHost:
    """The plugin's stdout, into ours: whole frames that were found to be fine."""

    def __init__(
        self, stdout: int, framer: LineFramer, check: Callable[..., bool], forget: Callable[[int], None]
    ) -> None:
        self.frames = 0  # passed on, or about to be
        self.bytes = 0  # read from the plugin
        self.lines = 0
        self.passed = 0  # bytes the host has taken
        self.due = math.inf
        self.abandoned = False  # its reader is gone
        self._check = check
        self._stdout = stdout
        self._forget = forget
        self.closed = False  # by the plugin
        self._told = False  # the host of that
        self._framer = framer
        self._buffer = bytearray()
        self._stopped = False
        self._sink = sink_for(stdout)
        try:
            self._read, self.end = os.pipe2(os.O_CLOEXEC)  # -1 when closed
        except OSError:
            self._sink.close()
            raise
        os.set_blocking(self._read, False)

    @property
    def listening(self) -> bool:
        return self._read >= 0 and not self._stopped

    def interest(self) -> Mapping[int, int]:
        wanted: dict[int, int] = {}
        if self._read >= 0:
            if self._may_read():
                wanted[self._read] = select.POLLIN
            if self._sink.final:
                wanted[self._sink.fd] = 0  # errors and hang-ups are told unasked
        if self._buffer and self.due == math.inf:
            wanted[self._sink.fd] = select.POLLOUT
        return wanted

    def notice(self, ready: Mapping[int, int]) -> None:
        """Whether the host reads no more."""
        if self._sink.final and ready.get(self._sink.fd, 0) & (select.POLLERR | select.POLLHUP):
            self._abandon()
            self.abandoned = True

    def look(self, ready: Mapping[int, int], now: float) -> None:
        events = ready.get(self._sink.fd, 0)
        if now >= self.due:
            self.due = math.inf
        first = not self._buffer
        if self._read in ready and self._may_read():
            self._take()
        if self._buffer and (first or events) and not self._pass_on() and events:
            self.due = now + _PAUSE
        if self.closed and not self._told and not self._buffer:
            # The host sees the end as if we were not here.
            self._told = True
            self._sink.close()
            self._forget(self._stdout)

    def stop(self) -> None:
        """Nothing more is taken from the plugin."""
        self._stopped = True

    def finish(self, patience: float) -> None:
        self.release()
        # Until the pipe is empty, not until it ends: who knows where the plugin has sent its own end. And no
        # more than a pipe holds: who has it may still write.
        until = time.monotonic() + patience
        most = self.bytes + (fcntl.fcntl(self._read, fcntl.F_GETPIPE_SZ) if self._read >= 0 else 0)
        while True:
            more = self.bytes < most and self._may_read() and self._take()
            if not more and not self._stopped and not self._buffer:
                self._end()
            if not self._buffer:
                if more:
                    continue
                return
            if self._pass_on():
                until = time.monotonic() + patience
            elif (left := until - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self._sink.fd, select.POLLOUT)
                poll.poll(min(left, _PAUSE) * 1000 + 1)
            else:
                return

    def release(self) -> None:
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def close(self) -> None:
        self.release()
        self._abandon()
        self._sink.close()

    def _may_read(self) -> bool:
        return self.listening and len(self._buffer) < _BUFFER

    def _take(self) -> bool:
        """Read once. False if there was nothing."""
        try:
            data = os.read(self._read, _BUFFER)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            self._close_read()
            self.closed = True
            return False
        self.bytes += len(data)
        self.lines += data.count(b"\n")
        for frame in self._framer.feed(data):
            if not self._admit(frame, b"\n"):
                return True
        fault = self._framer.fault
        if fault is not None:
            self._check(None, fault.message)
            self.stop()
        return True

    def _end(self) -> None:
        """A last line may lack its newline."""
        for frame in self._framer.finish():
            self._admit(frame, b"")

    def _admit(self, frame: bytes, newline: bytes) -> bool:
        if not self._check(frame):
            self.stop()
            return False
        self.frames += 1
        self._buffer += frame
        self._buffer += newline
        return True

    def _pass_on(self) -> bool:
        """Write what the sink takes now. False if it takes nothing."""
        start = 0
        for _ in range(_PIECES):
            if start == len(self._buffer):
                break
            try:
                start += self._sink.write(bytes(self._buffer[start : start + PIECE]))
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                self.passed += start
                self._abandon()
                self.abandoned = True
                return True
            except OSError:
                # A full disk, a terminal that hung up: we cannot hand the error over (streams/relay.py).
                self.passed += start
                self._buffer.clear()
                return True
        self.passed += start
        del self._buffer[:start]
        return start > 0

    def _abandon(self) -> None:
        """Nobody reads what the plugin writes: its next write shall say so, and bring it SIGPIPE."""
        self._buffer.clear()
        self.due = math.inf
        self._close_read()

    def _close_read(self) -> None:
        if self._read >= 0:
            os.close(self._read)
            self._read = -1
