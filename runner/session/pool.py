"""The processes of one open plugin whose contract prepares calls, each for one call or for one at a time.

Each process has a task of its own, which opens its session and ends it. A caller gets the session of a
process that no other call uses until this call is over. A process serves a further call only if both calls
were prepared alike, for the same caller and with the same secrets, and the last one succeeded. Processes end
with the pool, or when others need their place. One that waits for a call costs nothing: its task waits for
two events.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

import trio

from runner.exceptions import PluginError, PluginFailure
from runner.launch.stages import Invocation
from runner.outcome import Outcome, with_outcome
from runner.plugin import Plugin
from runner.protocol.calls import CallResult, OnProgress
from runner.protocol.dialect import CallEnd
from runner.session import account
from runner.session.backlog import Backlog
from runner.session.nursery import open_plain_nursery
from runner.session.pending import at_checkpoints, first_of
from runner.session.prepared import GIVEN_UP, PreparedCall, read_plugin
from runner.session.session import Session
from runner.session.state import CLOSED

OpenPrepared = Callable[[PreparedCall, Callable[[Session], None]], AbstractAsyncContextManager[Session]]
Key = tuple[tuple[str, str], ...]


class PoolKeys(NamedTuple):
    """The keys by which prepared calls share limits and processes."""

    share: Key  # calls with the same key share one limit on the number of processes
    process: Key  # calls with the same key may use the same process


class SharingRules(NamedTuple):
    """How calls that are prepared alike share processes."""

    reuses: bool  # a process serves one call after the other
    most: int  # processes at once


class PooledProcess:
    """A process of the pool, which serves prepared calls."""

    def __init__(self, keys: PoolKeys) -> None:
        self.keys = keys
        self.session: Session | None = None
        self.failure: Exception | None = None  # of its launch
        self.record: dict[str, Any] | None = None  # of its last call that succeeded
        self.is_busy = True  # a call uses it
        self.scope = trio.CancelScope()  # of its launch
        self.ready = trio.Event()  # launched, or failed to
        self.leave = trio.Event()  # it should end: no further call uses it
        self.done = trio.Event()  # the process and its session have ended
        self.refused: PluginError | None = None  # the error of its last call, which still lacks its report

    @property
    def is_idle(self) -> bool:
        return not self.is_busy and not self.is_leaving

    @property
    def is_leaving(self) -> bool:
        return self.leave.is_set() or (self.session is not None and self.session.is_over)

    def end(self) -> None:
        self.leave.set()
        if not self.ready.is_set():
            self.scope.cancel()


class Pool:
    """Made by `open_pool`."""

    def __init__(self, nursery: trio.Nursery, open_prepared: OpenPrepared, events: Backlog) -> None:
        self._nursery = nursery
        self._open = open_prepared
        self._shares: dict[Key, SharingRules] = {}
        self._processes: list[PooledProcess] = []
        self._closed = False
        self._salt = os.urandom(32)  # for the digests of secrets in keys
        self.events = events  # of all processes
        self.invocation: dict[str, Any] | None = None  # the record of the call that ended last
        self.report: dict[str, Any] | None = None  # of the process that ended last

    @at_checkpoints
    async def call(self, prepared: PreparedCall, on_progress: OnProgress | None = None) -> CallResult:
        """Raises PluginError and PluginFailure, with the record of the call."""
        process: PooledProcess | None = None
        try:
            process = await self._acquire(prepared)
            session = await _wait_until_open(process)
            value = await session.call(prepared.call, deadline=prepared.deadline, on_progress=on_progress)
        except BaseException as error:
            if process is not None:
                await _end_process(process, error, early=self._shares[process.keys.share].reuses)
            self.invocation = _complete(prepared, process, error)
            if process is None or process.session is None:
                account.enter(self.invocation)
            else:
                account.enter(self.invocation, process.session.report, process.session.stderr)
            raise
        end = session.end or CallEnd(Outcome("ok", "call", "the plugin answered"), value, written=True)
        self.invocation = process.record = record = prepared.record(end)
        session.end = None  # an idle process does not hold its last answer
        identity = session.identity
        assert identity is not None
        shared = self._shares[process.keys.share].reuses and _may_share(prepared)
        if shared and not process.is_leaving:
            process.is_busy = False
            account.enter(record, None, session.stderr)
            return CallResult(value, identity, {}, session.stderr, record)
        process.end()
        if not shared:
            await process.done.wait()
        account.enter(record, session.report, session.stderr)
        report = _with_record(session.report, record) or {}
        return CallResult(value, identity, report, session.stderr, record)

    # --- processes ----------------------------------------------------------------------------------------

    async def _acquire(self, prepared: PreparedCall) -> PooledProcess:
        keys = _keys(prepared, self._salt)
        if keys.share not in self._shares:
            plugin = await _read(prepared.invocation)
            reuses = prepared.calls.reuses(plugin)
            self._shares[keys.share] = SharingRules(reuses > 0, reuses or prepared.calls.concurrent(plugin))
        share = self._shares[keys.share]
        while not self._closed:
            sharing = [process for process in self._processes if process.keys.share == keys.share]
            idle = [process for process in sharing if process.is_idle]
            alike = next((process for process in idle if process.keys.process == keys.process), None)
            if alike is not None and _may_share(prepared):
                alike.is_busy = True
                return alike
            if not share.most or len(sharing) < share.most:
                return self._start(keys, prepared)
            leaving = next((process for process in sharing if process.is_leaving), next(iter(idle), None))
            if leaving is None:
                raise PluginFailure(_overloaded(share.most))
            leaving.end()  # an idle process that this call cannot use
            with trio.move_on_at(prepared.deadline.at) as clock:
                await leaving.done.wait()
            if clock.cancelled_caught:
                raise PluginFailure(prepared.deadline.passed("launch"))
        raise PluginFailure(CLOSED)

    def _start(self, keys: PoolKeys, prepared: PreparedCall) -> PooledProcess:
        process = PooledProcess(keys)
        self._processes.append(process)
        self._nursery.start_soon(self._run_process, process, prepared)
        return process

    async def _run_process(self, process: PooledProcess, prepared: PreparedCall) -> None:
        """Open a session, and end it when the process should leave or its plugin has ended."""

        def on_made(session: Session) -> None:
            process.session = session
            session.forward_events_to(self.events)
            session.state.ends_if_talkative = self._shares[process.keys.share].reuses

        opening = self._open(prepared, on_made)
        del prepared  # an idle process does not hold the input of its first call
        try:
            with process.scope:
                async with opening as session:
                    process.ready.set()
                    await first_of(process.leave, session.state.over)
        except Exception as error:  # noqa: BLE001 -- raised to the caller that waits for the process
            process.failure = error
        finally:
            self._processes.remove(process)
            if process.session is not None:
                self.report = _with_record(process.session.report, process.record)
                if process.refused is not None:
                    _add_report(process.refused, process.session)
                    process.refused = None
            process.leave.set()
            process.ready.set()
            process.done.set()

    def close(self) -> None:
        """End all processes. A plugin that works on a call is told first and gets its grace period."""
        self._closed = True
        for process in self._processes:
            process.end()


def _may_share(prepared: PreparedCall) -> bool:
    """Whether other calls may use the same process: not if the call has files of its own in the cage."""
    return not prepared.prepared.contents


async def _read(invocation: Invocation) -> Plugin:
    return await trio.to_thread.run_sync(read_plugin, invocation)


async def _wait_until_open(process: PooledProcess) -> Session:
    if not process.ready.is_set():
        await process.ready.wait()
    if process.failure is not None:
        raise process.failure
    if process.session is None or process.session.identity is None:
        raise PluginFailure(CLOSED)  # the pool was closed during its launch
    return process.session


async def _end_process(process: PooledProcess, error: BaseException, *, early: bool) -> None:
    """End the process of a failed call and wait for its end, so that the error has a report.

    `early`: do not wait if the plugin returned an error, which may happen often. The report is added to that
    error when the process has ended."""
    process.end()
    if early and isinstance(error, PluginError):
        process.refused = error
    else:
        with trio.CancelScope(shield=True):
            await process.done.wait()


def _complete(
    prepared: PreparedCall, process: PooledProcess | None, error: BaseException
) -> dict[str, Any] | None:
    """Add record, report and stderr to an error. Returns the record of the call."""
    session = None if process is None else process.session
    end = None if session is None else session.end
    if not isinstance(error, PluginError | PluginFailure):
        return prepared.record(end or CallEnd(GIVEN_UP))
    if end is None or end.outcome.code == "ok":
        refusal = error.refusal if isinstance(error, PluginError) else None
        end = CallEnd(error.outcome, refusal=refusal)
    error.invocation = record = prepared.record(end)
    if session is not None:
        _add_report(error, session)
    error.report = _with_record(error.report, record)
    return record


def _add_report(error: PluginError | PluginFailure, session: Session) -> None:
    error.stderr = session.stderr
    if session.report is not None:
        error.report = _with_record(with_outcome(session.report, error.outcome), error.invocation)


def _with_record(report: dict[str, Any] | None, record: dict[str, Any] | None) -> dict[str, Any] | None:
    return report if report is None or record is None else {**report, "invocation": record}


def _keys(prepared: PreparedCall, salt: bytes) -> PoolKeys:
    calls, context = prepared.calls, prepared.call.context
    own = calls.OPTIONS_OF_ONE_CALL
    options = {name: text for name, text in prepared.prepared.options.items() if name not in own}
    callers = ((f"caller {name}", str(context.get(name, ""))) for name in calls.CALLER_KEYS)
    alike = (("", prepared.call.kind), *sorted(options.items()))
    return PoolKeys(alike, (*alike, *callers, ("secrets", _digest(prepared, salt))))


def _digest(prepared: PreparedCall, salt: bytes) -> str:
    """A digest of the secrets of a call. Secrets that are not JSON get a random one, so they match no
    others."""
    try:
        text = json.dumps(dict(prepared.secrets), sort_keys=True, default=_hex)
    except (TypeError, ValueError, RecursionError):
        return os.urandom(32).hex()
    return hashlib.blake2b(text.encode(), key=salt).hexdigest()


def _hex(value: object) -> object:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    raise TypeError


def _overloaded(most: int) -> Outcome:
    processes = "the process" if most == 1 else f"all {most} processes"
    message = f"{processes} that may serve this call at once are busy"
    hint = "call again when one of the other calls has ended; the manifest or its binding says how many"
    return Outcome("overloaded", "launch", message, "max_concurrency", hint)


@asynccontextmanager
async def open_pool(open_prepared: OpenPrepared) -> AsyncIterator[Pool]:
    events = Backlog()
    try:
        async with open_plain_nursery() as nursery:
            pool = Pool(nursery, open_prepared, events)
            try:
                yield pool
            finally:
                pool.close()
    finally:
        events.close()
