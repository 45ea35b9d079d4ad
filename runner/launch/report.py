"""The report: all that is known of a launch, as one document. Its schema: report.v1.schema.json.

Every function here makes its part from the last stage that the launch reached (runner/launch/stages.py).
"""

from __future__ import annotations

from runner import __version__
from runner.launch.command import environ_of_host
from runner.launch.stages import (
    Decided,
    Ended,
    Stage,
    Started,
    decided_of,
    ended_of,
    limits_of,
    loaded_of,
    planned_of,
    started_of,
)
from runner.launch.stdio import NAMES
from runner.launch.verdict import TIMEOUT, limits_hit
from runner.manifest.load import position
from runner.outcome import SCHEMA, Advice, Outcome, has_failed, outcome_document
from sandbox import surroundings
from sandbox.document.diagnostic import Diagnostic, printable
from sandbox.plan.layers import Layer
from sandbox.plan.mentions import NOTES_SHOWN
from sandbox.plan.plan import missing_note
from sandbox.policy.load import position as policy_position
from sandbox.seccomp import filter as seccomp_filter
from sandbox.spec import APPROVED, Denial, Grant, Note
from sandbox.speed.typed import TYPE_CHECKING, Any, Iterator, Mapping

if TYPE_CHECKING:
    from runner.launch.advice.scene import Scene
    from runner.launch.wait import End
    from sandbox.limits.assigned import AssignedLimits
    from sandbox.plan.owners import Decision
    from sandbox.streams.relay import Relay

_KILLED = 128 + 9


def report(stage: Stage | None, outcome: Outcome, status: int) -> dict[str, Any]:
    """The report document. `status`: the exit status."""
    loaded, started, ended = loaded_of(stage), started_of(stage), ended_of(stage)
    end = None if ended is None else ended.end
    relay = None if started is None else started.plumbing.counter
    inspection = None if started is None else started.plumbing.inspection
    return {
        "schema": SCHEMA,
        "runner": __version__,
        "plugin": None
        if loaded is None
        else {
            "id": loaded.plugin.id,
            "version": loaded.plugin.version,
            "contract": loaded.plugin.contract,
            "manifest": loaded.plugin.manifest,
        },
        "outcome": outcome_document(outcome),
        "exit": {
            "status": status,
            "code": None if end is None else _own_code(end),
            "reached_exec": end is not None and end.exit.reached_exec,
            # The kernel may be faster than the runner: it is the limit that ended it all the same.
            "ended_by": "limit" if outcome.cause == "oom" else None if end is None else end.reason,
            "signal": None if end is None else end.signal,
            "forced": end is not None and end.forced,
            "kill_incomplete": end is not None and end.exit.kill_incomplete,
            "left": [] if end is None else list(end.exit.left),
        },
        "grant": _grant_document(stage, outcome),
        "layers": [
            {
                "layer": layer.name,
                "requested": layer.requested,
                "effective": layer.effective,
                "detail": layer.detail,
            }
            for layer in describe_layers(stage)
        ],
        "limits": list(_limit_documents(stage)),
        "degraded": list(degraded(stage)),
        "limits_hit": _hits(outcome, ended),
        "streams": None if started is None else dict(zip(NAMES, started.plumbing.ways, strict=True)),
        "stderr": None if relay is None else _stderr_document(relay),
        "inspection": None if inspection is None else inspection.document(),
        "network": _network_document(stage),
        "obeyed": _obeyed_document(started),
        "staged": _staged_document(started),
        **_observed_document(ended),
        "timings": {} if stage is None else dict(stage.timings),
        "usage": None if end is None else end.exit.usage._asdict(),
        "notes": [note._asdict() for note in notes(stage)],
        "advice": [each._asdict() for each in advice(stage, outcome)],
        "diagnostics": [d._asdict() for d in _diagnostics(stage, outcome)],
    }


def advice(stage: Stage | None, outcome: Outcome) -> tuple[Advice, ...]:
    """Advice on how the cage may have caused the failure, if the plugin failed by itself."""
    if not has_failed(outcome):
        return ()
    scene, started = make_scene(stage), started_of(stage)
    if scene is None or started is None:
        return ()
    from runner.launch.advice.advice import advise

    relay = started.plumbing.stderr
    return advise(scene, "" if relay is None else relay.text_tail())


def make_scene(stage: Stage | None) -> Scene | None:
    """The scene for advice; None if the plugin was not started or has no cage."""
    started = started_of(stage)
    if started is None or started.planned.grant.unsandboxed:
        return None
    from runner.launch.advice.scene import scene_of
    from runner.launch.network_report import refused_hosts

    environ = environ_of_host(started.planned.invocation.command, surroundings.variables())
    return scene_of(started.planned, environ, refused_hosts(started))


def notes(stage: Stage | None) -> tuple[Note, ...]:
    """The notes about the launch. Empty before it is planned."""
    planned = planned_of(stage)
    if planned is None:
        return ()
    if planned.grant.unsandboxed:
        # The plugin sees the host as it is, so every path it names exists for it.
        return (Note("unsandboxed", UNSANDBOXED), *_limit_notes(planned.limits))
    # A refused path does not stop the launch only if it does not exist.
    absent = [denial.asked for denial in planned.grant.denials if _is_absent(denial)]
    both = dict.fromkeys((planned.decided.signed, planned.decided.signed_image))
    warned = tuple(Note("signature", each.warning) for each in both if each is not None and each.warning)
    found = (
        *planned.decided.notes,
        *planned.plan.notes,
        *map(missing_note, absent),
        *warned,
        *_limit_notes(planned.limits),
        *_network_notes(stage),
    )
    missing = [note for note in found if note.rule == "missing"]
    if len(missing) <= NOTES_SHOWN:
        return found
    more = Note("missing", f"{len(missing) - NOTES_SHOWN} more paths that were asked for do not exist")
    return (*(note for note in found if note.rule != "missing"), *missing[:NOTES_SHOWN], more)


def _limit_notes(limits: AssignedLimits) -> Iterator[Note]:
    if limits.announced:
        message = f"limits that are not enforced in full: {limits.shortfall()}"
        yield Note("limits", message, "the report says why, and `runner doctor` how to change it")


def _network_notes(stage: Stage | None) -> list[Note]:
    planned = planned_of(stage)
    if planned is None or planned.grant.network.mode == "none":
        return []
    from runner.launch.network_report import network_notes

    return network_notes(stage)


def _network_document(stage: Stage | None) -> dict[str, Any] | None:
    started, planned = started_of(stage), planned_of(stage)
    if planned is None or (planned.plan.egress is None and (started is None or started.audit is None)):
        return None
    from runner.launch.network_report import network_document

    return network_document(stage)


def _obeyed_document(started: Started | None) -> dict[str, Any] | None:
    """What was made in writable folders that programs outside obey. None: there was no search."""
    findings = None if started is None or started.search is None else started.search.findings
    if findings is None:
        return None
    from sandbox.paths.end_search import findings_document

    return findings_document(findings, printable)


def _staged_document(started: Started | None) -> dict[str, Any] | None:
    """The changes that wait for a person. None: its writes are not staged, or it wrote nothing."""
    if started is None or started.staged is None or not started.staged.is_kept:
        return None
    changeset = started.staged.changeset
    return {"id": changeset.id, "folders": [printable(each.real) for each in changeset.folders]}


def staged_note(found: Mapping[str, Any]) -> Note:
    """The same for people."""
    told = f"what it wrote to {', '.join(found['folders'])} waits for you"
    return Note("staged", told, f"runner diff {found['id']}; then runner apply or runner discard")


def _observed_document(ended: Ended | None) -> dict[str, Any]:
    """What `runner learn` saw. Other reports do not have this member."""
    seen = None if ended is None else ended.started.cell.observation()
    if seen is None:
        return {}
    paths = [each._asdict() for each in seen.paths]
    connections = [each._asdict() for each in seen.connections]
    return {"observed": {**seen._asdict(), "paths": paths, "connections": connections}}


def _is_absent(denial: Denial) -> bool:
    return denial.rule in ("read_ceiling", "write_ceiling") and not denial.required


UNSANDBOXED = "THIS PLUGIN RUNS UNSANDBOXED: its manifest asks for it and the policy allows it"


def _own_code(end: End) -> int | None:
    """The program's exit code. None for the 137 of a kill by the runner."""
    return None if end.forced and end.exit.code == _KILLED else end.exit.code


def degraded(stage: Stage | None) -> Iterator[str]:
    """The names of all layers and limits that are weaker than requested. No layer has the name of a limit."""
    planned = planned_of(stage)
    for layer in () if planned is None else planned.layers:
        if layer.degraded:
            yield layer.name
    for limit in limits_of(stage).all:
        if limit.degraded:
            yield limit.name


def _hits(outcome: Outcome, ended: Ended | None) -> list[str]:
    if ended is None:
        return (
            ["deadline"] if outcome[:4] == TIMEOUT[:4] else []
        )  # the deadline can pass before anything was started
    return list(limits_hit(ended.end, ended.started.planned.grant.limits))


def _limit_documents(stage: Stage | None) -> Iterator[dict[str, Any]]:
    seen = _peaks(ended_of(stage))
    for limit in limits_of(stage).all:
        yield {**limit._asdict(), "peak": seen.get(limit.name)}


def _peaks(ended: Ended | None) -> dict[str, float]:
    """The peak of each limit that was measured."""
    if ended is None:
        return {}
    usage = ended.end.exit.usage
    seen: dict[str, float | None] = {
        "memory": usage.memory_peak,
        "pids": usage.pids_peak,
        "cpu_time": usage.cpu_user + usage.cpu_system,
        # The deadline runs from the start of the invocation, and not of the plugin.
        "deadline": _deadline_seconds(ended),
    }
    planned = ended.started.planned
    if planned.plan.limits.disk is not None and not planned.provision.unsandboxed:
        seen["disk"] = 0  # without a writable folder there is no meter
    for meter in ended.started.meters:
        for name, peak in meter.peaks().items():
            seen[name] = max(peak, seen.get(name) or 0)
    return {name: value for name, value in seen.items() if value is not None}


def _deadline_seconds(ended: Ended) -> float:
    """How long it took, as its deadline counts: of a parked cell, from its release on."""
    phases = [phase for phase, _ in ended.timings]
    counted = ended.timings[phases.index("parked") + 1 :] if "parked" in phases else ended.timings
    return sum(seconds for phase, seconds in counted if phase != "teardown")


def _stderr_document(relay: Relay) -> dict[str, Any]:
    return {
        "bytes": relay.bytes,
        "lines": relay.lines,
        "dropped": relay.dropped,
        "tail": relay.text_tail(),
    }


def describe_layers(stage: Stage | None) -> Iterator[Layer]:
    """The layers, with the digest of the seccomp filter. Computed here, because not every launch needs it."""
    planned = planned_of(stage)
    for layer in () if planned is None else planned.layers:
        if layer.name == "seccomp" and not layer.degraded and planned is not None:
            layer = layer._replace(detail=seccomp_filter.digest(planned.plan.layers.seccomp_filter))
        yield layer
    if planned is None:
        return
    signed, image = planned.decided.signed, planned.decided.signed_image
    for name, each in (("signature", None if signed is image else signed), ("image_signature", image)):
        if each is not None:
            yield Layer(name, "valid", "valid", f"by {each.key_id} at {each.signed_at}, {each.digest}")


def _diagnostics(stage: Stage | None, outcome: Outcome) -> tuple[Diagnostic, ...]:
    if outcome.diagnostics:
        return outcome.diagnostics
    loaded = loaded_of(stage)
    return loaded.diagnostics if loaded is not None else ()


def _grant_document(stage: Stage | None, outcome: Outcome) -> dict[str, Any] | None:
    decided, planned = decided_of(stage), planned_of(stage)
    if decided is None:
        return None
    granted, plan = decided.grant, None if planned is None else planned.plan
    denials = dict.fromkeys((*granted.denials, *outcome.denials))
    return {
        "policy": granted.policy,
        "unsandboxed": granted.unsandboxed,
        "paths": [shown._asdict() for shown in plan.shown] if plan is not None else [],
        "scratch": _scratch_document(granted),
        "memory_files": [file._asdict() for file in granted.memory_files],  # never what is in them
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
        "approval": _approval_document(decided),
        "denials": [denial_document(stage, denial) for denial in denials],
    }


def _approval_document(decided: Decided) -> dict[str, Any] | None:
    """What a person allowed beyond the policy's ceilings; None if nothing."""
    if decided.approval_said.is_empty:
        return None
    from sandbox.policy.approval import subtract_approval

    by = ["stored"] if decided.approved_at else []
    by += ["command line"] if decided.loaded.invocation.command is not None else []
    return {
        "by": by,
        "at": decided.approved_at or None,
        "counted": decided.approval._asdict(),
        "withheld": subtract_approval(decided.approval_said, decided.approval)._asdict(),
    }


def _scratch_document(granted: Grant) -> dict[str, Any] | None:
    if granted.scratch is None:
        return None
    asked, size = granted.limits.disk, granted.scratch_bytes
    return {"path": granted.scratch.dest, "requested": asked, "effective": size}


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


def denial_document(stage: Stage | None, denial: Denial) -> dict[str, Any]:
    return {
        "rule": denial.rule,
        "asked": denial.asked,
        "reason": denial.reason,
        "hint": denial.hint,
        "required": denial.required,
        "where": place(stage, denial),
    }


def place(stage: Stage | None, denial: Denial) -> str:
    """file:line:column of the denied request, or of the policy's rule if the request has no position."""
    loaded, decided = loaded_of(stage), decided_of(stage)
    policy = None if decided is None else decided.policy
    if policy is not None and denial.origin and (denial.rule == "scan_limit" or denial.origin == "policy"):
        line, column = policy_position(policy, ("scan_limit",)) if denial.rule == "scan_limit" else (0, 0)
        return f"{policy.file}:{line}:{column}" if line else policy.file
    if loaded is None:
        return ""
    plugin, command = loaded.plugin, loaded.invocation.command
    if denial.origin == APPROVED:
        return APPROVED
    if command is not None:
        return command.file or "command line"
    line, column = position(plugin, denial.where) if denial.where else (0, 0)
    return f"{plugin.manifest}:{line}:{column}" if line else plugin.manifest


def explain_failure(stage: Stage | None, outcome: Outcome) -> list[str]:
    """Lines for people: what happened, each fault or denial, and what to do."""
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
        lines.append(f"  {printable(place(stage, denial))}: {denial.rule}: {what}{printable(denial.reason)}")
        if denial.hint:
            lines.append(f"      {printable(denial.hint)}")
    if outcome.hint and not outcome.denials and not outcome.diagnostics:
        lines.append(f"  {printable(outcome.hint)}")
    return lines
