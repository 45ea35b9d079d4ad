"""What an error or an ending means: its Outcome, and the exit status of `runner exec`.

Three parts: errors before anything ran, the ending of a plugin, and what a session saw of one.
"""

from __future__ import annotations

import errno
import os

from runner.launch.stages import Stage, decided_of, loaded_of
from runner.outcome import (
    EXEC_DEADLINE,
    EXEC_NO_CAGE,
    EXEC_NOT_FOUND,
    EXEC_REFUSED,
    GOOD,
    Failure,
    Outcome,
    Phase,
)
from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.plan.layers import LayerUnavailable
from sandbox.plan.plan import PlanRefused
from sandbox.spec import APPROVED, Denial, Limits
from sandbox.typed import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from runner.launch.wait import End
    from sandbox.paths.executable import ProgramFault
    from sandbox.spawn.launcher import Verdict

_CPU_TICKS_TOLERANCE = 0.75
_SIGKILL, _SIGXCPU, _SIGXFSZ, _SIGSYS = 9, 24, 25, 31

# --- before anything runs -----------------------------------------------------------------------------------


def failure_of(error: Exception, stage: Stage | None) -> Failure | None:
    """What an error of the stages before the start means; None if it is none of theirs."""
    # Here and not above: the host of a session imports this module too, and launches nothing itself.
    from runner.approvals.store import ApprovalsUnusable
    from sandbox.identity.leases import UidsUnavailable
    from sandbox.identity.state import StateRefused
    from sandbox.paths.access import Unreadable
    from sandbox.paths.executable import ProgramFault
    from sandbox.plan.find_bwrap import BwrapUnusable

    match error:
        case DocumentError():
            return Failure(judge_diagnostics(error.diagnostics, "policy"), EXEC_REFUSED, stage)
        case PlanRefused():
            return Failure(judge_denials(error.denials, "plan", stage), EXEC_REFUSED, stage)
        case StateRefused():
            return _denied("plan", str(error), "state_dir", error.hint, stage)
        case Unreadable():
            return _denied("plan", str(error), "unreadable", error.hint, stage)
        case ApprovalsUnusable():
            return _denied("policy", str(error), "approvals", error.hint, stage)
        case ProgramFault():
            return Failure(*_program_outcome(error), stage)
        case LayerUnavailable():
            return _unavailable(error.layer, str(error), error.hint, stage)
        case UidsUnavailable():
            hint = "`runner doctor` shows how full the range is, `runner state list` which plugins hold uids"
            return _unavailable("uid", str(error), hint, stage)
        case BwrapUnusable():
            return _unavailable("bubblewrap", error.reason, error.hint, stage)
    return None


def _denied(phase: Phase, message: str, cause: str, hint: str, stage: Stage | None) -> Failure:
    return Failure(Outcome("policy_denied", phase, message, cause, hint), EXEC_REFUSED, stage)


def judge_diagnostics(diagnostics: tuple[Diagnostic, ...], phase: Literal["manifest", "policy"]) -> Outcome:
    """A manifest or a policy with faults."""
    errors = [d for d in diagnostics if d.severity == "error"]
    faults = "one fault" if len(errors) == 1 else f"{len(errors)} faults"
    return Outcome(
        "manifest_invalid" if phase == "manifest" else "policy_invalid",
        phase,
        f"{errors[0].file if errors else f'the {phase}'} has {faults}",
        errors[0].rule if errors else "",
        "correct what is listed" + ("; `runner check` lists the same" if phase == "manifest" else ""),
        diagnostics=diagnostics,
    )


def judge_denials(denials: tuple[Denial, ...], phase: Phase, stage: Stage | None = None) -> Outcome:
    loaded = loaded_of(stage)
    is_command = loaded is not None and loaded.invocation.command is not None
    asked = [denial for denial in denials if not denial.origin]
    things = "one thing" if len(asked) == 1 else f"{len(asked)} things"
    asker = "command line" if is_command else "manifest"
    message = f"the {asker} asks for {things} it may not have"
    if not asked and denials[0].origin == APPROVED:
        message = "the plugin may not have all of what you approved"
    elif not asked:
        message = f"{denials[0].origin} cannot be shown to the plugin"
    if denials[0].rule == "plan_outdated":
        message = "the stored plan does not fit the machine any more"
    return Outcome("policy_denied", phase, message, denials[0].rule, denials[0].hint, denials=denials)


def _unavailable(layer: str, message: str, hint: str, stage: Stage | None) -> Failure:
    return Failure(Outcome("sandbox_unavailable", "plan", message, layer, hint), EXEC_NO_CAGE, stage)


def _program_outcome(fault: ProgramFault) -> tuple[Outcome, int]:
    if fault.denied:
        return Outcome("policy_denied", "plan", str(fault), "program", fault.hint), EXEC_REFUSED
    cause = "not_executable" if fault.found else "not_found"
    status = EXEC_REFUSED if fault.found else EXEC_NOT_FOUND
    return Outcome("launch_failed", "plan", str(fault), cause, fault.hint), status


def judge_error(error: Exception) -> tuple[Outcome, int]:
    """What an error means that kept the plugin from running, and the exit status of `runner exec`."""
    from sandbox.spawn.order import SpawnError

    match error:
        case Failure():
            return error.outcome, error.exec_status
        case SpawnError():
            hint = "run `runner doctor`: it says which layer this machine refuses"
            if error.errno == errno.EAGAIN:
                hint = "no more processes can be made: raise the limit of processes (ulimit -u)"
            return Outcome("launch_failed", "launch", str(error), "spawn", hint), EXEC_NO_CAGE
        case OSError():
            # The runner itself lacks something, not the plugin: descriptors, file size, memory.
            refused = error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES)
            hint = "check the limits of the process that starts the runner (ulimit -a)"
            hint = "run `runner doctor`: it says what this machine refuses" if refused else hint
            return Outcome("launch_failed", "launch", str(error), "resources", hint), EXEC_NO_CAGE
    text = f"{type(error).__name__}: {error}"
    hint = "this is a bug in the runner: set RUNNER_DEBUG=1 for a traceback, and please report it"
    return Outcome("internal", "launch", text, "bug", hint), EXEC_NO_CAGE


def diagnose(outcome: Outcome, stage: Stage | None) -> Outcome:
    """A launch that the machine refused, in the doctor's words.

    The spawner and bubblewrap name a step. Which layer refused it has to be tried. That takes a moment, and
    only a launch that failed pays for it.
    """
    decided = decided_of(stage)
    if outcome.code != "launch_failed" or outcome.cause not in ("spawn", "bubblewrap"):
        return outcome
    if "ulimit" in outcome.hint:
        return outcome  # no layer is in the way
    if decided is None or decided.grant.unsandboxed:
        return outcome
    from sandbox.doctor.probes import first_obstacle

    policy = decided.policy
    preferred = [name for name, mode in policy.layers if mode == "prefer"]
    found = first_obstacle(os.environ, uid_range=policy.uids, preferred=preferred)
    if found is None:
        return outcome
    said = outcome.message.partition(";")[0]
    hint = " ".join(found.remedy.split())  # the doctor writes it on several lines
    message = f"{said}: {found.layer.replace('_', ' ')}: {found.summary}"
    return outcome._replace(code="sandbox_unavailable", message=message, cause=found.layer, hint=hint)


# --- how a plugin ended -------------------------------------------------------------------------------------


TIMEOUT = Outcome(
    "timeout",
    "invocation",
    "the deadline passed",
    "deadline",
    "raise the deadline limit: --deadline TIME, or in manifest and policy",
)


def judge(end: End, limits: Limits) -> tuple[Outcome, int]:
    """What an ending means, and the exit status `runner exec` passes on. First cause wins."""
    code = end.exit.code
    status = code if code is not None else 128 + _SIGKILL
    hits = limits_hit(end, limits)
    if "memory" in hits:
        # Whatever the exit code says: the kernel may have killed a child, and the program not have noticed.
        message = f"the plugin ran out of memory: its limit is {_amount('memory', limits)}"
        message += f" ({end.detail})" if end.limit == "memory" and end.detail else ""
        return Outcome("crashed", "run", message, "oom", raise_hint("memory")), status
    if end.exit.counters.oom_kills:
        message = "the plugin was killed because the machine, or a group around the runner, ran out of memory"
        return Outcome("crashed", "run", message, "oom", _AROUND_HINT), status
    if end.breach is not None:
        violation = end.breach.violation
        outcome = Outcome(
            violation.code, end.breach.phase, violation.message, violation.cause, violation.hint
        )
        if violation.code == "crashed":
            return outcome, status  # it ended by itself, with its own status
        return outcome, EXEC_DEADLINE if violation.code == "timeout" else 128 + _SIGKILL
    if end.reason == "limit" and end.limit == "machine_share":
        message = f"the plugin took more than its share of the whole machine: {end.detail}"
        outcome = Outcome("crashed", "run", message, end.limit, "raise machine_share in the policy")
        return outcome, 128 + _SIGKILL
    if end.lifted and (end.limit == "lifted" or end.reason in (None, "signal")):
        message = f"limits of the plugin were lifted from outside while it ran: {', '.join(end.lifted)}"
        outcome = Outcome("sandbox_unavailable", "run", message, end.lifted[0], _LIFTED_HINT)
        return outcome, EXEC_NO_CAGE
    if end.reason == "limit":
        assert end.limit is not None
        message = f"the plugin exceeded its {end.limit} limit of {_amount(end.limit, limits)}"
        message += f" ({end.detail})" if end.detail else ""
        cause = {"output_lines": "output", "memory": "oom"}.get(end.limit, end.limit)
        outcome = Outcome("crashed", "run", message, cause, raise_hint(end.limit))
        return outcome, 128 + _SIGKILL if end.forced else status
    if end.reason == "launch" and code in (None, 128 + _SIGKILL):  # else it ended by itself just then
        outcome = Outcome(
            "launch_failed",
            "launch",
            f"the program did not run after {_amount('launch', limits)}",
            "deadline",
            _LAUNCH_HINT,
        )
        return outcome, EXEC_DEADLINE
    if end.reason == "deadline":
        return TIMEOUT, EXEC_DEADLINE
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
    if code is None and end.exit.signal is not None:
        cause = f"signal:{end.exit.signal}"
        return Outcome(
            "crashed", "run", f"the cage was killed by signal {end.exit.signal}", cause
        ), 128 + end.exit.signal
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
    return _own_ending(code, hits), code


def is_lifted(outcome: Outcome) -> bool:
    """Whether the plugin ran without its limits. Then no answer of it makes the outcome good."""
    return outcome.code == "sandbox_unavailable" and outcome.phase == "run"


def _unexecuted(verdict: Verdict) -> tuple[Outcome, int]:
    """The kernel refused to execute the program, inside a cage that was ready. Faults of the program that can
    be seen before are refused when it is planned (sandbox/paths/program.py)."""
    why = os.strerror(verdict.errno)
    if verdict.errno in (errno.ENOENT, errno.ENOTDIR) and not verdict.found:
        hint = "run `runner explain MANIFEST` to see what is in the cage"
        message = f"the program is not in the cage: {why}"
        return Outcome("launch_failed", "launch", message, "not_found", hint), EXEC_NOT_FOUND
    if verdict.errno == errno.ENOENT:
        message = "the program cannot be executed in the cage: its interpreter or loader is not there"
        hint = "install the interpreter or loader below /usr, or in the plugin's folder"
    elif verdict.errno in (errno.ENOMEM, errno.EAGAIN, errno.E2BIG):
        message = f"the program cannot be started within its limits: {why}"
        hint = "raise its memory or pids limit, or pass shorter arguments and fewer variables"
    else:
        message = f"the program cannot be executed in the cage: {why}"
        hint = "the command has to be a program for this machine or a script with a #! line, with mode o+rx"
    return Outcome("launch_failed", "launch", message, "not_executable", hint), EXEC_REFUSED


def _own_ending(code: int, hits: tuple[str, ...]) -> Outcome:
    """The program ended by itself, or the kernel sent it a signal."""
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
    # bwrap reports "killed by signal n" and "returned 128+n" as the same number. Mostly it was the signal.
    words = f"was ended by signal {code - 128}" if 128 < code <= 192 else f"ended with status {code}"
    cause = f"signal:{code - 128}" if 128 < code <= 192 else f"exit:{code}"
    for name, because in (
        ("cpu_time", "it exceeded its cpu_time limit"),
        ("file_size", "it wrote a file larger than its file_size limit"),
        ("pids", "it was refused more processes, by its pids limit"),
        ("disk", "its scratch folder was full, by its disk limit"),
    ):
        if name in hits:
            return Outcome("crashed", "run", f"the plugin {words}: {because}", name, raise_hint(name))
    return Outcome("crashed", "run", f"the plugin {words}", cause)


_LAUNCH_HINT = "raise the launch limit (--limit launch=TIME), or find out what keeps the machine busy"
_LIFTED_HINT = (
    "find out which program changed the plugin's cgroup; in a systemd unit, set Delegate=yes, so that the "
    "groups below it are the unit's own"
)
_AROUND_HINT = (
    "raise the limit around the runner (docker run --memory, resources.limits.memory in Kubernetes, "
    "MemoryMax= of a unit), or give the plugin a smaller memory limit"
)


def raise_hint(limit: str) -> str:
    """How to raise a limit."""
    return f"raise the {limit} limit in the manifest or with --limit {limit}=…, up to the policy's ceiling"


def _is_full(end: End, pids: int) -> bool:
    """Whether the plugin reached its own limit. A group around the runner may have a lower one."""
    peak = end.exit.counters.pids_peak
    return peak is None or peak >= pids


def _amount(name: str, limits: Limits) -> str:
    from sandbox.units import format_limit  # most launches need it for no message

    return format_limit(name, getattr(limits, name))


def limits_hit(end: End, limits: Limits) -> tuple[str, ...]:
    """The limits that the plugin reached, as far as the kernel or the runner count. Limits that only the
    plugin notices (open files, a full /tmp) are not among them."""
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
        "teardown": end.rang == "teardown" and limits.teardown is not None,
    }
    met["deadline"] = met["deadline"] or (end.rang == "deadline" and limits.deadline is not None)
    for name in (end.limit, *end.late):
        # The kernel's count of OOM kills says more about memory than our meter.
        if name is not None and (name != "memory" or not counters.oom_kills):
            met[name] = True
    return tuple(name for name in limits._fields if met.get(name))


# --- what a session saw ------------------------------------------------------------------------------------
#
# A session sees more of a plugin than its ending. The first cause wins: what a session has found stays the
# outcome, however the process ends that it then kills. A process that ended by itself is judged as above, and
# the session adds when that was. `stderr` is what the plugin wrote there.


def ended_early(ended: Outcome, phase: Phase, stderr: str) -> Outcome:
    """The plugin ended while the session waited for it."""
    awaited = "answered the handshake" if phase == "handshake" else "answered"
    return _early(ended, phase, f"before it {awaited}", stderr)


def ended_unasked(ended: Outcome, stderr: str) -> Outcome:
    """The plugin ended while no call was pending and nobody had asked it to end."""
    return _early(ended, "idle", "although it was not asked to end", stderr)


def _early(ended: Outcome, phase: Phase, when: str, stderr: str) -> Outcome:
    if ended.code == "ok":
        message = f"the plugin ended with status 0, {when}"
        return Outcome("crashed", phase, message, "exit:0", _stderr_hint(stderr))
    if ended.code != "crashed" or ended.phase != "run":
        return ended  # the moment is in it already, or does not matter
    hint = ended.hint or _stderr_hint(stderr)
    return ended._replace(phase=phase, message=f"{ended.message}, {when}", hint=hint)


def stream_closed(phase: Phase, stream: str, stderr: str) -> Outcome:
    """The plugin runs, and has closed a stream that the session needs."""
    message = f"the plugin closed its {stream} and went on running"
    return Outcome("crashed", phase, message, f"{stream}_closed", _stderr_hint(stderr))


def _stderr_hint(stderr: str) -> str:
    return "the plugin's stderr may say why" if stderr.strip() else "the plugin wrote nothing to its stderr"


def expired(phase: Phase, seconds: float, *, hint: str = "", limited: bool = False) -> Outcome:
    """A clock of the session ran out. `limited`: the clock is a limit, and not the contract's or the
    caller's. `hint`: what else the session knows."""
    from sandbox.units import format_limit

    what = {
        "launch": "the program did not run",
        "handshake": "the plugin did not answer the handshake",
        "call": "there was no answer",
        "idle": "the plugin sent nothing",
        "teardown": "the plugin did not end",
        "invocation": "the call was not over",
    }[phase]
    amount = format_limit("deadline", seconds)
    if phase == "launch":
        return Outcome("launch_failed", phase, f"{what} after {amount}", "deadline", hint or _LAUNCH_HINT)
    if limited:
        remedy = raise_hint("call" if phase == "invocation" else phase)
    elif phase == "handshake":
        remedy = "this is the contract's limit: find out why the plugin is slow to start"
    else:
        remedy = "raise it with --timeout"
    return Outcome("timeout", phase, f"{what} within {amount}", "deadline", hint or remedy)


def lifeless(method: str, seconds: float) -> Outcome:
    """The plugin did not answer the question whether it is alive, which was asked between calls."""
    from sandbox.units import format_limit

    message = f"there was no answer to {method} within {format_limit('deadline', seconds)}"
    hint = "this is the contract's limit: the plugin has to answer whenever it works on no call"
    return Outcome("timeout", "idle", message, "health", hint)


def chatty(most: str) -> Outcome:
    """The plugin said too much between calls."""
    message = f"the plugin sent more than {most} while it worked on no call"
    hint = "a process that waits for its next call has nothing to send: the plugin has to answer a call once"
    return Outcome("crashed", "idle", message, "unasked", hint)


def stalled(seconds: float) -> Outcome:
    from sandbox.units import format_limit

    message = f"the plugin did not read what was sent to it for {format_limit('call', seconds)}"
    hint = "the plugin has to read its stdin while it works on a call"
    return Outcome("crashed", "call", message, "write_stalled", hint)


def output_exceeded(name: str, limits: Limits, phase: Phase) -> Outcome:
    message = f"the plugin wrote more than its {name} limit of {_amount(name, limits)}"
    return Outcome("crashed", phase, message, "output", raise_hint(name))


def after_answer(ended: Outcome, forced: bool, seconds: float) -> Outcome:
    """For contracts in which the plugin has to end after its answer."""
    if forced:
        from sandbox.units import format_limit

        message = f"the plugin answered, but did not end within {format_limit('teardown', seconds)}"
        hint = "the plugin has to exit when its stdin is closed"
        return Outcome("crashed", "teardown", message, "no_exit", hint)
    if ended.code == "crashed":
        return ended._replace(phase="teardown", message=f"{ended.message}, after it had answered")
    return ended
