"""Frames and faults do not depend on how the stream is cut, and a framer holds no more than its limit."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.protocol.frames import FrameFault, Framer, LineFramer, line

LIMIT = 8


def lines() -> Framer:
    return LineFramer(LIMIT)


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


# Streams that mean something often enough, and those that do not.
streams = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
        st.binary(max_size=LIMIT + 1).map(lambda text: text + b"\n"),
    ),
    max_size=12,
).map(b"".join)


@given(stream=streams, data=st.data())
@example(stream=b"12345678\n", data=None)
def test_every_split_of_a_stream_gives_the_same_frames(stream: bytes, data: st.DataObject | None) -> None:
    places = st.lists(st.integers(0, len(stream)), max_size=8).map(sorted)
    cuts = [0, *(data.draw(places) if data else [4]), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(cuts)]
    whole = read(lines(), [stream])
    assert read(lines(), pieces) == whole
    assert read(lines(), [bytes((byte,)) for byte in stream]) == whole


@given(pieces=st.lists(streams, max_size=6))
def test_holds_at_most_one_frame_and_stops_at_the_fault(pieces: list[bytes]) -> None:
    framer = lines()
    for piece in pieces:
        broken = framer.fault
        frames = framer.feed(piece)
        assert all(len(frame) <= LIMIT for frame in frames)
        assert framer.pending <= LIMIT
        if broken is not None:
            assert frames == [] and framer.fault is broken and framer.pending == 0
    framer.finish()
    assert framer.feed(b"a\n") == [] and framer.finish() == []


@given(st.lists(st.binary(max_size=LIMIT).filter(lambda text: b"\n" not in text)))
def test_written_lines_are_read_back(payloads: list[bytes]) -> None:
    assert read(lines(), [b"".join(map(line, payloads))]) == Read(payloads, None)


def test_short_pieces_are_not_held_one_by_one() -> None:
    """An object for each byte would take fifty times the memory."""
    framer = LineFramer(1 << 20)
    for piece in [b"x"] * 1000 + [b"y" * (16 << 10)] * 2 + [b"z"] * 1000:
        assert framer.feed(piece) == []
    assert framer.pending == 2000 + (32 << 10) and len(framer._held._pieces) == 4
    assert framer.feed(b"\n") == [b"x" * 1000 + b"y" * (32 << 10) + b"z" * 1000] and framer.pending == 0


def test_a_line_with_a_newline_is_refused() -> None:
    with pytest.raises(ValueError, match="newline"):
        line(b"a\nb")


def test_the_first_byte_over_the_limit_is_a_fault() -> None:
    framer = lines()
    framer.feed(b"12345678")
    assert framer.fault is None and framer.pending == 8
    framer.feed(b"9")
    assert cause(framer.fault) == "frame_too_large" and framer.pending == 0


def test_a_line_without_end_is_a_fault() -> None:
    framer, piece = LineFramer(1 << 20), b"x" * 4096
    tracemalloc.start()
    try:
        while framer.fault is None:
            assert framer.feed(piece) == []
        for _ in range(1000):
            framer.feed(piece)
        assert framer.pending == 0
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
