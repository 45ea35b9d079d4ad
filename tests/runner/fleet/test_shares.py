"""One submitter cannot take the room of the others in the ledger and among the dead letters."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from runner.fleet import names, operate
from runner.fleet.client import FleetClient, open_client
from runner.fleet.connection import read_address
from runner.fleet.shares import DEAD, LEDGER, FleetShares, added_to, decode_counts
from runner.fleet.streams import FleetSizes
from runner.serve.desk import CallAnswer
from tests.runner.fleet.bus import bus_in
from tests.runner.fleet.inside import Functions, Inside, inside, new_call


def test_what_is_counted_and_when_it_is_forgotten() -> None:
    nobody: Any = None
    shares = FleetShares(nobody)
    assert shares.has_room("alice", LEDGER, 1 << 40)  # nothing was measured
    shares.measured(LEDGER, 1_000_000)
    shares.measured(DEAD, -1)
    shares.add("alice", LEDGER, 500_000)
    shares.add("alice", DEAD, 1 << 40)
    assert shares.has_room("alice", LEDGER, 174_000) and not shares.has_room("alice", LEDGER, 176_000)
    assert shares.has_room("bob", LEDGER, 299_000) and not shares.has_room("bob", LEDGER, 301_000)
    assert shares.has_room("alice", DEAD)  # a stream without a bound
    # By day, and as long as what was written is kept.
    counts = added_to({}, {"ledger": 5}, 1000)
    counts = added_to(counts, {"ledger": 7, "dead": 1}, 1000)
    assert counts == {"ledger": {1000: 12}, "dead": {1000: 1}}
    assert added_to(counts, {"ledger": 1}, 1014) == {"ledger": {1000: 12, 1014: 1}, "dead": {1000: 1}}
    assert added_to(counts, {}, 1015) == {"ledger": {}, "dead": {1000: 1}}
    # What a broken worker may have written.
    for raw in (b"", b"[]", b"5", b'{"ledger": 5}', b'{"ledger": {"x": 1, "7": "x", "8": -1}}', b"\xff"):
        assert not any(decode_counts(raw).values())
    assert decode_counts(b'{"ledger": {"1000": 12}}') == {"ledger": {1000: 12}, "dead": {}}


class _Attack:
    def __init__(self, it: Inside, plain: Functions, alice: FleetClient, bob: FleetClient) -> None:
        self.it, self.plain, self.alice, self.bob = it, plain, alice, bob

    async def make(
        self, who: FleetClient, name: str, *, size: int = 60_000, late: bool = False
    ) -> CallAnswer:
        """A durable call with so many bytes of input and answer. `late`: it becomes a dead letter."""
        call = new_call("plain", "read", "x" * size, call=name)
        if late:
            call = call._replace(deadline=time.time() - 1)
        return await who.call(self.plain.plugin, call, durable=True)

    async def letters(self) -> set[str]:
        return {each["letter"] for each in await operate.dead_letters(self.it.client)}


@pytest.mark.needs("nats")
def test_a_submitter_that_fills_what_all_share_stops_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger of 1 MiB, and 256 KiB of dead letters. Without shares, which is the control, the same acts
    stop the calls of others and push out their dead letters."""
    plain = Functions()

    async def act(it: Inside) -> None:
        async with AsyncExitStack() as stack:
            alice, bob = [
                await stack.enter_async_context(
                    open_client(read_address(it.url.replace("//", f"//{name}:x@")))
                )
                for name in ("alice", "bob")
            ]
            attack = _Attack(it, plain, alice, bob)
            async with it.worker(plain, "first"):
                await _fill_letters(attack, "a")
                assert "bob.letter" in await attack.letters()
                answers = [await attack.make(alice, f"fill{number}") for number in range(15)]
                refused = answers[-1].document["error"]
                assert (answers[0].status, answers[-1].status) == (200, 429)
                assert (refused["code"], refused["cause"]) == ("overloaded", "share")
                assert "14 days" in refused["hint"]
                assert "alice" in refused["message"] and await alice.result("fill14") is None
                taken = [each.status for each in answers].count(200)
                assert 9 <= taken <= 12 and plain.ran.count(("read", 1)) == taken
                assert any("alice has its share of the fleet's ledger" in each for each in it.said)
                # An id that is known still has its answer, and others have room.
                assert (await attack.make(alice, "fill0")).document == answers[0].document
                assert (await attack.make(bob, "call")).status == 200
            # Another worker knows it.
            async with it.worker(plain, "second") as worker:
                assert (await attack.make(alice, "more")).status == 429
                assert (await attack.make(bob, "again", size=10)).status == 200
                monkeypatch.setattr("runner.fleet.shares.SHARE", 1000.0)
                await _fill_letters(attack, "b")
                await it.until(lambda: _without(attack, "bob.letter"))
                for number in range(7):
                    if worker._has_room:
                        assert (await attack.make(alice, f"control{number}")).status == 200
                        await worker._measure_rooms()
                await bob.submit(plain.plugin, new_call("plain", "put", call="stopped"))
                assert "nearly full" in worker.presence()["reason"] and await bob.result("stopped") is None
                # An operator sees who it is, and can remove what waits.
                seen = await operate.overview(it.client)
                assert seen["submitters"]["alice"]["ledger"] > 5 * seen["submitters"]["bob"]["ledger"] > 0
                assert seen["streams"][names.CALLS]["messages"] == 1
                await operate.remove_waiting(it.client, "bob")
                assert (await operate.overview(it.client))["streams"][names.CALLS]["messages"] == 0

    with bus_in(tmp_path / "bus", make=False) as bus:
        bus.make(sizes=FleetSizes(megabytes=1))
        inside(bus.url, act)
    assert ("put", 1) not in plain.ran


async def _fill_letters(attack: _Attack, name: str) -> None:
    if name == "a":
        await attack.make(attack.bob, "letter", size=10, late=True)
        await attack.it.until(lambda: _with(attack, "bob.letter"))
    for number in range(8):
        answer = await attack.make(attack.alice, f"{name}{number}", late=True)
        assert answer.document["error"]["cause"] == "deadline"


async def _with(attack: _Attack, letter: str) -> bool:
    return letter in await attack.letters()


async def _without(attack: _Attack, letter: str) -> bool:
    return letter not in await attack.letters()
