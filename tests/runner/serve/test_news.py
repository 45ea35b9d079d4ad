"""What a plugin says during a call takes a bounded room until its client reads it."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from runner.serve.news import _MOST_BYTES, _MOST_NEWS, NewsQueue

MANY_PARTS = list(range(1000))
LONG = "x" * (_MOST_BYTES // 3)


@pytest.mark.parametrize(
    ("news", "kept"),
    [
        ([{"progress": 1}] * (_MOST_NEWS + 5), _MOST_NEWS),
        ([{"message": LONG}] * 10, 2),
        ([{"message": LONG}, *[{"progress": 1}] * 10], 11),
        ([MANY_PARTS, MANY_PARTS, {"progress": 1}], 1),
        ([{"progress": 1}, MANY_PARTS, {"progress": 2}], 2),
        (["x" * _MOST_BYTES], 0),
    ],
)
@pytest.mark.trio
async def test_what_nobody_reads_is_bounded_and_what_is_dropped_is_counted(
    news: list[Any], kept: int
) -> None:
    queue = NewsQueue[Any]()
    for _ in range(2):  # what was read makes room
        before = queue.dropped
        for each in news:
            queue.put(each, each)
        assert queue.dropped - before == len(news) - kept
        found = [await anext(queue) for _ in range(kept)]
        assert len(found) == kept and all(each in news for each in found)
    queue.close()
    assert [each async for each in queue] == []


@pytest.mark.trio
async def test_a_reader_who_waits_gets_news_of_any_size(nursery: trio.Nursery) -> None:
    queue = NewsQueue[Any]()
    found: list[Any] = []

    async def read() -> None:
        async for each in queue:
            found.append(each)

    nursery.start_soon(read)
    for each in (MANY_PARTS, "x" * 3 * _MOST_BYTES):
        await trio.testing.wait_all_tasks_blocked()
        queue.put(each, each)
    queue.close()
    await trio.testing.wait_all_tasks_blocked()
    assert found == [MANY_PARTS, "x" * 3 * _MOST_BYTES] and queue.dropped == 0
