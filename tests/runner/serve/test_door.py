"""The door against bad input and strangers. Real sockets; no plugin is needed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import pytest
import trio
from h11 import _readers
from openapi_spec_validator import validate
from trio.testing import wait_all_tasks_blocked

from runner.cli import verb_parser
from runner.cli.serving.via import call_via
from runner.exceptions import PluginError
from runner.ledger.file import LedgerBounds, LedgerFile
from runner.ledger.ledger import Ledger, open_ledger
from runner.ledger.rows import Delivery, InvocationRow
from runner.outcome import EXIT, USAGE_ERROR
from runner.protocol.calls import CallRequest
from runner.protocol.dialect import Refusal
from runner.serve import connections, daemon, listen, room
from runner.serve import door as door_module
from runner.serve.alerts import Alerts
from runner.serve.client import default_socket
from runner.serve.deliveries import posted_id
from runner.serve.desk import CallAnswer, Desk
from runner.serve.event_stream import Emit, EventStream
from runner.serve.metrics import Metrics
from runner.serve.openapi import OPERATIONS, document
from runner.serve.peer import Departure, DoorPeer, Rules, identify, read_token
from runner.serve.refusal import STATUS, Refused
from runner.serve.routes import Routes
from runner.serve.service_manager import Notifier, take_sockets, watchdog_seconds
from runner.session import account
from sandbox.network.http_connection import HttpConnection
from tests.conftest import ROOT, SPARE_UID, Caller
from tests.runner.serve.house import GET, TOKEN, answer, audited, code, house, request, status
from tests.runner.serve.shelf import put_example
from tests.tables import check_rows

# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_bodies_and_headers_are_bounded_in_size_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tmp_path, most_body_bytes=1000) as door:
        post = {"method": "POST"}
        host = "Host: localhost"
        # One byte too long, by its header or by its bytes; the control is one byte shorter.
        assert code(await door.ask(request("/deliveries", host, body=b"x" * 1000, **post))) == "invalid_json"
        assert status(await door.ask(request("/deliveries", host, body=b"x" * 1001, **post))) == 413
        chunked = b"POST /deliveries HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        long = chunked + b"3e8\r\n" + b"x" * 1000 + b"\r\n" + b"1\r\nx\r\n"
        assert status(await door.ask(long)) == 413
        # Much more than the kernel holds, to somebody who has refused it already.
        async with await door.connect() as stream:
            with pytest.raises(trio.BrokenResourceError):
                await stream.send_all(chunked + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 400)
        # A header that is too long.
        assert status(await door.ask(b"GET /health HTTP/1.1\r\nX: " + b"x" * 20_000)) == 431
        whole = await door.ask(request("/health", host, "X: " + "x" * 20_000))  # it arrives at once
        assert (status(whole), code(whole)) == (431, "header_too_large")
        assert status(await door.ask(request("/health", host, "X: " + "x" * 16_000))) == 200
        # What is not HTTP/1.1, and what this door does not speak.
        for raw, expected in (
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10, (400, "not_http")),
            (b"GET /\r\n\r\n", (400, "not_http")),
            (GET.replace(b"\r", b""), (400, "not_http")),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (505, "http_version")),
        ):
            found = await door.ask(raw + b"\r\n\r\n")
            assert (status(found), code(found)) == expected
        # A header that is nearly one may hold a secret: it is neither repeated nor noted.
        found = await door.ask(request("/health", host, "Authorization : Bearer hunter2"))
        assert (status(found), code(found)) == (400, "not_http") and b"hunter2" not in found
        with trio.fail_after(60):
            while "illegal header line" not in (
                noted := str(await door.ledger.do(LedgerFile.audit, "refusal"))
            ):
                pass
        assert "hunter2" not in noted
        # Who would rather speak something else gets an answer, and can ask again.
        websocket = ("Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
        async with await door.connect() as stream:
            for more in (("Upgrade: h2c", "HTTP2-Settings: AAMAAABk"), ("Upgrade: websocket", *websocket)):
                await stream.send_all(request("/health", host, "Connection: Upgrade", *more))
                assert status(await answer(stream)) == 200
        # The daemon still answers.
        assert status(await door.ask(GET)) == 200
    # A body that does not come, and a header that does not end: only these meet short clocks.
    async with house(tmp_path, body_seconds=0.1) as door:
        slow = b"POST /deliveries HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc"
        assert (status(found := await door.ask(slow)), code(found)) == (408, "slow_body")
        monkeypatch.setattr(room, "HEADER_SECONDS", 0.1)
        assert await door.ask(b"GET /health HTT") == b""


class _Unguarded(HttpConnection):
    receive_data = h11.Connection.receive_data
    next_event = h11.Connection.next_event


@pytest.mark.trio
@pytest.mark.parametrize("tcp", [False, True])
async def test_a_header_that_h11_takes_long_for_costs_nobody_anything(
    tmp_path: Path, tcp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One header of 60,000 blanks and a NUL stopped the daemon for 20 s."""
    told: list[str] = []
    tried: list[bytes] = []
    validate = _readers.validate  # type: ignore[attr-defined]

    def watched(pattern: re.Pattern[bytes], line: bytes, *words: Any) -> Any:
        tried.append(bytes(line))
        return validate(pattern, line, *words)

    monkeypatch.setattr(_readers, "validate", watched)
    bearer = f"Authorization: Bearer {TOKEN.decode()}"
    good = request("/health", "Host: localhost", bearer)
    chunked = good.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"0\r\n\r\n"
    async with house(tmp_path, told=told) as door, await door.connect(tcp=tcp) as other:
        for blanks, expected in ((60_000, (431, "header_too_large")), (1_000, (400, "not_http"))):
            evil = b"GET / HTTP/1.1\r\nX:" + b" " * blanks + b"\0\r\n\r\n"
            found = await door.ask(evil, tcp=tcp)
            assert (status(found), code(found)) == expected and b"connection: close" in found
            # Behind a good request, by a connection that stays open; and behind a body in chunks.
            for before in (good, chunked):
                async with await door.connect(tcp=tcp) as stream:
                    with suppress(trio.BrokenResourceError):
                        await stream.send_all(before + evil)
                    with trio.fail_after(60):
                        found = b"".join([part async for part in stream])
                    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"%d" % expected[0]]
            await other.send_all(good)
            assert status(await answer(other)) == 200
        # The control: such a line gets as far as h11's patterns without the NUL, and without our reader.
        assert not any(b"\0" in line for line in tried)
        await door.ask(request("/health", "Host: localhost", bearer, "X:" + " " * 1_000 + "y"), tcp=tcp)
        assert any(b" " * 1_000 in line for line in tried)
        monkeypatch.setattr(connections, "HttpConnection", _Unguarded)
        await door.ask(b"GET / HTTP/1.1\r\nX:" + b" " * 1_000 + b"\0\r\n\r\n", tcp=tcp)
        assert any(b"\0" in line for line in tried)
    assert told == []


@pytest.mark.trio
async def test_a_client_that_waits_before_it_sends_its_body_is_told_to_go_on(tmp_path: Path) -> None:
    async with house(tmp_path) as door, await door.connect() as stream:
        head = request("/deliveries", "Host: localhost", "Expect: 100-continue", method="POST", body=b"[]")
        await stream.send_all(head.removesuffix(b"[]"))
        with trio.fail_after(20):
            assert await stream.receive_some() == b"HTTP/1.1 100 \r\n\r\n"
        await stream.send_all(b"[]")
        assert code(await answer(stream)) == "invalid_body"


@pytest.mark.trio
async def test_names_of_calls_are_bounded(tmp_path: Path) -> None:
    """The ledger keeps them, and a body in place of a name would push out what it holds."""
    async with house(tmp_path) as door:

        async def ask(**given: str) -> str:
            body = json.dumps(given).encode()
            return code(
                await door.ask(request("/plugins/none/calls", "Host: localhost", method="POST", body=body))
            )

        assert await ask(tool="t" * 4096, kind="k" * 64) == "unknown_plugin"
        assert await ask(tool="t" * 4097) == "invalid_body"
        assert await ask(tool="t", kind="k" * 65) == "invalid_body"


@pytest.mark.trio
async def test_a_file_name_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / os.fsdecode(b"none/odd\xff.json")).write_text("{")
    told: list[str] = []
    async with house(tmp_path, told) as door:
        found = await door.ask(GET)
        assert status(found) == 200 and b"odd\\udcff.json" in found
    assert not told


@pytest.mark.trio
async def test_a_bug_is_told_once_to_those_who_run_the_daemon_and_not_to_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(routes: Routes) -> list[Any]:
        raise KeyError("hunter2")

    told: list[str] = []
    async with house(tmp_path, told) as door, await door.connect() as stream:
        monkeypatch.setattr(Routes, "_faults", broken)
        for _ in range(2):  # by one connection
            await stream.send_all(request("/plugins", "Host: localhost"))
            found = await answer(stream)
            assert (status(found), code(found)) == (500, "internal") and b"hunter2" not in found
    assert told == ["internal: GET /plugins: KeyError: 'hunter2'"] * 2


@pytest.mark.trio
async def test_what_strangers_send_takes_little_room_in_the_audit(tmp_path: Path) -> None:
    async with house(tmp_path) as door:
        long = request("/health", "Host: " + "x" * 15_000)
        assert code(await door.ask(long, tcp=True)) == "host"
        (row,) = await audited(door.ledger, 1)
        assert "the Host header names" in row.detail and len(row.detail) < 400
        # Those who get a file of the page take none, and hide nobody who is let in after them.
        async with await door.connect(tcp=True) as stream:
            for more in ((), (f"Authorization: Bearer {TOKEN.decode()}",)):
                await stream.send_all(
                    request("/page.css" if not more else "/health", "Host: localhost", *more)
                )
                assert status(await answer(stream)) == 200
        assert await arrived(door.ledger, 1) == ["token"]
        # Nor do those who are refused: each kind of row has a most of its own.
        for _ in range(daemon._NOTES_PER_SECOND):
            await door.ask(request("/health", "Host: evil.example"), tcp=True)
        await door.ask(request("/health", "Host: localhost"))
        assert await arrived(door.ledger, 2) == [f"uid:{os.geteuid()}", "token"]


async def arrived(ledger: Ledger, count: int) -> list[str]:
    """The callers in the audit, when there are so many: no request waits for them."""
    with trio.fail_after(60):
        while len(rows := await ledger.do(LedgerFile.audit, "connection")) < count:
            pass
    return [row.caller for row in rows]


def test_a_key_of_the_command_line_begins_no_other_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--via", str(tmp_path / "none.sock"), "plugin", "tool", "--key"]
    smuggled = "k\r\nContent-Length: 0\r\n\r\nPOST /drain HTTP/1.1\r\nHost: x"
    for key in (smuggled, "k\n", "ключ", "", "k" * 256):
        assert call_via([*words, key]) == USAGE_ERROR
        assert "--key takes 1 to 255 printable ASCII characters" in capsys.readouterr().err
    assert call_via([*words, "k" * 255]) == EXIT["launch_failed"]  # it went to ask the daemon


@pytest.mark.trio
async def test_a_thousand_idle_connections_are_bounded_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "HEADER_SECONDS", 3600.0)  # those that are held stay
    async with house(tmp_path, most_connections=50) as door:
        held = [await door.connect() for _ in range(50)]
        refused = 0
        for _ in range(950):
            async with await door.connect() as stream:
                found = await answer(stream)
                assert found.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in found
                refused += 1
        assert refused == 950
        # One that was open is still served, and one that closes makes room.
        await held[0].send_all(GET)
        assert status(await answer(held[0])) == 200
        for stream in held[1:]:
            await stream.aclose()
        with trio.fail_after(60):
            while status(await door.ask(GET)) != 200:  # the door hears of the closed ones one by one
                refused += 1
        text = await door.ask(request("/metrics", "Host: localhost"))
        assert b'runner_refusals_total{reason="too_many_connections"} %d.0\n' % refused in text
        await held[0].aclose()


@pytest.mark.trio
async def test_garbage_ends_its_connection_and_not_the_daemon(tmp_path: Path) -> None:
    chance = random.Random(29)
    told: list[str] = []
    async with house(tmp_path, told=told, body_seconds=0.05) as door:
        good = request(
            "/deliveries", "Host: localhost", "Connection: close", method="POST", body=b'{"id": 1}'
        )
        for _ in range(300):
            raw = bytearray(good * chance.choice((1, 1, 2)))
            for _ in range(chance.randrange(1, 6)):
                at = chance.randrange(len(raw))
                raw[at : at + chance.randrange(3)] = chance.choice(
                    (b"\r\n", b"\0", b":", b"\xff", b" ", b"Transfer-Encoding: chunked\r\n", b"1", b"")
                )
            async with await door.connect() as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(raw)
                    await stream.send_eof()
                    await answer(stream)
        assert status(await door.ask(GET)) == 200
    assert told == []  # no bug was met


@pytest.mark.trio
async def test_a_client_that_does_not_read_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_WRITE_SECONDS", 0.3)
    async with house(tmp_path, most_connections=1) as door, await door.connect() as stream:
        # More answers than the kernel holds for it. The door reads no further while it cannot write.
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(request("/openapi.json", "Host: localhost") * 20_000)
        # Its place is free again.
        with trio.fail_after(60):
            while status(await door.ask(GET)) != 200:
                pass


@pytest.mark.trio
@pytest.mark.parametrize("is_bounded", [True, False])
async def test_answers_that_nobody_reads_are_given_up(
    tmp_path: Path, is_bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 16 << 20  # more than the kernel holds for a client
    monkeypatch.setattr(door_module, "MOST_HELD_BYTES", (6 if is_bounded else 60) * size)
    monkeypatch.setattr(connections, "_WRITE_SECONDS", 250.0)
    asked: list[str] = []
    refused: list[str] = []
    bugs: list[object] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        asked.append(scope["state"]["caller"])
        await send({"type": "http.response.body", "body": bytes(size), "more_body": False})

    door = door_module.Door(
        application,
        Rules(os.geteuid(), orgs=lambda token: token.decode()),
        on_refused=lambda peer, why: refused.append(why.code),
        on_connected=lambda peer, caller: None,
    )
    serving = connections.Connections(
        door, 64, lambda: None, lambda *bug: bugs.append(bug), lambda peer, why: None
    )
    path = str(tmp_path / "run/serve.sock")
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen.listen_unix(path))
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(serving.serve, listener)

        async def ask(org: str, waiting: int) -> trio.SocketStream:
            before = len(asked)
            stream = await stack.enter_async_context(await trio.open_unix_socket(path))
            await stream.send_all(request("/", "Host: localhost", f"Authorization: Bearer {org}"))
            with trio.fail_after(60):
                while len(asked) == before:
                    await trio.lowlevel.checkpoint()
            assert door._unread._held[f"org:{org}"] == waiting * size
            return stream

        # Of six answers, one is another caller's. Half of what that leaves are two.
        other = await ask("other", 1)
        held = [await ask("one", min(count, 2) if is_bounded else count) for count in range(1, 9)]
        assert refused == (["unread_answer"] * 6 if is_bounded else [])
        # The newest are still there, and that of the other caller.
        for number, stream in enumerate((*held, other)):
            found = 0
            with trio.fail_after(60), suppress(trio.BrokenResourceError):
                while found < size and (part := await stream.receive_some(1 << 20)):
                    found += len(part)
            assert (found >= size) is (number >= 6 or not is_bounded)
    assert bugs == []


@pytest.mark.trio
async def test_one_caller_leaves_room_for_the_bodies_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MOST_HELD_BYTES", 1000)
    bearer = f"Authorization: Bearer {TOKEN.decode()}"

    def post(size: int) -> bytes:
        return request("/deliveries", "Host: localhost", bearer, method="POST", body=b"x" * size)

    async with house(tmp_path) as door:
        assert code(await door.ask(post(500))) == "invalid_json"  # the control: half of the room is free
        assert code(await door.ask(post(501))) == "busy"
        async with await door.connect() as slow:
            await slow.send_all(post(500)[:-1])
            with trio.fail_after(60):
                while code(await door.ask(post(2))) != "busy":
                    pass  # until the door has read what it was sent
            # Of what the first caller leaves, the next one gets half.
            assert code(await door.ask(post(250), tcp=True)) == "invalid_json"
            assert code(await door.ask(post(251), tcp=True)) == "busy"
            await slow.send_all(b"x")
            assert code(await answer(slow)) == "invalid_json"
        assert code(await door.ask(post(500))) == "invalid_json"


@pytest.mark.trio
async def test_a_client_that_sent_much_ahead_is_noticed_when_it_goes(tmp_path: Path) -> None:
    follow = request("/events", "Host: localhost")
    async with house(tmp_path, most_connections=1) as door:
        async with await door.connect() as stream:
            await stream.send_all(follow)
            assert b"200" in await stream.receive_some()
            # What the kernel holds for the door, which reads nothing ahead.
            await stream.send_all(b"x" * (100 << 10))
            assert status(await door.ask(GET)) == 503  # the control: its place is taken
        with trio.fail_after(60):
            while status(await door.ask(GET)) != 200:
                pass


@pytest.mark.trio
@pytest.mark.parametrize("goes", [True, False])
async def test_what_a_client_sent_ahead_is_not_done_when_it_has_gone(tmp_path: Path, goes: bool) -> None:
    asked: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        while (await receive()).get("more_body"):
            pass
        if goes:
            await receive()  # that it has gone
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    serving = connections.Connections(application, 64, lambda: None, lambda *bug: None, lambda *why: None)
    path = str(tmp_path / "run/serve.sock")
    with listen.listen_unix(path) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving.serve, listener)
            async with await trio.open_unix_socket(path) as stream:
                await stream.send_all(request("/one", "Host: x") + request("/two", "Host: x"))
                if not goes:
                    assert status(await answer(stream)) == 200
                await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            await serving.until_idle()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert asked == (["/one"] if goes else ["/one", "/two"])


@pytest.mark.trio
async def test_head_of_a_stream_ends_and_leaves_no_subscriber(tmp_path: Path) -> None:
    told: list[str] = []
    async with house(tmp_path, told) as door:
        for path in ("/events", "/health", "/metrics"):
            found = await door.ask(request(path, "Host: localhost", "Connection: close", method="HEAD"))
            assert status(found) == 200 and found.endswith(b"\r\n\r\n")
        # What follows it on its connection is answered with a body again.
        async with await door.connect() as stream:
            await stream.send_all(request("/live", "Host: localhost", method="HEAD"))
            assert b" 200 " in await stream.receive_some()
            await stream.send_all(b"GET /\r\n\r\n")
            assert code(await answer(stream)) == "not_http"
        assert code(await door.ask(request("/drain", "Host: localhost"))) == "no_route"
    assert told == []


@pytest.mark.trio
async def test_a_streamed_call_that_is_cancelled_before_it_is_made_has_an_outcome(tmp_path: Path) -> None:
    roster: Any = SimpleNamespace(effect=lambda plugin, tool: "unknown")
    nobody: Any = None
    async with open_ledger(str(tmp_path / "ledger.db")) as ledger:
        desk = Desk(nobody, ledger, roster, Metrics())
        row = await desk.accept(CallRequest("plugin", "tool", None))
        assert not isinstance(row, CallAnswer) and desk.in_flight == 1

        async def produce(emit: Emit) -> None:
            raise AssertionError("it was made")

        async def send(message: object) -> None:
            await trio.lowlevel.checkpoint()

        scope: Any = {"method": "POST", "state": {"departure": Departure()}}
        with trio.CancelScope() as cancelled:
            cancelled.cancel()
            await EventStream(produce, lambda: desk.abandon(row))(scope, nobody, send)
        found = await ledger.do(LedgerFile.invocation, row.id)
        assert found is not None and (found.code, found.started, desk.in_flight) == ("cancelled", None, 0)


@pytest.mark.trio
async def test_a_call_that_ends_with_its_session_is_not_taken_for_the_end_of_the_daemon(
    tmp_path: Path,
) -> None:
    roster: Any = SimpleNamespace(effect=lambda plugin, tool: "unknown", secrets=lambda plugin: None)
    scope = trio.CancelScope()

    async def make(request: CallRequest) -> None:
        scope.cancel()
        await trio.sleep_forever()

    supervisor: Any = SimpleNamespace(make=make)
    async with open_ledger(str(tmp_path / "ledger.db")) as ledger:
        desk = Desk(supervisor, ledger, roster, Metrics())
        for draining, cause in ((False, "given_up"), (True, "draining")):
            asked = CallRequest("plugin", "tool", None)
            desk.draining = False  # it accepts no call then
            row = await desk.accept(asked)
            assert not isinstance(row, CallAnswer)
            desk.draining = draining
            with trio.CancelScope() as scope:
                await desk.make(row, asked)
            found = await ledger.do(LedgerFile.invocation, row.id)
            assert found is not None and json.loads(found.record or "")["outcome"]["cause"] == cause


@pytest.mark.trio
async def test_errors_of_megabytes_make_no_key_forgotten_and_no_list_long(tmp_path: Path) -> None:
    """Thirty errors of 12 MB once filled the ledger, and a call with a known key was made twice."""
    roster: Any = SimpleNamespace(effect=lambda plugin, tool: "unknown", secrets=lambda plugin: None)
    made: list[str] = []

    async def make(request: CallRequest) -> object:
        await account.ask()
        made.append(request.plugin)
        if request.plugin == "noisy":
            raise PluginError(Refusal(1, "y" * 100_000, "x" * 2_000_000, "", {"data": "z" * 100_000}))
        return SimpleNamespace(value="paid", invocation=None)

    supervisor: Any = SimpleNamespace(make=make)
    bounds = LedgerBounds(size=16 << 20)
    said: list[str] = []
    async with open_ledger(str(tmp_path / "ledger.db"), bounds=bounds) as ledger:
        desk = Desk(supervisor, ledger, roster, Metrics(), Alerts(said.append))

        async def ask(plugin: str, key: str) -> CallAnswer:
            asked = CallRequest(plugin, "tool", None, key=key, caller="token")
            row = await desk.accept(asked)
            return row if isinstance(row, CallAnswer) else await desk.make(row, asked)

        assert (await ask("bank", "order-1")).document["value"] == "paid"
        for number in range(30):
            assert (await ask("noisy", str(number))).status == STATUS["plugin_error"]
        again = await ask("bank", "order-1")
        assert again.headers == {"Idempotency-Replayed": "true"} and again.document["value"] == "paid"
        # An error that is too large to be kept is told as that, and is not asked for again.
        repeated = await ask("noisy", "0")
        assert (repeated.status, repeated.document["error"]["code"]) == (410, "answer_not_kept")
        assert made == ["bank", *["noisy"] * 30]
        rows = await ledger.do(LedgerFile.invocations, most=1000)
        assert len(rows) == 31 and sum(len(row.record or "") for row in rows) < 1 << 20
        told = json.loads(rows[0].record or "")["outcome"]["message"]
        assert told.startswith("xxx") and told.endswith("it has 2000000 characters)")
        # When its share of the keys is full, a caller is told why and what to do.
        await ledger.do(
            lambda file: file._connection.execute(
                "INSERT INTO shares VALUES ('keys', 'token', 'full', 4720000)"
            )
        )
        with pytest.raises(
            Refused, match="keys of token for the plugin full have taken their share"
        ) as caught:
            await ask("full", "1")
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        assert "--ledger-size" in caught.value.hint and caught.value.retry_after
        assert said == [f"{caught.value}; {caught.value.hint}"]
        assert (await ask("bank", "order-2")).status == 200 and desk.in_flight == 0


@pytest.mark.trio
async def test_a_ledger_that_cannot_be_written_is_told_and_nothing_is_accepted(tmp_path: Path) -> None:
    said: list[str] = []
    async with house(tmp_path, said=said) as door:
        other = sqlite3.connect(door.ledger.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        ask = request("/deliveries", "Host: localhost", method="POST", body=b'{"plugin": "x"}')
        assert code(await door.ask(ask)) == "invalid_delivery"  # the control: such requests do not need it
        refused = await door.ask(request("/calls", "Host: localhost"))
        assert (status(refused), code(refused)) == (503, "ledger")
        assert b"is locked by another program" in refused and b"retry-after: 5" in refused.lower()
        answered = await door.ask(GET)
        told = json.loads(answered.partition(b"\r\n\r\n")[2])
        assert (status(answered), told["status"]) == (503, "unavailable")
        assert "is locked" in told["ledger"]["fault"] and told["reasons"][0]["code"] == "ledger"
        assert status(await door.ask(request("/live", "Host: localhost"))) == 200
        other.execute("ROLLBACK")
        other.close()
        assert status(await door.ask(request("/calls", "Host: localhost"))) == 200
        # Nobody calls a daemon that is not ready, so it finds out by itself that it can write again.
        with trio.fail_after(60):
            while status(answered := await door.ask(GET)) != 200:
                pass
        assert b'"code":"configuration"' in answered  # its folder of plugins is missing, and it is ready
    told_so = [line.partition(":")[0] for line in said if line.startswith(("no calls", "the ledger"))]
    assert told_so == ["no calls are taken", "the ledger can be written again"]


# --- who may ------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_by_tcp_only_the_token_and_a_local_host_are_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bearer = f"Authorization: Bearer {TOKEN.decode()}"
    rows: list[tuple[tuple[str, ...], int]] = [
        (("Host: localhost", bearer), 200),
        (("Host: 127.0.0.1:8700", bearer), 200),
        (("Host: [::1]:8700", bearer), 200),
        (("Host: LOCALHOST", bearer), 200),
        (("Host: localhost", bearer, "Origin: http://localhost:3000"), 200),
        (("Host: localhost",), 401),
        (("Host: localhost", bearer[:-1]), 401),
        (("Host: localhost", bearer + "x"), 401),
        (("Host: localhost", bearer, bearer), 401),
        (("Host: localhost", f"Authorization: Basic {TOKEN.decode()}"), 401),
        (("Host: localhost", "Authorization: Bearer"), 401),
        (("Host: evil.example", bearer), 421),  # a name that resolves to this machine
        (("Host: localhost.evil.example", bearer), 421),
        (("Host: localhost", bearer, "Origin: http://evil.example"), 403),
        (("Host: localhost", bearer, "Origin: null"), 403),
        (("Host: localhost", bearer, "Origin: http://localhost.evil.example"), 403),
    ]
    async with house(tmp_path) as door:
        found = {
            headers: status(await door.ask(request("/health", *headers), tcp=True)) for headers, _ in rows
        }
        assert found == dict(rows)
        # With a token one may less than on the unix socket.
        local = [each for each in OPERATIONS if each.local]
        assert {each.name for each in local} >= {
            "drain",
            "reload",
            "reload_all",
            "audit",
            "explain",
            "deliveries",
        }
        for each in local:
            path = each.path.replace("{", "").replace("}", "")
            refused = await door.ask(request(path, "Host: localhost", bearer, method=each.method), tcp=True)
            assert (status(refused), code(refused)) == (403, "local_only")
        await door.ledger.accept(InvocationRow("call_1", "x", "y", "", "uid:0"))
        await door.ledger.accept(InvocationRow("call_2", "x", "y", "", "token"))
        for path, wanted in (("/calls/call_1", 404), ("/calls/call_2", 200)):
            assert status(await door.ask(request(path, "Host: localhost", bearer), tcp=True)) == wanted
            assert status(await door.ask(request(path, "Host: localhost"))) == 200
        listed = await door.ask(request("/calls", "Host: localhost", bearer), tcp=True)
        assert b"call_2" in listed and b"call_1" not in listed
        # Never in a URL.
        url = request(f"/health?token={TOKEN.decode()}&access_token={TOKEN.decode()}", "Host: localhost")
        assert status(await door.ask(url, tcp=True)) == 401
        noted = await audited(door.ledger, 3)
        assert {json.loads(row.detail)["code"] for row in noted} == {"wrong_token", "host", "origin"}
        assert not [row for row in noted if TOKEN.decode() in row.detail]
        # Of very many refusals, the audit keeps some.
        monkeypatch.setattr(daemon, "_NOTES_PER_SECOND", 0)
        for _ in range(30):
            await door.ask(request("/health", "Host: localhost"), tcp=True)
        text = await door.ask(request("/metrics", "Host: localhost"))
        assert b'runner_refusals_total{reason="wrong_token"} 3' in text
        # Those of the second in which the number was changed may still be noted.
        assert len(await door.ledger.do(LedgerFile.audit, "refusal", 1000)) < len(noted) + 30


@pytest.mark.trio
async def test_deliveries_belong_to_who_posted_them(plugin_dir: Path) -> None:
    """Nobody on the network sees, repeats or removes those of others, or takes their ids first. The operator
    on the unix socket may, which is the control."""
    bearer = f"Authorization: Bearer {TOKEN.decode()}"
    put_example("vai", "kit", plugin_dir / "plugins")
    async with house(plugin_dir, config=(str(plugin_dir / "plugins"),)) as door:

        async def ask(method: str, path: str, given: Any = None, *, by_token: bool = True) -> tuple[int, Any]:
            body = b"" if given is None else json.dumps(given).encode()
            headers = ("Host: localhost", *((bearer,) if by_token else ()))
            raw = await door.ask(request(path, *headers, method=method, body=body), tcp=by_token)
            return status(raw), json.loads(raw.partition(b"\r\n\r\n")[2])

        assert (await ask("POST", "/plugins/acme.kit/stop", by_token=False))[0] == 200  # so that all wait

        def told(**summary: int) -> dict[str, Any]:
            about = {"occurred_at": "2026-01-01T00:00:00Z", "subject": {"kind": "run", "id": "run_1"}}
            return {"type": "run.completed", **about, "summary": summary}

        event = {"id": "order-1", "plugin": "acme.kit", "hook": "notify", "event": told(a=1)}
        theirs = Delivery(
            posted_id("cert:CN=bob", "order-1"), "acme.kit", "notify", "{}", "{}", "cert:CN=bob"
        )
        await door.ledger.enqueue(theirs)
        # Whoever has the id already: it is another's.
        assert (await ask("POST", "/deliveries", {**event, "event": told(b=2)}, by_token=False))[0] == 202
        own = await ask("POST", "/deliveries", event)
        assert own[0] == 202 and own[1]["poster"] == "token" and own[1]["id"] != "order-1"
        assert (await ask("POST", "/deliveries", event))[1]["id"] == own[1]["id"]  # twice is once
        assert (await ask("POST", "/deliveries", {**event, "event": told()}))[0] == 409
        spread = await ask("POST", "/deliveries", {"id": "all", "event": told()})
        assert spread[0] == 202 and len(spread[1]["deliveries"]) > 0
        assert spread[1]["id"] == posted_id("token", "all")
        # By its id and by the given one.
        for name in (own[1]["id"], "order-1", spread[1]["deliveries"][0]["id"]):
            assert (await ask("GET", f"/deliveries/{name}"))[0] == 200
        assert json.loads((await ask("GET", "/deliveries/order-1"))[1]["event"]) == told(a=1)
        operators = await ask("GET", "/deliveries/order-1", by_token=False)
        assert (operators[1]["poster"], json.loads(operators[1]["event"])) == (
            f"uid:{os.geteuid()}",
            told(b=2),
        )
        await ask("POST", "/deliveries", {**event, "id": "of the operator"}, by_token=False)
        for name in (theirs.id, "of%20the%20operator"):
            for method, path in (("GET", ""), ("POST", "/repeat"), ("DELETE", "")):
                found = await ask(method, f"/deliveries/{name}{path}")
                assert (found[0], found[1]["error"]["code"]) == (404, "no_such_delivery")
            assert (await ask("GET", f"/deliveries/{name}", by_token=False))[0] == 200
            assert (await ask("POST", f"/deliveries/{name}/repeat", by_token=False))[0] == 409  # it waits
            assert (await ask("DELETE", f"/deliveries/{name}", by_token=False))[1]["removed"]
            assert (await ask("GET", f"/deliveries/{name}", by_token=False))[0] == 404
        assert (await ask("DELETE", "/deliveries/order-1"))[1]["id"] == own[1]["id"]
        assert (await ask("GET", "/deliveries/order-1"))[0] == 404
        listed = await ask("GET", "/deliveries?most=1", by_token=False)
        assert listed[1]["next"] == listed[1]["deliveries"][0]["id"] == "order-1"
        rest = await ask("GET", "/deliveries?after=order-1", by_token=False)
        assert {each["poster"] for each in rest[1]["deliveries"]} == {"token"} and rest[1]["next"] is None
        assert {row.caller for row in await door.ledger.do(LedgerFile.audit, "removal")} == {
            "token",
            f"uid:{os.geteuid()}",
        }


@pytest.mark.trio
@pytest.mark.needs("root")
async def test_who_may_by_the_unix_socket(tmp_path: Path, plugin_dir: Path) -> None:
    program = (
        "import os, socket, sys; os.setgroups([]); ids = [int(sys.argv[2])] * 3\n"
        "os.setresgid(*ids); os.setresuid(*ids)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(b'GET /health HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n')\n"
        "print(s.makefile().read())"
    )

    async def ask_as(uid: int, path: str) -> subprocess.CompletedProcess[bytes]:
        argv = [sys.executable, "-I", "-S", "-c", program, path, str(uid)]
        return await trio.run_process(argv, capture_stdout=True, capture_stderr=True, check=False)

    async with house(plugin_dir) as door:
        assert b"200" in (await ask_as(0, door.unix)).stdout  # the control
        assert b"PermissionError" in (await ask_as(SPARE_UID, door.unix)).stderr
        # Somebody opens folder and socket to everybody: the kernel still tells who it is.
        os.chmod(os.path.dirname(door.unix), 0o755)
        os.chmod(door.unix, 0o666)
        found = (await ask_as(SPARE_UID, door.unix)).stdout
        assert b"HTTP/1.1 403" in found and b"not_owner" in found
        # A page in a browser, behind somebody's proxy.
        page = request("/health", "Host: localhost", "Origin: http://localhost")
        assert status(await door.ask(page)) == 403


def test_owner_and_root_may_and_nobody_else() -> None:
    rules = Rules(owner=1000, token=TOKEN)
    assert identify(DoorPeer(1000), {}, rules) == "uid:1000"
    assert identify(DoorPeer(0), {}, rules) == "uid:0"
    for uid in (1, 999, 1001, 65534):
        with pytest.raises(Refused, match="may not use this door"):
            identify(DoorPeer(uid), {}, rules)
    # Without a token in the daemon, nobody comes in by TCP, also not with an empty one.
    for shown in ({}, {"authorization": ["Bearer "]}, {"authorization": ["Bearer"]}):
        with pytest.raises(Refused, match="no valid token"):
            identify(DoorPeer(None), {"host": ["localhost"], **shown}, Rules(owner=1000))


def test_token_files_and_addresses(tmp_path: Path) -> None:
    path = tmp_path / "token"
    rows: list[tuple[tuple[bytes, int], str]] = [
        ((TOKEN + b"\n", 0o600), ""),
        ((TOKEN, 0o640), "others than its owner can read it"),
        ((TOKEN, 0o622), "can be written by"),
        ((b"short", 0o600), "32 or more"),
        ((b"", 0o600), "32 or more"),
        ((b"x" * 5000, 0o600), "32 or more"),
        ((b"x " * 30, 0o600), "no space"),
    ]

    def check(given: tuple[bytes, int], fault: str) -> None:
        path.write_bytes(given[0])
        path.chmod(given[1])
        if not fault:
            assert read_token(str(path)) == TOKEN
        else:
            with pytest.raises(ValueError, match=fault):
                read_token(str(path))

    check_rows(rows, check)
    with pytest.raises(ValueError, match="cannot be read"):
        read_token(str(tmp_path / "none"))
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0"):
        with pytest.raises(listen.CannotListen, match="--http-anywhere"):
            listen.listen_tcp(address, anywhere=False)
    for address in ("localhost:1", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", ""):
        with pytest.raises(listen.CannotListen):
            listen.listen_tcp(address, anywhere=False)
    listen.listen_tcp("0.0.0.0:0", anywhere=True).close()


def test_a_socket_is_private_replaces_a_dead_one_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "run/serve.sock"
    first = listen.listen_unix(str(path))
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(listen.CannotListen, match="another daemon listens there"):
        listen.listen_unix(str(path))
    first.close()
    listen.listen_unix(str(path)).close()
    path.unlink()
    path.write_text("a file")
    with pytest.raises(listen.CannotListen, match="not a socket"):
        listen.listen_unix(str(path))
    path.parent.chmod(0o777)
    with pytest.raises(listen.CannotListen, match="can be written by its group or by everybody"):
        listen.listen_unix(str(path))


# --- the document and the tables ----------------------------------------------------------------------------


def test_a_public_validator_accepts_the_document_and_it_names_every_route() -> None:
    found = document()
    validate(found)  # raises
    assert sum(len(each) for each in found["paths"].values()) == len(OPERATIONS)
    methods = {name for name in vars(Routes) if not name.startswith("_")} - {"application"}
    assert {each.name for each in OPERATIONS} == methods
    # No caller can write an approval, a policy or a manifest.
    assert [each.path for each in OPERATIONS if each.body] == ["/plugins/{name}/calls", "/deliveries"]


def test_units_start_the_daemon_as_it_is_and_set_nothing_that_stops_a_launch() -> None:
    folder = ROOT / "policies/systemd"
    host = (folder / "plugin-host.service").read_text()
    stopping = re.findall(r"^# (\w+)=\w+ +\S", host, re.MULTILINE)
    assert {"RestrictNamespaces", "ProtectControlGroups"} <= set(stopping)
    for name in ("runner-serve.service", "runner-serve-user.service", "runner-worker.service"):
        unit = (folder / name).read_text()
        settings = dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"\w+=", line))
        assert settings.keys().isdisjoint(stopping)
        assert settings["Type"] == "notify" and "WatchdogSec" in settings and "Delegate" in settings
        _, verb, *words = settings["ExecStart"].split()
        assert verb_parser(verb).parse_args(words).config
        assert float(settings["TimeoutStopSec"]) > daemon.DRAIN_SECONDS
    [words] = re.findall(r"^ExecStart=\S+ serve (.*)$", (folder / "runner-door.service").read_text(), re.M)
    assert verb_parser("serve").parse_args(words.split()).fleet
    assert (
        f"ListenStream={default_socket({})}" in (folder / "runner-serve.socket").read_text() or os.geteuid()
    )


@pytest.mark.needs("user")
def test_a_plugin_in_the_folder_of_the_users_unit_may_be_launched(runner_as_user: Caller) -> None:
    unit = (ROOT / "policies/systemd/runner-serve-user.service").read_text()
    [folder] = re.findall(r"^ExecStart=.* --config %h/(\S+)$", unit, re.MULTILINE)

    def explained(place: Path) -> subprocess.CompletedProcess[str]:
        shutil.copytree(ROOT / "runner/contracts/mcp/example", place / "words")
        runner_as_user.give(runner_as_user.home)
        return runner_as_user("explain", place / "words")

    found = explained(runner_as_user.home / folder)
    assert found.returncode == 0, found.stderr
    # No plugin is shown anything of the runner's own folder.
    assert "which is the runner's own" in explained(runner_as_user.home / ".config/runner/plugins").stdout


def test_every_outcome_has_a_status() -> None:
    assert {*STATUS, "ok"} == set(EXIT)


# --- the service manager ------------------------------------------------------------------------------------


def test_states_are_sent_to_the_service_manager(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"\0runner-test-{os.getpid()}"
        for address in (str(tmp_path / "notify"), name):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.bind(address)
                manager.settimeout(10)
                Notifier({"NOTIFY_SOCKET": address.replace("\0", "@")}).send("READY=1", "STATUS=x")
                assert manager.recv(100) == b"READY=1\nSTATUS=x"
    for wrong in ({}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere"}, {"NOTIFY_SOCKET": "relative"}):
        Notifier(wrong).send("READY=1")  # nobody listens
    mine = str(os.getpid())
    assert watchdog_seconds({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": mine}) == 1.5
    for other in (
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "x"},
        {"WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"},
    ):
        assert watchdog_seconds(other) is None


def test_sockets_of_the_service_manager_are_taken_and_not_passed_on(tmp_path: Path) -> None:
    """In a process of its own: the descriptors are 3 and 4."""
    program = (
        "import os, sys; sys.path[:0] = [sys.argv[1]]\n"
        "from runner.serve.service_manager import take_sockets\n"
        "spare = [os.dup(int(word)) for word in sys.argv[2:]]\n"
        "for number, fd in enumerate(spare): os.dup2(fd, 3 + number)\n"
        "os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "found = take_sockets(os.environ)\n"
        "print([each.getsockname() for each in found], [os.get_inheritable(n) for n in (3, 4)],\n"
        "      [name for name in os.environ if name.startswith('LISTEN_')])"
    )
    paths = [str(tmp_path / name) for name in ("one", "two")]
    listeners = [socket.socket(socket.AF_UNIX) for _ in paths]
    for each, path in zip(listeners, paths, strict=True):
        each.bind(path)
        each.listen()
    passed = [each.fileno() for each in listeners]
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT), *map(str, passed)],
        pass_fds=passed,
        env={"LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"},
        capture_output=True,
        text=True,
    )
    for each in listeners:
        each.close()
    assert done.stdout == f"{paths} [False, False] []\n", done.stderr
    assert take_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "2"}) == []


def test_wrong_sockets_of_the_service_manager_end_the_command_in_one_sentence(tmp_path: Path) -> None:
    program = (
        "import os, socket, sys; sys.path[:0] = [sys.argv[1]]\n"
        "from runner.cli import main\n"
        "file, datagram, idle = open('/dev/null'), socket.socket(type=2), socket.socket()\n"
        "for count, given in [('x', file), ('-1', file), ('9' * 12, file), ('1', None), ('1', file),\n"
        "                     ('1', datagram), ('1', idle)]:\n"
        "    os.dup2(given.fileno(), 3) if given else os.path.exists('/proc/self/fd/3') and os.close(3)\n"
        "    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=count)\n"
        "    print(main(['serve', '--config', '/nowhere']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import os; os.dup(0)\n" + program, str(ROOT)], capture_output=True, text=True
    )
    assert done.stdout.split() == [str(USAGE_ERROR)] * 7, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 7 and all("unset LISTEN_FDS and LISTEN_PID" in line for line in said)
    assert all("has to be a number" in line for line in said[:3])
    assert all("descriptor 3 is not a socket" in line for line in said[3:])
    assert all("does not listen" in line for line in said[5:])
