"""Frames and faults do not depend on how the stream is cut. A framer holds no more than it must."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.protocol.frames import Cut, Cutter, FrameFault
from runner.protocol.header_frames import (
    WHITE_SPACE,
    HeaderFramer,
    HeaderRules,
    header_frame,
    read_digits,
    read_signed_digits,
)
from tests.tables import one_case

HEADER_LIMIT, BODY_LIMIT = 8192, 16 << 20

# Two contracts. One trims generously and lets the last of several lengths count, and knows no other header.
# The other takes other headers, but only plain digits, and no empty body.
STRICT = HeaderRules(HEADER_LIMIT, BODY_LIMIT, read_length=read_signed_digits, last_counts=True)
LENIENT = HeaderRules(HEADER_LIMIT, BODY_LIMIT, least_body=1, blanks=" \t", ignores_others=True)


class Read(NamedTuple):
    frames: list[bytes]
    fault: FrameFault | None


def read(framer: Cutter, pieces: Sequence[bytes]) -> Read:
    frames = [frame for piece in pieces for frame in framer.feed(piece)]
    return Read(frames + framer.finish(), framer.fault)


def cause(fault: FrameFault | None) -> str:
    return "" if fault is None else fault.cause


def padded(size: int, blank: bytes = b" ") -> bytes:
    """A header of exactly `size` bytes, for a body of two."""
    return b"Content-Length:" + blank * (size - 20) + b"2\r\n\r\n"


TOO_LONG, BAD, CUT = "frame_too_large", "bad_header", "cut_short"

ROWS = {
    "nothing": (b"", [], ""),
    "one frame": (b"Content-Length: 2\r\n\r\n{}", [b"{}"], ""),
    "two frames": (b"Content-Length: 2\r\n\r\n{}Content-Length: 1\r\n\r\n1", [b"{}", b"1"], ""),
    "a body of any bytes": (b"Content-Length: 4\r\n\r\n\r\n\xff\x00", [b"\r\n\xff\x00"], ""),
    "a body that looks like a header": (header_frame(header_frame(b"x")), [header_frame(b"x")], ""),
    "an empty body": (b"Content-Length: 0\r\n\r\n", [b""], ""),
    "empty bodies": (b"Content-Length: 0\r\n\r\n" * 3, [b""] * 3, ""),
    # Lines.
    "a newline alone": (b"Content-Length: 2\n\r\n{}", [], BAD),
    "newlines alone": (b"Content-Length: 2\n\n{}", [], BAD),
    "an empty line that is a newline alone": (b"Content-Length: 2\r\n\n{}", [], BAD),
    "a carriage return alone": (b"Content-Length: 2\r\r", [], CUT),
    "two carriage returns": (b"Content-Length: 2\r\r\n\r\n{}", [b"{}"], ""),
    "no length": (b"\r\n{}", [], BAD),
    "print()": (b"hello world\nContent-Length: 2\r\n\r\n{}", [], BAD),
    "not UTF-8": (b"Content-Length: 2\xff\r\n\r\n{}", [], BAD),
    "a name that is not UTF-8": (b"\xc3: 2\r\nContent-Length: 2\r\n\r\n{}", [], BAD),
    # Names.
    "any case": (b"cONTENT-lENGTH: 2\r\n\r\n{}", [b"{}"], ""),
    "white space around the colon": (b"content-length :\t2\r\n\r\n{}", [b"{}"], ""),
    "no white space": (b"Content-Length:2\r\n\r\n{}", [b"{}"], ""),
    "white space before the name": (b"  Content-Length: 2 \r\n\r\n{}", [b"{}"], ""),
    "wide white space": ("Content-Length\u3000:\u20282\x85\r\n\r\n{}".encode(), [b"{}"], ""),
    "a separator that is no white space": (b"Content-Length: 2\x1c\r\n\r\n{}", [], BAD),
    "no colon": (b"Content-Length 2\r\n\r\n{}", [], BAD),
    "two colons": (b"Content-Length:: 2\r\n\r\n{}", [], BAD),
    "a colon alone": (b":\r\n\r\n{}", [], BAD),
    "only another header": (b"Content-Type: a\r\n\r\n{}", [], BAD),
    "another header before": (b"Content-Type: a\r\nContent-Length: 2\r\n\r\n{}", [], BAD),
    "another header after": (b"Content-Length: 2\r\nContent-Type: a\r\n\r\n{}", [], BAD),
    "a name with a letter beyond ASCII": ("Content-Length\u0130: 2\r\n\r\n{}".encode(), [], BAD),
    # Numbers.
    "a plus sign": (b"Content-Length: +2\r\n\r\n{}", [b"{}"], ""),
    "leading zeros": (b"Content-Length: 002\r\n\r\n{}", [b"{}"], ""),
    "many leading zeros": (b"Content-Length: " + b"0" * 5000 + b"2\r\n\r\n{}", [b"{}"], ""),
    "two plus signs": (b"Content-Length: ++2\r\n\r\n{}", [], BAD),
    "a plus sign alone": (b"Content-Length: +\r\n\r\n{}", [], BAD),
    "a blank after the plus sign": (b"Content-Length: + 2\r\n\r\n{}", [], BAD),
    "minus zero": (b"Content-Length: -0\r\n\r\n", [], BAD),
    "minus": (b"Content-Length: -2\r\n\r\n{}", [], BAD),
    "no number": (b"Content-Length:\r\n\r\n{}", [], BAD),
    "an underscore": (b"Content-Length: 1_0\r\n\r\n0123456789", [], BAD),
    "digits beyond ASCII": ("Content-Length: \u0662\r\n\r\n{}".encode(), [], BAD),
    "a superscript": ("Content-Length: \u00b2\r\n\r\n{}".encode(), [], BAD),
    "a fraction": (b"Content-Length: 2.0\r\n\r\n{}", [], BAD),
    "hexadecimal": (b"Content-Length: 0x2\r\n\r\n{}", [], BAD),
    "64 bit": (b"Content-Length: 18446744073709551615\r\n\r\n{}", [], TOO_LONG),
    "more than 64 bit": (b"Content-Length: 18446744073709551616\r\n\r\n{}", [], BAD),
    "21 digits": (b"Content-Length: 100000000000000000000\r\n\r\n{}", [], BAD),
    "5000 digits": (b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}", [], BAD),
    # Several lengths.
    "the last length counts": (b"Content-Length: 9\r\nContent-Length: 2\r\n\r\n{}", [b"{}"], ""),
    "a bad length before a good one": (b"Content-Length: x\r\nContent-Length: 2\r\n\r\n{}", [], BAD),
    "a long one before a short one": (
        b"Content-Length: 99999999\r\nContent-Length: 2\r\n\r\n{}",
        [b"{}"],
        "",
    ),
    # Limits.
    "a header of 8192 bytes": (padded(HEADER_LIMIT) + b"{}", [b"{}"], ""),
    "a header of 8193 bytes": (padded(HEADER_LIMIT + 1) + b"{}", [], TOO_LONG),
    "a header of 8192 bytes in many lines": (
        b"Content-Length: 2\r\n" * 430 + padded(HEADER_LIMIT - 430 * 19) + b"{}",
        [b"{}"],
        "",
    ),
    "a header of 8193 bytes in many lines": (
        b"Content-Length: 2\r\n" * 430 + padded(HEADER_LIMIT + 1 - 430 * 19) + b"{}",
        [],
        TOO_LONG,
    ),
    "8192 bytes without an end": (b"x" * HEADER_LIMIT, [], CUT),
    "8193 bytes without an end": (b"x" * (HEADER_LIMIT + 1), [], TOO_LONG),
    "the limit is counted for each frame": ((padded(HEADER_LIMIT) + b"{}") * 2, [b"{}"] * 2, ""),
    "a body that is too long": (b"Content-Length: 16777217\r\n\r\n", [], TOO_LONG),
    "frames before a fault": (b"Content-Length: 2\r\n\r\n{}\n", [b"{}"], BAD),
    # The end of the stream.
    "an end inside a line": (b"Content-Len", [], CUT),
    "an end after the first byte": (b"C", [], CUT),
    "an end between the lines": (b"Content-Length: 2\r\n", [], CUT),
    "an end before the body": (b"Content-Length: 2\r\n\r\n", [], CUT),
    "an end inside the body": (b"Content-Length: 2\r\n\r\n{", [], CUT),
    "an end after a frame": (b"Content-Length: 2\r\n\r\n{}Content", [b"{}"], CUT),
}


@one_case(("stream", "frames", "fault"), ROWS.values(), ids=ROWS.keys())
def test_frames(stream: bytes, frames: list[bytes], fault: str) -> None:
    outcome = read(HeaderFramer(STRICT), [stream])
    assert (outcome.frames, cause(outcome.fault)) == (frames, fault)
    assert read(HeaderFramer(STRICT), [bytes((byte,)) for byte in stream]) == outcome


@pytest.mark.parametrize(
    ("stream", "frames", "fault"),
    [
        (b"Content-Type: a\r\nContent-Length: 2\r\nX:\r\n\r\n{}", [b"{}"], ""),
        (b"X: y\rContent-Length: 9\r\nContent-Length: 2\r\n\r\n{}", [], BAD),
        (b"Content-Length\v: 9\r\nContent-Length: 2\r\n\r\n{}", [], BAD),
        (b" X: y\r\nContent-Length: 2\r\n\r\n{}", [], BAD),
        (b": y\r\nContent-Length: 2\r\n\r\n{}", [], BAD),
        (b"x: \r\n" * 1600 + b"Content-Length: 2\r\n\r\n{}", [b"{}"], ""),
        (b"Content-Type\r\nContent-Length: 2\r\n\r\n{}", [], BAD),
        (b"Content-Type: a\r\n\r\n{}", [], BAD),
        (b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", [], BAD),
        (b"Content-Length: 0\r\n\r\n", [], BAD),
        (b"Content-Length: 1\r\n\r\n1", [b"1"], ""),
        (b"Content-Length: +2\r\n\r\n{}", [], BAD),
        (b"Content-Length: 2\n\n{}", [], BAD),
        ("Content-Length:\u30002\r\n\r\n{}".encode(), [], BAD),
        ("X: \u3000\r\nContent-Length: 2\r\n\r\n{}".encode(), [b"{}"], ""),
    ],
)
def test_frames_by_the_rules_of_another_contract(stream: bytes, frames: list[bytes], fault: str) -> None:
    outcome = read(HeaderFramer(LENIENT), [stream])
    assert (outcome.frames, cause(outcome.fault)) == (frames, fault)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (
            b"loading \x1b[31mmodels\n",
            (
                "a header line ends with a newline alone, and not with CRLF: 'loading \\x1b[31mmodels'; "
                "stdout carries only frames: print everything else to stderr"
            ),
        ),
        (b"Content-Length: \x07\r\n", "Content-Length is '\\x07', which is not a length in bytes"),
        (b"\r\n", "the header of a frame has no Content-Length"),
        (
            b"Content-Length: 16777217\r\n\r\n",
            "a frame announces 16777217 bytes, and the limit is 16777216 bytes",
        ),
        (
            b"Content-Length: 9\r\n\r\n{}",
            "the stream ended inside the body of a frame, after 23 bytes of the frame",
        ),
    ],
)
def test_a_fault_says_what_is_wrong(stream: bytes, message: str) -> None:
    fault = read(HeaderFramer(STRICT), [stream]).fault
    assert fault is not None and fault.message == message


def test_a_fault_is_short_however_long_the_line_is() -> None:
    fault = read(HeaderFramer(STRICT), [b"\x07" * 8000 + b"\n"]).fault
    assert fault is not None and len(fault.message) < 500


# --- splits ---------------------------------------------------------------------------------------------

SMALL = HeaderRules(24, 8, read_length=read_signed_digits, last_counts=True)

# Streams that mean something often enough, and those that do not.
streams = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.sampled_from([b"\n", b"\r\n", b"\r\n\r\n", b"Content-Length:", b"Content-Length: 8\r\n\r\n"]),
        st.binary(max_size=9).map(header_frame),
    ),
    max_size=12,
).map(b"".join)


@given(stream=streams, data=st.data())
@example(stream=header_frame(b"12345678"), data=None)
def test_every_split_of_a_stream_gives_the_same_frames(stream: bytes, data: st.DataObject | None) -> None:
    places = st.lists(st.integers(0, len(stream)), max_size=8).map(sorted)
    cuts = [0, *(data.draw(places) if data else [4]), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(cuts)]
    whole = read(HeaderFramer(SMALL), [stream])
    assert read(HeaderFramer(SMALL), pieces) == whole
    assert read(HeaderFramer(SMALL), [bytes((byte,)) for byte in stream]) == whole


@given(pieces=st.lists(streams, max_size=6))
def test_cuts_are_what_stood_in_the_stream(pieces: list[bytes]) -> None:
    framer, read_along = HeaderFramer(SMALL), HeaderFramer(SMALL)
    passed = b""
    for piece in pieces:
        cuts = framer.cut(piece)
        passed += b"".join(cut.before + cut.frame + cut.after for cut in cuts)
        assert [cut.frame for cut in cuts] == read_along.feed(piece)
        assert framer.refused is not None or framer.taken == len(passed)
    assert b"".join(pieces).startswith(passed)
    assert framer.finish_cut() == [] and framer.cut(header_frame(b"")) == []


@given(pieces=st.lists(streams, max_size=6))
def test_holds_at_most_one_frame_and_stops_at_the_fault(pieces: list[bytes]) -> None:
    framer = HeaderFramer(SMALL)
    for piece in pieces:
        broken = framer.fault
        frames = framer.feed(piece)
        assert all(len(frame) <= SMALL.body_limit for frame in frames)
        assert framer.pending <= SMALL.header_limit + SMALL.body_limit
        if broken is not None:
            assert frames == [] and framer.fault is broken and framer.pending == 0
    framer.finish()
    assert framer.feed(header_frame(b"a")) == [] and framer.finish() == []


@given(st.lists(st.binary(max_size=64)))
def test_written_frames_are_read_back(payloads: list[bytes]) -> None:
    stream = b"".join(map(header_frame, payloads))
    assert read(HeaderFramer(STRICT), [stream]) == Read(payloads, None)


def test_a_cut_has_its_header() -> None:
    head = b"content-length : +002\r\n\r\n"
    assert HeaderFramer(STRICT).cut(head + b"{}") == [Cut(b"{}", head)]


def test_only_the_usual_header_reaches_a_host_as_it_is() -> None:
    usual = b"Content-Length: 2\r\n\r\n"
    lines = (
        b"Content-Length:\xc2\xa02",
        b"\xe3\x80\x80Content-Length : 2",
        b"Content-Length: +2",
    )
    for line in lines:
        assert HeaderFramer(STRICT, rewrites=True).cut(line + b"\r\n\r\n{}")[:1] in (
            [],
            [Cut(b"{}", usual)],
        ), line


# --- memory ---------------------------------------------------------------------------------------------


def test_an_announced_body_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        framer = HeaderFramer(STRICT)
        framer.feed(b"Content-Length: 16777216\r\n\r\n")
        assert framer.fault is None
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_a_refused_body_is_not_held() -> None:
    framer = HeaderFramer(STRICT)
    assert framer.feed(b"Content-Length: 16777217\r\n\r\n" + b"x" * 60000) == []
    assert cause(framer.fault) == TOO_LONG and (framer.pending, framer.refused) == (0, 16777217)


def test_the_longest_body_is_held_about_twice() -> None:
    framer, piece = HeaderFramer(STRICT), b"x" * (64 << 10)
    framer.feed(b"Content-Length: 16777216\r\n\r\n")
    tracemalloc.start()
    try:
        for _ in range(255):
            assert framer.feed(piece) == []
        (body,) = framer.feed(piece)
        assert len(body) == BODY_LIMIT and framer.pending == 0
        assert tracemalloc.get_traced_memory()[1] < 3 * BODY_LIMIT
    finally:
        tracemalloc.stop()


# --- numbers --------------------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1), st.integers(0, 30), st.booleans())
def test_every_length_of_64_bits_is_read(length: int, zeros: int, plus: bool) -> None:
    digits = "0" * zeros + str(length)
    assert read_digits(digits) == length == read_signed_digits("+" * plus + digits)


@given(st.text(max_size=24))
def test_nothing_else_is_a_length(text: str) -> None:
    is_length = text.isascii() and text.isdigit() and int(text) < 2**64
    assert (read_digits(text) is not None) == is_length


def test_white_space_is_what_unicode_says() -> None:
    """Python's own, without the four separators that only Python removes."""
    own = {chr(code) for code in range(0x110000) if chr(code).isspace()}
    assert set(WHITE_SPACE) == own - set("\x1c\x1d\x1e\x1f")
