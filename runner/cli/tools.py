"""runner tools: start a plugin and list what it exposes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.cli.call import (
    add_talking,
    configured,
    contents_of,
    import_session,
    read_secrets,
    request_launch,
)
from runner.cli.shared.options import add_invocation, invocation_of, is_command, open_events
from runner.cli.shared.report_file import ReportFile, ReportFileError
from runner.cli.shared.text import print_diagnostics, say
from runner.contracts.registry import find_contract
from runner.launch.read import read_invocation
from runner.manifest.load import load_all, plugins_in
from runner.outcome import EXIT, USAGE_ERROR, Outcome
from sandbox.document.diagnostic import printable

if TYPE_CHECKING:
    import argparse

    from runner.launch.stages import Invocation

NAME = "tools"
EXAMPLE = "runner tools --json ./my-plugin"
PASSES_ARGUMENTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=True)
    add_talking(parser)
    parser.usage = f"{parser.usage}\n       {parser.prog} [options] -- COMMAND"


def add_command_arguments(parser: argparse.ArgumentParser) -> None:
    from runner.cli.shared.options import add_command_invocation

    add_command_invocation(parser)
    add_talking(parser)


def advice(message: str) -> str:
    """A hint for a command line that also names a tool, as `call` takes it."""
    if message.startswith("unrecognized arguments: ") and " -" not in message:
        return "tools lists everything; to call one, use runner call MANIFEST NAME"
    return ""


def run(args: argparse.Namespace) -> int:
    try:
        folders = () if is_command(args) else plugins_in(args.manifest, args.contract)
        if folders and args.report is not None:
            raise ValueError("--report: it is about one plugin, and this is a folder of several")
        args.events = open_events(args.events)
        if not folders:
            return _list(args)
        return _list_all(args, folders)
    except (ReportFileError, ValueError) as error:
        say(f"runner tools: {printable(str(error))}")
        return USAGE_ERROR


def _list_all(args: argparse.Namespace, folders: Sequence[str]) -> int:
    """List every plugin of a folder. A plugin that fails is reported, and the others are still listed.
    Returns 0 if at least one could be listed."""
    statuses = []
    for folder in folders:
        [read, *_] = load_all(folder, contract=args.contract)
        if read.plugin is None:
            print_diagnostics(read.diagnostics, sys.stderr)
            statuses.append(EXIT["manifest_invalid"])
            continue
        args.manifest = folder
        statuses.append(_list(args))
        if statuses[-1] == EXIT["cancelled"]:
            return EXIT["cancelled"]
    return min(statuses)


def _list(args: argparse.Namespace) -> int:
    """Raises ReportFileError or ValueError."""
    invocation, config = configured(invocation_of(args))
    secrets = read_secrets(args)
    contents = contents_of(args, secrets)
    sink = ReportFile(args.report)
    if (listed := _list_declared(args, invocation, sink)) is not None:
        return listed
    sent = request_launch(invocation, contents)
    import_session()
    from runner.cli.live.list_tools import list_all
    from runner.cli.live.output import Output
    from runner.cli.live.session import SessionRequest
    from runner.protocol.dialect import Call

    request = SessionRequest(invocation, Call("list", "tools"), None, config, secrets, sink, sent, contents)
    return list_all(request, Output("tools", as_json=args.json, events=args.events))


def _list_declared(args: argparse.Namespace, invocation: Invocation, sink: ReportFile) -> int | None:
    """List from the manifest, if it declares everything. None: the plugin has to be started, also if the
    manifest has a fault, which the launch reports."""
    read = read_invocation(invocation)
    calls = None if read.plugin is None else find_contract(read.plugin.contract).prepared_calls
    if read.plugin is None or calls is None:
        return None
    from runner.cli.live.list_tools import tell_declared
    from runner.cli.live.output import Output
    from runner.launch.report import report
    from runner.launch.stages import Loaded

    output = Output("tools", as_json=args.json, events=args.events)
    tell_declared(read.plugin, calls.catalogue(read.plugin), output)
    if sink.wanted:
        outcome = Outcome("ok", "manifest", "the manifest lists everything; nothing was started")
        sink.write(report(Loaded(invocation, read.plugin, read.diagnostics), outcome, EXIT["ok"]))
    return EXIT["ok"]
