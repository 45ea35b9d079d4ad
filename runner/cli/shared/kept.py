"""`runner exec` from the plan of an earlier launch. Neither manifest nor policy are read."""

from __future__ import annotations

import time

from runner.cli.shared.launching import CommandLineHost, launch
from runner.launch.stages import started_of
from runner.launch.stored import entry as entries
from runner.launch.stored.run import run_kept
from runner.outcome import Failure
from sandbox.typed import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from runner.launch.stages import Ended
    from runner.launch.stored.entry import PlanEntry, Told


class _DecideAnew(BaseException):
    """The kept plan could not be carried out, and nothing was started. No error: it passes `launch`."""


def launch_kept(args: argparse.Namespace, told: Told) -> int | None:
    """The exit status of `runner`. None: there is no such plan, and the launch has to be decided."""
    args.began = began = time.monotonic()
    entry = entries.find(told)
    if entry is None:
        return None
    entries.say("a kept plan is used")
    report_file = None
    if args.report is not None:
        from runner.cli.shared.report_file import ReportFile, ReportFileError

        try:
            report_file = ReportFile(args.report)
        except ReportFileError:
            return None  # the usual way says what is wrong
        args.report_file = report_file
    host = CommandLineHost(is_new=False, tells=entry.tells)
    try:
        return launch("exec", lambda _: _begin(entry, told, began, host), host, report_file)
    except _DecideAnew:
        return None


def _begin(entry: PlanEntry, told: Told, began: float, host: CommandLineHost) -> Ended:
    try:
        return run_kept(entry, told, began, host)
    except Exception as error:
        if isinstance(error, Failure) and started_of(error.stage) is not None:
            raise  # it ran: the plan is good
        entries.say(f"the kept plan cannot be carried out: {error!r}")
        entries.forget(told)
        if host.is_ready:
            raise  # a process may have been started, and streams handed over: nothing is done twice
        raise _DecideAnew from None
