"""What a hostile plugin sends, to get the value, or past the rules. The controls stand among the rows."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.broker.rig import (
    HOST,
    PLACEHOLDER,
    VALUE,
    Client,
    Reader,
    Rig,
    echo,
    http,
    ok,
    open_rig,
)
from tests.sandbox.broker.test_echo import all_of
from tests.tables import one_case, wait_for

GET = f"GET / HTTP/1.1\r\nHost: {HOST}\r\n".encode()
POST = GET.replace(b"GET", b"POST")
KEY = b"Authorization: Bearer " + PLACEHOLDER + b"\r\n"
END = b"\r\n"


class Bench:
    """A broker, and a server that keeps all that it reads."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.read: list[str] = []
        self.server = rig.serve(http(self._answer))

    def _answer(self, first: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
        self.read.append(first)
        return echo(first, headers, body)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_rig(tmp_path_factory.mktemp("rig")) as rig:
        yield Bench(rig)


RULES = (f"GET,POST {HOST}:443/repos/acme/**", f"OPTIONS {HOST}:443/free")


@pytest.fixture(scope="module")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_rig(tmp_path_factory.mktemp("rig"), requests=RULES) as rig:
        yield Bench(rig)


def turned_away(bench: Bench, sent: bytes, status: int) -> dict[str, Any]:
    """Send it. The server gets nothing of it, and the plugin an answer of the broker's own."""
    before = len(bench.read)
    with bench.rig.connect(bench.server).connection as connection:
        client = Client(connection)
        with contextlib.suppress(OSError):
            client.send(sent)
        answer = client.answer("HEAD" if sent.startswith(b"HEAD") else "GET")
        line, rest = bench.rig.line(), client.rest()  # in any case, for the next row
    assert (answer.status, answer.get("Connection"), rest) == (status, "close", b""), answer
    assert line["verdict"] == "refused" and line["status"] == status and line["reason"], line
    assert bench.read[before:] == []
    return line


# --- requests that two programs read in two ways --------------------------------------------------------


@one_case(
    ("sent", "status"),
    [
        (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
        (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400),
        (POST + b"Content-Length: +3\r\n\r\nabc", 400),
        (POST + b"Content-Length: 0x3\r\n\r\nabc", 400),
        (POST + b"Content-Length: 3 \x0b\r\n\r\nabc", 400),
        (POST + b"Content-Length:\r\n\r\n", 400),
        (POST + b"Content-Length : 3\r\n\r\nabc", 400),
        (POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n", 400),
        (GET + b"Host: " + HOST.encode() + END + END, 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: other.example.com\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: api.example.com:444\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: api.example.com@other\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: api.example.com, other\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 403),
        (b"GET https://other.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 421),
        (b"GET https://api.example.com/ HTTP/1.1\r\nHost: other.example.com\r\n\r\n", 421),
        (b"GET https://x@api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 403),
        (b"GET http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 403),
        (b"GET //other.example.com HTTP/1.0\r\nHost: api.example.com\r\n\r\n", 505),
        (b"GET api.example.com:443 HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 403),
        (b"GET * HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 403),
        (b"GET /#x HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 403),
        (GET + b"X: a\r\n b\r\n\r\n", 400),
        (GET + b" X: a\r\n\r\n", 400),
        (GET + b"X : a\r\n\r\n", 400),
        (GET + b"X: a\rb\r\n\r\n", 400),
        (GET + b"X: a\nY: b\r\n\r\n", 400),
        (GET + b"X: a\0b\r\n\r\n", 400),
        (GET + b"\xc3\xa9: b\r\n\r\n", 400),
        (GET + b": b\r\n\r\n", 400),
        (GET + b"no colon\r\n\r\n", 400),
        (GET.replace(END, b"\n") + b"\n", 400),
        (GET + b"X:" + b" " * 60000 + b"\0\r\n\r\n", 400),
        (GET + b"X: " + b"y" * 70000 + b"\r\n\r\n", 431),
        (GET + b"X: y\r\n" * 101 + b"\r\n", 431),
        (b"G" * 70000, 431),
        (b"GET  / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 400),
        (b"GET / HTTP/1.1 \r\nHost: api.example.com\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\nHost: api.example.com\r\n\r\n", 400),
        (GET.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n\r\n", 505),
        (GET.replace(b"1.1", b"1.2") + b"\r\n", 505),
        (GET.replace(b"1.1", b"2.0") + b"\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (GET.replace(b"GET", b"TRACE") + KEY + END, 403),
        (GET.replace(b"GET", b"trace") + KEY + END, 403),
        (b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 403),
        (GET.replace(b"GET", b"get") + END, 403),
        (GET.replace(b"GET", b"G!T") + END, 403),
        (POST + b"Content_Length: 3\r\n\r\n", 403),
        (POST + b"Transfer_Encoding: chunked\r\n\r\n", 403),
        (POST + b"Transfer.Encoding: chunked\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: api.example.c\xf6m\r\n\r\n", 403),
        (b"GET https://api.example.com\xc3\xb6/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 400),
        (GET + b"Connection: Upgrade\r\nUpgrade: h2c, websocket\r\n\r\n", 403),
        (GET + b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n", 403),
        (GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: websocket\r\n\r\n", 403),
    ],
)  # fmt: skip
def test_requests_that_are_refused(bench: Bench, sent: bytes, status: int) -> None:
    turned_away(bench, sent, status)


@one_case(
    ("sent", "first"),
    [
        (GET + END, "GET /"),
        (b"GET https://api.example.com/a?b HTTP/1.1\r\nHost: API.example.COM:443\r\n\r\n", "GET /a?b"),
        (b"GET HTTPS://api.example.com?b HTTP/1.1\r\nHost: api.example.com.\r\n\r\n", "GET /?b"),
        (b"OPTIONS * HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "OPTIONS *"),
        (b"GET /a%2Fb/../c HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "GET /a%2Fb/../c"),  # no rules
        (GET + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x\r\n\r\n", "GET /"),
        (POST + b"tRaNsFeR-eNcOdInG: ChUnKeD\r\n\r\n0\r\n\r\n", "POST /"),
        (GET + b"Accept_Encoding: gzip\r\nRANGE: bytes=1-\r\nIf_Range: x\r\nKeep_Alive: 5\r\n\r\n", "GET /"),
        (GET + b"Connection: host, content-length, x\r\nX: y\r\nContent-Length: 0\r\n\r\n", "GET /"),
    ],
)  # fmt: skip
def test_requests_that_pass(bench: Bench, sent: bytes, first: str) -> None:
    with bench.rig.connect(bench.server).connection as connection:
        client = Client(connection)
        client.send(sent)
        answer = client.answer()
    assert bench.rig.line()["verdict"] == "allowed"
    asked, headers, _ = json.loads(answer.body)
    assert (answer.status, asked) == (200, f"{first} HTTP/1.1")
    names = [name.lower() for name, _ in headers]
    assert names.count("host") == 1 and not {"upgrade", "connection", "http2-settings", "x"} & set(names)
    assert not {"accept_encoding", "range", "if_range", "keep_alive"} & set(names)


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("kind", ["with the answer", "later", "it ends"])
def test_what_a_server_says_unasked_is_no_answer(bench: Bench, kind: str, tls: bool) -> None:
    """The connection ends before the next request: its answer would be the one that was not asked for."""
    release = socket.socketpair()
    unasked = ok(b"unasked")

    def handle(connection: socket.socket) -> None:
        reader = Reader(connection)
        reader.head()
        connection.sendall(ok(b"asked") + (unasked if kind == "with the answer" else b""))
        if kind == "later":
            release[1].recv(1)
            connection.sendall(unasked)
        if kind != "it ends":
            with contextlib.suppress(OSError):
                reader.rest()

    server, port = bench.rig.serve(handle, tls=tls), 443 if tls else 80
    with release[0], release[1], bench.rig.connect(server, port=port, tls=tls).connection as connection:
        client = Client(connection)
        assert client.ask().body == b"asked"
        release[0].send(b".")
        assert client.rest() == b""
    assert bench.rig.line()["verdict"] == "allowed"


def test_nothing_goes_to_a_server_that_has_answered_early(bench: Bench) -> None:
    """Some take the rest of the request for the next one."""
    got: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        reader = Reader(connection)
        reader.head()
        connection.sendall(ok(b"early"))
        try:
            got.append(reader.rest())
        except OSError:
            got.append(b"reset")

    hidden = GET.replace(b"/ ", b"/hidden ") + END
    server = bench.rig.serve(handle, tls=False)
    with bench.rig.connect(server, port=80, tls=False).connection as connection:
        client = Client(connection)
        client.send(POST + b"Content-Length: %d\r\n\r\n" % len(hidden))
        assert client.answer().body == b"early"
        with contextlib.suppress(OSError):
            client.send(hidden + hidden)
            client.rest()
    assert bench.rig.line()["verdict"] == "allowed"
    assert wait_for(lambda: got)
    assert got == [b"reset"]


@pytest.mark.parametrize("kind", ["length", "chunked"])
def test_a_request_within_a_body_is_none(bench: Bench, kind: str) -> None:
    hidden = GET.replace(b"/ ", b"/hidden ") + END
    body = hidden if kind == "length" else b"%x\r\n%s\r\n0\r\n\r\n" % (len(hidden), hidden)
    framing = b"Content-Length: %d" % len(hidden) if kind == "length" else b"Transfer-Encoding: chunked"
    before = len(bench.read)
    with bench.rig.connect(bench.server).connection as connection:
        client = Client(connection)
        client.send(POST + framing + END + END + body + GET + END)
        assert [client.answer().status for _ in range(2)] == [200, 200]
    assert [bench.rig.line()["method"] for _ in range(2)] == ["POST", "GET"]
    assert bench.read[before:] == ["POST / HTTP/1.1", "GET / HTTP/1.1"]


@one_case(
    "body",
    [
        b"3\nabc\r\n0\r\n\r\n",
        b"3\r\nabcX\r\n0\r\n\r\n",
        b"-1\r\n",
        b"0x3\r\nabc\r\n",
        b"f" * 17,
        b"3;\0\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_chunks_that_are_read_in_two_ways(bench: Bench, body: bytes) -> None:
    """The head has been sent by then: the server sees a reset, and no whole request."""
    before = len(bench.read)
    with bench.rig.connect(bench.server).connection as connection:
        client = Client(connection)
        with contextlib.suppress(OSError):
            client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + body + END)
            assert client.rest() == b""
    line = bench.rig.line()
    assert line["verdict"] == "failed" and "HTTP/1.1" in line["reason"]
    assert bench.read[before:] == []


# --- rules ----------------------------------------------------------------------------------------------


@one_case(
    "line",
    [
        "DELETE /repos/acme/x",
        "HEAD /repos/acme/x",
        "PUT /repos/acme/x",
        "GET /repos/other/x",
        "GET /repos/acme",
        "GET /Repos/acme/x",
        "GET /repos/acme/../other/x",
        "GET /repos/acme/%2e%2e/other/x",
        "GET /repos/acme/..%2fother",
        "GET /repos/acme//x",
        "GET //repos/acme/x",
        "GET /repos/acme/..;/other",
        "GET /repos/acme/%5c..%5cother",
        "GET /repos/acme/%252e%252e/other",
        "GET /repos/acme/%",
        "GET /repos/acme/%c0%ae%c0%ae/",
        "GET /repos/acme/%00",
        "GET /repos/acme/..%3B/other",
        "GET /repos/acme/..%20/other",
        "GET https://api.example.com",
        "GET /user?/repos/acme/x",
        "OPTIONS *",
        "GET /free",
    ],
)
def test_what_no_rule_allows(ruled: Bench, line: str) -> None:
    sent = f"{line} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
    said = turned_away(ruled, sent, 403)
    assert said["rule"] == "" and said["method"] == line.split(" ")[0]


@one_case(
    "header",
    [
        "X-HTTP-Method-Override: DELETE",
        "x-method-override: PUT",
        "X-Original-URL: /user",
        "X-Rewrite-URL: /user",
        "X_HTTP_Method_Override: DELETE",
        "X-HTTP_Method-Override: DELETE",
        "X-Original_URL: /user",
        "X-Original-Method: DELETE",
        "X-Forwarded-Method: DELETE",
        "X-Forwarded-Uri: /user",
        "X-Forwarded-Path: /user",
        "X-Forwarded-Prefix: /user",
        "X-Forwarded-Host: other",
        "Forwarded: host=other",
        "Destination: /user",
    ],
)
def test_headers_that_stand_for_another_request(ruled: Bench, header: str) -> None:
    turned_away(ruled, f"POST /repos/acme/x HTTP/1.1\r\nHost: {HOST}\r\n{header}\r\n\r\n".encode(), 403)


@one_case(
    ("line", "rule"),
    [
        ("GET /repos/acme/x?y=/../", RULES[0]),
        ("POST /repos/acme/a/b/", RULES[0]),
        ("GET /repos/%61cme/%7Ex", RULES[0]),
        ("OPTIONS /free", RULES[1]),
    ],
)
def test_what_a_rule_allows(ruled: Bench, line: str, rule: str) -> None:
    with ruled.rig.connect(ruled.server).connection as connection:
        client = Client(connection)
        client.send(f"{line} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        assert client.answer().status == 200
    found = ruled.rig.line()
    assert (found["verdict"], found["rule"]) == ("allowed", rule)
    assert "?" not in found["path"]
    assert ruled.read[-1] == f"{line} HTTP/1.1"


def test_a_refusal_is_read_by_who_still_sends(bench: Bench) -> None:
    """With unread bytes the connection would be reset, and the gate would drop the answer."""
    with bench.rig.connect(bench.server, port=80, tls=False).connection as connection:
        client = Client(connection)
        client.send(POST.replace(b"POST", b"TRACE") + b"Content-Length: 1000000\r\n\r\n" + b"x" * 100_000)
        assert client.answer().status == 403
        client.send(b"x" * 100_000)
        connection.shutdown(socket.SHUT_WR)
        assert client.rest() == b""
    assert bench.rig.line()["verdict"] == "refused"


def test_a_refusal_says_what_to_do(ruled: Bench) -> None:
    with ruled.rig.connect(ruled.server).connection as connection:
        answer = Client(connection).ask("/user", "DELETE")
    assert b"no rule about requests allows that" in answer.body and RULES[0].encode() in answer.body
    assert f"--net 'DELETE {HOST}:443/user'".encode() in answer.body
    assert "no rule about requests" in ruled.rig.line()["reason"]


# --- names ----------------------------------------------------------------------------------------------


def test_another_name_in_tls(bench: Bench) -> None:
    context = ssl.create_default_context(cadata=bench.rig.authority)
    context.check_hostname = False
    connection = bench.rig.hand_over(bench.server)
    with connection, pytest.raises(ssl.SSLError, match="UNRECOGNIZED_NAME"):
        context.wrap_socket(connection, server_hostname="other.example.com")
    line = bench.rig.line()
    assert line["verdict"] == "failed" and "another name in TLS" in line["reason"]


def test_a_program_that_only_speaks_http2(bench: Bench) -> None:
    with bench.rig.connect(bench.server, alpn=("h2",)).connection as connection:
        assert isinstance(connection, ssl.SSLSocket) and connection.selected_alpn_protocol() is None
    line = bench.rig.line()
    assert line["verdict"] == "failed" and "HTTP/2" in line["reason"] and "HTTP/1.1" in line["reason"]


def test_a_program_that_chooses_http1(bench: Bench) -> None:
    with bench.rig.connect(bench.server, alpn=("h2", "http/1.1")).connection as connection:
        assert isinstance(connection, ssl.SSLSocket) and connection.selected_alpn_protocol() == "http/1.1"
        assert Client(connection).ask().status == 200
    assert bench.rig.line()["verdict"] == "allowed"


def test_a_program_with_authorities_of_its_own(bench: Bench) -> None:
    connection = bench.rig.hand_over(bench.server)
    with connection, pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(connection, server_hostname=HOST)
    line = bench.rig.line()
    assert (
        line["verdict"] == "failed" and "unknown ca" in line["reason"] and "SSL_CERT_FILE" in line["reason"]
    )


def test_old_tls(bench: Bench) -> None:
    context = ssl.create_default_context(cadata=bench.rig.authority)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    connection = bench.rig.hand_over(bench.server)
    with connection, pytest.raises(OSError, match=r"(?i)ssl|reset"):
        context.wrap_socket(connection, server_hostname=HOST)
    assert bench.rig.line()["verdict"] == "failed"


def test_no_tls_where_it_is_expected(bench: Bench) -> None:
    connection = bench.rig.hand_over(bench.server)
    with connection:
        client = Client(connection)
        client.send(GET + KEY + END)
        assert client.answer().status == 403
    assert "without TLS" in bench.rig.line()["reason"]


@one_case("sent", [b"\x16", b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\x00\x05hello", b"\x16" + b"\0" * 20000])
def test_nonsense_in_place_of_tls(bench: Bench, sent: bytes) -> None:
    connection = bench.rig.hand_over(bench.server)
    with connection, contextlib.suppress(OSError):
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        Client(connection).rest()
    line = bench.rig.line()
    assert line["verdict"] == "failed" and "no TLS handshake could be read" in line["reason"]


# --- any byte in any place ------------------------------------------------------------------------------


def hello(name: str) -> bytes:
    """What a client says first in TLS."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def mutate(chance: random.Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(chance.randint(1, 5)):
        place, length = chance.randrange(len(data)), chance.randint(1, 9)
        match chance.randrange(4):
            case 0:
                data[place] = chance.randrange(256)
            case 1:
                data[place : place + length] = chance.randbytes(length)
            case 2:
                data[place:place] = data[place : place + 20]
            case _:
                data[place:place] = chance.choice(
                    (b"\r\n", b"\n", b"\r", b" ", b":", b",", b"\0", b"%", b"\xf6")
                )
    return bytes(data)


def any_bytes() -> list[tuple[int, bytes]]:
    """Requests, and hellos of TLS, with every byte in the names, and with bytes anywhere. Each has its
    port."""
    chance = random.Random(47)
    asked = GET + KEY + END
    upgrade = GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    chunked = POST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    greeting = hello(HOST)
    sent = [(80, asked.replace(b".com", b".c%cm" % byte)) for byte in range(256)]
    sent += [(80, mutate(chance, chance.choice((asked, upgrade, chunked)))) for _ in range(300)]
    sent += [(443, greeting.replace(b".com", b".c%cm" % byte)) for byte in range(256)]
    sent += [(443, mutate(chance, greeting)) for _ in range(100)]
    return sent


def test_no_byte_ends_the_broker(tmp_path: Path) -> None:
    """It may load nothing any more: Python loads codecs and modules when it needs them first."""
    hosts = (f"{HOST}:80,443",)
    with open_rig(tmp_path, credentials=[("TOKEN", hosts, ("header",))]) as rig:
        plain, secure = rig.serve(http(echo), tls=False), rig.serve(http(echo))
        rig.channel.setblocking(False)
        for port, sent in any_bytes():
            with rig.hand_over(plain, port=port) as connection, contextlib.suppress(OSError):
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                assert VALUE not in Client(connection).rest()
            assert rig.process.poll() is None, sent
            with contextlib.suppress(BlockingIOError):
                while said := rig.channel.recv(4096):
                    assert b"the broker has a fault" not in said, (sent, said)
        with rig.connect(secure).connection as connection:
            assert Client(connection).ask().status == 200


# --- the value ------------------------------------------------------------------------------------------


def repeat(first: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    """In headers and in a body, in every encoding, cut into pieces anywhere."""
    value = next((v.encode() for k, v in headers if k == "Authorization"), b"").partition(b" ")[2]
    spelled = [value, *(base64.b64encode(b"x" * n + value) for n in range(3))]
    spelled += [base64.urlsafe_b64encode(b"~~" + value), b"".join(b"%%%02x" % byte for byte in value)]
    text = b"|".join(spelled)
    step = int(first.split(" ")[1].strip("/"))
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(text[at : at + step]), text[at : at + step])
        for at in range(0, len(text), step)
    )
    lines = [b"HTTP/1.1 200 " + value, b"X-Echo: " + text, b"Set-Cookie: t=" + value, b"X-" + value + b": x"]
    lines += [b"Transfer-Encoding: chunked", b"", b""]
    early = b"HTTP/1.1 103 " + value + b"\r\nLink: " + text + b"\r\n\r\n"
    return early + b"\r\n".join(lines) + chunks + b"0\r\nX-Trailer: " + text + b"\r\n\r\n"


def test_an_echo_in_every_place_and_encoding(bench: Bench) -> None:
    sent: list[bytes] = []

    def answer(*asked: Any) -> bytes:
        sent.append(repeat(*asked))
        return sent[-1]

    with bench.rig.connect(bench.rig.serve(http(answer))).connection as connection:
        got = b""
        for step in (1, 2, 7, 40, 10000):
            client = Client(connection)
            client.send(GET.replace(b"/ ", b"/%d " % step) + KEY + END)
            for mark in (b"\r\n\r\n", b"\r\n\r\n", b"0\r\nX-Trailer:", b"\r\n\r\n"):
                got += client.until(mark)
            line = json.dumps(bench.rig.line())
            assert VALUE.decode() not in line and PLACEHOLDER.decode() not in line
    joined = got.replace(b"\r\n", b"")
    assert not [each for each in all_of(VALUE) if each in got or each.lower() in joined.lower()]
    assert PLACEHOLDER in got
    assert all(VALUE in each for each in sent[-1:])  # the control


def test_byte_by_byte(bench: Bench) -> None:
    """Each byte is a record of TLS, in both directions."""

    def handle(connection: socket.socket) -> None:
        reader = Reader(connection)
        _, headers = reader.head()
        body = dict(headers)["Authorization"].encode()
        for byte in ok(body):
            connection.sendall(bytes([byte]))
        reader.rest()

    with bench.rig.connect(bench.rig.serve(handle)).connection as connection:
        client = Client(connection)
        for byte in GET + KEY + END:
            client.send(bytes([byte]))
        assert client.answer().body == b"Bearer " + PLACEHOLDER
    assert bench.rig.line()["credential"] == "TOKEN"


def test_nothing_of_it_is_in_the_lines_or_in_what_the_process_shows(bench: Bench) -> None:
    """After requests that try to get it there."""
    targets = ["/" + PLACEHOLDER.decode(), "/?" + PLACEHOLDER.decode(), "/%67hp_" + PLACEHOLDER.decode()[4:]]
    lines = ""
    for target in targets:
        with bench.rig.connect(bench.server).connection as connection:
            client = Client(connection)
            client.send(f"GET {target} HTTP/1.1\r\nHost: {HOST}\r\n".encode() + KEY + END)
            client.answer()
        lines += json.dumps(bench.rig.line())
    for secret in (VALUE, PLACEHOLDER):
        assert not [each for each in all_of(secret) if each in lines.encode()]
    pid = bench.rig.process.pid
    shown = b"".join(
        Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "comm", "status", "stat")
    )
    if os.geteuid() == 0:
        shown += Path(f"/proc/{pid}/environ").read_bytes()
    assert VALUE not in shown


# --- what is too much -----------------------------------------------------------------------------------


def test_a_reader_that_does_not_read_holds_back_the_server(bench: Bench) -> None:
    """Nothing is collected in the broker."""
    sent: list[int] = []
    total = 64 << 20

    def handle(connection: socket.socket) -> None:
        Reader(connection).head()
        connection.settimeout(2)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        with contextlib.suppress(OSError):
            while sum(sent) < total:
                sent.append(connection.send(b"x" * 65536))

    server = bench.rig.serve(handle, tls=False)
    connection = bench.rig.hand_over(server, port=8080)
    with connection:
        client = Client(connection)
        client.send(GET.replace(HOST.encode(), HOST.encode() + b":8080") + END)
        client.head()
        assert wait_for(lambda: server.ended > 0)
        assert sum(sent) < total // 2
    assert bench.rig.line()["received"] < 1 << 20


def test_many_connections(bench: Bench) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            Client(stack.enter_context(bench.rig.connect(bench.server).connection)) for _ in range(100)
        ]
        for client in clients:
            client.send(GET + KEY + END)
        for client in clients:
            assert client.answer().status == 200
            assert bench.rig.line()["verdict"] == "allowed"
