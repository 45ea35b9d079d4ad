"""What a session adds to the monitor's report: what it counted, and why the plugin ended.

The monitor sees that the session sent a signal and that the process ended. Only the session knows why it sent
the signal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from runner.outcome import Outcome, Phase
from runner.protocol.dialect import Identity
from runner.protocol.secrets import Secrets
from sandbox.document.diagnostic import cut
from sandbox.spec import Limits

if TYPE_CHECKING:
    from runner.launch.wait import Reason

    # "cancelled": the caller that opened the session gave it up.
    SessionReason = Reason | Literal["cancelled"]

_STDERR_TAIL_BYTES = 8 << 10
_REFUSAL_CHARACTERS = 8 << 10
_NEWLINE = ord("\n")
# Phases of the report, in order.
_TIMED = ("manifest", "policy", "plan", "launch", "parked", "handshake", "call", "run", "teardown")
_STRAY_CHARACTERS = 200  # of a line on stdout that is no message


class SessionRecord:
    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.limits_hit: list[str] = []
        self.calls = {"ok": 0, "refused": 0, "failed": 0}
        self.frames = 0
        self.bytes = {"stdout": 0, "stderr": 0}
        self.lines = 0
        self.stray = ""  # the last line on its stdout that was no message
        self.claimed_id: str | None = None  # by a plugin whose handshake names another id than its manifest
        self.refusals = ""  # the end of what it answered calls with that it refused
        self.farewell_error = ""
        self.forced = False  # it was killed because it did not end when asked to
        self.secrets = Secrets()  # not to be shown, although the plugin may write them to its stderr
        self._take_stderr: Callable[[bytes], None] | None = None
        self._tail = bytearray()  # up to twice as much as is needed: it is not moved at each write

    @property
    def stderr(self) -> str:
        """The end of the plugin's stderr, without secrets."""
        tail = bytes(self._tail[-self._tail_bytes :])
        tail = self.secrets.hide_in_tail(tail, cut=len(tail) < self.bytes["stderr"])
        return tail[-_STDERR_TAIL_BYTES:].decode("utf-8", "replace")

    def forward_stderr_to(self, take: Callable[[bytes], None]) -> None:
        """Pass on what is held, and what follows: see OpenPlugin.on_stderr."""
        if self.secrets:
            return
        if self._tail:
            take(bytes(self._tail[-_STDERR_TAIL_BYTES:]))
        self._take_stderr = take

    @property
    def _tail_bytes(self) -> int:
        """Bytes of stderr to hold, so that no secret is cut in the part that is shown."""
        return _STDERR_TAIL_BYTES + self.secrets.longest

    @property
    def noise(self) -> str:
        """Shown when a call times out."""
        return f"its stdout had lines that are no messages, such as {self.stray}" if self.stray else ""

    def note_stray(self, value: object) -> None:
        self.stray = cut(repr(value), _STRAY_CHARACTERS)

    def note_refusal(self, message: str) -> None:
        self.refusals = f"{self.refusals}\n{message[-_REFUSAL_CHARACTERS:]}"[-_REFUSAL_CHARACTERS:]

    def count_output(self, stream: Literal["stdout", "stderr"], data: bytes | bytearray) -> None:
        self.bytes[stream] += len(data)
        if _NEWLINE in data:  # ten times faster than counting; most of a long answer has none
            self.lines += data.count(b"\n")
        if stream == "stderr":
            if self._take_stderr is not None:
                self._take_stderr(bytes(data))
            self._tail += data
            if len(self._tail) > 2 * self._tail_bytes:
                del self._tail[: -self._tail_bytes]

    def exceeded(self, limits: Limits) -> str | None:
        """The output limit that has just been exceeded. Both streams count together."""
        most = limits.output
        if most is not None and sum(self.bytes.values()) > most and "output" not in self.limits_hit:
            self.limits_hit.append("output")
            return "output"
        most = limits.output_lines
        if most is not None and self.lines > most and "output_lines" not in self.limits_hit:
            self.limits_hit.append("output_lines")
            return "output_lines"
        return None

    def note_seconds(self, phase: Phase, seconds: float) -> None:
        self.timings[phase] = self.timings.get(phase, 0.0) + seconds

    def complete(self, report: dict[str, Any], identity: Identity | None, **more: Mapping[str, Any]) -> None:
        """Complete a monitor's report. `more`: what other parts of the session have counted."""
        report["limits_hit"] = list(dict.fromkeys((*report.get("limits_hit", ()), *self.limits_hit)))
        timings = {**report.get("timings", {}), **self.timings}
        report["timings"] = {phase: timings[phase] for phase in _TIMED if phase in timings}
        peaks = {"output": sum(self.bytes.values()), "output_lines": self.lines}
        for limit in report.get("limits", ()):
            limit["peak"] = peaks.get(limit["name"], limit["peak"])
        who = None
        if identity is not None:
            who = {"id": identity.id, "version": identity.version, "protocol": identity.protocol}
        report["session"] = {
            "identity": who,
            "claimed_id": self.claimed_id,
            "calls": dict(self.calls),
            "frames": self.frames,
            "stdout_bytes": self.bytes["stdout"],
            "stderr_bytes": self.bytes["stderr"],
            "stderr_tail": self.stderr,
            **more,
            "farewell_error": self.farewell_error,
            "forced": self.forced,
        }


# --- how it ended -------------------------------------------------------------------------------------------


def without_verdict(left: Outcome | None, ready: bool, phase: Phase) -> Outcome:
    """The outcome of a session that did not fail. `left`: how a one-shot plugin ended by itself."""
    if left is not None:
        return left
    if ready:
        return Outcome("ok", "run", "the plugin was used and ended")
    message = "the caller gave the session up before the plugin was ready"
    return Outcome("cancelled", phase, message, "given_up")


def exit_section(exit: Mapping[str, Any], verdict: Outcome | None, given_up: bool) -> dict[str, Any]:  # noqa: A002
    """The `exit` of a report. A plugin that the session ended has the session's reason, not "signal".
    `given_up`: by the caller that opened the session."""
    if exit.get("ended_by") != "signal":
        return dict(exit)  # it ended by itself, or by the monitor's own clocks and limits
    # The exit code of a kill by us is not the program's own.
    code = None if exit.get("code") == 128 + (exit.get("signal") or 0) else exit.get("code")
    return {**exit, "code": code, "ended_by": _reason(verdict, given_up), "signal": None}


def _reason(verdict: Outcome | None, given_up: bool) -> SessionReason:
    if verdict is None:
        return "cancelled" if given_up else "deadline"  # it did not end in time when it was asked to
    if verdict.code == "launch_failed":
        return "launch"
    if verdict.code == "timeout":
        return "deadline"
    if verdict.code in ("cancelled", "internal"):
        return "cancelled"
    return "limit" if verdict.cause == "output" else "violation"


def with_signal(report: dict[str, Any], number: int) -> dict[str, Any]:
    """The report of a session that was given up because the runner received a signal."""
    exit = report.get("exit")  # noqa: A001
    if not isinstance(exit, dict) or exit.get("ended_by") != "cancelled":
        return report
    return {**report, "exit": {**exit, "ended_by": "signal", "signal": number}}
