"""What every launch by `exec` and `run` does, whether its plan was made now or stored.

A successful launch needs few modules. Those for failures, reports and messages are imported when needed.
"""

from __future__ import annotations

import os
import select
import stat
import sys

from runner.launch.carry_out import judge_end
from runner.launch.orders import Signals, watch_caller, watch_signals
from runner.launch.stages import Planned, Stage, Started, has_start_notes, planned_of, started_of
from runner.launch.stdio import Plumbing, connect_caller
from runner.launch.wait import End
from runner.outcome import EXEC_REFUSED, Failure, Outcome, has_failed
from sandbox.speed.scopes import AbstractContextManager, suppress
from sandbox.speed.typed import TYPE_CHECKING, Any, Callable, Collection, Mapping

if TYPE_CHECKING:
    import argparse

    from runner.cli.shared.events_file import EventsFile
    from runner.cli.shared.report_file import ReportFile
    from runner.launch.acquire import Acquired
    from runner.launch.advice.telling import HostTeller
    from runner.launch.carry_out import LaunchHost
    from runner.launch.stages import Ended
    from runner.outcome import Advice
    from sandbox.network.egress import AuditLine

# How long a reader of our stderr may take to make room for a message.
_STDERR_WRITE_SECONDS = 2.0
# Of advice, in characters: a pipe takes it as a whole.
_LONGEST_LINE = 900
# Notes about an entry that say what it does not get, and the command that gives it.
_KEPT_NOTES = ("withheld", "wrapped", "dropped", "approval")
_LIMIT_CAUSES = ("oom", "cpu_time", "file_size", "pids")


class CommandLineHost:
    """The host of a launch whose caller has only streams, signals and an exit status."""

    caller: int | None = None  # readable when the process that started us has ended
    is_ready = False  # everything is acquired, and the start is next
    advises = True  # whether people are told what a plugin that failed may have missed

    def __init__(
        self,
        *,
        inspect: bool = False,
        tty: bool = False,
        events: EventsFile | None = None,
        secrets: Mapping[str, bytes] | None = None,
        keep_tail: bool = False,
        is_new: bool = True,
        tells: bool | None = None,
        wrapped: argparse.Namespace | None = None,
    ) -> None:
        """`wrapped`: the options of an entry that a host starts. What people are told is kept, too."""
        self.secrets = secrets or {}
        if secrets:
            from runner.protocol.secrets import Secrets

            self.secrets = Secrets(secrets)  # made once: it builds its search when it is first used
        self._inspect = inspect
        self._tty = tty
        self.events = events
        # A plugin of `exec` gets the caller's own stderr: a host may rely on reading stderr before an answer
        # on stdout. `run` relays it and holds its end, for advice if the program fails.
        self._keep_tail = keep_tail
        # A stored plan was checked when it was made, and says whether there are notes to print.
        self._is_new = is_new
        self._teller: HostTeller | None = None
        self.told: set[str] = set()  # what was said about hosts while the plugin ran
        self._tells = tells
        self.wrapped = wrapped

    def see_ready(self, planned: Planned) -> None:
        self.is_ready = True
        if self.events is not None and self.events.path:
            _refuse_writable(planned, self.events.path)
        # A launch from a stored plan may still differ: a cgroup that cannot be made is replaced by a weaker
        # means.
        tells = has_start_notes(planned) if self._tells is None else self._tells or planned.limits.announced
        tells = tells or any(each.rule == "staged" for each in planned.plan.notes)
        if self._is_new:
            from runner.contracts.registry import choice_fault

            options = dict(planned.invocation.options)
            fault = choice_fault(planned.plugin, options)
            if fault is not None:
                outcome = Outcome("launch_failed", "manifest", fault.message, fault.cause, fault.hint)
                raise Failure(outcome, EXEC_REFUSED)
        if tells:
            notes = [each for each in planned.decided.notes if each.rule in _KEPT_NOTES]
            if notes and self.wrapped is not None:
                from runner.cli.shared.kept_advice import keep_notes

                keep_notes(self.wrapped, notes, planned)
            _print_notes(planned, self.secrets, urgent=True)

    def watch_orders(self) -> AbstractContextManager[Signals]:
        return watch_signals()

    def connect(self, acquired: Acquired) -> AbstractContextManager[Plumbing]:
        planned, inspect = acquired.planned, None
        if self._inspect:
            from runner.launch.start import make_inspection

            inspect = make_inspection(planned)
        return connect_caller(planned.plan.limits, inspect=inspect, tty=self._tty, keep_tail=self._keep_tail)

    def see_started(self, started: Started) -> Started:
        started.cell.watch_network(lambda line: self._see_line(line, started))
        relay = started.plumbing.stderr
        if self.secrets and relay is not None:
            from runner.protocol.secrets import Secrets

            secrets = Secrets(self.secrets)
            relay.conceal(secrets.hide_in_tail, secrets.longest)
        return started

    def _see_line(self, line: AuditLine, started: Started) -> None:
        """A connection or a DNS question of the plugin."""
        from runner.launch.advice.telling import HostTeller

        if self.events is not None:
            self.events.write("network", _without(self.secrets, line._asdict()))
        self._teller = self._teller or HostTeller(started)
        advice = self._teller.advice(line) if self.advises else None
        if advice is not None and self.wrapped is not None:
            from runner.cli.shared.kept_advice import keep

            keep(self.wrapped, [advice.text], started.planned)
        mixed = (
            self.events is not None and self.events.is_stderr
        )  # then events have no second line for people
        # Without a wait: the plugin's clocks run. What is not told now is told when it has failed.
        if advice is not None and not mixed and is_stderr_writable(0):
            relay = started.plumbing.stderr
            # The plugin, say curl with its progress, may be within a line.
            start = "\n" if relay is not None and relay.text_tail()[-1:] not in ("", "\n") else ""
            with suppress(OSError):
                if write_at_once(2, start + _advice_line(advice, self.secrets)):
                    self.told.add(advice.what)


def _refuse_writable(planned: Planned, path: str) -> None:
    """Raises Failure if the plugin could replace the file of --events, which is written while it runs."""
    from sandbox.paths.mounts import contains
    from sandbox.plan.plan import Bind

    binds = [each for each in planned.plan.operations if isinstance(each, Bind) and each.writable]
    for place in (*(each.real for each in binds), *filter(None, (planned.state_dir,))):
        if contains(os.path.realpath(place), path):
            told = f"--events {path}: the plugin may write to {place}, and could put another file there"
            hint = "choose a file outside of what it may write, or open one and write its descriptor's number"
            raise Failure(Outcome("policy_denied", "plan", told, "events", hint), EXEC_REFUSED)


def launch(
    verb: str,
    begin: Callable[[LaunchHost], Ended],
    host: CommandLineHost,
    report_file: ReportFile | None,
) -> int:
    """Run a plugin, report how it ended, and return the exit status of `runner`."""
    stage: Stage | None = None
    ended: Ended | None = None
    secrets = host.secrets
    try:
        with watch_caller() as host.caller:
            refuse_directories()
            stage = ended = begin(host)
        planned = ended.started.planned
        outcome, status = judge_end(ended.end, planned.plan.limits, planned)
    except Exception as error:
        from runner.launch.failures import judge_error

        outcome, status = judge_error(error)
        if outcome.code == "internal" and os.environ.get("RUNNER_DEBUG"):
            raise
        if isinstance(error, Failure):
            stage = error.stage
    if host.events is not None:
        host.events.drain()
    if outcome.code in ("launch_failed", "sandbox_unavailable"):
        from runner.launch.failures import diagnose

        outcome = diagnose(outcome, stage)
    if secrets:
        outcome = outcome._replace(**_without(secrets, {"message": outcome.message, "hint": outcome.hint}))
    # The report first: if nobody reads stderr, writing there may block.
    if report_file is not None and report_file.wanted:
        with suppress(OSError):
            _write_report(report_file, verb, stage, outcome, status, secrets)
    if host.wrapped is not None and (outcome.code != "ok" or (ended is not None and ended.started.search)):
        from runner.cli.shared.kept_advice import keep_end

        keep_end(host.wrapped, stage, outcome)
    if (ended is None or ended.stderr_writable) and is_stderr_writable():
        with suppress(OSError):
            _print_outcome(stage, ended, outcome, secrets, host.told, advises=host.advises)
    return status


def _write_report(
    file: ReportFile,
    verb: str,
    stage: Stage | None,
    outcome: Outcome,
    status: int,
    secrets: Mapping[str, bytes],
) -> None:
    from runner.cli.shared.report_file import ReportFileError
    from runner.launch.report import report

    try:
        file.write(_without(secrets, report(stage, outcome, status)))
    except ReportFileError as error:
        from runner.cli.shared.text import say
        from sandbox.document.diagnostic import printable

        say(f"runner {verb}: {printable(str(error))}")
        sys.stderr.flush()


def _without(secrets: Mapping[str, bytes], document: dict[str, Any]) -> dict[str, Any]:
    """The report without secrets that the plugin may have repeated."""
    if not secrets:
        return document
    from runner.protocol.secrets import Secrets

    hidden: dict[str, Any] = Secrets(secrets).hide_in(document)
    return hidden


def is_stderr_writable(seconds: float = _STDERR_WRITE_SECONDS) -> bool:
    """Whether our stderr takes a message soon. A full pipe that nobody reads must not keep the runner past
    the deadline; the report has everything."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def write_at_once(fd: int, line: str) -> bool:
    """Write a short line without waiting, as a whole or not at all. Returns whether it was written.

    A plugin of `exec` writes to the same pipe or socket, so it may be full although it had room a moment ago.
    Its O_NONBLOCK is not ours to set: the plugin and the caller have the same open file.
    """
    data = line.encode("utf-8", "replace")[: select.PIPE_BUF]
    mode = os.fstat(fd).st_mode
    try:
        if stat.S_ISFIFO(mode):
            read, write = os.pipe2(os.O_CLOEXEC)
            try:
                os.write(write, data)
                return os.splice(read, fd, len(data), flags=os.SPLICE_F_NONBLOCK) == len(data)
            finally:
                os.close(read)
                os.close(write)
        if stat.S_ISSOCK(mode):
            import _socket

            held = _socket.socket(fileno=os.dup(fd))
            try:
                return held.send(data, _socket.MSG_DONTWAIT) == len(data)
            finally:
                held.close()
        return os.write(fd, data) == len(data)
    except BlockingIOError:
        return False


def _print_notes(
    stage: Stage | None, secrets: Mapping[str, bytes], *, urgent: bool, told: Collection[str] = ()
) -> None:
    from runner.cli.shared import text
    from runner.launch.report import notes

    with suppress(OSError):  # nobody reads stderr: the report has the notes too
        for note in notes(stage):
            if note.urgent is urgent and note.message not in told:
                if not is_stderr_writable():
                    return
                text.note(note._replace(**_without(secrets, note._asdict())))
                sys.stderr.flush()


def _advice_line(advice: Advice, secrets: Mapping[str, bytes]) -> str:
    """With the end of the line, and as wide as a terminal."""
    from runner.cli.shared import text

    line = advice._replace(**_without(secrets, advice._asdict())).text
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]}… (the report has all of it)"
    return text.fit(text.warning(line), sys.stderr) + "\n"


def _print_outcome(
    stage: Stage | None,
    ended: Ended | None,
    outcome: Outcome,
    secrets: Mapping[str, bytes],
    told: Collection[str],
    *,
    advises: bool,
) -> None:
    """Print the outcome, unless the plugin failed by itself: then its own stderr says why. Only the runner
    knows that a limit ended it, and which paths it may have missed."""
    by_limit = ended is not None and (_is_limit(ended.end, outcome) or outcome.cause == "seccomp")
    if outcome.code not in ("ok", "crashed", "cancelled") or by_limit:
        from runner.cli.shared import text

        text.failure(stage, outcome)
    if outcome.code == "crashed" and planned_of(stage) is not None:
        _print_notes(stage, secrets, urgent=False, told=told)
    if ended is not None and has_failed(outcome) and advises:
        from runner.launch.report import advice

        for each in advice(stage, outcome):
            if each.what not in told and is_stderr_writable():
                sys.stderr.flush()
                write_at_once(2, _advice_line(each, secrets))
    started = started_of(stage)
    if started is not None and started.search is not None and started.search.findings is not None:
        for line in started.search.findings.lines():
            from runner.cli.shared import text

            text.warn(_without(secrets, {"line": line})["line"])
    if started is not None and started.staged is not None and started.staged.is_kept:
        from runner.cli.staging.ask import tell_or_ask

        tell_or_ask(started.staged.changeset)
    if ended is not None and ended.end.exit.kill_incomplete:
        pids = ", ".join(map(str, ended.end.exit.left))
        from runner.cli.shared.text import say

        say(f"runner exec: kill_incomplete: these processes could not be killed: {pids}")
    sys.stderr.flush()


def _is_limit(end: End, outcome: Outcome) -> bool:
    return outcome.code == "crashed" and (end.reason == "limit" or outcome.cause in _LIMIT_CAUSES)


def refuse_directories() -> None:
    """Raises Failure if a standard stream is a directory: openat(2) through it would lead out of the cage."""
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
