"""JSON, strictly: a scan for positions and bounds, then the standard parser."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from sandbox.document.diagnostic import quoted
from sandbox.document.positions import VALUE_LIMIT, WORD_LIMIT, Fault, Positions, duplicate

_MESSAGES = {
    "Expecting value": ("a value is missing here", "trailing commas and comments are not JSON"),
    "Expecting property name enclosed in double quotes": (
        "a key in double quotes is needed here",
        "trailing commas, comments and single quotes are not JSON",
    ),
    "Illegal trailing comma before end of object": ("a comma stands before the closing brace", "remove it"),
    "Illegal trailing comma before end of array": ("a comma stands before the closing bracket", "remove it"),
    "Expecting ',' delimiter": ("a comma or the closing bracket is missing here", ""),
    "Expecting ':' delimiter": ("a colon is missing after the key", ""),
    "Extra data": ("there is text after the end of the document", ""),
    "Unterminated string starting at": ("this string is not closed", ""),
    "Invalid control character at": ("a string contains a raw control character", "write it as \\n or \\t"),
    "Invalid \\escape": ("this backslash escape does not exist in JSON", "write a backslash as \\\\"),
    "Invalid \\uXXXX escape": ("\\u needs four hexadecimal digits", ""),
}


def parse(text: str) -> object:
    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        said, at = _trailing_comma(text, error.msg, error.pos)
        message, hint = _MESSAGES.get(said, (said[:1].lower() + said[1:], ""))
        raise Fault(at, "json_syntax", message, hint) from None
    except (ValueError, RecursionError, OverflowError) as error:
        # The scan reports these with their position. This is for what it does not know.
        raise Fault(0, "json_syntax", f"a value cannot be represented: {error}", place=(0, 0)) from None


def _trailing_comma(text: str, message: str, at: int) -> tuple[str, int]:
    """Report a trailing comma with the same message and offset in every Python version.

    Since 3.13 the parser names the comma. Before, it expected a key or value at the bracket after it.
    """
    if message.startswith("Illegal trailing comma"):
        found = _SPACE.match(text, at + 1)
        return message, found.end() if found else at
    if message.startswith("Expecting ") and text[:at].rstrip(" \t\n\r").endswith(","):
        if text.startswith("}", at):
            return "Illegal trailing comma before end of object", at
        if text.startswith("]", at):
            return "Illegal trailing comma before end of array", at
    return message, at


# Possessive throughout (the *+): a plain * keeps a backtracking point for each repetition. That costs memory
# for each character and, on a string that is never closed, quadratic time.
# Only a set of characters is repeated, never a group: Python before 3.11.5 matches a possessive group wrongly
# if there is an alternative inside (CPython issue 106052).
_SPACE = re.compile(r"[ \t\n\r]*+")
_CONSTANTS = ("NaN", "Infinity", "-Infinity")
_WORD = re.compile(r"[^\s,:\[\]{}\"]++")
_PLAIN_STRING = re.compile(r'"[^"\\]*+"')
_IN_STRING = re.compile(r'\\.|"', re.DOTALL)  # in a string: an escape, or the closing quote


def string_end(text: str, at: int) -> int | None:
    """The offset after the string that starts at `at`. None: there is no string, or it is not closed."""
    plain = _PLAIN_STRING.match(text, at)
    if plain is not None:
        return plain.end()
    if not text.startswith('"', at):
        return None
    for found in _IN_STRING.finditer(text, at + 1):
        if found[0] == '"':
            return found.end()
    return None


def scan(text: str, most_values: int = VALUE_LIMIT) -> Positions:
    """Find the positions in a JSON document. Stops at the first syntax error, which the real parser
    reports."""
    seen = Positions(most_values)
    path: list[str | int] = []
    closers: list[str] = []  # of the open containers; path has one key or index for each
    at, size = 0, len(text)

    def skip(offset: int) -> int:
        found = _SPACE.match(text, offset)
        return found.end() if found else offset

    def key(offset: int) -> int | None:
        """Read `"key" :`, set the last path element, and return the offset of the value."""
        end = string_end(text, offset)
        if end is None:
            return None
        name = _unescaped(text[offset:end])
        colon = skip(end)
        if name is None or not text.startswith(":", colon):
            return None
        path[-1] = name
        place = tuple(path)
        if place in seen.offsets:
            raise duplicate(offset, name)
        seen.offsets[place] = offset
        return skip(colon + 1)

    at = skip(at)
    while at < size:
        # A value starts here.
        if closers and closers[-1] == "]":
            seen.offsets[tuple(path)] = at
        seen.value(at, len(closers))
        character = text[at]
        if character in "[{":
            closers.append("]" if character == "[" else "}")
            seen.depth(at, len(closers))
            at = skip(at + 1)
            path.append(0)
            if not text.startswith(closers[-1], at):
                if character == "{":
                    after = key(at)
                    if after is None:
                        return seen.stopped(at)
                    at = after
                continue
        elif character == '"':
            end = string_end(text, at)
            if end is None:
                return seen.stopped(at)
            at = skip(end)
        else:
            word = _WORD.match(text, at)
            if word is None:
                return seen.stopped(at)
            _check_word(word[0], at)
            at = skip(word.end())
        # A value ended here: close containers, or go on after a comma.
        while closers and text.startswith(closers[-1], at):
            closers.pop()
            path.pop()
            at = skip(at + 1)
        if not closers and at == size:
            return seen
        if not closers or not text.startswith(",", at):
            return seen.stopped(at)
        at = skip(at + 1)
        if closers[-1] == "]":
            last = path[-1]
            path[-1] = last + 1 if isinstance(last, int) else 0
        else:
            after = key(at)
            if after is None:
                return seen.stopped(at)
            at = after
    return seen.stopped(at)


def _unescaped(token: str) -> str | None:
    if "\\" not in token:
        return token[1:-1]
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _check_word(word: str, offset: int) -> None:
    if word.startswith(_CONSTANTS):  # the parser reads them also in front of other letters
        raise Fault(offset, "json_syntax", f"{quoted(word)} is not JSON")
    if len(word) > WORD_LIMIT:
        message = f"a number of {len(word)} characters, the limit is {WORD_LIMIT}"
        raise Fault(offset, "number_too_large", message)
    if ("e" in word or "E" in word or len(word) > 300) and word[-1:].isdigit():
        try:
            infinite = float(word) in (float("inf"), float("-inf"))
        except ValueError:
            return
        if infinite:
            raise Fault(offset, "number_too_large", f"the number {quoted(word)} is too large")
