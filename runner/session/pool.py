"""The processes of one open plugin whose contract prepares calls, each for one call or for one at a time.

Each process has a task of its own, which opens its session and ends it. A caller gets the session of a
process that is its alone until its call is over. A process serves a further call only if both calls were
prepared alike, for the same caller and with the same secrets, and the last one succeeded. Processes end with
the pool, or when others need their place. One that waits for a call costs nothing: its task waits for two
events.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio

from runner.exceptions import PluginError, PluginFailure
from runner.launch.stages import Invocation
from runner.outcome import Outcome, with_outcome
from runner.plugin import Plugin
from runner.protocol.dialect import CallEnd, Identity
from runner.session.backlog import Backlog
from runner.session.pending import OnProgress, first_of
from runner.session.prepared import GIVEN_UP, PreparedCall, read_plugin
from runner.session.session import Session
from runner.session.state import CLOSED
from sandbox.speed.value import NamedTuple

OpenPrepared = Callable[[PreparedCall, Callable[[Session], None]], AbstractAsyncContextManager[Session]]
Key = tuple[tuple[str, str], ...]


class Keys(NamedTuple):
    """What a call was prepared for."""

    share: Key  # calls with the same one have a number of processes together
    worker: Key  # calls with the same one may have the same process


class Invoked(NamedTuple):
    """How one prepared call ended that has an answer."""

    value: Any
    identity: Identity
    invocation: dict[str, Any] | None  # the contract's own record of it
    report: dict[str, Any] | None  # None: its process lives on
    stderr: str


class Sharing(NamedTuple):
    """What calls that are prepared alike may use."""

    reuses: bool  # a process serves one call after the other
    most: int  # processes at once


class Worker:
    """One process of the pool."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.session: Session | None = None
        self.failure: Exception | None = None  # of its launch
        self.record: dict[str, Any] | None = None  # of its last call that succeeded
        self.is_busy = True  # it belongs to a caller
        self.scope = trio.CancelScope()  # of its launch
        self.ready = trio.Event()  # or its launch has failed
        self.leave = trio.Event()  # no further call is wanted
        self.done = trio.Event()  # nothing of it is left
        self.refused: PluginError | None = None  # its last call's, whose report is still to come

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
        self._shares: dict[Key, Sharing] = {}
        self._workers: list[Worker] = []
        self._closed = False
        self._salt = os.urandom(32)  # of what stands for secrets in keys
        self.events = events  # of all processes
        self.invocation: dict[str, Any] | None = None  # the record of the call that ended last
        self.report: dict[str, Any] | None = None  # of the process that ended last

    async def call(self, prepared: PreparedCall, on_progress: OnProgress | None = None) -> Invoked:
        """Raises PluginError and PluginFailure, with the record of the call."""
        worker: Worker | None = None
        try:
            worker = await self._acquire(prepared)
            session = await _opened(worker)
            value = await session.call(prepared.call, deadline=prepared.deadline, on_progress=on_progress)
        except BaseException as error:
            if worker is not None:
                await _ended(worker, error, told_early=self._shares[worker.keys.share].reuses)
            self.invocation = _complete(prepared, worker, error)
            raise
        end = session.end or CallEnd(Outcome("ok", "call", "the plugin answered"), value, written=True)
        self.invocation = worker.record = record = prepared.record(end)
        session.end = None  # nor what it answered last
        identity = session.identity
        assert identity is not None
        shared = self._shares[worker.keys.share].reuses and _is_like_others(prepared)
        if shared and not worker.is_leaving:
            worker.is_busy = False
            return Invoked(value, identity, record, None, session.stderr)
        worker.end()
        if not shared:
            await worker.done.wait()
        return Invoked(value, identity, record, _with_record(session.report, record), session.stderr)

    # --- processes ----------------------------------------------------------------------------------------

    async def _acquire(self, prepared: PreparedCall) -> Worker:
        keys = _keys(prepared, self._salt)
        if keys.share not in self._shares:
            plugin = await _read(prepared.invocation)
            contract = prepared.contract
            reuses = contract.reuses(plugin)
            self._shares[keys.share] = Sharing(reuses > 0, reuses or contract.concurrent(plugin))
        share = self._shares[keys.share]
        while not self._closed:
            sharing = [worker for worker in self._workers if worker.keys.share == keys.share]
            idle = [worker for worker in sharing if worker.is_idle]
            alike = next((worker for worker in idle if worker.keys.worker == keys.worker), None)
            if alike is not None and _is_like_others(prepared):
                alike.is_busy = True
                return alike
            if not share.most or len(sharing) < share.most:
                return self._start(keys, prepared)
            leaving = next((worker for worker in sharing if worker.is_leaving), next(iter(idle), None))
            if leaving is None:
                raise PluginFailure(_overloaded(share.most))
            leaving.end()  # an idle one, if this call cannot use it
            with trio.move_on_at(prepared.deadline.at) as clock:
                await leaving.done.wait()
            if clock.cancelled_caught:
                raise PluginFailure(prepared.deadline.passed("launch"))
        raise PluginFailure(CLOSED)

    def _start(self, keys: Keys, prepared: PreparedCall) -> Worker:
        worker = Worker(keys)
        self._workers.append(worker)
        self._nursery.start_soon(self._keep, worker, prepared)
        return worker

    async def _keep(self, worker: Worker, prepared: PreparedCall) -> None:
        """Open a session, and end it when it is not wanted any more or its plugin has ended."""

        def made(session: Session) -> None:
            worker.session = session
            session.tell_events_to(self.events)
            session.state.ends_if_chatty = self._shares[worker.keys.share].reuses

        opening = self._open(prepared, made)
        del prepared  # a process that waits does not hold what its first call said
        try:
            with worker.scope:
                async with opening as session:
                    worker.ready.set()
                    await first_of(worker.leave, session.state.over)
        except Exception as error:  # noqa: BLE001 -- raised to the caller that waits for the process
            worker.failure = error
        finally:
            self._workers.remove(worker)
            if worker.session is not None:
                self.report = _with_record(worker.session.report, worker.record)
                if worker.refused is not None:
                    _add_report(worker.refused, worker.session)
                    worker.refused = None
            worker.leave.set()
            worker.ready.set()
            worker.done.set()

    def close(self) -> None:
        """End all processes. Plugins that work on a call are told, and have their grace."""
        self._closed = True
        for worker in self._workers:
            worker.end()


def _is_like_others(prepared: PreparedCall) -> bool:
    """Files that one call brings along are in its cage only."""
    return not prepared.prepared.contents


async def _read(invocation: Invocation) -> Plugin:
    return await trio.to_thread.run_sync(read_plugin, invocation)


async def _opened(worker: Worker) -> Session:
    if not worker.ready.is_set():
        await worker.ready.wait()
    if worker.failure is not None:
        raise worker.failure
    if worker.session is None or worker.session.identity is None:
        raise PluginFailure(CLOSED)  # the pool was closed during its launch
    return worker.session


async def _ended(worker: Worker, error: BaseException, *, told_early: bool) -> None:
    """A call that did not succeed ends its process, and is told when nothing is left of it: then there is a
    report. `told_early`: not so if it is the plugin's "no", which the plugin may say often. That gets its
    report when the process has ended, and so before it leaves the pool."""
    worker.end()
    if told_early and isinstance(error, PluginError):
        worker.refused = error
    else:
        with trio.CancelScope(shield=True):
            await worker.done.wait()


def _complete(prepared: PreparedCall, worker: Worker | None, error: BaseException) -> dict[str, Any] | None:
    """Complete an error with what its caller should know. Returns the record of the call."""
    session = None if worker is None else worker.session
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


def _keys(prepared: PreparedCall, salt: bytes) -> Keys:
    contract, context = prepared.contract, prepared.call.context
    own = contract.options_of_one_call
    options = {name: text for name, text in prepared.prepared.options.items() if name not in own}
    callers = ((f"caller {name}", str(context.get(name, ""))) for name in contract.caller_keys)
    alike = (("", prepared.call.kind), *sorted(options.items()))
    return Keys(alike, (*alike, *callers, ("secrets", _digest(prepared, salt))))


def _digest(prepared: PreparedCall, salt: bytes) -> str:
    """What stands for the secrets of a call. Secrets that are no JSON are like no others."""
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
    failure: BaseException | None = None
    events = Backlog()
    # What the body raises is kept until after the nursery, which would put it into a group.
    try:
        async with trio.open_nursery() as nursery:
            pool = Pool(nursery, open_prepared, events)
            try:
                yield pool
            except BaseException as error:  # noqa: BLE001 -- raised again below
                failure = error
            pool.close()
    except BaseExceptionGroup as group:
        # The tasks raise nothing. It is ^C, or our caller's cancellation.
        failure = failure or group.exceptions[0]
    finally:
        events.close()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure
