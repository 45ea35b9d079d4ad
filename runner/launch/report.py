"""The report: all that is known of an invocation, as one document. Its shape: report.v1.schema.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from runner import __version__
from runner.launch.prepare import Prepared
from runner.launch.start import Confined
from runner.launch.stdio import NAMES
from runner.launch.verdict import TIMEOUT, limits_hit
from runner.launch.wait import End
from runner.manifest.load import position
from runner.outcome import SCHEMA, Outcome, outcome_document
from sandbox.document.diagnostic import Diagnostic, printable
from sandbox.plan.layers import Layer
from sandbox.plan.mentions import NOTES_SHOWN
from sandbox.plan.plan import missing_note
from sandbox.policy.load import position as policy_position
from sandbox.seccomp import filter as seccomp_filter
from sandbox.spec import Denial, Limits, Note

if TYPE_CHECKING:
    from sandbox.plan.owners import Decision
    from sandbox.streams.relay import Relay

_KILLED = 128 + 9


def report(
    prepared: Prepared, outcome: Outcome, end: End | None, status: int, confined: Confined | None = None
) -> dict[str, Any]:
    """What `--report` writes."""
    plugin = prepared.plugin
    limits = None if prepared.grant is None else prepared.grant.limits
    return {
        "schema": SCHEMA,
        "runner": __version__,
        "plugin": None
        if plugin is None
        else {
            "id": plugin.id,
            "version": plugin.version,
            "contract": plugin.contract,
            "manifest": plugin.manifest,
        },
        "outcome": outcome_document(outcome),
        "exit": {
            "status": status,
            "code": None if end is None else _own_code(end),
            "reached_exec": end is not None and end.exit.reached_exec,
            "ended_by": None if end is None else end.reason,
            "signal": None if end is None else end.signal,
            "forced": end is not None and end.forced,
            "kill_incomplete": end is not None and end.exit.kill_incomplete,
            "left": [] if end is None else list(end.exit.left),
        },
        "grant": _grant_document(prepared, outcome),
        "layers": [
            {
                "layer": layer.name,
                "requested": layer.requested,
                "effective": layer.effective,
                "detail": layer.detail,
            }
            for layer in described_layers(prepared)
        ],
        "limits": list(_limit_documents(prepared, end, confined)),
        "degraded": list(degraded(prepared)),
        "limits_hit": _hits(outcome, end, limits),
        "streams": None if confined is None else dict(zip(NAMES, confined.plumbing.ways, strict=True)),
        "stderr": None if confined is None or confined.relay is None else _stderr_document(confined.relay),
        "inspection": None
        if confined is None or confined.inspection is None
        else confined.inspection.document(),
        "timings": dict(prepared.timings.phases),
        "usage": None if end is None else end.exit.usage._asdict(),
        "notes": [note._asdict() for note in notes(prepared)],
        "diagnostics": [d._asdict() for d in _diagnostics(prepared, outcome)],
    }


def notes(prepared: Prepared) -> tuple[Note, ...]:
    """What to know about the launch, as far as it came."""
    if prepared.open_plan is None or prepared.grant is None:
        return ()
    if prepared.grant.unsandboxed:
        # And sees the host as it is: nothing it names is out of its reach.
        return (Note("unsandboxed", _UNSANDBOXED),)
    # Of paths that the policy would refuse only those were let pass that are not there anyway.
    absent = [denial.asked for denial in prepared.grant.denials if _is_absent(denial)]
    found = (*prepared.open_plan.plan.notes, *map(missing_note, absent))
    missing = [note for note in found if note.rule == "missing"]
    if len(missing) <= NOTES_SHOWN:
        return found
    more = Note("missing", f"{len(missing) - NOTES_SHOWN} more paths that were asked for do not exist")
    return (*(note for note in found if note.rule != "missing"), *missing[:NOTES_SHOWN], more)


def _is_absent(denial: Denial) -> bool:
    return denial.rule in ("read_ceiling", "write_ceiling") and not denial.required


_UNSANDBOXED = "THIS PLUGIN RUNS UNSANDBOXED: its manifest asks for it and the policy allows it"


def _own_code(end: End) -> int | None:
    """What the program returned. The 137 of a kill of ours is not its own."""
    return None if end.forced and end.exit.code == _KILLED else end.exit.code


def degraded(prepared: Prepared) -> Iterator[str]:
    """The names of all that is weaker than it was meant to be. No layer is called like a limit."""
    for layer in prepared.layers:
        if layer.degraded:
            yield layer.name
    for limit in prepared.limits.all:
        if limit.degraded:
            yield limit.name


def _hits(outcome: Outcome, end: End | None, limits: Limits | None) -> list[str]:
    if end is None or limits is None:
        return ["deadline"] if outcome == TIMEOUT else []  # it can pass before anything was started
    return list(limits_hit(end, limits))


def _limit_documents(
    prepared: Prepared, end: End | None, confined: Confined | None
) -> Iterator[dict[str, Any]]:
    seen = _peaks(prepared, end, confined)
    for limit in prepared.limits.all:
        yield {**limit._asdict(), "peak": seen.get(limit.name)}


def _peaks(prepared: Prepared, end: End | None, confined: Confined | None) -> dict[str, float]:
    """The most that was seen of each limit, where somebody looked."""
    if end is None:
        return {}
    usage = end.exit.usage
    phases = prepared.timings.phases
    seen: dict[str, float | None] = {
        "memory": usage.memory_peak,
        "pids": usage.pids_peak,
        "cpu_time": usage.cpu_user + usage.cpu_system,
        # From the start of all, as the clock runs, and not of the plugin.
        "deadline": sum(seconds for phase, seconds in phases.items() if phase != "teardown"),
    }
    for meter in confined.meters if confined is not None else ():
        seen.update(meter.peaks())
    return {name: value for name, value in seen.items() if value is not None}


def _stderr_document(relay: Relay) -> dict[str, Any]:
    return {
        "bytes": relay.bytes,
        "lines": relay.lines,
        "dropped": relay.dropped,
        "tail": relay.text_tail(),
    }


def described_layers(prepared: Prepared) -> Iterator[Layer]:
    """The layers, with the filter named by its digest: only for whoever reads them, not for every launch."""
    for layer in prepared.layers:
        if layer.name == "seccomp" and not layer.degraded and prepared.open_plan is not None:
            layer = layer._replace(
                detail=seccomp_filter.digest(prepared.open_plan.plan.layers.seccomp_filter)
            )
        yield layer


def _diagnostics(prepared: Prepared, outcome: Outcome) -> tuple[Diagnostic, ...]:
    if outcome.diagnostics:
        return outcome.diagnostics
    return prepared.loaded.diagnostics if prepared.loaded is not None else ()


def _grant_document(prepared: Prepared, outcome: Outcome) -> dict[str, Any] | None:
    granted = prepared.grant
    if granted is None:
        return None
    plan = prepared.open_plan.plan if prepared.open_plan is not None else None
    denials = dict.fromkeys((*granted.denials, *outcome.denials))
    return {
        "policy": granted.policy,
        "unsandboxed": granted.unsandboxed,
        "paths": [shown._asdict() for shown in plan.shown] if plan is not None else [],
        "owners": _owner_documents(plan.owners) if plan is not None and plan.owners is not None else [],
        "network": {"mode": granted.network.mode, "hosts": list(granted.network.hosts)},
        "env": [name for name, _ in (plan.env if plan is not None else granted.env)],  # never the values
        "seccomp": granted.seccomp,
        "limits": {
            name: value
            for name in granted.limits._fields
            if (value := getattr(granted.limits, name)) is not None
        },
        "decided_by": dict(granted.decided_by),
        "denials": [denial_document(prepared, denial) for denial in denials],
    }


def _owner_documents(owners: Decision) -> list[dict[str, Any]]:
    return [
        {
            "path": each.path,
            "method": each.method,
            "uid": each.uid,
            "gid": each.gid,
            "why": each.why,
            "others": [{"uid": uid, "path": f"{each.path}/{path}"} for uid, path in each.strangers],
        }
        for each in owners.paths
    ]


def denial_document(prepared: Prepared, denial: Denial) -> dict[str, Any]:
    return {
        "rule": denial.rule,
        "asked": denial.asked,
        "reason": denial.reason,
        "hint": denial.hint,
        "required": denial.required,
        "where": place(prepared, denial),
    }


def place(prepared: Prepared, denial: Denial) -> str:
    """file:line:column of what was denied, or of the rule where nobody asked for it by name."""
    plugin, policy = prepared.plugin, prepared.policy
    if policy is not None and denial.origin and (denial.rule == "scan_limit" or denial.origin == "policy"):
        line, column = policy_position(policy, ("scan_limit",)) if denial.rule == "scan_limit" else (0, 0)
        return f"{policy.file}:{line}:{column}" if line else policy.file
    if plugin is None:
        return ""
    line, column = position(plugin, denial.where) if denial.where else (0, 0)
    return f"{plugin.manifest}:{line}:{column}" if line else plugin.manifest


def explained(prepared: Prepared, outcome: Outcome) -> list[str]:
    """For people: a line that says what, then one for each thing that stands in the way, then what to do."""
    faults = [d for d in outcome.diagnostics if d.severity == "error"]
    if len(faults) == 1:
        lines = [f"runner: {outcome.code}: {faults[0].text()}"]
        lines += [f"  {printable(faults[0].hint)}"] if faults[0].hint else []
        faults = []
    else:
        lines = [f"runner: {outcome.code}: {printable(outcome.message)}"]
    for diagnostic in faults:
        lines.append(f"  {diagnostic.text()}")
        if diagnostic.hint:
            lines.append(f"      {printable(diagnostic.hint)}")
    for denial in outcome.denials:
        what = "" if denial.asked in denial.reason else f"{printable(denial.asked)}: "
        lines.append(
            f"  {printable(place(prepared, denial))}: {denial.rule}: {what}{printable(denial.reason)}"
        )
        if denial.hint:
            lines.append(f"      {printable(denial.hint)}")
    if outcome.hint and not outcome.denials and not outcome.diagnostics:
        lines.append(f"  {printable(outcome.hint)}")
    return lines
