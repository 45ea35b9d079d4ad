"""runner exec: run a plugin in a cage, in place of its own command."""

from __future__ import annotations

import os
import time

from runner.cli import EXAMPLE as EXAMPLE
from runner.cli.shared.launching import CommandLineHost
from runner.cli.shared.launching import launch as launch_plugin
from runner.cli.shared.options import add_invocation, invocation_of, open_events, secrets_of
from runner.cli.shared.report_file import ReportFile, ReportFileError
from runner.launch.run import run as run_plugin
from runner.outcome import USAGE_ERROR
from sandbox import look
from sandbox.document.diagnostic import printable
from sandbox.speed.typed import TYPE_CHECKING, Mapping

if TYPE_CHECKING:
    import argparse

    from runner.launch.stored.entry import LaunchRequest
    from sandbox.cell.contents import Contents

NAME = "exec"
PASSES_ARGUMENTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=True)
    add_streams(parser)
    parser.add_argument(
        "--inspect",
        action="store_true",
        help="check every message between plugin and host, and end a plugin that breaks its contract",
    )


def add_streams(parser: argparse.ArgumentParser) -> None:
    """The options about what the caller sees of a run."""
    parser.set_defaults(inspect=False)
    parser.add_argument(
        "--report",
        metavar="PATH|FD",
        help="write what happened as one JSON document (runner.report.v1) to a file or an open descriptor",
    )
    parser.add_argument(
        "--events",
        metavar="PATH|FD",
        help="write connections and DNS questions of the plugin as lines of JSON to a file or an open"
        " descriptor; on 2, stderr, it can forge lines",
    )
    parser.add_argument(
        "--tty",
        action="store_true",
        help="give the plugin the terminal itself: it can then read what is typed there and change its modes",
    )


def advice(message: str) -> str:
    """A hint for a command line that argparse refuses."""
    words = message.removeprefix("unrecognized arguments: ")
    if words == message or words.startswith("-"):
        return ""
    return "the plugin's arguments go behind --; a command without a manifest: runner run -- COMMAND"


def run(args: argparse.Namespace) -> int:
    return launch(args, NAME)


def launch(args: argparse.Namespace, verb: str) -> int:
    """Run the plugin, or the command, of the options. Returns the exit status of `runner`."""
    began: float = getattr(args, "began", time.monotonic())  # set if a stored plan was tried first
    wrapped = args if getattr(args, "wrapped", None) is not None else None
    try:
        if getattr(args, "config", None) == "-":
            raise ValueError("--config -: stdin is the plugin's; write --config @FILE")
        secrets = secrets_of(args)
        request: LaunchRequest | None = getattr(args, "request", None)
        writer = None
        if request is None or secrets:
            invocation = invocation_of(args)
        else:
            from runner.launch.stored.store import PlanWriter

            writer = PlanWriter(request)
            with look.recording(writer.asked):
                invocation = invocation_of(args)
        contents = secret_files(secrets) if secrets else None
        report_file: ReportFile = getattr(args, "report_file", None) or ReportFile(args.report)
        events = open_events(args.events)
    except (ReportFileError, ValueError) as error:
        from runner.cli.shared.text import say

        say(f"runner {verb}: {printable(str(error))}")
        if wrapped is not None:
            from runner.cli.shared.kept_advice import keep

            keep(wrapped, [str(error)])
        return USAGE_ERROR
    host = CommandLineHost(
        inspect=args.inspect,
        tty=args.tty,
        events=events,
        secrets=secrets,
        keep_tail=invocation.command is not None,
        wrapped=wrapped,
    )
    return launch_plugin(
        verb,
        lambda host: run_plugin(invocation, os.environ, began, host, contents, writer),
        host,
        report_file,
    )


def secret_files(secrets: Mapping[str, bytes]) -> Contents:
    """The contents of the cage's files for these secrets."""
    from sandbox.cell.contents import Contents

    return Contents({name: value for name, value in secrets.items() if not name.startswith("--")})
