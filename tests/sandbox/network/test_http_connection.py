"""What a peer sends over HTTP/1.1, judged before h11 reads it, in pieces of every size."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

import h11
import pytest
from h11 import _readers
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox.network.http_connection import (
    MOST_CHUNK_EXCESS,
    MOST_CHUNK_LINE_BYTES,
    MOST_HEADER_LINES,
    HttpConnection,
)

MOST = 2048  # bytes of a head
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"


def make(role: Any) -> HttpConnection:
    connection = HttpConnection(role, MOST)
    if role is h11.CLIENT:
        connection.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
        connection.send(h11.EndOfMessage())
    return connection


def read(pieces: Iterable[bytes], connection: h11.Connection) -> list[str]:
    """What was read, in a few words. A server answers each request as soon as it is whole."""
    found: list[str] = []
    for piece in pieces:
        connection.receive_data(piece)
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError as error:
                return [*found, f"refused {error.error_status_hint}"]
            if isinstance(event, h11.Request):
                found.append(f"{event.method.decode()} {event.headers.raw_items()}")
            elif isinstance(event, h11.Response | h11.InformationalResponse):
                found.append(f"{event.status_code} {event.headers.raw_items()}")
            elif isinstance(event, h11.Data):
                if not found[-1].startswith("data"):
                    found.append("data ")
                found[-1] += bytes(event.data).decode("latin-1")
            elif isinstance(event, h11.EndOfMessage):
                found.append("end")
            elif event is h11.PAUSED and connection.our_role is h11.SERVER:
                connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return [*found, "closes"]
                connection.start_next_cycle()
            else:
                break
    return found


def in_steps(raw: bytes, step: int) -> list[bytes]:
    return [raw[at : at + step] for at in range(0, len(raw), step)] if step else [raw]


LINE = b"X: " + b"y" * (MOST - len(GET) - 7) + b"\r\n"
ROWS: list[tuple[bytes, str]] = [
    # What is read, and by h11 alone in the same way.
    (GET + b"\r\n", "GET end"),
    (GET + b"X:\t y \xe9\t\r\n\r\n", "GET end"),
    (GET + b"X:" + b" " * 1000 + b"\r\n\r\n", "GET end"),
    (GET + LINE + b"\r\n", "GET end"),
    (GET + b"X: y\r\n" * (MOST_HEADER_LINES - 1) + b"\r\n", "GET end"),
    ((GET + b"\r\n") * 3, "GET end GET end GET end"),
    (POST + b"Content-Length: 3\r\n\r\nabc" + GET + b"\r\n", "POST data end GET end"),
    (CHUNKED + b"3\r\nabc\r\n1;x=y\r\nd\r\n000\r\nT: x\r\n\r\n" + GET + b"\r\n", "POST data end GET end"),
    (CHUNKED + b"A \r\n0123456789\r\n0\r\n\r\n", "POST data end"),
    (CHUNKED + b"1;" + b"x" * (MOST_CHUNK_LINE_BYTES - 4) + b"\r\na\r\n0\r\n\r\n", "POST data end"),
    (GET + b"Connection: close\r\n\r\n", "GET end"),
    # Too much.
    (GET + b"X" + LINE + b"\r\n", "refused 431"),
    (b"G" * MOST, "refused 431"),
    (GET + b"X: y\r\n" * MOST_HEADER_LINES + b"\r\n", "refused 431"),
    (CHUNKED + b"1;" + b"x" * (MOST_CHUNK_LINE_BYTES - 3) + b"\r\n", "POST refused 431"),
    (CHUNKED + b"0\r\n" + b"X: y\r\n" * 200 + b"\r\n", "POST refused 431"),
    (CHUNKED + b"1\r\na\r\n" * MOST_CHUNK_EXCESS, "POST data refused 431"),
    # What h11 takes long for, or accepts though two programs would read it in two ways.
    (GET + b"X:" + b" " * 1000 + b"\0\r\n\r\n", "refused 400"),
    (GET + b"X:" + b" " * 1000 + b"\x0b\r\n\r\n", "refused 400"),
    (GET + b"X:" + b" " * 1000 + b"\ry\r\n\r\n", "refused 400"),
    (GET + b"X:" + b"\r\n " * 500 + b"\0\r\n\r\n", "refused 400"),
    (GET + b"X: a\r\n b\r\n\r\n", "refused 400"),
    (GET + b"X: a\x7f\r\n\r\n", "refused 400"),
    (b"GET / HTTP/1.1\nHost: a\n\n", "refused 400"),
    (GET + b"X: a\n\r\n\r\n", "refused 400"),
    (GET + b"X: a\r\r\n\r\n", "refused 400"),
    (b"\r\n" + GET + b"\r\n", "refused 400"),
    (b" " + GET + b"\r\n", "refused 400"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "refused 400"),
    (POST + b"Content-Length: 3\r\n\r\nabcX: y\0\r\n\r\n", "POST data end refused 400"),
    (CHUNKED + b"0\r\n\r\nX:" + b" " * 500 + b"\0\r\n\r\n", "POST end refused 400"),
    (CHUNKED + b"1;" + b" " * 500 + b"\n \r\n", "POST refused 400"),
    (CHUNKED + b"1;\0\r\n", "POST refused 400"),
    (CHUNKED + b"1\na\r\n", "POST refused 400"),
    (CHUNKED + b"0\r\nX:" + b" " * 500 + b"\0\r\n\r\n", "POST refused 400"),
    (CHUNKED + b"0\r\nX: a\r\n b\r\n\r\n", "POST refused 400"),
    (CHUNKED + b"0\r\n\n", "POST refused 400"),
    (CHUNKED + b"f" * 17 + b"\r\n", "POST refused 400"),
    (CHUNKED + b"1\r\nabc\r\n", "POST data refused 400"),
    (CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n0\r\n\r\n", "refused 400"),
    (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", "refused 400"),
    (POST + b"Transfer-Encoding: gzip\r\n\r\n", "refused 501"),
    (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", "refused 400"),
    (POST + b"Content-Length: 3\r\nX: y\r\ncontent-length:3\r\n\r\nabc", "refused 400"),
    (POST + b"Content-Length: 3, 3\r\n\r\nabc", "refused 400"),
    (GET + b"Connection: close\r\n\r\n" + GET + b"\r\n", "GET end refused 400"),
    # Other protocols.
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "refused 505"),
    (GET.replace(b"1.1", b"0.9") + b"\r\n", "refused 505"),
    (b"GET /\r\n\r\n", "refused 400"),
]


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize(("raw", "expected"), ROWS)
def test_requests(raw: bytes, expected: str, step: int) -> None:
    found = read(in_steps(raw, step), make(h11.SERVER))
    words = [each if each.startswith("refused") else each.split(" ")[0] for each in found]
    assert " ".join(words) == expected
    if "refused" not in expected:
        assert found == read([raw], h11.Connection(h11.SERVER))


def _patterns_tried(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines that h11 tries its patterns on."""
    tried: list[bytes] = []
    validate = _readers.validate  # type: ignore[attr-defined]

    def watched(pattern: re.Pattern[bytes], line: bytes, *words: Any) -> Any:
        tried.append(bytes(line))
        return validate(pattern, line, *words)

    monkeypatch.setattr(_readers, "validate", watched)
    return tried


SLOW = [
    GET + b"X:" + b" " * 1000 + b"%s\r\n\r\n",
    GET + b"X:" + b"\r\n " * 300 + b"%s\r\n\r\n",
    GET + b"\r\n" + GET + b"X:" + b" " * 1000 + b"%s\r\n\r\n",
    CHUNKED + b"1;" + b" " * 1000 + b"%s\r\n",
    CHUNKED + b"0\r\nX:" + b" " * 1000 + b"%s\r\n\r\n",
    CHUNKED + b"0\r\n\r\nX:" + b" " * 1000 + b"%s\r\n\r\n",
]


@pytest.mark.parametrize("odd", [b"\0", b"\ry", b"\x0b", b"\x0c", b"\n\0"])
@pytest.mark.parametrize("raw", SLOW)
@pytest.mark.parametrize("step", [0, 1, 700])
def test_no_pattern_takes_the_square_of_a_line(
    raw: bytes, odd: bytes, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do where blanks are followed by a byte at which they fail: 60,000 blanks and a NUL take 20 s."""
    tried = _patterns_tried(monkeypatch)

    def is_slow(line: bytes) -> bool:
        return re.search(rb"[ \t]{100,}[^ \t!-~\x80-\xff]*[\x00-\x08\n-\x1f](?!\n?\Z)", line) is not None

    assert read(in_steps(raw % odd, step), make(h11.SERVER))[-1].startswith("refused")
    assert not any(map(is_slow, tried))


def test_alone_h11_would_try_its_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _patterns_tried(monkeypatch)
    line = b"X:" + b" " * 1000 + b"\0"
    assert read([GET + line + b"\r\n\r\n"], h11.Connection(h11.SERVER)) == ["refused 400"]
    assert line in tried


class _Watched:
    """A pattern, and how many bytes were searched."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern
        self.searched = 0

    def search(self, data: bytearray, start: int, end: int) -> re.Match[bytes] | None:
        self.searched += min(len(data), end) - start
        return self._pattern.search(data, start, end)


@pytest.mark.parametrize("raw", [GET + LINE, CHUNKED + b"0\r\nX: " + b"y" * 900])
def test_a_drip_of_single_bytes_is_not_searched_again_and_again(raw: bytes) -> None:
    connection = make(h11.SERVER)
    connection._stop = watched = _Watched(connection._stop)  # type: ignore[assignment]
    assert "refused" not in read(in_steps(raw, 1), connection)[-1:]
    assert 0 < watched.searched <= 5 * len(raw)


ANSWERS = [
    OK + b"Content-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\nLink: x\r\n\r\n" + OK + b"\r\na",
    b"HTTP/1.0 200 OK\nX: y\n\nhello",
    OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX:  \0\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
    OK + b"X: \0\r\n\r\n",
]
_ENDS = (b"\r\n", b"\n", b"\r", b" ", b"\0", b"0\r\n\r\n", b"1\r\na\r\n", b"X: y\r\n")
_WORDS = st.sampled_from([GET, POST, CHUNKED, OK, *ANSWERS, *_ENDS])


@given(
    st.lists(_WORDS | st.binary(max_size=4), max_size=8).map(b"".join),
    st.lists(st.integers(1, 200)),
    st.booleans(),
)
@example(GET + b"\r\n" + GET, [len(GET) + 1], True)
@example(GET + b"X: a\r\n b", [len(GET) + 6], True)
def test_cuts_do_not_matter_and_h11_alone_reads_the_same(
    raw: bytes, cuts: list[int], is_server: bool
) -> None:
    role = h11.SERVER if is_server else h11.CLIENT
    whole = read(dict.fromkeys([raw, b""]), make(role))  # the last of them is the end of the connection
    places = [0, *itertools.accumulate(cuts, initial=0), len(raw)]
    pieces = [raw[start:end] for start, end in itertools.pairwise(sorted(min(at, len(raw)) for at in places))]
    assert read([*filter(None, pieces), b""], make(role)) == whole
    if "refused" not in " ".join(whole):
        alone = h11.Connection(role)
        if not is_server:
            alone.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
            alone.send(h11.EndOfMessage())
        assert read(dict.fromkeys([raw, b""]), alone) == whole


@pytest.mark.parametrize("raw", ANSWERS)
def test_answers_in_every_two_pieces(raw: bytes) -> None:
    whole = read([raw], make(h11.CLIENT))
    assert whole
    for at in range(1, len(raw)):
        assert read([raw[:at], raw[at:]], make(h11.CLIENT)) == whole


def test_after_a_fault_nothing_is_read_and_an_answer_can_be_sent() -> None:
    connection = make(h11.SERVER)
    assert read([GET + b"\0"], connection) == ["refused 400"]
    assert connection.their_state is h11.ERROR and "control character" in connection.fault
    assert read([GET + b"\r\n"], connection) == ["refused 400"]
    assert connection.send(h11.Response(status_code=400, headers=[("Content-Length", "0")]))


def test_no_more_is_held_than_a_head_and_one_reading() -> None:
    for start, piece in (
        (b"X", b"X"),
        (GET, b"X: y\r\n"),
        (CHUNKED, b"0"),
        (CHUNKED + b"0\r\n", b"X: y\r\n"),
    ):
        connection = make(h11.SERVER)
        assert (
            read(itertools.chain([start], itertools.repeat(piece, 10_000)), connection)[-1] == "refused 431"
        )
        assert len(connection.trailing_data[0]) <= MOST + len(piece)


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "Missing mandatory Host: header"),
        (GET + b"Host: a\r\n\r\n", "Found multiple Host: headers"),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", "Only Transfer-Encoding: chunked is supported"),
        (GET + b"Password hunter2: chunked is supported\r\n\r\n", "illegal header line"),
        (b"hunter2: header\r\n\r\n", "illegal request line"),
    ],
)
def test_a_fault_is_told_whole_and_without_the_words_of_the_peer(raw: bytes, fault: str) -> None:
    connection = make(h11.SERVER)
    assert read([raw], connection)[-1].startswith("refused") and connection.fault == fault
