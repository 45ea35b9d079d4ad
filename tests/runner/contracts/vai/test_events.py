"""Events about an open request: what is passed on, and what is dropped and counted (§8, A31)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.contracts.vai.events import MOST_CONTENT, MOST_PER_SECOND, MOST_PROGRESS, EventCount
from runner.contracts.vai.messages import EVENT_LIMIT, LongEvent
from runner.protocol.dialect import Call, Notice, Progress, Reply
from tests.runner.contracts.vai.conversation import (
    COMPACTOR,
    HARNESS,
    HOOK,
    STREAM,
    TOKEN,
    TOOL,
    called,
    event,
    frame,
    hear,
    succeeded,
)

PROGRESS = {"type": "progress", "message": "working"}
CHUNK = {"type": "output.chunk", "text": "abc"}


def begun(*, takes_content: bool = True) -> EventCount:
    count = EventCount()
    count.begin(TOKEN, takes_content=takes_content)
    return count


def passed(count: EventCount, one: dict[str, Any], times: int, at: float = 0.0) -> int:
    """How many of so many are passed on."""
    events = [each for _ in range(times) for each in count.take(one, at)]
    return sum(isinstance(each, Progress) for each in events)


def test_an_event_is_passed_on_with_its_number_and_its_time() -> None:
    conversation = called()
    first = hear(conversation, event(message="working", percent=10), at=100.0)
    second = hear(conversation, event(), at=101.25)
    assert [*first, *second] == [
        Progress(
            TOKEN, {"type": "progress", "message": "working", "percent": 10, "sequence": 1, "seconds": 0.0}
        ),
        Progress(TOKEN, {"type": "progress", "sequence": 2, "seconds": 1.25}),
    ]
    assert conversation.counters["events"] == 2
    assert hear(conversation, succeeded())[0] == Reply(TOKEN, succeeded()["body"]["result"])


def test_the_number_and_the_time_are_ours() -> None:
    (news,) = hear(called(), event(message="x", sequence=99, seconds=-1), at=5.0)
    assert isinstance(news, Progress) and (news.value["sequence"], news.value["seconds"]) == (1, 0.0)


def test_each_request_counts_anew() -> None:
    conversation = called()
    hear(conversation, event(), event(), succeeded())
    conversation.call(TOKEN + 1, TOOL)
    (news,) = hear(conversation, event("req_2"))
    assert news == Progress(TOKEN + 1, {"type": "progress", "sequence": 1, "seconds": 0.0})


@pytest.mark.parametrize("kind", ["chunk", "tool.output", "a", "a1_.b", "a" * 128])
@pytest.mark.parametrize("call", [STREAM, HOOK, COMPACTOR, HARNESS])
def test_unknown_types_are_passed_on(call: Call, kind: str) -> None:
    """A31."""
    (news,) = hear(called(call), event(kind=kind, text="abc"))
    assert isinstance(news, Progress) and news.value["type"] == kind


@pytest.mark.parametrize("kind", ["", "Progress", "1st", "tool-call", "progress\n", "a b", "é", "a" * 129])
def test_a_type_that_is_none_is_dropped(kind: str) -> None:
    conversation = called(STREAM)
    (notice,) = hear(conversation, event(kind=kind))
    assert isinstance(notice, Notice) and notice.kind == "dropped"
    assert (notice.value["reason"], notice.value["count"]) == ("bad_type", 1)
    assert conversation.counters["dropped_events"] == 1
    assert isinstance(hear(conversation, succeeded())[0], Reply)  # the response counts all the same


def test_content_of_a_tool_that_does_not_stream_is_dropped() -> None:
    conversation = called(TOOL)
    (notice,) = hear(conversation, event(kind="chunk", text="abc"))
    assert isinstance(notice, Notice) and notice.value["reason"] == "content"
    assert "streaming = true" in notice.value["why"]
    (news,) = hear(conversation, event(message="still fine"))
    assert isinstance(news, Progress)
    assert news.value["sequence"] == 2  # a reader sees that one is missing
    assert isinstance(hear(called(STREAM), event(kind="chunk", text="abc"))[0], Progress)  # the control


@pytest.mark.parametrize("message", [1, ["x"], {}])
def test_progress_whose_message_is_no_text_is_dropped(message: Any) -> None:
    (notice,) = hear(called(), event(message=message))
    assert isinstance(notice, Notice)
    assert isinstance(hear(called(), event(message=None))[0], Progress)


@pytest.mark.parametrize("kind", ["progress", "chunk"])
def test_the_length_of_an_event(kind: str) -> None:
    """All bytes of the frame's body count."""
    spare = len(json.dumps(event(kind=kind, message="")).encode())
    longest = event(kind=kind, message="x" * (EVENT_LIMIT - spare))
    conversation = called(STREAM)
    assert isinstance(hear(conversation, longest)[0], Progress)
    (notice,) = hear(conversation, event(kind=kind, message="x" * (EVENT_LIMIT - spare + 1)))
    assert isinstance(notice, Notice) and notice.value["reason"] == "too_long"
    assert isinstance(hear(conversation, event())[0], Progress)


def test_nothing_of_a_long_event_is_kept() -> None:
    long = {**event("r" * 70_000, "t" * 70_000, message="x" * 1_000_000), "protocol": "vai.rpc.v1"}
    message = called().read(json.dumps(long).encode())
    assert isinstance(message.value, LongEvent)
    assert sum(len(part) for part in message.value if isinstance(part, str)) < 500
    assert message.weight == 0
    # A long response is no event.
    assert isinstance(called().read(json.dumps(succeeded(x="y" * 100_000)).encode()).value, dict)


@pytest.mark.parametrize(
    "broken", [{"event": None}, {"event": {"type": 5}}, {"request_id": "req_1", "event": []}]
)
def test_a_long_frame_with_a_broken_event_breaks_nothing(broken: Any) -> None:
    long = frame("event", **{"request_id": "req_1", **broken, "pad": "x" * 100_000})
    assert [type(each) for each in hear(called(), long)] == [Notice]


def test_progress_per_second() -> None:
    count = begun()
    assert passed(count, PROGRESS, MOST_PER_SECOND + 50, at=7.0) == MOST_PER_SECOND
    assert count.dropped == 50
    assert passed(count, PROGRESS, 1, at=7.999) == 0
    assert passed(count, PROGRESS, MOST_PER_SECOND + 1, at=8.0) == MOST_PER_SECOND
    assert passed(count, PROGRESS, 1, at=7.0) == 1  # a clock that goes back stops nothing


def test_progress_per_request() -> None:
    count = begun()
    got = sum(passed(count, PROGRESS, 1, at=float(second)) for second in range(MOST_PROGRESS + 10))
    assert (got, count.dropped) == (MOST_PROGRESS, 10)
    count.begin(TOKEN + 1, takes_content=True)
    assert passed(count, PROGRESS, 1, at=5000.0) == 1


def test_content_is_not_dropped_with_progress() -> None:
    count = begun()
    assert passed(count, PROGRESS, 2 * MOST_PER_SECOND) == MOST_PER_SECOND
    assert passed(count, CHUNK, 5 * MOST_PER_SECOND) == 5 * MOST_PER_SECOND
    assert passed(count, CHUNK, 2 * MOST_PROGRESS) == 2 * MOST_PROGRESS


def test_content_has_a_limit_too() -> None:
    count = begun()
    assert passed(count, CHUNK, MOST_CONTENT + 3) == MOST_CONTENT
    assert (count.dropped, "content" in count.last_drop) == (3, True)


def test_notices_do_not_grow_with_what_is_dropped() -> None:
    count = begun(takes_content=False)
    notices = [each for _ in range(1000) for each in count.take(CHUNK, 0.0)]
    assert len(notices) == 10 and count.dropped == 1000
