"""Messages that two readers of JSON would understand differently.

A plugin could show us one message and its host another. So `call` and `exec --inspect` refuse them alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sandbox.document.diagnostic import quoted

# Pieces of one line that are looked at. Time limits are not checked meanwhile.
_MOST_PIECES = 10_000

# Numbers are not needed here. Converting long ones is slow, and CPython refuses integers of 4301 digits.
_DECODER = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0.0)


def two_kinds(message: Mapping[str, Any]) -> str:
    """Returns why a message of JSON-RPC is more than one of request, result and error, or ''."""
    kinds = [key for key in ("method", "result", "error") if message.get(key) not in (None, "")]
    return f"a message with both {kinds[0]} and {kinds[1]}" if len(kinds) > 1 else ""


def odd_key(table: Any, words: frozenset[str]) -> str:
    """Returns why hosts could find different values for one of `words` in an object, or ''. Some hosts ignore
    case in keys, and some end a key at a NUL."""
    if not isinstance(table, dict) or table.keys() <= words:
        return ""
    spelled = {word.casefold(): word for word in words}
    for key in table:
        plain = key.partition("\0")[0].casefold()
        if spelled.get(plain, key) != key:
            return f"a key that some hosts read as {quoted(spelled[plain])}: {quoted(key)}"
    return ""


def hides_message(raw: bytes, *, is_message: Callable[[Any], bool]) -> bool:
    """Whether a reader that also ends lines at a carriage return, the only such character that JSON allows
    between tokens, would find another message in a line of JSON. True also if the line has too many pieces
    to search."""
    if b"\r" not in raw.strip():
        return False
    pieces = raw.decode("utf-8", "replace").split("\r", _MOST_PIECES)
    try:
        return len(pieces) > _MOST_PIECES or any(is_message(_first_value(piece)) for piece in pieces)
    except RecursionError:  # the caller's stack is nearly full
        return True


def _first_value(text: str) -> Any:
    """The value that a piece of a line of JSON begins with, or None. In JSON a comma, a colon or a closing
    bracket follows it, and none of these begins a value."""
    try:
        return _DECODER.raw_decode(text.lstrip())[0]
    except json.JSONDecodeError:
        return None


def is_message(value: Any) -> bool:
    """Whether a value is a message, also for hosts that ignore case or end a key at a NUL."""
    if isinstance(value, list):
        return any(isinstance(each, dict) and is_message(each) for each in value)
    if not isinstance(value, dict):
        return False
    keys = set()
    for key, each in value.items():
        folded = key.partition("\0")[0].casefold()
        if folded == "method" and isinstance(each, str):
            return True
        keys.add(folded)
    return "id" in keys and ("result" in keys or "error" in keys)
