from __future__ import annotations

import socket

from sandbox.gate.loop import READ, Loop, RateLimiter


def test_timers_run_in_order_and_a_cancelled_one_does_not() -> None:
    loop, ran = Loop(), list[str]()
    loop.call_later(0.002, lambda: ran.append("second"))
    loop.call_later(0.001, lambda: ran.append("first"))
    loop.cancel(loop.call_later(0.0, lambda: ran.append("never")))
    while len(ran) < 2:
        loop.run_once()
    assert ran == ["first", "second"]


def test_cancelled_timers_do_not_pile_up() -> None:
    loop = Loop()
    for _ in range(10000):
        loop.cancel(loop.call_later(1000, lambda: None))
    assert len(loop._heap) < 600


def test_a_retired_descriptor_is_not_used_again_within_one_wait() -> None:
    """Otherwise an event that is still to be handled would reach a socket with the same number."""
    loop = Loop()
    pairs = [socket.socketpair() for _ in range(2)]
    heard: list[int] = []
    numbers = [pair[0].fileno() for pair in pairs]

    def retire_other(me: int, other: int) -> None:
        heard.append(me)
        if pairs[other][0].fileno() >= 0:
            loop.retire(pairs[other][0])
            with socket.socket() as new:
                assert new.fileno() not in numbers

    for me in (0, 1):
        loop.watch(numbers[me], READ, lambda _, me=me: retire_other(me, 1 - me))  # type: ignore[misc]
        pairs[me][1].send(b"x")
    loop.run_once()
    assert len(heard) == 1  # the other was retired before its event
    assert pairs[1 - heard[0]][0].fileno() == -1
    for pair in pairs:
        pair[0].close()
        pair[1].close()


def test_the_brake_stops_reading_for_a_second() -> None:
    loop = Loop()
    left, right = socket.socketpair()
    with left, right:
        heard: list[int] = []
        loop.watch(left.fileno(), READ, heard.append)
        limiter = RateLimiter(loop, 3, (left.fileno(),))
        right.send(b"x")
        assert [limiter.count() for _ in range(4)] == [False, False, True, True]
        loop.run_once(0)
        assert heard == []
        limiter._release()
        loop.run_once(0)
        assert len(heard) == 1
        loop.now += 1
        assert limiter.count() is False


def test_a_burst_is_followed_by_a_rate() -> None:
    """Counted against a clock of its own: 10 at once, then 2 a second, however they come."""
    loop = Loop()
    passed = 0
    limiter = RateLimiter(loop, 2, (), 10)
    for _ in range(60):
        while not limiter.count():
            passed += 1
        passed += 1  # the one that stopped it
        loop.now += 1
        limiter._release()
    assert passed == 10 + 59 * 2
    loop.now += 3600  # a rest gives no more than the burst
    assert [limiter.count() for _ in range(10)] == [False] * 9 + [True]
