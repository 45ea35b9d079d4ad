"""FrameFilter: what a server sends over a websocket, with the values replaced in its messages.

A message may be cut into frames anywhere. So frames of messages are written anew, as they come, and a message
is searched as a whole. Control frames pass between them.
"""

from __future__ import annotations

from sandbox.broker.echo import EchoFilter, Replacements

_FINAL, _RESERVED, _OPCODE, _MASKED, _LENGTH = 0x80, 0x70, 0x0F, 0x80, 0x7F
_CONTINUATION, _FIRST_CONTROL = 0, 8
_TWO_BYTES, _EIGHT_BYTES = 126, 127  # what stands for a longer length
_MOST_CONTROL_BYTES = 125


class NotAFrame(Exception):
    """The server sends something else than frames. The text is the rest of a sentence about it."""


class FrameFilter:
    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements
        self._message = EchoFilter(replacements)
        self._buffer = b""
        self._left = 0  # bytes of the payload of the message's frame
        self._opcode = _CONTINUATION  # of the next frame that is written
        self._within = False  # a message
        self._final = False  # the frame ends the message

    def feed(self, data: bytes) -> bytes:
        if not self._replacements:
            return data
        self._buffer += data
        written: list[bytes] = []
        while self._buffer:
            if not self._left and not self._begin(written):
                break
            if self._left:
                piece, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
                self._left -= len(piece)
                self._pass_on(piece, written)
        return b"".join(written)

    def _begin(self, written: list[bytes]) -> bool:
        """Read the head of a frame. False: it is not whole yet."""
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        first, second = buffer[0], buffer[1]
        opcode, length, start = first & _OPCODE, second & _LENGTH, 2
        if first & _RESERVED or second & _MASKED:
            raise NotAFrame("sends a frame of a websocket that cannot be read")
        if length in (_TWO_BYTES, _EIGHT_BYTES):
            start = 4 if length == _TWO_BYTES else 10
            if len(buffer) < start:
                return False
            length = int.from_bytes(buffer[2:start], "big")
        if opcode >= _FIRST_CONTROL:
            return self._control(first, length, start, written)
        if (opcode == _CONTINUATION) != self._within:
            raise NotAFrame("sends the frames of a websocket in a wrong order")
        self._buffer = buffer[start:]
        self._left, self._final = length, bool(first & _FINAL)
        if not self._within:
            self._within, self._opcode = True, opcode
        if not length:
            self._pass_on(b"", written)
        return True

    def _control(self, first: int, length: int, start: int, written: list[bytes]) -> bool:
        if length > _MOST_CONTROL_BYTES or not first & _FINAL:
            raise NotAFrame("sends a frame of a websocket that is too long")
        if len(self._buffer) < start + length:
            return False
        payload = self._replacements.replace(self._buffer[start : start + length])
        self._buffer = self._buffer[start + length :]
        written.append(_write_frame(first, payload))
        return True

    def _pass_on(self, piece: bytes, written: list[bytes]) -> None:
        payload = self._message.feed(piece)
        ends = self._final and not self._left
        if ends:
            payload += self._message.flush()
        if payload or ends:
            written.append(_write_frame(self._opcode | (_FINAL if ends else 0), payload))
            self._opcode = _CONTINUATION
        self._within = not ends


def _write_frame(first: int, payload: bytes) -> bytes:
    length = len(payload)
    if length < _TWO_BYTES:
        head = bytes((first, length))
    elif length < 1 << 16:
        head = bytes((first, _TWO_BYTES)) + length.to_bytes(2, "big")
    else:
        head = bytes((first, _EIGHT_BYTES)) + length.to_bytes(8, "big")
    return head + payload
