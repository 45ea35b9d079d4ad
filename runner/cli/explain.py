"""runner explain: what a plugin asks, what it gets, what it is refused and why."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from runner.cli import text as printing
from runner.cli.options import add_invocation, invocation_of
from runner.launch.prepare import Prepared, ready
from runner.launch.report import described_layers, notes, place, report
from runner.launch.stdio import foreseen
from runner.outcome import EXIT, Failure, Outcome
from runner.plugin import Plugin
from sandbox.document.diagnostic import printable
from sandbox.paths.denied_paths import normal
from sandbox.plan import bwrap
from sandbox.plan.plan import LaunchPlan, ShownPath
from sandbox.seccomp import filter as seccomp_filter
from sandbox.spec import Denial
from sandbox.units import format_limit

if TYPE_CHECKING:
    import argparse

    from sandbox.plan.owners import Ownership

NAME = "explain"
HELP = "show what a plugin asks for, what it would get, what it is refused and why"
EXAMPLE = "runner explain --policy strict ./my-plugin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=False)
    parser.add_argument(
        "--format",
        choices=("text", "json", "argv"),
        default="text",
        help="a table for people, a document for programs, or the bwrap command line for bash",
    )


def run(args: argparse.Namespace) -> int:
    try:
        prepared = Prepared(invocation_of(args))
    except ValueError as error:
        print(f"runner explain: {error}", file=sys.stderr)
        return 2
    outcome = Outcome("ok", "plan", "the plugin may be launched")
    try:
        with ready(prepared, os.environ, rehearse=True):
            pass
    except Failure as failure:
        outcome = failure.outcome
    if args.format == "json":
        print(json.dumps(document(prepared, outcome), indent=2))
    elif args.format == "argv":
        if prepared.open_plan is None:
            printing.failure(prepared, outcome)
        else:
            print(_command_line(prepared))
    else:
        if prepared.plugin is None or outcome.code in ("manifest_invalid", "policy_invalid"):
            printing.failure(prepared, outcome)
        else:
            print("\n".join(_text(prepared, prepared.plugin, outcome)))
    return EXIT[outcome.code]


def document(prepared: Prepared, outcome: Outcome) -> dict[str, Any]:
    """As a report of a launch that has not taken place, with the command line."""
    full = report(prepared, outcome, None, EXIT[outcome.code])
    kept = ("runner", "plugin", "outcome", "grant", "layers", "limits", "degraded", "notes", "diagnostics")
    command = _command_line(prepared) if prepared.open_plan is not None else None
    asked = [
        {"what": what, "asked": words, "verdict": verdict, "why": why}
        for what, words, verdict, why in _asked(prepared, outcome)
    ]
    return {
        "schema": "runner.explain.v1",
        **{key: full[key] for key in kept},
        "asked": asked,
        "streams": None if prepared.grant is None else foreseen(prepared.grant.limits),
        "capabilities": None if prepared.policy is None else prepared.policy.capabilities._asdict(),
        "argv": command,
    }


def _command_line(prepared: Prepared) -> str:
    assert prepared.open_plan is not None
    plan = prepared.open_plan.plan
    profile = seccomp_filter.filter_path(plan.seccomp, seccomp_filter.machine_arch())
    return bwrap.command_line(plan, prepared.bwrap, profile, os.environ)


Row = tuple[str, ...]  # all of one table are equally long


def _asked(prepared: Prepared, outcome: Outcome) -> list[Row]:
    """One row for each thing the manifest asks for: kind, what, verdict, why."""
    plugin, granted = prepared.plugin, prepared.grant
    if plugin is None or granted is None:
        return []
    refused = {(d.asked, d.where): d for d in (*granted.denials, *outcome.denials)}
    by_place = {d.where: d for d in refused.values() if d.where}

    def verdict(where: tuple[str | int, ...], words: str, why: str = "") -> tuple[str, str]:
        denial = by_place.get(where) or next((d for d in refused.values() if d.asked == words), None)
        if denial is None:
            return "granted", why
        return "REFUSED" if denial.required else "withheld", _why(prepared, denial)

    rows: list[Row] = []
    spec = plugin.spec
    missing = set()
    if prepared.open_plan is not None:
        missing = {shown.path for shown in prepared.open_plan.plan.shown if shown.state == "missing"}
    if not spec.enabled:
        rows.append(
            (
                "sandbox",
                "none",
                *(("granted", "UNSANDBOXED") if granted.unsandboxed else ("refused", "always in a cage")),
            )
        )
    for path in spec.paths:
        word, why = verdict(path.where, path.path)
        if path.path in missing or word == "withheld":
            word, why = "skipped", "does not exist here"
        elif word == "granted" and path.access == "write" and (owned := _owned(prepared, path.path)):
            why = owned.sentence()
        rows.append((path.access, path.path, word, why))
    if plugin.project is not None and plugin.project.named:
        rows.append(("cwd", plugin.project.path, *verdict(plugin.project.where, plugin.project.path)))
    if spec.network is not None:
        words = " ".join((spec.network.mode, *spec.network.hosts))
        beyond = dict(granted.decided_by).get("network") == "environment"
        why = "by the contract's environment variable, beyond the policy's ceiling" if beyond else ""
        rows.append(("network", words, *verdict(spec.network.where, f"network {spec.network.mode}", why)))
    if spec.seccomp is not None:
        rows.append(
            ("seccomp", spec.seccomp, *verdict(dict(spec.where).get("seccomp", ("-",)), spec.seccomp))
        )
    for variable in spec.env:
        words = variable.name if variable.value is None else f"{variable.name}=…"
        rows.append(("env", words, *verdict(variable.where, variable.name)))
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


def _owned(prepared: Prepared, path: str) -> Ownership | None:
    """Whose is what the plugin writes there; None where no uid is changed for it."""
    owners = prepared.open_plan.plan.owners if prepared.open_plan is not None else None
    return owners.of(normal(path)) if owners is not None else None


def _origin(prepared: Prepared, shown: ShownPath) -> str:
    owned = _owned(prepared, shown.path) if shown.access == "write" else None
    return shown.origin if owned is None else f"{shown.origin}; uid {owned.uid}, {owned.method}"


def _why(prepared: Prepared, denial: Denial) -> str:
    return f"{denial.rule}: {denial.reason} ({place(prepared, denial)})"


def _text(prepared: Prepared, plugin: Plugin, outcome: Outcome) -> Iterable[str]:
    granted = prepared.grant
    name = f"{plugin.id} {plugin.version}".rstrip()
    yield printable(f"{name} ({plugin.contract}) from {plugin.manifest}")
    if granted is not None:
        yield f"policy {printable(granted.policy)}"
        if granted.unsandboxed:
            yield "THIS PLUGIN RUNS UNSANDBOXED: its manifest asks for it and the policy allows it"
    rows = _asked(prepared, outcome)
    yield ""
    yield from _table("asked", rows) if rows else ("asked: nothing beyond the plain cage",)
    extra = [d for d in outcome.denials if not any(d.reason in row[3] for row in rows)]
    for denial in extra:
        yield f"  REFUSED  {printable(denial.asked)}  {printable(_why(prepared, denial))}"
    if prepared.open_plan is not None:
        yield from _cage(prepared, prepared.open_plan.plan)
    if limits := list(_limits(prepared, outcome)):
        yield ""
        yield from _table("limits", limits)
    if prepared.policy is not None:
        rule = prepared.policy.capabilities
        words = [(" ".join(patterns) or "nothing") for patterns in (rule.declare, rule.host)]
        yield ""
        yield from _table(
            "capabilities", list(zip(("may declare", "may ask of its host"), words, strict=True))
        )
        if dict(plugin.exports).get("hooks"):
            yield ""
            meaning = prepared.policy.on_hook_failure
            yield f"if a hook fails: {meaning} (on_failure under [hooks] in the policy)"
    yield ""
    if outcome.code == "ok":
        lacking = any(note.rule == "outside" for note in notes(prepared))
        yield "It would be launched" + (
            ", but not with all that it names: see the notes." if lacking else "."
        )
    else:
        yield f"It would NOT be launched: {outcome.code}: {printable(outcome.message)}"
        hints = [denial.hint for denial in outcome.denials if denial.hint] or [outcome.hint]
        yield from (f"  {printable(hint)}" for hint in dict.fromkeys(hints) if hint)


def _cage(prepared: Prepared, plan: LaunchPlan) -> Iterable[str]:
    if prepared.grant is not None and not prepared.grant.unsandboxed:
        yield ""
        shown = [(path.access, path.path, path.state, _origin(prepared, path)) for path in plan.shown]
        yield from _table("in the cage", [row for row in shown if row[2] != "missing"])
    yield ""
    yield f"runs       {printable(' '.join(plan.argv))}"
    yield f"in         {printable(plan.directory)}"
    yield f"env        {printable(' '.join(name for name, _ in plan.env)) or 'empty'}"
    for name, way in foreseen(plan.limits).items():
        yield f"{name:<10} {way}"
    yield ""
    yield from _table(
        "layers",
        [
            (layer.name, layer.effective, "DEGRADED" if layer.degraded else "", layer.detail)
            for layer in described_layers(prepared)
        ],
    )
    for note in notes(prepared):
        yield f"note: {printable('; '.join(text for text in (note.message, note.hint) if text))}"


def _limits(prepared: Prepared, outcome: Outcome) -> Iterable[Row]:
    """One row for each limit: name, how much, whose word it is, what holds it, and what is weak about that.

    Whoever set it: manifest, policy or command line. The lowest of them decided.
    """
    granted = prepared.grant
    if granted is None:
        return
    if prepared.limits.all:
        for limit in prepared.limits.all:
            amount = _amount(limit.name, limit.requested)
            if limit.effective not in (None, limit.requested):
                amount += f" (in effect {_amount(limit.name, limit.effective)})"
            words = [*(["DEGRADED"] if limit.degraded else []), *([limit.detail] if limit.detail else [])]
            yield limit.name, amount, limit.decided_by, limit.enforced_by or "nothing", ": ".join(words)
        return
    # The launch was refused before each had its means, most often for want of one.
    decided = dict(granted.decided_by)
    for name in granted.limits._fields:
        value = getattr(granted.limits, name)
        if value is not None:
            lacking = outcome.code == "sandbox_unavailable" and outcome.cause == name
            held = "CANNOT BE HELD" if lacking else ""
            yield name, _amount(name, value), decided.get(name, "policy"), held, ""


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
