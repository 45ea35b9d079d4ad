"""What operators see and do: plugins that were given up, their stderr and reset; the end of dead letters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.aio.msg import Msg

from runner.fleet import names, operate
from runner.fleet.client import FleetPlugin, WorkerHold, presence_of
from runner.fleet.messages import FleetCall, encode_call
from runner.fleet.worker_plugins import Hold, Offer
from runner.lifecycle.feed import LOG_BYTES
from runner.outcome import Outcome
from runner.serve.refusal import Refused
from tests.runner.fleet.bus import Bus
from tests.runner.fleet.inside import Functions, Inside, inside, known, new_call
from tests.runner.fleet.test_worker import quick, shelf

__all__ = ["quick"]
pytestmark = pytest.mark.needs("nats")
WHY = "crashed: the plugin ended with status 1 (it failed 5 times within 600 seconds)"


def pair() -> tuple[Functions, Functions]:
    """Two workers' shelves with the same plugin."""
    one, other = shelf(), shelf()
    other.offer = one.offer
    return one, other


async def hold(it: Inside, worker: Any, plain: Functions, why: str = WHY) -> None:
    """The plugin is given up on a worker."""
    plain.held = {plain.offer.digest: Hold("quarantined", why)}
    worker.refresh()
    await it.until(lambda: not worker._subscriptions and not worker._calling)
    await known(worker)


async def asked(it: Inside, what: str, plain: Functions, worker: str | None = None) -> tuple[Any, Any]:
    told: dict[str, str] = {}
    name = f"plain@{plain.offer.digest}"
    return told, await operate.ask_workers(it.client, what, name, worker, told.__setitem__)


def test_a_plugin_that_was_given_up_is_seen_and_reset(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.fleet.client._GRACE_SECONDS", 0.1)

    async def act(it: Inside) -> None:
        one, other = pair()
        one.stderr, other.stderr = "cannot open the database\n", "x"
        client, plugin = it.client, one.plugin
        audited: list[Msg] = []

        async def note(message: Msg) -> None:
            audited.append(message)

        def read() -> FleetCall:
            return new_call("plain", "read")

        await client.nc.subscribe(names.audit("g1"), cb=note)
        async with it.worker(one, "g1") as first, it.worker(other, "g2") as second:
            await hold(it, first, one)
            # The other one takes its calls.
            assert (await client.call(plugin, read())).status == 200 and (one.ran, len(other.ran)) == ([], 1)
            [row] = [
                row for row in (await operate.queues(client))["queues"] if row["digest"] == plugin.digest
            ]
            assert (row["workers"], row["held"]) == (["g2"], f"quarantined on g1: {WHY}")
            await hold(it, second, other, "timeout: it did not answer")
            # Who has not heard of it is told, and not that the fleet is busy. So is who asks first.
            answer = await client.call(plugin, read())
            error = answer.document["error"]
            assert (answer.status, error["code"]) == (503, "quarantined"), error
            for part in (f"on g1: {WHY}", "on g2: timeout: it did not answer"):
                assert part in error["message"]
            assert "runner logs --fleet" in error["hint"] and "runner ctl reset --fleet" in error["hint"]
            found = next(each for each in await client.plugins() if each.digest == plugin.digest)
            for durable in (False, True):
                with pytest.raises(Refused, match=r"no worker takes calls.*quarantined on g1") as refused:
                    await client.call(found, read(), durable=durable)
                assert refused.value.code == "quarantined"
            assert await asked(it, "logs", one) == ({"g1": one.stderr, "g2": "x"}, {})
            assert await asked(it, "logs", one, "g2") == ({"g2": "x"}, {})
            with pytest.raises(Refused, match="g1, g2 have it"):
                await asked(it, "logs", one, "none")
            assert await asked(it, "reset", one, "g1") == ({"g1": "idle"}, {})
            await it.until(lambda: first._subscriptions)
            await known(first)
            assert (await client.call(plugin, read())).status == 200 and one.ran and len(other.ran) == 1
            # A call that waited while it was given up: nothing ran, and another worker may have it in order.
            assert await asked(it, "reset", one) == ({"g1": "idle", "g2": "idle"}, {})
            await it.until(lambda: second._subscriptions)
            await known(second)
            one.outcome = other.outcome = Outcome("quarantined", "call", "the plugin is quarantined")
            error = (await client.call(plugin, read())).document["error"]
            assert error["code"] == "quarantined" and "on the worker g" in error["message"]
            # A durable call that nobody begins says so at its deadline.
            await hold(it, first, one)
            await hold(it, second, other)
            late = await client.call(plugin, new_call("plain", "read", seconds=0.0), durable=True)
            assert "quarantined on g1" in late.document["error"]["message"], late
            await operate.set_flag(client, f"quarantine.{plugin.digest}", "it is searched for")
            await it.until(lambda: f"quarantine.{plugin.digest}" in second._flags)
            told, _ = await asked(it, "reset", one, "g2")
            assert "until runner ctl release: it is searched for" in told["g2"]
            await operate.set_flag(client, f"quarantine.{plugin.digest}", None)
        await it.until(lambda: {"held", "reset"} <= {json.loads(each.data)["what"] for each in audited})
        assert WHY in {json.loads(each.data).get("reason") for each in audited}

    inside(bus.url, act)


@pytest.mark.parametrize(
    ("kinds", "code", "words"),
    [
        (("operator", "quarantined"), "quarantined", "is held in this fleet: why0"),
        (("quarantined", "pending"), "quarantined", "quarantined on w0: why0; pending on w1: why1"),
        (("pending",), "policy_denied", "pending on w0: why0"),
        (("quarantined",) * 7, "quarantined", "on w4: why4; and on 2 more"),
    ],
)
def test_what_callers_are_told_about_a_plugin_that_is_held(
    kinds: tuple[str, ...], code: str, words: str
) -> None:
    holds = tuple(WorkerHold(f"w{number}", kind, f"why{number}") for number, kind in enumerate(kinds))
    plugin = FleetPlugin("p", "d", holds=holds)
    refused = plugin.refusal()
    assert refused.code == code and words in refused.message and plugin.held
    assert not plugin._replace(workers=("other",)).held


def test_what_workers_and_strangers_say_has_bounds(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain = shelf()
        plain.stderr = "secret of a plugin"
        async with it.worker(plain, "bounded") as worker:
            # Reasons of many plugins: what a worker shows is still one message.
            many = {f"{number:064}": Hold("quarantined", "\x1b" * 300) for number in range(1000)}
            plain.held = many
            worker._offers = {each: Offer("p", each) for each in many}
            raw = json.dumps(worker.presence()).encode()
            assert len(raw) < 768 << 10
            row = presence_of(raw)
            assert row is not None and len(row["plugins"]) == 1000
            assert {each["held"] for each in row["plugins"]} == {"\x1b" * 300, "quarantined"}
            plain.held = {}
            worker.refresh()
            # It answers within its own account only: a server's way back to another one begins with _R_.
            heard: list[Msg] = []

            async def hear(message: Msg) -> None:
                heard.append(message)

            nc = it.client.nc
            await nc.subscribe("_R_.x", cb=hear)
            await nc.subscribe("_INBOX.x", cb=hear)
            for what in names.OPERATED:
                for reply in ("_R_.x", names.entry(names.FLAGS, "drain.logs"), "_INBOX.x"):
                    await nc.publish(names.operate(what, "bounded", plain.offer.digest), b"", reply=reply)
            await it.until(lambda: len(heard) == 2)
            assert {each.subject for each in heard} == {"_INBOX.x"}
            found = await it.client.js.stream_info(
                f"KV_{names.FLAGS}", subjects_filter=names.entry(names.FLAGS, "drain.logs")
            )
            assert not found.state.subjects
            # A worker that lies about the size or the shape.
            said = [json.dumps({"text": "x" * LOG_BYTES + "end"}).encode(), b"[" * 9999, b'{"text": 5}']

            async def lie(message: Msg) -> None:
                await message.respond(said.pop(0))

            await nc.subscribe(names.operate("logs", "liar", "*"), cb=lie)
            listed = {**worker.presence(), "worker": "liar"}
            await it.client.js.publish(names.entry(names.WORKERS, "liar"), json.dumps(listed).encode())
            told, failed = await asked(it, "logs", plain, "liar")
            assert len(told["liar"]) == LOG_BYTES and told["liar"].endswith("end") and not failed
            for _ in range(2):
                assert await asked(it, "logs", plain, "liar") == (
                    {},
                    {"liar": "it answered with something else"},
                )
            silent = {**listed, "worker": "silent"}
            await it.client.js.publish(names.entry(names.WORKERS, "silent"), json.dumps(silent).encode())
            told, failed = await asked(it, "logs", plain, "silent")
            assert not told and "policies/nats/fleet.conf" in failed["silent"]

    inside(bus.url, act)


async def letters_of(it: Inside, plain: Functions) -> list[str]:
    found = await operate.dead_letters(it.client)
    return [each["letter"] for each in found if each.get("digest") == plain.offer.digest]


def test_a_dead_letter_is_closed_by_its_repetition_or_by_hand(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain, client = shelf(), it.client
        plain.outcome, plain.fate = Outcome("plugin_error", "call", "not yet"), "dead"
        base = plain.offer.digest[:8]
        ids = [f"{base}-{number}" for number in range(3)]
        async with it.worker(plain):
            for call in ids:
                await client.call(plain.plugin, new_call("plain", "event", {"n": 1}, call=call))
            words = [f"anyone.{call}" for call in ids]
            await it.until(lambda: _equal(it, plain, words))
            plain.outcome, plain.fate = None, "ended"
            ran = len(plain.ran)
            # Two operators at once: the call is made once.
            first, second = await asyncio.gather(*(operate.repeat(client, words[0]) for _ in range(2)))
            assert first == second
            again = await client.wait_for(new_call("plain", "event", {"n": 1}, call=first))
            assert again.status == 200
            await operate.close(client, words[1], "it is not wanted any more")
            assert await letters_of(it, plain) == words[2:]
            assert len(plain.ran) == ran + 1
            for act in (operate.repeat(client, words[0]), operate.close(client, words[1], "")):
                with pytest.raises(Refused, match="no dead letter"):
                    await act
            # A call that comes again, as one whose acknowledgement was lost, has its old end, which is no
            # dead letter again. The control: it is one where the ledger does not say that it was closed.
            number = (await operate.dead_letter(client, words[2]))["number"]
            await client.js.delete_msg(names.DEAD, number)
            for call in ids[1:]:
                await client.js.publish(
                    names.durable("anyone", plain.offer.digest),
                    encode_call(new_call("plain", "event", {"n": 1}, call=call)),
                )
            await it.until(lambda: _acknowledged(it, plain))
            assert await letters_of(it, plain) == words[2:] and len(plain.ran) == ran + 1
            await operate.close(client, words[2], "")
        info = await client.js.get_last_msg(names.AUDIT, names.audit("anyone"))
        row = json.loads(info.data or b"{}")
        assert (row["what"], row["operator"], row["dead_letter"]["letter"]) == ("closed", "anyone", words[2])

    inside(bus.url, act)


async def _equal(it: Inside, plain: Functions, words: list[str]) -> bool:
    return sorted(await letters_of(it, plain)) == words


async def _acknowledged(it: Inside, plain: Functions) -> bool:
    """Whether the worker has done all that it does about calls."""
    subject = names.durable("anyone", plain.offer.digest)
    info = await it.client.js.stream_info(names.CALLS, subjects_filter=subject)
    return not info.state.subjects
