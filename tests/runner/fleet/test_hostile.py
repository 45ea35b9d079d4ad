"""What strangers write on the bus: it is refused or ends one call, and nothing goes on for ever."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import pytest
import trio
from nats.aio.msg import Msg

from runner.fleet import connection, names, operate
from runner.fleet.client import _answer_of, plugins_of, presence_of
from runner.fleet.connection import FleetAddress, NoFleet, read_address
from runner.fleet.crossing import open_asyncio_thread
from runner.fleet.entries import FleetLedger, decode_entry
from runner.fleet.library import open_fleet, result_of
from runner.outcome import Outcome
from runner.serve.desk import CallAnswer
from runner.serve.refusal import Refused
from tests.runner.fleet.bus import Bus
from tests.runner.fleet.inside import Inside, inside, new_call
from tests.runner.fleet.test_worker import put_entry, quick, shelf

__all__ = ["quick"]
pytestmark = pytest.mark.needs("nats")
ENTRY: dict[str, Any] = {
    "state": "ended",
    "worker": "w",
    "nonce": "n",
    "attempt": 1,
    "plugin": "plain",
    "tool": "pay",
    "began": 1.0,
    "status": 200,
    "document": {"value": 1},
    "record": {},
}
WRONG: list[dict[str, Any]] = [
    {"state": "gone"},
    {"state": ["ended"]},
    {"attempt": "1"},
    {"status": None},
    {"document": [1]},
    {"record": "x"},
    {"worker": 7},
    {"dead": {}},
    {"began": None},
]


def test_an_entry_of_another_shape_is_none() -> None:
    assert decode_entry(json.dumps(ENTRY).encode()).document == {"value": 1}
    for change in WRONG:
        with pytest.raises(ValueError, match="not an entry"):
            decode_entry(json.dumps({**ENTRY, **change}).encode())
    for raw in (
        b"",
        b"{}",
        b"[" * 9999,
        b"\xff",
        b'{"state": "ended"}',
        b'{"attempt": 1' + b"0" * 400 + b"}",
    ):
        with pytest.raises(ValueError, match=r"not an entry|json|deep|number"):
            decode_entry(raw)


def test_presence_and_answers_of_another_shape() -> None:
    for said in (b"[" * 100_000, b'{"slots": 1' + b"0" * 400 + b"}", b'{"plugins": ' + b"[" * 9999):
        assert presence_of(said) is None
    large = {"worker": "w", "slots": 1e300, "since": -1e300, "running": 3, "state": "ready"}
    row = presence_of(json.dumps(large).encode())
    assert row is not None and (row["slots"], row["since"], row["running"]) == (0, 0, 3)
    # How many dead letters there are is a number, or not known.
    for told, dead in ((59, 59), (0, 0), (-1, None), (1e300, None), ("many", None), (None, None)):
        row = presence_of(json.dumps({**large, "dead": told}).encode())
        assert row is not None and row["dead"] == dead
    # One worker cannot hold what another takes, nor hide it behind a plugin of the same name.
    one = {"name": "a", "digest": "d", "contract": "", "version": "", "durable": []}
    held = {"held": "x", "hold": "operator"}
    rows = [
        {"worker": "w1", "state": "ready", "plugins": [{**one, "held": ""}]},
        {
            "worker": "w2",
            "state": "ready",
            "plugins": [{**one, **held}, {**one, "digest": "e", **held}],
        },
    ]
    for each in (rows, rows[::-1]):
        *_, last = plugins_of(each)
        assert (last.digest, last.held, last.workers) == ("d", "", ("w1",))
    assert {each.held for each in plugins_of(rows[1:])} == {"x"}
    assert _answer_of({"status": 200, "document": {"value": 1}}) == CallAnswer(200, {"value": 1})
    for found in (
        {"status": "x", "document": {}},
        {"status": 200, "document": []},
        {"status": 500, "document": {}},
        {"status": 500, "document": {"error": "x"}},
    ):
        assert _answer_of(found) is None
    error = {"code": ["overloaded"], "phase": {}, "cause": 5, "message": None}
    with pytest.raises(Exception, match="None") as raised:
        result_of(CallAnswer(500, {"error": error}))
    assert raised.value.outcome[:2] == ("internal", "call")  # type: ignore[attr-defined]
    for after in ("²", "9" * 400, "x"):
        with pytest.raises(Exception, match="full") as raised:
            result_of(
                CallAnswer(429, {"error": {"code": "overloaded", "message": "full"}}, {"Retry-After": after})
            )
        assert raised.value.retry_after == 1.0  # type: ignore[attr-defined]


def test_an_entry_that_cannot_be_read_means_that_the_call_may_have_begun(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain = shelf()
        async with it.worker(plain):
            for tool, runs in (("pay", []), ("read", [("read", 2)])):
                call = f"unreadable-{tool}"
                await it.client.js.publish(names.entry(names.LEDGER, f"anyone.{call}"), b'{"worker": "w"}')
                answer = await it.durable(plain, tool, call=call)
                assert plain.ran == runs
                assert answer.document.get("execution_outcome") == (None if runs else "unknown")
        assert [each.split()[0] for each in it.said] == ["anyone.unreadable-pay"]  # it is a dead letter

    inside(bus.url, act)


def test_a_worker_that_comes_back_under_its_name_sees_to_its_calls(bus: Bus) -> None:
    """It does not take the call that it looks at for one that its earlier life still runs."""

    async def act(it: Inside) -> None:
        plain = shelf()
        for tool in ("pay", "read"):
            await put_entry(it, f"back-{tool}", tool, "began", worker="back")
        async with it.worker(plain, "back"):
            answer = await it.durable(plain, "pay", call="back-pay")
            assert answer.document["execution_outcome"] == "unknown"
            assert (await it.durable(plain, "read", call="back-read")).status == 200
            assert plain.ran == [("read", 2)]
            with pytest.raises(NoFleet, match="another --name"):
                async with it.worker(shelf(), "back"):
                    pass

    inside(bus.url, act)


def test_a_dead_letter_that_is_too_large_takes_no_place_for_ever(bus: Bus) -> None:
    """Numbers that are short as they come and long as we write them."""

    async def act(it: Inside) -> None:
        plain = shelf()
        subject = names.durable("anyone", plain.offer.digest)
        for call, numbers in (("large", "1e15," * 100_000 + "1"), ("small", "1e15")):
            least = f'"id":"{call}","plugin":"plain","tool":"pay","deadline":1'
            await it.client.js.publish(subject, f'{{{least},"input":[{numbers}]}}'.encode())
        async with it.worker(plain) as worker:
            for call in ("large", "small"):
                await it.until(partial(it.client.result, call))
            await it.until(lambda: not worker._running)
            letters = [await operate.dead_letter(it.client, f"anyone.{call}") for call in ("large", "small")]
            assert [bool(each["call"]) for each in letters] == [False, True]
            with pytest.raises(Refused, match="too large to be kept"):
                await operate.repeat(it.client, "anyone.large")

    inside(bus.url, act)


def test_dead_letters_of_another_shape(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        js, long = it.client.js, "x" * 256
        call = {"id": long, "plugin": "plain", "tool": "pay", "deadline": 1.0}
        bodies = {
            "list": b"[1]",
            "deep": b"[" * 9999,
            "call": b'{"call": "x", "at": "soon"}',
            "user": json.dumps({"user": "b.c", "digest": "d", "call": call}).encode(),
            "digest": json.dumps({"digest": "d.>", "call": call}).encode(),
        }
        for key, raw in bodies.items():
            await js.publish(names.dead("shapes", key), raw)
        listed = [each["letter"] for each in await operate.dead_letters(it.client)]
        assert {f"shapes.{key}" for key in bodies} <= set(listed)
        for key in ("list", "deep", "call", "digest"):
            with pytest.raises(Refused, match="no call"):
                await operate.repeat(it.client, f"shapes.{key}")
        with pytest.raises(Refused, match="no worker has the plugin"):
            await operate.repeat(it.client, "shapes.user")
        there = {"worker": "shapes", "state": "ready", "plugins": [{"name": "plain", "digest": "d"}]}
        await js.publish(names.entry(names.WORKERS, "shapes"), json.dumps(there).encode())
        again = await operate.repeat(it.client, "shapes.user")
        await js.publish(names.entry(names.WORKERS, "shapes"), b"", headers={"KV-Operation": "DEL"})
        assert len(again) <= 256
        assert "shapes.user" not in [each["letter"] for each in await operate.dead_letters(it.client)]
        info = await js.stream_info(names.CALLS, subjects_filter="runner.durable.shapes.d")
        assert info.state.subjects == {"runner.durable.shapes.d": 1}
        await js.purge_stream(names.CALLS, subject="runner.durable.shapes.d")
        await js.purge_stream(names.DEAD, subject=names.dead("shapes", "*"))  # others list them, too

    inside(bus.url, act)


def test_an_id_belongs_to_one_tool_and_calls_that_no_worker_takes_are_not_sent(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain, client = shelf(), it.client
        async with it.worker(plain) as worker:
            assert (await it.durable(plain, "read", {"a": 1}, call="one-tool")).status == 200
            with pytest.raises(Refused, match="another call"):
                await it.durable(plain, "put", {"a": 1}, call="one-tool")
            assert plain.ran == [("read", 1)]
            for given, options in (
                ({"a": float("nan")}, {}),
                ({"a": 2**70}, {}),
                ({"a": object()}, {}),
                (None, {"call": "x" * 257}),
                (None, {"kind": ""}),
                (None, {"seconds": -1.0}),
            ):
                with pytest.raises(Refused, match=r"no worker would take|not JSON"):
                    await it.durable(plain, "read", given, **options)
            # A plugin that calls its own error "no_slot" is not asked again.
            plain.ran.clear()
            plain.outcome = Outcome("plugin_error", "call", "no", "no_slot")
            answer = await client.call(plain.plugin, new_call("plain", "pay"))
            assert (answer.status, plain.ran) == (422, [("pay", None)])
            plain.outcome = None
            # Nobody else's cancellations push one's own out.
            for number in range(1100):
                await client.nc.publish(names.cancel("flood", str(number)), b"")
                if number == 5:
                    await client.nc.publish(names.cancel("other", "mine"), b"")
            await client.nc.flush()
            await it.until(lambda: "1099" in worker._cancelled.get("flood", ()))
            assert worker._was_cancelled("other", "mine") and not worker._was_cancelled("other", "mine")
            assert len(worker._cancelled["flood"]) == 1000
            # A worker answers to inboxes only.
            flag = names.entry(names.FLAGS, "drain.nobody")
            await client.nc.publish(names.ask("w", "anyone", "x"), b"", reply=flag)
            await client.nc.publish(names.waited("anyone", plain.offer.digest), b"{}", reply=flag)
            assert (await client.call(plain.plugin, new_call("plain", "read"))).status == 200
            found = await client.js.stream_info(f"KV_{names.FLAGS}", subjects_filter=flag)
            assert not found.state.subjects

    inside(bus.url, act)


def test_a_call_whose_worker_is_gone_for_good_is_not_waited_for_for_ever(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_GRACE_SECONDS", "_ASK_SECONDS"):
        monkeypatch.setattr(f"runner.fleet.client.{name}", 0.1)

    async def act(it: Inside) -> None:
        await put_entry(it, "for-good", "pay", "began")
        call = new_call("plain", "pay", call="for-good", seconds=0.0)
        answer = await it.client.wait_for(call)
        assert answer.document["error"]["cause"] == "worker_lost"
        # The control: a worker that says that it runs it, and may take its time.
        monkeypatch.setattr("runner.fleet.client._ASK_SECONDS", 60.0)
        asked: list[Msg] = []

        async def say(message: Msg) -> None:
            asked.append(message)
            await message.respond(b"running")

        await it.client.nc.subscribe(names.ask("gone", "*", "*"), cb=say)
        waiting = asyncio.ensure_future(it.client.wait_for(call))
        await it.until(lambda: len(asked) > 1)
        assert not waiting.done()
        found = await FleetLedger(it.client.js).read("anyone", "for-good")
        assert found is not None
        ended = found.entry._replace(state="ended", status=200, document={"value": 1}, ended=time.time())
        await FleetLedger(it.client.js).write("anyone", "for-good", ended, found.revision)
        assert (await waiting).document == {"value": 1}

    inside(bus.url, act)


def test_what_a_programs_own_function_raises_is_raised_to_it(bus: Bus) -> None:
    """And does not end its whole loop."""
    plain = shelf()

    async def main() -> None:
        async with open_asyncio_thread() as thread, open_fleet(bus.url) as fleet:
            end = asyncio.Event()

            async def work() -> None:
                async with Inside(bus.url, thread, fleet.client, []).worker(plain, "progress"):
                    token.run_sync_soon(ready.set)
                    await end.wait()

            token, ready = trio.lowlevel.current_trio_token(), trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(thread.run, work)
                await ready.wait()
                told: list[Any] = []
                name = f"plain@{plain.offer.digest}"
                await fleet.call(name, "read", on_progress=told.append)
                assert told == [{"message": "half"}]
                with pytest.raises(ZeroDivisionError):
                    await fleet.call(name, "pay", {"hold": True}, on_progress=breaks)
                thread.loop.call_soon_threadsafe(end.set)

    trio.run(main)


def breaks(value: Any) -> None:
    raise ZeroDivisionError


def test_the_mark_of_an_id_is_made_from_a_secret_and_slowly(tmp_path: Any) -> None:
    path = tmp_path / "door.creds"
    salts = set()
    for text in ("one", "two"):
        path.write_text(text)
        address = FleetAddress(("nats://h:4222",), "door", credentials=str(path))
        salts.add(names.message_id("door", "c", address.salt))
        connection._salt.cache_clear()
    salts.add(names.message_id("door", "c", FleetAddress(("nats://h:4222",), "door", str(path)).salt))
    assert len(salts) == 3
    assert read_address("nats://bob:p%40ss@h").password == "p@ss"
    with pytest.raises(ValueError, match="h:99999") as raised:
        read_address("nats://bob:secret@h:99999")
    assert "secret" not in str(raised.value)
