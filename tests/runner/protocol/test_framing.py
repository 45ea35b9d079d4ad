"""A skimmer finds the frames of a stream that somebody else judges, and where each one ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.protocol.framing import HeaderFraming, LineFraming, Skimmed, Skimmer
from runner.protocol.header_frames import HeaderRules, header_frame

RULES = HeaderRules(40, 16, last_counts=True)
LIMIT = 4


def lines() -> Skimmer:
    return LineFraming(100).skimmer(LIMIT)


def headers() -> Skimmer:
    return HeaderFraming(RULES).skimmer(LIMIT)


def skim(skimmer: Skimmer, *pieces: bytes) -> list[Skimmed]:
    found = [frame for piece in pieces for frame in skimmer.feed(piece)]
    return [*found, *skimmer.finish()]


@pytest.mark.parametrize(
    ("stream", "found"),
    [
        (b"", []),
        (b"a\nbc\n", [(b"a", 2), (b"bc", 5)]),
        (b"a\nbc", [(b"a", 2), (b"bc", 4)]),
        (b"12345\na\n", [(None, 6), (b"a", 8)]),
    ],
)
def test_lines(stream: bytes, found: list[Skimmed]) -> None:
    assert skim(lines(), stream) == found


HEAD = len(b"Content-Length: 0\r\n\r\n")


@pytest.mark.parametrize(
    ("stream", "found"),
    [
        (b"", []),
        (header_frame(b"a") + header_frame(b""), [(b"a", HEAD + 1), (b"", 2 * HEAD + 1)]),
        # Longer than we read, and longer than the contract allows: the host's frames are its own.
        (header_frame(b"12345") + header_frame(b"a"), [(None, HEAD + 5), (b"a", 2 * HEAD + 6)]),
        (header_frame(b"1" * 17) + header_frame(b"a"), [(None, HEAD + 18), (b"a", 2 * HEAD + 19)]),
        (header_frame(b"12345") * 2, [(None, HEAD + 5), (None, 2 * HEAD + 10)]),
        # Nobody knows where such a frame ends.
        (header_frame(b"a") + b"what?\n" + header_frame(b"a"), [(b"a", HEAD + 1), (None, 2 * HEAD + 8)]),
        (header_frame(b"a") + b"Content-", [(b"a", HEAD + 1)]),
    ],
)
def test_headers(stream: bytes, found: list[Skimmed]) -> None:
    assert skim(headers(), stream) == found


# Streams that mean something often enough.
frames = st.lists(st.binary(max_size=8), max_size=6)


@given(frames, st.data())
def test_every_split_gives_the_same_frames(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(header_frame, bodies))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6))), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(cuts)]
    ends = list(itertools.accumulate(len(header_frame(body)) for body in bodies))
    expected = [(body if len(body) <= LIMIT else None, end) for body, end in zip(bodies, ends, strict=True)]
    assert skim(headers(), *pieces) == expected
    assert skim(headers(), *(bytes((byte,)) for byte in stream)) == expected


@pytest.mark.parametrize("make", [lines, headers])
@given(pieces=st.lists(st.binary(max_size=40) | st.sampled_from([header_frame(b"1"), b"\r\n"]), max_size=8))
def test_ends_grow(make: Callable[[], Skimmer], pieces: list[bytes]) -> None:
    ends = [end for _, end in skim(make(), *pieces)]
    assert ends == sorted(ends)
