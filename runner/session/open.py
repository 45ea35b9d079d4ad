"""Opens and closes a session: launches the cell, does the handshake, and at the end shuts everything down."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from runner.contracts.registry import find_contract, make_dialect
from runner.exceptions import PluginError, PluginFailure
from runner.launch.remote.forkserver import LaunchTicket
from runner.launch.remote.messages import MonitorEnd
from runner.launch.remote.remote_cell import RemoteCell, open_cage
from runner.launch.stages import Invocation
from runner.outcome import EXEC_NO_CAGE, EXIT, Failure, Outcome, with_outcome
from runner.protocol.dialect import Call, Dialect, Setting
from runner.protocol.host_services import Services
from runner.protocol.secrets import Secrets
from runner.protocol.service_guard import ServiceGuard
from runner.session import verdict
from runner.session.pending import Deadline, at_checkpoints, given_up_after
from runner.session.prepared import PreparedCall, cage_contents, serves_one_call
from runner.session.session import Session
from sandbox.cell.contents import Contents

if TYPE_CHECKING:
    from runner.session.parking import Parking


@asynccontextmanager
@at_checkpoints  # not for what is done inside
async def open_session(
    invocation: Invocation,
    *,
    environ: Mapping[str, str],
    services: Services | None = None,
    call: Call | None = None,
    seconds: float | None = None,
    config: Any = None,
    secrets: Mapping[str, Any] | None = None,
    sent: LaunchTicket | None = None,
    contents: Contents | None = None,
    deadline: Deadline | None = None,
    on_made: Callable[[Session], None] | None = None,
    parking: Parking | None = None,
    caller: tuple[Any, ...] = (),
) -> AsyncIterator[Session]:
    """Launch a plugin and wait until it is ready. Raises PluginFailure.

    `call`, `seconds`: for contracts of one call per process, that call, and the time for everything together.
    `contents`: of the cage's memory files; with `sent`, the ticket has them.
    `deadline`: of the call that the plugin is launched for.
    `on_made`: called with the session before the handshake, so that its events and its report can be had also
    if the handshake fails.
    `parking`: may have a parked cell for the call. If not, the plugin is launched. `caller`: whose call it
    is; no cell that was parked for another caller is used.
    """
    services = services or Services()
    clock = deadline or Deadline()
    failure: BaseException | None = None
    session: Session | None = None
    try:
        if parking is None or sent is not None or contents:  # no parked cell has anything of a call
            opening = open_cage(invocation, environ=environ, sent=sent, contents=contents)
        else:
            opening = _take_or_open(parking, invocation, environ, caller, clock.at)
        async with opening as cell:
            try:
                given_up = given_up_after(invocation.overrides.limits)
                with trio.move_on_at(min(clock.at, trio.current_time() + given_up)) as waiting:
                    terms = await cell.prepared()
            except Failure as failed:
                raise _unprepared(failed, cell.has_ended) from None
            if waiting.cancelled_caught:
                is_over = trio.current_time() >= clock.at
                late = clock.passed("launch") if is_over else verdict.expired("launch", given_up)
                raise _unprepared(Failure(late, EXEC_NO_CAGE), None)
            plugin = terms.plugin
            contract = find_contract(plugin.contract)
            services = contract.provide(plugin, services, terms.allowance)
            guard = ServiceGuard(contract.services(plugin, terms.allowance), services, terms.host, plugin)
            hidden = Secrets(secrets)
            if hidden:
                # A long one takes a second, in which other sessions go on. The tail of stderr needs it.
                await trio.to_thread.run_sync(lambda: hidden.longest)
            setting = Setting(
                plugin,
                terms.limits,
                environ,
                terms.declare,
                call,
                config,
                guard.offered,
                terms.on_hook_failure,
                dict(invocation.options),
                None if secrets is None else hidden,
                terms.allowance,
                guard.allows,
            )
            dialect = make_dialect(contract, setting)
            session = Session(cell, terms, dialect, guard, _one_shot_seconds(dialect, setting, seconds))
            session.state.record.secrets = hidden
            cell.on_audit = session.see_audit
            session.deadline = deadline
            if on_made is not None:
                on_made(session)
            guard.attach(session.tell, session.state.room, session.ask)
            try:
                # What the body raises is kept until after the nursery, which would put it into a group.
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.tasks.run)
                    try:
                        await session.tasks.start(deadline)
                        yield session
                    except BaseException as error:  # noqa: BLE001 -- raised again below
                        failure = error
                    try:
                        await session.close(cancelled=not isinstance(failure, Exception | None))
                    except BaseException as error:  # noqa: BLE001 -- a second ^C
                        failure = error
                    session.tasks.stop()
            except BaseExceptionGroup as group:
                # The tasks raise nothing. This is ^C, or the cancellation of our caller, while the nursery is
                # left.
                failure = group.exceptions[0]
            finally:  # also if our caller is cancelled: then the nursery raises Cancelled again
                guard.detach()
                session.settle(cell.has_ended, bare_report)
    except Failure as failed:  # the fork server did not accept the launch
        raise _unprepared(failed, None) from None
    if failure is not None:
        assert session is not None
        for leaf in _leaves(failure):
            if leaf.report is not None:
                continue  # the failure of another plugin, opened and closed inside this context
            leaf.stderr = session.stderr
            if session.report is not None:
                leaf.report = with_outcome(session.report, leaf.outcome)
        try:
            raise failure
        finally:
            del failure


@asynccontextmanager
async def _take_or_open(
    parking: Parking,
    invocation: Invocation,
    environ: Mapping[str, str],
    caller: tuple[Any, ...],
    until: float,
) -> AsyncIterator[RemoteCell]:
    async with parking.take(invocation, environ, caller, until) as parked:
        if parked is not None:
            yield parked
            return
    async with open_cage(invocation, environ=environ) as cell:
        yield cell


@asynccontextmanager
async def open_prepared(
    prepared: PreparedCall,
    *,
    environ: Mapping[str, str],
    services: Services | None = None,
    config: Any = None,
    on_made: Callable[[Session], None] | None = None,
    parking: Parking | None = None,
) -> AsyncIterator[Session]:
    """A session in a process that is started for this call. Raises PluginFailure. `parking`: used if the
    process serves no other call."""
    contents = await trio.to_thread.run_sync(cage_contents, prepared)
    if parking is not None and not await trio.to_thread.run_sync(serves_one_call, prepared):
        parking = None
    async with open_session(
        prepared.invocation,
        environ=environ,
        services=services,
        config=config,
        secrets=prepared.secrets,
        contents=contents,
        deadline=prepared.deadline,
        on_made=on_made,
        parking=parking,
        caller=prepared.caller,
    ) as session:
        del prepared, contents  # they may be large, and the process may live long
        yield session


def _leaves(failure: BaseException) -> list[PluginError | PluginFailure]:
    """The exceptions of ours in a group: a caller's nursery may have put them there."""
    if isinstance(failure, PluginError | PluginFailure):
        return [failure]
    if isinstance(failure, BaseExceptionGroup):
        return [leaf for each in failure.exceptions for leaf in _leaves(each)]
    return []


def _one_shot_seconds(dialect: Dialect, setting: Setting, asked: float | None) -> float | None:
    if not dialect.one_shot:
        return None
    seconds = asked
    if seconds is None and setting.call is not None:
        seconds = dialect.seconds(setting.call)
    granted = setting.limits.call
    if granted is not None:
        seconds = granted if seconds is None else min(seconds, granted)
    return seconds


def _unprepared(failed: Failure, ended: MonitorEnd | None) -> PluginFailure:
    failure = PluginFailure(failed.outcome, ended.explanation if ended is not None else ())
    report = ended.report if ended is not None else None
    failure.report = with_outcome(report or bare_report(failed.outcome), failed.outcome)
    return failure


def bare_report(outcome: Outcome) -> dict[str, Any]:
    """The report of a launch for which the monitor wrote none."""
    from runner.launch.report import report

    return report(None, outcome, EXIT[outcome.code])
