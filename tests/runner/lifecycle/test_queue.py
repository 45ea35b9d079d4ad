"""The queue of calls: who is next, and who has to leave."""

from __future__ import annotations

import pytest

from runner.lifecycle.queue import CallerQueue, QueueFull

MOST, BYTES = 6, 100


def filled(*callers: str) -> CallerQueue[str]:
    queue: CallerQueue[str] = CallerQueue()
    for number, caller in enumerate(callers):
        assert queue.put(caller, f"{caller}{number}", 1, MOST, BYTES) is None
    return queue


def test_callers_take_turns_and_the_calls_of_each_stay_in_order() -> None:
    queue = filled("a", "a", "a", "b", "c", "c")
    assert [queue.take() for _ in range(6)] == ["a0", "b3", "c4", "a1", "c5", "a2"]
    assert len(queue) == 0 and queue.clear() == []


def test_a_caller_with_few_calls_takes_a_place_from_the_one_with_most() -> None:
    queue = filled("a", "a", "a", "a", "a", "b")
    assert queue.put("c", "c0", 1, MOST, BYTES) == "a4"
    assert queue.put("b", "b1", 1, MOST, BYTES) == "a3"
    with pytest.raises(QueueFull):
        queue.put("a", "a9", 1, MOST, BYTES)
    with pytest.raises(QueueFull):  # both have as many then: nothing would be fairer
        queue.put("b", "b2", 1, MOST, BYTES)
    assert len(queue) == MOST and sorted(queue.clear()) == ["a0", "a1", "a2", "b1", "b5", "c0"]


def test_bytes_are_bounded_but_for_a_single_call() -> None:
    queue: CallerQueue[str] = CallerQueue()
    queue.put("a", "large", BYTES + 1, MOST, BYTES)
    with pytest.raises(QueueFull):
        queue.put("b", "small", 1, MOST, BYTES)
    assert queue.take() == "large"
    queue.put("b", "full", BYTES, MOST, BYTES)
    with pytest.raises(QueueFull):
        queue.put("b", "one over", 1, MOST, BYTES)


def test_a_call_that_is_given_up_leaves_its_place_and_its_bytes() -> None:
    queue = filled("a", "b")
    call = "".join(("b", "1"))
    assert not queue.remove("a", call) and not queue.remove("nobody", call)
    kept = queue.clear()
    queue.put("b", kept[1], BYTES, MOST, BYTES)
    assert queue.remove("b", kept[1]) and not queue.remove("b", kept[1])
    queue.put("b", "again", BYTES, MOST, BYTES)
    assert len(queue) == 1
