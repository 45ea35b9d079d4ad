"""`runner exec --inspect`: host and plugin exchange the same bytes as before, and every frame is checked.

What the host writes is passed on at once, and read only to know its requests. What the plugin writes is held
until a frame is complete and checked, so a host never gets a frame that breaks the contract. The first such
frame ends the plugin. A frame that a session drops is withheld, and the plugin goes on. A host that
does not read slows the plugin down, and the reverse; neither blocks the other direction. At most one frame of
the contract's maximum length is held.
"""

from __future__ import annotations

import math
import time
from typing import Any

from runner.launch.inspect.streams import Passage, ToHost, ToPlugin
from runner.outcome import Phase
from runner.protocol.dialect import Violation
from runner.protocol.frames import FrameFault
from runner.protocol.inspector import Inspector
from runner.protocol.rpc_reader import Rewritten, Verdict, Withheld
from sandbox.limits.meter import VIOLATION, Meter
from sandbox.spec import Limits
from sandbox.speed.typed import Callable, Mapping
from sandbox.speed.value import NamedTuple
from sandbox.streams.relay import Relay

# A plugin may send this many frames at once, and so many per second for any time. A language model streams
# some hundred per second. This protects a host from floods; it is not a precise limit.
BURST_FRAMES = 20_000
FRAMES_PER_SECOND = 2_000.0


class Breach(NamedTuple):
    violation: Violation
    phase: Phase
    limit: str | None = None  # the limit that was exceeded, if it was not the contract's own


class Inspection(Meter):
    """Inspects both directions between a host and a plugin.

    `ends` are for the plugin. Call `release` when the plugin runs, and `finish` when its last process has
    ended. `forget` is called with the number of a stream that the plugin has closed.
    """

    def __init__(
        self,
        inspector: Inspector,
        limits: Limits,
        beside: Relay | None = None,  # of stderr: its bytes count towards the same limits
        *,
        stdin: int = 0,
        stdout: int = 1,
        burst: float = BURST_FRAMES,
        per_second: float = FRAMES_PER_SECOND,
        forget: Callable[[int], None] = lambda fd: None,
    ) -> None:
        self.inspector = inspector
        self.breach: Breach | None = None
        self.exceeded: str | None = None  # the limit that was exceeded
        self.handshake: float | None = None  # seconds it took
        self._limits = limits
        self._beside = beside
        self._rate = _Rate(burst, per_second)
        self._asked = math.nan  # when the host asked for the handshake
        self._clock = math.inf  # by when it has to be answered
        self.to_plugin = ToPlugin(stdin, inspector, forget)
        try:
            self.to_host = ToHost(stdout, inspector.framing.cutter(), self._check, forget)
        except BaseException:
            self.to_plugin.close()
            raise

    @property
    def seconds(self) -> float:
        """How long the handshake may take."""
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
        # First notice a host that has closed its end. Then pass on what it wrote, before the plugin's answer
        # to that is checked.
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

    def finish(self, seconds: float) -> None:
        """Pass on what is left, as long as the host takes some of it within `seconds`."""
        self.to_host.finish(seconds)
        self._time(time.monotonic())
        self._count()
        self.close()

    def close(self) -> None:
        """Close at once. What was not passed on is lost."""
        self.to_plugin.close()
        self.to_host.close()

    @property
    def left_waiting(self) -> bool:
        """Whether the host still waits for the handshake, and reads."""
        return self.inspector.awaiting and self.to_plugin.has_asked and not self.to_host.abandoned

    def unanswered(self) -> Breach:
        """The breach of a plugin that ended by itself before it answered the handshake."""
        violation = Violation("crashed", "the plugin ended before it answered the handshake", "no_handshake")
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

    # --- checking -------------------------------------------------------------------------------------------

    def _check(self, frame: bytes | FrameFault) -> Passage:
        """Whether a frame of the plugin's may be passed on. A fault never is, and nothing after it."""
        if self.breach is not None:
            return "stop"
        violation: Verdict
        before = self.inspector.handshaken
        if isinstance(frame, FrameFault):
            violation = Violation("malformed_response", frame.message, frame.cause)
        elif not self._rate.admits(time.monotonic()):
            message = (
                f"the plugin sent more than {self._rate.per_second:.0f} messages a second, after a burst of "
                f"{self._rate.burst:.0f}"
            )
            violation = Violation("malformed_response", message, "flood")
        else:
            violation = self.inspector.plugin_frame(frame)
        if isinstance(violation, Withheld):
            return "drop"
        if isinstance(violation, Rewritten):
            return violation.frame
        if violation is None:
            return "pass"
        self.breach = Breach(violation, "run" if before else "handshake")
        return "stop"

    def _time(self, now: float) -> None:
        """Start or stop the clock of the handshake."""
        if self.inspector.handshaken and self.handshake is None and not math.isnan(self._asked):
            self.handshake = now - self._asked
        # The clock also runs for a plugin that has closed its stdout, and so cannot answer.
        if not self.inspector.awaiting or not (self.to_host.listening or self.to_host.closed):
            self._clock = math.inf
        elif self._clock == math.inf and (self.to_plugin.has_asked or self.to_plugin.stream_closed):
            self._asked, self._clock = now, now + self.seconds

    def _late(self) -> None:
        if self.breach is None:
            granted = self._limits.handshake
            limited = granted is not None and granted <= self.inspector.handshake_seconds
            hint = "this is the contract's limit"
            if limited or self.inspector.handshake_is_raisable:
                hint = "raise the handshake limit with --limit handshake=TIME, up to the policy's ceiling"
            from runner.launch.verdict import unheard  # most launches need no words for it

            hint = f"{unheard(self.to_host.bytes, self.to_host.pending)}; if it only needs longer: {hint}"
            message = f"the plugin did not answer the handshake within {self.seconds:g} s"
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
    """A token bucket: time fills it, and each frame takes one token."""

    def __init__(self, burst: float, per_second: float) -> None:
        self.per_second = per_second
        self.burst = self._left = burst
        self._then = -math.inf

    def admits(self, now: float) -> bool:
        self._left = min(self.burst, self._left + (now - self._then) * self.per_second)
        self._then = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
