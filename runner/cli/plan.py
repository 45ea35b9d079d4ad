"""runner plan: make the plan of a launch, store it for later launches, and show it."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runner.cli import exec as exec_verb
from runner.cli.shared import text as printing
from runner.cli.shared.options import invocation_of
from runner.cli.shared.text import say
from runner.contracts.registry import choice_fault
from runner.launch.read import load
from runner.launch.rehearse import rehearse
from runner.launch.report import UNSANDBOXED, describe_layers, notes, report
from runner.launch.stages import Planned, Stage, Stopwatch
from runner.launch.stored.entry import LaunchRequest, request_of
from runner.launch.stored.store import SHORTEST_SECRET, may_be_secret, store_plan
from runner.outcome import EXEC_REFUSED, EXIT, USAGE_ERROR, Failure, Outcome
from sandbox import cache, look
from sandbox.document.diagnostic import printable
from sandbox.facts import Facts
from sandbox.limits.rlimits import rlimits
from sandbox.plan import bare
from sandbox.plan.bare import (
    BareCommand,
    CommandFile,
    Ulimit,
    VariableValue,
    bare_command,
    split_hidden,
    vector,
)
from sandbox.plan.plan import Bind, Symlink, Tmpfs
from sandbox.seccomp import filter as seccomp_filter
from sandbox.speed.plain import deciding_words, read_plain
from sandbox.units import format_limit

NAME = "plan"
EXAMPLE = "runner plan --emit sh --policy strict ./my-plugin > start.sh"
PASSES_ARGUMENTS = True

SCHEMA = "runner.plan.v1"
_EMITS = ("sh", "argv", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    exec_verb.add_arguments(parser)
    parser.add_argument(
        "--emit",
        choices=_EMITS,
        help="print bubblewrap's bare command instead: a script for sh, its words each followed by a NUL, or"
        " a document for programs",
    )
    parser.add_argument("--facts", action="store_true", help="list all that the plan rests on, one per line")


def run(args: argparse.Namespace) -> int:
    try:
        invocation = invocation_of(args)
        if args.facts and args.emit is not None:
            raise ValueError("--facts: it goes without --emit; --emit json has them anyway")
    except ValueError as error:
        say(f"runner plan: {printable(str(error))}")
        return USAGE_ERROR
    request = _exec_options(args.words)
    with look.recording() as asked:
        try:
            planned = rehearse(invocation, look.environment(os.environ))
            _require_choice(planned)
        except Failure as failure:
            if args.emit == "json":
                print(json.dumps(_document(failure.stage, failure.outcome), indent=2))
            else:
                printing.failure(failure.stage, failure.outcome)
            return EXIT[failure.outcome.code]
    stored = _store(planned, asked, request)
    view = _PlanView(planned, asked.facts, stored, _env(planned), _hidden(planned, asked.facts))
    if args.emit is None:
        say("\n".join(map(printable, _text(view, args.facts))), sys.stdout)
        return EXIT["ok"]
    if args.emit == "json":
        outcome = Outcome("ok", "plan", "the plugin may be launched")
        print(json.dumps(_document(planned, outcome, view), indent=2))
        return EXIT["ok"]
    if why := _no_bare_command(view, args.emit):
        say(f"runner plan: --emit {args.emit}: {printable(why)}")
        return USAGE_ERROR
    _emit(view, args.emit)
    return EXIT["ok"]


def _require_choice(planned: Planned) -> None:
    """Check the options as `runner exec` does before it stores a plan. Raises Failure."""
    fault = choice_fault(planned.plugin, dict(planned.invocation.options))
    if fault is not None:
        outcome = Outcome("launch_failed", "manifest", fault.message, fault.cause, fault.hint)
        raise Failure(outcome, EXEC_REFUSED, planned)


# --- storing it ---------------------------------------------------------------------------------------------


class _StoredFile(NamedTuple):
    path: str  # of the file; empty: the plan is not stored
    why_not: str = ""


def _exec_options(words: list[str]) -> LaunchRequest | None:
    """The same command line for `runner exec`, without the options that only this verb has. None: `exec`
    stores no plan for such options."""
    at = words.index("--") if "--" in words else len(words)
    own: list[str] = []
    waiting = iter(words[:at])
    for word in waiting:
        if word == "--emit":
            next(waiting)
        elif word != "--facts" and not word.startswith("--emit="):
            own.append(word)
    args = read_plain(own)
    return None if args is None else request_of(deciding_words(args), words[at + 1 :], os.environ)


def _store(planned: Planned, asked: look.AskedFacts, request: LaunchRequest | None) -> _StoredFile:
    folder = cache.directory()
    if folder is None:
        off = os.environ.get("RUNNER_CACHE", "").lower() == "off"
        return _StoredFile("", "RUNNER_CACHE=off" if off else "there is no folder for a cache")
    if request is None:
        stored_with = "--policy, --contract, --server, --state-dir and --report"
        return _StoredFile("", f"runner exec decides anew with options other than {stored_with}")
    if why := store_plan(planned, asked, request):
        return _StoredFile("", why)
    name = request.name
    if name is None or cache.load(name) is None:
        return _StoredFile("", f"{folder} cannot be used: {cache.unusable(folder) or 'it cannot be written'}")
    return _StoredFile(os.path.join(folder, name))


# --- what is never shown ------------------------------------------------------------------------------------


class _Variable(NamedTuple):
    name: str
    origin: str  # who sets it: "caller", "command line", "manifest", "policy" or "runner"
    value: str | None  # None: it is not shown


class _PlanView(NamedTuple):
    planned: Planned
    facts: Facts
    stored: _StoredFile
    env: tuple[_Variable, ...]
    hidden: Mapping[str, str]  # by variable: values that may be secret


def _env(planned: Planned) -> tuple[_Variable, ...]:
    """The plugin's variables. A value is shown if manifest, policy or the runner set it, and nothing was
    filled into it."""
    overrides, rule = planned.invocation.overrides, planned.policy.env
    written = load(planned.invocation, Stopwatch()).plugin.spec.env  # before anything is filled in
    asked = {each.name: each.value for each in planned.plugin.spec.env if not each.fills}
    granted = dict(planned.grant.env)
    found = []
    for name, value in planned.plan.env:
        origin, shown = "runner", True
        if name in dict(overrides.env):
            origin, shown = "command line", False
        elif name in granted and name in dict(rule.set):
            origin = "policy"
        elif asked.get(name) is not None and granted.get(name) == asked[name]:
            origin = "manifest"
            shown = any(each.name == name and each.value == value for each in written)
        elif name in granted:
            origin, shown = "caller", False
        found.append(_Variable(name, origin, value if shown else None))
    return tuple(found)


def _hidden(planned: Planned, facts: Facts) -> dict[str, str]:
    """Values that may be secret and be a part of some word. A folder that a variable names is no secret."""
    values = {name: os.environ.get(name, "") for name in facts.variables if may_be_secret(name)}
    values |= dict(planned.invocation.overrides.env)
    return {
        name: value
        for name, value in values.items()
        if len(value) >= SHORTEST_SECRET and not (value.startswith("/") and os.path.exists(value))
    }


# --- for people ---------------------------------------------------------------------------------------------

_KINDS = {
    "places": "path",
    "listed": "folder",
    "contents": "content",
    "access": "permission",
    "attributes": "attribute",
    "alone": "cgroup",
    "variables": "variable",
    "accounts": "account",
    "identities": "identity",
}


def _text(view: _PlanView, with_facts: bool) -> Iterator[str]:
    planned, plan = view.planned, view.planned.plan
    plugin = planned.plugin
    yield f"{plugin.id} {plugin.version}".rstrip() + f" ({plugin.contract}) from {plugin.manifest}"
    if planned.grant.unsandboxed:
        yield UNSANDBOXED
    yield f"runs       {' '.join(_shown(word, view.hidden) for word in plan.argv)}"
    yield f"in         {plan.directory}"
    binds = [op for op in plan.operations if isinstance(op, Bind)]
    writable = sum(bind.writable for bind in binds) or "none"
    yield f"mounts     {len(plan.operations)}, of the host {len(binds)}, {writable} of them writable"
    weak = [layer.name for layer in describe_layers(planned) if layer.degraded]
    yield f"layers     {len(planned.layers)}, {'DEGRADED: ' + ', '.join(weak) if weak else 'none degraded'}"
    limits = [f"{each.name} {format_limit(each.name, each.requested)}" for each in planned.limits.all]
    yield f"limits     {', '.join(limits) or 'none'}"
    yield f"env        {' '.join(each.name for each in view.env) or 'empty'}"
    counts = [(kind, len(subjects)) for kind, subjects in _facts(view).items() if subjects]
    listed = ", ".join(f"{count} of kind {_KINDS[kind]}" for kind, count in counts)
    yield f"rests on   {sum(count for _, count in counts)} facts: {listed}"
    yield f"stored     {view.stored.path}" if view.stored.path else f"stored     no: {view.stored.why_not}"
    for note in notes(planned):
        yield f"note: {printing.note_text(note)}"
    if with_facts:
        yield ""
        for kind, subjects in _facts(view).items():
            yield from (f"{_KINDS[kind]:<11}{subject}" for subject in subjects)


def _shown(word: str, hidden: Mapping[str, str]) -> str:
    return "".join(
        f"${part.variable}" if isinstance(part, VariableValue) else part
        for part in split_hidden(word, hidden)
    )


def _facts(view: _PlanView) -> dict[str, list[str]]:
    """The facts that the plan rests on, by kind: names of paths and variables, without their values."""

    def shown(key: object) -> str:
        return _shown(str(key[0] if isinstance(key, tuple) else key), view.hidden)

    return {kind: sorted(set(map(shown, getattr(view.facts, kind)))) for kind in view.facts._fields}


# --- the bare command ---------------------------------------------------------------------------------------


def _command(view: _PlanView, first: int) -> BareCommand:
    plan = view.planned.plan
    profile = seccomp_filter.filter_path(plan.seccomp, seccomp_filter.machine_arch())
    env = tuple((each.name, each.value) for each in view.env)
    return bare_command(plan, view.planned.bwrap, profile, first)._replace(env=env)


def _no_bare_command(view: _PlanView, emit: str) -> str:
    """Returns why there is no bare command for this plan, or ''."""
    plan = view.planned.plan
    if view.planned.grant.unsandboxed:
        return "the plugin runs without a cage, and there is no command of bubblewrap; use runner exec"
    if plan.egress is not None and plan.egress.broker is not None and plan.egress.broker.credentials:
        return "it hides credentials, and only the runner puts placeholders there; use runner exec"
    if plan.guards:
        return (
            f"the plugin may write to {plan.guards[0].dest}, in which some names are guarded, and only the"
            " runner does that; use runner exec"
        )
    if emit == "argv":
        words = vector(_command(view, 10))
        for name, value in view.hidden.items():
            if any(value in word for word in words):
                return f"a word has the value of ${name} in it, which may be a secret; use --emit sh"
    return ""


def _emit(view: _PlanView, emit: str) -> None:
    if emit == "sh":
        command = _command(view, bare.FIRST_NUMBER)
        written = bare.script(command, list(_head(view)), _bounds(view.planned), view.hidden)
        sys.stdout.buffer.write(os.fsencode(written))
        return
    command = _command(view, 10)
    sys.stdout.buffer.write(b"".join(os.fsencode(word) + b"\0" for word in bare.vector(command)))
    if passed := " ".join(name for name, value in command.env if value is None):
        say(f"runner plan: variables that are left out: {passed}; insert --setenv NAME VALUE for each")


def _head(view: _PlanView) -> Iterator[str]:
    planned, plugin = view.planned, view.planned.plugin
    yield f"{plugin.id} {plugin.version}".rstrip() + " in a cage of bubblewrap, without the runner."
    yield "Made by `runner plan --emit sh`. Make it again when manifest, policy, runner or machine change."
    yield ""
    yield "What `runner exec` does and this script does not:"
    for line in _left_out(planned):
        yield f"- {line}"
    yield ""
    if passed := " ".join(each.name for each in view.env if each.value is None):
        yield f"The plugin gets these variables of the caller, if they are set: {passed}"
    for file in planned.plan.memory_files:
        name = file.secret or os.path.basename(file.dest)
        yield f"The file {name} of the working directory becomes {file.dest}."
    yield "Arguments of this script are passed on to the plugin."


# Limits that a script can enforce: sizes of folders in memory, and those that ulimit sets.
_HELD = ("tmp", "shm", "file_size", "open_files")


def _left_out(planned: Planned) -> Iterator[str]:
    plan = planned.plan
    yield "It opens and checks every path again. Here a path that was swapped since is used as it is."
    yield (
        "It runs the plugin with a uid of its own if root starts it. Here it gets that of nobody (65534), and"
        " what another user starts has the user's own uid."
    )
    if lost := [each.name for each in planned.limits.all if each.name not in _HELD]:
        yield f"It holds these limits, with cgroups, clocks and meters: {', '.join(lost)}."
    if plan.folders:
        yield "It limits the number of files in folders that are in memory."
    if plan.egress is not None:
        yield "It lets the plugin reach the granted hosts, by way of a gate. Here it reaches none."
    if plan.layers.session_keyring:
        yield "It gives the plugin a session keyring of its own."
    if len(plan.filters) > 1:
        yield "It refuses preallocation of disk space, for the disk limit."
    made = [shown.path for shown in plan.shown if shown.state == "made at launch"]
    if made:
        yield f"It makes and shows {', '.join(made)}."
    if plan.idmapped:
        yield "It maps the owners of folders that the plugin writes."
    yield "It writes a report, and says what the cage has to do with a failure."


_LETTERS = {resource.RLIMIT_CORE: "c", resource.RLIMIT_NOFILE: "n", resource.RLIMIT_FSIZE: "f"}
_FILE_BLOCK = 512  # the unit of ulimit -f


def _bounds(planned: Planned) -> Iterator[Ulimit]:
    for kind, soft, hard in rlimits(planned.plan.limits, open_files=planned.limits.open_files):
        if letter := _LETTERS.get(kind):
            unit = _FILE_BLOCK if letter == "f" else 1
            yield Ulimit(letter, soft // unit, hard // unit)


# --- for programs -------------------------------------------------------------------------------------------


def _document(stage: Stage | None, outcome: Outcome, view: _PlanView | None = None) -> dict[str, Any]:
    full = report(stage, outcome, EXIT[outcome.code])
    shared = ("runner", "plugin", "outcome", "layers", "limits", "diagnostics")
    document = {"schema": SCHEMA, **{key: full[key] for key in shared}}
    if view is None:
        return document

    plan = view.planned.plan
    refused = _no_bare_command(view, "json")
    command = None if refused else _command(view, 10)
    return {
        **document,
        "directory": plan.directory,
        "bwrap": view.planned.bwrap or None,
        "argv": None if command is None else [_parts(word, view.hidden) for word in vector(command)],
        "argv_refused": refused,
        "descriptors": [] if command is None else [_file_document(each) for each in command.files],
        "env": [
            {"name": name, "origin": origin, "value": None if value is None else _parts(value, view.hidden)}
            for name, origin, value in view.env
        ],
        "mounts": [_mount(op) for op in plan.operations],
        "left_out": list(_left_out(view.planned)),
        "facts": _facts(view),
        "kept": {"path": view.stored.path or None, "reason": view.stored.why_not},
    }


def _parts(word: str, hidden: Mapping[str, str]) -> Any:
    """A word as it is; or, if values that are not shown are part of it, a list of its parts."""
    found = split_hidden(word, hidden)
    if len(found) == 1 and isinstance(found[0], str):
        return word
    return [{"variable": part.variable} if isinstance(part, VariableValue) else part for part in found]


def _file_document(each: CommandFile) -> dict[str, Any]:
    if each.secret:
        return {"number": each.number, "secret": each.file}
    if each.content is None:
        return {"number": each.number, "file": each.file}
    return {"number": each.number, "content": os.fsdecode(each.content)}


def _mount(op: Any) -> dict[str, Any]:
    found = {"kind": type(op).__name__.lower(), "dest": op.dest}
    if isinstance(op, Bind):
        return {**found, "source": op.real, "writable": op.writable}
    if isinstance(op, Tmpfs):
        return {**found, "size": op.size}
    return {**found, "target": op.target} if isinstance(op, Symlink) else found
