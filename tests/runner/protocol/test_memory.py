"""The memory a plugin can make its host use: floods are bounded, and ordinary use is not affected."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from runner.contracts.mcp import dialect as mcp_dialect
from runner.protocol import jsonrpc, memory, schema, schema_cost, wire
from runner.protocol.dialect import Notice
from runner.protocol.host_services import Services
from runner.protocol.memory import BoundedCache, Charge, Share, size_of
from runner.session import outbox
from runner.session.backlog import MOST_EVENTS, Backlog
from tests import elsewhere
from tests.conftest import ROOT, Caller
from tests.runner.session.test_hostile_plugins import hosted
from tests.runner.session.test_session import DO, NEXO, PRELUDE, SECONDS, TOUCH, Write, nexo, opened

MEBI = 1 << 20


# --- The attack --------------------------------------------------------------------------------------------

# Three floods of 32 frames each. A frame is 256 KiB on the wire and 7 MiB in memory.
FRAMES = 32
FLOODS = """
hello()
m = hear()
stuff = [{"": 0}] * 37449
event = {"topic": "shout.loud", "payload": stuff}
for n in range(32):
    say(method="broker.publish", params={"topic": "shout.loud", "event": event})
for n in range(32):
    say(method="chatter", params=stuff)
asked = {"provider": "p", "model": "m", "messages": [{"role": "user", "content": "x"}]}
for n in range(32):
    say(id=n, method="llm.complete", params={**asked, "stuff": stuff})
say(id="last", method="memory.recall", params={})
busy = 0
while (heard := hear()).get("id") != "last":
    busy += "busy" in heard["error"]["message"]
say(id=m["id"], result=busy)
m = hear()
served = 0
for n in range(32 - busy):
    served += "content" in hear()["result"]
say(id="again", method="llm.complete", params={**asked, "stuff": stuff})
heard = hear()
say(id=m["id"], result=[served, heard["id"], heard["result"]["content"]])
hear()
"""
PUBLISHING = NEXO.replace('subscribe = ["news.*"]', 'publish = ["shout.*"]')


def flooded(manifest: str, bounded: bool) -> dict[str, Any]:
    """A host that answers slowly and reads no events. Returns its memory growth and the results."""
    import os

    import trio

    import runner
    import runner.session.backlog
    import runner.session.state

    if not bounded:
        setattr(runner.session.backlog, "EVENTS", 1 << 40)  # noqa: B010 -- imported there, not exported
        setattr(runner.session.state, "QUESTIONS", 1 << 40)  # noqa: B010

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    answering = trio.Event()

    class Model:
        async def complete(self, request: Any, delta: Any) -> runner.Completion:
            await answering.wait()
            return runner.Completion("done")

    class Broker:
        async def publish(self, event: Any) -> None:
            pass

    async def main() -> dict[str, Any]:
        services = runner.Services(llm=Model(), broker=Broker())
        async with runner.open_plugin(manifest, services=services) as plugin:
            before = resident()
            busy = await plugin.call("plugin_do", {}, seconds=240)
            grown = resident() - before
            answering.set()
            rest = await plugin.call("plugin_do", {}, seconds=240)
        told = [getattr(event, "kind", "progress") async for event in plugin.events()]
        return {"grown": grown, "busy": busy, "rest": rest, "told": told, "report": plugin.report}

    return trio.run(main)


def test_a_flood_of_requests_and_events_is_bounded(
    runner_as: Caller, plugin_dir: Path, write_file: Write, nothing_left: None
) -> None:
    write_file(plugin_dir / "plugin.py", PRELUDE + FLOODS, 0o755)
    manifest = write_file(plugin_dir / "nexo-plugin.toml", PUBLISHING)
    runner_as.give(plugin_dir)
    held = elsewhere.run(runner_as, flooded, str(manifest), True, timeout=280)
    # The growth stays below the two shares, because weights are estimated too high.
    assert held["grown"] < memory.QUESTIONS + memory.EVENTS
    few = range(1, 6)
    assert FRAMES - held["busy"] in few
    assert held["rest"] == [FRAMES - held["busy"], "again", "done"]  # there is room again
    assert len(held["told"]) in few and set(held["told"]) == {"published"}
    session = held["report"]["session"]
    assert session["host_calls"]["busy"] == {"llm.complete": held["busy"]}
    assert session["host_calls"]["refused"] == {"llm.complete": held["busy"], "memory.recall": 1}
    assert session["host_calls"]["served"]["broker.publish"] == FRAMES
    assert session["dropped"]["notices"] == 2 * FRAMES - len(held["told"])
    assert held["report"]["outcome"]["code"] == "ok"

    # The control: without the bounds the host keeps everything, more than a session may ever hold.
    loose = elsewhere.run(runner_as, flooded, str(manifest), False, timeout=280)
    assert loose["grown"] > memory.MOST_HELD
    assert loose["busy"] == 0 and len(loose["told"]) == 2 * FRAMES


# --- Ordinary use ------------------------------------------------------------------------------------------

ORDINARY = """
hello()
m = hear()
words = "Of course \\u2013 said the hare \\U0001f407, \\"why not\\"?\\n" * 400
for n in range(64):
    messages = [{"role": "user", "content": {"type": "text", "text": words}}]
    say(id=n, method="sampling/createMessage", params={"messages": messages, "maxTokens": 100})
answers = [hear() for n in range(64)]
good = sum(one["result"]["content"]["text"] == "fine" for one in answers)
say(id=m["id"], result={**text("x" * (4 << 20)), "structuredContent": {"good": good}})
hear()
"""


@pytest.mark.launches
@pytest.mark.trio
async def test_many_ordinary_requests_at_once_and_a_long_answer(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    class Model:
        async def sample(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
            await trio.testing.wait_all_tasks_blocked(0.2)  # all requests have arrived
            return {"role": "assistant", "model": "m", "content": {"type": "text", "text": "fine"}}

    with trio.fail_after(2 * SECONDS):
        async with hosted(write_file, plugin_dir, ORDINARY, Services(sampling=Model())) as session:
            answer = await session.call(TOUCH)
            assert session.state.questions.held == 0
    assert answer["structuredContent"] == {"good": 64} and len(answer["content"][0]["text"]) == 4 * MEBI
    assert session.report["session"]["host_calls"]["busy"] == {}


BATCHED = """
def hello_with_batches():
    message = hear()
    if message["method"] == "server/discover":
        say(id=message["id"], error={"code": -32601, "message": "no"})
        message = hear()
    say(id=message["id"], result={"protocolVersion": "2025-03-26",
        "capabilities": {"tools": {}}, "serverInfo": {"name": "plugin", "version": "1"}})
    hear()

hello_with_batches()
m = hear()
params = {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}], "maxTokens": 100}
batch = [{"jsonrpc": "2.0", "id": n, "method": "sampling/createMessage", "params": params} for n in range(40)]
print(json.dumps(batch), flush=True)
answers = [hear() for n in range(40)]
good = sum("result" in one for one in answers)
say(id=m["id"], result={**text("done"), "structuredContent": {"good": good}})
hear()
"""


@pytest.mark.launches
@pytest.mark.trio
async def test_each_request_of_a_batch_counts(plugin_dir: Path, write_file: Write, sessions: None) -> None:
    held: list[int] = []

    class Model:
        async def sample(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
            held.append(session.state.questions.held)
            return {"role": "assistant", "model": "m", "content": {"type": "text", "text": "fine"}}

    with trio.fail_after(2 * SECONDS):
        async with hosted(write_file, plugin_dir, BATCHED, Services(sampling=Model())) as session:
            answer = await session.call(TOUCH)
            assert session.state.questions.held == 0
    assert answer["structuredContent"] == {"good": 40}
    assert held[0] > 40 * memory.QUESTION


NOISY = """
hello()
m = hear()
for n in range(100):
    print("x" * 1000000)
    print("[" + "[]," * 20000 + "0]")
say(id="q", method="memory.recall", params={})
hear()
say(id=m["id"], result="done")
hear()
"""


@pytest.mark.launches
@pytest.mark.trio
async def test_noise_counts_by_the_part_that_is_kept(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """Only the beginning of a long line that is not a message is kept."""
    with trio.fail_after(2 * SECONDS):
        async with opened(nexo(write_file, plugin_dir, NOISY)) as session:
            await session.call(DO)
            assert session.state.backlog.share.held < MEBI
    assert session.report["session"]["dropped"]["notices"] == 0


# --- Shares ------------------------------------------------------------------------------------------------


def test_the_shares_are_within_the_bound() -> None:
    shares = (
        memory.QUESTIONS,
        memory.EVENTS,
        memory.STANDING,
        memory.COMPILED,
        memory.FRAME,
        memory.REPLIES,
        memory.IDS,
    )
    assert sum(shares) <= memory.MOST_HELD
    assert memory.IDS == jsonrpc.MOST_IDS
    assert outbox.MOST_REPLY_BYTES + MEBI <= memory.REPLIES
    assert memory.FRAME >= wire.MOST_MEMORY + 3 * mcp_dialect.FRAME_LIMIT
    largest = schema.NODE_BYTES * schema_cost.MOST_NODES + schema.CHARACTER_BYTES * schema_cost.MOST_TEXT
    assert largest + schema.PATTERN_BYTES * schema.MOST_PATTERNS <= memory.COMPILED


def test_the_documents_state_the_bounds() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert f"{memory.MOST_HELD >> 20} MiB" in text
    assert f"{memory.QUESTIONS >> 20} MiB" in text and f"{memory.EVENTS >> 20} MiB" in text
    assert f"at most {memory.DELIVERIES >> 20} MiB" in text


def test_a_frame_is_charged_once() -> None:
    share = Share(100)
    one, other, third = Charge(share, 60), Charge(share, 40), Charge(share, 1)
    assert one.hold() and one.hold() and other.hold() and share.held == 100
    assert not third.hold()
    one.release()
    assert not third.hold()  # the first is still held once
    one.release()
    assert third.hold() and share.held == 41
    other.release()
    third.release()
    assert share.held == 0


def test_each_request_of_a_frame_is_charged() -> None:
    share = Share(100)
    frame = Charge(share, 60, 15)
    assert frame.hold() and share.held == 75
    assert frame.hold() and share.held == 90
    assert not frame.hold() and share.held == 90
    frame.release()
    assert share.held == 75
    assert frame.hold() and share.held == 90
    frame.release()
    frame.release()
    assert share.held == 0
    assert not Charge(share, 90, 15).hold() and share.held == 0


def test_the_oldest_entry_makes_room() -> None:
    shelf: BoundedCache[str] = BoundedCache(10)
    for name, size in (("a", 4), ("b", 4), ("c", 6), ("d", 10)):
        shelf.put(name, name.upper(), size)
        assert shelf.get(name) == name.upper()
        if name == "c":
            assert (shelf.get("a"), shelf.get("b")) == (None, "B")
    assert shelf.get("b") is None and shelf.get("c") is None
    shelf.clear()
    assert shelf.get("d") is None


@pytest.mark.trio
async def test_reading_events_makes_room() -> None:
    backlog = Backlog()
    weight = memory.EVENTS // 2
    large = Notice("log", list(range(1000)))
    for _ in range(3):
        backlog.tell(large, backlog.charge(weight))
    assert backlog.dropped == 1
    assert await anext(backlog) == large
    backlog.tell(large, backlog.charge(weight))
    assert backlog.dropped == 1
    backlog.close()
    backlog.tell(large, None)
    assert backlog.dropped == 2
    assert [event async for event in backlog] == [large, large] and backlog.share.held == 0


@pytest.mark.trio
async def test_small_events_are_counted_by_number() -> None:
    backlog = Backlog()
    for _ in range(MOST_EVENTS + 1):
        backlog.tell(Notice("log", "x"), backlog.charge(100))
    assert backlog.dropped == 1 and backlog.share.held == MOST_EVENTS * 100


@pytest.mark.trio
async def test_a_waiting_reader_gets_an_event_of_any_size() -> None:
    backlog = Backlog()
    large = Notice("log", list(range(1000)))
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def read() -> None:
            assert await anext(backlog) == large

        await trio.testing.wait_all_tasks_blocked()
        backlog.tell(large, backlog.charge(2 * memory.EVENTS))
    assert (backlog.dropped, backlog.share.held) == (0, 0)


# --- Weights -----------------------------------------------------------------------------------------------


def taken(value: Any) -> int:
    """The memory a value takes, by sys.getsizeof, rounded like CPython's allocator."""
    total, parts, seen = 0, [value], set()
    while parts:
        part = parts.pop()
        if id(part) in seen or part is None or isinstance(part, bool):
            continue
        seen.add(id(part))
        total += (sys.getsizeof(part) + 16 * gc.is_tracked(part) + 15) // 16 * 16
        if isinstance(part, dict):
            parts += [*part, *part.values()]
        elif isinstance(part, list):
            parts += part
    return total


SHAPES: Mapping[str, bytes] = {
    "objects": b'{"":0},',
    "empty objects": b"{},",
    "empty arrays": b"[],",
    "arrays": b"[0],",
    "arrays in arrays": b"[" * 120 + b"]" * 120 + b",",
    "objects in objects": b'{"":' * 100 + b"300" + b"}" * 100 + b",",
    "six keys": b'{"a":300,"b":300,"c":300,"d":300,"e":300,"f":300},',
    "eleven keys": b"{" + b",".join(b'"k%d":300' % n for n in range(11)) + b"},",
    "zeros": b"0,",
    "integers": b"300,",
    "long integers": b"18446744073709551615,",
    "floats": b"1e9,",
    "strings": b'"ab",',
    "latin strings": '"éa",'.encode(),
    "wider strings": '"ā",'.encode(),
    "widest strings": '"😀",'.encode(),
    "escapes": b'"\\u0101",',
    "pairs of escapes": b'"\\ud83d\\ude00",',
    "no text": b'"\xff",',
}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_shape_is_estimated_below_its_real_size(shape: str) -> None:
    part = SHAPES[shape]
    for count in (1, 50, 20_000 // len(part)):
        raw = b'{"id":7,"method":"m","params":[' + part * count + b"0]}"
        reading = wire.message(raw)
        assert reading.cause is None
        assert taken(reading.value) <= reading.weight
        assert len(raw) < 1024 or reading.weight < 8 * taken(reading.value)


@given(
    st.recursive(
        st.none()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=40,
    ),
    st.booleans(),
)
def test_no_value_is_estimated_below_its_real_size(value: Any, escaped: bool) -> None:
    reading = wire.message(json.dumps([value], ensure_ascii=escaped).encode("utf-8", "replace"))
    assert reading.cause is None and taken(reading.value) <= reading.weight


def test_text_is_estimated_by_the_width_of_its_characters() -> None:
    for character, width in (("a", 1), ("é", 2), ("–", 2), ("😀", 4)):
        raw = json.dumps("a" * 100_000 + character, ensure_ascii=False).encode()
        assert len(raw) * width <= (weight := wire.message(raw).weight) <= len(raw) * width + 200
        assert weight >= taken(wire.decode(raw)) - 100


def test_sizes_of_small_values_only() -> None:
    assert size_of({"a": [1, "b" * 1000]}) in range(1000, 2000)
    assert size_of(["x" * 10] * 1000) is None and size_of(dict.fromkeys(map(str, range(40)), 1)) is None
    assert size_of(Notice("stdout", "x" * 200)) in range(200, 1000)
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    assert size_of(deep) is not None and size_of([deep, deep]) is None
