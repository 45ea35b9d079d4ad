"""runner tools: start a plugin and list what it says it exposes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.cli.call import add_talking, configured, read_secrets, request_launch
from runner.cli.options import add_invocation, invocation_of
from runner.cli.report_file import ReportFile, ReportFileError
from runner.cli.text import say
from runner.manifest.load import plugins_in
from runner.outcome import USAGE_ERROR
from sandbox.document.diagnostic import printable

if TYPE_CHECKING:
    import argparse

NAME = "tools"
HELP = "start a plugin in its cage and list what it exposes; with --json also the schemas"
EXAMPLE = "runner tools --json ./my-plugin"
PASSES_ARGUMENTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=True)
    add_talking(parser)


def advice(message: str) -> str:
    """For a command line that also names a tool, as `call` does."""
    if message.startswith("unrecognized arguments: ") and " -" not in message:
        return "tools lists everything; to call one, use runner call MANIFEST NAME"
    return ""


def run(args: argparse.Namespace) -> int:
    try:
        folders = plugins_in(args.manifest, args.contract)
        if folders and args.report is not None:
            raise ValueError("--report: it is about one plugin, and this is a folder of several")
        if not folders:
            return _list(args)
        # A plugin that cannot be listed says why, and does not hide the others.
        statuses = []
        for folder in folders:
            args.manifest = folder
            statuses.append(_list(args))
        return min(statuses)
    except (ReportFileError, ValueError) as error:
        say(f"runner tools: {printable(str(error))}")
        return USAGE_ERROR


def _list(args: argparse.Namespace) -> int:
    """Raises ReportFileError or ValueError."""
    invocation, config = configured(invocation_of(args))
    secrets = read_secrets(args)
    sink = ReportFile(args.report)
    sent = request_launch(invocation)
    from runner.cli.live.list_tools import list_all
    from runner.cli.live.output import Output
    from runner.cli.live.session import SessionRequest
    from runner.protocol.dialect import Call

    request = SessionRequest(invocation, Call("list", "tools"), None, config, secrets, sink, sent)
    return list_all(request, Output("tools", as_json=args.json, events=args.events))
