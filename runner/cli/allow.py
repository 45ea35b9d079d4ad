"""runner allow: store, list, compare and revoke approvals."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from shlex import join
from typing import NoReturn

from runner.approvals.files import (
    ListedApproval,
    list_records,
    remove_record,
    require_safe_code,
    write_record,
)
from runner.approvals.record import (
    VERSION,
    ApprovalKey,
    ApprovalRecord,
    ApprovalsUnusable,
    approvals_folder,
    asked_of,
    digest_of,
    key_of,
    with_program,
)
from runner.approvals.store import find_approval, find_inapplicable
from runner.cli import drop_environment
from runner.cli.shared import text as printing
from runner.cli.shared.command import command_of, network_of, path_of, wrapped_record
from runner.cli.shared.options import (
    add_config,
    add_contract_options,
    add_manifest_choice,
    config_of,
    contract_options_of,
)
from runner.cli.shared.text import day, say
from runner.contracts.registry import find_contract
from runner.launch.approve import allow_command
from runner.launch.command import command_approval
from runner.launch.prepare import hold_against_policy
from runner.launch.read import load
from runner.launch.stages import Decided, Invocation, Loaded, Stopwatch
from runner.outcome import EXIT, USAGE_ERROR, Failure, Outcome
from runner.plugin import PLUGIN_PREFIX
from sandbox.document.diagnostic import printable, quoted
from sandbox.paths.homes import homes, own_home
from sandbox.paths.mounts import contains
from sandbox.policy.approval import join_approvals
from sandbox.policy.policy import private_fault, steers
from sandbox.spec import Approval, Denial, Limits, is_variable_name
from sandbox.speed.typed import Iterable, Sequence
from sandbox.speed.value import NamedTuple
from sandbox.units import format_limit

NAME = "allow"
HELP = "show what a plugin asks for, and allow it once and for all"
EXAMPLE = "runner allow ./my-plugin"
PASSES_ARGUMENTS = True

_DECLINED = _DIFFERENT = _NOT_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "manifest", metavar="MANIFEST", nargs="?", help="the plugin's manifest, or the folder it is in"
    )
    add_manifest_choice(parser)
    parser.add_argument(
        "--name", metavar="NAME", help="allow it for what runner run --name NAME -- COMMAND starts"
    )
    parser.add_argument(
        "--cwd", metavar="DIR", help="with --name: the folder of runner run --cwd or --project"
    )
    parser.add_argument(
        "--policy", metavar="NAME|FILE", help="show what counts under this policy, as for runner exec"
    )
    more = parser.add_argument_group("more than it asks for")
    for option, metavar, about in (
        ("--read", "PATH", "a file or folder, read-only"),
        ("--write", "PATH", "a file or folder, for writing"),
        ("--net", "HOST[:PORT]", "a host by name (port 443 if there is none); `host`: the whole network"),
        ("--env", "NAME", "a variable of the host's environment; NAME=VALUE: with --name, as for runner run"),
    ):
        more.add_argument(option, metavar=metavar, action="append", default=[], help=about)
    do = parser.add_argument_group("what to do")
    do.add_argument("--yes", action="store_true", help="do not ask; needed where there is no terminal")
    do.add_argument("--diff", action="store_true", help="show what is new or gone since your yes")
    do.add_argument("--list", action="store_true", help="show all that you have allowed")
    do.add_argument(
        "--revoke",
        metavar="MANIFEST|KEY",
        nargs="?",
        const="",
        help="take a yes back; --list shows the keys. Of a manifest with several it takes all, and asks",
    )
    do.add_argument("--json", action="store_true", help="with --list: print one JSON document")
    add_config(parser)
    add_contract_options(parser, "explain")
    parser.set_defaults(arguments=[])
    parser.usage = (
        f"{parser.prog} [options] MANIFEST [--server NAME]\n       {parser.prog} --name NAME -- COMMAND"
        f"\n       {parser.prog} --list | --revoke MANIFEST|KEY"
    )


def advice(message: str) -> str:
    if message.startswith("unrecognized arguments: "):
        return "a command goes behind --, as in runner allow --name NAME -- COMMAND"
    return ""


def run(args: argparse.Namespace) -> int:
    try:
        _check(args)
        if args.list:
            return print_list(as_json=args.json)
        if args.revoke is not None:
            return _revoke(args)
        invocation, added = _invocation(args), _added_approval(args)
        subject = unwrap_subject(load(invocation, Stopwatch()))
        if subject.entry is not None:
            drop_environment()  # as its launch does, so that the launch finds the approval
        if args.diff:
            return _print_diff(subject)
        return _allow(args, subject, added)
    except ValueError as error:
        say(f"runner allow: {printable(str(error))}")
        return USAGE_ERROR
    except Failure as failure:
        printing.failure(failure.stage, failure.outcome)
        return EXIT[failure.outcome.code]
    except ApprovalsUnusable as unusable:
        say(f"runner allow: {printable(str(unusable))}")
        say(f"  {printable(unusable.hint)}")
        return EXIT["policy_denied"]


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError if the options contradict each other."""
    chosen = [name for name, given in _actions(args) if given]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)}: leave all but one of them out")
    if args.json and not args.list:
        raise ValueError("--json: it goes with --list")
    more = [f"--{each}" for each in ("read", "write", "net", "env") if getattr(args, each)]
    if more and chosen:
        raise ValueError(f"{more[0]}: it does not go with {chosen[0]}")
    is_command = args.name is not None or args.arguments
    if args.list and (args.manifest is not None or is_command):
        raise ValueError("--list: it shows all approvals; leave the rest out")
    if args.list or (args.revoke and not is_command and args.manifest is None):
        return
    if args.revoke and (is_command or args.manifest is not None):
        raise ValueError(f"--revoke {args.revoke}: leave the other plugin out")
    if is_command and args.manifest is not None:
        raise ValueError(
            f"{args.manifest}: a manifest and a command do not go together; leave one of them out"
        )
    if is_command and not (args.name and args.arguments):
        raise ValueError("a command is allowed by its name: write --name NAME -- COMMAND, as for runner run")
    if not is_command and args.manifest is None:
        raise ValueError("MANIFEST is missing; or write --name NAME -- COMMAND, or --list")
    if args.cwd is not None and not is_command:
        raise ValueError("--cwd: it goes with --name NAME -- COMMAND, as for runner run")
    for option in ("policy", "contract", "server"):
        if getattr(args, option) == "":
            raise ValueError(f"--{option}: its value is empty; is a variable unset?")


def _actions(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    yield "--list", args.list
    yield "--diff", args.diff
    yield "--revoke", args.revoke is not None


# --- the plugin ---------------------------------------------------------------------------------------------


def _invocation(args: argparse.Namespace) -> Invocation:
    if args.manifest is None:
        words = argparse.Namespace(
            arguments=args.arguments,
            command_name=args.name,
            cwd=args.cwd,
            project=None,
            wrapped=None,
            env_file=None,
            env=[word for word in args.env if "=" in word],
            **{each: [] for each in ("read", "write", "net")},
        )
        return Invocation("", policy=args.policy, command=command_of(words))
    return Invocation(
        manifest=args.manifest,
        contract=args.contract,
        server=args.server,
        policy=args.policy,
        options=contract_options_of(args),
        config=config_of(args.config),
    )


def _added_approval(args: argparse.Namespace) -> Approval:
    for name in args.env:
        if "=" in name and args.manifest is None:
            continue  # the command's own: command_of reads it
        if not is_variable_name(name):
            raise ValueError(
                f"--env {name}: write the name of a variable; its value is passed on at each launch"
            )
    network = network_of(args.net)
    names = [name for name in args.env if "=" not in name]
    return Approval(
        read=tuple(dict.fromkeys(path_of("--read", word) for word in args.read)),
        write=tuple(dict.fromkeys(path_of("--write", word) for word in args.write)),
        network="none" if network is None else network.mode,
        hosts=() if network is None else network.hosts,
        env=tuple(dict.fromkeys(names)),
        steering=tuple(dict.fromkeys(name for name in names if steers(name))),
    )


# --- the question -------------------------------------------------------------------------------------------


class _Proposal(NamedTuple):
    """What is shown to the person and then recorded. Both come from one reading of the manifest."""

    subject: AllowSubject
    record: ApprovalRecord
    old: ApprovalRecord | None
    before: Decided  # without an approval
    after: Decided  # with it

    @property
    def loaded(self) -> Loaded:
        return self.subject.loaded


def _allow(args: argparse.Namespace, subject: AllowSubject, added: Approval) -> int:
    loaded = subject.loaded
    key = key_of(loaded.plugin)
    if key is None:
        raise ValueError("this plugin has no name to allow something by")
    key, code = with_program(key, loaded.plugin, os.environ)
    require_safe_code(code)
    old = find_approval(key, os.environ)
    other = find_inapplicable(key, os.environ) if old is None else None
    outdated = other if other is not None and other.version != VERSION else None
    for each in (old, outdated):
        added = added if each is None else join_approvals(each.added, added)
    is_command = loaded.invocation.command is not None
    asked = Approval() if is_command else asked_of(loaded.plugin)
    record = ApprovalRecord(key, asked, added, digest_of(loaded.plugin), time.time())
    none = ApprovalRecord(key, Approval())
    before = hold_against_policy(loaded, os.environ, none)
    after = hold_against_policy(loaded, os.environ, record)
    shown = _Proposal(subject, record, old, before, after)
    say("\n".join(map(printable, _lines(shown))), sys.stdout)
    if impossible := list(_impossible(added, after)):
        say("\n".join(f"runner allow: {printable(each)}" for each in impossible))
        say("  nothing is recorded: the plugin could not start with it")
        return EXIT["policy_denied"]
    if (failure := _launch_failure(after)) is not None and (lasting := _lasting(failure.outcome, added)):
        for told, hint in lasting:
            say(f"runner allow: {printable(told)}\n  {printable(hint)}")
        say("  nothing is recorded: the plugin could not start with it")
        return EXIT[failure.outcome.code]
    refused = {(denial.rule, denial.asked, denial.where) for denial in after.grant.denials}
    needed = [each for each in before.grant.denials if (each.rule, each.asked, each.where) not in refused]
    # The project folder is judged when the cage is planned, so it is not among the denials.
    gives_project = (before.policy.project, after.policy.project) == ("none", "read")
    if not needed and not gives_project and added.is_empty and old is None:
        return _say_needless(after, is_command=is_command)
    if not needed and not gives_project and (added.is_empty or _all_refused(added, after)):
        say("runner allow: nothing of this would count, so nothing is recorded")
        return EXIT["policy_denied"]
    if old is not None and (old.asked, old.added, old.digest) == (asked, added, record.digest):
        say(f"\nYou allowed exactly this on {day(old.when)}.", sys.stdout)
        return EXIT["ok"]
    if not args.yes and not sys.stdin.isatty():
        raise ValueError("there is no terminal to ask on; --yes allows what is shown without asking")
    if not args.yes and not _ask_person("Allow this?"):
        say("runner allow: nothing is recorded")
        return _DECLINED
    write_record(record, os.environ)
    if outdated is not None:
        remove_record(key.stem, os.environ)
    say(f"Allowed. To take it back: runner allow --revoke {key.name[:12]}", sys.stdout)
    return EXIT["ok"]


def _impossible(added: Approval, after: Decided) -> Iterator[str]:
    """Messages about paths that no approval can grant, judged by name. A launch also checks the files."""
    if not added.read and not added.write:
        return
    from runner.launch.denylist import make_denylist
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Access

    denylist = make_denylist(after, "", read_mounts(), os.environ)
    paths: tuple[tuple[Access, tuple[str, ...]], ...] = (("read", added.read), ("write", added.write))
    for access, asked in paths:
        for path in asked:
            # The real name too: make_denylist knows both, and the path may be a link.
            for name in dict.fromkeys((path, os.path.realpath(path))):
                if hit := denylist.name_hit(name, access):
                    yield f"--{access} {path}: {hit.sentence()}"
                    break


def _launch_failure(after: Decided) -> Failure | None:
    """Why the plugin could not start with the approval, by its plan; None: it could. Nothing is started."""
    from runner.launch.plan import plan
    from runner.launch.sources import Sources

    if after.grant.refused:
        return None  # told already
    try:
        with Sources() as sources:
            plan(after, os.environ, Stopwatch(), sources)
    except Failure as failure:
        return failure
    return None


def _lasting(outcome: Outcome, added: Approval) -> list[tuple[str, str]]:
    """Why an approval would be in vain, each reason with what to do: there is no program to record it for, or
    what is added cannot be given. Otherwise the machine may be at fault, and others may mend that."""
    if (outcome.code, outcome.cause) == ("launch_failed", "not_found"):
        return [(outcome.message, outcome.hint)]
    paths = (*added.read, *added.write)
    return [(f"{each.asked}: {each.reason}", each.hint) for each in outcome.denials if each.asked in paths]


def _all_refused(added: Approval, after: Decided) -> bool:
    refused = {denial.asked for denial in after.grant.denials}
    return all(item.what in refused or f"network {item.what}" in refused for item in items_of(added))


def _say_needless(after: Decided, *, is_command: bool) -> int:
    if after.grant.refused:
        say("runner allow: nothing of this can be allowed by you, so nothing is recorded")
        return EXIT["policy_denied"]
    told = f"Policy {printable(after.policy.name)} gives it all that it asks for: nothing has to be allowed."
    if is_command:
        told = "There is nothing to allow besides: add --read, --write, --net or --env."
    say(f"\n{told}", sys.stdout)
    return EXIT["ok"]


def _ask_person(question: str) -> bool:
    sys.stdout.flush()
    sys.stderr.write(f"\n{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _lines(shown: _Proposal) -> Iterator[str]:
    plugin, record = shown.loaded.plugin, shown.record
    entrypoint = plugin.entrypoint
    version = f" {plugin.version}" if plugin.version else ""
    yield f"{plugin.id}{version} ({plugin.contract}) from {plugin.manifest}"
    if entrypoint is not None:
        entry = shown.subject.entry
        written = None if entry is None else entry.plugin.entrypoint  # without values, which may be secrets
        words = written or entrypoint
        yield f"runs    {join((words.command, *words.args))}"
    if record.key.program not in ("", "" if entrypoint is None else entrypoint.command):
        yield f"program {record.key.program}"
    for path in record.key.chosen:
        yield f"   with {path}"
    if record.key.scope:
        yield f"project {record.key.scope}"
    if record.key.folder:
        yield f"folder  {record.key.folder}"
    yield f"policy  {shown.after.policy.name}"
    own = homes(os.environ)
    project = "" if plugin.project is None else plugin.project.path
    items = items_of(record.asked, own, project)
    yield ""
    if not plugin.spec.enabled:
        yield "  ! it asks to run without a cage; a yes does not give it that"
    limits = limit_items(plugin.spec.limits)
    if shown.loaded.invocation.command is None:
        yield "It asks for:" if items or limits else "It asks for nothing beyond what every plugin gets."
        yield from item_lines((*items, *limits), _notes(shown, (*items, *limits)))
    elif words_of_its_own := own_words(shown.subject):
        yield "Its own options give it:"
        yield from words_of_its_own
    for each in plugin.spec.env:
        if each.value and steers(each.name):
            yield f"{each.name} is set to {quoted(each.value, 400)}; this yes is for that value"
    if shown.subject.folder_unknown:
        yield (
            f"This yes holds for {record.key.folder}, because its words are relative: if its host starts it"
            " in another folder, run runner allow there"
        )
    if not record.added.is_empty:
        yield "You allow besides:"
        more = items_of(record.added, own)
        yield from item_lines(more, _notes(shown, more))
    for denial in _still_refused(shown):
        yield f"It would still be refused now: {denial.asked}: {denial.reason}"
        if denial.hint:
            yield f"    {denial.hint}"
    yield from _unasked_paths(shown)


def _notes(shown: _Proposal, items: tuple[AskedItem, ...]) -> dict[AskedItem, str]:
    """A note about each item: what an approval changes about it."""
    before = {denial.asked for denial in shown.before.grant.denials}
    lacking = {denial.asked for denial in shown.after.grant.denials if denial.rule == "env_missing"}
    refused = {denial.asked for denial in shown.after.grant.denials} - lacking
    old = None if shown.old is None else items_of(shown.old.whole, homes(os.environ))
    asked = items_of(shown.record.asked, homes(os.environ))
    notes: dict[AskedItem, str] = {}
    for item in items:
        words = {item.what, f"{item.kind} {item.what}"}
        if item.kind == "limit":
            notes[item] = "a limit; the policy's ceiling holds"
        elif words & refused:
            notes[item] = "CANNOT BE ALLOWED by you"
        elif words & lacking:
            notes[item] = "not set here now"
        elif item.kind in ("read", "write") and item.what.startswith("/") and not os.path.lexists(item.what):
            notes[item] = "does not exist now"
        elif old is not None and item not in old and item.kind != "project":
            notes[item] = "NEW since your last yes"
        elif item in asked and not words & before:
            notes[item] = "" if item.kind == "host" else "the policy gives it without a yes"
    return notes


def _still_refused(shown: _Proposal) -> tuple[Denial, ...]:
    return shown.after.grant.refused


def _unasked_paths(shown: _Proposal) -> Iterator[str]:
    """Advice about host paths in the arguments that the cage does not show: most servers name their folders
    there."""
    from sandbox.paths.mounts import contains
    from sandbox.policy.policy import RUNTIME_PATHS

    plugin, record = shown.loaded.plugin, shown.record
    if plugin.entrypoint is None:
        return
    given = {*record.whole.read, *record.whole.write, *RUNTIME_PATHS, *asked_of(plugin).read}
    given |= set(asked_of(plugin).write)
    named: dict[str, None] = {}
    for word in plugin.entrypoint.args:
        path = word.partition("=")[2] if word.startswith("-") else word
        path = os.path.expanduser(path.removeprefix("file://"))
        if not path.startswith("/") or "\0" in path or len(path) > 4095:
            continue
        path = "/" + os.path.normpath(path).lstrip("/")
        if path != "/" and os.path.exists(path) and not any(contains(each, path) for each in given):
            named[path] = None
    for path in named:
        yield f"Its arguments name {path}, which it does not ask for: add --read {path} or --write {path}"


# --- what has changed ---------------------------------------------------------------------------------------


def _print_diff(subject: AllowSubject) -> int:
    loaded = subject.loaded
    key = key_of(loaded.plugin)
    key = None if key is None else with_program(key, loaded.plugin, os.environ)[0]
    old = None if key is None else find_approval(key, os.environ)
    if old is None:
        say(f"runner allow: you have allowed nothing for this plugin; {_command(subject)} shows what it asks")
        return _NOT_FOUND
    own = homes(os.environ)
    asked = Approval() if loaded.invocation.command is not None else asked_of(loaded.plugin)
    project = "" if loaded.plugin.project is None else loaded.plugin.project.path
    then, now = items_of(old.asked, own, project), items_of(asked, own, project)
    lines = [f"+ {line[2:]}" for line in item_lines(item for item in now if item not in then)]
    lines += [f"- {line[2:]}" for line in item_lines(item for item in then if item not in now)]
    if not lines and old.digest != digest_of(loaded.plugin) and loaded.invocation.command is None:
        lines.append("  only the limits that it asks for have changed")
    say(printable(f"{loaded.plugin.id} ({loaded.plugin.contract}), allowed on {day(old.when)}"), sys.stdout)
    if not lines:
        say("  it asks for the same as then", sys.stdout)
        return EXIT["ok"]
    say("\n".join(map(printable, lines)), sys.stdout)
    if any(line.startswith("+") for line in lines):
        say(f"\nTo allow what is new: {printable(_command(subject))}", sys.stdout)
    return _DIFFERENT


def _revoke(args: argparse.Namespace) -> int:
    if args.revoke or args.manifest is not None:
        return revoke(args.revoke or args.manifest, args.server, sure=args.yes)
    return revoke_key(key_of(load(_invocation(args), Stopwatch()).plugin))


def _command(subject: AllowSubject) -> str:
    return allow_command(subject.entry or subject.loaded)


# --- what a plugin asks for or was allowed, one line each ---------------------------------------------------


# Names of variables whose values are most often secrets.
_SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL|AUTH|COOKIE|SESSION"
    r"|DATABASE_URL|DSN|_KEY$|_PAT$",
    re.IGNORECASE,
)
_WIDE = ("/", "/etc", "/home", "/mnt", "/opt", "/srv", "/var", "/var/lib", "/media", "/run")


class AskedItem(NamedTuple):
    kind: str  # read, write, network, host, variable, seccomp, project, limit
    what: str
    unusual: str = ""  # why it stands out; empty: it does not


def items_of(approval: Approval, homes: Sequence[str] = (), project: str = "") -> tuple[AskedItem, ...]:
    """The items of an approval, unusual ones first. `project`: the folder the plugin works on."""
    found = [
        *(AskedItem("write", path, _of_path(path, homes, write=True)) for path in approval.write),
        *(AskedItem("read", path, _of_path(path, homes)) for path in approval.read),
        *_network(approval),
        *_variables(approval),
    ]
    if approval.seccomp == "compat":
        found.append(AskedItem("seccomp", "compat", "more system calls than the default filter lets through"))
    elif approval.seccomp != "strict":
        found.append(AskedItem("seccomp", approval.seccomp))
    if approval.project != "none":
        found.append(AskedItem("project", project or "the folder it works on", _of_path(project, homes)))
    return tuple(sorted(found, key=lambda item: not item.unusual))


def limit_items(limits: Limits) -> tuple[AskedItem, ...]:
    named = ((name, getattr(limits, name)) for name in limits._fields)
    return tuple(
        AskedItem("limit", f"{name} {format_limit(name, value)}")
        for name, value in named
        if value is not None
    )


def _of_path(path: str, homes: Sequence[str], *, write: bool = False) -> str:
    if not path:
        return ""
    why = ["it can change what is there"] if write else []
    if path in _WIDE:
        why.append("a large part of this machine")
    elif path in homes:
        why.append("a whole home directory")
    elif any(contains(home, path) for home in homes):
        why.append("in your home directory")
    return "; ".join(why)


def _network(approval: Approval) -> Iterator[AskedItem]:
    if approval.network == "host":
        why = "this machine's own network: every host, and all that listens on localhost; nothing is recorded"
        yield AskedItem("network", "host", why)
    elif approval.network == "open":
        yield AskedItem("network", "open", "every host by name, on every port")
    for host in approval.hosts:
        yield AskedItem("host", host, _of_host(host))


def _of_host(host: str) -> str:
    why = []
    if host.startswith("*"):
        why.append("a wildcard")
    if host.endswith(":*"):
        why.append("every port")
    if fault := private_fault(host):
        why.append(f"it {fault}")
    return "; ".join(why)


def _variables(approval: Approval) -> Iterator[AskedItem]:
    for name in dict.fromkeys((*approval.steering, *approval.env)):
        why = []
        if steers(name):
            why.append("it decides which code runs")
        if _SECRET.search(name):
            why.append("it looks like a secret")
        yield AskedItem("variable", name, "; ".join(why))


def item_lines(items: Iterable[AskedItem], notes: dict[AskedItem, str] | None = None) -> list[str]:
    """One line each, aligned. What is unusual has a ! in front."""
    rows = list(items)
    kinds = max((len(item.kind) for item in rows), default=0)
    words = min(max((len(item.what) for item in rows), default=0), 48)
    lines = []
    for item in rows:
        why = "; ".join(text for text in (item.unusual, (notes or {}).get(item, "")) if text)
        mark = "!" if item.unusual else " "
        lines.append(f"  {mark} {item.kind.ljust(kinds)}  {item.what.ljust(words)}  {why}".rstrip())
    return lines


# --- a plugin that a host starts through the runner ---------------------------------------------------------


class AllowSubject(NamedTuple):
    """The plugin that the approval is for."""

    loaded: Loaded
    entry: Loaded | None = None  # if a host starts it with `runner run`: the entry as it was read
    folder_unknown: bool = False  # the host's working directory is not known; the current one is assumed


def unwrap_subject(loaded: Loaded) -> AllowSubject:
    """The subject of an approval. For a plugin that a host starts with `runner run`, that is the command
    behind it."""
    hosts = find_contract(loaded.plugin.contract).configurations
    found = None if hosts is None else hosts.wrapped(loaded.plugin, os.environ)
    if found is None or loaded.invocation.command is not None:
        return AllowSubject(loaded)
    words = _parsed(found.options)
    words.arguments = list(found.argv)
    words.words = [*found.options, "--", *found.argv]
    file, scope, outdated = wrapped_record(words.wrapped)
    again = "runner wrap writes it anew"
    if os.path.realpath(file) != os.path.realpath(loaded.plugin.manifest):
        # A cloned project may claim another configuration: the approval would be for that one.
        raise ValueError(f"this entry was wrapped for another configuration: {file}; {again}")
    if scope != loaded.plugin.scope:
        told = f"this entry was wrapped for another project of the file: {scope or 'none'}"
        raise ValueError(f"{told}; {again}")
    environ = {**os.environ, **{PLUGIN_PREFIX + name: value for name, value in found.env}}
    if outdated:  # they have their own names too
        environ.update(found.env)
    command = command_of(words, directory=found.directory, environ=environ)
    if not command.name:
        raise ValueError("this entry was wrapped without a name; run runner wrap again")
    invocation = Invocation("", policy=loaded.invocation.policy, command=command)
    subject = load(invocation, Stopwatch())
    unknown = not found.directory and bool(subject.plugin.folder)
    return AllowSubject(subject, loaded, unknown)


def _parsed(options: Sequence[str]) -> argparse.Namespace:
    """Parse the options of an entry. Raises ValueError in place of printing help or exiting."""
    from runner.cli import verb_parser

    def refuse(told: str) -> NoReturn:
        raise ValueError(
            f"the options of runner run in this entry cannot be used: {told or 'they ask for help'}"
        )

    return verb_parser("run", refuse=refuse).parse_args(list(options))


def own_words(subject: AllowSubject) -> tuple[str, ...]:
    """What the options of the command line grant already, one line each."""
    command = subject.loaded.invocation.command
    if command is None:
        return ()
    return tuple(item_lines(items_of(command_approval(command), homes(os.environ))))


# --- list and revoke ----------------------------------------------------------------------------------------


SCHEMA = "runner.allow.v1"
_SHORTEST_KEY = 6


def _all() -> list[tuple[ListedApproval, Mapping[str, str]]]:
    """All approvals, each with the environment that finds it: this one, and that of entries which `runner
    wrap` wrote, where HOME comes from the password database. Raises ApprovalsUnusable."""
    own = {"HOME": own_home()}
    places: list[Mapping[str, str]] = [os.environ]
    folders = [os.path.realpath(approvals_folder(each) or "/") for each in (os.environ, own)]
    if own["HOME"] and folders[0] != folders[1]:
        places.append(own)
    return [(each, place) for place in places for each in list_records(place)]


def print_list(*, as_json: bool) -> int:
    """Raises ApprovalsUnusable."""
    found = [each for each, _ in _all()]
    if as_json:
        document = {"schema": SCHEMA, "approvals": [_document(each) for each in found]}
        print(json.dumps(document, indent=2))
        return EXIT["ok"]
    if not found:
        say("nothing is allowed", sys.stdout)
    for each in found:
        _print_record(each)
    return EXIT["ok"]


def _print_record(each: ListedApproval) -> None:
    record = each.record
    if record is None:
        unusable = f"{printable(each.name[:12])}  UNUSABLE  {printable(each.fault)}"
        say(f"{unusable}\n    {printable(each.hint)}", sys.stdout)
        return
    key = record.key
    gone = "" if not key.file or os.path.exists(key.file) else "  (the file is gone)"
    head = f"{each.name[:12]}  {day(record.when)}  {key.id} ({key.contract})  {key.file}{gone}"
    head += f"  project {key.scope}" if key.scope else ""
    head += f"  in {key.folder}" if key.folder else ""
    head += f"  program {' with '.join(key.programs)}" if key.program else ""
    head += f"  ({each.fault}; {each.hint})" if each.fault else ""
    lines = item_lines(items_of(record.asked, homes(os.environ)))
    lines += [f"{line}  (added by you)" for line in item_lines(items_of(record.added, homes(os.environ)))]
    say("\n".join(map(printable, (head, *lines))), sys.stdout)


def _document(each: ListedApproval) -> dict[str, object]:
    record = each.record
    if record is None:
        return {"key": each.name, "usable": False, "fault": each.fault, "hint": each.hint}
    return {
        "key": each.name,
        "usable": not each.fault,
        **({"fault": each.fault, "hint": each.hint} if each.fault else {}),
        **record.key._asdict(),
        "asked": record.asked._asdict(),
        "added": record.added._asdict(),
        "digest": record.digest,
        "when": record.when,
    }


def revoke(word: str, server: str | None, *, sure: bool = False) -> int:
    """Revoke the approval with this key, or all approvals for a manifest, which may be deleted or have a
    fault: if there are several, the person is asked, unless `sure`. `server`: only for this server. Raises
    ValueError and ApprovalsUnusable."""
    found = _all()
    meant = [(each, at) for each, at in found if len(word) >= _SHORTEST_KEY and each.name.startswith(word)]
    if len({each.name for each, _ in meant}) > 1:
        raise ValueError(f"--revoke {word}: several keys begin with this; write more of the one you mean")
    if not meant:
        path = os.path.realpath(word)
        meant = [
            (each, at)
            for each, at in found
            if each.record is not None and _is_of(each.record.key, path, server)
        ]
    if not meant:
        raise ValueError(f"--revoke {word}: nothing is allowed for it; runner allow --list shows what is")
    if len(meant) > 1 and not sure:
        for each, _ in meant:
            _print_record(each)
        if not sys.stdin.isatty():
            told = f"these {len(meant)} would be revoked, and there is no terminal to ask on"
            raise ValueError(f"--revoke {word}: {told}; --yes revokes them all, --server NAME or a key one")
        if not _ask_person(f"Revoke these {len(meant)}?"):
            say("runner allow: nothing is revoked")
            return _DECLINED
    return _remove(meant)


def revoke_key(key: ApprovalKey | None) -> int:
    """Revoke the approval of one plugin. Raises ValueError and ApprovalsUnusable."""
    meant = [(each, at) for each, at in _all() if key is not None and each.name.endswith(key.stem)]
    if not meant:
        raise ValueError("nothing is allowed for this command; runner allow --list shows what is")
    return _remove(meant)


def _remove(meant: list[tuple[ListedApproval, Mapping[str, str]]]) -> int:
    for each, place in meant:
        remove_record(each.name, place)
    say(f"revoked: {', '.join(dict.fromkeys(each.name[:12] for each, _ in meant))}", sys.stdout)
    return EXIT["ok"]


def _is_of(key: ApprovalKey, path: str, server: str | None) -> bool:
    if path not in (key.file, os.path.dirname(key.file)):
        return False
    # With the label that --server takes elsewhere. An id has no slashes.
    labels = (key.id, f"{key.scope}:{key.id}") if key.scope else (key.id,)
    own = server if server is None else server.removeprefix(f"{key.scope}:" if key.scope else "")
    return own is None or server in labels or own in labels or own.replace("/", "%2F") == key.id
