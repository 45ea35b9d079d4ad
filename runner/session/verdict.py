"""The Outcome of each failure that a session notices while the plugin runs.

The first cause wins: the session's outcome stays, however the process ends that it then kills.
A process that ended by itself is judged by its ending (runner/launch/verdict.py), and the session adds when
that was. `stderr` is what the plugin wrote there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from runner.launch.verdict import DecidedBy, amount_of, raise_hint
from runner.outcome import LAUNCH_HINT, Outcome, Phase

if TYPE_CHECKING:
    from runner.launch.remote.messages import Terms


def ended_early(ended: Outcome, phase: Phase, stderr: str) -> Outcome:
    """The plugin ended while the session waited for it."""
    awaited = "answered the handshake" if phase == "handshake" else "answered"
    return _early(ended, phase, f"before it {awaited}", stderr)


def ended_unasked(ended: Outcome, stderr: str) -> Outcome:
    """The plugin ended while no call was open, before it was asked to end."""
    return _early(ended, "idle", "although it was not asked to end", stderr)


def _early(ended: Outcome, phase: Phase, when: str, stderr: str) -> Outcome:
    if ended.code == "ok":
        message = f"the plugin ended with status 0, {when}"
        return Outcome("crashed", phase, message, "exit:0", _stderr_hint(stderr))
    if ended.code != "crashed" or ended.phase != "run":
        return ended  # its message says already when it ended, or that does not matter
    hint = ended.hint or _stderr_hint(stderr)
    return ended._replace(phase=phase, message=f"{ended.message}, {when}", hint=hint)


def stream_closed(phase: Phase, stream: str, stderr: str) -> Outcome:
    """The plugin runs, and has closed a stream that the session needs."""
    message = f"the plugin closed its {stream} and went on running"
    return Outcome("crashed", phase, message, f"{stream}_closed", _stderr_hint(stderr))


def _words(limit: str, seconds: float) -> str:
    from sandbox.units import format_limit  # most sessions need no words for what went wrong

    return format_limit(limit, seconds)


def _stderr_hint(stderr: str) -> str:
    return "the plugin's stderr may say why" if stderr.strip() else "the plugin wrote nothing to its stderr"


# How a caller of the library gives a call more time. Commands have their own words.
MORE_SECONDS = "pass more seconds to the call"


class TimeRemedies(TypedDict):
    """How such a call gets more time, and who set each limit."""

    remedy: str
    decided_by: DecidedBy


def expired(
    phase: Phase,
    seconds: float,
    *,
    hint: str = "",
    limited: bool = False,
    remedy: str = MORE_SECONDS,
    decided_by: DecidedBy = (),
) -> Outcome:
    """A clock of the session ran out. `limited`: the clock is a limit, and not the contract's or the
    caller's. `hint`: what else the session knows. `remedy`: how such a call gets more time."""
    what = {
        "launch": "the program did not run",
        "handshake": "the plugin did not answer the handshake",
        "call": "there was no answer",
        "idle": "the plugin sent nothing",
        "teardown": "the plugin did not end",
        "invocation": "the call was not over",
    }[phase]
    amount = _words("deadline", seconds)
    if phase == "launch":
        return Outcome("launch_failed", phase, f"{what} after {amount}", "deadline", hint or LAUNCH_HINT)
    if limited:
        remedy = raise_hint("call" if phase == "invocation" else phase, decided_by)
    elif phase == "invocation":
        remedy = f"{remedy}, or raise its call limit: --limit call=30s, or limits in the settings"
    elif phase == "handshake":
        remedy = "this is the contract's limit"
    if phase == "handshake" and hint:
        hint = f"{hint}; if it only needs longer: {remedy}"
    return Outcome("timeout", phase, f"{what} within {amount}", "deadline", hint or remedy)


def no_health_answer(method: str, seconds: float) -> Outcome:
    """The plugin did not answer a health check, which is sent between calls."""
    message = f"there was no answer to {method} within {_words('deadline', seconds)}"
    hint = "this is the contract's limit: the plugin has to answer whenever it works on no call"
    return Outcome("timeout", "idle", message, "health", hint)


def sent_too_much_unasked(most: str) -> Outcome:
    """The plugin sent too much between calls."""
    message = f"the plugin sent more than {most} while it worked on no call"
    hint = "a process that waits for its next call has nothing to send: the plugin has to answer a call once"
    return Outcome("crashed", "idle", message, "unasked", hint)


def stalled(phase: Phase, seconds: float) -> Outcome:
    message = f"the plugin did not read what was sent to it for {_words('call', seconds)}"
    hint = "the plugin has to read its stdin, also while it works on a call"
    return Outcome("crashed", phase, message, "write_stalled", hint)


def fell_behind(phase: Phase, message: str) -> Outcome:
    """Too many notifications wait for the plugin, or publishers waited too long for it."""
    hint = "the plugin has to handle events as fast as they are published, or subscribe to fewer topics"
    return Outcome("crashed", phase, message, "fell_behind", hint)


def deaf(seconds: float) -> Outcome:
    """A call timed out while no more answers to the plugin's own requests could be queued."""
    message = f"there was no answer within {_words('call', seconds)}, and the plugin does not read its stdin"
    hint = "answers to its own requests wait there: the plugin has to read them while it sends more"
    return Outcome("timeout", "call", message, "deadline", hint)


def output_exceeded(name: str, terms: Terms, phase: Phase) -> Outcome:
    message = f"the plugin wrote more than its {name} limit of {amount_of(name, terms.limits)}"
    return Outcome("crashed", phase, message, "output", raise_hint(name, terms.decided_by))


def after_answer(ended: Outcome, forced: bool, seconds: float) -> Outcome:
    """The outcome of a plugin that has to end after its answer."""
    if forced:
        message = f"the plugin answered, but did not end within {_words('teardown', seconds)}"
        hint = "the plugin has to exit when its stdin is closed"
        return Outcome("crashed", "teardown", message, "no_exit", hint)
    if ended.code == "crashed":
        return ended._replace(phase="teardown", message=f"{ended.message}, after it had answered")
    return ended
