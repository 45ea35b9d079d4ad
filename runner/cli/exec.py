"""runner exec: stands where the plugin's own command stood."""

from __future__ import annotations

import os
import select
import stat
import sys
import time

from runner.cli.shared.options import add_invocation, invocation_of, secrets_of
from runner.cli.shared.report_file import ReportFile, ReportFileError
from runner.contracts.registry import find_contract
from runner.launch.run import run as run_plugin
from runner.launch.stages import Planned, Stage, Started, ended_of, planned_of
from runner.launch.start import make_inspection
from runner.launch.stdio import Plumbing, connect_caller
from runner.launch.verdict import diagnose, judge, judge_error
from runner.launch.wait import End, Signals, watch_caller, watch_signals
from runner.outcome import EXEC_REFUSED, USAGE_ERROR, Failure, Outcome, has_failed
from sandbox.document.diagnostic import printable
from sandbox.scopes import AbstractContextManager, suppress
from sandbox.typed import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    import argparse

    from runner.launch.acquire import Acquired
    from sandbox.cell.contents import Contents

NAME = "exec"
HELP = "run a plugin in its cage, with the runner's own stdin, stdout and stderr"
EXAMPLE = "runner exec --deadline 30 --report report.json ./my-plugin -- --verbose"
PASSES_ARGUMENTS = True

# How long a reader of our stderr may take to make room for a message.
_STDERR_WRITE_SECONDS = 2.0
# Of advice, in characters: a pipe that has room takes it without waiting.
_LONGEST_LINE = 900
_LIMIT_CAUSES = ("oom", "cpu_time", "file_size", "pids")


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
        action="store_true",
        help="print each connection and each DNS question of the plugin on stderr, one line of JSON each",
    )
    parser.add_argument(
        "--tty",
        action="store_true",
        help="give the plugin the terminal itself: it can then read what is typed there and change its modes",
    )


def run(args: argparse.Namespace) -> int:
    return launch(args, NAME)


def launch(args: argparse.Namespace, verb: str) -> int:
    """Run the plugin, or the command, of the options. The answer is the exit status of `runner`."""
    began = time.monotonic()
    try:
        if getattr(args, "config", None) == "-":
            raise ValueError("--config -: stdin is the plugin's; write --config @FILE")
        invocation = invocation_of(args)
        secrets = secrets_of(args)
        contents = _contents(secrets) if secrets else None
        report_file = ReportFile(args.report)
    except (ReportFileError, ValueError) as error:
        from runner.cli.shared.text import say

        say(f"runner {verb}: {printable(str(error))}")
        return USAGE_ERROR
    stage: Stage | None = None
    try:
        with watch_caller() as caller:
            _refuse_directories()
            host = _CommandLine(
                caller,
                inspect=args.inspect,
                tty=args.tty,
                events=args.events,
                secrets=secrets,
                # A plugin of `exec` gets the caller's own stderr: a host may rely on what stands there when
                # it has an answer from stdout.
                keep_tail=invocation.command is not None,
            )
            stage = ended = run_plugin(invocation, os.environ, began, host, contents)
        outcome, status = judge(ended.end, ended.started.planned.grant.limits)
    except Exception as error:
        outcome, status = judge_error(error)
        if outcome.code == "internal" and os.environ.get("RUNNER_DEBUG"):
            raise
        if isinstance(error, Failure):
            stage = error.stage
    outcome = diagnose(outcome, stage)
    if secrets:
        outcome = outcome._replace(**_without(secrets, {"message": outcome.message, "hint": outcome.hint}))
    # The report first: nobody may be reading stderr, and that must cost neither the report nor the status.
    with suppress(OSError):
        try:
            if report_file.wanted:
                from runner.launch.report import report

                report_file.write(_without(secrets, report(stage, outcome, status)))
        except ReportFileError as error:
            from runner.cli.shared.text import say

            say(f"runner {verb}: {printable(str(error))}")
            sys.stderr.flush()
    ended_stage = ended_of(stage)
    if (ended_stage is None or ended_stage.stderr_writable) and _is_stderr_writable():
        with suppress(OSError):
            _print_outcome(stage, outcome, secrets)
    return status


def _contents(secrets: Mapping[str, bytes]) -> Contents:
    from sandbox.cell.contents import Contents

    return Contents({name: value for name, value in secrets.items() if not name.startswith("--")})


def _without(secrets: Mapping[str, bytes], document: dict[str, Any]) -> dict[str, Any]:
    """The report without secrets that the plugin repeated in something of it."""
    if not secrets:
        return document
    from runner.protocol.secrets import Secrets

    hidden: dict[str, Any] = Secrets(secrets).hide_in(document)
    return hidden


class _CommandLine:
    """The host of a launch whose caller has only streams, signals and an exit status."""

    def __init__(
        self,
        caller: int | None,
        *,
        inspect: bool,
        tty: bool,
        events: bool = False,
        secrets: Mapping[str, bytes] | None = None,
        keep_tail: bool = False,
    ) -> None:
        self.caller = caller
        self._secrets = secrets
        self._inspect = inspect
        self._tty = tty
        self._events = events
        self._keep_tail = keep_tail

    def see_ready(self, planned: Planned) -> None:
        options = dict(planned.invocation.options)
        fault = find_contract(planned.plugin.contract).choice_fault(planned.plugin, options)
        if fault is not None:
            outcome = Outcome("launch_failed", "manifest", fault.message, fault.cause, fault.hint)
            raise Failure(outcome, EXEC_REFUSED)
        wide = planned.grant.unsandboxed or planned.grant.network.mode in ("open", "host")
        if planned.plan.notes or planned.decided.notes or wide:
            _print_notes(planned, self._secrets or {}, urgent=True)

    def watch_orders(self) -> AbstractContextManager[Signals]:
        return watch_signals()

    def connect(self, acquired: Acquired) -> AbstractContextManager[Plumbing]:
        planned = acquired.planned
        inspect = make_inspection(planned) if self._inspect else None
        return connect_caller(planned.plan.limits, inspect=inspect, tty=self._tty, keep_tail=self._keep_tail)

    def see_started(self, started: Started) -> Started:
        if self._events and started.audit is not None:
            started.audit.on_line = lambda line: _print_audit(_without(self._secrets or {}, line._asdict()))
        relay = started.plumbing.stderr
        if self._secrets and relay is not None:
            from runner.protocol.secrets import Secrets

            secrets = Secrets(self._secrets)
            relay.conceal(secrets.hide_in_tail, secrets.longest)
        return started


def _print_audit(line: dict[str, Any]) -> None:
    """Never waits: a reader that does not keep up misses lines, and the report has them."""
    import json

    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(0):
        with suppress(OSError):
            os.write(2, json.dumps({"event": "network", "value": line}).encode() + b"\n")


def _is_stderr_writable() -> bool:
    """Whether our stderr takes a message soon. A full pipe that nobody reads must not keep the runner past
    the deadline; the report has everything."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    return bool(poll.poll(_STDERR_WRITE_SECONDS * 1000))


def _print_notes(stage: Stage | None, secrets: Mapping[str, bytes], *, urgent: bool) -> None:
    from runner.cli.shared import text
    from runner.launch.report import notes

    with suppress(OSError):  # nobody reads stderr: the report has the notes too
        for note in notes(stage):
            if note.urgent is urgent:
                if not _is_stderr_writable():
                    return
                text.note(note._replace(**_without(secrets, note._asdict())))
                sys.stderr.flush()


def _print_advice(stage: Stage | None, outcome: Outcome, secrets: Mapping[str, bytes]) -> None:
    from runner.cli.shared import text
    from runner.launch.report import advice

    for each in advice(stage, outcome):
        line = each._replace(**_without(secrets, each._asdict())).text
        if not _is_stderr_writable():
            return
        if len(line) > _LONGEST_LINE:
            line = f"{line[:_LONGEST_LINE]}… (the report has all of it)"
        text.warn(line)
        sys.stderr.flush()


def _print_outcome(stage: Stage | None, outcome: Outcome, secrets: Mapping[str, bytes]) -> None:
    """A plugin that failed by itself has said so itself. Only the runner knows that a limit ended it, and
    which paths it may have missed."""
    ended = ended_of(stage)
    by_limit = ended is not None and (_is_limit(ended.end, outcome) or outcome.cause == "seccomp")
    if outcome.code not in ("ok", "crashed", "cancelled") or by_limit:
        from runner.cli.shared import text

        text.failure(stage, outcome)
    if outcome.code == "crashed" and planned_of(stage) is not None:
        _print_notes(stage, secrets, urgent=False)
    if ended is not None and has_failed(outcome):
        _print_advice(stage, outcome, secrets)
    if ended is not None and ended.end.exit.kill_incomplete:
        pids = ", ".join(map(str, ended.end.exit.left))
        from runner.cli.shared.text import say

        say(f"runner exec: kill_incomplete: these processes could not be killed: {pids}")
    sys.stderr.flush()


def _is_limit(end: End, outcome: Outcome) -> bool:
    return outcome.code == "crashed" and (end.reason == "limit" or outcome.cause in _LIMIT_CAUSES)


def _refuse_directories() -> None:
    """A directory as stdin would lead out of the cage: openat(2) works through any directory descriptor."""
    for fd in (0, 1, 2):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            outcome = Outcome(
                "policy_denied",
                "plan",
                f"descriptor {fd} is a directory, through which a plugin could reach the host's files",
                "descriptor",
                "give the runner pipes, files or a terminal as stdin, stdout and stderr",
            )
            raise Failure(outcome, EXEC_REFUSED)
