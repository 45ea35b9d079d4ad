"""runner wrap: let a host start its servers through the runner."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from shlex import join
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.approvals.confirmations import ConfirmationRecord
from runner.approvals.files import list_records, remove_record, write_record
from runner.approvals.record import VERSION, ApprovalsUnusable
from runner.approvals.tools import identity_in, parts_of
from runner.cli.shared.text import print_diagnostics, say
from runner.contracts.mcp.hosts.host import HostServer
from runner.contracts.mcp.hosts.site import directory_of, site_of
from runner.contracts.mcp.hosts.wrapping import plugin_env, run_name, split_wrapped
from runner.contracts.mcp.installed import is_stored
from runner.contracts.mcp.named_paths import NamedPath, missing_program, named_paths
from runner.contracts.mcp.wrap.config_file import FileRefused, backups_folder, open_config
from runner.contracts.mcp.wrap.configuration import Configuration, image_of, read_configuration
from runner.contracts.mcp.wrap.program import runner_path
from runner.contracts.mcp.wrap.steps import (
    NOT_WRAPPED,
    Step,
    chosen,
    is_safe,
    plugin_words,
    undo_step,
    wrap_step,
)
from runner.contracts.mcp.wrap.survey import survey
from runner.extras import missing
from runner.outcome import EXIT, USAGE_ERROR
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.paths.program import script_of

if TYPE_CHECKING:
    from runner.gateway.stdio import StdioGateway

NAME = "wrap"
EXAMPLE = "runner wrap ~/.cursor/mcp.json --server github"

_NOT_WRITTEN = 1
_ASK_SECONDS = 60.0  # for the servers of a gateway to list their tools


_ABOUT = """\
{help}

The variables of an entry get the prefix PLUGIN_ENV_: they reach the server, and not the runner. In an entry
that is written by hand they act on the runner itself, some of them (LD_PRELOAD, SHELLOPTS) before it can do
anything about it: let this command write entries, and check those of others with runner check FILE."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT.format(help=parser.description)
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="a host's configuration, such as ~/.cursor/mcp.json"
    )
    parser.add_argument(
        "--server",
        metavar="NAME",
        action="append",
        default=[],
        help="only this server; may be given several times",
    )
    parser.add_argument(
        "--gateway",
        action="store_true",
        help="put one entry, which starts runner gateway, in the place of all; with --undo: put them back",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="with --gateway: the entry is a thin client of one process that serves all your hosts",
    )
    parser.add_argument("--undo", action="store_true", help="put the servers' own commands back")
    parser.add_argument("--dry-run", action="store_true", help="show the change, and do not make it")
    parser.add_argument(
        "--yes", action="store_true", help="make the change without a question; needed without a terminal"
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="fetch packages of npx and uvx servers, and images, first, as runner install does",
    )
    parser.add_argument(
        "--find",
        action="store_true",
        help="list the configurations on this machine, their servers, and which are wrapped",
    )
    parser.add_argument("--json", action="store_true", help="with --find: as JSON")


def run(args: argparse.Namespace) -> int:
    if fault := _usage_fault(args):
        say(f"runner wrap: {fault}")
        return USAGE_ERROR
    if args.find:
        return _find(args.file, as_json=args.json)
    try:
        return (_undo_gateway if args.undo else _move_to_gateway)(args) if args.gateway else _change(args)
    except DocumentError as error:
        print_diagnostics(error.diagnostics)
        return EXIT["manifest_invalid"]
    except ValueError as error:
        say(f"runner wrap: {error}")
        return USAGE_ERROR
    except FileRefused as refused:
        say(f"runner wrap: {printable(args.file)}: {printable(str(refused))}; nothing was changed")
        return _NOT_WRITTEN


def _usage_fault(args: argparse.Namespace) -> str:
    if args.find and (args.undo or args.dry_run or args.yes or args.server or args.install or args.gateway):
        return "--find only lists; leave --server, --undo, --dry-run, --install, --gateway and --yes out"
    if args.shared and (not args.gateway or args.undo):
        return "--shared goes with --gateway, and not with --undo, which takes back either"
    if args.gateway and args.undo and args.server:
        return "--gateway --undo puts all entries back; leave --server out"
    if args.install and (args.undo or args.dry_run):
        return "--install fetches packages and images; leave --undo and --dry-run out"
    if args.json and not args.find:
        return "--json goes with --find"
    if not args.find and not args.file:
        return "name the configuration to change; runner wrap --find lists those on this machine"
    return ""


def _change(args: argparse.Namespace) -> int:
    from runner.contracts.mcp.wrap.changes import apply_steps
    from runner.contracts.mcp.wrap.diff import diff
    from runner.contracts.mcp.wrap.gateway import find_gateway

    program = runner_path()
    if not program and not args.undo:
        raise FileRefused("the program runner is neither on PATH nor beside this Python; install it first")

    def planned(
        raw: bytes, *, as_fetched: bool = args.dry_run
    ) -> tuple[Configuration, Configuration, tuple[Step, ...]]:
        """The configuration before and after, and what happens to each server."""
        before = read_configuration(file.path, raw, file.given)
        servers = chosen(before, args.server)
        steps = [
            undo_step(each) if args.undo else wrap_step(before, each, program, as_fetched=as_fetched)
            for each in servers
        ]
        content, done = apply_steps(before, steps, program)
        after = read_configuration(file.path, content, file.given)
        if not _is_as_wanted(before, after, done):
            raise FileRefused("the change would alter more than command lines and names of variables")
        return before, after, done

    with open_config(args.file) as file:
        fetched = _offer_install(args, planned(file.read()[0], as_fetched=True)[2])
        if fetched is None:
            return _NOT_WRITTEN
        raw, status = file.read()
        before, after, steps = planned(raw)
        _tell(before, steps, bool(args.server))
        if args.undo and find_gateway(before) is not None:
            say("One of its entries starts a gateway: --gateway --undo puts its servers back.", sys.stdout)
        if after.raw == before.raw:
            _put("There is nothing to change.")
            return fetched
        for line in diff(before, after):
            _put(line)
        if args.dry_run:
            return EXIT["ok"]
        file.check_writable(status)
        if not args.yes and (refusal := _confirm(file.path)) is not None:
            return refusal
        shown = _changes_in(steps)

        def change(now: bytes) -> bytes:
            _, result, done = planned(now)
            if _changes_in(done) != shown:
                raise FileRefused("its servers changed since the question; run the command again")
            return result.raw

        backup, _ = file.replace(change, backups_folder(os.environ))
        _put(f"Changed {printable(file.path)}. As it was before: {printable(backup)}")
        _tell_next(args.file, before, steps, _approved(file.path, before))
    return fetched


def _move_to_gateway(args: argparse.Namespace) -> int:
    from runner.contracts.mcp.wrap import gateway
    from runner.contracts.mcp.wrap.diff import diff

    program = runner_path()
    if not program:
        raise FileRefused("the program runner is neither on PATH nor beside this Python; install it first")

    def planned(raw: bytes, *, as_fetched: bool = args.dry_run) -> tuple[Configuration, gateway.GatewayPlan]:
        config = read_configuration(file.path, raw, file.given)
        servers = chosen(config, args.server)
        plan = gateway.plan_gateway(
            config, servers, program, file.given, as_fetched=as_fetched, shared=args.shared
        )
        return config, plan

    with open_config(args.file) as file:
        config, plan = planned(file.read()[0], as_fetched=True)  # before anything is fetched
        opened = _open_gateway(gateway.stored_path(config))
        fetched = _offer_install(args, plan.steps)
        if fetched is None:
            return _NOT_WRITTEN
        raw, status = file.read()
        before, plan = planned(raw)
        _tell(before, plan.steps, True, "will be started by the gateway")
        if not plan.name:
            _put("There is nothing to change.")
            return fetched
        for line in diff(before, read_configuration(file.path, plan.after, file.given)):
            _put(line)
        path = gateway.stored_path(before)
        _put(f"The entries that it takes out go to {printable(path)}")
        if args.dry_run:
            return EXIT["ok"]
        file.check_writable(status)
        if not args.yes and (refusal := _confirm(file.path)) is not None:
            return refusal

        with gateway.locked_folder() as folder:
            wrote = False

            def change(now: bytes) -> bytes:
                nonlocal wrote
                if wrote:  # and the file changed since
                    gateway.remove_stored(path)
                _, again = planned(now)
                if (again.name, again.stored) != (plan.name, plan.stored):
                    raise FileRefused("its servers changed since the question; run the command again")
                wrote = True
                gateway.write_stored(folder, path, again)  # first: the entries are always in one of the files
                return again.after

            try:
                backup, _ = file.replace(change, backups_folder(os.environ))
            except FileRefused:
                if wrote:
                    gateway.remove_stored(path)
                raise
        _put(f"Changed {printable(file.path)}. As it was before: {printable(backup)}")
        moved = tuple(step for step in plan.steps if step.does == "wrap")
        kept = _keep_approvals(file.path, path, [step.server.name for step in moved])
        _ask_for_tools(opened)
        _tell_next(path, before, moved, kept)
        rule = f"mcp__{plan.name}__SERVER__TOOL"
        say(f"A rule of the host about mcp__SERVER__TOOL has to be written as {rule} now.", sys.stdout)
    return fetched


def _open_gateway(path: str) -> StdioGateway:
    """The gateway that the entry will start. Raises FileRefused if none can start, and DocumentError."""

    def tell(text: str) -> None:
        say(printable(f"runner wrap: {text}"))

    try:
        from runner.gateway.options import StdioOptions
        from runner.gateway.stdio import StdioGateway

        return StdioGateway(StdioOptions((path,), list_seconds=_ASK_SECONDS), dict(os.environ), tell)
    except ModuleNotFoundError as error:
        raise FileRefused(f"no gateway can be started: {missing('gateway', error)}") from None
    except ApprovalsUnusable as unusable:
        raise FileRefused(f"no gateway can be started: {unusable}; {unusable.hint}") from None


def _ask_for_tools(gateway: StdioGateway) -> None:
    """Start each server once, as the gateway would, and record its tools: the first list has them at once."""
    _put("Asking its servers for their tools, each in its cage; Ctrl-C skips that.")
    sys.stdout.flush()
    try:
        found = gateway.ask_all()
    except Exception as error:  # noqa: BLE001 -- the file is changed already; the gateway itself will tell it
        say(f"runner wrap: they could not be asked: {printable(f'{type(error).__name__}: {error}')}")
        return
    for name in (each.source.name for each in found if each.asking):
        say(f"runner wrap: {printable(name)}: no answer within {_ASK_SECONDS:g} s; its tools come later")
    answered = [each for each in found if each.lists is not None]
    tools = sum(len(each.shown.get("tools", ())) for each in answered)
    _put(f"The first list of the gateway has {tools} tools of {len(answered)} servers.")


def _undo_gateway(args: argparse.Namespace) -> int:
    from runner.contracts.mcp.wrap import gateway
    from runner.contracts.mcp.wrap.diff import diff

    with open_config(args.file) as file:

        def planned(raw: bytes) -> tuple[Configuration, bytes, str, gateway.GatewayUndo | None]:
            config = read_configuration(file.path, raw, file.given)
            if (found := gateway.find_gateway(config)) is None:
                path = gateway.stored_path(config)
                left = f"; entries of an earlier one are in {path}" if os.path.lexists(path) else ""
                say(f"No entry of {printable(file.path)} starts a gateway{printable(left)}.", sys.stdout)
                return config, raw, "", None
            undo = gateway.read_undo(config, found[1])
            return config, gateway.undo_gateway(config, found[0], undo), found[1], undo

        raw, status = file.read()
        before, content, path, undo = planned(raw)
        if undo is None:
            _put("There is nothing to change.")
            return EXIT["ok"]
        for line in diff(before, read_configuration(file.path, content, file.given)):
            _put(line)
        if args.dry_run:
            return EXIT["ok"]
        file.check_writable(status)
        if not args.yes and (refusal := _confirm(file.path)) is not None:
            return refusal

        def change(now: bytes) -> bytes:
            _, result, *found = planned(now)
            if found != [path, undo]:
                raise FileRefused("its servers changed since the question; run the command again")
            return result

        with gateway.locked_folder():
            backup, written = file.replace(change, backups_folder(os.environ))
            removed = gateway.remove_stored(path, undo)
        _put(f"Changed {printable(file.path)}. As it was before: {printable(backup)}")
        if written != undo.before.encode("utf-8"):
            say("It had been changed since, so only the entries are as they were.", sys.stdout)
        if not removed:
            say(f"{printable(path)} was changed by hand, and stays: look at it, and remove it.", sys.stdout)
        _keep_approvals(os.path.realpath(path), "", undo.names)
    return EXIT["ok"]


def _approved(file: str, config: Configuration) -> list[str]:
    """The labels of servers that the person allowed something before: `runner wrap` after --undo."""
    with suppress(ApprovalsUnusable):  # a start says so
        found = [each.record.key for each in list_records(os.environ) if each.record is not None]
        known = {(key.id, key.scope) for key in found if key.file == file}
        return [each.label for each in config.servers if (run_name(each.name), each.scope) in known]
    return []


def _keep_approvals(file: str, moved_to: str, names: Sequence[str]) -> list[str]:
    """What the person allowed a server holds in its new place too, and so does what that person wants to be
    asked about. Returns the names of servers of which something is allowed. `moved_to`: empty if there is no
    new place; then what was said about the old one is removed."""
    ids = {run_name(name): name for name in names}
    kept: dict[str, None] = {}
    try:
        found = [each.record for each in list_records(os.environ) if each.record is not None]
        for record in found:
            if record.version != VERSION or record.key.file != file or record.key.id not in ids:
                continue
            if moved_to:
                write_record(
                    record._replace(key=record.key._replace(file=os.path.realpath(moved_to))), os.environ
                )
                kept[ids[record.key.id]] = None
            else:
                remove_record(record.key.name, os.environ)
        confirmations = ConfirmationRecord(os.environ)
        for plugin, asked in [*confirmations.all()]:
            contract, name, place, scope = parts_of(plugin) or ("", "", "", "")
            if place != os.path.realpath(file) or name not in ids or not asked.patterns:
                continue
            if moved_to:
                there = identity_in(moved_to, contract, name, scope)
                both = (*confirmations.read(there).patterns, *asked.patterns)
                confirmations.set_patterns(there, tuple(dict.fromkeys(both)))
            else:
                confirmations.set_patterns(plugin, ())
    except ApprovalsUnusable as unusable:
        say(f"runner wrap: {printable(str(unusable))}; allow its servers again: runner allow FILE")
    if kept:
        say(f"What you allowed holds for the gateway too: {printable(', '.join(kept))}", sys.stdout)
    return [*kept]


def _offer_install(args: argparse.Namespace, steps: tuple[Step, ...]) -> int | None:
    """Install what launchers of the configuration would fetch, if the person wants that. Returns the exit
    status, or None if the configuration shall stay as it is. What could not be fetched is not wrapped."""
    from runner.contracts.mcp import verb_install

    wanted = [verb_install.Wanted(step.server.label, request) for step in steps for request in step.fetches]
    if not wanted or args.dry_run:
        return EXIT["ok"]
    if args.yes and not args.install:
        say("What is not installed is not fetched: add --install to do that first.", sys.stdout)
        return EXIT["ok"]
    return verb_install.offer(wanted, yes=args.yes, required=args.install)


def _is_as_wanted(before: Configuration, after: Configuration, steps: tuple[Step, ...]) -> bool:
    """Whether the changed file, read by the usual reader, has the same servers with the same command lines
    and variables, apart from the steps, and no wrapped entry can act on the runner."""
    if [each.keys for each in before.servers] != [each.keys for each in after.servers]:
        return False
    does = {step.server.keys: step.does for step in steps}
    for old, new in zip(before.servers, after.servers, strict=True):
        if does.get(old.keys, "leave") == "leave":
            same = old == new
        else:
            same = plugin_words(before, old) == plugin_words(after, new)
            same &= (old.cwd, old.disabled, old.passed) == (new.cwd, new.disabled, new.passed)
        if not same or (does.get(old.keys) in ("wrap", "rewrap") and not is_safe(after, new)):
            return False
    return True


def _changes_in(steps: tuple[Step, ...]) -> list[tuple[object, ...]]:
    return [
        (step.server.label, step.does, step.server.argv, step.acting, step.kept)
        for step in steps
        if step.does != "leave"
    ]


# --- what people read ------------------------------------------------------------------------------------


def _tell(
    config: Configuration, steps: tuple[Step, ...], named: bool, wrapped: str = "will run in a cage"
) -> None:
    say(f"{printable(config.path)}: {config.host_name}", sys.stdout)
    if not config.servers:
        say("  it has no servers", sys.stdout)
    for step in steps:
        if step.reason == NOT_WRAPPED and not named:
            continue
        name = printable(step.server.label)
        match step.does:
            case "wrap":
                text = wrapped
            case "rewrap":
                text = "will be wrapped anew"
            case "undo":
                text = "gets its own command back"
            case _:
                text = f"stays as it is: it {printable(step.reason)}"
        if step.fetches and step.does != "leave":
            text += f"; {step.fetched} {'is' if len(step.fetches) == 1 else 'are'} fetched before that"
        missing: tuple[str, ...] = ()
        if step.does in ("wrap", "rewrap"):
            missing = _words_of(config, step.server).missing(fetched=bool(step.fetches))
        say("; ".join((f"  {name}: {text}", *step.notes, *missing)), sys.stdout)


class _EntryWords(NamedTuple):
    """The words of an entry, wrapped or not, and what its host fills in."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    directory: str
    rules: str
    project: str  # empty: only the host knows which project is open
    home: str
    image: str  # of its `x-sandbox`: its program is in it

    def named(self) -> tuple[NamedPath, ...]:

        # The script of an interpreter is shown as the program.
        args = self.argv[2 if script_of(self.argv) else 1 :]
        return named_paths(args, self.env, rules=self.rules, project=self.project, home=self.home)

    def missing(self, *, fetched: bool = False) -> tuple[str, ...]:
        """What it names that does not exist, each as a part of a sentence. `fetched`: its packages will be
        stored before it starts, and a stored program needs no npx or uvx."""
        if self.image:
            return ()
        told, hint = missing_program(
            self.argv[0],
            self.env,
            directory=self.directory,
            rules=self.rules,
            project=self.project,
            home=self.home,
        )
        stored = fetched or is_stored(self.argv, os.environ)
        found = [f"WARNING: {told}: {hint}"] if told and not stored else []
        found += [f"WARNING: there is no {each.missing}" for each in self.named() if each.missing]
        return tuple(dict.fromkeys(map(printable, found)))


def _words_of(config: Configuration, server: HostServer) -> _EntryWords:
    old, home = split_wrapped(server.argv), os.path.expanduser("~")
    rules = "" if config.host is None else config.host.rules
    site = site_of(config.path, server, config.host, home)
    return _EntryWords(
        server.argv if old is None else old.argv,
        tuple((name, value) for _, name, value in plugin_env(server)),
        directory_of(server, site, rules, home),
        rules,
        site.project,
        home,
        image_of(config, server),
    )


def _confirm(path: str) -> int | None:
    """Ask the person. Returns None for yes, else the exit status."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        say("runner wrap: there is no terminal to ask on; nothing was changed; to change the file add --yes")
        return USAGE_ERROR
    sys.stdout.flush()
    sys.stderr.write(f"Change {printable(path)}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return None
    say("Nothing was changed.")
    return _NOT_WRITTEN


def _tell_next(given: str, config: Configuration, steps: tuple[Step, ...], allowed: Sequence[str]) -> None:
    """`allowed`: labels of servers that have a yes already."""
    file = given if not given.startswith("-") else config.path
    wrapped = [step.server for step in steps if step.does in ("wrap", "rewrap")]
    new = (step.server for step in steps if step.does == "wrap")
    for server in (each for each in new if each.label not in allowed):
        words, label = _words_of(config, server), printable(server.label)
        command = ("runner", "allow", file, "--server", server.label)
        if named := [each for each in words.named() if not each.missing]:
            options = dict.fromkeys(each.options for each in named)
            what = ", ".join(dict.fromkeys(each.variable or each.path for each in named))
            say(
                f"Next: {label} names {printable(what)}; without a yes it has none of your files:", sys.stdout
            )
            _put(f"  {printable(join((*command, *chain(*options))))}")
        elif words.image:
            say(f"Next: {label} names an image, which it gets only with your yes:", sys.stdout)
            _put(f"  {printable(join(command))}")
        if not words.project and any("${workspaceFolder}" in word for word in words.argv):
            say(f"Next: {label} names ${{workspaceFolder}}; in the folder of each project:", sys.stdout)
            _put(f"  {printable(join((*command, '--read', '.')))}")
    if wrapped:
        host = config.host.name if config.host is not None else "the host"
        say(f"Restart {host} to use it. Some hosts ask you to trust a changed entry again.", sys.stdout)
        log = config.host.log if config.host is not None else ""
        say(f"If a server fails, {log or 'the log of the host'} says why, and so does:", sys.stdout)
        _put(f"  {printable(join(('runner', 'advice', file)))}")


def _find(file: str | None, *, as_json: bool) -> int:
    found = survey(file)
    todo = [server for each in found for server in each["servers"] if server["state"] == "not wrapped"]
    if as_json:
        _put(json.dumps({"schema": "runner.wrap.v1", "files": found}, indent=2))
        return EXIT["ok"]
    if not found:
        _put("There is no configuration of a known host here; name one: runner wrap FILE")
    for each in found:
        say(f"{printable(each['file'])}: {each['host']}", sys.stdout)
        if each["fault"]:
            say(f"  cannot be read: {printable(each['fault'])}", sys.stdout)
        elif not each["servers"]:
            _put("  it has no servers")
        for server in each["servers"]:
            say(f"  {printable(server['name'])}: {_state(server)}", sys.stdout)
    if todo:
        fetches = (
            " Before that it fetches packages, if you say yes." if any(s["fetches"] for s in todo) else ""
        )
        say(f"runner wrap FILE wraps the servers of one, after a question.{fetches}", sys.stdout)
    return EXIT["ok"]


def _state(server: dict[str, Any]) -> str:
    text = str(server["state"])
    if text == "left":
        text = f"cannot be wrapped: it {printable(server['reason'])}"
    elif server["reason"]:
        looks = "wrapped" if text == "wrapped" else "not wrapped, although it looks so"
        text = f"{looks}, but not as runner wrap does it: {printable(server['reason'])}"
        text = text if looks == "wrapped" else f"{looks}: {printable(server['reason'])}"
    if server["fetches"]:
        text += f"; wrap fetches {printable(' '.join(server['fetches']))} first"
    if server["disabled"]:
        text += "; switched off"
    return text


def _put(line: str) -> None:
    """Print a line without wrapping it at the terminal width: a diff, JSON, a path to copy."""
    sys.stdout.write(line + "\n")
