"""runner wrap: let a host start its servers through the runner."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from runner.cli.shared.text import print_diagnostics, say
from runner.outcome import EXIT, USAGE_ERROR
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from runner.contracts.mcp.hosts.host import HostServer
    from runner.contracts.mcp.named_paths import NamedPath
    from runner.contracts.mcp.wrap.configuration import Configuration
    from runner.contracts.mcp.wrap.steps import Step

NAME = "wrap"
HELP = "change a host's configuration so that its servers run in a cage, or undo that"
EXAMPLE = "runner wrap ~/.cursor/mcp.json --server github"

_NOT_WRITTEN = 1


_ABOUT = """\
{help}

The variables of an entry get the prefix PLUGIN_ENV_: they reach the server, and not the runner. In an entry
that is written by hand they act on the runner itself, some of them (LD_PRELOAD, SHELLOPTS) before it can do
anything about it: let this command write entries, and check those of others with runner check FILE."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT.format(help=HELP)
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
    parser.add_argument("--undo", action="store_true", help="put the servers' own commands back")
    parser.add_argument("--dry-run", action="store_true", help="show the change, and do not make it")
    parser.add_argument(
        "--yes", action="store_true", help="make the change without a question; needed without a terminal"
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="fetch the packages of npx and uvx servers first, as runner install does",
    )
    parser.add_argument(
        "--find",
        action="store_true",
        help="list the configurations on this machine, their servers, and which are wrapped",
    )
    parser.add_argument("--json", action="store_true", help="with --find: as JSON")


def run(args: argparse.Namespace) -> int:
    from runner.contracts.mcp.wrap.config_file import FileRefused

    if fault := _usage_fault(args):
        say(f"runner wrap: {fault}")
        return USAGE_ERROR
    if args.find:
        return _find(args.file, as_json=args.json)
    try:
        return _change(args)
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
    if args.find and (args.undo or args.dry_run or args.yes or args.server or args.install):
        return "--find only lists; leave --server, --undo, --dry-run, --install and --yes out"
    if args.install and (args.undo or args.dry_run):
        return "--install fetches packages; leave --undo and --dry-run out"
    if args.json and not args.find:
        return "--json goes with --find"
    if not args.find and not args.file:
        return "name the configuration to change; runner wrap --find lists those on this machine"
    return ""


def _change(args: argparse.Namespace) -> int:
    from runner.contracts.mcp.wrap.changes import apply_steps
    from runner.contracts.mcp.wrap.config_file import FileRefused, backups_folder, open_config
    from runner.contracts.mcp.wrap.configuration import read_configuration
    from runner.contracts.mcp.wrap.diff import diff
    from runner.contracts.mcp.wrap.program import runner_path
    from runner.contracts.mcp.wrap.steps import chosen, undo_step, wrap_step

    program = runner_path()
    if not program and not args.undo:
        raise FileRefused("the program runner is neither on PATH nor beside this Python; install it first")
    fetched = EXIT["ok"] if args.undo else _offer_install(args)
    if fetched is None:
        return _NOT_WRITTEN

    def planned(raw: bytes) -> tuple[Configuration, Configuration, tuple[Step, ...]]:
        """The configuration before and after, and what happens to each server."""
        before = read_configuration(file.path, raw, file.given)
        servers = chosen(before, args.server)
        steps = [undo_step(each) if args.undo else wrap_step(before, each, program) for each in servers]
        content, done = apply_steps(before, steps, program)
        after = read_configuration(file.path, content, file.given)
        if not _is_as_wanted(before, after, done):
            raise FileRefused("the change would alter more than command lines and names of variables")
        return before, after, done

    with open_config(args.file) as file:
        raw, status = file.read()
        before, after, steps = planned(raw)
        _tell(before, steps, bool(args.server))
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
        _tell_next(args.file, before, steps)
    return fetched


def _offer_install(args: argparse.Namespace) -> int | None:
    """Install what launchers of the configuration would fetch, if the person wants that. Returns the exit
    status, or None if the configuration shall stay as it is. What could not be fetched is not wrapped."""
    from runner.contracts.mcp import verb_install

    wanted = verb_install.missing(args.file, args.server)
    if not wanted or args.dry_run or (args.yes and not args.install):
        return EXIT["ok"]
    return verb_install.offer(wanted, yes=args.yes, required=args.install)


def _is_as_wanted(before: Configuration, after: Configuration, steps: tuple[Step, ...]) -> bool:
    """Whether the changed file, read by the usual reader, has the same servers with the same command lines
    and variables, apart from the steps, and no wrapped entry can act on the runner."""
    from runner.contracts.mcp.wrap.steps import is_safe, plugin_words

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


def _tell(config: Configuration, steps: tuple[Step, ...], named: bool) -> None:
    from runner.contracts.mcp.wrap.steps import NOT_WRAPPED

    say(f"{printable(config.path)}: {config.host_name}", sys.stdout)
    if not config.servers:
        say("  it has no servers", sys.stdout)
    for step in steps:
        if step.reason == NOT_WRAPPED and not named:
            continue
        name = printable(step.server.label)
        match step.does:
            case "wrap":
                text = "will run in a cage"
            case "rewrap":
                text = "will be wrapped anew"
            case "undo":
                text = "gets its own command back"
            case _:
                text = f"stays as it is: it {printable(step.reason)}"
        missing = _words_of(config, step.server).missing() if step.does in ("wrap", "rewrap") else ()
        say("; ".join((f"  {name}: {text}", *step.notes, *missing)), sys.stdout)


class _EntryWords(NamedTuple):
    """The words of an entry, wrapped or not, and what its host fills in."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    directory: str
    rules: str
    project: str  # empty: only the host knows which project is open
    home: str

    def named(self) -> tuple[NamedPath, ...]:
        from runner.contracts.mcp.named_paths import named_paths
        from sandbox.paths.program import script_of

        # The script of an interpreter is shown as the program.
        args = self.argv[2 if script_of(self.argv) else 1 :]
        return named_paths(args, self.env, rules=self.rules, project=self.project, home=self.home)

    def missing(self) -> tuple[str, ...]:
        """What it names that does not exist, each as a part of a sentence."""
        from runner.contracts.mcp.named_paths import missing_program

        told, hint = missing_program(
            self.argv[0],
            self.env,
            directory=self.directory,
            rules=self.rules,
            project=self.project,
            home=self.home,
        )
        found = [f"WARNING: {told}: {hint}"] if told else []
        found += [f"WARNING: there is no {each.missing}" for each in self.named() if each.missing]
        return tuple(dict.fromkeys(map(printable, found)))


def _words_of(config: Configuration, server: HostServer) -> _EntryWords:
    from runner.contracts.mcp.hosts.site import directory_of, site_of
    from runner.contracts.mcp.hosts.wrapping import plugin_env, split_wrapped

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


def _tell_next(given: str, config: Configuration, steps: tuple[Step, ...]) -> None:
    from itertools import chain
    from shlex import join

    file = given if not given.startswith("-") else config.path
    wrapped = [step.server for step in steps if step.does in ("wrap", "rewrap")]
    for server in (step.server for step in steps if step.does == "wrap"):
        words, label = _words_of(config, server), printable(server.label)
        command = ("runner", "allow", file, "--server", server.label)
        if named := [each for each in words.named() if not each.missing]:
            options = dict.fromkeys(each.options for each in named)
            what = ", ".join(dict.fromkeys(each.variable or each.path for each in named))
            say(
                f"Next: {label} names {printable(what)}; without a yes it has none of your files:", sys.stdout
            )
            _put(f"  {printable(join((*command, *chain(*options))))}")
        if not words.project and any("${workspaceFolder}" in word for word in words.argv):
            say(f"Next: {label} names ${{workspaceFolder}}; in the folder of each project:", sys.stdout)
            _put(f"  {printable(join((*command, '--read', '.')))}")
    if wrapped:
        host = config.host.name if config.host is not None else "the host"
        say(f"Restart {host} to use it. Some hosts ask you to trust a changed entry again.", sys.stdout)


def _find(file: str | None, *, as_json: bool) -> int:
    from runner.contracts.mcp.wrap.survey import survey

    found = survey(file)
    if as_json:
        import json

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
    return EXIT["ok"]


def _state(server: dict[str, Any]) -> str:
    text = str(server["state"])
    if text == "left":
        text = f"cannot be wrapped: it {printable(server['reason'])}"
    elif server["reason"]:
        looks = "wrapped" if text == "wrapped" else "not wrapped, although it looks so"
        text = f"{looks}, but not as runner wrap does it: {printable(server['reason'])}"
        text = text if looks == "wrapped" else f"{looks}: {printable(server['reason'])}"
    if server["disabled"]:
        text += "; switched off"
    return text


def _put(line: str) -> None:
    """Print a line without wrapping it at the terminal width: a diff, JSON, a path to copy."""
    sys.stdout.write(line + "\n")
