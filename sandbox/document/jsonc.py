"""JSON with comments and trailing commas, as in the settings of editors.

Comments and trailing commas are replaced by spaces, so every other character keeps its offset. The result is
parsed as strict JSON.
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
_STRICT_HINTS = ("trailing commas", "remove it")  # hints of json.py that are wrong for this syntax


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
    """Convert to strict JSON of the same length. Other faults are left to the parser. Raises Fault if a
    comment is not closed."""
    kept: list[str] = []
    at, size, done = 0, len(text), 0
    last = ""  # the first character of the last token
    comma = -1  # the last comma, if it may be a trailing one

    def blank(start: int, end: int) -> None:
        nonlocal done
        kept.append(text[done:start])
        kept.append(_NOT_A_BREAK.sub(" ", text[start:end]))
        done = end

    # Whether a comma is a trailing one shows only at the next token, so comments after it are blanked then.
    comments: list[tuple[int, int]] = []

    def end_comma(trailing: bool) -> None:
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
        end_comma(character in "]}")
        if character == '"':
            closing = strict.string_end(text, at)
            if closing is None:
                break
            at = closing
        elif character in ",:[]{}":
            # "[,]" and "[1,,]" have no trailing comma: they are faults, as in JSON.
            if character == "," and last not in ("", ",", ":", "[", "{"):
                comma = at
            at += 1
        else:
            word = _WORD.match(text, at)
            if word is None:
                break
            at = word.end()
        last = character
    end_comma(False)
    kept.append(text[done:])
    return "".join(kept)
