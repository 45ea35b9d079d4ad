"""JSON with comments and trailing commas, as editors write their settings.

What JSON lacks is replaced by spaces, so every other character keeps its offset. The rest is read as strictly
as any JSON.
"""

from __future__ import annotations

import re

from sandbox.document import json as strict
from sandbox.document.positions import VALUE_LIMIT, Fault
from sandbox.spec import KeyPath

# Possessive, and only a set of characters is repeated: see json.py.
_SPACE = re.compile(r"[ \t\n\r]*+")
_WORD = re.compile(r"[^\s,:\[\]{}\"/]++")
_REST_OF_LINE = re.compile(r"[^\n\r]*+")
_NOT_A_BREAK = re.compile(r"[^\n\r]")
_STRICT_HINTS = ("trailing commas", "remove it")  # of json.py, about what is allowed here


def parse(text: str, most_values: int = VALUE_LIMIT) -> tuple[object, dict[KeyPath, int]]:
    """The data, and the offset of each key and list item. Raises Fault."""
    plain = without_comments(text)
    seen = strict.scan(plain, most_values)
    try:
        data = strict.parse(plain)
    except Fault as fault:
        if fault.hint.startswith(_STRICT_HINTS):
            fault.hint = ""
        raise
    if seen.stop is not None:
        raise Fault(seen.stop, "json_syntax", "the text from here on cannot be read")
    return data, seen.offsets


def without_comments(text: str) -> str:
    """The same document as JSON, of the same length. Text that is not understood stays as it is, for the
    parser to complain about. Raises Fault if a comment is not closed."""
    kept: list[str] = []
    at, size, done = 0, len(text), 0
    last = ""  # the last character that means something
    comma = -1  # where the last trailing comma may be

    def blank(start: int, end: int) -> None:
        nonlocal done
        kept.append(text[done:start])
        kept.append(_NOT_A_BREAK.sub(" ", text[start:end]))
        done = end

    # A trailing comma is known as one only at the bracket behind it, so comments between them wait.
    comments: list[tuple[int, int]] = []

    def settle(trailing: bool) -> None:
        nonlocal comma
        if trailing and comma >= 0:
            blank(comma, comma + 1)
        for start, end in comments:
            blank(start, end)
        comments.clear()
        comma = -1

    while True:
        found = _SPACE.match(text, at)
        at = found.end() if found else at
        if at >= size:
            break
        character = text[at]
        if text.startswith("//", at):
            line = _REST_OF_LINE.match(text, at)
            end = line.end() if line else size
            comments.append((at, end))
            at = end
            continue
        if text.startswith("/*", at):
            closed = text.find("*/", at + 2)
            if closed < 0:
                raise Fault(at, "json_syntax", "this comment is not closed", "end it with */")
            comments.append((at, closed + 2))
            at = closed + 2
            continue
        settle(character in "]}")
        if character == '"':
            closing = strict.string_end(text, at)
            if closing is None:
                break
            at = closing
        elif character in ",:[]{}":
            # "[,]" and "[1,,]" are as wrong here as in JSON.
            if character == "," and last not in ("", ",", ":", "[", "{"):
                comma = at
            at += 1
        else:
            word = _WORD.match(text, at)
            if word is None:
                break
            at = word.end()
        last = character
    settle(False)
    kept.append(text[done:])
    return "".join(kept)
