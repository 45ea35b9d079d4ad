"""Turn an error that kept a plugin from running into an Outcome and the exit status of `runner exec`."""

from __future__ import annotations

import errno

from runner.launch.stages import Stage, decided_of, loaded_of
from runner.outcome import (
    EXEC_DEADLINE,
    EXEC_NO_CAGE,
    EXEC_NOT_FOUND,
    EXEC_REFUSED,
    KILLED_BY_FILTER,
    LAUNCH_HINT,
    Failure,
    Outcome,
    Phase,
)
from sandbox import surroundings
from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.plan.layers import LayerUnavailable
from sandbox.plan.plan import PlanRefused
from sandbox.spec import APPROVED, Denial
from sandbox.speed.scopes import contextmanager
from sandbox.speed.typed import TYPE_CHECKING, Iterator, Literal

if TYPE_CHECKING:
    from sandbox.paths.executable import ProgramFault


@contextmanager
def as_failure(stage: Stage | None) -> Iterator[None]:
    """Turn errors of the stages into Failure, with the last stage that was reached."""
    try:
        yield
    except Failure as failure:
        failure.stage = failure.stage or stage
        raise
    except Exception as error:
        known = _known(error, stage)
        if known is None:
            raise
        raise known from None


# The runner itself, or the machine, has no more of something. Nothing is wrong with the file or folder that
# was about to be opened.
_SHORTAGES = {
    errno.EMFILE: "raise the limit of open files of the process that starts the runner (ulimit -n)",
    errno.ENFILE: "the machine has no more open files: end other programs, or raise fs.file-max (sysctl)",
    errno.ENOMEM: "end other programs, or raise the limit of memory of the runner (ulimit -v, its cgroup)",
    errno.ENOBUFS: "the machine has no more memory for sockets: end other programs",
    errno.EAGAIN: "no more processes can be made: raise the limit of processes (ulimit -u)",
    errno.ETIME: LAUNCH_HINT,
}


def failure_of(error: Exception, stage: Stage | None, *, ran: bool = False) -> Failure:
    """The Failure for an error of a launch. `stage`: the last that was reached. `ran`: the plugin's program
    may have run, so that the caller must not take it for one that was never started."""
    if isinstance(error, Failure):
        error.stage = error.stage or stage
        return error
    from sandbox.spawn.order import SpawnError

    # Without free descriptors nothing can be imported, and _known imports a lot.
    known = None if isinstance(error, OSError | SpawnError) else _known(error, stage)
    if known is None and ran:
        outcome, status = _unexpected(error)
        message = f"the plugin was ended, because the runner could not go on: {outcome.message}"
        return Failure(outcome._replace(code="internal", phase="run", message=message), status, stage)
    return known or Failure(*_unexpected(error), stage)


def judge_error(error: Exception) -> tuple[Outcome, int]:
    """The Outcome of an error that kept the plugin from running, and the exit status of `runner exec`."""
    failure = failure_of(error, None)
    return failure.outcome, failure.exec_status


def _known(error: Exception, stage: Stage | None) -> Failure | None:
    """The Failure for an error of the stages before the start; None for other errors."""
    behind = error.__context__
    while behind is not None:
        # BlockingIOError has EAGAIN too: a lock that another process holds.
        if isinstance(behind, OSError) and behind.errno in _SHORTAGES and behind.errno != errno.EAGAIN:
            return Failure(*_unexpected(behind), stage)
        behind = behind.__context__
    # Imported here: the host of a session imports this module too, and launches nothing itself.
    from runner.approvals.record import ApprovalsUnusable
    from sandbox.identity.leases import UidsUnavailable
    from sandbox.identity.state import StateRefused, StateUnwritable
    from sandbox.paths.access import Unreadable
    from sandbox.paths.executable import ProgramFault
    from sandbox.plan.find_bwrap import BwrapUnusable

    match error:
        case DocumentError():
            return Failure(judge_diagnostics(error.diagnostics, "policy"), EXEC_REFUSED, stage)
        case PlanRefused():
            return Failure(judge_denials(error.denials, "plan", stage), EXEC_REFUSED, stage)
        case StateUnwritable():
            outcome = Outcome("launch_failed", "plan", str(error), "state_dir", error.hint)
            return Failure(outcome, EXEC_NO_CAGE, stage)
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
    """The Outcome of faults in a manifest or a policy."""
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


def judge_denials(denials: tuple[Denial, ...], phase: Phase, stage: Stage | None) -> Outcome:
    loaded = loaded_of(stage)
    is_command = loaded is not None and loaded.invocation.command is not None
    asked = [denial for denial in denials if not denial.origin]
    things = "one thing" if len(asked) == 1 else f"{len(asked)} things"
    asker = "command line" if is_command else "manifest"
    message = f"the {asker} asks for {things} it may not have"
    if not asked and denials[0].rule.startswith("credential"):
        message = "what was to be hidden from the plugin cannot be"
    elif not asked and denials[0].origin == APPROVED:
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


def _unexpected(error: Exception) -> tuple[Outcome, int]:
    from sandbox.spawn.order import SpawnError

    match error:
        case SpawnError():
            hint = _SHORTAGES.get(
                error.errno, "run `runner doctor`: it says which layer this machine refuses"
            )
            if error.errno == errno.EDQUOT:
                hint = "each plugin has a key, and this user may have no more (/proc/key-users): end other "
                hint += "plugins, or as root raise kernel.keys.maxkeys and kernel.keys.maxbytes (sysctl)"
            late = error.errno == errno.ETIME
            outcome = Outcome("launch_failed", "launch", str(error), "deadline" if late else "spawn", hint)
            return outcome, EXEC_DEADLINE if late else EXEC_NO_CAGE
        case OSError():
            # The runner itself lacks something, not the plugin: descriptors, file size, memory.
            refused = error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES)
            hint = "run `runner doctor`: it says what this machine refuses"
            if not refused:
                other = "check the limits of the process that starts the runner (ulimit -a), and its disks"
                hint = _SHORTAGES.get(error.errno or 0, other)
            return Outcome("launch_failed", "launch", str(error), "resources", hint), EXEC_NO_CAGE
        case MemoryError():
            message, hint = "the runner has no more memory", _SHORTAGES[errno.ENOMEM]
            return Outcome("launch_failed", "launch", message, "resources", hint), EXEC_NO_CAGE
    text = f"{type(error).__name__}: {error}"
    hint = "this is a bug in the runner: set RUNNER_DEBUG=1 for a traceback, and please report it"
    return Outcome("internal", "launch", text, "bug", hint), EXEC_NO_CAGE


# Layers whose lack is seen when a launch is planned, and mostly comes with others.
_SEEN_WHEN_PLANNED = ("session_keyring", "user_namespace_lock")


def diagnose(outcome: Outcome, stage: Stage | None) -> Outcome:
    """The outcome of a launch that the machine refused, with everything that the doctor finds in the way.

    The spawner and bubblewrap name only a step. The doctor tries which layers refuse it. That takes time, so
    only a launch that failed does it.
    """
    decided = decided_of(stage)
    if outcome.cause not in ("spawn", "bubblewrap", KILLED_BY_FILTER, *_SEEN_WHEN_PLANNED):
        return outcome
    if outcome.hint in _SHORTAGES.values() or "maxkeys" in outcome.hint:
        return outcome  # no layer is at fault
    if decided is None or decided.grant.unsandboxed:
        return outcome
    from sandbox.doctor.probes import obstacles

    policy = decided.policy
    preferred = [name for name, mode in policy.layers if mode == "prefer"]
    found = obstacles(surroundings.variables(), uid_range=policy.uids, preferred=preferred)
    planned = outcome.cause in _SEEN_WHEN_PLANNED
    others = [each for each in found if each.layer != outcome.cause]
    # Each once: containers have one remedy for most of them. The doctor writes it on several lines.
    hint = "; ".join(dict.fromkeys(" ".join(each.remedy.split()) for each in found if each.remedy))
    if not others:
        prefer = f', or say {outcome.cause} = "prefer" under [layers] in the policy'
        return outcome._replace(hint=hint + prefer) if found else outcome
    told = [f"{each.layer.replace('_', ' ')}: {each.summary}" for each in others]
    if planned:
        message, cause = f"{outcome.message}. Also in the way: {'; '.join(told)}", outcome.cause
    else:
        message, cause = f"{outcome.message.partition(';')[0]}: {'; '.join(told)}", others[0].layer
    return outcome._replace(code="sandbox_unavailable", message=message, cause=cause, hint=hint)
