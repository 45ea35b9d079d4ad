"""Options whose value is JSON: on the command line itself, in a file, or on stdin."""

from __future__ import annotations

import os
import sys
from typing import Any

# Every contract has a lower limit for what it sends.
_MOST_BYTES = 64 << 20


def read_json_option(option: str, word: str | None) -> Any:
    """Returns the value, parsed by the rules for plugins' JSON; None if the option was not given. Raises
    ValueError."""
    if word is None:
        return None
    from runner.protocol import wire

    if word == "-" or word.startswith("@"):
        try:
            if word == "-":
                raw = sys.stdin.buffer.read(_MOST_BYTES + 1)
            else:
                with open(word[1:], "rb") as file:
                    raw = file.read(_MOST_BYTES + 1)
            if len(raw) > _MOST_BYTES:
                raise ValueError(f"{option} {word}: it has more than {_MOST_BYTES >> 20} MiB")
        except OSError as error:
            raise ValueError(f"{option} {word}: {error.strerror}") from None
    else:
        raw = os.fsencode(word)
    try:
        return wire.decode(raw)
    except wire.WireFault as fault:
        if fault.cause != "bad_json":
            raise ValueError(f"{option}: this JSON cannot be used: {fault.detail}") from None
        raise ValueError(f"{option}: this is not JSON: {fault.detail}{_json_hint(option, word)}") from None


def _json_hint(option: str, word: str) -> str:
    """A hint for a value that is not JSON."""
    if word == "-" or word.startswith("@"):
        return ""
    if len(word) < 4096 and "\0" not in word and os.path.exists(word):
        return f"; to read the file of that name write {option} @{word}"
    if word[:1].isalpha():
        return """; write text as '"text"', and a file as @FILE"""
    return "; write a file as @FILE"
