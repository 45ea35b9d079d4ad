"""The name in clear text: of real clients, in pieces, and of clients that hide it."""

from __future__ import annotations

import re
import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.gate.peek import MOST_FIRST_BYTES, read_clear_name
from sandbox.network.hosts import Host
from tests.tables import one_case


def real_hello(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.set_alpn_protocols(["h2", "http/1.1"])
    sent = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def block(data: bytes, size: int) -> bytes:
    return len(data).to_bytes(size, "big") + data


def server_name(name: bytes, kind: int = 0) -> bytes:
    return struct.pack("!H", 0) + block(block(bytes([kind]) + block(name, 2), 2), 2)


def hello(*extensions: bytes, tail: bytes = b"") -> bytes:
    """A ClientHello as a handshake message."""
    body = b"\x03\x03" + bytes(32) + block(bytes(32), 1) + block(b"\x13\x01", 2) + block(b"\0", 1)
    return b"\x01" + block(body + block(b"".join(extensions), 2) + tail, 3)


def records(message: bytes, size: int = 16384) -> bytes:
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + block(piece, 2) for piece in pieces)


GREASE = struct.pack("!H", 0x1A1A) + block(b"\0", 2)
ECH = struct.pack("!H", 0xFE0D) + block(bytes(200), 2)
GOOD = server_name(b"api.example.com")
API = Host("api.example.com")
EARLY = struct.pack("!H", 42) + block(b"", 2)
CCS = b"\x14\x03\x03\0\1\1"
SEALED = b"\x17\x03\x03" + block(bytes(40), 2)
ALERT = b"\x15\x03\x03\0\2\2\x28"
HEARTBEAT = b"\x18\x03\x03\0\1x"
EVIL = records(hello(server_name(b"evil.com")))
AT_ONCE, NOT_EARLY = "more than its ClientHello at once", "else behind its ClientHello than early data"
POST = b"POST / HTTP/1.1\r\nHost: api.example.com\r\n"
SECOND = b"GET / HTTP/1.1\r\nHost: evil.com\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        real_hello("api.example.com"),
        records(hello(GOOD)),
        records(hello(GREASE, GOOD, GREASE)),
        records(hello(server_name(b"API.Example.com"))),
        records(hello(server_name(b"api.example.com."))),
        records(hello(ECH, GOOD)),  # the outer name
        records(hello(GOOD), 7),
        # Early data, as OpenSSL 3.0 sends it: all in one segment.
        *(records(hello(EARLY, GOOD)) + rest for rest in (b"", CCS, CCS + SEALED * 2, SEALED)),
        records(hello(GOOD, EARLY), 50) + CCS + SEALED,
        b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"GET / HTTP/1.1\r\nAccept: */*\r\nhOST:\t api.EXAMPLE.com:80 \r\nX:\r\n\r\n",
        b"GET http://api.example.com/x?y HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"OPTIONS * HTTP/1.0\r\nHost: api.example.com:8080\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 5\r\n\r\nPRI *",
        POST + b"Content-Length: 99\r\n\r\nGET / HTTP/1.1\r\nHost: x",
        POST + b"Transfer-Encoding: gzip, Chunked\r\n\r\n5;a=b\r\nHost:\r\nA \r\n01234",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nSum: 1\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r",
        POST + b"Connection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n",
        POST + b"X: y\r\n" * 127 + b"\r\n",
    ],
)
def test_the_name_is_found(data: bytes) -> None:
    assert read_clear_name(data).host == API
    # In two pieces, cut anywhere: first more is needed, then the same is found.
    end = data.find(b"\r\n\r\n") + 4 if b"HTTP/1" in data else len(data)
    for cut in range(end):
        first = read_clear_name(data[:cut])
        assert first.refused == "", (cut, first)
        assert first.host is not None or cut < first.needed <= end + 1, (cut, first)


@one_case(
    ("data", "reason"),
    [
        (real_hello(None), "without a server name"),
        (records(hello()), "without a server name"),
        (records(hello(ECH)), "without a server name"),
        (records(hello(GOOD, GOOD)), "two server names"),
        (records(hello(GOOD, server_name(b"evil.com"))), "two server names"),
        (records(hello(server_name(b"api.example.com", kind=1))), "more than one"),
        (
            records(
                hello(struct.pack("!H", 0) + block(block((b"\0" + block(b"api.example.com", 2)) * 2, 2), 2))
            ),
            "more than one",
        ),
        (records(hello(server_name(b""))), "has no name"),
        (records(hello(server_name(b"api.example.com\0.evil.com"))), "NUL"),
        (records(hello(server_name(b"*.example.com"))), "wildcard"),
        (records(hello(server_name("ä.example.com".encode()))), "beyond ASCII"),
        (records(hello(GOOD, tail=b"x")), "after its end"),
        (records(hello(GOOD[:-1])), "within a field"),
        (records(b"\x02" + hello(GOOD)[1:]), "else than a ClientHello"),
        (records(hello(GOOD), 1), "pieces"),
        (b"\x16\x03\x01\0\0", "length"),
        (b"\x16\x03\x01\xff\xff", "length"),
        (b"\x16\x02", "else than TLS"),
        (records(hello(GOOD), 50)[:55] + b"\x17\x03\x03\0\1x", "else than TLS"),
        (b"\x16\x03\x01\x40\x00\x01\xff\xff\xff", "bytes; 16384 are the most"),
        (b"\x80\x2e\x01\x03\x01", "neither TLS nor HTTP"),  # of SSL 2
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2 without TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "neither TLS nor HTTP"),
        (b"EHLO me\r\n", "no request"),
        (b"\0\0\0\x08\x04\xd2\x16\x2f", "neither TLS nor HTTP"),  # PostgreSQL asks for TLS
        (b"\r\nGET / HTTP/1.1\r\n", "neither TLS nor HTTP"),
        (b"G" * 40, "neither TLS nor HTTP"),
        (b"GET / HTTP/1.1\r\n\r\n", "without Host"),
        (b"GET / HTTP/1.0\r\nX: y\r\n\r\n", "without Host"),
        (b"GET / HTTP/2.0\r\nHost: api.example.com\r\n\r\n", "no request"),
        (b"GET / HTTP/1.1\r\nHost: api.example.com\r\nHost: api.example.com\r\n\r\n", "two Hosts"),
        (b"GET / HTTP/1.1\r\nHost: api.example.com\nHost: evil.com\r\n\r\n", "plain form"),
        (b"GET / HTTP/1.1\r\nHost: api.example.com\rHost: evil.com\r\n\r\n", "plain form"),
        (b"GET / HTTP/1.1\r\nHost : api.example.com\r\n\r\n", "plain form"),
        (b"GET / HTTP/1.1\r\nX: y\r\n Host: evil.com\r\nHost: api.example.com\r\n\r\n", "plain form"),
        (b"GET / HTTP/1.1\r\nHost: api.example.com\0\r\n\r\n", "plain form"),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", "has no name"),
        (b"GET / HTTP/1.1\r\nHost: a@api.example.com\r\n\r\n", "not a host name"),
        (b"GET / HTTP/1.1\r\nHost: api.example.com, evil.com\r\n\r\n", "white space"),
        (b"GET http://evil.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "another name"),
        (b"GET http://api.example.com@evil.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "no path"),
        (b"GET evil.com HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "no path"),
        (b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "tunnel"),
        (b"GET  / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "no request"),
        # A second name behind the first.
        (POST + b"\r\n" + SECOND, "more than one HTTP request"),
        (POST + b"\r\nx", "more than one HTTP request"),
        (POST + b"Content-Length: 0\r\n\r\n" + SECOND, "more than one HTTP request"),
        (POST + b"Content-Length: 5\r\n\r\n01234" + SECOND, "more than one HTTP request"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND, "more than one HTTP request"),
        (
            POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nA: b\r\n\r\n" + SECOND,
            "more than one HTTP request",
        ),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + SECOND, "plain form"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nxGET", "plain form"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n-0\r\n\r\n" + SECOND, "plain form"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n123456789\r\n", "plain form"),
        (POST + b"Transfer-Encoding: identity\r\n\r\n", "not chunked"),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", "twice"),
        (POST + b"Content-Length: 5\r\nContent-Length: 60\r\n\r\n", "twice"),
        (POST + b"Content-Length: +5\r\n\r\n", "no number"),
        (POST + b"Content-Length: 5, 5\r\n\r\n", "no number"),
        (POST + b"Content-Length: " + b"9" * 19 + b"\r\n\r\n", "no number"),
        (POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n", "Upgrade"),
        (POST + b"Upgrade: websocket, h2c\r\n\r\n", "Upgrade"),
        (POST + b"Upgrade: websocket\r\nupgrade: TLS/1.2\r\n\r\n", "Upgrade"),
        (records(hello(GOOD) + hello(server_name(b"evil.com"))), "more of a TLS handshake"),
        (records(hello(GOOD) + b"\x18\0\0\1\0"), "more of a TLS handshake"),  # KeyUpdate
        (records(hello(GOOD) + hello(GOOD), len(hello(GOOD)) + 1), "more of a TLS handshake"),
        # The rest of the record, with another ClientHello, is still on its way.
        (records(hello(GOOD) + EVIL)[: 5 + len(hello(GOOD))], "more of a TLS handshake"),
        (records(hello(GOOD) + EVIL)[:9], "more of a TLS handshake"),
        # Records behind it, of each type: all of one, and its first byte alone.
        *((records(hello(GOOD)) + rest, AT_ONCE) for rest in (CCS, ALERT, EVIL, SEALED, HEARTBEAT, b"x")),
        *((records(hello(GOOD), 7) + rest[:1], AT_ONCE) for rest in (CCS, ALERT, EVIL, SEALED, HEARTBEAT)),
        (records(hello(GOOD)) + CCS + EVIL, AT_ONCE),
        # Behind one that offers early data.
        *(
            (records(hello(EARLY, GOOD)) + rest, NOT_EARLY)
            for rest in (ALERT, EVIL, HEARTBEAT, b"x", EVIL[:1])
        ),
        *((records(hello(EARLY, GOOD)) + CCS + rest, NOT_EARLY) for rest in (CCS, ALERT, EVIL, EVIL[:1])),
        *((records(hello(EARLY, GOOD)) + CCS + SEALED + rest, NOT_EARLY) for rest in (CCS, ALERT, EVIL)),
        (records(hello(EARLY, GOOD)) + b"\x14\x03\x03\0\7\1" + EVIL, NOT_EARLY),
        (records(hello(EARLY, GOOD)) + b"\x17\x03\x03\0\0" + EVIL, NOT_EARLY),
        (records(hello(EARLY, GOOD)) + b"\x17\x03\x03\xff\xff" + EVIL, NOT_EARLY),
        (records(hello(EARLY, GOOD)) + b"\x17\x02", NOT_EARLY),
        (POST + b"X: y\r\n" * 128 + b"\r\n", "more than 128 headers"),
        (POST + b"\0\r\n" * 5000, "more than 128 headers"),
    ],
)
def test_who_hides_the_name_is_refused(data: bytes, reason: str) -> None:
    found = read_clear_name(data)
    assert found.host is None and not found.needed
    assert reason in found.refused


def test_an_address_is_no_name() -> None:
    assert read_clear_name(records(hello(server_name(b"10.0.0.1")))).host == Host("10.0.0.1", 4)


def test_the_first_bytes_have_a_limit() -> None:
    start = b"GET / HTTP/1.1\r\nX: "
    assert read_clear_name(start + b"a" * (MOST_FIRST_BYTES - len(start) - 1)).needed == MOST_FIRST_BYTES
    assert "16384" in read_clear_name(start + b"a" * (MOST_FIRST_BYTES - len(start))).refused


def test_a_hello_byte_by_byte_is_looked_at_rarely() -> None:
    """Otherwise the work grows with the square of what a client sends."""
    data = records(hello(GOOD, struct.pack("!H", 21) + block(bytes(3000), 2)), 60)
    looks, needed = 0, 1
    for end in range(1, len(data) + 1):
        if end >= needed:
            looks += 1
            found = read_clear_name(data[:end])
            needed = found.needed
    assert found.host == API
    assert looks < 150


@pytest.mark.parametrize("line", [b"X:" + b" " * 16000 + b"\0", b"X" * 16000, b"X: " + b" y" * 8000 + b"\r"])
def test_no_line_takes_the_square_of_its_length(line: bytes) -> None:
    """With a pattern that backtracks, these take minutes, and the suite's bound ends the test."""
    assert read_clear_name(b"GET / HTTP/1.1\r\n" + line + b"\r\n\r\n").refused


@given(st.binary(max_size=300), st.sampled_from([b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: "]))
def test_no_first_bytes_are_too_much(data: bytes, start: bytes) -> None:
    found = read_clear_name(start + data)
    assert sum((found.host is not None, bool(found.refused), bool(found.needed))) == 1


@given(st.data())
def test_a_changed_hello_has_no_second_name(data: st.DataObject) -> None:
    message = bytearray(records(hello(GREASE, GOOD)))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    found = read_clear_name(bytes(message))
    assert sum((found.host is not None, bool(found.refused), bool(found.needed))) == 1


# --- as a regular expression reads it -----------------------------------------------------------------------

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
METHOD = re.compile(TOKEN + rb"{1,32}(?: |\Z)")
REQUEST = re.compile(TOKEN + rb"{1,32} (?P<target>[\x21-\x7e]+) HTTP/1\.[01]\Z")
HEADER = re.compile(TOKEN + rb"+:[^\x00\r\n]*\Z")
ABSOLUTE = re.compile(rb"(?i:https?)://(?P<authority>[^/?#@]*)(?:[/?#].*)?\Z")
LINES = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from(
            (
                *(
                    b"GET",
                    b" ",
                    b"/",
                    b"?",
                    b"#",
                    b"@",
                    b":",
                    b"\r",
                    b"\n",
                    b"\0",
                    b"\t",
                    b"\x7f",
                    b"\xff",
                    b"(",
                    b"*",
                ),
                *(
                    b"HTTP/1.1",
                    b"HTTP/1.0",
                    b"HTTP/1.2",
                    b"http://",
                    b"HTTPS://",
                    b"a.example",
                    b"x" * 31,
                    b"://",
                ),
            )
        ),
        max_size=9,
    ).map(b"".join),
)


@given(LINES)
def test_first_lines_are_read_as_by_a_pattern(line: bytes) -> None:
    line = line.replace(b"\r\n", b"")
    if not line or line[0] == 22:
        return
    request = line + b"\r\nHost: a.example\r\n\r\n"
    told, matched = read_clear_name(request).refused, REQUEST.match(line)
    begins = METHOD.match(request[:33]) is not None
    assert ("neither TLS nor HTTP/1" in told) is not begins
    if begins:
        assert ("no request of HTTP/1" in told) is (matched is None)
    if matched is not None and not line.startswith(b"CONNECT "):
        target = matched["target"]
        absolute = ABSOLUTE.match(target)
        is_path = target.startswith(b"/") or target == b"*"
        assert ("a target that is no path" in told) is (not is_path and absolute is None)
        if absolute is not None and absolute["authority"] == b"a.example":
            assert told == ""


@given(LINES)
def test_headers_are_read_as_by_a_pattern(line: bytes) -> None:
    line = line.replace(b"\r\n", b"")
    told = read_clear_name(b"GET / HTTP/1.1\r\nHost: a.example\r\n" + line + b"\r\n\r\n").refused
    if line:
        assert ("header that is not in its plain form" in told) is (HEADER.match(line) is None)
