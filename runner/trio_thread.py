"""Lets tasks of asyncio await coroutines of trio, and the other way round.

One thread runs trio for the process. It is started on first use and ends with the program; all event loops of
the process share it. Each wait is one object: a TrioRun is a coroutine on trio that a task of asyncio waits
for, an AsyncioRun is one on asyncio that a task of trio waits for. Cancelling the waiting task cancels the
coroutine, and the task goes on when the coroutine has ended. A plain call of an open session is begun and
finished without a task of trio: it only waits for an answer. Coroutines run in a copy of the context of the
task that waits, so context variables are seen on the other side.

A program on trio (an anyio program may be one) needs no thread: OnTrio has the same methods.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Generic, TypeVar

import trio

from runner.event_loop import is_on_trio

# How often the thread looks whether a loop was closed while something of it is open.
_LOOK_SECONDS = 1.0
# For a coroutine on asyncio to end after it was cancelled. Then it is left alone, and its loop is told.
_END_SECONDS = 5.0
# For everything that is open when the program ends. It takes less: each wait of a session is bounded.
_EXIT_SECONDS = 30.0

_FORKED = (
    "this was opened before a fork, by the parent process; open the plugin again in this process, or start "
    "processes with the multiprocessing method 'spawn'"
)
_CANCELLED = "it was cancelled"
_EXITED = "the program is ending, and so has the thread that runs plugins"

_MOST_IDLE = 64  # tasks of trio that wait for the next run
_NO_VARIABLES = Context()

_T = TypeVar("_T")
Work = Callable[[], object]
# Gets a function to call when there is an answer. Returns one that returns or raises it, or None.
BeginCall = Callable[[Callable[[], None]], Callable[[], _T] | None]
Loop = asyncio.AbstractEventLoop


class LoopBridge:
    """The way between one event loop of asyncio and trio. What is posted in one turn of either loop crosses
    together, in order: waking the other thread for each would cost half as much as a call."""

    def __init__(self, loop: Loop, thread: TrioThread) -> None:
        self.loop = loop
        self._thread = thread
        self._to_trio: list[TrioRun[Any]] = []
        self._to_loop: list[Work] = []

    def start(self, run: TrioRun[Any]) -> None:
        """Called in a task of the loop."""
        if not self._to_trio:
            self.loop.call_soon(self._flush_to_trio)
        self._to_trio.append(run)

    def _flush_to_trio(self) -> None:
        runs, self._to_trio = self._to_trio, []
        try:
            self._thread.post(partial(self._thread.start_all, runs))
        except RuntimeError as error:  # it has ended
            for run in runs:
                run.refuse(str(error))

    def post_to_loop(self, work: Work) -> None:
        """Called on trio. `work` must not raise. Does nothing if the loop is closed."""
        if not self._to_loop:
            self._thread.bridges_to_flush.append(self)
        self._to_loop.append(work)

    def flush_to_loop(self) -> None:
        works, self._to_loop = self._to_loop, []
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_call_each, works)


def _call_each(works: list[Work]) -> None:
    for work in works:
        work()


class TrioRun(Generic[_T]):
    """A coroutine on trio that a task of asyncio waits for."""

    value: _T
    task: _ReusedTask | None = None  # while it runs
    is_cancelled = False
    _waiter: asyncio.Future[None] | None = None
    _is_told = False
    _has_ended = False
    _error: BaseException | None = None
    _finish: Callable[[], _T] | None = None  # of a call that runs without a task

    def __init__(
        self,
        thread: TrioThread,
        bridge: LoopBridge,
        begin: Callable[[], Awaitable[_T]],
        begin_call: BeginCall[_T] | None = None,
    ) -> None:
        """`begin_call`: tried first."""
        self._thread = thread
        self._bridge = bridge
        self.begin = begin
        self._begin_call = begin_call
        self.context = copy_context()

    # --- on asyncio ---------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancel the coroutine, without waiting for its end."""
        with suppress(RuntimeError):  # the thread has ended
            self._thread.post(self._cancel)

    async def wait(self, *, told: bool = False, shielded: bool = False) -> None:
        """Wait until the coroutine has ended. If this task is cancelled, so is the coroutine, and this raises
        when it has ended. `told`: return also when it has called `tell`. `shielded`: this task was cancelled
        already."""
        cancelled: asyncio.CancelledError | None = None
        try:
            while not (self._has_ended or (told and self._is_told and cancelled is None)):
                self._waiter = self._bridge.loop.create_future()
                try:
                    if cancelled is None and not shielded:
                        await self._waiter
                    else:
                        with _anyio_shield():
                            await self._waiter
                except asyncio.CancelledError as first:
                    if cancelled is None:
                        cancelled = first
                        self.cancel()
        except BaseException:  # ^C, or its loop was closed and this is garbage: nobody waits any more
            self.cancel()
            raise
        error, self._error = self._error, None
        if error is None or (isinstance(error, _Abandoned) and (cancelled is not None or shielded)):
            error = cancelled
        try:
            if error is not None:
                raise error
        finally:
            del error, cancelled  # each is in its own traceback now

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def refuse(self, reason: str) -> None:
        """It cannot be started any more."""
        self._error = _Abandoned(reason)
        self._has_ended = True
        self._wake()

    # --- on trio ------------------------------------------------------------------------------------------

    def has_begun_call(self) -> bool:
        """Begin without a task, if that can be. Returns whether it has begun, or failed."""
        if self._begin_call is None:
            return False
        try:
            self._finish = self.context.run(self._begin_call, self._note_woken)
        except Exception as error:  # noqa: BLE001 -- raised by `wait`
            self.end(error)
            return True
        return self._finish is not None

    def _note_woken(self) -> None:
        self._thread.note_woken(self)

    def finish_call(self) -> None:
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            self.value = finish()
        except Exception as error:  # noqa: BLE001 -- raised by `wait`
            self.end(error)
        else:
            self.end(_Abandoned(_CANCELLED) if self.is_cancelled else None)

    def _cancel(self) -> None:
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()
        else:
            self.finish_call()

    def end_if_abandoned(self) -> None:
        if self._bridge.loop.is_closed():
            self._cancel()

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._has_ended = True
        self.task = None
        self._thread.runs.discard(self)
        self.tell()

    def tell(self) -> None:
        """Let `wait` return before the coroutine has ended."""
        self._is_told = True
        self._bridge.post_to_loop(self._wake)


class _Abandoned(RuntimeError):
    """The coroutine was cancelled on trio's side."""


def _is_cancelled(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


def _anyio_shield() -> Any:
    """While a task ends that anyio has cancelled: anyio cancels it again at every turn of its loop, unless it
    is in a shield."""
    anyio = sys.modules.get("anyio")
    return nullcontext() if anyio is None else anyio.CancelScope(shield=True)


class _ReusedTask:
    """A task of trio that carries out one TrioRun after the other: a task and a cancel scope for each would
    take longer than the rest of the way. One that was cancelled runs no other."""

    def __init__(self, thread: TrioThread) -> None:
        self._scope = trio.CancelScope()
        self._is_cancelled = False
        self._thread = thread
        self._task: trio.lowlevel.Task | None = None  # while it waits for a run
        self._current: TrioRun[Any] | None = None

    def give(self, run: TrioRun[Any]) -> None:
        """Take this one next. Called while it waits, or has not begun. Raises RuntimeError if trio ends."""
        self._current = run
        if self._task is None:
            run.context.run(self._thread.nursery.start_soon, self._run)
        else:
            self._task.context = run.context
            trio.lowlevel.reschedule(self._task)
        run.task = self

    def cancel(self) -> None:
        """Cancel the run that it carries out."""
        self._is_cancelled = True
        self._scope.cancel()

    async def _run(self) -> None:
        try:
            with self._scope:
                await self._run_all()
            if self._current is not None:
                self._current.end(_Abandoned(_CANCELLED))
        except BaseException as error:  # noqa: BLE001 -- raised to the caller of the run
            if self._current is not None:
                self._current.end(_Abandoned(_EXITED) if _is_cancelled(error) else error)

    async def _run_all(self) -> None:
        while self._current is not None:
            try:
                self._current.value = await self._current.begin()
            except Exception as error:
                if self._is_cancelled:
                    raise  # perhaps in a group with the cancellation, which the scope takes out
                self._current.end(error)
            else:
                self._current.end()
            self._current = None
            if self._is_cancelled or len(self._thread.idle) >= _MOST_IDLE:
                return
            self._task = trio.lowlevel.current_task()
            self._task.context = _NO_VARIABLES  # those of its last caller are not held
            self._thread.idle.append(self)
            await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._thread.idle.remove(self)
        return trio.lowlevel.Abort.SUCCEEDED


class AsyncioRun:
    """A coroutine on asyncio that a task of trio waits for."""

    def __init__(self, bridge: LoopBridge, begin: Callable[[], Any]) -> None:
        self._bridge = bridge
        self._begin = begin
        self._context = copy_context()
        self._token = trio.lowlevel.current_trio_token()
        self._done = trio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._is_withdrawn = False

    async def result(self) -> Any:
        """Raises what the coroutine raises, and RuntimeError if its loop is closed or has cancelled it."""
        if self._bridge.loop.is_closed():
            raise RuntimeError("the event loop of the service is closed")
        self._bridge.post_to_loop(self._start)
        try:
            await self._done.wait()
        except trio.Cancelled:
            self._bridge.post_to_loop(self._cancel)
            await self._end()
            if not self._done.is_set() or self._failure() is None:
                raise
        failure = self._failure()
        if failure is not None:
            raise failure
        assert self._task is not None
        return self._task.result()

    async def _end(self) -> None:
        """Wait for the end of a cancelled coroutine. It cannot end while its loop does not run."""
        loop = self._bridge.loop
        with trio.move_on_after(_END_SECONDS if loop.is_running() else 0, shield=True):
            await self._done.wait()
        if not self._done.is_set() and self._task is not None:
            message = f"a service or callback did not end within {_END_SECONDS:g}s of its cancellation"
            told = {"message": message, "task": self._task}
            self._bridge.post_to_loop(partial(loop.call_exception_handler, told))

    def _failure(self) -> Exception | None:
        """What it raised. What ends a task or a program must not end the plugins of others."""
        assert self._task is not None
        if self._task.cancelled():
            return None if self._is_withdrawn else RuntimeError("the event loop cancelled the service")
        error = self._task.exception()
        if error is None or isinstance(error, Exception):
            return error
        return RuntimeError(f"{type(error).__name__} in the service")

    # --- on asyncio ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._is_withdrawn:
            self._task = self._bridge.loop.create_task(call_either(self._begin), context=self._context)
            self._task.add_done_callback(self._note_end)

    def _cancel(self) -> None:
        self._is_withdrawn = True
        if self._task is not None:
            self._task.cancel()

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._done.set)


async def call_either(function: Callable[[], Any]) -> Any:
    """Call a plain function or a coroutine function, and return what it returns."""
    value = function()
    return await value if inspect.isawaitable(value) else value


class TrioThread(trio.abc.Instrument):
    """The thread that runs trio for the tasks of asyncio in this process."""

    nursery: trio.Nursery

    def __init__(self) -> None:
        self.ended = ""  # why it can do nothing any more
        self.runs: set[TrioRun[Any]] = set()  # those that run
        self.idle: list[_ReusedTask] = []
        self._woken: list[TrioRun[Any]] = []
        self.bridges_to_flush: list[LoopBridge] = []
        self._bridges: dict[Loop, LoopBridge] = {}
        self._is_watching = False
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="runner-trio", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            trio.run(self._main, instruments=[self])
        except BaseException as error:  # noqa: BLE001 -- no descriptors for a loop: raised where it was started
            self._failure = error
            self.ended = f"the thread that runs plugins has failed: {error!r}"
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self.nursery:
            self._started.set()
            await self._finish_calls()
        for run in tuple(self.runs):
            run.end(_Abandoned(_EXITED))

    async def _finish_calls(self) -> None:
        """Finish calls that run without tasks: those of one turn together."""
        while True:
            self._has_woken = trio.Event()
            await self._has_woken.wait()
            woken, self._woken = self._woken, []
            for run in woken:
                run.finish_call()

    def note_woken(self, run: TrioRun[Any]) -> None:
        """Called on trio: a call that runs without a task can be finished."""
        self._woken.append(run)
        self._has_woken.set()

    def post(self, work: Work) -> None:
        """Call `work` on trio. Raises RuntimeError if that has ended."""
        if self.ended:
            raise RuntimeError(self.ended)
        self._token.run_sync_soon(work)

    def before_io_wait(self, timeout: float) -> None:
        """Called by trio at the end of each turn of its loop."""
        if self.bridges_to_flush:
            bridges, self.bridges_to_flush = self.bridges_to_flush, []
            for bridge in bridges:
                bridge.flush_to_loop()

    def bridge_of(self, loop: Loop) -> LoopBridge:
        found = self._bridges.get(loop)
        if found is None:
            for known in tuple(self._bridges):
                if known.is_closed():
                    self._bridges.pop(known, None)
            found = self._bridges[loop] = LoopBridge(loop, self)
        return found

    def start_all(self, runs: list[TrioRun[Any]]) -> None:
        """Called on trio."""
        for run in runs:
            if run.is_cancelled:
                run.end(_Abandoned(_CANCELLED))
                continue
            self.runs.add(run)
            if run.has_begun_call():
                continue
            try:
                task = self.idle.pop() if self.idle else _ReusedTask(self)
                task.give(run)
            except RuntimeError:  # the nursery is closed
                run.end(_Abandoned(_EXITED))
        if self.runs and not self._is_watching:
            self._is_watching = True
            self.nursery.start_soon(self._watch_loops)

    async def _watch_loops(self) -> None:
        while self.runs:
            await trio.sleep(_LOOK_SECONDS)
            for run in tuple(self.runs):
                run.end_if_abandoned()
        self._is_watching = False

    def end(self) -> None:
        """Close everything that is open, and wait for it. It takes nothing more."""
        with suppress(RuntimeError):
            self.post(self.nursery.cancel_scope.cancel)
        self.ended = self.ended or _EXITED
        self._thread.join(_EXIT_SECONDS)

    # --- for tasks of asyncio -----------------------------------------------------------------------------

    async def run(self, function: Callable[..., Awaitable[_T]], *args: Any, **named: Any) -> _T:
        """Await a coroutine function of trio."""
        run = self._start_run(partial(function, *args, **named))
        await run.wait()
        return run.value

    async def call(self, begin: BeginCall[_T], function: Callable[[], Awaitable[_T]]) -> _T:
        """Make a call that may need no task of trio. If `begin` returns None, await `function`."""
        run = self._start_run(function, begin)
        await run.wait()
        return run.value

    def _start_run(
        self, begin: Callable[[], Awaitable[_T]], begin_call: BeginCall[_T] | None = None
    ) -> TrioRun[_T]:
        if self.ended:  # first: after a fork there is no running loop either
            raise RuntimeError(self.ended)
        bridge = self.bridge_of(asyncio.get_running_loop())
        run = TrioRun(self, bridge, begin, begin_call)
        bridge.start(run)
        return run

    @asynccontextmanager
    async def enter(self, opening: AbstractAsyncContextManager[_T]) -> AsyncIterator[_T]:
        """Enter a context of trio. What the body raises is raised in it."""
        leaving = trio.Event()
        failure: Exception | None = None
        entered: _T

        async def hold() -> None:
            nonlocal entered
            async with opening as entered:
                run.tell()
                await leaving.wait()
                if failure is not None:
                    raise failure

        run = self._start_run(hold)
        await run.wait(told=True)
        try:
            yield entered
        except Exception as error:
            failure = error
            self.post(leaving.set)
            try:
                await run.wait()
            except Exception as again:
                if again is not error:
                    raise
            finally:
                failure = None
            raise
        except BaseException as error:
            run.cancel()
            if isinstance(error, asyncio.CancelledError):
                await run.wait(shielded=True)
            raise
        else:
            self.post(leaving.set)
            await run.wait()

    def callbacks(self) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]:
        """Returns what makes a function of this task's event loop one for callers on trio. It runs in that
        loop, and may be a coroutine function. Functions among its arguments are those of trio."""
        bridge = self.bridge_of(asyncio.get_running_loop())

        def callback(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
            async def call_on_asyncio(*args: Any, **named: Any) -> Any:
                if self.ended:
                    raise RuntimeError(self.ended)
                given = [partial(self.run, each) if callable(each) else each for each in args]
                return await AsyncioRun(bridge, partial(function, *given, **named)).result()

            return call_on_asyncio

        return callback


class OnTrio:
    """For tasks of trio: nothing has to cross."""

    def post(self, work: Work) -> None:
        work()

    async def run(self, function: Callable[..., Awaitable[_T]], *args: Any, **named: Any) -> _T:
        return await function(*args, **named)

    async def call(self, begin: BeginCall[_T], function: Callable[[], Awaitable[_T]]) -> _T:
        return await function()

    def enter(self, opening: AbstractAsyncContextManager[_T]) -> AbstractAsyncContextManager[_T]:
        return opening

    def callbacks(self) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]:
        def callback(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
            async def call(*args: Any, **named: Any) -> Any:
                return await call_either(partial(function, *args, **named))

            return call

        return callback


TrioSide = TrioThread | OnTrio

_lock = threading.Lock()
_current: TrioThread | None = None


def trio_side() -> TrioSide:
    """Where plugins of this task run. Starts the thread if this is a task of asyncio and there is none."""
    global _current
    if is_on_trio():
        return OnTrio()
    asyncio.get_running_loop()  # raises RuntimeError if there is none
    with _lock:
        if _current is None or _current.ended:
            _current = TrioThread()
            atexit.unregister(end)
            atexit.register(end)
        return _current


def end() -> None:
    """End the thread, if there is one, and everything that is open in it. The next use starts another."""
    thread = _current
    if thread is not None:
        with suppress(KeyboardInterrupt):  # who does not want to wait: the kernel ends the rest
            thread.end()


def _forget() -> None:
    """In a forked child, which has no such thread."""
    global _lock, _current
    _lock = threading.Lock()
    if _current is not None:
        _current.ended = _FORKED
        _current = None


os.register_at_fork(after_in_child=_forget)
