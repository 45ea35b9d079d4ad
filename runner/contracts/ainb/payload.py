"""Bytes in JSON: base64 on the wire, as the contract has it.

The standard alphabet, padded, without line breaks. A reader also takes an array of integers from 0 to 255.
"""

from __future__ import annotations

import binascii
from typing import Any

_QUANTUM = 4  # characters that stand for three bytes


class BadPayload(ValueError):
    """What is wrong with a value: the second half of a sentence."""


def encode(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def decode(value: Any) -> bytes:
    """The bytes of a value from the wire. Bytes are returned as they are: a dialect may have decoded them in
    a thread. Raises BadPayload."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _decode_text(value)
    if isinstance(value, list):
        return _decode_integers(value)
    raise BadPayload("must be base64 text or an array of integers from 0 to 255")


def _decode_text(text: str) -> bytes:
    if len(text) % _QUANTUM:
        raise BadPayload("is not base64 with its padding")
    try:
        raw = text.encode("ascii")
        data = binascii.a2b_base64(raw, strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise BadPayload("is not base64 of the standard alphabet") from None
    # The strict mode of Python 3.11 lets bits behind the last byte pass. They stand in the last characters.
    tail = raw[-_QUANTUM:]
    if tail.endswith(b"=") and binascii.b2a_base64(binascii.a2b_base64(tail), newline=False) != tail:
        raise BadPayload("is base64 with bits behind the last byte")
    return data


def _decode_integers(values: list[Any]) -> bytes:
    # bytes() takes True for 1.
    if not all(type(each) is int for each in values):
        raise BadPayload("is an array with something other than integers")
    try:
        return bytes(values)
    except ValueError:
        raise BadPayload("is an array with an integer beyond 0 to 255") from None
