"""A live broker: what passes, what it says, and what it refuses to begin with."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from sandbox.broker.broker import EXIT_UNCONFINED
from tests.sandbox.broker.rig import (
    HOST,
    PLACEHOLDER,
    VALUE,
    Client,
    Reader,
    Rig,
    Server,
    echo,
    http,
    ok,
    open_rig,
)
from tests.tables import one_case, wait_for

BEARER = f"Authorization: Bearer {PLACEHOLDER.decode()}"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with open_rig(tmp_path) as opened:
        yield opened


def heard(answer: Any) -> dict[str, str]:
    """The headers that an echoing server has read, as the plugin may see them."""
    return {name.lower(): value for name, value in json.loads(answer.body)[1]}


class Recorder:
    """An echoing server of HTTP that keeps what it has read."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    def __call__(self, first: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
        self.requests.append((first, {name.lower(): value for name, value in headers}, body))
        return echo(first, headers, body)


# --- what passes --------------------------------------------------------------------------------------


def test_the_value_reaches_the_server_and_the_placeholder_comes_back(rig: Rig) -> None:
    recorder = Recorder()
    with rig.connect(rig.serve(http(recorder))).connection as connection:
        client = Client(connection)
        for _ in range(3):  # on one connection
            answer = client.ask("/a?b=c", headers=[BEARER])
            assert heard(answer)["authorization"] == f"Bearer {PLACEHOLDER.decode()}"
            line = rig.line()
            assert (line["verdict"], line["name"], line["port"], line["method"]) == (
                "allowed",
                HOST,
                443,
                "GET",
            )
            assert (line["path"], line["status"], line["credential"]) == ("/a", 200, "TOKEN")
            assert line["received"] == len(answer.body)
    assert [headers["authorization"] for _, headers, _ in recorder.requests] == [
        f"Bearer {VALUE.decode()}"
    ] * 3
    assert {headers["accept-encoding"] for _, headers, _ in recorder.requests} == {"identity"}


BASIC = base64.b64encode(b"me:" + PLACEHOLDER).decode()


@one_case(
    ("header", "expected"),
    [
        (BEARER, f"Bearer {VALUE.decode()}"),
        (f"aUtHoRiZaTiOn: token {PLACEHOLDER.decode()}", f"token {VALUE.decode()}"),
        (f"Authorization: Basic {BASIC}", f"Basic {base64.b64encode(b'me:' + VALUE).decode()}"),
        (f"Authorization: bAsIc  {BASIC}", f"bAsIc {base64.b64encode(b'me:' + VALUE).decode()}"),
        (f"X-Key: a{PLACEHOLDER.decode()},{PLACEHOLDER.decode()}b", f"a{VALUE.decode()},{VALUE.decode()}b"),
        (f"Cookie: token={PLACEHOLDER.decode()}; x=y", f"token={VALUE.decode()}; x=y"),
        ("Authorization: Basic !!!", "Basic !!!"),
        (f"X-Part: {PLACEHOLDER.decode()[:-1]}", PLACEHOLDER.decode()[:-1]),
    ],
)
def test_where_a_placeholder_is_replaced(
    shared: tuple[Rig, Server, Recorder], header: str, expected: str
) -> None:
    rig, server, recorder = shared
    with rig.connect(server).connection as connection:
        Client(connection).ask(headers=[header])
        rig.line()
    assert recorder.requests[-1][1][header.split(":")[0].lower()] == expected


@one_case(
    ("target", "headers", "body"),
    [
        (f"/{PLACEHOLDER.decode()}", [], b""),
        (f"/?{PLACEHOLDER.decode()}", [], b""),  # the credential is for headers only
        ("/", [], PLACEHOLDER),
        ("/", [f"{PLACEHOLDER.decode()}: x"], b""),
        ("/", [f"Proxy-Authorization: {PLACEHOLDER.decode()}"], b""),
        ("/", ["Connection: X-Key", f"X-Key: {PLACEHOLDER.decode()}"], b""),
        ("/", [f"X-Key: {base64.b64encode(PLACEHOLDER).decode()}"], b""),
    ],
)
def test_where_it_is_not(
    shared: tuple[Rig, Server, Recorder], target: str, headers: list[str], body: bytes
) -> None:
    rig, server, recorder = shared
    with rig.connect(server).connection as connection:
        answer = Client(connection).ask(target, "POST", headers, body)
        assert answer.status == 200
        line = rig.line()
    assert VALUE.decode() not in repr(recorder.requests[-1])
    assert line["credential"] == "" and PLACEHOLDER.decode() not in json.dumps(line)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Server, Recorder]]:
    recorder = Recorder()
    with open_rig(tmp_path_factory.mktemp("rig")) as opened:
        yield opened, opened.serve(http(recorder)), recorder


def test_a_query_if_that_was_said(tmp_path: Path) -> None:
    value, placeholder = b"a/b c%1234567890abcdef", b"z/y x%0987654321zyxwvu"
    recorder = Recorder()
    credentials = (("KEY", (f"{HOST}:443",), ("header", "query")),)
    with open_rig(tmp_path, credentials=credentials, hidden=(("KEY", placeholder, value),)) as rig:
        with rig.connect(rig.serve(http(recorder))).connection as connection:
            answer = Client(connection).ask("/z%2Fy?key=z%2Fy%20x%250987654321zyxwvu&b=c")
            assert b"zyxwvu" in answer.body and b"abcdef" not in answer.body
        assert rig.line()["credential"] == "KEY"
    assert recorder.requests[0][0].split()[1] == "/z%2Fy?key=a%2Fb%20c%251234567890abcdef&b=c"


def test_another_host_gets_the_placeholder(tmp_path: Path) -> None:
    """It is read by the broker too, because of a rule or of another credential."""
    credentials = (("TOKEN", (f"{HOST}:443",), ("header",)), ("OTHER", ("b.example.com:443",), ("header",)))
    hidden = (("TOKEN", PLACEHOLDER, VALUE), ("OTHER", b"otherplaceholder1234", b"othervaluexxxxxx5678"))
    recorder = Recorder()
    with open_rig(tmp_path, credentials=credentials, hidden=hidden) as rig:
        server = rig.serve(http(recorder), name="b.example.com")
        for port in (443, 444):
            with rig.connect(server, "b.example.com", port).connection as connection:
                place = "b.example.com" if port == 443 else "b.example.com:444"
                head = f"GET / HTTP/1.1\r\nHost: {place}\r\n{BEARER}\r\nX-O: otherplaceholder1234\r\n\r\n"
                Client(connection).send(head.encode())
                Client(connection).answer()
            assert rig.line()["credential"] == ("OTHER" if port == 443 else "")
    for _, headers, _ in recorder.requests:
        assert headers["authorization"] == f"Bearer {PLACEHOLDER.decode()}"
    assert [headers["x-o"] for _, headers, _ in recorder.requests] == [
        "othervaluexxxxxx5678",
        "otherplaceholder1234",
    ]


BIG = os.urandom(1 << 20).hex().encode()
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: u\r\n\r\n"
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: https://b.example/?t=" + VALUE + b"\r\nContent-Length: 0\r\n\r\n"


@one_case(
    ("method", "sent", "answer", "status", "body"),
    [
        ("GET", b"", ok(BIG), 200, BIG),
        ("GET", b"", CHUNKS, 200, b"abcde"),
        ("HEAD", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", 200, b""),
        ("GET", b"", b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        ("GET", b"", b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 5\r\n\r\n", 304, b""),
        ("GET", b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + ok(b"x"), 103, b""),
        ("POST", BIG, ok(b"fine"), 200, b"fine"),
        ("GET", b"", REDIRECT, 302, b""),
    ],
)  # fmt: skip
def test_kinds_of_answers(
    shared: tuple[Rig, Server, Recorder], method: str, sent: bytes, answer: bytes, status: int, body: bytes
) -> None:
    rig = shared[0]
    server = rig.serve(http(answer))
    with rig.connect(server).connection as connection:
        client = Client(connection)
        found = client.ask("/", method, body=sent)
        assert (found.status, found.body) == (status, body)
        assert VALUE.decode() not in repr(found)
        if status == 103:
            assert client.answer().status == 200
        line = rig.line()
        assert line["sent"] == len(sent), str(line)
        again = client.ask("/", method)  # the connection can be used again
        assert again.status == status
        rig.line()
    assert server.connections == 1


def test_a_chunked_request(shared: tuple[Rig, Server, Recorder]) -> None:
    rig, server, recorder = shared
    with rig.connect(server).connection as connection:
        client = Client(connection)
        client.send(f"POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in (
            b"5\r\nhello\r\n",
            b"6;a=b\r\n world\r\n",
            b"0\r\nX-Trailer: " + PLACEHOLDER + b"\r\n\r\n",
        ):
            client.send(piece)
        assert client.answer().status == 200
        assert rig.line()["sent"] == 11
    assert recorder.requests[-1][2] == b"hello world"


def test_nothing_behind_the_last_chunk_of_a_request_is_passed_on(rig: Rig) -> None:
    got: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        reader = Reader(connection)
        reader.head()
        got.append(reader.until(b"0\r\n"))
        got.append(reader.until(b"\r\n"))
        connection.sendall(ok(b""))

    with rig.connect(rig.serve(handle)).connection as connection:
        client = Client(connection)
        client.send(f"POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        client.send(b"2\r\nab\r\n0\r\nX-HTTP-Method-Override: DELETE\r\n\r\n")
        assert client.answer().status == 200
    assert got[-1] == b"\r\n"


def test_a_program_that_asks_whether_to_continue(rig: Rig) -> None:
    """The broker says so, once. The server never hears of it."""
    asked: list[str] = []

    def handle(connection: socket.socket) -> None:
        reader = Reader(connection)
        _, headers = reader.head()
        asked.extend(name for name, _ in headers)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.sendall(ok(reader.body(headers)))

    with rig.connect(rig.serve(handle)).connection as connection:
        client = Client(connection)
        client.send(
            f"PUT / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert client.answer().status == 100
        client.send(b"abc")
        assert client.answer().body == b"abc"
    assert "Expect" not in asked


def test_events_are_passed_on_one_by_one(rig: Rig) -> None:
    def handle(connection: socket.socket) -> None:
        reader = Reader(connection)
        reader.head()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for _ in range(3):
            connection.sendall(b"data: " + VALUE + b"\n\n")
            reader.until(b"GET")  # the test has got the event

    server = rig.serve(handle)
    with rig.connect(server).connection as connection:
        client = Client(connection)
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        client.head()
        event = client.until(b"\n\n")
        assert PLACEHOLDER in event and VALUE not in event


def test_a_pipelined_request_waits(shared: tuple[Rig, Server, Recorder]) -> None:
    rig, server, _ = shared
    with rig.connect(server).connection as connection:
        client = Client(connection)
        client.send(b"".join(f"GET /{n} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode() for n in range(3)))
        assert [json.loads(client.answer().body)[0] for _ in range(3)] == [
            f"GET /{n} HTTP/1.1" for n in range(3)
        ]
        assert [rig.line()["path"] for _ in range(3)] == ["/0", "/1", "/2"]


def test_an_early_answer(rig: Rig) -> None:
    """The server does not take the rest of the request; its answer still arrives."""

    def handle(connection: socket.socket) -> None:
        Reader(connection).head()
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")

    with rig.connect(rig.serve(handle)).connection as connection:
        client = Client(connection)
        client.send(f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 100000000\r\n\r\n".encode())
        client.send(b"x" * 1000)
        answer = client.answer()
        assert (answer.status, answer.body, answer.get("Connection")) == (413, b"no", "close")


def test_without_tls(tmp_path: Path) -> None:
    recorder = Recorder()
    credentials = (("TOKEN", (f"{HOST}:80",), ("header",)),)
    with open_rig(tmp_path, credentials=credentials) as rig:
        client = rig.connect(rig.serve(http(recorder), tls=False), port=80, tls=False)
        answer = client.ask(headers=[BEARER])
        client.connection.close()
        assert PLACEHOLDER in answer.body and VALUE not in answer.body
    assert recorder.requests[0][1]["authorization"] == f"Bearer {VALUE.decode()}"


def test_this_machine(tmp_path: Path) -> None:
    recorder = Recorder()
    credentials = (("TOKEN", ("localhost:8443",), ("header",)),)
    with open_rig(tmp_path, credentials=credentials) as rig:
        server = rig.serve(http(recorder), name="localhost")
        for name, written in (
            ("localhost", "localhost:8443"),
            ("127.0.0.1", "127.0.0.1:8443"),
            ("::1", "[::1]:8443"),
        ):
            with rig.connect(server, "localhost", 8443, name=name).connection as connection:
                client = Client(connection)
                client.send(f"GET / HTTP/1.1\r\nHost: {written}\r\n{BEARER}\r\n\r\n".encode())
                assert client.answer().status == 200
    assert {headers["authorization"] for _, headers, _ in recorder.requests} == {f"Bearer {VALUE.decode()}"}


@one_case(
    ("rule", "host", "reaches"),
    [
        (f"{HOST}:443", HOST, True),
        ("*.example.com:443", "a.example.com", True),
        ("*.example.com:443", "a.b.example.com", False),
        ("192.0.2.7:443", "192.0.2.7", True),
        ("[2001:db8::7]:443", "2001:db8::7", True),
    ],
)
def test_the_certificate_is_for_the_hosts_of_the_plan(
    tmp_path: Path, rule: str, host: str, reaches: bool
) -> None:
    with open_rig(tmp_path, credentials=(("TOKEN", (rule,), ("header",)),)) as rig:
        server = rig.serve(http(echo), name=host)
        raised = contextlib.nullcontext() if reaches else pytest.raises(ssl.SSLCertVerificationError)
        with raised, rig.connect(server, host).connection as connection:
            client = Client(connection)
            written = f"[{host}]" if ":" in host else host
            client.send(f"GET / HTTP/1.1\r\nHost: {written}\r\n{BEARER}\r\n\r\n".encode())
            assert heard(client.answer())["authorization"] == f"Bearer {PLACEHOLDER.decode()}"
        line = rig.line()
        assert line["verdict"] == ("allowed" if reaches else "failed")
        if not reaches:
            assert "one label below a wildcard" in line["reason"] and "Name the host" in line["reason"]


# --- websocket ----------------------------------------------------------------------------------------


def shake_hands(connection: socket.socket, *more: bytes) -> tuple[Reader, dict[str, str]]:
    reader = Reader(connection)
    _, headers = reader.head()
    lines = (
        b"HTTP/1.1 101 Switching Protocols",
        b"Upgrade: websocket",
        b"Connection: Upgrade",
        *more,
        b"",
        b"",
    )
    connection.sendall(b"\r\n".join(lines))
    return reader, {name.lower(): value for name, value in headers}


UPGRADE = [
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Extensions: permessage-deflate",
]


def test_a_websocket(rig: Rig) -> None:
    asked: list[dict[str, str]] = []

    def handle(connection: socket.socket) -> None:
        reader, headers = shake_hands(connection, b"X-Echo: " + VALUE)
        asked.append(headers)
        while True:
            message = reader.exactly(4)
            connection.sendall(bytes([0x81, len(VALUE) + 4]) + message + VALUE)

    with rig.connect(rig.serve(handle)).connection as connection:
        client = Client(connection)
        answer = client.ask("/socket", headers=[*UPGRADE, BEARER])
        assert (answer.status, answer.get("Upgrade"), answer.get("X-Echo")) == (
            101,
            "websocket",
            PLACEHOLDER.decode(),
        )
        for text in (b"one ", PLACEHOLDER[:4]):
            client.send(text)
            assert client.exactly(2 + 4 + len(VALUE)) == bytes([0x81, len(VALUE) + 4]) + text + PLACEHOLDER
        client.connection.close()
    line = rig.line()
    assert (line["status"], line["credential"], line["sent"]) == (101, "TOKEN", 8)
    assert asked[0]["authorization"] == f"Bearer {VALUE.decode()}"
    assert "sec-websocket-extensions" not in asked[0]


def test_a_websocket_of_a_server_that_compresses_all_the_same(rig: Rig) -> None:
    def handle(connection: socket.socket) -> None:
        shake_hands(connection, b"Sec-WebSocket-Extensions: permessage-deflate")

    with rig.connect(rig.serve(handle)).connection as connection:
        assert Client(connection).ask(headers=UPGRADE).status == 502
    line = rig.line()
    assert line["verdict"] == "refused" and "extension" in line["reason"]


# --- the end of the plugin ----------------------------------------------------------------------------


def test_what_an_ended_plugin_has_sent_is_delivered(rig: Rig) -> None:
    """The server does not answer; it has everything when the line says so."""
    got: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        reader = Reader(connection)
        _, headers = reader.head()
        got.append(reader.body(headers))
        reader.rest()

    client = rig.connect(rig.serve(handle))
    client.send(f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 5\r\n\r\nhello".encode())
    client.connection.shutdown(socket.SHUT_WR)
    os.write(rig.alive, b".")
    line = rig.line()
    assert (line["verdict"], line["sent"], line["status"]) == ("allowed", 5, 0) and "ended" in line["reason"]
    client.rest()
    client.connection.close()
    assert wait_for(lambda: got == [b"hello"])


def test_a_plugin_that_only_ends_its_side_still_gets_the_answer(rig: Rig) -> None:
    release = socket.socketpair()

    def handle(connection: socket.socket) -> None:
        Reader(connection).head()
        release[1].recv(1)
        connection.sendall(ok(b"late"))

    with (
        release[0],
        release[1],
        rig.connect(rig.serve(handle, tls=False), port=80, tls=False).connection as connection,
    ):
        client = Client(connection)
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        release[0].send(b".")
        assert client.answer().body == b"late"
    assert rig.line()["verdict"] == "allowed"


@one_case("sent", [b"GET / HT", b"POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 9\r\n\r\nhalf"])
def test_a_cut_request_is_reset_at_the_server(shared: tuple[Rig, Server, Recorder], sent: bytes) -> None:
    rig = shared[0]
    endings: list[str] = []

    def handle(connection: socket.socket) -> None:
        try:
            Reader(connection).rest()
            endings.append("in order")
        except OSError:
            endings.append("reset")

    client = rig.connect(rig.serve(handle, tls=False), port=80, tls=False)
    client.send(sent)
    client.connection.close()
    assert wait_for(lambda: endings)
    assert endings == (["reset"] if b"POST" in sent else ["in order"])  # nothing of the first was sent
    assert rig.line()["verdict"] in ("failed", "refused")


# --- a server that does not keep to the protocol --------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n"


@one_case(
    ("answer", "whole"),
    [
        (HEAD + b"\r\nhalf", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", False),
        (b"", False),
        (b"nonsense\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nX:" + b" " * 60000 + b"\0\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70000 + b"\r\n\r\n", False),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 3000, False),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", False),
        (HEAD + b"Content-Length: 11\r\n\r\n0123456789a", False),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", False),
        (b"HTTP/2 200\r\n\r\n", False),
        (HEAD + b"\r\n0123456789", True),
        (HEAD + b"\r\n0123456789" + ok(b"more than was asked for"), True),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", True),
    ],
)
def test_a_cut_answer_never_looks_whole(
    shared: tuple[Rig, Server, Recorder], answer: bytes, whole: bool
) -> None:
    rig = shared[0]

    def handle(connection: socket.socket) -> None:
        Reader(connection).head()
        connection.sendall(answer)

    with rig.connect(rig.serve(handle)).connection as connection:
        client = Client(connection)
        if whole:
            assert client.ask().status == 200
            assert client.rest() == b""  # the connection is not used again, and ends in order
        else:
            client.send(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            with pytest.raises((EOFError, OSError)):
                final_status(client)
    line = rig.line()
    assert line["verdict"] == ("allowed" if whole else "failed"), str(line)


def final_status(client: Client) -> int:
    while (status := client.answer().status) < 200:
        pass
    return status


def test_a_body_that_ends_with_the_connection_needs_the_end_of_tls(rig: Rig) -> None:
    def handle(connection: socket.socket) -> None:
        Reader(connection).head()
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nperhaps half")
        os.dup2(os.open(os.devnull, os.O_RDWR), connection.fileno())  # ends without the end of TLS

    with rig.connect(rig.serve(handle)).connection as connection, pytest.raises((EOFError, OSError)):
        Client(connection).ask()
    assert rig.line()["verdict"] == "failed"


@one_case("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "identity, gzip", "x"])
def test_a_compressed_answer_is_refused(shared: tuple[Rig, Server, Recorder], encoding: str) -> None:
    rig = shared[0]
    with rig.connect(
        rig.serve(http(ok(b"secret", f"Content-Encoding: {encoding}")))
    ).connection as connection:
        answer = Client(connection).ask(headers=["Accept-Encoding: gzip", "Range: bytes=1-", "If-Range: x"])
        assert answer.status == 502 and b"compressed" in answer.body and b"secret" not in answer.body
    line = rig.line()
    assert line["verdict"] == "refused" and "compressed" in line["reason"]


def test_a_compressed_answer_of_a_host_without_credential_passes(tmp_path: Path) -> None:
    recorder = Recorder()
    with open_rig(tmp_path, credentials=(), hidden=(), requests=(f"* {HOST}:443",)) as rig:
        server = rig.serve(http(lambda *asked: (recorder(*asked), ok(b"zip", "Content-Encoding: gzip"))[1]))
        with rig.connect(server).connection as connection:
            answer = Client(connection).ask(headers=["Accept-Encoding: gzip", "Range: bytes=1-"])
            assert (answer.status, answer.body, answer.get("Content-Encoding")) == (200, b"zip", "gzip")
    assert recorder.requests[0][1]["accept-encoding"] == "gzip" and "range" in recorder.requests[0][1]


def certificate(kind: str) -> tuple[str, dict[str, Any]]:
    long_ago = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "good": (HOST, {}),
        "expired": (HOST, {"not_after": long_ago}),
        "of another authority": (HOST, {"authority": trustme.CA()}),
        "of another host": ("other.example.com", {}),
    }
    return kinds[kind]


@one_case("kind", ["good", "expired", "of another authority", "of another host"])
def test_a_server_that_is_not_to_be_trusted(shared: tuple[Rig, Server, Recorder], kind: str) -> None:
    rig, recorder = shared[0], Recorder()
    name, how = certificate(kind)
    with rig.connect(rig.serve(http(recorder), name=name, **how)).connection as connection:
        answer = Client(connection).ask(headers=[BEARER])
        line = rig.line()
    if kind == "good":
        assert answer.status == 200
        return
    assert (answer.status, line["verdict"], line["credential"]) == (502, "failed", "")
    assert "not to be trusted" in line["reason"] and b"not to be trusted" in answer.body
    assert not recorder.requests


def test_authorities_count_for_their_hosts_alone(tmp_path: Path) -> None:
    """A private one for its own host and port, and the system's for all."""
    private = {"one.example.com:443": trustme.CA(), "*.two.example.com:443": trustme.CA()}
    files = {place: tmp_path / f"{number}.pem" for number, place in enumerate(private)}
    for place, authority in private.items():
        authority.cert_pem.write_to_path(str(files[place]))
    with open_rig(
        tmp_path,
        credentials=[("TOKEN", (*private, "three.example.com:443"), ("header",))],
        requests=("* one.example.com:444", "* four.example.com:443"),
        authorities=files,
    ) as rig:
        for host, port, own in (
            ("one.example.com", 443, "one.example.com:443"),
            ("one.example.com", 444, ""),
            ("a.two.example.com", 443, "*.two.example.com:443"),
            ("three.example.com", 443, ""),
            ("four.example.com", 443, ""),
        ):
            for place, authority in {"system": rig.roots, **private}.items():
                server = rig.serve(http(ok(b"")), name=host, authority=authority)
                with rig.connect(server, host, port).connection as connection:
                    status = Client(connection).ask(host=f"{host}:{port}").status
                    rig.line()
                assert status == (200 if place in (own, "system") else 502), (host, port, place)


def test_a_server_without_tls(rig: Rig) -> None:
    got: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        got.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with rig.connect(rig.serve(handle, tls=False)).connection as connection:
        assert Client(connection).ask(headers=[BEARER]).status == 502
    assert rig.line()["verdict"] == "failed"
    assert VALUE not in b"".join(got)


# --- its process --------------------------------------------------------------------------------------


def test_it_cannot_be_looked_into(rig: Rig) -> None:
    pid = rig.process.pid
    with rig.connect(rig.serve(http(echo))).connection as connection:
        Client(connection).ask(headers=[BEARER])
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["Seccomp"] == "2" and status["NoNewPrivs"] == "1"
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert os.stat(f"/proc/{pid}/mem").st_uid == 0  # not dumpable
    assert "Max core file size        0" in Path(f"/proc/{pid}/limits").read_text()
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            open(f"/proc/{pid}/mem", "rb")  # noqa: SIM115


def test_it_ends_when_the_gate_has_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    client = rig.connect(rig.serve(http(echo)))
    assert rig.close() == 0
    with contextlib.suppress(OSError):
        assert client.rest() == b""
    client.connection.close()


def count_lines(message: bytes) -> int:
    verdict, _, line = message.partition(b" ")
    return int(line) if verdict == b"dropped" else 1


def test_it_says_nothing_to_a_gate_that_does_not_listen(rig: Rig) -> None:
    """Lines are dropped and counted, and requests go on."""
    with rig.connect(rig.serve(http(echo))).connection as connection:
        client = Client(connection)
        for _ in range(1500):
            assert client.ask("/" + "x" * 290).status == 200
        said = [rig.channel.recv(4096) for _ in range(20)]  # now there is room for the next ones
        assert client.ask().status == 200
        while sum(map(count_lines, said)) < 1501:
            said.append(rig.channel.recv(4096))
    dropped = [each for each in said if each.startswith(b"dropped ")]
    assert dropped and sum(map(count_lines, said)) == 1501


@one_case(
    ("hidden", "credentials"),
    [
        ((("TOKEN", b"short12", b"short34"),), None),
        ((("TOKEN", b"a\nb4567890", b"c\nd4567890"),), None),
        ((("TOKEN", b"a\0b4567890", b"c\0d4567890"),), None),
        ((("TOKEN", b" b34567890", b" d34567890"),), None),
        ((("TOKEN", b"abcd/efgh1", b"abcdefgh12"),), None),
        ((("TOKEN", b"abcdefgh1", b"abcdefgh12"),), None),
        ((("TOKEN", VALUE, VALUE),), None),
        ((), None),
        ((("OTHER", PLACEHOLDER, VALUE),), None),
        ((("TOKEN", PLACEHOLDER, VALUE),), (("TOKEN", ("*:443",), ("header",)),)),
        ((("TOKEN", PLACEHOLDER, VALUE),), (("TOKEN", ("what is this",), ("header",)),)),
    ],
)
def test_what_it_does_not_begin_with(tmp_path: Path, hidden: Any, credentials: Any) -> None:
    more = {} if credentials is None else {"credentials": credentials}
    rig = Rig(tmp_path, hidden=hidden, **more)
    assert rig.process.wait(60) == EXIT_UNCONFINED
    assert rig.process.stderr is not None
    said = rig.process.stderr.read()
    assert VALUE not in said
    rig.close()


def test_it_ends_with_the_process_that_forked_it(tmp_path: Path) -> None:
    """It asks the kernel for that; here it is asked whether it did."""
    rig = Rig(tmp_path)
    try:
        text = Path(f"/proc/{rig.process.pid}/status").read_text()
        assert f"PPid:\t{os.getpid()}\n" in text
    finally:
        assert rig.close() == 0


def test_a_message_that_makes_no_sense_is_left_out(rig: Rig) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message, count in (
            (b"443", 2),
            (b"x api.example.com", 2),
            (b"443 api.example.com", 1),
            (b"443 a", 0),
        ):
            rights = struct.pack(f"{count}i", *[theirs.fileno()] * count)
            rig.channel.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else [])
    with rig.connect(rig.serve(http(echo))).connection as connection:
        assert Client(connection).ask().status == 200
