"""How a session begins (the cage is ordered, the dialect made, hands are shaken), and how it is left."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from runner.exceptions import PluginError, PluginFailure
from runner.launch.forkserver import LaunchTicket
from runner.launch.monitor import MonitorEnd
from runner.launch.remote_cell import open_cage
from runner.launch.stages import Invocation
from runner.outcome import EXIT, Failure, Outcome, with_outcome
from runner.protocol.dialect import Answer, Call, Dialect, Setting
from runner.protocol.host_services import Gate, Services
from runner.session.session import Session


def dialect_of(contract: str) -> Any:
    """The module runner.contracts.NAME.dialect."""
    return importlib.import_module(f"runner.contracts.{contract}.dialect")


def _services_of(contract: str) -> Any:
    try:
        return importlib.import_module(f"runner.contracts.{contract}.services")
    except ModuleNotFoundError:
        return _Nothing()


class _Nothing:
    """For contracts whose plugins ask nothing of their host."""

    METHODS: Mapping[str, str] = {}

    async def serve(self, method: str, params: Any, services: Services, emit: Any) -> Any:
        raise AssertionError("no method is known")

    def refused(self, method: str, why: str) -> Answer:
        return Answer(error=(-32601, "method not found", None))


@asynccontextmanager
async def open_session(
    invocation: Invocation,
    *,
    environ: Mapping[str, str],
    services: Services | None = None,
    call: Call | None = None,
    seconds: float | None = None,
    config: Any = None,
    sent: LaunchTicket | None = None,
    made: Callable[[Session], None] | None = None,
) -> AsyncIterator[Session]:
    """A plugin, launched and shaken hands with. Raises PluginFailure.

    `call`: for contracts of one call per process, which one. `seconds`: for those, of everything together.
    `made`: shown the session before the handshake, for who wants to hear its events, or to have its report,
    also if it never comes to more.
    """
    services = services or Services()
    failure: BaseException | None = None
    session: Session | None = None
    try:
        async with open_cage(invocation, environ=environ, sent=sent) as cage:
            try:
                prepared = await cage.prepared()
            except Failure as failed:
                raise _unprepared(invocation, failed, cage.has_ended) from None
            plugin = prepared.plugin
            gate = Gate(_services_of(plugin.contract), services, prepared.host)
            setting = Setting(
                plugin,
                prepared.limits,
                environ,
                prepared.declare,
                call,
                config,
                gate.offered,
                prepared.on_hook_failure,
            )
            dialect: Dialect = dialect_of(plugin.contract).make(setting)
            session = Session(cage, prepared, dialect, gate, _one_shot_seconds(dialect, setting, seconds))
            if made is not None:
                made(session)
            try:
                # What the body raises is taken past the nursery, which would put it into a group.
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.live)
                    try:
                        await session.open()
                        yield session
                    except BaseException as error:  # noqa: BLE001 -- raised again below
                        failure = error
                    try:
                        await session.close()
                    except BaseException as error:  # noqa: BLE001 -- a second ^C
                        failure = error
                    session.leave()
            finally:  # also if our caller is cancelled: the nursery says so once more
                session.settle(cage.has_ended, lambda outcome: bare_report(invocation, outcome))
    except Failure as failed:  # nothing could be ordered
        raise _unprepared(invocation, failed, None) from None
    if failure is not None:
        assert session is not None
        for leaf in _leaves(failure):
            if leaf.report is not None:
                continue  # of another plugin, which was opened and closed while this one lived
            leaf.stderr = session.stderr
            if session.report is not None:
                leaf.report = with_outcome(session.report, leaf.outcome)
        try:
            raise failure
        finally:
            del failure


def _leaves(failure: BaseException) -> list[PluginError | PluginFailure]:
    """Those of ours in it: a caller's nursery makes a group of them."""
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


def _unprepared(invocation: Invocation, failed: Failure, ended: MonitorEnd | None) -> PluginFailure:
    failure = PluginFailure(failed.outcome, ended.explanation if ended is not None else ())
    report = ended.report if ended is not None else None
    failure.report = with_outcome(report or bare_report(invocation, failed.outcome), failed.outcome)
    return failure


def bare_report(invocation: Invocation, outcome: Outcome) -> dict[str, Any]:
    """Where nobody was left to write one: what was asked, and what is known of its end."""
    from runner.launch.report import report

    return report(None, outcome, EXIT[outcome.code])
