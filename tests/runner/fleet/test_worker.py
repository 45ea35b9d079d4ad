"""Once, or known: what a worker does with calls that come, come again, are late, cancelled, or no calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections import OrderedDict
from typing import Any

import pytest
from nats.aio.msg import Msg

from runner.fleet import names, operate
from runner.fleet.client import FleetClient
from runner.fleet.entries import FleetLedger, LedgerEntry
from runner.fleet.messages import FleetCall, encode_call
from runner.outcome import Outcome
from runner.serve.refusal import Refused
from tests.runner.fleet.bus import Bus
from tests.runner.fleet.inside import Functions, Inside, inside, known, new_call

pytestmark = pytest.mark.needs("nats")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "LOST_SECONDS", 1.0)
    monkeypatch.setattr(names, "BEAT_SECONDS", 0.2)


def shelf() -> Functions:
    """With a digest that no other test has."""
    return Functions("plain", secrets.token_hex(32))


async def record_of(it: Inside, call: str) -> list[dict[str, Any]]:
    """All records of a call, while nobody has to wait for one."""
    subject = names.record("anyone", names.key_of(call))
    info = await it.client.js.stream_info(names.RECORDS, subjects_filter=subject)
    if not info.state.subjects:
        return []
    assert info.state.subjects == {subject: 1}
    found = await it.client.js.get_msg(names.RECORDS, subject=subject)
    return [json.loads(found.data or b"{}")]


async def letter_of(it: Inside, word: str) -> dict[str, Any]:
    """A dead letter, or nothing: the ledger has the end of a call a moment before."""
    with contextlib.suppress(Refused):
        return await operate.dead_letter(it.client, word)
    return {}


async def waited_record(it: Inside, call: str) -> bool:
    """Whether a call that was waited for has a record. Its subject is not known beforehand."""
    info = await it.client.js.stream_info(names.RECORDS, subjects_filter=names.record("anyone", "*"))
    found = [each for each in info.state.subjects or {} if ".waited~" in each]
    raw = [(await it.client.js.get_msg(names.RECORDS, subject=each)).data for each in found]
    return call in {json.loads(each or b"{}")["id"] for each in raw}


async def put_entry(it: Inside, call: str, tool: str, state: Any, worker: Any = "gone", **more: Any) -> None:
    """What a worker left behind that is not there any more."""
    entry = LedgerEntry(state, worker, "n", 1, "plain", tool, time.time(), **more)
    assert await FleetLedger(it.client.js).write("anyone", call, entry, 0) is not None


def test_waited_and_durable_calls(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain = shelf()
        answer = await it.client.call(plain.plugin, new_call("plain", "read"))
        assert (answer.status, answer.document["error"]["cause"]) == (429, "no_worker")
        async with it.worker(plain):
            told: list[Any] = []
            waited = new_call("plain", "read", {"a": 1})
            answer = await it.client.call(plain.plugin, waited, on_progress=told.append)
            assert answer.document == {
                "id": waited.id,
                "value": ["anyone", "read", {"a": 1}],
                "invocation": None,
            }
            stored = await it.durable(plain, "read", {"a": 1}, call="w.1")
            assert (stored.status, stored.document["value"]) == (200, answer.document["value"])
            assert told == [{"message": "half"}]
            # By its id it is made once; another input is another call.
            assert (await it.durable(plain, "read", {"a": 1}, call="w.1")).document == stored.document
            assert plain.ran == [("read", None), ("read", 1)]
            with pytest.raises(Exception, match="belongs to another call"):
                await it.durable(plain, "read", {"a": 2}, call="w.1")
            [record] = await it.until(lambda: record_of(it, "w.1"))
            assert (record["code"], record["effect"], record["attempt"]) == ("ok", "read_only", 1)
            assert await it.until(lambda: waited_record(it, waited.id))
            # An export of the plugin that is a hook goes by the stream without being told to.
            assert (await it.client.call(plain.plugin, new_call("plain", "event", call="e1"))).status == 200
            assert (await it.client.result("e1")) is not None

    inside(bus.url, act)


@pytest.mark.parametrize(
    ("tool", "state", "runs"),
    [
        ("read", "began", [("read", 2)]),
        ("put", "began", [("put", 2)]),
        ("event", "began", [("event", 2)]),
        ("pay", "began", []),
        ("other", "began", []),
        ("pay", "waiting", [("pay", 2)]),
        ("pay", "ended", []),
    ],
)
def test_a_call_whose_worker_is_gone(bus: Bus, tool: str, state: str, runs: list[Any]) -> None:
    async def act(it: Inside) -> None:
        plain, call = shelf(), f"gone-{tool}-{state}"
        ended = {"status": 200, "document": {"id": call, "value": "earlier"}, "record": {"code": "ok"}}
        await put_entry(it, call, tool, state, **(ended if state == "ended" else {}))
        async with it.worker(plain):
            answer = await it.durable(plain, tool, call=call)
            assert plain.ran == runs
            [record] = await it.until(lambda: record_of(it, call))
            if state == "ended":
                assert answer.document["value"] == "earlier" and record == {"code": "ok"}
            elif runs:
                assert answer.status == 200 and record["attempt"] == 2
            else:
                assert answer.document["execution_outcome"] == record["execution_outcome"] == "unknown"
                assert answer.document["error"]["cause"] == record["cause"] == "worker_lost"
                letter = await operate.dead_letter(it.client, f"anyone.{call}")
                assert letter["call"]["tool"] == tool and "gone was lost" in letter["reason"]
                again = await operate.repeat(it.client, f"anyone.{call}")
                assert (await it.until(lambda: it.client.result(again))).state in ("began", "ended")
                await it.until(lambda: plain.ran)

            async def is_acknowledged() -> bool:
                info = await it.client.js.consumer_info(names.CALLS, names.consumer(plain.offer.digest))
                return info.num_ack_pending < 2

            await it.until(is_acknowledged)

    inside(bus.url, act)


def test_a_worker_that_was_taken_for_dead_does_not_end_its_call(bus: Bus) -> None:
    """Its signs of life stop, as with a lost connection. Another one ends the call; then the first wakes."""

    async def act(it: Inside) -> None:
        first, second = shelf(), shelf()
        second.offer = first.offer
        async with it.worker(first, "first") as lost:
            waiting = asyncio.ensure_future(it.durable(first, "pay", {"hold": True}, call="slow"))
            await it.until(first.begun.is_set)
            for running in lost._running.values():
                running.message = None  # no sign of life from here
            lost._running.clear()  # and it does not say that it runs it
            lost._state = "drained"
            async with it.worker(second, "second"):
                answer = await waiting
                assert answer.document["execution_outcome"] == "unknown"
                it.thread._soon(first.go.set)
                await it.until(lambda: lost.presence()["late"] == 1)
                assert (await it.client.result("slow")).document == answer.document  # type: ignore[union-attr]
            assert (first.ran, second.ran) == ([("pay", 1)], [])
            assert len(await it.until(lambda: record_of(it, "slow"))) == 1

    inside(bus.url, act)


def test_a_call_that_runs_comes_again_to_the_same_worker(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain = shelf()
        async with it.worker(plain) as worker:
            waiting = asyncio.ensure_future(it.durable(plain, "pay", {"hold": True}, call="twice"))
            await it.until(plain.begun.is_set)
            [running] = worker._running.values()
            old, running.message = running.message, None
            running.message = old
            assert old is not None
            await old.nak()  # as if no sign of life had come through
            await it.until(lambda: running.message is not old)
            it.thread._soon(plain.go.set)
            assert (await waiting).status == 200
            assert plain.ran == [("pay", 1)]

    inside(bus.url, act)


def test_deadlines_cancellation_and_messages_that_are_no_calls(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain = shelf()
        client = it.client
        for call in ("late", "unwanted"):
            given = new_call("plain", "read", call=call, seconds=0.0 if call == "late" else None)
            await client.submit(plain.plugin, given)
        await client.js.publish(names.durable("anyone", plain.offer.digest), b'{"policy": "open"}')
        async with it.worker(plain) as worker:
            worker._cancelled["anyone"] = OrderedDict(unwanted=None)  # it was told before the call came
            late = (await it.until(lambda: client.result("late"))).document
            late = late or (await client.wait_for(new_call("plain", "read", call="late"))).document
            assert (late["error"]["code"], late["error"]["cause"]) == ("timeout", "deadline")
            unwanted = await client.wait_for(new_call("plain", "read", call="unwanted"))
            assert unwanted.document["error"]["code"] == "cancelled"
            assert plain.ran == []

            async def letters() -> dict[str, str]:
                listed = await operate.dead_letters(client)
                found = {
                    each["id"]: each["reason"] for each in listed if each.get("digest") == plain.offer.digest
                }
                return found if len(found) >= 2 else {}

            found = await it.until(letters)
            [bad] = set(found) - {"late"}
            assert bad.startswith("bad~") and "unknown key 'policy'" in found[bad]
            # While it runs, and only by its own user.
            for durable in (True, False):
                plain.begun = type(plain.begun)()
                given = new_call("plain", "pay", {"hold": True})
                waiting = asyncio.ensure_future(client.call(plain.plugin, given, durable=durable))
                await it.until(plain.begun.is_set)
                await client.nc.publish(names.cancel("somebody", given.key), b"")
                await client.nc.flush()
                assert not waiting.done()
                await client.cancel(given.id)
                assert (await waiting).document["error"]["code"] == "cancelled"
            wrong = new_call("another", "read")
            assert (await client.call(plain.plugin, wrong)).document["error"]["code"] == "invalid_call"

    inside(bus.url, act)


def test_hooks_are_retried_and_then_dead(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain = shelf()
        plain.outcome, plain.fate = Outcome("plugin_error", "call", "not yet"), "retry"
        async with it.worker(plain):
            answer = await it.client.call(plain.plugin, new_call("plain", "event", call="hook1"))
            assert answer.document["error"]["message"] == "not yet"
            assert plain.ran == [("event", 1), ("event", 2), ("event", 3)]
            assert (await it.until(lambda: letter_of(it, "anyone.hook1")))["attempt"] == 3
            given = new_call("plain", "event", call="hook2", retry=False)
            assert (await it.client.call(plain.plugin, given)).status == answer.status
            assert len(plain.ran) == 4
            # What never began goes to whoever can begin it.
            plain.ran.clear()
            plain.outcome, plain.fate = Outcome("overloaded", "call", "full"), "elsewhere"
            waiting = asyncio.ensure_future(it.durable(plain, "pay"))
            await it.until(lambda: plain.ran)
            plain.outcome = None
            assert (await waiting).status == 200

    inside(bus.url, act)


def test_a_key_is_free_until_its_plugin_was_asked(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(it: Inside) -> None:
        monkeypatch.setattr(names, "MOST_ATTEMPTS", 1)
        plain = shelf()
        async with it.worker(plain, "freeing"):
            plain.asks, plain.fate = False, "elsewhere"
            plain.outcome = Outcome("launch_failed", "launch", "it has no interpreter")
            refused = await it.durable(plain, "pay", 1, call="free")
            assert refused.document["error"]["code"] == "launch_failed"
            entry = await it.client.result("free")
            assert entry is not None and entry.state == "ended" and entry.free_since
            # Another copy of what has ended begins nothing, nor does a message without a submission.
            for word in (entry.freed_by, ""):
                headers = {"Nats-Msg-Id": f"copy-{word}", names.SUBMISSION: word}
                raw = encode_call(new_call("plain", "pay", 1, call="free"))
                subject = names.durable(it.client.address.user, plain.offer.digest)
                await it.client.js.publish(subject, raw, headers=headers)
            await it.until(lambda: _is_done(it, plain))
            assert plain.ran == [("pay", 1)]
            # Submitted again at once, which the servers take for a repetition, and with another input.
            plain.asks, plain.outcome, plain.fate = True, None, "ended"
            assert (await it.durable(plain, "pay", 2, call="free")).document["value"][2] == 2
            assert (await it.durable(plain, "pay", 2, call="free")).document["value"][2] == 2
            assert plain.ran == [("pay", 1)] * 2
            with pytest.raises(Refused, match="submitted again"):
                await operate.repeat(it.client, f"{it.client.address.user}.free")
            # Nobody waits, and the call was given up before the plugin was asked.
            plain.asks = False
            held = new_call("plain", "pay", {"hold": True}, call="gone")
            await it.client.submit(plain.plugin, held)
            await it.until(lambda: len(plain.ran) == 3)
            await it.client.cancel("gone")
            cancelled = await it.client.wait_for(held)
            assert cancelled.document["error"]["code"] == "cancelled"
            plain.asks = True
            await it.client.submit(plain.plugin, held._replace(input=3))
            assert (await it.until(lambda: _answer(it, "gone")))["value"][2] == 3
        assert any("free is a dead letter: it has no interpreter" in each for each in it.said), it.said

    inside(bus.url, act)


def test_a_call_that_was_freed_while_its_plugin_starts_is_not_made(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain, starts, goes_on = shelf(), threading.Event(), threading.Event()

        def start() -> None:  # trio hears of nothing meanwhile
            starts.set()
            assert goes_on.wait(60)

        plain.before_asking = start
        async with it.worker(plain, "starting"):
            call = new_call("plain", "pay", 1, call="early")
            await it.client.submit(plain.plugin, call)
            await it.until(starts.is_set)
            await it.client.cancel("early")
            assert (await it.client.wait_for(call)).document["error"]["code"] == "cancelled"
            entry = await it.client.result("early")
            assert entry is not None and entry.free_since
            goes_on.set()
            assert (await it.durable(plain, "pay", 2, call="early")).document["value"][2] == 2
            assert plain.ran == [("pay", 1)]

    inside(bus.url, act)


async def _answer(it: Inside, call: str) -> Any:
    entry = await it.client.result(call)
    return entry is not None and entry.status == 200 and entry.document


async def _is_done(it: Inside, plain: Functions) -> bool:
    found = await it.client.js.consumer_info(names.CALLS, names.consumer(plain.offer.digest))
    return not found.num_pending and not found.num_ack_pending


def test_slots_bound_what_is_fetched_and_asked(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain = shelf()
        async with it.worker(plain, slots=2) as worker:
            calls = [
                asyncio.ensure_future(it.durable(plain, "read", {"hold": number})) for number in range(1, 13)
            ]
            await it.until(lambda: len(worker._running) == 2 and not worker._subscriptions)
            await known(worker)
            # Nobody is subscribed any more: the server says so at once.
            full = await it.client.call(plain.plugin, new_call("plain", "read"))
            assert full.document["error"]["code"] == "overloaded"
            it.thread._soon(plain.go.set)
            assert {(await each).status for each in calls} == {200}
            assert plain.most_at_once == 2
            assert len(plain.ran) == 12

    inside(bus.url, act)


def test_flags_hold_plugins_and_workers(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain = shelf()
        flag = f"quarantine.{plain.offer.digest}"
        async with it.worker(plain, "flagged") as worker:
            await it.until(lambda: worker._subscriptions)
            await operate.set_flag(it.client, flag, "it misbehaves")
            await it.until(lambda: not worker._subscriptions)
            await it.until(it.client.plugins)
            found = await it.until(lambda: _held(it, plain))
            with pytest.raises(Exception, match="it misbehaves"):
                await it.client.call(found, new_call("plain", "read"))
            await operate.set_flag(it.client, flag, None)
            await it.until(lambda: worker._subscriptions)
            await operate.hold(it.client, "drain", "flagged", "")
            await it.until(lambda: worker.presence()["state"] == "drained" and not worker._subscriptions)
            await known(worker)  # the server knows it too
            assert (await it.client.call(plain.plugin, new_call("plain", "read"))).status == 429
            await operate.hold(it.client, "release", "flagged", "")
            await it.until(lambda: _is_served(it, plain))  # when the server knows that it subscribes again

    inside(bus.url, act)


async def _is_served(it: Inside, plain: Functions) -> bool:
    return (await it.client.call(plain.plugin, new_call("plain", "read"))).status == 200


async def _held(it: Inside, plain: Functions) -> Any:
    return next(
        (each for each in await it.client.plugins() if each.digest == plain.offer.digest and each.held), None
    )


def test_a_bad_node_leaves_the_fleet_and_says_so(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.fleet.worker._TRIAL_SECONDS", 0.05)
    monkeypatch.setattr("runner.fleet.worker._POLL_SECONDS", 0.05)
    faults, tried = [""], []

    async def trial() -> str:
        tried.append(faults[0])
        return faults[0]

    async def act(it: Inside) -> None:
        plain = shelf()
        plain.outcome, plain.fate = Outcome("launch_failed", "launch", "no cage"), "ended"
        async with it.worker(plain, "bad", trial=trial) as worker:
            # A plugin that cannot start, on a machine that is in order.
            for _ in range(3):
                assert not tried
                await it.client.call(plain.plugin, new_call("plain", "read"))
            await it.until(lambda: tried and worker._launch_failures == 0)
            assert worker.presence()["state"] == "ready"
            faults[0] = "no user namespaces"
            for _ in range(3):
                await it.client.call(plain.plugin, new_call("plain", "read"))
            await it.until(lambda: worker.presence()["state"] == "bad" and not worker._calling)
            await known(worker)
            assert worker.presence()["reason"] == "no user namespaces"
            assert "leaves the fleet: no user namespaces" in it.said[-1]
            assert (await it.client.call(plain.plugin, new_call("plain", "read"))).status == 429
            faults[0] = ""
            await it.until(lambda: worker._subscriptions)
            assert "is back" in it.said[-1]

    inside(bus.url, act)


def test_a_waited_call_whose_worker_dies(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.fleet.client._ASK_SECONDS", 0.2)

    async def act(it: Inside) -> None:
        plain = shelf()
        async with it.worker(plain) as worker:
            waiting = asyncio.ensure_future(
                it.client.call(plain.plugin, new_call("plain", "pay", {"hold": True}))
            )
            await it.until(plain.begun.is_set)
            await asyncio.sleep(0)
            await worker._nc.close()  # as a killed worker
            answer = await waiting
            assert (answer.document["error"]["cause"], answer.document["execution_outcome"]) == (
                "worker_lost",
                "unknown",
            )

    inside(bus.url, act)


@pytest.mark.parametrize("answers", [True, False])
def test_a_waited_call_that_no_worker_got(bus: Bus, monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """A server drops a call that is on its way to a worker that unsubscribes. It is sent again only if every
    worker says that it has not got it."""
    monkeypatch.setattr("runner.fleet.client._TAKE_SECONDS", 0.1)
    ask_worker = FleetClient._ask_worker

    async def act(it: Inside) -> None:
        plain = shelf()
        flag = f"quarantine.{plain.offer.digest}"
        dropped: list[Msg] = []

        async def drop(message: Msg) -> None:
            dropped.append(message)
            await operate.set_flag(it.client, flag, None)
            await subscription.unsubscribe()  # also ends this task

        async def ask(self: FleetClient, asked: str, call: FleetCall) -> bytes:
            if not answers:
                return b""
            # So that it is not sent again before somebody can get it.
            await it.until(lambda: subscription._closed and worker._subscriptions)
            await known(worker)
            return await ask_worker(self, asked, call)

        async with it.worker(plain) as worker:
            await operate.set_flag(it.client, flag, "so that it does not subscribe")
            await it.until(lambda: not worker._subscriptions)
            subscription = await it.client.nc.subscribe(
                names.waited("*", plain.offer.digest), names.GROUP, cb=drop
            )
            await it.client.workers()
            monkeypatch.setattr(FleetClient, "_ask_worker", ask)
            answer = await it.client.call(plain.plugin, new_call("plain", "pay"))
            assert len(dropped) == 1
            if answers:
                assert answer.status == 200 and plain.ran == [("pay", None)]
            else:
                assert answer.document["error"]["cause"] == "worker_lost" and plain.ran == []

    inside(bus.url, act)


def test_no_durable_call_begins_when_the_ledger_is_nearly_full(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(it: Inside) -> None:
        plain = shelf()
        await put_entry(it, "fills", "read", "waiting")
        async with it.worker(plain) as worker:
            monkeypatch.setattr("runner.fleet.names.MOST_FILLED", 0.0)
            await it.until(lambda: "nearly full" in worker.presence()["reason"])
            await it.client.submit(plain.plugin, new_call("plain", "read", call="no-room"))
            # Who waits is served all the same, and nothing was fetched meanwhile.
            assert (await it.client.call(plain.plugin, new_call("plain", "pay"))).status == 200
            assert plain.ran == [("pay", None)] and await it.client.result("no-room") is None
            monkeypatch.setattr("runner.fleet.names.MOST_FILLED", 0.9)
            await it.until(lambda: plain.ran[1:] == [("read", 1)])
            assert worker.presence()["reason"] == ""

    inside(bus.url, act)


def test_signs_of_life_do_not_wait_for_the_measure_of_the_ledger(bus: Bus) -> None:
    """For example where the worker's account may not ask for it: nobody answers."""

    async def act(it: Inside) -> None:
        asked, shown = asyncio.Event(), 0

        async def unanswered(*_: object) -> None:
            asked.set()
            await asyncio.Event().wait()

        async with it.worker(shelf()) as worker:
            real = worker._show

            async def show() -> None:
                nonlocal shown
                shown += asked.is_set()
                await real()

            setattr(worker, "_show", show)  # noqa: B010 -- a method
            setattr(worker._js, "stream_info", unanswered)  # noqa: B010 -- a method
            await it.until(lambda: shown > 1)

    inside(bus.url, act)


def test_a_worker_ends_although_a_cancellation_was_lost(bus: Bus) -> None:
    """As asyncio.wait_for of Python 3.11 loses one that comes at the same time as an answer."""

    async def act(it: Inside) -> None:
        asked = asyncio.Event()

        async def lose() -> None:
            if not asked.is_set():
                asked.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

        async with it.worker(shelf()) as worker:
            setattr(worker, "_measure_rooms", lose)  # noqa: B010 -- a method
            await asked.wait()

    inside(bus.url, act)


def test_a_call_that_the_servers_lost_is_stored_again_and_runs_once(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.fleet.client._AGAIN_SECONDS", 0.3)

    async def act(it: Inside) -> None:
        plain = shelf()
        waiting = asyncio.ensure_future(it.durable(plain, "pay", {"hold": True}, call="forgotten"))
        subject = names.durable("anyone", plain.offer.digest)

        async def stored() -> int:
            info = await it.client.js.stream_info(names.CALLS, subjects_filter=subject)
            return (info.state.subjects or {}).get(subject, 0)

        await it.until(stored)
        await it.client.js.purge_stream(names.CALLS, subject=subject)
        await it.until(stored)  # it is there again
        async with it.worker(plain, "first") as first:
            await it.until(plain.begun.is_set)
            first._state = "drained"  # it takes no more, so that the other one gets the copy
            second = shelf()
            second.offer = plain.offer
            async with it.worker(second, "second") as other:
                asked, runs = [], other._runs

                async def noted(*args: str) -> bool:
                    asked.append(await runs(*args))
                    return asked[-1]

                monkeypatch.setattr(other, "_runs", noted)
                # A copy comes while the first one runs the call: the other asks, and lets it be.
                copy = new_call("plain", "pay", {"hold": True}, call="forgotten")
                await it.client.js.publish(subject, encode_call(copy))
                await it.until(lambda: asked)
                assert asked[0] and not waiting.done()
                it.thread._soon(plain.go.set)
                assert (await waiting).status == 200
            assert (plain.ran, second.ran) == ([("pay", 1)], [])

    inside(bus.url, act)
