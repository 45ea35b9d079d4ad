"""`runner ctl`: start, stop, reset and reload a daemon's plugins, or drain the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.cli.serving.socket_option import add_socket, ask
from runner.cli.serving.via import quote
from runner.cli.shared.text import say
from runner.outcome import USAGE_ERROR
from sandbox.document.diagnostic import printable

if TYPE_CHECKING:
    import argparse

NAME = "ctl"
HELP = "start, stop, reset or reload a plugin of a daemon (runner serve), or drain the daemon"
EXAMPLE = "runner ctl reset notes"
_OF_PLUGINS = ("start", "stop", "reset", "reload")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=(*_OF_PLUGINS, "drain"),
        help="start it now; stop it until it is started; reset forgets its failures and ends its quarantine;"
        " reload reads its manifest again (without a NAME: the whole configuration); drain finishes the calls"
        " in flight and ends the daemon",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the plugin; runner ps lists them")
    add_socket(parser)


def run(args: argparse.Namespace) -> int:
    if args.action == "drain" and args.name is not None:
        say("runner ctl: drain is about the whole daemon: leave NAME out, or use runner ctl stop NAME")
        return USAGE_ERROR
    if args.name is None and args.action not in ("drain", "reload"):
        say(f"runner ctl: write runner ctl {args.action} NAME; runner ps lists the plugins")
        return USAGE_ERROR
    path = f"/{args.action}" if args.name is None else f"/plugins/{quote(args.name)}/{args.action}"
    found = ask(args, NAME, "POST", path)
    if isinstance(found, int):
        return found
    if args.name is not None:
        print(printable(f"{found['name']}: {found['state']}"))
    elif args.action == "reload":
        for fault in found["configuration"]:
            print(printable(f"{fault['path']}: {fault['message']}"))
        return 1 if found["configuration"] else 0
    return 0
