"""Places for connections: strangers cannot keep out clients who show who they are. Real sockets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from runner.serve import connections, room
from runner.serve.room import DoorPlace, Room
from tests.runner.serve.house import TOKEN, House, answer, code, house, request, status

KNOWN = request("/health", "Host: localhost", f"Authorization: Bearer {TOKEN.decode()}")
VISITOR = request("/page.css", "Host: localhost")


def fill(places: Room, *addresses: str) -> tuple[list[DoorPlace | None], list[int]]:
    """Take a place for each address. Returns them, and which were closed for others, in order."""
    closed: list[int] = []
    return [places.take(each, partial(closed.append, at)) for at, each in enumerate(addresses)], closed


def test_the_oldest_place_of_the_address_with_most_is_given_to_the_next() -> None:
    full: list[None] = []
    places = Room(12, lambda: full.append(None))
    taken, closed = fill(places, "b", "a", "a", "c", "a", "c", "b", "d", "e")
    assert closed == [1, 0, 2] and len(full) == 3  # six are for strangers
    assert None not in taken and len(places.places) == 6
    for each in taken:
        assert each is not None
        if each in places.strangers:
            each.admit()
            each.admit()
            assert each.idle_seconds == room.HEADER_SECONDS
    # Those who are known hold theirs. The last six are for strangers, and then for whoever of them is known.
    more, closed = fill(places, *"x" * 7)
    assert closed == [0] and more[6] is not None and more[6].idle_seconds == room.STRANGER_SECONDS
    for each in more:
        assert each is not None
        if each in places.strangers:
            each.admit()
    assert fill(places, "y") == ([None], [])
    assert taken[8] is not None
    taken[8].leave()
    taken[8].leave()
    assert fill(places, "y", "z")[1] == [0]
    assert len(places.places) == 12


def test_one_place_is_enough_for_strangers() -> None:
    places = Room(1, lambda: None)
    (first, second), closed = fill(places, "a", "b")
    assert closed == [0] and first is not None and second is not None
    second.admit()
    assert fill(places, "c") == ([None], [])


def test_a_caller_leaves_a_quarter_of_the_places_to_others() -> None:
    """Without its name, which is the control, it has them all."""

    def admitted(places: Room, caller: str) -> int:
        for count in range(100):
            place = places.take("a", lambda: None)
            if place is None:
                return count
            if not place.admit(caller):
                place.leave()
                return count
        raise AssertionError("no end")

    places = Room(32, lambda: None)
    callers = ("org:a", "org:b", "org:a", "token", "page")
    assert [admitted(places, each) for each in callers] == [24, 6, 0, 1, 1]
    assert admitted(places, "org:late") == 0
    first = next(each for each in places.places if each.caller == "org:a")
    assert first.admit("org:a") and not first.admit("org:b") and first.caller == "org:a"
    assert [admitted(Room(32, lambda: None), ""), admitted(Room(1, lambda: None), "token")] == [32, 1]


async def until_ended(stream: trio.abc.ReceiveStream) -> None:
    with trio.fail_after(60), suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


async def hold(door: House, count: int, sent: bytes = b"") -> list[trio.abc.Stream]:
    """Connections that a stranger opens, one after the other, and leaves idle."""
    held: list[trio.abc.Stream] = []
    for _ in range(count):
        held.append(await door.connect(tcp=True))
        with suppress(trio.BrokenResourceError):
            await held[-1].send_all(sent)
    return held


@pytest.mark.trio
@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", VISITOR, VISITOR[:-2]])
async def test_idle_connections_of_a_stranger_lock_nobody_out(
    tmp_path: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STRANGER_SECONDS", "HEADER_SECONDS"):
        monkeypatch.setattr(room, name, 3600.0)
    # One of four places is by TCP: eight, and four for strangers.
    async with house(tmp_path, most_connections=32) as door, await door.connect(tcp=True) as known:
        await known.send_all(KNOWN)
        assert status(await answer(known)) == 200
        for _ in range(3):
            held = await hold(door, 20, sent)
            assert status(await door.ask(KNOWN, tcp=True)) == 200
            await known.send_all(KNOWN)
            assert status(await answer(known)) == 200
            for stream in held[:16]:
                await until_ended(stream)
            for stream in held:
                await stream.aclose()
        # The token has its share of the places: nobody is closed, and the next one with it is told.
        others: list[trio.abc.Stream] = []
        with trio.fail_after(60):
            while len(others) < 5:
                stream = await door.connect(tcp=True)
                await stream.send_all(KNOWN)
                if (found := await answer(stream)) and status(found) == 200:
                    others.append(stream)
                else:
                    await stream.aclose()
        refused = await door.ask(KNOWN, tcp=True)
        assert (status(refused), code(refused)) == (503, "busy")
        assert status(await door.ask(VISITOR, tcp=True)) == 200  # others have places
        for stream in others:
            await stream.aclose()


@pytest.mark.trio
async def test_they_would_if_everybody_was_taken_for_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trusting(Room):
        def take(self, address: str, close: Callable[[], None]) -> DoorPlace | None:
            if (place := super().take(address, close)) is not None:
                place.admit()
            return place

    monkeypatch.setattr(connections, "Room", Trusting)
    async with house(tmp_path, most_connections=32) as door:
        held = await hold(door, 8)
        assert status(await door.ask(KNOWN, tcp=True)) == 503
        for stream in held:
            await stream.aclose()


@pytest.mark.trio
async def test_a_stranger_has_a_short_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRANGER_SECONDS", "HEADER_SECONDS"):
        monkeypatch.setattr(room, name, 3600.0)
    async with house(tmp_path) as door, await door.connect(tcp=True) as known, await door.connect() as own:
        await known.send_all(KNOWN)
        assert status(await answer(known)) == 200
        monkeypatch.setattr(room, "STRANGER_SECONDS", 0.3)
        for sent in (b"", b"GET /health HTT", VISITOR):
            (stream,) = await hold(door, 1, sent)
            await until_ended(stream)
            await stream.aclose()
        for stream in (known, own):
            await stream.send_all(KNOWN)
            assert status(await answer(stream)) == 200
