"""`runner exec` or `run` from a stored plan. Neither manifest nor policy are read."""

from __future__ import annotations

import time

from runner.cli.shared.launching import CommandLineHost, launch
from runner.launch.stored.entry import say
from runner.launch.stored.run import DecideAnew, find, run_stored
from sandbox.speed.bundle import load
from sandbox.speed.typed import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from runner.launch.stored.entry import LaunchRequest


def launch_stored(args: argparse.Namespace, request: LaunchRequest, verb: str = "exec") -> int | None:
    """Returns the exit status of `runner`. None: no stored plan holds, and the launch has to be decided."""
    args.began = began = time.monotonic()
    entry = find(request)
    if entry is None:
        return None
    say("a stored plan is used")
    if verb == "run":
        load("run")
    report_file = None
    if args.report is not None:
        from runner.cli.shared.report_file import ReportFile, ReportFileError

        try:
            report_file = ReportFile(args.report)
        except ReportFileError:
            return None  # the decided launch reports the fault
        args.report_file = report_file
    host = CommandLineHost(
        is_new=False,
        tells=entry.tells,
        keep_tail=verb == "run",
        wrapped=args if getattr(args, "wrapped", None) is not None else None,
    )
    try:
        return launch(verb, lambda _: run_stored(entry, request, began, host), host, report_file)
    except DecideAnew:
        return None
