"""Answers of servers, well-formed and otherwise, in pieces of every size."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.protocol.https.failure import FetchFailed, Kind
from runner.protocol.https.request import MOST_HEAD_BYTES, HttpsRequest, parse_url, write_request
from runner.protocol.https.response import HttpsResponse, ResponseReader
from sandbox.network.http_connection import MOST_CHUNK_LINE_BYTES, MOST_HEADER_LINES

MOST = 32  # bytes of a body
OK = b"HTTP/1.1 200 OK\r\n"


def reader_for(method: str = "GET", most: int = MOST) -> ResponseReader:
    connection, _ = write_request(HttpsRequest("https://a.example/", method), parse_url("https://a.example/"))
    return ResponseReader(connection, most)


def read(raw: bytes, *, method: str = "GET", step: int = 0, most: int = MOST) -> ResponseReader:
    reader = reader_for(method, most)
    step = step or max(len(raw), 1)
    for start in range(0, len(raw), step):
        reader.feed(raw[start : start + step])
        if reader.complete:
            return reader
    reader.feed(b"")
    return reader


ANSWERS: list[tuple[str, bytes, int, bytes]] = [
    ("GET", OK + b"Content-Length: 5\r\n\r\nhello", 200, b"hello"),
    ("GET", OK + b"content-length:5\r\n\r\nhello and more", 200, b"hello"),
    ("GET", OK + b"Content-Length: 0\r\n\r\n", 200, b""),
    ("GET", OK + b"Content-Length: 32\r\n\r\n" + b"a" * 32, 200, b"a" * 32),
    ("GET", OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello"),
    ("GET", OK + b"Content-Length: 5, 5\r\n\r\nhello", 200, b"hello"),
    ("GET", OK + b"\r\nhello", 200, b"hello"),
    ("GET", OK + b"\r\n", 200, b""),
    ("GET", OK + b"\r\n" + b"a" * 32, 200, b"a" * 32),
    ("GET", b"HTTP/1.0 200 OK\r\n\r\nhello", 200, b"hello"),
    ("GET", b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\na", 200, b"a"),
    ("GET", b"HTTP/1.1 404 \r\nContent-Length: 1\r\n\r\na", 404, b"a"),
    ("GET", b"HTTP/1.1 500 \xe9\r\nContent-Length: 1\r\n\r\na", 500, b"a"),
    ("GET", b"HTTP/1.1 200 OK\nContent-Length: 1\n\na", 200, b"a"),
    ("HEAD", OK + b"Content-Length: 999999999\r\n\r\n", 200, b""),
    ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, b""),
    ("GET", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\nLink: x\r\n\r\n" + OK + b"\r\na", 200, b"a"),
    ("GET", OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 200, b"hello"),
    (
        "GET",
        OK + b"Transfer-Encoding: Chunked\r\n\r\n1\r\na\r\n2;x=y\r\nbc\r\n000\r\nT: x\r\n\r\n",
        200,
        b"abc",
    ),
    ("GET", OK + b"Transfer-Encoding: chunked\r\n\r\nA \r\n0123456789\r\n0\r\n\r\n", 200, b"0123456789"),
    (
        "GET",
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"10\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n",
        200,
        b"a" * 16,
    ),
    ("GET", OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", 200, b"\x1f\x8b"),
]


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize(("method", "raw", "status", "body"), ANSWERS)
def test_answers(method: str, raw: bytes, status: int, body: bytes, step: int) -> None:
    reader = read(raw, method=method, step=step)
    assert reader.complete
    assert (reader.status, bytes(reader.body)) == (status, body)


def test_headers_are_kept_as_they_are() -> None:
    reader = read(OK + b"Set-Cookie: a\r\nset-cookie: \t b=\xe9 \r\nX:\r\nContent-Length: 0\r\n\r\n")
    assert reader.headers == (("Set-Cookie", "a"), ("set-cookie", "b=é"), ("X", ""), ("Content-Length", "0"))


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", "protocol"),
        (b"HTTP/1.1 200", "protocol"),
        (b"\r\n", "protocol"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "protocol"),
        (b"HTTP/2 200 OK\r\n\r\n", "protocol"),
        (b"HTTP/1.2 200 OK\r\n\r\n", "protocol"),
        (b"http/1.1 200 OK\r\n\r\n", "protocol"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "protocol"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "protocol"),
        (b"HTTP/1.1 099 OK\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 O\0K\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 O\rK\r\n\r\n", "protocol"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "protocol"),
        (OK + b"X\r\n\r\n", "protocol"),
        (OK + b"X : y\r\n\r\n", "protocol"),
        (OK + b": y\r\n\r\n", "protocol"),
        (OK + b"X: a\r\n folded\r\n\r\n", "protocol"),
        (OK + b"X: a\0\r\n\r\n", "protocol"),
        (OK + b"X: a\rb\r\n\r\n", "protocol"),
        (OK + b"X: a\r\n", "protocol"),
        (OK + b"Content-Length: 5\r\n\r\nhell", "protocol"),
        (OK + b"Content-Length: +5\r\n\r\nhello", "protocol"),
        (OK + b"Content-Length: -5\r\n\r\nhello", "protocol"),
        (OK + b"Content-Length: 5_0\r\n\r\nhello", "protocol"),
        (OK + b"Content-Length: \xb2\r\n\r\nhello", "protocol"),
        (OK + b"Content-Length:\r\n\r\n", "protocol"),
        (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "protocol"),
        (OK + b"Content-Length: 5, 6\r\n\r\nhello", "protocol"),
        (OK + b"Content-Length: 1000000000000000\r\n\r\nhello", "too_large"),
        (OK + b"Content-Length: 100000000000000000000\r\n\r\nhello", "protocol"),
        (OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "protocol"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "protocol"),
        (OK + b"Transfer-Encoding: identity\r\n\r\n", "protocol"),
        (OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "protocol"),
        (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "protocol"),
        (OK + b"Content-Length: 33\r\n\r\n", "too_large"),
        (OK + b"Content-Length: 999999999999999\r\n\r\n", "too_large"),
        (OK + b"\r\n" + b"a" * 33, "too_large"),
        (CHUNKED + b"21\r\n" + b"a" * 33, "too_large"),
        (CHUNKED + b"20\r\n" + b"a" * 32 + b"\r\n1\r\na", "too_large"),
        (CHUNKED + b"fffffffffffffff\r\n" + b"a" * 33, "too_large"),
        (CHUNKED + b"\r\n", "protocol"),
        (CHUNKED + b"x\r\n", "protocol"),
        (CHUNKED + b"-1\r\n", "protocol"),
        (CHUNKED + b"0x1\r\n", "protocol"),
        (CHUNKED + b"1_0\r\n", "protocol"),
        (CHUNKED + b"f" * 21 + b"\r\n", "protocol"),
        (CHUNKED + b"1\r\nab\r\n", "protocol"),
        (CHUNKED + b"1\r\na", "protocol"),
        (CHUNKED + b"2\r\na", "protocol"),
        (CHUNKED + b"1\r\na\r\n", "protocol"),
        (CHUNKED + b"0\r\n", "protocol"),
        (CHUNKED + b"0\r\nbad\r\n\r\n", "protocol"),
    ],
)
def test_wrong_answers_are_refused(raw: bytes, kind: str, step: int) -> None:
    with pytest.raises(FetchFailed) as caught:
        read(raw, step=step)
    assert caught.value.kind == kind
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_after_a_fault_nothing_completes_the_answer() -> None:
    reader = reader_for()
    for raw in (b"x\r\n\r\n", OK + b"Content-Length: 0\r\n\r\n"):
        with pytest.raises(FetchFailed):
            reader.feed(raw)
        assert not reader.complete


def test_a_length_is_judged_before_the_body_comes() -> None:
    reader = reader_for()
    with pytest.raises(FetchFailed, match="more than 32"):
        reader.feed(OK + b"Content-Length: 33\r\n\r\n")


HEAD_LIMITS: list[tuple[bytes, Kind | None]] = [
    (b"X: y\r\n" * MOST_HEADER_LINES, None),
    (b"X: y\r\n" * (MOST_HEADER_LINES + 1), "too_large"),
    (b"X: " + b"y" * (MOST_HEAD_BYTES - len(OK) - 7) + b"\r\n", None),
    (b"X: " + b"y" * (MOST_HEAD_BYTES - len(OK) - 4) + b"\r\n", "too_large"),
    (b"X: " + b"y" * MOST_HEAD_BYTES * 2 + b"\r\n", "too_large"),
]


@pytest.mark.parametrize("step", [0, 7, 65536])
@pytest.mark.parametrize(("headers", "kind"), HEAD_LIMITS)
def test_limits_of_a_head(headers: bytes, kind: Kind | None, step: int) -> None:
    raw = OK + headers + b"\r\n"
    if kind is None:
        assert read(raw, step=step).complete
        return
    with pytest.raises(FetchFailed) as caught:
        read(raw, step=step)
    assert caught.value.kind == kind


def endless(start: bytes, piece: bytes, pieces: int) -> FetchFailed:
    """What the reader says to a server that repeats `piece`, and how much it has kept."""
    reader = reader_for()
    if start:
        reader.feed(start)
    for _ in range(pieces):
        try:
            reader.feed(piece)
        except FetchFailed as failed:
            kept = len(reader._connection.trailing_data[0])
            assert kept <= MOST_HEAD_BYTES + len(piece)
            assert len(reader.body) <= MOST
            return failed
    raise AssertionError("the reader would go on for ever")


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"", b"H"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (OK, b"X: y\r\n"),
        (OK + b"X: ", b"y" * 1000),
        (OK + b"\r\n", b"y"),
        (CHUNKED, b"1\r\na\r\n"),
        (CHUNKED + b"1;", b"x"),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"X: y\r\n"),
        (CHUNKED, b"0001;" + b"x" * 900 + b"\r\na\r\n"),
    ],
)
def test_a_server_that_never_ends(start: bytes, piece: bytes) -> None:
    assert endless(start, piece, MOST_HEAD_BYTES + 2).kind == "too_large"


def test_a_line_of_a_chunk_has_a_limit() -> None:
    line = b"1;" + b"x" * (MOST_CHUNK_LINE_BYTES - 5)
    assert read(CHUNKED + line + b"\r\na\r\n0\r\n\r\n", step=1).body == b"a"
    with pytest.raises(FetchFailed, match="a line between its chunks has more than"):
        read(CHUNKED + line + b"x" * 2 * MOST_CHUNK_LINE_BYTES + b"\r\na\r\n0\r\n\r\n")


@pytest.mark.parametrize(("size", "passes"), [(1, False), (6, False), (7, True), (400, True)])
def test_a_server_cannot_send_more_between_chunks_than_in_them(size: int, passes: bool) -> None:
    number = MOST_HEAD_BYTES  # 7 bytes between two chunks: too much for chunks of 6 after so many
    raw = CHUNKED + b"%03x\r\n%s\r\n" % (size, b"a" * size) * number + b"0\r\n\r\n"
    if passes:
        assert len(read(raw, most=size * number).body) == size * number
    else:
        with pytest.raises(FetchFailed, match="between its chunks"):
            read(raw, most=size * number)


def test_headers_about_the_connection_are_left_out() -> None:
    reader = read(CHUNKED[:-2] + b"Connection: close\r\nX: y\r\n\r\n1\r\na\r\n0\r\n\r\n")
    assert reader.answer("u") == HttpsResponse(200, (("X", "y"),), b"a", "u")


@pytest.mark.parametrize(
    ("status", "headers", "location"),
    [
        (302, b"Location: /a\r\n", "/a"),
        (308, b"LOCATION:https://b/\r\n", "https://b/"),
        (302, b"", None),
        (200, b"Location: /a\r\n", None),
        (201, b"Location: /a\r\n", None),
        (304, b"Location: /a\r\n", None),
        (300, b"Location: /a\r\n", None),
    ],
)
def test_where_a_redirect_leads(status: int, headers: bytes, location: str | None) -> None:
    reader = read(b"HTTP/1.1 %d X\r\n" % status + headers + b"Content-Length: 0\r\n\r\n")
    assert reader.location == location


def test_a_redirect_to_two_places_is_none() -> None:
    with pytest.raises(FetchFailed, match="several places"):
        read(b"HTTP/1.1 302 X\r\nLocation: /a\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n")


def test_the_body_of_a_redirect_is_not_read() -> None:
    reader = reader_for()
    reader.feed(b"HTTP/1.1 302 X\r\nContent-Length: 999999\r\nLocation: /a\r\n\r\nxyz")
    assert reader.complete and reader.body == b""


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=6), st.data())
def test_pieces_do_not_matter(chunks: list[bytes], data: st.DataObject) -> None:
    raw = CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    reader = reader_for(most=64)
    position = 0
    while position < len(raw):
        size = data.draw(st.integers(1, len(raw) - position))
        assert not reader.complete
        reader.feed(raw[position : position + size])
        position += size
    assert reader.complete and reader.body == b"".join(chunks)


@given(
    st.binary(max_size=200)
    | st.binary(max_size=60).map(CHUNKED.__add__)
    | st.binary(max_size=60).map(OK.__add__)
)
@example(OK + b"\n")
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    outcomes: list[object] = []
    for step in (0, 1):
        try:
            reader = read(raw, step=step)
            assert reader.complete and len(reader.body) <= MOST
            outcomes.append((reader.status, reader.headers, bytes(reader.body)))
        except FetchFailed as failed:
            outcomes.append((failed.kind, (), b""))
    assert outcomes[0] == outcomes[1]
