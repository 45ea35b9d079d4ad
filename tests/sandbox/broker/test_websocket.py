from __future__ import annotations

import struct

import pytest

from sandbox.broker.echo import NOTHING, Replacements
from sandbox.broker.websocket import FrameFilter, NotAFrame
from tests.sandbox.broker.rig import PLACEHOLDER, VALUE
from tests.tables import one_case


def frame(first: int, payload: bytes) -> bytes:
    if len(payload) < 126:
        return bytes([first, len(payload)]) + payload
    if len(payload) < 65536:
        return bytes([first, 126]) + struct.pack("!H", len(payload)) + payload
    return bytes([first, 127]) + struct.pack("!Q", len(payload)) + payload


def messages(data: bytes) -> list[tuple[int, bytes]]:
    """Whole messages and control frames, with their kinds."""
    found: list[tuple[int, bytes]] = []
    kind, message = 0, b""
    while data:
        first, length, start = data[0], data[1] & 127, 2
        if length > 125:
            start = 4 if length == 126 else 10
            length = int.from_bytes(data[2:start], "big")
        payload, data = data[start : start + length], data[start + length :]
        assert len(payload) == length
        if first & 15 >= 8:
            found.append((first & 15, payload))
            continue
        kind, message = kind or first & 15, message + payload
        if first & 128:
            found.append((kind, message))
            kind, message = 0, b""
    assert not message
    return found


LONG = b"l" * 70000 + VALUE + b"m" * 300


@pytest.mark.parametrize("step", [0, 1, 7])
@one_case(
    "sent",
    [
        frame(0x81, b"hello"),
        frame(0x81, b""),
        frame(0x82, b"a" + VALUE + b"b"),
        frame(0x01, VALUE[:9]) + frame(0x00, VALUE[9:20]) + frame(0x80, VALUE[20:] + b"!"),
        frame(0x01, VALUE[:9]) + frame(0x89, b"ping" + VALUE) + frame(0x80, VALUE[9:]),
        frame(0x82, LONG) + frame(0x81, VALUE) + frame(0x88, struct.pack("!H", 1000) + b"bye"),
        frame(0x01, VALUE) + frame(0x80, b""),
    ],
)
def test_messages_are_searched_as_a_whole(sent: bytes, step: int) -> None:
    if step and len(sent) > 1000:
        step *= 1000
    frames = FrameFilter(Replacements([(VALUE, PLACEHOLDER)]))
    pieces = [sent[at : at + step] for at in range(0, len(sent), step)] if step else [sent]
    found = messages(b"".join(map(frames.feed, pieces)))
    assert found == [(kind, text.replace(VALUE, PLACEHOLDER)) for kind, text in messages(sent)]


def test_a_message_that_has_come_is_passed_on_at_once() -> None:
    frames = FrameFilter(Replacements([(VALUE, PLACEHOLDER)]))
    assert messages(frames.feed(frame(0x81, VALUE[:20]))) == [(1, VALUE[:20])]


@one_case(
    "sent",
    [
        frame(0xC1, b"compressed"),
        bytes([0x81, 0x83]) + b"keysabc",  # masked
        frame(0x80, b"continues nothing"),
        frame(0x01, b"a") + frame(0x81, b"another one within"),
        frame(0x89, b"x" * 126),
        frame(0x09, b"control in parts"),
    ],
)
def test_what_is_no_frame_is_refused(sent: bytes) -> None:
    with pytest.raises(NotAFrame):
        FrameFilter(Replacements([(VALUE, PLACEHOLDER)])).feed(sent)
    assert FrameFilter(NOTHING).feed(sent) == sent
