"""runner allow: store, list, compare and revoke approvals."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from runner.approvals.record import ApprovalsUnusable, key_of
from runner.cli import drop_environment
from runner.cli.approving.ask_person import print_diff, propose
from runner.cli.approving.confirming import print_confirmations, set_confirmations
from runner.cli.approving.records import print_list, revoke, revoke_key
from runner.cli.approving.subject import unwrap_subject
from runner.cli.approving.tool_changes import ask_about_remote
from runner.cli.shared import text as printing
from runner.cli.shared.command import NET_HELP, command_of, network_of, path_of
from runner.cli.shared.hiding import HIDE_HELP, hide_of, with_hidden_hosts
from runner.cli.shared.logging_in import add_ssh, ssh_of, with_ssh_hosts
from runner.cli.shared.options import (
    add_config,
    add_contract_options,
    add_image,
    add_manifest_choice,
    config_of,
    contract_options_of,
    image_of,
)
from runner.cli.shared.text import say
from runner.launch.read import load
from runner.launch.stages import Invocation, Stopwatch
from runner.outcome import EXIT, USAGE_ERROR, Failure
from sandbox.document.diagnostic import printable
from sandbox.policy.policy import steers
from sandbox.spec import Approval, Overrides, is_variable_name

NAME = "allow"
EXAMPLE = "runner allow ./my-plugin"
PASSES_ARGUMENTS = True


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
    add_image(parser)
    more = parser.add_argument_group("more than it asks for")
    for option, metavar, about in (
        ("--read", "PATH", "a file or folder, read-only"),
        ("--write", "PATH", "a file or folder, for writing"),
        ("--net", "HOST[:PORT]", NET_HELP),
        ("--env", "NAME", "a variable of the host's environment; NAME=VALUE: with --name, as for runner run"),
    ):
        more.add_argument(option, metavar=metavar, action="append", default=[], help=about)
    more.add_argument("--hide", metavar="NAME[@HOST]", action="append", default=[], help=HIDE_HELP)
    add_ssh(more)
    more.add_argument(
        "--staged",
        action="store_true",
        help="keep what it writes apart, until runner apply takes it: a yes that holds only so",
    )
    do = parser.add_argument_group("what to do")
    do.add_argument("--yes", action="store_true", help="do not ask; needed where there is no terminal")
    do.add_argument(
        "--diff",
        action="store_true",
        help="show what is new or gone since your yes; ask about tools that a gateway withholds",
    )
    do.add_argument(
        "--remote", metavar="NAME", help="with --diff: of a server elsewhere in a gateway's settings"
    )
    do.add_argument(
        "--confirm",
        metavar="PATTERN",
        action="append",
        help="be asked before a gateway calls its tools of this name, as in push*; destructive: those that"
        " do not say that they destroy nothing; none: no longer",
    )
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
            status = print_list(as_json=args.json)
            if not args.json:
                print_confirmations(os.environ)
            return status
        if args.revoke is not None:
            return _revoke(args)
        if args.remote is not None:
            return ask_about_remote(args.remote, os.environ, sure=args.yes)
        invocation, added = _invocation(args), _added_approval(args)
        subject = unwrap_subject(load(invocation, Stopwatch()))
        environ = dict(os.environ)
        if subject.entry is not None:
            drop_environment()  # as its launch does, so that the launch finds the approval
        if args.confirm is not None:
            return set_confirmations(subject, tuple(args.confirm), environ)
        if args.diff:
            return print_diff(subject, environ, sure=args.yes)
        return propose(subject, added, sure=args.yes)
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
    words = ("read", "write", "net", "env", "hide", "ssh_key", "ssh_host", "staged")
    more = [f"--{each.replace('_', '-')}" for each in words if getattr(args, each)]
    if more and chosen:
        raise ValueError(f"{more[0]}: it does not go with {chosen[0]}")
    is_command = args.name is not None or args.arguments
    if args.remote is not None:
        if not args.diff or args.manifest is not None or is_command:
            raise ValueError("--remote: it goes with --diff, and no other plugin")
        return
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
    if is_command and not (args.name and (args.arguments or args.image)):
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
    yield "--confirm", args.confirm is not None
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
            **{each: [] for each in ("read", "write", "net", "hide", "ssh_key", "ssh_host")},
        )
        return Invocation("", policy=args.policy, command=command_of(words, image=image_of(args)))
    return Invocation(
        manifest=args.manifest,
        contract=args.contract,
        server=args.server,
        policy=args.policy,
        options=contract_options_of(args),
        config=config_of(args.config),
        overrides=Overrides(image=image_of(args)),
    )


def _added_approval(args: argparse.Namespace) -> Approval:
    for name in args.env:
        if "=" in name and args.manifest is None:
            continue  # the command's own: command_of reads it
        if not is_variable_name(name):
            raise ValueError(
                f"--env {name}: write the name of a variable; its value is passed on at each launch"
            )
    hide, ssh = hide_of(args.hide), ssh_of(args)
    network = with_ssh_hosts(with_hidden_hosts(network_of(args.net), hide), ssh)
    names = [name for name in args.env if "=" not in name]
    return Approval(
        read=tuple(dict.fromkeys(path_of("--read", word) for word in args.read)),
        write=tuple(dict.fromkeys(path_of("--write", word) for word in args.write)),
        network="none" if network is None else network.mode,
        hosts=() if network is None else network.hosts,
        env=tuple(dict.fromkeys(names)),
        steering=tuple(dict.fromkeys(name for name in names if steers(name))),
        staged=args.staged,
        hide=hide,
        ssh=ssh,
    )


def _revoke(args: argparse.Namespace) -> int:
    if args.revoke or args.manifest is not None:
        return revoke(args.revoke or args.manifest, args.server, sure=args.yes)
    return revoke_key(key_of(load(_invocation(args), Stopwatch()).plugin))
