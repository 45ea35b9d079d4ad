"""Servers that stop, and servers whose disk is full: what workers, submitters and operators are told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from runner.fleet import names, operate
from runner.fleet.client import FleetClient
from runner.fleet.connection import NoFleet, connect, read_address, tells_full_disk, words_of
from runner.fleet.messages import encode_call
from runner.fleet.streams import FleetSizes, get_direct, store_words, stream_configs
from runner.serve.refusal import Refused
from tests.runner.fleet.bus import Bus, bus_in
from tests.runner.fleet.inside import Functions, Inside, inside, new_call
from tests.runner.fleet.test_worker import shelf

pytestmark = pytest.mark.needs("nats")


def test_a_server_that_has_stopped_is_left_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.fleet.connection._SILENT_SECONDS", 1.0)
    said: list[str] = []

    async def main(one: Bus, other: Bus) -> None:
        lost, back = asyncio.Event(), asyncio.Event()

        async def on_lost(why: str) -> None:
            said.append(why)
            lost.set()

        async def on_back(how: str) -> None:
            said.append(how)
            back.set()

        address = read_address(f"{one.url},{other.url}")
        async with connect(address, "test", on_lost=on_lost, on_back=on_back, stays=True) as connected:
            nc = connected.nc
            assert nc.connected_url is not None
            first, second = (one, other) if one.url.endswith(nc.connected_url.netloc) else (other, one)
            process = first.processes[0]
            assert process is not None
            os.kill(process.pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(60):
                    await back.wait()
                    assert second.url.endswith(nc.connected_url.netloc)
                    await nc.flush()
                    # Who comes later takes another server, too, whichever it asks first.
                    async with connect(address, "later") as later:
                        await later.nc.flush()
            finally:
                os.kill(process.pid, signal.SIGCONT)
        port = first.url.removeprefix("nats://")
        assert said[:2] == [
            f"the server n0 ({port}) does not answer",
            f"the connection to the fleet is back, by the server n0 ({second.url.removeprefix('nats://')})",
        ]

    with bus_in(tmp_path / "one", make=False) as one, bus_in(tmp_path / "other", make=False) as other:
        asyncio.run(main(one, other))


def test_a_question_that_a_stopped_server_got_is_asked_again(bus: Bus) -> None:
    """Servers go on choosing it for a while. Here a subscriber of the servers' own group says nothing."""

    async def act(it: Inside) -> None:
        unanswered: list[str] = []

        async def swallow(message: Msg) -> None:
            unanswered.append(message.subject)

        stream, subject = f"KV_{names.WORKERS}", names.entry(names.WORKERS, "asked")
        async with it.worker(shelf(), "asked"):
            silent = await it.client.nc.subscribe(f"$JS.API.DIRECT.GET.{stream}.>", "_zz_", cb=swallow)
            await it.client.nc.flush()

            async def asked() -> bool:
                assert (await get_direct(it.client.js, stream, subject)).data
                return bool(unanswered)

            await it.until(asked)
            await silent.unsubscribe()

    inside(bus.url, act)


@pytest.mark.parametrize("void", [True, False])
def test_a_copy_that_comes_after_its_call_was_sent_again_is_not_made(bus: Bus, void: bool) -> None:
    """A server that had stopped goes on, and passes on what it had. Control: nobody said that it is void."""

    async def act(it: Inside) -> None:
        plain = shelf()
        async with it.worker(plain):
            call = new_call("plain", "pay")
            if void:
                await it.client.nc.publish(names.cancel("anyone", call.key), b"first")
            subject = names.waited("anyone", plain.offer.digest)
            inbox = f"{it.client._inbox}.nobody"
            await it.client.nc.publish(subject, encode_call(call), inbox, {names.COPY: "first"})
            # What is sent later is heard later.
            assert (await it.client.call(plain.plugin, call)).status == 200
            assert plain.ran == [("pay", None)] * (1 if void else 2)

    inside(bus.url, act)


def test_init_says_how_much_room_streams_take(bus: Bus) -> None:
    words = store_words(stream_configs(FleetSizes()))
    assert words == "3592 MiB of disk (max_file_store) and 64 MiB of memory (max_memory_store)"
    room = store_words(stream_configs(FleetSizes(megabytes=256)))
    assert bus.make()[-1] == f"room: the streams take up to {room} of each server that has them"
    with pytest.raises(NoFleet, match=r"has each 14344 MiB of disk \(max_file_store\)"):
        bus.make(sizes=FleetSizes(megabytes=4096))  # the servers of tests have 4 GB


@pytest.mark.launches
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr("runner.fleet.client._SUBMIT_SECONDS", 0.0)
    # nats-server 2.10 can forget the first message that it says it has stored when there is room again.
    monkeypatch.setattr("runner.fleet.client._AGAIN_SECONDS", 0.5)
    full = "the disk of a NATS server"

    async def words(act: Any) -> str:
        try:
            return str(await act)
        except (Refused, NoFleet) as error:
            return str(error)

    async def act(it: Inside, bus: Bus) -> None:
        plain = shelf()
        newer = tells_full_disk(it.client.nc)
        async with it.worker(plain, "stored") as worker:
            assert (await it.durable(plain, "read")).status == 200
            filler = bus.fill_disk()
            if newer:  # an older server would hang, and says nothing to anybody
                await it.until(lambda: full in worker.presence()["reason"])
                assert full in it.said[-1] and "(n0)" in it.said[-1]
                await it.until(lambda: shown(it.client))
                # Who waits needs no disk.
                assert (await it.client.call(plain.plugin, new_call("plain", "read"))).status == 200
            large = new_call(
                "plain", "read", "x" * 100_000
            )  # a small one may fit into what is left of a block
            assert "disk" in await words(it.client.submit(plain.plugin, large))
            silent = words_of(TimeoutError(), it.client.nc)
            assert f"the server n0 (127.0.0.1:{bus.ports[0]})" in silent
            assert newer or "is its disk full?" in silent
            filler.unlink()
            if newer:
                await it.until(lambda: not worker.presence()["reason"])
                assert "room again" in it.said[-1]
                assert (await it.durable(plain, "read")).status == 200

    with bus_in(tmp_path / "bus", disk=12 << 20) as small:
        inside(small.url, lambda it: act(it, small))


def test_a_server_that_was_started_again_has_no_list_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in memory. Workers say so until an operator makes it again."""
    monkeypatch.setattr(names, "BEAT_SECONDS", 0.1)
    missing = "no stream KV_runner_workers; make it with runner ctl init"

    async def act(it: Inside, bus: Bus) -> None:
        plain = shelf()
        async with it.worker(plain, "there"):
            bus.kill()
            bus.start()
            await it.until(lambda: any(missing in line for line in it.said))
            with pytest.raises(NoFleet, match=missing):  # at once
                async with it.worker(plain, "late"):
                    pass
            await asyncio.to_thread(bus.make)
            await it.until(lambda: any("list of workers again" in line for line in it.said))
            assert [each["worker"] for each in await it.client.workers()] == ["there"]
            assert (await it.client.call(plain.plugin, new_call("plain", "read"))).status == 200

    with bus_in(tmp_path / "bus") as alone:
        inside(alone.url, lambda it: act(it, alone))


async def shown(client: FleetClient) -> bool:
    """As `runner ps --fleet` shows it."""
    rows = (await operate.overview(client))["workers"]
    return [(row["state"], row["reason"][:25]) for row in rows] == [("ready", "the disk of a NATS server")]


@pytest.mark.broad
@pytest.mark.machine
def test_a_stopped_server_of_three(tmp_path: Path) -> None:
    """Calls that workers and submitters of the stopped server make are late, and none fails."""

    async def act(it: Inside, bus: Bus) -> None:
        plain = shelf()
        async with it.worker(plain, "one"), it.worker(plain, "two"):
            assert it.client.nc.connected_url is not None
            await it.client.plugins()
            number = bus.ports.index(it.client.nc.connected_url.port or 0)
            process = bus.processes[number]
            assert process is not None
            os.kill(process.pid, signal.SIGSTOP)
            try:
                await check_calls(it, plain)
                assert f"the NATS server n{number} " in await it.until(lambda: faults(it))
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert f"the server n{number} (" in "".join(it.said)
            count = len(plain.ran)
            await it.until(lambda: has_no_faults(it))
            assert len(plain.ran) == count  # what the server had is not made a second time

    with bus_in(tmp_path / "bus", 3) as three:
        inside(three.url, lambda it: act(it, three))


async def check_calls(it: Inside, plain: Functions) -> None:
    for _ in range(20):
        began = time.monotonic()
        waited, durable = await asyncio.gather(
            it.client.call(plain.plugin, new_call("plain", "pay")), it.durable(plain, "read")
        )
        assert (waited.status, durable.status) == (200, 200), (waited, durable, time.monotonic() - began)


async def faults(it: Inside) -> str | None:
    """As `runner ps --fleet` shows them; None while the servers choose a leader."""
    with contextlib.suppress(NoFleet):
        return " ".join((await operate.overview(it.client))["faults"])
    return None


async def has_no_faults(it: Inside) -> bool:
    return await faults(it) == ""
