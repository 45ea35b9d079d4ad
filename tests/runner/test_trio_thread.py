"""The thread that runs trio: waits in both directions, and everything that may end one of the two sides."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import trio
import uvloop

from runner import trio_thread
from runner.trio_thread import TrioThread, trio_side

SECONDS = 60
VAR: contextvars.ContextVar[str] = contextvars.ContextVar("var", default="")

Main = Callable[[], Coroutine[Any, Any, Any]]


def on_asyncio(main: Main) -> Any:
    return asyncio.run(asyncio.wait_for(main(), SECONDS))


def on_uvloop(main: Main) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(asyncio.wait_for(main(), SECONDS))


either_loop = pytest.mark.parametrize("run", [on_asyncio, on_uvloop], ids=["asyncio", "uvloop"])


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Each test has a thread of its own, and leaves none."""
    yield
    trio_thread.end()
    assert not [each for each in threading.enumerate() if each.name == "runner-trio"]


def here() -> TrioThread:
    found = trio_side()
    assert isinstance(found, TrioThread)
    return found


class Slow:
    """A coroutine function of trio that says when it has begun, and how it has ended."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = ""
        self.goes_on = trio.Event()

    async def __call__(self) -> str:
        self.began.set()
        try:
            await self.goes_on.wait()
            self.ended = "returned"
            return "value"
        except trio.Cancelled:
            self.ended = "cancelled"
            raise

    async def has_begun(self) -> None:
        await asyncio.to_thread(self.began.wait)


# --- values, errors and contexts ----------------------------------------------------------------------------


@either_loop
def test_there_and_back(run: Callable[[Main], Any]) -> None:
    """Values and errors cross in both directions, and each side sees the context of the other."""

    async def asked(number: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        if number < 0:
            raise KeyError("of asyncio")
        return number + 1, VAR.get()

    async def on_trio(callback: Any, number: int) -> Any:
        assert VAR.get() == "outer"
        VAR.set("inner")
        await trio.lowlevel.checkpoint()
        try:
            return await callback(number)
        except KeyError as error:
            raise ValueError("of trio") from error

    async def main() -> None:
        VAR.set("outer")
        thread = here()
        assert await thread.run(on_trio, thread.callbacks()(asked), 1) == (2, "inner")
        assert await thread.run(on_trio, thread.callbacks()(lambda number: number), 7) == 7
        with pytest.raises(ValueError, match="of trio") as caught:
            await thread.run(on_trio, thread.callbacks()(asked), -1)
        assert isinstance(caught.value.__cause__, KeyError)
        assert VAR.get() == "outer"
        many = [thread.run(on_trio, thread.callbacks()(asked), number) for number in range(200)]
        assert await asyncio.gather(*many) == [(number + 1, "inner") for number in range(200)]

    run(main)


def test_functions_among_arguments_cross_back() -> None:
    async def emit(word: str) -> str:
        await trio.lowlevel.checkpoint()  # raises outside of trio
        return word.upper()

    async def service(emit: Any) -> Any:
        await asyncio.sleep(0)
        return await emit("word")

    async def main() -> None:
        thread = here()
        assert await thread.run(thread.callbacks()(service), emit) == "WORD"

    on_asyncio(main)


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit], ids=lambda each: each.__name__)
def test_what_ends_a_task_of_asyncio_does_not_end_the_thread(error: type[BaseException]) -> None:
    async def service() -> None:
        raise error

    async def main() -> None:
        thread = here()
        with pytest.raises(RuntimeError, match="the service"):
            await thread.run(thread.callbacks()(service))
        assert await thread.run(thread.callbacks()(lambda: 1)) == 1

    on_asyncio(main)


# --- cancellation -------------------------------------------------------------------------------------------


@either_loop
@pytest.mark.parametrize("times", [1, 2, 100])
def test_cancelled(run: Callable[[Main], Any], times: int) -> None:
    """Once or often: it is cancelled on trio, and the task ends when that has ended."""
    slow = Slow()

    async def main() -> None:
        task = asyncio.create_task(here().run(slow))
        await slow.has_begun()
        for _ in range(times):
            task.cancel("enough")
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert slow.ended == "cancelled"

    run(main)


def test_cancelled_at_every_turn() -> None:
    """Before it has crossed, while it crosses, and while the value comes back: it always ends, as one of
    two."""

    async def some(turns: int) -> str:
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        return "value"

    async def main() -> None:
        thread = here()
        ends = set()
        for turns in range(4):
            for at in range(30):
                task = asyncio.create_task(thread.run(some, turns))
                for _ in range(at):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    ends.add(await task)
                except asyncio.CancelledError:
                    ends.add("cancelled")
        assert "cancelled" in ends and ends <= {"cancelled", "value"}
        assert await thread.run(some, 1) == "value"
        assert not await _others_of(thread)

    on_asyncio(main)


async def _others_of(thread: TrioThread) -> int:
    """How many are open on trio beside this question."""

    async def count() -> int:
        return len(thread.runs) - 1

    return await thread.run(count)


async def _is_alone(thread: TrioThread) -> None:
    """Wait until nothing else is open on trio."""

    async def wait() -> None:
        while len(thread.runs) > 1:  # noqa: ASYNC110 -- the thread tells nobody, and should not
            await trio.sleep(0.01)

    await thread.run(wait)


def test_an_error_while_it_is_cancelled_is_raised() -> None:
    """As on trio: a cancellation does not hide what went wrong."""
    began = threading.Event()

    async def fails() -> None:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("while it ended")

    async def main() -> None:
        task = asyncio.create_task(here().run(fails))
        await asyncio.to_thread(began.wait)
        task.cancel()
        with pytest.raises(ValueError, match="while it ended") as caught:
            await task
        assert isinstance(caught.value.__context__, trio.Cancelled)

    on_asyncio(main)


def test_a_timeout_of_asyncio() -> None:
    async def main() -> None:
        slow = Slow()

        async def call() -> None:
            async with asyncio.timeout(None) as clock:
                begun = asyncio.create_task(slow.has_begun())
                begun.add_done_callback(lambda _: clock.reschedule(0))
                await here().run(slow)

        with pytest.raises(TimeoutError):
            await call()
        assert slow.ended == "cancelled"
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0

    on_asyncio(main)


async def _give_up(callback: Any) -> bool:
    """Wait for a callback that cancels this wait."""
    with trio.CancelScope() as scope:
        await callback(scope)
    return scope.cancelled_caught


def test_cancelled_on_trio() -> None:
    """The coroutine on asyncio is cancelled, and has ended before trio goes on. A second wait works."""
    order: list[str] = []

    async def main() -> None:
        thread = here()

        async def service(scope: trio.CancelScope) -> None:
            order.append("began")
            thread.post(scope.cancel)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                order.append("ended")

        for _ in range(2):
            assert await thread.run(_give_up, thread.callbacks()(service))
            order.append("trio went on")

    on_asyncio(main)
    assert order == ["began", "ended", "trio went on"] * 2


def test_a_service_that_ignores_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """trio does not wait for it for ever, and the loop's handler is told."""
    monkeypatch.setattr(trio_thread, "_END_SECONDS", 0.05)
    told: list[str] = []

    async def main() -> None:
        goes_on = asyncio.Event()

        async def stubborn(scope: trio.CancelScope) -> None:
            thread.post(scope.cancel)
            while not goes_on.is_set():
                try:
                    await goes_on.wait()
                except asyncio.CancelledError:
                    pass

        asyncio.get_running_loop().set_exception_handler(lambda _, given: told.append(given["message"]))
        thread = here()
        assert await thread.run(_give_up, thread.callbacks()(stubborn))
        goes_on.set()

    on_asyncio(main)
    assert told == ["a service or callback did not end within 0.05s of its cancellation"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_in_a_scope_of_anyio(backend: str) -> None:
    """anyio cancels again and again until the task has left the scope. The wait is shielded, so that the loop
    does not spin meanwhile."""
    turns = 0

    async def stays() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)

    async def main() -> None:
        nonlocal turns
        with anyio.fail_after(SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(trio_side().run, stays)
                await anyio.sleep(0.05)
                group.cancel_scope.cancel()
                if backend == "asyncio":
                    loop: Any = asyncio.get_running_loop()
                    once = loop._run_once

                    def counted() -> None:
                        nonlocal turns
                        turns += 1
                        once()

                    loop._run_once = counted

    anyio.run(main, backend=backend)
    assert turns < 100  # without the shield it is some ten thousand


# --- contexts -----------------------------------------------------------------------------------------------


class Opening:
    """A context of trio, and what happened to it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.is_left = threading.Event()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[str]:
        async with trio.open_nursery() as nursery:  # which has to be left in the task that entered it
            nursery.start_soon(trio.sleep_forever)
            try:
                yield "entered"
                self.seen.append("left")
            except BaseException as error:
                self.seen.append(type(error).__name__)
                if isinstance(error, ValueError):
                    error.add_note("noted on trio")
                raise
            finally:
                nursery.cancel_scope.cancel()
                self.is_left.set()


@either_loop
def test_a_context(run: Callable[[Main], Any]) -> None:
    """What the body raises passes through the context on trio, as the same object. Entering and leaving may
    be the work of different tasks."""
    opening = Opening()

    async def main() -> None:
        thread = here()
        async with thread.enter(opening()) as entered:
            assert entered == "entered"
        context = thread.enter(opening())
        await asyncio.create_task(context.__aenter__())
        await asyncio.create_task(context.__aexit__(None, None, None))
        async with asyncio.timeout(SECONDS):
            with pytest.raises(asyncio.CancelledError):
                async with thread.enter(opening()):
                    raise asyncio.CancelledError
        assert not await _others_of(thread)

    run(main)
    assert opening.seen == ["left", "left", "Cancelled"]


def test_an_error_in_the_body_passes_through_trio() -> None:
    seen: list[BaseException] = []

    @asynccontextmanager
    async def opening() -> AsyncIterator[None]:
        try:
            yield
        except ValueError as error:
            seen.append(error)
            raise

    @asynccontextmanager
    async def leaving_fails() -> AsyncIterator[None]:
        try:
            yield
        finally:
            raise KeyError("while leaving")

    async def main() -> None:
        error = ValueError("of the body")
        error.__cause__ = KeyError("its cause")
        with pytest.raises(ValueError, match="of the body") as caught:
            async with here().enter(opening()):
                raise error
        assert caught.value is error and seen == [error]
        assert error.__context__ is None
        with pytest.raises(KeyError, match="while leaving") as worse:
            async with here().enter(leaving_fails()):
                raise ValueError("of the body")
        assert isinstance(worse.value.__context__, ValueError)

    on_asyncio(main)


# --- ends ---------------------------------------------------------------------------------------------------


@either_loop
def test_one_loop_after_the_other_and_several_at_once(run: Callable[[Main], Any]) -> None:
    threads = set()

    async def nothing() -> int:
        return threading.get_ident()

    async def main() -> None:
        threads.add(await here().run(nothing))

    for _ in range(3):
        run(main)
    others = [threading.Thread(target=run, args=(main,)) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join(SECONDS)
    assert len(threads) == 1 and threading.get_ident() not in threads


@either_loop
def test_a_loop_that_is_closed_with_calls_in_flight(run: Callable[[Main], Any]) -> None:
    """They are cancelled on trio. Nothing is said about the plugin: asyncio itself complains about tasks that
    were destroyed."""
    slow, opening = Slow(), Opening()
    loop = uvloop.new_event_loop() if run is on_uvloop else asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, told: None)
    kept: list[Any] = []

    async def begin() -> None:
        thread = here()
        kept.append(asyncio.create_task(thread.run(slow)))
        context = thread.enter(opening())
        kept.append(context)
        await context.__aenter__()
        await slow.has_begun()

    loop.run_until_complete(begin())
    loop.close()
    assert opening.is_left.wait(SECONDS)

    async def later() -> None:
        await _is_alone(here())
        assert len(here()._bridges) == 1  # nothing keeps the closed loop

    run(later)
    assert (slow.ended, opening.seen) == ("cancelled", ["Cancelled"])


def test_a_forgotten_context_is_left_when_its_loop_is_done() -> None:
    """As in a notebook: it was entered, and nobody leaves it."""
    opening = Opening()
    kept: list[Any] = []

    async def main() -> None:
        kept.append(here().enter(opening()))
        await kept[0].__aenter__()

    on_asyncio(main)
    assert opening.is_left.wait(SECONDS)


def test_a_coroutine_that_is_dropped_is_cancelled() -> None:
    slow = Slow()

    async def main() -> None:
        thread = here()
        waiting = thread.run(slow)
        waiting.send(None)  # as a task does at its first turn
        await slow.has_begun()
        waiting.close()
        del waiting
        gc.collect()
        await _is_alone(thread)
        assert slow.ended == "cancelled"

    on_asyncio(main)


def test_the_end_closes_what_is_open_and_the_next_use_begins_anew() -> None:
    """A program that ends does the same."""
    slow = Slow()
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[TrioThread, asyncio.Task[str]]:
        thread = here()
        task = asyncio.create_task(thread.run(slow))
        await slow.has_begun()
        return thread, task

    thread, task = loop.run_until_complete(begin())
    trio_thread.end()
    assert slow.ended == "cancelled"
    with pytest.raises(RuntimeError, match="the program is ending"):
        loop.run_until_complete(task)
    with pytest.raises(RuntimeError, match="the program is ending"):
        loop.run_until_complete(thread.run(slow))
    with pytest.raises(RuntimeError, match="the program is ending"):
        loop.run_until_complete(_visited(thread))

    async def again() -> bool:
        return here() is not thread

    assert loop.run_until_complete(again())
    loop.close()


async def _visited(thread: TrioThread) -> None:
    await thread.callbacks()(lambda: None)()


def test_a_loop_that_stands_still_does_not_hold_up_the_end() -> None:
    """The service runs on a loop that nobody runs any more."""
    began = threading.Event()
    loop = asyncio.new_event_loop()

    async def service() -> None:
        began.set()
        await asyncio.Event().wait()

    async def begin() -> asyncio.Task[Any]:
        thread = here()
        task = asyncio.create_task(thread.run(thread.callbacks()(service)))
        await asyncio.to_thread(began.wait)
        return task

    task = loop.run_until_complete(begin())
    trio_thread.end()
    with pytest.raises(RuntimeError, match="the program is ending"):
        loop.run_until_complete(task)
    for each in asyncio.all_tasks(loop):
        each.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(each)
    loop.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork() -> None:
    """The child has no such thread: what was open is refused with the reason, and a new loop has its own."""
    slow = Slow()
    read, write = os.pipe()

    async def nothing() -> str:
        return "a thread of its own"

    async def child(thread: TrioThread) -> list[str]:
        said = []
        try:
            await thread.run(nothing)
        except RuntimeError as error:
            said.append(str(error))
        assert here() is not thread
        return [*said, await here().run(nothing)]

    async def main() -> None:
        thread = here()
        task = asyncio.create_task(thread.run(slow))
        await slow.has_begun()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, "\n".join(asyncio.run(child(thread))).encode())
            finally:
                os._exit(0)
        os.close(write)
        assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)
        thread.post(slow.goes_on.set)
        assert await task == "value"  # the parent has noticed nothing

    on_asyncio(main)
    with open(read) as pipe:
        refused, own = pipe.read().splitlines()
    assert "opened before a fork" in refused and own == "a thread of its own"
