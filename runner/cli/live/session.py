"""One session of the command line: its events are printed, signals interrupt it, a report is written."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import trio

from runner.cli.live.output import Output
from runner.cli.shared.report_file import ReportFile, ReportFileError
from runner.cli.shared.text import say
from runner.contracts.registry import find_contract
from runner.exceptions import PluginError, PluginFailure
from runner.launch.failures import failure_of
from runner.launch.remote import forkserver
from runner.launch.remote.forkserver import LaunchTicket
from runner.launch.stages import Invocation
from runner.outcome import EXIT, Outcome, Phase, with_outcome
from runner.protocol.dialect import Call, CallEnd, Notice
from runner.protocol.secrets import Secrets
from runner.session.open import bare_report, open_session
from runner.session.pending import Deadline
from runner.session.prepared import PreparedCall
from runner.session.record import with_signal
from runner.session.session import Session
from sandbox.cell.contents import Contents
from sandbox.spec import Note

_T = TypeVar("_T")


class SessionRequest(NamedTuple):
    invocation: Invocation
    call: Call
    seconds: float | None
    config: Any
    secrets: Secrets | None
    sink: ReportFile
    sent: LaunchTicket | None
    contents: Contents | None = None  # of the cage's memory files
    prepared: PreparedCall | None = None  # the call, where its contract prepares calls

    def on_trio(self) -> SessionRequest:
        """The same, with its deadline on trio's clock."""
        if self.prepared is None:
            return self
        return self._replace(prepared=self.prepared.with_deadline(trio.current_time()))

    @property
    def deadline(self) -> Deadline | None:
        return None if self.prepared is None else self.prepared.deadline

    def session(
        self, on_made: Callable[[Session], None] | None = None
    ) -> AbstractAsyncContextManager[Session]:
        return open_session(
            self.invocation,
            environ=os.environ,
            call=self.call,
            seconds=self.seconds,
            config=self.config,
            secrets=self.secrets,
            sent=self.sent,
            contents=self.contents,
            deadline=self.deadline,
            on_made=on_made,
        )


class Conversation(NamedTuple):
    """How a session of the command line ended."""

    outcome: Outcome
    report: dict[str, Any]
    record: dict[str, Any] | None  # the contract's own
    failed: PluginError | PluginFailure | None


def run_on_trio(work: Callable[..., Awaitable[_T]], *given: Any) -> _T:
    gc.freeze()  # what was imported stays: the collector need not look through it
    gc.enable()
    forkserver.is_command = True
    return trio.run(work, *given)


async def write_in_thread(write: Callable[[Any], None], what: Any) -> None:
    """Write to stdout in a thread: a reader that does not keep up must not delay clocks and signals."""
    await trio.to_thread.run_sync(write, what, abandon_on_cancel=True)


def run_session(request: SessionRequest, output: Output, what: str, work: Any) -> int:
    try:
        ended = run_on_trio(_conversation, request, output, what, work)
    except trio.TrioInternalError as error:  # for example, no memory for a byte in a socket of its own
        if os.environ.get("RUNNER_DEBUG"):
            raise
        failed = PluginFailure(failure_of(error, None, ran=True).outcome)
        failed.report = bare_report(failed.outcome)
        ended = Conversation(failed.outcome, failed.report, None, failed)
    # In no event loop: the record of a call may be long.
    if ended.failed is None:
        if ended.record is not None:
            output.record(ended.record)
    elif not isinstance(output.unwritten, BrokenPipeError):  # as with `| head`
        output.failure(ended.failed)
    if (obeyed := ended.report.get("obeyed")) is not None:
        from sandbox.paths.end_search import read_findings

        for line in read_findings(obeyed).lines():
            output.note(Note("obeyed", line))
    if ended.report.get("staged") is not None:
        from runner.launch.report import staged_note

        output.note(staged_note(ended.report["staged"]))
    _write_report(request.sink, ended.report, output)
    output.drain_events()
    return EXIT[ended.outcome.code]


def tell_refused(error: PluginError | PluginFailure, output: Output, sink: ReportFile) -> int:
    """Print and report a call that was refused before anything was started."""
    error.report = bare_report(error.outcome)
    if error.invocation is not None:
        error.report["invocation"] = error.invocation
    output.failure(error)
    _write_report(sink, error.report, output)
    output.drain_events()
    return EXIT[error.outcome.code]


def _write_report(sink: ReportFile, report: dict[str, Any], output: Output) -> None:
    if sink.wanted:
        try:
            sink.write(report)
        except ReportFileError as error:
            with contextlib.suppress(OSError):
                say(f"runner {output.verb}: {error}")


async def _conversation(request: SessionRequest, output: Output, what: str, work: Any) -> Conversation:
    request = request.on_trio()
    seen: list[Session] = []
    failed: PluginError | PluginFailure | None = None
    phase: Phase = "launch"

    def on_signal(number: int, first: bool) -> None:
        nonlocal phase
        if first and seen:  # a signal between answer and shutdown still interrupts the call
            phase = "call" if seen[0].phase == "run" else seen[0].phase
        if output.has_told or not first:  # only the shutdown is left, or the caller does not want to wait
            for session in seen:
                session.kill()
        elif number == signal.SIGINT and seen and seen[0].is_polite:
            output.warn("the plugin is asked to end; press Ctrl-C again to end it at once")

    async with cancelled_by_signals(on_signal) as numbers:
        try:
            async with output.showing(what), _session(request, output, seen) as session:
                await work(session)
        except* (PluginError, PluginFailure) as group:
            [failed] = _leaves(group)
        except* Exception as group:  # a bug of ours, or of a contract
            if os.environ.get("RUNNER_DEBUG"):
                raise
            [error] = _leaves(group)
            now = seen[0].phase if seen else phase
            # Before the session hears that the plugin was launched, it may run already. The report knows.
            known = (seen[0].report if seen else None) or {}
            ran = now != "launch" or bool(known.get("exit", {}).get("reached_exec"))
            found = failure_of(error, None, ran=ran).outcome
            failed = PluginFailure(found._replace(phase=now))
    if failed is None and not output.has_told and numbers:
        failed = _ended_before(seen) or interrupted(numbers[0], phase)
        failed.stderr = seen[0].stderr if seen else ""
    if output.unwritten is not None and (failed is None or output.shows_published):
        failed = unwritten_result(output.unwritten)
    report = (failed.report if failed is not None else None) or (seen[0].report if seen else None)
    told = (report or {}).get("session") if output.shows_published else None
    lost = told["dropped"]["notices"] if told else 0
    outcome = _answer_outcome(seen, output, lost) if failed is None else failed.outcome
    if lost:
        output.warn(f"{lost} events were lost: they came faster than they could be written to stdout")
    if report is not None and numbers:
        report = with_signal(report, numbers[0])
    if failed is None and outcome.cause == "hook_failed" and report and report["outcome"]["code"] != "ok":
        output.stderr_tail(seen[0].stderr)  # the plugin ended during the hook
    report = with_outcome(report or bare_report(outcome), outcome)
    record = _record(request.prepared, seen, outcome)
    if record is not None:
        report["invocation"] = record
    if failed is not None:
        failed.report, failed.invocation = report, record
        output.hush()
    return Conversation(outcome, report, record, failed)


# How a call of a command gets more time.
_MORE_TIME = {"call": "raise it with --timeout"}
_NO_MORE_TIME = "this is the contract's limit: find out why the plugin is slow"


def _ended_before(seen: list[Session]) -> PluginFailure | None:
    """The failure of a call that had failed before a signal came: the first cause wins."""
    end = seen[0].end if seen else None
    if end is None or end.outcome.code in ("ok", "cancelled", "plugin_error"):
        return None
    return PluginFailure(end.outcome)


def _record(prepared: PreparedCall | None, seen: list[Session], outcome: Outcome) -> dict[str, Any] | None:
    """The contract's own record of the call, if it has one."""
    if prepared is None:
        return None
    asked = seen[0].end if seen else None
    return prepared.record(asked or CallEnd(outcome))


def _answer_outcome(seen: list[Session], output: Output, lost: int) -> Outcome:
    """The outcome of a call that has an answer: the plugin's, or a substitute."""
    if output.shows_published:
        also = f", {lost} more were lost" if lost else ""
        return Outcome("ok", "call", f"the event was sent, and {output.lines} came in return{also}")
    if not seen or not seen[0].substituted:
        return Outcome("ok", "call", "the plugin answered")
    if "hook_answers" not in find_contract(seen[0].terms.plugin.contract).takes:
        message = f"the hook failed, and contributes nothing: {seen[0].substituted}"
        return Outcome("ok", "call", message, "hook_failed", "the contract has no answer for a failed hook")
    message = f"the hook failed, and the policy answered in its place: {seen[0].substituted}"
    return Outcome("ok", "call", message, "hook_failed", "on_failure under [hooks] says what it answers")


def interrupted(number: int, phase: Phase = "call") -> PluginFailure:
    return PluginFailure(Outcome("cancelled", phase, f"ended by signal {number}", f"signal:{number}"))


def unwritten_result(error: OSError) -> PluginFailure:
    """The plugin answered, and the result could not be written."""
    if isinstance(error, BrokenPipeError):
        return PluginFailure(
            Outcome(
                "cancelled",
                "call",
                "the reader of stdout has closed it before the result was written",
                "stdout",
            )
        )
    message = f"the plugin answered, but its result cannot be written to stdout: {error.strerror}"
    return PluginFailure(
        Outcome("internal", "call", message, "stdout", "redirect stdout to a place that can be written")
    )


@asynccontextmanager
async def _session(request: SessionRequest, output: Output, seen: list[Session]) -> AsyncIterator[Session]:
    """Open the session. All its events are printed as they come, from before the handshake on."""
    failed: PluginError | PluginFailure | None = None
    async with trio.open_nursery() as nursery:

        def made(session: Session) -> None:
            seen.append(session)
            session.state.more_time = _MORE_TIME.get(output.verb, _NO_MORE_TIME)
            for note in session.terms.notes:
                if note.urgent:
                    output.note(note)
            nursery.start_soon(tell, session)

        async def tell(session: Session) -> None:
            async for event in session.events():
                if output.shows_published and isinstance(event, Notice) and event.kind == "published":
                    await write_in_thread(output.line, event.value)
                    if output.unwritten is not None:
                        session.kill()  # nobody reads its events
                else:
                    output.event(event)

        try:
            async with request.session(made) as session:
                yield session
        except (PluginError, PluginFailure) as error:
            failed = error  # raised after the nursery, so that the last events are still printed
    if failed is not None:
        raise failed


def _leaves(group: BaseExceptionGroup[Any]) -> list[Any]:
    found: list[Any] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found[:1]


@asynccontextmanager
async def cancelled_by_signals(on_signal: Callable[[int, bool], None]) -> AsyncIterator[list[int]]:
    """The first signal cancels the body. `on_signal` gets each, and whether it is the first."""
    numbers: list[int] = []
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as arrived:
        async with trio.open_nursery() as nursery:
            body = trio.CancelScope()

            async def listen() -> None:
                async for number in arrived:
                    numbers.append(number)
                    body.cancel()
                    on_signal(number, len(numbers) == 1)

            nursery.start_soon(listen)
            with body:
                yield numbers
            nursery.cancel_scope.cancel()
