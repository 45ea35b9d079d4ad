"""A clock that is off: a worker takes no calls by it, and a submitter is told. Delays are no proof of it."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import pytest

from runner.fleet.client import FleetClient, open_client
from runner.fleet.clock import FleetClock, read_clock
from runner.fleet.connection import NoFleet, connect, read_address
from runner.fleet.worker import FleetWorker, WorkerOptions
from runner.serve.refusal import Refused
from tests.runner.fleet.bus import Bus
from tests.runner.fleet.inside import Functions, Inside, inside, new_call
from tests.runner.fleet.test_worker import shelf
from tests.tables import check_rows

HOURS = 7200.0


def test_only_a_difference_beyond_the_delay_is_sure() -> None:
    def check(row: tuple[float, float, float], expected: tuple[float, float]) -> None:
        reading = read_clock(*row)
        assert (reading.sure, reading.likely) == expected

    rows = {
        (100.0, 100.0, 0.0): (0.0, 0.0),
        (103.0, 100.0, 0.0): (3.0, 3.0),
        (97.0, 100.0, 0.0): (-3.0, -3.0),
        # It may have been stored at any time in these ten seconds.
        (110.0, 100.0, 10.0): (0.0, 5.0),
        (113.0, 100.0, 10.0): (3.0, 8.0),
        (100.0, 100.0, 10.0): (0.0, -5.0),
        (97.0, 100.0, 10.0): (-3.0, -8.0),
    }
    check_rows(rows, check)


def test_slow_answers_prove_neither_a_wrong_clock_nor_a_right_one() -> None:
    clock = FleetClock(lambda: 1000.0)

    def compare(stored: float, took: float) -> bool:
        clock.compare(stored, time.monotonic() - took)
        return bool(clock.fault)

    assert not compare(1000.0, 0.0)
    assert not compare(960.0, 40.0)
    assert compare(900.0, 40.0) and "s ahead of the servers'" in clock.fault
    assert compare(960.0, 40.0)  # as far as it tells, 20 s ahead
    assert not compare(1000.0, 1.0)
    assert compare(1003.0, 0.0) and "3.0 s behind the servers'" in clock.fault


def test_a_clock_that_is_set_counts_as_wrong_until_it_is_compared() -> None:
    here = [time.time()]
    clock = FleetClock(lambda: here[0] + time.monotonic())

    def found() -> tuple[bool, bool]:
        return clock.was_set, clock.is_right

    assert found() == (False, True)  # nothing to compare with yet
    clock.compare(clock.now(), time.monotonic())
    for step in (HOURS, -HOURS, 2.5, -2.5):
        here[0] += step
        assert found() == (True, False)
        clock.compare(clock.now(), time.monotonic())
        assert found() == (False, True)
    here[0] += 1.5
    assert found() == (False, True)


@pytest.mark.needs("nats")
@pytest.mark.parametrize("most", [2.0, math.inf])
def test_a_worker_whose_clock_is_off_takes_no_calls(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, most: float
) -> None:
    """Control: a worker that does not mind ends a call as late that has an hour."""
    monkeypatch.setattr("runner.fleet.clock.MOST_SECONDS", most)
    name = f"clock-{most:.0f}"
    ahead = [HOURS]

    async def act(it: Inside) -> None:
        plain = shelf()
        await it.client.submit(plain.plugin, new_call("plain", "read", call=f"{name}-1"))
        async with it.worker(plain, name, now=lambda: time.time() + ahead[0]) as worker:
            if math.isinf(most):
                assert await outcome(it, f"{name}-1") == "timeout"
                return
            row = await row_of(it.client, name)
            assert row["state"] == "bad" and is_off(row["reason"], "ahead of")
            assert "set it (NTP)" in it.said[-1]
            assert not worker._subscriptions
            full = await it.client.call(plain.plugin, new_call("plain", "read"))
            assert full.document["error"]["cause"] == "no_worker"
            found = [each for each in await it.client.plugins() if each.digest == plain.offer.digest]
            assert [each.workers for each in found] == [()]
            # It is noticed at once that somebody sets the clock. What waited is made, and is not late.
            ahead[0] = 0.0
            assert await outcome(it, f"{name}-1") == "ok"
            assert "right" in it.said[-1] and worker.presence()["state"] == "ready"
            await it.until(lambda: is_served(it, plain))
            ran = len(plain.ran)
            ahead[0] = -HOURS
            assert not worker._served()  # without a message
            await it.client.submit(plain.plugin, new_call("plain", "read", call=f"{name}-2"))
            await it.until(lambda: worker.presence()["state"] == "bad")
            assert is_off(worker.presence()["reason"], "behind")
            assert len(plain.ran) == ran
            ahead[0] = 1.0  # near enough
            assert await outcome(it, f"{name}-2") == "ok"

    inside(bus.url, act)


def is_off(reason: str, way: str) -> bool:
    """By two hours, give or take what the messages needed."""
    found = re.search(rf"([0-9.]+) s {way} the servers'", reason)
    return found is not None and abs(float(found[1]) - HOURS) < 60


async def row_of(client: FleetClient, name: str) -> dict[str, Any]:
    return next(each for each in await client.workers() if each["worker"] == name)


async def outcome(it: Inside, call: str) -> str:
    async def ended() -> Any:
        found = await it.client.result(call)
        return found if found is not None and found.state == "ended" else None

    entry = await it.until(ended)
    return str((entry.record or {})["code"])


async def is_served(it: Inside, plain: Functions) -> bool:
    return (await it.client.call(plain.plugin, new_call("plain", "read"))).status == 200


@pytest.mark.needs("nats")
def test_a_submitter_whose_clock_is_behind_is_told(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        plain, late = shelf(), -HOURS

        def now() -> float:
            return time.time() + late

        async with it.worker(plain), open_client(read_address(it.url), now=now) as client:
            assert it.client.behind < 2 and client.behind == -math.inf  # it has not asked yet
            await client.plugins()
            assert client.behind > HOURS - 30
            call = new_call("plain", "read")
            for durable in (True, False):
                wrong = call._replace(deadline=now() + 3600)
                with pytest.raises(Refused, match=r"s behind the servers' of the fleet") as raised:
                    await client.call(plain.plugin, wrong, durable=durable)
                assert raised.value.code == "clock_behind"
            assert plain.ran == []
            # A deadline that is far enough away holds by both clocks.
            right = call._replace(deadline=now() + 3 * HOURS)
            assert (await client.call(plain.plugin, right)).status == 200

    inside(bus.url, act)


@pytest.mark.needs("nats")
def test_a_worker_that_may_not_compare_its_clock_does_not_start(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the permissions of an earlier version."""
    monkeypatch.setattr("runner.fleet.worker._BEGIN_SECONDS", 0.0)

    async def act(it: Inside) -> None:
        async with connect(read_address(it.url), "test") as connected:
            worker = FleetWorker(connected, it.thread, shelf(), WorkerOptions("shut"), it.said.append)

            async def unanswered(*_: object, **__: object) -> None:
                raise TimeoutError

            setattr(worker._js, "get_msg", unanswered)  # noqa: B010 -- a method
            with pytest.raises(NoFleet, match="permissions of this version"):
                await worker.run(lambda: None)

    inside(bus.url, act)
