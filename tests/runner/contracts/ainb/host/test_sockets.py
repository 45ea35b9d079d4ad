"""Streams to unix sockets of the host: which may be dialled, what is carried, and the bounds."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from runner.contracts.ainb.declared import Declared
from runner.contracts.ainb.host.sockets import (
    READ_BYTES,
    SOCKETS_MOST,
    UNSENT_MOST_BYTES,
    UnixSockets,
    _Handover,
    _Stream,
)
from runner.contracts.ainb.payload import decode, encode
from runner.plugin import Allowance
from runner.protocol.host_services import HostError
from tests.runner.contracts.ainb.host.desk import Desk

pytestmark = pytest.mark.trio

CAPABILITY, DIAL = "unix_socket_dial", "host/unix_socket_dial"


@pytest.fixture
def place() -> Iterator[Path]:
    """Short: the name of a socket has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="sock"))
    yield folder
    shutil.rmtree(folder)


def desk_for(*listed: str) -> Desk:
    return Desk(declared=Declared(granted=(CAPABILITY,), lists={CAPABILITY: listed}))


@asynccontextmanager
async def echo_server(path: Path) -> AsyncIterator[None]:
    async def serve(stream: trio.SocketStream) -> None:
        async for data in stream:
            await stream.send_all(bytes(data))

    listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listener.bind(str(path))
    listener.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listener)])
        yield
        nursery.cancel_scope.cancel()


async def events(desk: Desk, stream: str, until: str) -> list[dict[str, Any]]:
    """What came on the stream, up to the first of kind `until`."""
    with trio.fail_after(60):
        while True:
            found = [json.loads(payload) for topic, payload in desk.told if topic == f"socket:{stream}"]
            if any(each["kind"] == until for each in found):
                return found
            await trio.lowlevel.checkpoint()


async def test_bytes_go_both_ways(place: Path) -> None:
    desk = desk_for(str(place / "s"))
    async with echo_server(place / "s"):
        stream = (await desk.result(DIAL, {"path": str(place / "s")}))["stream_id"]
        desk.note("host/unix_socket_send", {"stream_id": stream, "bytes": encode(b"hello ")})
        desk.note("host/unix_socket_send", {"stream_id": stream, "bytes": [104, 105]})
        got = b""
        while got != b"hello hi":
            got = b"".join(decode(each["bytes"]) for each in await events(desk, stream, "data"))
            await trio.lowlevel.checkpoint()
        desk.note("host/unix_socket_close", {"stream_id": stream})
    assert all(each["kind"] == "data" for each in await events(desk, stream, "data"))


async def test_the_end_of_the_peer_is_told(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        listener.listen()
        desk = desk_for(str(place / "s"))
        stream = (await desk.result(DIAL, {"path": str(place / "s")}))["stream_id"]
        peer, _ = listener.accept()
        peer.sendall(b"bye")
        peer.close()
        found = await events(desk, stream, "eof")
        assert found == [{"kind": "data", "bytes": encode(b"bye")}, {"kind": "eof"}]
        # Sending to what has ended does nothing.
        assert desk.note("host/unix_socket_send", {"stream_id": stream, "bytes": "aGk="}) == []


async def test_the_list_is_mandatory() -> None:
    desk = Desk(declared=Declared(granted=(CAPABILITY,)))
    assert (await desk.error(DIAL, {"path": "/s"}))[0] == -32003


async def test_only_listed_sockets_are_dialled(place: Path) -> None:
    listed, other = place / "listed", place / "other"
    desk = desk_for(str(listed), f"{place}/missing", str(place / "file"), f"{place}/link")
    (place / "file").write_text("")
    (place / "link").symlink_to(other)
    (place / "alias").symlink_to(listed)
    async with echo_server(listed), echo_server(other):
        assert (await desk.ask(DIAL, {"path": str(listed)})).error is None  # the control
        for path in (other, place / "alias", place / "link", f"{place}/../{place.name}/listed", "listed", ""):
            error = await desk.error(DIAL, {"path": str(path)})
            assert error == (-32001, f"capability denied: {CAPABILITY}", {"path": str(path)}), path
        for path in (place / "gone", place / "gone" / "s", "/etc/shadow/s"):
            assert (await desk.error(DIAL, {"path": str(path)}))[0] == -32001, path
        code, message, _ = await desk.error(DIAL, {"path": f"{place}/missing"})
        assert code == -32602 and message.endswith("No such file or directory (os error 2)")
        code, message, _ = await desk.error(DIAL, {"path": str(place / "file")})
        assert code == -32602 and message.endswith("it is not a socket")
        desk.guard.detach()


async def test_a_listed_socket_that_becomes_a_link_is_refused(place: Path) -> None:
    """A plugin that can write beside it would choose the daemon that the host talks to."""
    listed, other = place / "listed", place / "other"
    desk = desk_for(str(listed))
    async with echo_server(other):
        listed.symlink_to(other)
        assert (await desk.error(DIAL, {"path": str(listed)}))[0] == -32001
        listed.unlink()
        os.link(other, listed)  # the control: a name of its own
        assert (await desk.ask(DIAL, {"path": str(listed)})).error is None
        desk.guard.detach()


async def test_home_and_variables_are_expanded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("SOCKETS", str(place))
    monkeypatch.delenv("UNSET", raising=False)
    desk = desk_for("~/s", "${SOCKETS}/t", "${UNSET}/s")
    async with echo_server(place / "s"), echo_server(place / "t"):
        for path in ("~/s", f"{place}/s", "${SOCKETS}/s", "${SOCKETS}/t", "${HOME}/t"):
            assert (await desk.ask(DIAL, {"path": path})).error is None, path
        for path in ("${UNSET}/s", "$SOCKETS/t", "~root/s", "${SOCKETS}/u"):
            assert (await desk.error(DIAL, {"path": path}))[0] == -32001, path
        desk.guard.detach()


async def test_sockets_are_bounded_and_end_with_the_session(place: Path) -> None:
    desk = desk_for(str(place / "s"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        listener.listen(100)
        for _ in range(SOCKETS_MOST):
            assert (await desk.ask(DIAL, {"path": str(place / "s")})).error is None
        assert (await desk.error(DIAL, {"path": str(place / "s")}))[0] == -32602
        peer, _ = listener.accept()
        desk.guard.detach()
        with trio.fail_after(60), trio.socket.from_stdlib_socket(peer) as ours:
            assert await ours.recv(1) == b""
    assert desk.told == []


async def test_a_plugin_that_sends_faster_than_the_socket_takes_loses_its_stream(place: Path) -> None:
    desk = desk_for(str(place / "s"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        listener.listen()
        stream = (await desk.result(DIAL, {"path": str(place / "s")}))["stream_id"]
        sent = encode(bytes(UNSENT_MOST_BYTES // 2))
        for _ in range(10):
            desk.note("host/unix_socket_send", {"stream_id": stream, "bytes": sent})
        (end,) = await events(desk, stream, "error")
        assert end == {"kind": "error", "error": f"more than {UNSENT_MOST_BYTES} bytes wait to be sent"}


async def test_only_its_owner_uses_a_stream(place: Path) -> None:
    one, two = desk_for(str(place / "s")), desk_for(str(place / "s"))
    async with echo_server(place / "s"):
        stream = (await one.result(DIAL, {"path": str(place / "s")}))["stream_id"]
        two.note("host/unix_socket_send", {"stream_id": stream, "bytes": encode(b"forged")})
        two.note("host/unix_socket_close", {"stream_id": stream})
        one.note("host/unix_socket_send", {"stream_id": stream, "bytes": encode(b"mine")})
        found = await events(one, stream, "data")
        assert b"".join(decode(each["bytes"]) for each in found) == b"mine"
        one.guard.detach()


async def test_what_the_policy_denies_is_not_dialled(place: Path) -> None:
    path = str(place / "s")
    async with echo_server(place / "s"):
        for denied in ((path,), (str(place),)):
            sockets = UnixSockets([path], {}, lambda method, params: None, trio.lowlevel.checkpoint, denied)
            with pytest.raises(HostError) as caught:
                await sockets.dial(path)
            assert caught.value.code == -32001
        sockets = UnixSockets(
            [path], {}, lambda method, params: None, trio.lowlevel.checkpoint, (f"{place}/other",)
        )
        assert (await sockets.dial(path))["stream_id"]  # the control
        sockets.close_all()


async def test_sockets_that_command_the_host_are_not_dialled(place: Path) -> None:
    names = ("docker.sock", "podman.sock", "system_bus_socket", "mydocker.sock")
    desk = desk_for(*(f"{place}/{name}" for name in names), "/run/user/1000/bus", "/run/systemd/private")
    for name in names[:-1]:
        async with echo_server(place / name):
            assert (await desk.error(DIAL, {"path": f"{place}/{name}"}))[0] == -32001, name
    for path in ("/run/user/1000/bus", "/run/systemd/private"):
        assert (await desk.error(DIAL, {"path": path}))[0] == -32001, path
    async with echo_server(place / "mydocker.sock"):  # the control
        assert (await desk.ask(DIAL, {"path": f"{place}/mydocker.sock"})).error is None
        desk.guard.detach()


async def test_a_search_that_hangs_is_abandoned(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(place / "s")
    sockets = UnixSockets([path], {}, lambda method, params: None, trio.lowlevel.checkpoint)
    going, ended = threading.Event(), threading.Event()
    opened = []

    def hang(asked: str) -> int:
        going.wait(60)
        opened.append(os.open(place, os.O_PATH))
        return opened[0]

    def note(handover: _Handover, fd: int) -> None:
        give(handover, fd)
        ended.set()

    give = _Handover.give
    monkeypatch.setattr(_Handover, "give", note)
    monkeypatch.setattr(sockets, "_open_listed", hang)
    with trio.fail_after(30), trio.move_on_after(0.05) as scope:
        await sockets.dial(path)
    assert scope.cancelled_caught
    going.set()
    assert await trio.to_thread.run_sync(ended.wait, 60)
    with pytest.raises(OSError, match="Bad file descriptor"):  # it was closed
        os.fstat(opened[0])


async def test_what_is_denied_to_every_plugin_is_not_dialled() -> None:
    desk = desk_for("/run/docker.sock", "/var/run/docker.sock", "/run/nobody.sock")
    for path in ("/run/docker.sock", "/var/run/docker.sock"):
        assert (await desk.error(DIAL, {"path": path}))[0] == -32001
    # The control: another one there is looked for.
    assert (await desk.error(DIAL, {"path": "/run/nobody.sock"}))[0] == -32602


async def test_pieces_without_data_cost_nothing_and_small_ones_more_than_their_data() -> None:
    stream = _Stream()
    for _ in range(1000):
        stream.put(b"")
    assert not stream.unsent and not stream.bytes
    while not stream.overrun:
        stream.put(b"x")
    assert len(stream.unsent) <= UNSENT_MOST_BYTES // 64


async def test_a_listener_whose_queue_is_full_is_no_connection(place: Path) -> None:
    path = str(place / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)  # the queue is full now: nobody accepts
        dialled = UnixSockets([path], {}, lambda method, params: None, trio.lowlevel.checkpoint)
        with pytest.raises(HostError, match="dial"), trio.fail_after(10):
            await dialled.dial(path)


async def test_the_policys_deny_reaches_the_sockets_of_a_session(place: Path) -> None:
    path = str(place / "s.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        declared = Declared(granted=("unix_socket_dial",), lists={"unix_socket_dial": (path,)})
        denying = Desk(declared=declared, allowance=Allowance(denied=(str(place),)))
        assert (await denying.error("host/unix_socket_dial", {"path": path}))[0] == -32001
        free = Desk(declared=declared)
        assert (await free.result("host/unix_socket_dial", {"path": path}))["stream_id"]  # the control
        free.guard.detach()
        denying.guard.detach()


async def test_a_daemon_waits_while_the_plugin_has_no_room(place: Path) -> None:
    """Its bytes are a stream: with some left out, the rest would be wrong."""
    path, size = str(place / "s"), 8 << 20
    room, sent, whole, told = trio.Event(), trio.Event(), trio.Event(), bytearray()

    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(bytes(size))
        sent.set()
        await stream.aclose()

    def tell(method: str, params: Any) -> None:
        told.extend(decode(json.loads(params["payload"]).get("bytes", "")))
        if len(told) == size:
            whole.set()

    sockets = UnixSockets([path], {}, tell, room.wait)
    listening = trio.socket.socket(trio.socket.AF_UNIX)
    await listening.bind(path)
    listening.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listening)])
        await sockets.dial(path)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert 0 < len(told) <= READ_BYTES and not sent.is_set()
        room.set()
        with trio.fail_after(30):
            await whole.wait()
        nursery.cancel_scope.cancel()
    sockets.close_all()
