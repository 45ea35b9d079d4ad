"""What a plugin is told: the params, and when. Nothing is told while a request of ours is open."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from runner.contracts.ainb.dialect import AinbDialect
from runner.contracts.ainb.host.snapshots import SnapshotClient
from runner.contracts.ainb.messages import BODY_LIMIT
from runner.contracts.ainb.notifications import (
    MOST_KEYS,
    MOST_MOUSE,
    encode_message,
    make_params,
)
from runner.protocol import wire
from runner.protocol.bus import SnapshotBus
from runner.protocol.dialect import Answer, Call, CallRefused, HostCall, Ready, Reply, Send
from runner.protocol.header_frames import header_frame
from runner.protocol.memory import delivery_cost
from tests.runner.contracts.ainb.conversation import (
    DECLARED,
    ONE_CELL,
    WELCOME,
    answer,
    ask,
    b64,
    dialect,
    error,
    hear,
    lanes,
    ready,
    sent,
)

EVENT, KEY = "plugin/handle_event", "plugin/handle_key"
MOUSE, ACTION = "plugin/handle_mouse", "plugin/handle_action"

RENDER = Call("render", "", {"width": 1, "height": 1})
TOOL = Call("tool", "burn")
DONE = {"stdout": "", "stderr": "", "exit_code": 0}
CALLED = 2  # the id of the first call


def event(number: int) -> dict[str, Any]:
    return {"topic": "t", "payload": b64(str(number))}


def key(character: str = "j") -> dict[str, Any]:
    return {"screen_id": "burn", "key": {"code": {"type": "char", "ch": character}}}


def mouse(col: int = 3) -> dict[str, Any]:
    return {"screen_id": "burn", "mouse": {"kind": {"type": "moved"}, "col": col, "row": 4}}


# --- §6 params ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "given", "params"),
    [
        (EVENT, {"topic": "t", "payload": "aGk="}, {"topic": "t", "payload": "aGk="}),
        (EVENT, {"topic": "t", "payload": [104, 105]}, {"topic": "t", "payload": "aGk="}),
        (EVENT, {"topic": "t", "payload": b"hi"}, {"topic": "t", "payload": "aGk="}),
        (EVENT, {"topic": "t", "payload": {"text": "hi"}}, {"topic": "t", "payload": "aGk="}),
        (EVENT, {"topic": "", "payload": None}, {"topic": "", "payload": ""}),
        (ACTION, {"action_id": "a"}, {"action_id": "a", "payload": None}),
        (ACTION, {"action_id": "a", "payload": {"x": [1]}}, {"action_id": "a", "payload": {"x": [1]}}),
        (
            KEY,
            {"screen_id": "", "key": {"code": {"type": "esc"}}},
            {"screen_id": "", "key": {"code": {"type": "esc"}, "mods": 0, "kind": "press"}, "generation": 0},
        ),
        (
            KEY,
            {
                "screen_id": "s",
                "key": {"code": {"type": "char", "ch": "💡"}, "mods": 15, "kind": "release"},
                "generation": 2**64 - 1,
            },
            {
                "screen_id": "s",
                "key": {"code": {"type": "char", "ch": "💡"}, "mods": 15, "kind": "release"},
                "generation": 2**64 - 1,
            },
        ),
        (
            KEY,
            {"screen_id": "s", "key": {"code": {"type": "f", "n": 5}}},
            {
                "screen_id": "s",
                "key": {"code": {"type": "f", "n": 5}, "mods": 0, "kind": "press"},
                "generation": 0,
            },
        ),
        (
            MOUSE,
            {
                "screen_id": "s",
                "mouse": {"kind": {"type": "drag", "button": {"type": "middle"}}, "col": 65535, "row": 0},
            },
            {
                "screen_id": "s",
                "mouse": {
                    "kind": {"type": "drag", "button": {"type": "middle"}},
                    "col": 65535,
                    "row": 0,
                    "mods": 0,
                },
                "generation": 0,
            },
        ),
    ],
)
def test_notifications_are_sent_as_the_contract_writes_them(method: str, given: Any, params: Any) -> None:
    (told,) = sent(ready().notify(method, given))
    assert told == {"jsonrpc": "2.0", "method": method, "params": params}


@pytest.mark.parametrize("topic", ["t", "", 'a"b\\c\n', "ü💡\x7f"])
def test_an_event_is_written_as_the_encoder_would(topic: str) -> None:
    params = make_params(EVENT, {"topic": topic, "payload": bytes(range(256))}, 0)
    message = {"jsonrpc": "2.0", "method": EVENT, "params": params}
    assert encode_message(EVENT, params) == wire.encode(message)


def keyed(**code: Any) -> dict[str, Any]:
    return {"screen_id": "s", "key": {"code": code}}


def moused(**more: Any) -> dict[str, Any]:
    return {"screen_id": "s", "mouse": {"kind": {"type": "moved"}, "col": 0, "row": 0, **more}}


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("plugin/render", {}),
        ("plugin/handle_stream", {}),
        ("", {}),
        (EVENT, None),
        (EVENT, []),
        (EVENT, {"payload": ""}),
        (EVENT, {"topic": 1, "payload": ""}),
        (EVENT, {"topic": "\ud800", "payload": ""}),
        (EVENT, {"topic": "t", "payload": "aGk"}),
        (EVENT, {"topic": "t", "payload": 7}),
        (EVENT, {"topic": "t", "payload": {"text": 1}}),
        (EVENT, {"topic": "t", "payload": "", "more": 1}),
        (EVENT, {"topic": "t", "payload": b"x" * BODY_LIMIT}),
        (ACTION, {}),
        (ACTION, {"action_id": "a", "payload": float("nan")}),
        (ACTION, {"action_id": "a", "payload": object()}),
        (KEY, {"screen_id": "s"}),
        (KEY, {"key": {"code": {"type": "esc"}}}),
        (KEY, keyed()),
        (KEY, keyed(type="escape")),
        (KEY, keyed(type="insert")),
        (KEY, keyed(type="char")),
        (KEY, keyed(type="char", ch="")),
        (KEY, keyed(type="char", ch="ab")),
        (KEY, keyed(type="char", ch="\ud800")),
        (KEY, keyed(type="f")),
        (KEY, keyed(type="f", n=256)),
        (KEY, keyed(type="esc", ch="x")),
        (KEY, {"screen_id": "s", "key": {"code": {"type": "esc"}, "mods": 256}}),
        (KEY, {"screen_id": "s", "key": {"code": {"type": "esc"}, "mods": True}}),
        (KEY, {"screen_id": "s", "key": {"code": {"type": "esc"}, "kind": "down"}}),
        (KEY, {"screen_id": "s", "key": {"code": {"type": "esc"}}, "generation": -1}),
        (KEY, {"screen_id": "s", "key": {"code": {"type": "esc"}}, "generation": 2**64}),
        (MOUSE, moused(col=65536)),
        (MOUSE, moused(row=-1)),
        (MOUSE, moused(mods=1.0)),
        (MOUSE, moused(kind={"type": "down"})),
        (MOUSE, moused(kind={"type": "down", "button": {"type": "fourth"}})),
        (MOUSE, moused(kind={"type": "moved", "button": {"type": "left"}})),
        (MOUSE, moused(kind={"type": "scroll"})),
        (MOUSE, {"screen_id": "s", "mouse": {"kind": {"type": "moved"}, "row": 0}}),
    ],
)
def test_wrong_notifications_are_refused(method: str, given: Any) -> None:
    conversation = ready()
    with pytest.raises(CallRefused):
        conversation.notify(method, given)
    assert lanes(conversation.notify(KEY, key())) == ["key"]


def test_one_generation_counts_renders_keys_and_the_mouse() -> None:
    conversation = ready()
    events = [*conversation.notify(KEY, key()), *conversation.notify(MOUSE, mouse())]
    events += conversation.call(7, RENDER)
    assert [message["params"]["generation"] for message in sent(events)] == [0, 1, 2]


def test_a_call_of_kind_event() -> None:
    params = {"topic": "cts.a07", "payload": {"text": "event-data"}}
    (told,) = sent(ready().notify(ready().event_method, params))
    assert told["params"] == {"topic": "cts.a07", "payload": b64("event-data")}


# --- §5 the deadlock rule -----------------------------------------------------------------------------------


def told_of(events: Any) -> list[str]:
    """The notifications among the events, shortly."""
    short = []
    for message in sent(events):
        if message.get("method") == EVENT:
            short.append(message["params"]["payload"])
        elif message.get("method") == KEY:
            short.append(message["params"]["key"]["code"]["ch"])
        elif message.get("method") == MOUSE:
            short.append(f"mouse {message['params']['mouse']['col']}")
        else:
            short.append(message.get("method", "reply"))
    return short


@pytest.mark.parametrize("call", [RENDER, TOOL])
def test_nothing_is_told_while_a_request_is_open(call: Call) -> None:
    conversation = ready()
    conversation.call(7, call)
    for method, params in [
        (EVENT, event(0)),
        (ACTION, {"action_id": "a"}),
        (EVENT, event(1)),
        (MOUSE, mouse(1)),
        (KEY, key("a")),
        (KEY, key("b")),
    ]:
        assert conversation.notify(method, params) == ()
    # A question of the plugin is answered meanwhile.
    (asked,) = hear(conversation, ask(1, "host/snapshot/get", {"topic": "t"}))
    assert isinstance(asked, HostCall)
    assert told_of(conversation.answer(asked.ticket, Answer({}))) == ["reply"]
    events = hear(conversation, answer(CALLED, ONE_CELL if call is RENDER else DONE))
    assert isinstance(events[0], Reply)
    # Keys, then the mouse, then the rest in its order.
    assert told_of(events) == ["a", "b", "mouse 1", b64("0"), ACTION, b64("1")]
    assert lanes(events) == ["key", "key", "mouse", "delivery", "delivery", "delivery"]
    assert told_of(conversation.notify(EVENT, event(2))) == [b64("2")]  # at once again


def test_nothing_is_told_before_init_is_answered() -> None:
    conversation = dialect()
    assert conversation.notify(EVENT, event(0)) == ()
    conversation.opening()
    assert conversation.notify(EVENT, event(1)) == ()
    events = hear(conversation, answer(1, WELCOME))
    assert isinstance(events[0], Ready)
    assert told_of(events) == [b64("0"), b64("1")]


@pytest.mark.parametrize("end", ["answer", "error", "bad answer", "expired", "both"])
def test_the_end_of_the_last_request_releases(end: str) -> None:
    conversation = ready()
    conversation.call(7, RENDER)
    conversation.call(8, TOOL)
    conversation.notify(KEY, key())
    assert told_of(hear(conversation, answer(CALLED, ONE_CELL))) == []  # the other one is open
    events: list[Any] = []
    if end == "answer":
        events += hear(conversation, answer(CALLED + 1, DONE))
    elif end == "error":
        events += hear(conversation, error(CALLED + 1, -1))
    elif end == "bad answer":
        events += hear(conversation, answer(CALLED + 1, None))
    if end in ("expired", "both"):
        events += conversation.expired(8, "no answer within 60s")
    if end == "both":
        events += conversation.cancel(8, "cancelled")
    assert told_of(events) == ["j"]


@pytest.mark.parametrize("end", ["late answer", "late error", "next answer"])
def test_a_call_that_was_given_up_holds_until_the_plugin_is_out_of_it(end: str) -> None:
    """An SDK plugin would hang for ever: it is still in the call, and may ask its host something."""
    conversation = ready()
    conversation.call(7, TOOL)
    assert told_of(conversation.cancel(7, "cancelled")) == []
    assert told_of(conversation.notify(KEY, key())) == []
    if end == "next answer":
        conversation.call(8, TOOL)
        events = hear(conversation, answer(CALLED + 1, DONE))
    else:
        late = answer(CALLED, DONE) if end == "late answer" else error(CALLED, -1)
        events = hear(conversation, late)
    assert told_of(events) == ["j"]


def test_a_late_answer_releases_nothing_of_a_later_request() -> None:
    conversation = ready()
    conversation.call(7, RENDER)
    conversation.cancel(7, "expired")
    conversation.call(8, RENDER)
    conversation.notify(KEY, key())
    assert hear(conversation, answer(CALLED, ONE_CELL)) == []
    assert conversation.counters["late"] == 1
    assert told_of(hear(conversation, answer(CALLED + 1, ONE_CELL))) == ["j"]


def test_an_action_holds_nothing() -> None:
    """Plugins of the SDK do not implement it; one that does may wait for an event before it answers."""
    conversation = ready()
    conversation.call(7, Call("action", "burn"))
    assert told_of(conversation.notify(EVENT, event(1))) == [b64("1")]


def test_a_call_that_was_refused_holds_nothing() -> None:
    conversation = ready()
    with pytest.raises(CallRefused):
        conversation.call(7, Call("tool", "other"))
    assert told_of(conversation.notify(EVENT, event(1))) == [b64("1")]


def test_a_plugin_that_is_leaving_is_told_nothing() -> None:
    conversation = ready()
    conversation.call(7, TOOL)
    conversation.notify(EVENT, event(0))
    conversation.shutdown_steps()
    assert conversation.notify(EVENT, event(1)) == ()
    assert told_of(hear(conversation, answer(CALLED, DONE))) == []
    assert told_of(hear(conversation, answer(CALLED + 1, {}))) == []
    assert conversation.counters["untold"] == 1


# --- §10 bounds ---------------------------------------------------------------------------------------------


def held(*told: tuple[str, dict[str, Any]]) -> tuple[list[str], list[Any], Any]:
    """What was held and is released, the notices, and the counters."""
    conversation = ready()
    conversation.call(7, TOOL)
    notices = [notice for method, params in told for notice in conversation.notify(method, params)]
    events = hear(conversation, answer(CALLED, DONE))
    return told_of(events), notices, conversation.counters


def test_the_oldest_keys_are_dropped() -> None:
    keys = [chr(0x4E00 + number) for number in range(MOST_KEYS + 3)]
    came, notices, counters = held(*((KEY, key(each)) for each in keys))
    assert came == keys[3:]
    assert counters["keys_dropped"] == 3
    assert [(notice.kind, notice.value["count"]) for notice in notices] == [("dropped", 1), ("dropped", 2)]


def test_the_oldest_of_the_mouse_are_dropped() -> None:
    came, _, counters = held(*((MOUSE, mouse(number)) for number in range(MOST_MOUSE + 1)))
    assert came == [f"mouse {number}" for number in range(1, MOST_MOUSE + 1)]
    assert counters["mouse_dropped"] == 1


def test_events_are_never_dropped() -> None:
    """A publication in chunks is worthless without one of them. The session bounds their bytes."""
    came, notices, _ = held(*((EVENT, event(number)) for number in range(1000)))
    assert came == [b64(str(number)) for number in range(1000)] and not notices
    conversation = ready()
    conversation.call(7, TOOL)
    assert conversation.held_bytes == 0
    for _ in range(10):
        conversation.notify(EVENT, event(1))
    assert conversation.held_bytes > 10 * delivery_cost(b"")
    conversation.notify(KEY, key("x"))
    before = conversation.held_bytes  # keys have room of their own
    assert len(sent(hear(conversation, answer(CALLED, DONE)))) == 11
    frame = header_frame(encode_message(EVENT, event(1)))
    assert (before, conversation.held_bytes) == (10 * delivery_cost(frame), 0)


@pytest.mark.trio
async def test_subscribers_share_the_frame_of_a_publication() -> None:
    """A publication of 12 MiB is encoded once and held once, however many plugins get it."""
    bus = SnapshotBus()
    frames: list[bytes] = []
    for name in ("one", "two", "three"):
        conversation = ready()

        def tell(method: str, params: Any, conversation: AinbDialect = conversation) -> None:
            frames.extend(
                each.frame for each in conversation.notify(method, params) if isinstance(each, Send)
            )

        client = SnapshotClient(bus, name, DECLARED, tell, trio.lowlevel.checkpoint)
        client.subscribe("t")
    bus.publish("t", b"first")
    bus.publish("t", b"second")
    assert [frames.count(frame) for frame in frames] == [3] * 6
    assert len({id(frame) for frame in frames}) == 2 and bus.rendered == {}
    assert json.loads(frames[-1].partition(b"\r\n\r\n")[2])["params"] == {
        "topic": "t",
        "payload": b64("second"),
    }
