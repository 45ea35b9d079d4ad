from __future__ import annotations

import gc
import socket
from collections.abc import Iterator

import pytest

from sandbox.broker.tasks import CLOSED, Stopped, Tasks, Turns
from sandbox.gate.loop import READ, WRITE, Loop


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    yield Tasks(Loop())
    gc.collect()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def run(tasks: Tasks, ends: list[object], count: int = 1) -> None:
    for _ in range(1000):
        if len(ends) >= count:
            return
        tasks.loop.run_once(1.0)
    raise AssertionError("it did not end")


def test_two_tasks_wait_for_the_two_directions_of_one_socket(
    tasks: Tasks, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    ends: list[object] = []

    async def wait(mask: int) -> None:
        assert await tasks.wait([(ours.fileno(), mask)]) == (ours.fileno(), mask)
        ends.append(mask)

    for mask in (READ, CLOSED, WRITE):
        tasks.start(wait(mask), lambda failure: None)
    run(tasks, ends)
    assert ends == [WRITE]
    theirs.send(b"x")
    run(tasks, ends, 2)
    theirs.shutdown(socket.SHUT_WR)
    run(tasks, ends, 3)
    assert ends == [WRITE, READ, CLOSED]


def test_a_time_and_a_wake(tasks: Tasks) -> None:
    ends: list[object] = []

    async def wait(seconds: float | None) -> None:
        until = None if seconds is None else tasks.loop.now + seconds
        ends.append(await tasks.wait(until=until))

    tasks.start(wait(0.0), ends.append)
    woken = tasks.start(wait(None), ends.append)
    run(tasks, ends, 2)
    tasks.loop.call_at(tasks.loop.now, woken.wake)
    run(tasks, ends, 4)
    assert ends == [None] * 4 and woken.ended
    woken.wake()  # nothing happens any more


def test_a_failure_goes_to_who_started_it(tasks: Tasks) -> None:
    ends: list[BaseException | None] = []

    async def fail() -> None:
        await tasks.wait()

    task = tasks.start(fail(), ends.append)
    tasks.loop.run_once(0)
    task.throw(KeyError("x"))
    assert isinstance(ends[0], KeyError)
    stopped = tasks.start(fail(), ends.append)
    tasks.loop.run_once(0)
    stopped.stop()
    assert isinstance(ends[1], Stopped)


def test_who_never_has_to_wait_lets_others_have_their_turn(tasks: Tasks) -> None:
    ends: list[object] = []
    steps = [0]

    async def greedy() -> None:
        turns = Turns(tasks)
        while not ends:
            await turns.take()
            steps[0] += 1

    async def other() -> None:
        for _ in range(5):
            await tasks.wait(until=tasks.loop.now + 1e-6)
        ends.append("other")

    tasks.start(greedy(), ends.append)
    tasks.start(other(), lambda failure: None)
    run(tasks, ends, 2)
    assert 0 < steps[0] < 1000


def test_a_broken_descriptor_that_nobody_waits_for_is_not_reported_again(
    tasks: Tasks, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    ends: list[object] = []

    async def wait() -> None:
        for _ in range(2):
            ends.append(await tasks.wait([(ours.fileno(), READ)]))
            assert ours.recv(1) == b""
            await tasks.wait(until=tasks.loop.now + 1e-6)

    tasks.start(wait(), ends.append)
    theirs.close()
    run(tasks, ends, 3)
    assert ends == [(ours.fileno(), READ)] * 2 + [None]
    assert ours.fileno() not in tasks.loop._handlers or not tasks.loop._masks[ours.fileno()]
