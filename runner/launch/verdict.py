"""Judge the end of a plugin: its Outcome, and the exit status of `runner exec`."""

from __future__ import annotations

import errno
import os

from runner.outcome import (
    EXEC_DEADLINE,
    EXEC_NO_CAGE,
    EXEC_NOT_FOUND,
    EXEC_REFUSED,
    GOOD,
    KILLED_BY_FILTER,
    LAUNCH_HINT,
    Outcome,
    Phase,
)
from sandbox.spec import Limits
from sandbox.speed.typed import TYPE_CHECKING, Iterable

if TYPE_CHECKING:
    from runner.launch.wait import End
    from sandbox.spawn.launcher import ExecReport

_CPU_TICKS_TOLERANCE = 0.75
_SIGKILL, _SIGXCPU, _SIGXFSZ, _SIGSYS = 9, 24, 25, 31

_FILTERED = Outcome(
    "sandbox_unavailable",
    "launch",
    "a seccomp filter around the runner killed the process that builds the cage (SIGSYS)",
    KILLED_BY_FILTER,
    "run `runner doctor`: it says which calls are refused",
)
DecidedBy = Iterable[tuple[str, str]]  # of a Grant


def raise_hint(limit: str, decided_by: DecidedBy = (), entry: str = "") -> str:
    """The hint that says how to raise a limit: where it was set. `entry`: the wrapped entry that the plugin
    is started by, whose command line nobody types."""
    if entry:
        words = f'"--limit", "{limit}=…"'
        return (
            f'raise the {limit} limit, up to the policy\'s ceiling: write {words} in front of "--" in {entry}'
        )
    if dict(decided_by).get(limit) == "manifest":  # the lowest decides, so an option would not raise it
        return f"raise the {limit} limit in its manifest or entry, up to the policy's ceiling"
    return f"raise the {limit} limit with --limit {limit}=…, up to the policy's ceiling"


def unheard(written: int, pending: int) -> str:
    """What is known of a plugin that did not answer a handshake. `written`: bytes on its stdout. `pending`:
    those of them that are not a whole message yet."""
    if not written:
        return "it wrote nothing to its stdout: each message has to be flushed (Python: print(…, flush=True))"
    if pending:
        return (
            f"the last {pending} bytes on its stdout are no whole message: each has to end, and to be flushed"
        )
    return "it wrote to its stdout, and no answer was among that"


TIMEOUT = Outcome(
    "timeout",
    "invocation",
    "the deadline passed",
    "deadline",
    raise_hint("deadline"),
)


def judge(end: End, limits: Limits, decided_by: DecidedBy = (), entry: str = "") -> tuple[Outcome, int]:
    """The Outcome of an end, and the exit status of `runner exec`. The first cause counts. `decided_by`: who
    set each limit. `entry`: see raise_hint."""
    code = end.exit.code
    status = code if code is not None else 128 + _SIGKILL
    hits = limits_hit(end, limits)
    if "memory" in hits:
        # Independent of the exit code: the kernel may have killed a child without the program noticing.
        message = f"the plugin ran out of memory: its limit is {amount_of('memory', limits)}"
        message += f" ({end.detail})" if end.limit == "memory" and end.detail else ""
        return Outcome("crashed", "run", message, "oom", raise_hint("memory", decided_by, entry)), status
    if end.exit.counters.oom_kills:
        message = "the plugin was killed because the machine, or a group around the runner, ran out of memory"
        return Outcome("crashed", "run", message, "oom", _AROUND_HINT), status
    if end.breach is not None:
        violation = end.breach.violation
        outcome = Outcome(
            violation.code, end.breach.phase, violation.message, violation.cause, violation.hint
        )
        if violation.code == "crashed":
            return outcome, status  # the program ended by itself
        return outcome, EXEC_DEADLINE if violation.code == "timeout" else 128 + _SIGKILL
    if end.reason == "limit" and end.limit == "machine_share":
        message = f"the plugin took more than its share of the whole machine: {end.detail}"
        outcome = Outcome("crashed", "run", message, end.limit, "raise machine_share in the policy")
        return outcome, 128 + _SIGKILL
    if end.reason == "limit" and end.limit == "kernel_memory":
        message = (
            f"the plugin was ended to save the machine's memory: what no limit counts grew by {end.detail}"
        )
        return Outcome("crashed", "run", message, end.limit, _UNCOUNTED_HINT), 128 + _SIGKILL
    if end.limit == "observer":
        outcome = Outcome("internal", "run", f"the run was ended: {end.detail}", end.limit, "start it again")
        return outcome, EXEC_NO_CAGE
    if end.lifted and (end.limit == "lifted" or end.reason in (None, "signal")):
        message = f"limits of the plugin were lifted from outside while it ran: {', '.join(end.lifted)}"
        outcome = Outcome("sandbox_unavailable", "run", message, end.lifted[0], _LIFTED_HINT)
        return outcome, EXEC_NO_CAGE
    if end.reason == "limit":
        assert end.limit is not None
        message = f"the plugin exceeded its {end.limit} limit of {amount_of(end.limit, limits)}"
        message += f" ({end.detail})" if end.detail else ""
        cause = {"output_lines": "output", "memory": "oom"}.get(end.limit, end.limit)
        outcome = Outcome("crashed", "run", message, cause, raise_hint(end.limit, decided_by, entry))
        return outcome, 128 + _SIGKILL if end.forced else status
    if end.reason == "launch" and code in (
        None,
        128 + _SIGKILL,
    ):  # otherwise it ended by itself at that moment
        after = amount_of("launch", limits)
        outcome = Outcome(
            "launch_failed", "launch", f"the program did not run after {after}", "deadline", LAUNCH_HINT
        )
        if end.exit.reached_exec:  # bubblewrap had no time to let go of the pipe that shows it
            message = f"the program was started, and its cage was not finished after {after}"
            outcome = outcome._replace(code="timeout", message=message)
        return outcome, EXEC_DEADLINE
    if end.reason == "deadline":
        return TIMEOUT._replace(hint=raise_hint("deadline", decided_by, entry)), EXEC_DEADLINE
    if end.reason == "caller_died":
        return Outcome(
            "cancelled", "run", "the process that started the runner has ended", "caller_died"
        ), 128 + _SIGKILL
    number = end.signal or 15
    if end.reason == "signal" and (end.forced or code in (None, 128 + number)):
        phase: Phase = "teardown" if end.forced else "run"
        return Outcome("cancelled", phase, f"ended by signal {number}", f"signal:{number}"), 128 + number
    if end.exit.unexecuted is not None:
        return _unexecuted(end.exit.unexecuted)
    if end.exit.signal == _SIGSYS and not end.exit.reached_exec:
        return _FILTERED, EXEC_NO_CAGE
    if code is None and end.exit.signal is not None:
        cause = f"signal:{end.exit.signal}"
        return Outcome(
            "crashed", "run", f"the cage was killed by signal {end.exit.signal}", cause
        ), 128 + end.exit.signal
    if code is None and end.exit.reached_exec:
        message = "the program ran, and nobody knows how it ended: bubblewrap ended without reporting it"
        hint = "look at what it did, then start it again"
        return Outcome("internal", "run", message, "bubblewrap", hint), EXEC_NO_CAGE
    if code is None:
        said = f"; it said: {end.exit.complaint}" if end.exit.complaint else ""
        outcome = Outcome(
            "launch_failed",
            "launch",
            f"bubblewrap could not start the program{said}",
            "bubblewrap",
            "run `runner doctor`: it says which layer this machine refuses",
        )
        return outcome, EXEC_NO_CAGE
    return _own_ending(code, hits, decided_by), code


def is_lifted(outcome: Outcome) -> bool:
    """Whether limits were lifted from outside. Then the outcome is bad whatever the plugin returned."""
    return outcome.code == "sandbox_unavailable" and outcome.phase == "run"


def is_killed_after_signal(outcome: Outcome) -> bool:
    """Whether it got a signal, and was killed because it did not end of it."""
    return outcome.code == "cancelled" and outcome.phase == "teardown"


def _unexecuted(report: ExecReport) -> tuple[Outcome, int]:
    """The Outcome if the kernel refused to execute the program in the finished cage. Faults that can be seen
    earlier are refused when the launch is planned (sandbox/paths/program.py)."""
    why = os.strerror(report.errno)
    if report.errno in (errno.ENOENT, errno.ENOTDIR) and not report.found:
        hint = "run `runner explain MANIFEST` to see what is in the cage"
        message = f"the program is not in the cage: {why}"
        return Outcome("launch_failed", "launch", message, "not_found", hint), EXEC_NOT_FOUND
    if report.errno == errno.ENOENT:
        message = "the program cannot be executed in the cage: its interpreter or loader is not there"
        hint = "install it below /usr, or in the plugin's folder; an image needs one of its own"
    elif report.errno in (errno.ENOMEM, errno.EAGAIN, errno.E2BIG):
        message = f"the program cannot be started within its limits: {why}"
        hint = "raise its memory or pids limit, or pass shorter arguments and fewer variables"
    else:
        message = f"the program cannot be executed in the cage: {why}"
        hint = "the command has to be a program for this machine or a script with a #! line, with mode o+rx"
    return Outcome("launch_failed", "launch", message, "not_executable", hint), EXEC_REFUSED


def _own_ending(code: int, hits: tuple[str, ...], decided_by: DecidedBy) -> Outcome:
    """The Outcome if the program ended by itself, or by a signal of the kernel."""
    if code == 0:
        return GOOD
    if code == 128 + _SIGSYS:
        return Outcome(
            "crashed",
            "run",
            "the seccomp filter killed the plugin, most likely for a system call of another architecture",
            "seccomp",
            "build the plugin for this machine's architecture",
        )
    # bwrap reports "killed by signal n" and "returned 128+n" as the same number. Usually it was the signal.
    words = f"was ended by signal {code - 128}" if 128 < code <= 192 else f"ended with status {code}"
    cause = f"signal:{code - 128}" if 128 < code <= 192 else f"exit:{code}"
    for name, because in (
        ("cpu_time", "it exceeded its cpu_time limit"),
        ("file_size", "it wrote a file larger than its file_size limit"),
        ("pids", "it was refused more processes, by its pids limit"),
        ("disk", "its scratch folder was full, by its disk limit"),
    ):
        if name in hits:
            hint = raise_hint(name, decided_by)
            return Outcome("crashed", "run", f"the plugin {words}: {because}", name, hint)
    return Outcome("crashed", "run", f"the plugin {words}", cause)


_LIFTED_HINT = (
    "find out which program changed the plugin's cgroup; in a systemd unit, set Delegate=yes, so that the "
    "groups below it are the unit's own"
)
_UNCOUNTED_HINT = (
    "let it use fewer sockets and pipes, and read what is in them; or raise its memory limit, to which that "
    "growth is compared (docs/limits.md says how)"
)
_AROUND_HINT = (
    "raise the limit around the runner (docker run --memory, resources.limits.memory in Kubernetes, "
    "MemoryMax= of a unit), or give the plugin a smaller memory limit"
)


def _is_full(end: End, pids: int) -> bool:
    """Whether the plugin reached its own pids limit. A group around the runner may have a lower one."""
    peak = end.exit.counters.pids_peak
    return peak is None or peak >= pids


def amount_of(name: str, limits: Limits) -> str:
    from sandbox.units import format_limit  # most launches need it for no message

    return format_limit(name, getattr(limits, name))


def limits_hit(end: End, limits: Limits) -> tuple[str, ...]:
    """The limits that the plugin reached, as counted by the kernel or the runner. Limits that only the plugin
    notices (open files, a full /tmp) are not included."""
    code, counters = end.exit.code, end.exit.counters
    used = end.exit.usage.cpu_user + end.exit.usage.cpu_system
    met = {
        "memory": bool(counters.oom_kills) and counters.own_oom,
        "pids": bool(counters.pids_refused) and limits.pids is not None and _is_full(end, limits.pids),
        "cpu": bool(counters.throttled),
        "cpu_time": limits.cpu_time is not None
        and (
            (code in (None, 128 + _SIGKILL) and used >= limits.cpu_time)
            # The kernel enforces RLIMIT_CPU in ticks, and may be some ahead of the time it reports.
            or (code == 128 + _SIGXCPU and used >= _CPU_TICKS_TOLERANCE * limits.cpu_time)
        ),
        "disk": end.exit.scratch_full,
        "file_size": code == 128 + _SIGXFSZ and (limits.file_size or limits.disk) is not None,
        "deadline": end.reason == "deadline",
        "launch": end.reason == "launch",
        "teardown": end.expired_clock == "teardown" and limits.teardown is not None,
    }
    met["deadline"] = met["deadline"] or (end.expired_clock == "deadline" and limits.deadline is not None)
    for name in (end.limit, *end.late):
        # The kernel's count of OOM kills says more about memory than our meter.
        if name is not None and (name != "memory" or not counters.oom_kills):
            met[name] = True
    return tuple(name for name in limits._fields if met.get(name))
