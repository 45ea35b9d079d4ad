"""runner allow: a person's yes to what one plugin asks for."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from shlex import join

from runner.approvals.files import remove_record, require_safe_code, write_record
from runner.approvals.record import (
    VERSION,
    ApprovalRecord,
    asked_of,
    digest_of,
    key_of,
    with_program,
)
from runner.approvals.store import ApprovalsUnusable, find_approval, passed_over
from runner.cli import leave_environment
from runner.cli.shared import text as printing
from runner.cli.shared.allowed import day, print_list, revoke, revoke_key
from runner.cli.shared.asked import AskedItem, item_lines, items_of, limit_items
from runner.cli.shared.command import command_of, network_of, path_of
from runner.cli.shared.options import (
    add_config,
    add_contract_options,
    add_manifest_choice,
    config_of,
    contract_options_of,
)
from runner.cli.shared.subject import AllowSubject, own_words, unwrapped
from runner.cli.shared.text import say
from runner.launch.approve import allow_command
from runner.launch.prepare import hold_against_policy, load
from runner.launch.stages import Decided, Invocation, Loaded, Stopwatch
from runner.outcome import EXIT, USAGE_ERROR, Failure
from sandbox.document.diagnostic import printable, quoted
from sandbox.paths.homes import homes
from sandbox.policy.approval import joined
from sandbox.policy.policy import steers
from sandbox.spec import Approval, Denial, is_variable_name
from sandbox.speed.value import NamedTuple

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
        "--revoke", metavar="MANIFEST|KEY", nargs="?", const="", help="take a yes back; --list shows the keys"
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
        invocation, added = _invocation(args), _added(args)
        subject = unwrapped(load(invocation, Stopwatch()))
        if subject.entry is not None:
            leave_environment()  # as its launch does: the yes has to be where that looks
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
    """ValueError: the options do not go together."""
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


# --- whom it is about ---------------------------------------------------------------------------------------


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


def _added(args: argparse.Namespace) -> Approval:
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


class _Shown(NamedTuple):
    """What is shown is what is recorded: both come from one reading of the manifest."""

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
    other = passed_over(key, os.environ) if old is None else None
    outdated = other if other is not None and other.version != VERSION else None
    for each in (old, outdated):
        added = added if each is None else joined(each.added, added)
    is_command = loaded.invocation.command is not None
    asked = Approval() if is_command else asked_of(loaded.plugin)
    record = ApprovalRecord(key, asked, added, digest_of(loaded.plugin), time.time())
    none = ApprovalRecord(key, Approval())
    before = hold_against_policy(loaded, os.environ, none)
    after = hold_against_policy(loaded, os.environ, record)
    shown = _Shown(subject, record, old, before, after)
    say("\n".join(map(printable, _lines(shown))), sys.stdout)
    if impossible := list(_impossible(added, after)):
        say("\n".join(f"runner allow: {printable(each)}" for each in impossible))
        say("  nothing is recorded: the plugin could not start with it")
        return EXIT["policy_denied"]
    refused = {(denial.rule, denial.asked, denial.where) for denial in after.grant.denials}
    needed = [each for each in before.grant.denials if (each.rule, each.asked, each.where) not in refused]
    # Where it works is judged when its cage is planned, and not among the denials.
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
    if not args.yes and not _agreed():
        say("runner allow: nothing is recorded")
        return _DECLINED
    write_record(record, os.environ)
    if outdated is not None:
        remove_record(key.stem, os.environ)
    say(f"Allowed. To take it back: runner allow --revoke {key.name[:12]}", sys.stdout)
    return EXIT["ok"]


def _impossible(added: Approval, after: Decided) -> Iterator[str]:
    """Paths that no approval can give, by their names. A launch looks at the files behind the names too."""
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


def _agreed() -> bool:
    sys.stdout.flush()
    sys.stderr.write("\nAllow this? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _lines(shown: _Shown) -> Iterator[str]:
    plugin, record = shown.loaded.plugin, shown.record
    entrypoint = plugin.entrypoint
    version = f" {plugin.version}" if plugin.version else ""
    yield f"{plugin.id}{version} ({plugin.contract}) from {plugin.manifest}"
    if entrypoint is not None:
        entry = shown.subject.entry
        written = None if entry is None else entry.plugin.entrypoint  # a variable's value may be a secret
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
    yield from _unasked(shown)


def _notes(shown: _Shown, items: tuple[AskedItem, ...]) -> dict[AskedItem, str]:
    """What a yes changes about each."""
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
        elif old is not None and item not in old and item.kind != "project":
            notes[item] = "NEW since your last yes"
        elif item in asked and not words & before:
            notes[item] = "" if item.kind == "host" else "the policy gives it without a yes"
    return notes


def _still_refused(shown: _Shown) -> tuple[Denial, ...]:
    return shown.after.grant.refused


def _unasked(shown: _Shown) -> Iterator[str]:
    """Host paths in the arguments that nothing shows: most servers name their folders there."""
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
        return revoke(args.revoke or args.manifest, args.server)
    return revoke_key(key_of(load(_invocation(args), Stopwatch()).plugin))


def _command(subject: AllowSubject) -> str:
    return allow_command(subject.entry or subject.loaded)
