"""TOML: a scan for positions and bounds, then the standard parser."""

from __future__ import annotations

import re
import tomllib

from sandbox.document.positions import DEPTH_LIMIT, WORD_LIMIT, Fault, Positions, duplicate
from sandbox.spec import KeyPath

# Possessive throughout (the *+): see json.py.
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)\Z")


def parse(text: str, stop: int | None) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        match = _PLACE.search(said)
        message = said[: match.start()] if match else said
        place = (int(match[1]), int(match[2])) if match and match[1] else None
        end = len(text) if stop is None else stop
        raise Fault(end, "toml_syntax", message[:1].lower() + message[1:], place=place) from None
    except (ValueError, RecursionError, OverflowError) as error:
        # Values that the syntax allows and Python cannot hold, such as the date 2024-13-01.
        raise Fault(0, "toml_syntax", f"a value cannot be represented: {error}", place=(0, 0)) from None


_BLANK = re.compile(r"[ \t]*+")
_WHITE = re.compile(r"[ \t\r\n]*+")
_COMMENT = re.compile(r"[ \t\r\n]*+#[^\n]*+")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]++")
_WORD = re.compile(r"[^,\]\[{}#\n\"'=]++")
_PLAIN_BASIC = re.compile(r'"[^"\\\n]*+"')
_LITERAL = re.compile(r"'[^'\n]*+'")
# In a string: an escape, or its end. A string of one line has no line break.
_IN_BASIC = re.compile(r'\\[^\n]|["\n]')
_IN_LONG_BASIC = re.compile(r'\\.|"""', re.DOTALL)


def skip_space(text: str, at: int) -> int:
    """The offset after blanks, line breaks and comments."""
    while found := _COMMENT.match(text, at):
        at = found.end()
    return _match_end(_WHITE, text, at)


def string_end(text: str, at: int) -> int | None:
    """The offset after the string of any kind that starts at `at`. None: it is not closed."""
    if text.startswith('"""', at):
        for found in _IN_LONG_BASIC.finditer(text, at + 3):
            if found[0] == '"""':
                return _quotes_end(text, found.end())
        return None
    if text.startswith("'''", at):
        closing = text.find("'''", at + 3)
        return None if closing < 0 else _quotes_end(text, closing + 3)
    return _line_string_end(text, at)


def _quotes_end(text: str, at: int) -> int:
    """The offset after the closing quotes of a long string. Up to two more quotes before them belong to the
    string."""
    quote = text[at - 1]
    return at + (2 if text.startswith(quote * 2, at) else text.startswith(quote, at))


def _line_string_end(text: str, at: int) -> int | None:
    """As `string_end`, for the two kinds that a key may be: `""` and `''` are empty strings here."""
    plain = _PLAIN_BASIC.match(text, at) or _LITERAL.match(text, at)
    if plain is not None:
        return plain.end()
    if not text.startswith('"', at):
        return None
    for found in _IN_BASIC.finditer(text, at + 1):
        if found[0] == '"':
            return found.end()
        if found[0] == "\n":
            return None
    return None


def scan(text: str) -> Positions:
    """Find the positions in a TOML document. Stops at the first syntax error, which the real parser
    reports."""
    seen = Positions()
    arrays: dict[KeyPath, int] = {}  # arrays of tables: index of the last one
    values: set[KeyPath] = set()  # keys assigned with "=": only these can be duplicates
    table: KeyPath = ()
    at, size = 0, len(text)
    while True:
        at = skip_space(text, at)
        if at >= size:
            return seen
        if text[at] == "[":
            double = text.startswith("[[", at)
            start = at
            segments, at = _key(text, at + (2 if double else 1))
            if not segments or not text.startswith("]]" if double else "]", at):
                return seen.stopped(at)
            at += 2 if double else 1
            seen.value(start, len(segments))
            seen.key(start, len(segments), 0)
            table = ()
            for number, (name, offset) in enumerate(segments):
                table = (*table, name)
                seen.offsets.setdefault(table, offset)
                if double and number == len(segments) - 1:
                    arrays[table] = arrays.get(table, -1) + 1
                    table = (*table, arrays[table])
                    seen.offsets[table] = offset
                elif table in arrays:
                    table = (*table, arrays[table])
        else:
            after = _pair(text, at, table, seen, values)
            if after is None:
                return seen
            at = after
        # Nothing but a comment may follow on the line.
        at = _match_end(_BLANK, text, at)
        if at < size and text[at] not in "\r\n#":
            return seen.stopped(at)


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _key(text: str, at: int) -> tuple[list[tuple[str, int]], int]:
    """A dotted key as (segment, offset) pairs, and the offset after it; [] if there is no key."""
    segments: list[tuple[str, int]] = []
    while True:
        at = _match_end(_BLANK, text, at)
        bare = _BARE_KEY.match(text, at)
        end = bare.end() if bare else _line_string_end(text, at)
        if end is None:
            return [], at
        if end - at > WORD_LIMIT:
            message = f"a key of {end - at} characters, the limit is {WORD_LIMIT}"
            raise Fault(at, "key_too_long", message)
        segments.append((_unquoted(text[at:end]), at))
        if len(segments) > DEPTH_LIMIT:
            raise Fault(at, "too_deep", f"the document is nested deeper than {DEPTH_LIMIT} levels")
        at = _match_end(_BLANK, text, end)
        if not text.startswith(".", at):
            return segments, at
        at += 1


def _unquoted(token: str) -> str:
    if token[0] == "'":
        return token[1:-1]
    if token[0] != '"':
        return token
    if "\\" not in token:
        return token[1:-1]
    try:
        value = tomllib.loads(f"k={token}")["k"]
    except tomllib.TOMLDecodeError:
        return token
    return str(value)


def _pair(text: str, at: int, table: KeyPath, seen: Positions, values: set[KeyPath]) -> int | None:
    """Scan `key = value` with everything inside the value. Returns the offset after it."""
    inside: list[tuple[str, KeyPath, int]] = []  # (closer, path, index of the next item) of open containers
    assigned = _assignment(text, at, table, seen, values)
    while assigned is not None:
        path, at = assigned
        seen.value(at, len(path))
        opening = text.startswith(("[", "{"), at)
        if opening:
            seen.depth(at, len(path) + 1)
            inside.append(("]" if text[at] == "[" else "}", path, 0))
            at += 1
        else:
            end = _scalar(text, at)
            if end is None:
                seen.stopped(at)
                return None
            at = end
        while True:
            if not inside:
                return at
            closer, container, index = inside[-1]
            at = skip_space(text, at)
            if not opening:
                if text.startswith(",", at):
                    at = skip_space(text, at + 1)
                elif not text.startswith(closer, at):
                    seen.stopped(at)
                    return None
            opening = False
            if not text.startswith(closer, at):
                break
            inside.pop()
            at += 1
        if closer == "]":
            inside[-1] = (closer, container, index + 1)
            assigned = (*container, index), at
            seen.offsets[assigned[0]] = at
        else:
            assigned = _assignment(text, at, container, seen, values)
    return None


def _assignment(
    text: str, at: int, table: KeyPath, seen: Positions, values: set[KeyPath]
) -> tuple[KeyPath, int] | None:
    """Scan `a.b =`. Returns the full path and the offset of the value."""
    segments, after = _key(text, at)
    if not segments or not text.startswith("=", after):
        seen.stopped(after)
        return None
    seen.key(at, len(segments), len(table))
    seen.depth(at, len(table) + len(segments))
    path = table
    for name, offset in segments:
        path = (*path, name)
        seen.offsets.setdefault(path, offset)
    if path in values:
        raise duplicate(segments[-1][1], path[-1])
    values.add(path)
    return path, _match_end(_BLANK, text, after + 1)


def _scalar(text: str, at: int) -> int | None:
    if text.startswith(("'", '"'), at):
        end = string_end(text, at)
        if end is None:
            raise Fault(at, "toml_syntax", "this string is not closed")
        return end
    found = _WORD.match(text, at)
    if found is not None and len(found[0]) > WORD_LIMIT:
        length = len(found[0])
        raise Fault(at, "number_too_large", f"a word of {length} characters, the limit is {WORD_LIMIT}")
    return found.end() if found else None
