"""runner explain: what a plugin asks for, what it gets, and why the rest is refused."""

from __future__ import annotations

import os
import sys

from runner.cli.shared import text as printing
from runner.cli.shared.options import add_command_invocation, add_invocation, invocation_of
from runner.cli.shared.text import say
from runner.contracts.contract import Declarations
from runner.contracts.registry import choice_fault, find_contract, host_methods
from runner.launch.rehearse import rehearse
from runner.launch.report import UNSANDBOXED, describe_layers, notes, place, report
from runner.launch.stages import Decided, Planned, Stage, decided_of, limits_of, loaded_of, planned_of
from runner.launch.stdio import expected_streams
from runner.outcome import EXIT, Failure, Outcome
from runner.plugin import Plugin
from sandbox.document.diagnostic import printable
from sandbox.paths.denied_paths import normal
from sandbox.plan.plan import OVERLAID, LaunchPlan, ShownPath
from sandbox.policy.policy import matches
from sandbox.seccomp import filter as seccomp_filter
from sandbox.spec import Denial, Limits
from sandbox.speed.plain import read_plain_explain
from sandbox.speed.typed import TYPE_CHECKING, Any, Iterable, Sequence
from sandbox.units import format_limit

if TYPE_CHECKING:
    import argparse

    from sandbox.plan.layers import Layer
    from sandbox.plan.owners import Ownership

_DIGEST_CHARACTERS = len("sha256:") + 12

NAME = "explain"
EXAMPLE = "runner explain --policy strict ./my-plugin"
PASSES_ARGUMENTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=False)
    _add_output(parser)
    parser.usage = f"{parser.usage}\n       {parser.prog} [options] -- COMMAND"


def add_command_arguments(parser: argparse.ArgumentParser) -> None:
    add_command_invocation(parser)
    _add_output(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=("text", "json", "argv"),
        default="text",
        help="a table for people, a document for programs, or the bwrap command line for bash",
    )
    parser.add_argument(
        "--network",
        action="store_true",
        help="only which hosts it would reach and by which rule (with --format text or json)",
    )


def read_usual(words: list[str]) -> argparse.Namespace | None:
    """Parse a common command line without argparse. None: argparse has to read it."""
    return read_plain_explain(words)


def run(args: argparse.Namespace) -> int:
    try:
        invocation = invocation_of(args)
        if args.network and args.format == "argv":
            raise ValueError("--network: it goes with --format text and json; leave one of them out")
    except ValueError as error:
        say(f"runner explain: {error}")
        return 2
    outcome = Outcome("ok", "plan", "the plugin may be launched")
    stage: Stage | None
    try:
        stage = rehearse(invocation, os.environ)
    except Failure as failure:
        stage, outcome = failure.stage, failure.outcome
    loaded, planned = loaded_of(stage), planned_of(stage)
    if args.network and decided_of(stage) is not None:
        from runner.cli.shared.reachable_hosts import network_document, network_lines

        if args.format == "json":
            _print_document(network_document(stage))
        else:
            say("\n".join(map(printable, network_lines(stage))), sys.stdout)
    elif args.format == "json":
        _print_document(document(stage, outcome))
    elif args.format == "argv":
        if planned is None:
            printing.failure(stage, outcome)
        else:
            print(_command_line(planned))
    elif loaded is None or outcome.code in ("manifest_invalid", "policy_invalid"):
        printing.failure(stage, outcome)
    else:
        say("\n".join(_text(stage, loaded.plugin, outcome)), sys.stdout)
    return EXIT[outcome.code]


def _print_document(found: dict[str, Any] | None) -> None:
    import json

    print(json.dumps(found, indent=2))


def document(stage: Stage | None, outcome: Outcome) -> dict[str, Any]:
    """The report of a launch that was only planned, with bubblewrap's command line."""
    full = report(stage, outcome, EXIT[outcome.code])
    kept = ("runner", "plugin", "outcome", "grant", "layers", "limits", "degraded", "notes", "diagnostics")
    loaded, decided, planned = loaded_of(stage), decided_of(stage), planned_of(stage)
    asked = [
        {"what": what, "asked": words, "verdict": verdict, "why": why}
        for what, words, verdict, why in _request_rows(stage, outcome)
    ]
    return {
        "schema": "runner.explain.v1",
        **{key: full[key] for key in kept},
        "asked": asked,
        "streams": None if decided is None else _streams(decided, decided.grant.limits),
        "capabilities": None if decided is None else decided.policy.capabilities._asdict(),
        "rights": None if loaded is None else dict(_rights(loaded.plugin)),
        "lifecycle": None if loaded is None else dict(loaded.plugin.lifecycle),
        "timeouts": None if loaded is None else dict(loaded.plugin.timeouts),
        "declarations": None if loaded is None else dict(_declarations(loaded.plugin)),
        "argv": None if planned is None else _command_line(planned),
    }


def _streams(decided: Decided, limits: Limits) -> dict[str, str]:
    return expected_streams(limits, keep_tail=decided.loaded.invocation.command is not None)


def _command_line(planned: Planned) -> str:
    from sandbox.plan import bare

    profile = seccomp_filter.filter_path(planned.plan.seccomp, seccomp_filter.machine_arch())
    command = bare.bare_command(planned.plan, planned.bwrap, profile)
    # People paste this line elsewhere, so variables of the caller are named and not shown.
    env = ((name, None if os.environ.get(name) == value else value) for name, value in command.env)
    return bare.command_line(command._replace(env=tuple(env)))


Row = tuple[str, ...]  # all rows of one table have the same length


def _request_rows(stage: Stage | None, outcome: Outcome) -> list[Row]:
    """One row for each thing the manifest asks for: kind, what, verdict, why."""
    decided, planned = decided_of(stage), planned_of(stage)
    if decided is None:
        return []
    plugin, granted = decided.loaded.plugin, decided.grant
    refused = {(d.asked, d.where): d for d in (*granted.denials, *outcome.denials)}
    by_place = {d.where: d for d in refused.values() if d.where}

    def verdict(where: tuple[str | int, ...], words: str, why: str = "") -> tuple[str, str]:
        denial = by_place.get(where) or next((d for d in refused.values() if d.asked == words), None)
        if denial is None:
            return "granted", why
        return "REFUSED" if denial.required else "withheld", _why(stage, denial)

    rows: list[Row] = []
    spec = plugin.spec
    hidden = {credential.name for credential in granted.credentials}
    missing = set()
    if planned is not None:
        missing = {shown.path for shown in planned.plan.shown if shown.state == "missing"}
    if not spec.enabled:
        refusal = ("refused", "the policy runs every plugin in a cage")
        rows.append(("sandbox", "none", *(("granted", "UNSANDBOXED") if granted.unsandboxed else refusal)))
    for path in spec.paths:
        word, why = verdict(path.where, path.path)
        if path.path in missing or word == "withheld":
            word, why = "skipped", "does not exist here"
        elif word == "granted" and path.access == "write" and (owned := _ownership_of(planned, path.path)):
            why = owned.sentence()
        rows.append((path.access, path.path, word, why))
    if spec.scratch is not None:
        why = f"in memory, {_amount('disk', granted.scratch_bytes)}, gone with the cage"
        rows.append(("scratch", spec.scratch.dest, *verdict(spec.scratch.where or ("-",), "", why)))
    for file in spec.memory_files:
        why = (
            f"the secret {file.secret}: --secret {file.secret}=@FILE"
            if file.secret
            else "brought by the call"
        )
        rows.append(("file", file.dest, "granted", f"in memory only; {why}"))
    if plugin.project is not None and plugin.project.named:
        rows.append(("cwd", plugin.project.path, *verdict(plugin.project.where, plugin.project.path)))
    if spec.network is not None:
        words = " ".join((spec.network.mode, *spec.network.hosts))
        beyond = dict(granted.decided_by).get("network") == "environment"
        why = "by the contract's environment variable, above the policy's ceiling" if beyond else ""
        rows.append(("network", words, *verdict(spec.network.where, f"network {spec.network.mode}", why)))
    if spec.seccomp is not None:
        rows.append(
            ("seccomp", spec.seccomp, *verdict(dict(spec.where).get("seccomp", ("-",)), spec.seccomp))
        )
    for variable in spec.env:
        words = variable.name if variable.value is None else f"{variable.name}=…"
        why = "a placeholder stands for its value" if variable.name in hidden else ""
        rows.append(("env", words, *verdict(variable.where, variable.name, why)))
    for text in spec.hide:
        why = "the plugin gets a placeholder; its value is put in on the way to the host"
        rows.append(("hide", text, *verdict(("-",), f"hide {text}", why)))
    for name in spec.limits._fields:
        value = getattr(spec.limits, name)
        if value is not None:
            got = getattr(granted.limits, name)
            word, why = verdict(dict(spec.where).get(name, ("-",)), name)
            if got != value:
                by = f"{_amount(name, got)}, by the {dict(granted.decided_by).get(name, 'manifest')}"
                word, why = "lowered", f"{by}; {why}" if why else by
            rows.append(("limit", f"{name} {_amount(name, value)}", word, why))
    return rows


def _ownership_of(planned: Planned | None, path: str) -> Ownership | None:
    """The owner mapping of a path that the plugin writes; None: files belong to the caller."""
    if planned is None or planned.plan.owners is None:
        return None
    inside = next((each.inside for each in planned.plan.shown if each.path == path and each.inside), path)
    return planned.plan.owners.of(normal(inside))


def _origin(planned: Planned, shown: ShownPath) -> str:
    owned = _ownership_of(planned, shown.path) if shown.access == "write" else None
    if shown.state == OVERLAID:
        return f"{shown.origin}; what it changes there is kept with its state"
    origin = f"{shown.origin}; on the host {shown.path}" if shown.inside else shown.origin
    return origin if owned is None else f"{origin}; uid {owned.uid}, {owned.method}"


def _why(stage: Stage | None, denial: Denial) -> str:
    return f"{denial.rule}: {denial.reason} ({place(stage, denial)})"


def _text(stage: Stage | None, plugin: Plugin, outcome: Outcome) -> Iterable[str]:
    decided, planned = decided_of(stage), planned_of(stage)
    granted = None if decided is None else decided.grant
    name = f"{plugin.id} {plugin.version}".rstrip()
    loaded = loaded_of(stage)
    if loaded is not None and loaded.invocation.command is not None:
        origin = loaded.invocation.command.file or "the command line"
        yield printable(f"{name} (a command) from {origin}")
    else:
        yield printable(f"{name} ({plugin.contract}) from {plugin.manifest}")
    if granted is not None:
        yield f"policy {printable(granted.policy)}"
        if granted.unsandboxed:
            yield UNSANDBOXED
    rows = _request_rows(stage, outcome)
    yield ""
    yield from _table("asked", rows) if rows else ("asked: nothing beyond what every plugin gets",)
    extra = [d for d in outcome.denials if not any(d.reason in row[3] for row in rows)]
    for denial in extra:
        yield f"  REFUSED  {printable(denial.asked)}  {printable(_why(stage, denial))}"
    if decided is not None and not decided.approval_said.is_empty:
        yield ""
        yield from _approval_lines(decided)
    if planned is not None:
        yield from _cage(planned, planned.plan)
    if limits := list(_limits(stage, outcome)):
        yield ""
        yield from _table("limits", limits)
    if decided is not None:
        rule = decided.policy.capabilities
        words = [
            (" ".join(patterns) or "nothing")
            for patterns in (rule.declare, _host_patterns(plugin, rule.host))
        ]
        yield ""
        rows = list(zip(("may declare", "may ask of its host"), words, strict=True))
        rows += [(f"by its manifest: {name}", what) for name, what in _rights(plugin)]
        yield from _table("capabilities", rows)
        if dict(plugin.exports).get("hooks"):
            yield ""
            meaning = decided.policy.on_hook_failure
            if "hook_answers" in find_contract(plugin.contract).takes:
                yield f"if a hook fails: {meaning} (on_failure under [hooks] in the policy)"
            else:
                yield "if a hook fails: it contributes nothing, and the session goes on (by its contract)"
    for title, declared in _declarations(plugin):
        yield ""
        yield from _table(title, list(declared))
    if plugin.timeouts:
        yield ""
        rows = [(word.replace("_", " "), f"{seconds:g} s") for word, seconds in plugin.timeouts]
        yield from _table("time limits of the contract and the manifest", rows)
    if plugin.lifecycle:
        yield ""
        rows = [(word.replace("_", " "), _lifecycle(value)) for word, value in plugin.lifecycle]
        yield from _table("lifecycle, for a supervisor (times in seconds)", rows)
    yield ""
    if outcome.code == "ok":
        lacking = any(note.rule == "outside" for note in notes(stage))
        yield "It would be launched" + (
            ", but paths that it names are not in the cage: see the notes." if lacking else "."
        )
        options = {} if loaded is None else dict(loaded.invocation.options)
        if fault := choice_fault(plugin, options):
            yield f"But `runner exec` would refuse it: {printable(fault.message)}"
            yield f"  {printable(fault.hint)}"
    else:
        yield f"It would NOT be launched: {outcome.code}: {printable(outcome.message)}"
        hints = [denial.hint for denial in outcome.denials if denial.hint] or [outcome.hint]
        yield from (f"  {printable(hint)}" for hint in dict.fromkeys(hints) if hint)


def _approval_lines(decided: Decided) -> Iterable[str]:
    """The approval, where it comes from, and which parts of it the policy accepts."""
    from runner.cli.approving.items import items_of
    from runner.cli.shared.text import day

    whose = [f"your yes of {day(decided.approved_at)}"] if decided.approved_at else []
    whose += ["the command line"] if decided.loaded.invocation.command is not None else []
    counts, lost = items_of(decided.approval), "DOES NOT COUNT: the policy lets nobody approve it"
    said = items_of(decided.approval_said)
    rows = [(item.kind, item.what, "counts" if item in counts else lost) for item in said]
    yield from _table(f"approved by {' and '.join(whose)}", rows)


def _rights(plugin: Plugin) -> tuple[tuple[str, str], ...]:
    return find_contract(plugin.contract).rights(plugin)


def _declarations(plugin: Plugin) -> tuple[Declarations, ...]:
    return find_contract(plugin.contract).declarations(plugin)


def _lifecycle(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _cage(planned: Planned, plan: LaunchPlan) -> Iterable[str]:
    if not planned.grant.unsandboxed:
        yield ""
        shown = [
            (path.access, path.inside or path.path, path.state, _origin(planned, path)) for path in plan.shown
        ]
        if planned.grant.scratch is not None:
            size = _amount("disk", planned.grant.scratch_bytes)
            shown.append(
                ("write", planned.grant.scratch.dest, "made at launch", f"scratch, {size} in memory")
            )
        for file in planned.grant.memory_files:
            origin = f"the secret {file.secret}" if file.secret else "the call"
            shown.append(("read", file.dest, "made at launch", f"{origin}, in memory"))
        yield from _table("in the cage", [row for row in shown if row[2] != "missing"])
    yield ""
    yield f"runs       {printable(' '.join(plan.argv))}"
    yield f"in         {printable(plan.directory)}"
    yield f"env        {printable(' '.join(name for name, _ in plan.env)) or 'empty'}"
    for name, way in _streams(planned.decided, plan.limits).items():
        yield f"{name:<10} {way}"
    yield ""
    yield from _table(
        "layers",
        [
            (layer.name, layer.effective, "DEGRADED" if layer.degraded else "", _layer_detail(layer))
            for layer in describe_layers(planned)
        ],
    )
    for note in notes(planned):
        yield f"note: {printable('; '.join(text for text in (note.message, note.hint) if text))}"


def _layer_detail(layer: Layer) -> str:
    """A digest is cut, so that it fits into the line. The JSON document has all of it."""
    if layer.detail.startswith("sha256:"):
        return f"{layer.detail[:_DIGEST_CHARACTERS]}…"
    return layer.detail


def _host_patterns(plugin: Plugin, patterns: Sequence[str]) -> list[str]:
    """The policy's patterns that are about methods of the plugin's contract."""
    methods = host_methods(find_contract(plugin.contract))
    return [pattern for pattern in patterns if any(matches([pattern], method) for method in methods)]


def _limits(stage: Stage | None, outcome: Outcome) -> Iterable[Row]:
    """One row for each limit: its name, the amount, who decided it, what enforces it, what is weak about it.

    Manifest, policy and command line may all set a limit. The lowest decides.
    """
    decided = decided_of(stage)
    if decided is None:
        return
    granted, assigned = decided.grant, limits_of(stage)
    if assigned.all:
        for limit in assigned.all:
            amount = _amount(limit.name, limit.requested)
            if limit.effective not in (None, limit.requested):
                amount += f" (in effect {_amount(limit.name, limit.effective)})"
            words = [*(["DEGRADED"] if limit.degraded else []), *([limit.detail] if limit.detail else [])]
            yield limit.name, amount, limit.decided_by, limit.enforced_by or "nothing", ": ".join(words)
        return
    # The launch was refused before the limits were assigned, most often because one cannot be enforced.
    decided_by = dict(granted.decided_by)
    for name in granted.limits._fields:
        value = getattr(granted.limits, name)
        if value is not None:
            lacking = outcome.code == "sandbox_unavailable" and outcome.cause == name
            held = "CANNOT BE HELD" if lacking else ""
            yield name, _amount(name, value), decided_by.get(name, "policy"), held, ""


def _amount(name: str, value: float | None) -> str:
    unit = {"io": "/s on each disk", "cpu": " core" if value == 1 else " cores"}.get(name, "")
    return format_limit(name, value) + unit


def _table(title: str, rows: Sequence[Row]) -> Iterable[str]:
    yield f"{title}:"
    clean = [tuple(printable(cell) for cell in row) for row in rows]
    widths = [min(48, max(map(len, column))) for column in list(zip(*clean, strict=True))[:-1]]
    for *cells, last in clean:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        yield f"  {'  '.join((*padded, last))}".rstrip()
