"""runner exec: stands where the plugin's own command stood."""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from runner.cli.options import add_invocation, invocation_of
from runner.cli.report_file import ReportSink, SinkError
from runner.launch.prepare import Prepared, ready
from runner.launch.start import Confined, confine, diagnosed, unlaunched
from runner.launch.verdict import TIMEOUT, judge
from runner.launch.wait import End, wait, watched_caller, watched_signals
from runner.outcome import EXEC_DEADLINE, EXEC_REFUSED, USAGE_ERROR, Failure, Outcome
from sandbox.plan.plan import OpenPlan
from sandbox.spawn.order import SpawnError
from sandbox.value import NamedTuple

if TYPE_CHECKING:
    import argparse

NAME = "exec"
HELP = "run a plugin in its cage, with the runner's own stdin, stdout and stderr"
EXAMPLE = "runner exec --deadline 30 --report report.json ./my-plugin -- --verbose"
PASSES_ARGUMENTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=True)
    parser.add_argument(
        "--report",
        metavar="PATH|FD",
        help="write what happened as one JSON document (runner.report.v1) to a file or an open descriptor",
    )
    parser.add_argument(
        "--inspect",
        action="store_true",
        help="read what plugin and host say to each other, and end a plugin that breaks its contract",
    )
    parser.add_argument(
        "--tty",
        action="store_true",
        help="give the plugin the terminal itself: it can then read what is typed there and change its modes",
    )


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    try:
        invocation = invocation_of(args)
        sink = ReportSink(args.report)
    except (SinkError, ValueError) as error:
        print(f"runner exec: {error}", file=sys.stderr)
        return USAGE_ERROR
    prepared = Prepared(invocation)
    lived: Lived | None = None
    try:
        with watched_caller() as caller:
            lived = _live(prepared, caller, started, inspected=args.inspect, tty=args.tty)
        assert prepared.grant is not None
        outcome, status = judge(lived.end, prepared.grant.limits)
    except (Failure, SpawnError, OSError) as error:
        outcome, status = unlaunched(error)
    except Exception as error:
        if os.environ.get("RUNNER_DEBUG"):
            raise
        outcome, status = unlaunched(error)
    outcome = diagnosed(outcome, prepared)
    # The report first: whoever reads stderr may be gone, and that must cost neither report nor status.
    with suppress(OSError):
        try:
            if sink.wanted:
                from runner.launch.report import report

                end, confined = (lived.end, lived.confined) if lived is not None else (None, None)
                sink.write(report(prepared, outcome, end, status, confined))
        except SinkError as error:
            print(f"runner exec: {error}", file=sys.stderr, flush=True)
    if (lived is None or lived.writable) and _is_heard():
        with suppress(OSError):
            _say(prepared, outcome, lived)
    return status


def _is_heard() -> bool:
    """Whether our stderr takes a word within a moment: a pipe that is full and that nobody reads must not
    hold us past the deadline. The report has it all."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    return bool(poll.poll(_LAST_WORD * 1000))


def _tell_notes(prepared: Prepared, *, urgent: bool) -> None:
    from runner.cli import text
    from runner.launch.report import notes

    with suppress(OSError):  # nobody reads it: the report says so too
        for note in notes(prepared):
            if note.urgent is urgent:
                if not _is_heard():
                    return
                text.note(note)
                sys.stderr.flush()


def _say(prepared: Prepared, outcome: Outcome, lived: Lived | None) -> None:
    """A plugin that failed by itself has said so itself. That a limit ended it, only we can tell, and what
    it may have missed."""
    if outcome.code not in ("ok", "crashed", "cancelled") or (lived and _is_ours(lived.end, outcome)):
        from runner.cli import text

        text.failure(prepared, outcome)
    if outcome.code == "crashed" and prepared.open_plan is not None:
        _tell_notes(prepared, urgent=False)
    if lived is not None and lived.end.exit.kill_incomplete:
        pids = ", ".join(map(str, lived.end.exit.left))
        print(f"runner exec: kill_incomplete: could not be killed: {pids}", file=sys.stderr)
    sys.stderr.flush()


_LAST_WORD = 2.0
_LIMIT_CAUSES = ("oom", "cpu_time", "file_size", "pids")


def _is_ours(end: End, outcome: Outcome) -> bool:
    return outcome.code == "crashed" and (end.reason == "limit" or outcome.cause in _LIMIT_CAUSES)


class Lived(NamedTuple):
    """What became of a plugin that was started."""

    end: End
    confined: Confined
    writable: bool  # our stderr


def _live(prepared: Prepared, caller: int | None, started: float, *, inspected: bool, tty: bool) -> Lived:
    """From the manifest to the end of the plugin's last process."""
    _refuse_directories()
    with ready(prepared, os.environ) as opened:
        if opened.plan.notes or (prepared.grant is not None and prepared.grant.unsandboxed):
            _tell_notes(prepared, urgent=True)
        lived = _watch(prepared, opened, caller, started, inspected=inspected, tty=tty)
    prepared.timings.mark("teardown")
    return lived


def _watch(
    prepared: Prepared, opened: OpenPlan, caller: int | None, started: float, *, inspected: bool, tty: bool
) -> Lived:
    deadline = opened.plan.limits.deadline
    if deadline is not None and time.monotonic() >= started + deadline:
        raise Failure(TIMEOUT, EXEC_DEADLINE)  # used up before anything ran
    with (
        watched_signals() as signals,
        confine(prepared, opened, started, inspected=inspected, tty=tty) as confined,
    ):
        prepared.timings.mark("launch")
        end = wait(confined.cell, signals, caller, confined.clocks, confined.meters)
        end, writable = confined.settle(end, [fd for fd in (signals.fd, caller) if fd is not None])
        prepared.timings.mark("run")
        return Lived(end, confined, writable)


def _refuse_directories() -> None:
    """A directory as stdin would be a door out of the cage: openat() works through any directory fd."""
    for fd in (0, 1, 2):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            outcome = Outcome(
                "policy_denied",
                "plan",
                f"descriptor {fd} is a directory, through which a plugin could reach the host's files",
                "descriptor",
                "give the runner pipes, files or a terminal",
            )
            raise Failure(outcome, EXEC_REFUSED)
