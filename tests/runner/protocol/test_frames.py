"""However a stream is cut, the frames and the fault are the same; and nothing is held beyond the limit."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.protocol.frames import FrameFault, Framer, HeaderFramer, LineFramer, line, with_header

LIMIT, HEADER_LIMIT = 8, 40


def lines() -> Framer:
    return LineFramer(LIMIT)


def headed() -> Framer:
    return HeaderFramer(LIMIT, HEADER_LIMIT)


class Read(NamedTuple):
    frames: list[bytes]
    fault: FrameFault | None


def read(framer: Framer, pieces: Sequence[bytes]) -> Read:
    frames = [frame for piece in pieces for frame in framer.feed(piece)]
    return Read(frames + framer.finish(), framer.fault)


def cause(fault: FrameFault | None) -> str:
    return "" if fault is None else fault.cause


@pytest.mark.parametrize(
    ("stream", "frames", "fault"),
    [
        (b"", [], ""),
        (b"a\n", [b"a"], ""),
        (b"a\nb", [b"a", b"b"], ""),
        (b"\n\n", [b"", b""], ""),
        (b" a\t\r\n", [b" a\t\r"], ""),
        (b"12345678\n", [b"12345678"], ""),
        (b"12345678", [b"12345678"], ""),
        (b"123456789", [], "frame_too_large"),
        (b"123456789\n", [], "frame_too_large"),
        (b"a\n123456789\nb\n", [b"a"], "frame_too_large"),
        (b"a\r12345678\n", [], "frame_too_large"),
        (b"\x00\xff\n", [b"\x00\xff"], ""),
    ],
)
def test_lines(stream: bytes, frames: list[bytes], fault: str) -> None:
    outcome = read(lines(), [stream])
    assert (outcome.frames, cause(outcome.fault)) == (frames, fault)


@pytest.mark.parametrize(
    ("stream", "frames", "fault"),
    [
        (b"", [], ""),
        (b"Content-Length: 2\r\n\r\nab", [b"ab"], ""),
        (b"Content-Length: 2\n\nabContent-Length: 1\n\nc", [b"ab", b"c"], ""),
        (b"content-LENGTH:2\r\n\r\nab", [b"ab"], ""),
        (b"Content-Length :\t2 \r\n\r\nab", [b"ab"], ""),
        (b"X: y\r\nContent-Length: 2\r\nY:\r\n\r\nab", [b"ab"], ""),
        (b"Content-Length: 0\r\n\r\n", [b""], ""),
        (b"Content-Length: 002\r\n\r\nab", [b"ab"], ""),
        (b"Content-Length: 8\r\n\r\n12345678", [b"12345678"], ""),
        (b"Content-Length: 9\r\n", [], "frame_too_large"),
        (b"Content-Length: 1\r\n\r\naContent-Length: 9\r\n", [b"a"], "frame_too_large"),
        (b"\r\n", [], "bad_header"),
        (b"X: y\r\n\r\n", [], "bad_header"),
        (b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab", [], "bad_header"),
        (b"Content-Length: -2\r\n\r\nab", [], "bad_header"),
        (b"Content-Length: +2\r\n\r\nab", [], "bad_header"),
        (b"Content-Length: 2.0\r\n\r\nab", [], "bad_header"),
        (b"Content-Length: 0x2\r\n\r\nab", [], "bad_header"),
        (b"Content-Length: \r\n\r\nab", [], "bad_header"),
        ("Content-Length: ２\r\n\r\nab".encode(), [], "bad_header"),
        (b"Content-Length: 1 2\r\n\r\nab", [], "bad_header"),
        (b"Content-Length: " + b"9" * 19 + b"\r\n", [], "bad_header"),
        (b"Content-Length 2\r\n\r\nab", [], "bad_header"),
        (b": 2\r\n\r\nab", [], "bad_header"),
        (b"a print\nContent-Length: 2\r\n\r\nab", [], "bad_header"),
        (b"X: y\rContent-Length: 2\r\n\r\nab", [], "bad_header"),
        (b"X: \0\r\nContent-Length: 2\r\n\r\nab", [], "bad_header"),
        (b"X: " + b"y" * 37, [], "truncated"),  # 40 bytes: as many as there may be
        (b"X: " + b"y" * 38, [], "bad_header"),
        (b"X: y\r\n" * 6 + b"X: y\n", [], "bad_header"),
        (b"Content-Length: 2\r\nX: " + b"y" * 14 + b"\r\n\r\nab", [b"ab"], ""),  # 40 bytes of header, too
        (b"Content-Length: 2\r\nX: " + b"y" * 15 + b"\r\n\r\nab", [], "bad_header"),
        (b"Content-Length: 2\r\n\r\na", [], "truncated"),
        (b"Content-Length: 2\r\n\r\n", [], "truncated"),
        (b"Content-Length: 2\r\n", [], "truncated"),
        (b"C", [], "truncated"),
    ],
)
def test_headers(stream: bytes, frames: list[bytes], fault: str) -> None:
    outcome = read(headed(), [stream])
    assert (outcome.frames, cause(outcome.fault)) == (frames, fault)


# Streams that mean something often enough, and those that do not.
streams = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.sampled_from([b"\n", b"\r\n", b"\r\n\r\n", b"Content-Length: ", b"2", b"9", b":", b"X: y\r\n"]),
        st.binary(max_size=LIMIT + 1).map(with_header),
        st.binary(max_size=LIMIT + 1).map(lambda text: text + b"\n"),
    ),
    max_size=12,
).map(b"".join)


@pytest.mark.parametrize("make", [lines, headed])
@given(stream=streams, data=st.data())
@example(stream=b"12345678\n", data=None)
def test_any_split_of_any_stream_gives_the_same(
    make: Callable[[], Framer], stream: bytes, data: st.DataObject | None
) -> None:
    places = st.lists(st.integers(0, len(stream)), max_size=8).map(sorted)
    cuts = [0, *(data.draw(places) if data else [4]), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(cuts)]
    whole = read(make(), [stream])
    assert read(make(), pieces) == whole
    assert read(make(), [bytes((byte,)) for byte in stream]) == whole


@pytest.mark.parametrize("make", [lines, headed])
@given(pieces=st.lists(streams, max_size=6))
def test_never_holds_more_than_a_frame_and_ends_with_its_fault(
    make: Callable[[], Framer], pieces: list[bytes]
) -> None:
    framer = make()
    for piece in pieces:
        broken = framer.fault
        frames = framer.feed(piece)
        assert all(len(frame) <= LIMIT for frame in frames)
        assert framer.pending <= LIMIT + HEADER_LIMIT
        if broken is not None:
            assert frames == [] and framer.fault is broken and framer.pending == 0
    framer.finish()
    assert framer.feed(b"a\n") == [] and framer.finish() == []


@given(st.lists(st.binary(max_size=LIMIT).filter(lambda text: b"\n" not in text)))
def test_lines_come_back(payloads: list[bytes]) -> None:
    assert read(lines(), [b"".join(map(line, payloads))]) == Read(payloads, None)


@given(st.lists(st.binary(max_size=LIMIT)))
def test_headed_frames_come_back(payloads: list[bytes]) -> None:
    assert read(headed(), [b"".join(map(with_header, payloads))]) == Read(payloads, None)


def test_a_line_is_one_line() -> None:
    with pytest.raises(ValueError, match="newline"):
        line(b"a\nb")


def test_a_fault_is_known_with_the_first_byte_too_many() -> None:
    framer = lines()
    framer.feed(b"12345678")
    assert framer.fault is None and framer.pending == 8
    framer.feed(b"9")
    assert cause(framer.fault) == "frame_too_large" and framer.pending == 0


def test_a_header_counts_as_half_a_frame() -> None:
    framer = headed()
    framer.feed(b"Content-Length: 2\r\n")
    assert framer.pending == 19
    framer.feed(b"\r\na")
    assert framer.pending == 22
    assert framer.feed(b"b") == [b"ab"] and framer.pending == 0


def endless(start: bytes, piece: bytes) -> Iterator[bytes]:
    yield start
    while True:
        yield piece


@pytest.mark.parametrize(
    ("framer", "start", "piece"),
    [
        (LineFramer(1 << 20), b"", b"x" * 4096),
        (HeaderFramer(1 << 20), b"", b"x" * 4096),
        (HeaderFramer(1 << 20), b"X:", b"x" * 100),
        (HeaderFramer(1 << 20), b"", b"X: y\r\n"),
    ],
)
def test_what_never_ends_is_ended(framer: Framer, start: bytes, piece: bytes) -> None:
    tracemalloc.start()
    try:
        for part in endless(start, piece):
            assert framer.feed(part) == []
            if framer.fault is not None:
                break
        for _ in range(1000):
            framer.feed(piece)
        assert framer.pending == 0
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_fault_shows_no_control_characters() -> None:
    framer = headed()
    framer.feed(b"\x1b[2J\n")
    assert framer.fault is not None and framer.fault.message.isprintable()
