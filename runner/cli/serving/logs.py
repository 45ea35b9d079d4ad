"""`runner logs`: what a daemon's plugin wrote to its stderr."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from runner.cli.serving.socket_option import add_socket, connect
from runner.cli.serving.via import name_fault, quote, tell_error
from runner.cli.shared.text import say
from runner.outcome import EXIT, USAGE_ERROR
from runner.serve.client import NoDaemon
from sandbox.document.diagnostic import printable

if TYPE_CHECKING:
    import argparse

NAME = "logs"
EXAMPLE = "runner logs --follow notes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the plugin; runner ps lists them")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what it writes")
    parser.add_argument("--plain", action="store_true", help="without the times, as the plugin wrote it")
    add_socket(parser)


def run(args: argparse.Namespace) -> int:
    if fault := name_fault(args.name):
        say(printable(f"runner logs: {fault}"))
        return USAGE_ERROR
    client = connect(args, NAME)
    if isinstance(client, int):
        return client
    with client:
        try:
            words = ["follow=1"] * args.follow + ["times=1"] * (not args.plain)
            answer = client.request("GET", f"/plugins/{quote(args.name)}/logs?{'&'.join(words)}")
            if answer.status != 200:
                return tell_error(answer.status, answer.json())
            if not args.follow:
                _show(b"".join(answer.parts()).decode("utf-8", "replace"))
                return 0
            for _, data in answer.events():
                _show(data["text"])
        except NoDaemon as error:
            say(printable(f"runner logs: {error}"))
            return EXIT["launch_failed"]
    return 0


def _show(text: str) -> None:
    """A terminal gets no control sequences of the plugin's."""
    if sys.stdout.isatty():
        parts = re.split(r"([\n\t])", text)
        text = "".join(part if part in ("\n", "\t") else printable(part) for part in parts)
    sys.stdout.write(text)
    sys.stdout.flush()
