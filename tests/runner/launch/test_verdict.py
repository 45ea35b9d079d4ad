"""What an ending means: one table."""

from __future__ import annotations

import errno
import itertools
import signal
from typing import get_args

import pytest

from runner.launch.failures import judge_error
from runner.launch.inspect.inspection import Breach
from runner.launch.verdict import judge, limits_hit
from runner.launch.wait import End, Reason
from runner.outcome import EXEC_DEADLINE, EXEC_NO_CAGE, Code, Outcome, Phase
from runner.protocol.dialect import Violation
from sandbox.cell.cell import Exit, Usage
from sandbox.limits.cgroup import Counters
from sandbox.spawn.launcher import ExecReport
from sandbox.spawn.order import SpawnError
from sandbox.spec import Limits

USAGE = Usage(1.0, 0.5, 0.5, 1 << 20)


LIFTED = Counters(lifted=("memory", "pids"))


def ended(
    code: int | None,
    *,
    killed: int | None = None,
    reason: Reason | None = None,
    number: int | None = None,
    forced: bool = False,
    limit: str | None = None,
    counters: Counters | None = None,
    used: float = 1.0,
    left: tuple[int, ...] = (),
    full: bool = False,
) -> End:
    usage = USAGE._replace(cpu_user=used / 2, cpu_system=used / 2)
    exit_ = Exit(code, code is not None, killed, usage, counters=counters or Counters(), left=left)
    exit_ = exit_._replace(scratch_full=full)
    return End(exit_, reason, number, forced, limit)


def unreported() -> End:
    """bubblewrap has started the program, and ended before it told how that ended."""
    end = ended(None)
    return end._replace(exit=end.exit._replace(reached_exec=True))


def unexecuted(number: int, *, found: bool) -> End:
    end = ended(None)
    return end._replace(exit=end.exit._replace(unexecuted=ExecReport(False, number, found)))


def by_signal(code: int | None, number: int, *, forced: bool = False) -> End:
    end = ended(code, killed=9 if code is None else None, reason="signal", number=number, forced=forced)
    return end._replace(expired_clock="teardown" if forced else None)


def by_deadline(code: int | None) -> End:
    return ended(code, killed=9 if code is None else None, reason="deadline", forced=True)


def by_caller(code: int | None) -> End:
    return ended(code, killed=9 if code is None else None, reason="caller_died", forced=True)


@pytest.mark.parametrize(
    ("end", "code", "cause", "status"),
    [
        # Its limits were lifted. What ended it before somebody saw that stays the cause.
        (ended(0, counters=LIFTED), "sandbox_unavailable", "memory", 125),
        (ended(1, counters=LIFTED), "sandbox_unavailable", "memory", 125),
        (ended(0, reason="signal", number=15, counters=LIFTED), "sandbox_unavailable", "memory", 125),
        (ended(None, reason="deadline", forced=True, counters=LIFTED), "timeout", "deadline", 124),
        (ended(0, counters=LIFTED._replace(oom_kills=1, own_oom=True)), "crashed", "oom", 0),
        # By itself: the plugin's own code.
        (ended(0), "ok", "", 0),
        (ended(1), "crashed", "exit:1", 1),
        (ended(7), "crashed", "exit:7", 7),
        # Codes that exec uses itself are the plugin's too if the plugin returns them.
        (ended(124), "crashed", "exit:124", 124),
        (ended(125), "crashed", "exit:125", 125),
        (ended(126), "crashed", "exit:126", 126),
        (ended(127), "crashed", "exit:127", 127),
        (ended(128), "crashed", "exit:128", 128),
        (ended(255), "crashed", "exit:255", 255),
        # By a signal from inside, or so it looks.
        (ended(129), "crashed", "signal:1", 129),
        (ended(128 + signal.SIGSEGV), "crashed", "signal:11", 139),
        (ended(137), "crashed", "signal:9", 137),
        (ended(192), "crashed", "signal:64", 192),
        (ended(193), "crashed", "exit:193", 193),
        (ended(128 + signal.SIGSYS), "crashed", "seccomp", 159),
        # The cage itself was killed by somebody who is not us.
        (ended(None, killed=9), "crashed", "signal:9", 137),
        (ended(None, killed=15), "crashed", "signal:15", 143),
        # It never ran.
        (ended(None), "launch_failed", "bubblewrap", 125),
        (unreported(), "internal", "bubblewrap", 125),
        # The cage stood, and the kernel did not execute the program.
        (unexecuted(errno.ENOENT, found=False), "launch_failed", "not_found", 127),
        (unexecuted(errno.ENOTDIR, found=False), "launch_failed", "not_found", 127),
        (unexecuted(errno.ENOENT, found=True), "launch_failed", "not_executable", 126),
        (unexecuted(errno.ENOEXEC, found=True), "launch_failed", "not_executable", 126),
        (unexecuted(errno.EACCES, found=True), "launch_failed", "not_executable", 126),
        (unexecuted(errno.EACCES, found=False), "launch_failed", "not_executable", 126),
        (unexecuted(errno.ENOMEM, found=True), "launch_failed", "not_executable", 126),
        # The deadline, whatever it looked like in the end.
        (by_deadline(None), "timeout", "deadline", 124),
        (by_deadline(0), "timeout", "deadline", 124),
        (by_deadline(137), "timeout", "deadline", 124),
        # Nobody is left to hear it.
        (by_caller(None), "cancelled", "caller_died", 137),
        (by_caller(0), "cancelled", "caller_died", 137),
        # We were told to end it, and had to kill it.
        (by_signal(None, 15, forced=True), "cancelled", "signal:15", 143),
        (by_signal(None, 2, forced=True), "cancelled", "signal:2", 130),
        (by_signal(0, 1, forced=True), "cancelled", "signal:1", 129),
        # … it died of what we passed on …
        (by_signal(143, 15), "cancelled", "signal:15", 143),
        (by_signal(131, 3), "cancelled", "signal:3", 131),
        # … before it was there …
        (by_signal(None, 15), "cancelled", "signal:15", 143),
        # … or it ended on its own terms, and those are passed on.
        (by_signal(0, 15), "ok", "", 0),
        (by_signal(3, 15), "crashed", "exit:3", 3),
        (by_signal(139, 15), "crashed", "signal:11", 139),
    ],
)
def test_each_ending_has_one_outcome_and_status(end: End, code: str, cause: str, status: int) -> None:
    outcome, exit_status = judge(end, Limits())
    assert (outcome.code, outcome.cause, exit_status) == (code, cause, status)
    assert outcome.message
    phases = {"timeout": "invocation", "launch_failed": "launch"}
    if code == "cancelled" and end.reason == "signal" and end.forced:
        phases = {"cancelled": "teardown"}
    assert outcome.phase == phases.get(code, "run")
    assert outcome.denials == () and outcome.diagnostics == ()


# --- limits -----------------------------------------------------------------------------------------------

XCPU, XFSZ, KILL = 128 + signal.SIGXCPU, 128 + signal.SIGXFSZ, 128 + signal.SIGKILL
LIMITS = Limits(
    memory=64 << 20, pids=10, cpu=0.5, cpu_time=5.0, file_size=1000, disk=2000, teardown=1.0, launch=2.0
)
OOM = Counters(oom_kills=1, own_oom=True)
FULL_HOUSE = Counters(pids_refused=3)
THROTTLED = Counters(throttled=9)
NONE_OF_IT = Counters(0, 0, 0, 0.0, 0.0, 0, 0)


def by_limit(name: str, code: int | None = KILL) -> End:
    return ended(code, reason="limit", forced=True, limit=name)


@pytest.mark.parametrize(
    ("end", "code", "cause", "status", "hits"),
    [
        # Counters that say nothing, and counters nobody has.
        (ended(0, counters=NONE_OF_IT), "ok", "", 0, ()),
        (ended(7, counters=NONE_OF_IT), "crashed", "exit:7", 7, ()),
        # Memory: whatever the exit code says. A child was killed, and the program none the wiser.
        (ended(0, counters=OOM), "crashed", "oom", 0, ("memory",)),
        (ended(7, counters=OOM), "crashed", "oom", 7, ("memory",)),
        (ended(KILL, counters=OOM), "crashed", "oom", 137, ("memory",)),
        (ended(None, killed=9, counters=OOM), "crashed", "oom", 137, ("memory",)),
        (ended(None, counters=OOM), "crashed", "oom", 137, ("memory",)),  # bwrap itself, before it was done
        # Processes: it was refused some. Told whenever it happened, and the cause only where it failed.
        (ended(0, counters=FULL_HOUSE), "ok", "", 0, ("pids",)),
        (ended(1, counters=FULL_HOUSE), "crashed", "pids", 1, ("pids",)),
        (ended(139, counters=FULL_HOUSE), "crashed", "pids", 139, ("pids",)),
        # A full scratch folder: likewise.
        (ended(0, full=True), "ok", "", 0, ("disk",)),
        (ended(1, full=True), "crashed", "disk", 1, ("disk",)),
        (ended(1, counters=FULL_HOUSE, full=True), "crashed", "pids", 1, ("pids", "disk")),
        # Throttled is slow, not dead.
        (ended(0, counters=THROTTLED), "ok", "", 0, ("cpu",)),
        (ended(7, counters=THROTTLED), "crashed", "exit:7", 7, ("cpu",)),
        # Processor time: by the kernel's signal, or by who looked; not by who ended in time.
        (ended(XCPU, used=5.0), "crashed", "cpu_time", XCPU, ("cpu_time",)),
        (ended(KILL, used=5.1), "crashed", "cpu_time", KILL, ("cpu_time",)),
        (ended(KILL, used=4.9), "crashed", "signal:9", KILL, ()),
        (ended(XCPU, used=4.9), "crashed", "cpu_time", XCPU, ("cpu_time",)),
        (ended(XCPU, used=1.0), "crashed", "signal:24", XCPU, ()),
        (ended(0, used=5.1), "ok", "", 0, ()),
        (ended(7, used=5.1), "crashed", "exit:7", 7, ()),
        (by_limit("cpu_time"), "crashed", "cpu_time", KILL, ("cpu_time",)),
        (by_limit("cpu_time", None), "crashed", "cpu_time", KILL, ("cpu_time",)),
        # A file too large.
        (ended(XFSZ), "crashed", "file_size", XFSZ, ("file_size",)),
        # What the runner found used up, however it looked in the end.
        (by_limit("memory"), "crashed", "oom", KILL, ("memory",)),
        (by_limit("disk"), "crashed", "disk", KILL, ("disk",)),
        (by_limit("disk", 0), "crashed", "disk", KILL, ("disk",)),
        (by_limit("disk", None), "crashed", "disk", KILL, ("disk",)),
        (by_limit("output"), "crashed", "output", KILL, ("output",)),
        (by_limit("output_lines"), "crashed", "output", KILL, ("output_lines",)),
        # No limit of its own: a number that the whole machine shares.
        (by_limit("machine_share"), "crashed", "machine_share", KILL, ()),
        (by_limit("machine_share", 0), "crashed", "machine_share", KILL, ()),
        (by_limit("kernel_memory"), "crashed", "kernel_memory", KILL, ()),
        # Clocks.
        (by_deadline(KILL), "timeout", "deadline", 124, ("deadline",)),
        (ended(None, reason="launch", forced=True), "launch_failed", "deadline", 124, ("launch",)),
        (ended(KILL, reason="launch", forced=True), "timeout", "deadline", 124, ("launch",)),
        (by_signal(KILL, 15, forced=True), "cancelled", "signal:15", 143, ("teardown",)),
        (by_signal(143, 15), "cancelled", "signal:15", 143, ()),
        (by_signal(3, 15), "crashed", "exit:3", 3, ()),
        # Not all of it could be killed: what it was ended for stays.
        (
            ended(None, reason="deadline", forced=True, left=(5, 6)),
            "timeout",
            "deadline",
            124,
            ("deadline",),
        ),
    ],
)
def test_an_ending_with_limits(end: End, code: str, cause: str, status: int, hits: tuple[str, ...]) -> None:
    limits = LIMITS._replace(output=100, output_lines=10, deadline=9.0)
    outcome, exit_status = judge(end, limits)
    assert (outcome.code, outcome.cause, exit_status) == (code, cause, status)
    assert limits_hit(end, limits) == hits
    assert bool(outcome.hint) is (code in ("timeout", "launch_failed") or cause in _REMEDIABLE)
    assert outcome.phase == _phase(outcome, end)


_REMEDIABLE = ("oom", "pids", "cpu_time", "file_size", "disk", "output", "machine_share", "kernel_memory")


def _phase(outcome: Outcome, end: End) -> str:
    if outcome.code == "cancelled":
        return "teardown" if end.forced and end.reason == "signal" else "run"
    if end.reason == "launch":
        return "launch"
    return {"timeout": "invocation", "launch_failed": "launch"}.get(outcome.code, "run")


CODES = (None, 0, 1, KILL, XCPU, XFSZ, 143, 159)
REASONS: tuple[Reason | None, ...] = (None, *get_args(Reason))


def test_a_kill_for_somebody_elses_limit() -> None:
    """Of the machine, or of a group around the runner: not its own limit, and no fault of its own."""
    limits = Limits(memory=512 << 20, pids=100)
    end = ended(KILL, counters=Counters(oom_kills=1, memory_peak=90 << 20))
    outcome, status = judge(end, limits)
    assert (outcome.code, outcome.cause, status) == ("crashed", "oom", KILL)
    assert "around the runner" in outcome.message and "512" not in outcome.message
    assert limits_hit(end, limits) == ()
    full = ended(1, counters=Counters(pids_refused=3, pids_peak=17))
    assert limits_hit(full, limits) == ()
    assert limits_hit(ended(1, counters=Counters(pids_refused=3, pids_peak=100)), limits) == ("pids",)


def test_which_clock_rang() -> None:
    limits = Limits(teardown=30.0, deadline=3.0)
    twice = by_signal(None, 15, forced=True)._replace(expired_clock=None)  # asked twice: no clock at all
    assert limits_hit(twice, limits) == ()
    assert limits_hit(twice._replace(expired_clock="deadline"), limits) == ("deadline",)
    assert limits_hit(twice._replace(expired_clock="teardown"), limits) == ("teardown",)


@pytest.mark.parametrize(("reason", "code"), list(itertools.product(REASONS, CODES)))
def test_memory_is_the_first_cause_of_all(reason: Reason | None, code: int | None) -> None:
    limit = "disk" if reason == "limit" else None
    counters = Counters(oom_kills=2, pids_refused=1, throttled=1, own_oom=True)
    end = ended(code, reason=reason, forced=reason is not None, limit=limit, counters=counters, used=9.0)
    outcome, status = judge(end, LIMITS)
    assert (outcome.code, outcome.phase, outcome.cause) == ("crashed", "run", "oom")
    assert "64 MiB" in outcome.message
    assert status == (KILL if code is None else code)


@pytest.mark.parametrize(
    ("code", "phase", "status"),
    [
        ("handshake_failed", "handshake", KILL),
        ("malformed_response", "run", KILL),
        ("timeout", "handshake", 124),
        ("crashed", "handshake", 3),  # by its own doing
    ],
)
@pytest.mark.parametrize("forced", [False, True])
def test_a_breach_of_contract(code: Code, phase: Phase, status: int, forced: bool) -> None:
    """The status does not tell who was quicker, the runner or the plugin's own end."""
    breach = Breach(Violation(code, "what it did", "why", "do this"), phase)
    end = ended(3, reason="violation", forced=forced)._replace(breach=breach)
    assert judge(end, Limits()) == (Outcome(code, phase, "what it did", "why", "do this"), status)


@pytest.mark.parametrize(("reason", "code"), list(itertools.product(get_args(Reason), CODES)))
def test_why_we_ended_it_comes_before_how_it_looks(reason: Reason, code: int | None) -> None:
    """Refused processes, used-up time and signals do not hide that we were the ones."""
    if reason == "launch" and code not in (None, KILL):
        return  # who has an exit code of its own has run: see below
    end = ended(
        code,
        reason=reason,
        number=15 if reason == "signal" else None,
        forced=True,
        limit="disk" if reason == "limit" else None,
        counters=FULL_HOUSE,
        used=9.0,
    )
    if reason == "violation":
        end = end._replace(breach=Breach(Violation("malformed_response", "m", "bad_json"), "run"))
    outcome, status = judge(end, LIMITS)
    assert (outcome.code, outcome.cause, status) == {
        "deadline": ("timeout", "deadline", 124),
        "launch": ("launch_failed" if code is None else "timeout", "deadline", 124),
        "limit": ("crashed", "disk", KILL),
        "violation": ("malformed_response", "bad_json", KILL),
        "signal": ("cancelled", "signal:15", 143),
        "caller_died": ("cancelled", "caller_died", KILL),
    }[reason]
    assert "pids" in limits_hit(end, LIMITS)  # it is told all the same


def test_who_ended_when_its_launch_was_looked_at_has_run() -> None:
    outcome, status = judge(ended(5, reason="launch", forced=True), LIMITS)
    assert (outcome.code, outcome.cause, status) == ("crashed", "exit:5", 5)


@pytest.mark.parametrize(
    ("counters", "code", "cause"),
    [
        (FULL_HOUSE, KILL, "cpu_time"),
        (FULL_HOUSE, XCPU, "cpu_time"),
        (FULL_HOUSE, XFSZ, "file_size"),
        (FULL_HOUSE, 1, "pids"),
    ],
)
def test_of_several_limits_the_one_that_ends(counters: Counters, code: int, cause: str) -> None:
    outcome, _ = judge(ended(code, counters=counters, used=9.0), LIMITS)
    assert outcome.cause == cause


@pytest.mark.parametrize(
    ("end", "limits", "hits"),
    [
        # Without a limit nothing is met, whatever the numbers.
        (ended(XCPU, used=99.0), Limits(), ()),
        (ended(XFSZ), Limits(), ()),
        (ended(XFSZ), Limits(disk=5), ("file_size",)),  # one file cannot be larger than all of them
        (by_signal(KILL, 15, forced=True), Limits(), ()),  # the runner's own patience is no limit
        # All of them, in the order of the limits and not of the events.
        (
            ended(
                KILL,
                reason="limit",
                forced=True,
                limit="output",
                counters=Counters(oom_kills=1, pids_refused=1, throttled=1, own_oom=True),
                used=9.0,
            ),
            LIMITS,
            ("memory", "pids", "cpu", "cpu_time", "output"),
        ),
        # Counted and met are two things.
        (ended(KILL, counters=NONE_OF_IT), LIMITS, ()),
        (ended(KILL, counters=Counters()), LIMITS, ()),
    ],
)
def test_which_limits_were_met(end: End, limits: Limits, hits: tuple[str, ...]) -> None:
    assert limits_hit(end, limits) == hits


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ended(0, counters=OOM), ("ran out of memory", "64 MiB")),
        (by_limit("disk"), ("disk limit of 1.95 KiB",)),
        (by_limit("cpu_time"), ("cpu_time limit of 5s",)),
        (ended(None, reason="launch", forced=True), ("did not run after 2s",)),
        (ended(XFSZ), ("ended by signal 25", "file_size limit")),
        (ended(1, counters=FULL_HOUSE), ("ended with status 1", "refused more processes")),
    ],
)
def test_messages_of_endings_name_the_limit(end: End, words: tuple[str, ...]) -> None:
    outcome, _ = judge(end, LIMITS)
    assert all(word in outcome.message for word in words), outcome.message


def test_an_unkillable_rest_is_an_attribute_of_the_end() -> None:
    assert ended(None, left=(4,)).exit.kill_incomplete
    assert not ended(None).exit.kill_incomplete


@pytest.mark.parametrize(
    ("number", "cause", "status"),
    [(errno.ETIME, "deadline", EXEC_DEADLINE), (errno.EPERM, "spawn", EXEC_NO_CAGE)],
)
def test_a_spawn_that_was_late_has_the_cause_of_the_clock(number: int, cause: str, status: int) -> None:
    outcome, found = judge_error(SpawnError("make the namespaces", number))
    assert (outcome.code, outcome.phase, outcome.cause, found) == ("launch_failed", "launch", cause, status)
    assert ("raise the launch limit" in outcome.hint) is (cause == "deadline")
