"""Text files somebody else wrote: read and parsed within bounds, every complaint with its position.

A manifest is hostile until proven otherwise. Each way it can be unusable (too large, too deep, too
many values, not a file, not UTF-8, not its format) ends in one `DocumentError` holding one-line
`Diagnostic`s, after bounded time and memory. Bounds are checked by a scan of our own before the real
parser sees the text: tomllib recurses once per nested array and its work grows with the square of a
dotted key's length, so a limit applied afterwards would come too late.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from bisect import bisect_left
from typing import Literal, NamedTuple, NoReturn

from sandbox.spec import KeyPath

Format = Literal["toml", "json"]
Severity = Literal["error", "warning"]

SIZE_LIMIT = 1 << 20
DEPTH_LIMIT = 64
VALUE_LIMIT = 20_000
# A bare word is a number, a date, a boolean or an unquoted key. Below 4300 digits int() does not
# raise its own "exceeds the limit for integer string conversion".
WORD_LIMIT = 1024
# tomllib visits every prefix of a dotted key, each from the root: n segments below a header of h
# cost about n * (h + n) steps. A manifest of VALUE_LIMIT ordinary keys needs some 60 000.
KEY_WORK_LIMIT = 200_000

FAULT_CONTEXT = 1024

_INT_RANGE = range(-(1 << 63), 1 << 63)


def printable(text: str) -> str:
    """Text by strangers, safe on a terminal and on one line.

    Control characters, line separators, bidirectional overrides and lone surrogates (bytes of a file
    name that are not UTF-8, which print() would refuse) become escapes.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    if named is not None:
        return named
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quoted(text: str, limit: int = 60) -> str:
    """A stranger's word inside a sentence of ours: escaped, bounded, in quotes."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return f"'{printable(cut)}'"


class Diagnostic(NamedTuple):
    """One fault of one document. Line and column count from 1, in characters; 0 means none."""

    file: str
    line: int
    column: int
    rule: str
    message: str
    hint: str = ""
    severity: Severity = "error"

    @property
    def place(self) -> str:
        """`file:line:column`, as editors and terminals make it clickable."""
        file = printable(self.file)
        return f"{file}:{self.line}:{self.column}" if self.line else file

    def text(self) -> str:
        return f"{self.place}: {self.rule}: {printable(self.message)}"


class DocumentError(Exception):
    """The document cannot be used at all; `diagnostics` says why."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("; ".join(d.text() for d in diagnostics))
        self.diagnostics = diagnostics


class Document:
    """A parsed file. `where` turns the keys that lead to a value into a line and a column."""

    __slots__ = ("_ends", "_offsets", "_text", "data", "format", "path", "raw")

    def __init__(
        self,
        path: str,
        syntax: Format,
        raw: bytes,
        data: dict[str, object],
        text: str,
        offsets: dict[KeyPath, int],
    ) -> None:
        self.path = path
        self.format: Format = syntax
        self.raw = raw
        self.data = data
        self._text = text
        self._offsets = offsets
        self._ends: list[int] | None = None  # of lines, once somebody asks

    def where(self, keys: KeyPath) -> tuple[int, int]:
        """Line and column of a key (or of an item of an array).

        Keys that are not there answer with their deepest existing ancestor, so "missing" points at the
        table that lacks it.
        """
        while keys and keys not in self._offsets:
            keys = keys[:-1]
        offset = self._offsets[keys] if keys else 0
        if self._ends is None:
            self._ends = [found.start() for found in re.finditer("\n", self._text)]
        line = bisect_left(self._ends, offset)
        return line + 1, offset - (self._ends[line - 1] if line else -1)

    def diagnostic(
        self, keys: KeyPath, rule: str, message: str, hint: str = "", severity: Severity = "error"
    ) -> Diagnostic:
        line, column = self.where(keys)
        return Diagnostic(self.path, line, column, rule, message, hint, severity)


# --- reading -----------------------------------------------------------------------------------


def read_bounded(path: str, *, limit: int = SIZE_LIMIT) -> bytes:
    """The bytes of a regular file of at most `limit` bytes.

    The kind is asked before opening, because opening alone can block (a FIFO) or act (a tape, a
    watchdog), and again on what was opened, because the name may have been swapped in between.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        _require_regular(path, os.stat(path).st_mode)
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status.st_mode)
        if status.st_size > limit:
            raise _too_large(path, limit, f"it has {status.st_size} bytes")
        raw = b""
        # Files below /proc claim size 0; a growing file outgrows what fstat said.
        while len(raw) <= limit and (block := os.read(descriptor, limit + 1 - len(raw))):
            raw += block
    except OSError as error:
        raise _unreadable(path, error) from None
    finally:
        os.close(descriptor)
    if len(raw) > limit:
        raise _too_large(path, limit, f"it has more than {limit} bytes")
    return raw


def _too_large(path: str, limit: int, fact: str) -> DocumentError:
    return _file_error(path, "file_too_large", f"the file is too large: {fact}, the limit is {limit}")


def _file_error(path: str, rule: str, message: str, hint: str = "") -> DocumentError:
    return DocumentError(Diagnostic(path, 0, 0, rule, message, hint))


def _require_regular(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    kind = next((name for matches, name in kinds if matches(mode)), "no regular file")
    raise _file_error(path, "not_a_file", f"this is {kind}, a regular file is needed")


def _unreadable(path: str, error: OSError | ValueError) -> DocumentError:
    if isinstance(error, ValueError):
        return _file_error(path, "file_missing", "the path contains a NUL byte, so it names no file")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return _file_error(path, "file_missing", "there is no such file", "check the spelling of the path")
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = ""
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = f"uid {os.geteuid()} needs read permission on it and search permission on its directories"
    return _file_error(path, "file_unreadable", f"the file cannot be read: {reason}", hint)


# --- parsing -----------------------------------------------------------------------------------


def parse(path: str, raw: bytes, format: Format, *, limit: int = SIZE_LIMIT) -> Document:  # noqa: A002 (the word callers expect)
    """Bytes as a document, or DocumentError."""
    if len(raw) > limit:
        raise _too_large(path, limit, f"it has {len(raw)} bytes")
    text = _decode(path, raw)
    try:
        seen = _scan_toml(text) if format == "toml" else _scan_json(text)
        # What lies behind the stop was not measured, so the parser gets only enough to name the fault.
        known = text if seen.stop is None else text[: seen.stop + FAULT_CONTEXT]
        data = _parse_toml(known, seen.stop) if format == "toml" else _parse_json(text)
        if seen.stop is not None:
            raise _FaultError(seen.stop, f"{format}_syntax", "the text from here on cannot be read")
    except _FaultError as fault:
        line, column = fault.place or _line_column(text, fault.offset)
        raise DocumentError(Diagnostic(path, line, column, fault.rule, fault.message, fault.hint)) from None
    if not isinstance(data, dict):
        message = f"the document is {_kind(data)}, an object is needed"
        raise DocumentError(Diagnostic(path, 1, 1, "not_an_object", message, 'it has to start with "{"'))
    document = Document(path, format, raw, data, text, seen.offsets)
    _check_values(document)
    return document


def _decode(path: str, raw: bytes) -> str:
    if raw.startswith(b"\xef\xbb\xbf"):
        message = "the file starts with a byte order mark"
        raise DocumentError(
            Diagnostic(path, 1, 1, "byte_order_mark", message, "save it as UTF-8 without BOM")
        )
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        message = "the file is UTF-16, UTF-8 is needed"
        raise DocumentError(Diagnostic(path, 1, 1, "invalid_utf8", message, "save it as UTF-8 without BOM"))
    nul = raw.find(b"\0")
    if nul >= 0:
        line, column = _line_column(raw[:nul].decode("utf-8", "replace"), nul)
        message = f"there is a NUL byte at offset {nul}"
        raise DocumentError(Diagnostic(path, line, column, "nul_byte", message, "is this a text file?"))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        line, column = _line_column(before, len(before))
        message = f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8"
        raise DocumentError(
            Diagnostic(path, line, column, "invalid_utf8", message, "save the file as UTF-8")
        ) from None


class _FaultError(Exception):
    """A refusal on the way: by offset, or by the line and column another parser reported."""

    def __init__(
        self, offset: int, rule: str, message: str, hint: str = "", place: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.offset, self.rule, self.message, self.hint, self.place = offset, rule, message, hint, place


_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)\Z")


def _parse_toml(text: str, stop: int | None) -> object:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        match = _TOML_PLACE.search(said)
        message = said[: match.start()] if match else said
        place = (int(match[1]), int(match[2])) if match and match[1] else None
        end = len(text) if stop is None else stop
        raise _FaultError(end, "toml_syntax", _lower_first(message), place=place) from None
    except (ValueError, RecursionError, OverflowError) as error:
        # Dates such as 2024-13-01 and other values the syntax allows but Python cannot hold.
        raise _FaultError(0, "toml_syntax", f"a value cannot be represented: {error}", place=(0, 0)) from None


_JSON_MESSAGES = {
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


def _parse_json(text: str) -> object:
    import json

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        message, hint = _JSON_MESSAGES.get(error.msg, (_lower_first(error.msg), ""))
        raise _FaultError(error.pos, "json_syntax", message, hint) from None
    except (ValueError, RecursionError, OverflowError) as error:
        # The scan names these with their position; this is the belt.
        raise _FaultError(0, "json_syntax", f"a value cannot be represented: {error}", place=(0, 0)) from None


def _lower_first(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _kind(value: object) -> str:
    names: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
        type(None): "null",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _check_values(document: Document) -> None:
    """What both syntaxes allow and nothing after us can carry: NUL and half characters in strings (no
    argument, path or variable can hold them), and integers that do not fit 64 bits."""
    pending: list[tuple[KeyPath, object]] = [((), document.data)]
    while pending:
        keys, value = pending.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                _check_string(document, (*keys, key), key)
                pending.append(((*keys, key), item))
        elif isinstance(value, list):
            pending.extend(((*keys, index), item) for index, item in enumerate(value))
        elif isinstance(value, str):
            _check_string(document, keys, value)
        elif isinstance(value, int) and value not in _INT_RANGE:
            message = "this integer does not fit into 64 bits"
            raise DocumentError(document.diagnostic(keys, "number_too_large", message))


def _check_string(document: Document, keys: KeyPath, text: str) -> None:
    if "\0" in text:
        message = "a string contains the character NUL, which no path, argument or variable can hold"
        raise DocumentError(document.diagnostic(keys, "nul_character", message))
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        message = "a string contains half of a surrogate pair, which is no character"
        raise DocumentError(document.diagnostic(keys, "invalid_character", message))


# --- positions ---------------------------------------------------------------------------------


def _line_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


class _Positions:
    """Offsets by key path, and the bounds that hold while they are collected."""

    def __init__(self) -> None:
        self.offsets: dict[KeyPath, int] = {}
        self.values = 0
        self.key_work = 0
        self.stop: int | None = None  # where the scan met something it does not understand

    def stopped(self, offset: int) -> _Positions:
        self.stop = offset
        return self

    def value(self, offset: int, depth: int) -> None:
        self.values += 1
        if self.values > VALUE_LIMIT:
            raise _FaultError(offset, "too_many_values", f"the document has more than {VALUE_LIMIT} values")
        self.depth(offset, depth)

    def depth(self, offset: int, depth: int) -> None:
        if depth > DEPTH_LIMIT:
            raise _FaultError(offset, "too_deep", f"the document is nested deeper than {DEPTH_LIMIT} levels")

    def key(self, offset: int, segments: int, below: int) -> None:
        self.key_work += segments * (below + segments)
        if self.key_work > KEY_WORK_LIMIT:
            raise _FaultError(offset, "too_many_values", "the document has too many long dotted keys")


def _duplicate(offset: int, key: str | int) -> _FaultError:
    return _FaultError(
        offset, "duplicate_key", f"the key {quoted(str(key))} is there twice", "remove one of them"
    )


# Possessive throughout (the *+): a plain * keeps a way back for each repetition, which costs memory
# by the character and, on a string that is never closed, time by the square.
_JSON_SPACE = re.compile(r"[ \t\n\r]*+")
_JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_JSON_WORD = re.compile(r"[^\s,:\[\]{}\"]++")


def _scan_json(text: str) -> _Positions:
    """Positions of a JSON document. Stops at the first thing it does not understand: the real parser
    has a sentence for it."""
    seen = _Positions()
    path: list[str | int] = []
    closers: list[str] = []  # of the containers we are in; path has one key or index for each
    at, size = 0, len(text)

    def skip(offset: int) -> int:
        found = _JSON_SPACE.match(text, offset)
        return found.end() if found else offset

    def key(offset: int) -> int | None:
        """Reads `"key" :`, sets the last path element, returns the offset of the value."""
        found = _JSON_STRING.match(text, offset)
        if found is None:
            return None
        name = _json_unescaped(found[0])
        colon = skip(found.end())
        if name is None or not text.startswith(":", colon):
            return None
        path[-1] = name
        place = tuple(path)
        if place in seen.offsets:
            raise _duplicate(offset, name)
        seen.offsets[place] = offset
        return skip(colon + 1)

    at = skip(at)
    while at < size:
        # Here a value starts.
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
            string = _JSON_STRING.match(text, at)
            if string is None:
                return seen.stopped(at)
            at = skip(string.end())
        else:
            word = _JSON_WORD.match(text, at)
            if word is None:
                return seen.stopped(at)
            _check_json_word(word[0], at)
            at = skip(word.end())
        # Here a value ended: close, or go on behind a comma.
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


def _json_unescaped(token: str) -> str | None:
    if "\\" not in token:
        return token[1:-1]
    import json

    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _check_json_word(word: str, offset: int) -> None:
    if word in ("NaN", "Infinity", "-Infinity"):
        raise _FaultError(offset, "json_syntax", f"{word} is not JSON")
    if len(word) > WORD_LIMIT:
        message = f"a number of {len(word)} characters, the limit is {WORD_LIMIT}"
        raise _FaultError(offset, "number_too_large", message)
    if ("e" in word or "E" in word or len(word) > 300) and word[-1:].isdigit():
        try:
            infinite = float(word) in (float("inf"), float("-inf"))
        except ValueError:
            return
        if infinite:
            raise _FaultError(offset, "number_too_large", f"the number {quoted(word)} is too large")


_TOML_BLANK = re.compile(r"[ \t]*+")
_TOML_SPACE = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
_TOML_BARE_KEY = re.compile(r"[A-Za-z0-9_-]++")
_TOML_BASIC = re.compile(r'"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"')
_TOML_LITERAL = re.compile(r"'[^'\n]*+'")
_TOML_LONG_BASIC = re.compile(r'"""[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+"{3,5}', re.DOTALL)
_TOML_LONG_LITERAL = re.compile(r"'''[^']*+(?:'(?!'')[^']*+)*+'{3,5}")
_TOML_WORD = re.compile(r"[^,\]\[{}#\n\"'=]++")


def _scan_toml(text: str) -> _Positions:
    """Positions of a TOML document. Stops at the first thing it does not understand: the real parser
    has a sentence for it."""
    seen = _Positions()
    arrays: dict[KeyPath, int] = {}  # arrays of tables: index of the last one
    values: set[KeyPath] = set()  # what was assigned with "=": only these can be there twice
    table: KeyPath = ()
    at, size = 0, len(text)
    while True:
        at = _match_end(_TOML_SPACE, text, at)
        if at >= size:
            return seen
        if text[at] == "[":
            double = text.startswith("[[", at)
            start = at
            segments, at = _toml_key(text, at + (2 if double else 1))
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
            after = _toml_pair(text, at, table, seen, values)
            if after is None:
                return seen
            at = after
        # Nothing but a comment may follow on the line.
        at = _match_end(_TOML_BLANK, text, at)
        if at < size and text[at] not in "\r\n#":
            return seen.stopped(at)


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _toml_key(text: str, at: int) -> tuple[list[tuple[str, int]], int]:
    """A dotted key as (segment, offset) pairs and where it ends; no pairs if there is none."""
    segments: list[tuple[str, int]] = []
    while True:
        at = _match_end(_TOML_BLANK, text, at)
        found = _TOML_BARE_KEY.match(text, at) or _TOML_BASIC.match(text, at) or _TOML_LITERAL.match(text, at)
        if found is None:
            return [], at
        if len(found[0]) > WORD_LIMIT:
            message = f"a key of {len(found[0])} characters, the limit is {WORD_LIMIT}"
            raise _FaultError(at, "key_too_long", message)
        segments.append((_toml_unquoted(found[0]), at))
        if len(segments) > DEPTH_LIMIT:
            raise _FaultError(at, "too_deep", f"the document is nested deeper than {DEPTH_LIMIT} levels")
        at = _match_end(_TOML_BLANK, text, found.end())
        if not text.startswith(".", at):
            return segments, at
        at += 1


def _toml_unquoted(token: str) -> str:
    if token[0] == "'":
        return token[1:-1]
    if token[0] != '"':
        return token
    if "\\" not in token:
        return token[1:-1]
    import tomllib

    try:
        value = tomllib.loads(f"k={token}")["k"]
    except tomllib.TOMLDecodeError:
        return token
    return str(value)


def _toml_pair(text: str, at: int, table: KeyPath, seen: _Positions, values: set[KeyPath]) -> int | None:
    """`key = value` with everything inside the value; returns the offset behind it."""
    inside: list[tuple[str, KeyPath, int]] = []  # (closer, path, index of the next item) of open containers
    assigned = _toml_assignment(text, at, table, seen, values)
    while assigned is not None:
        path, at = assigned
        seen.value(at, len(path))
        opening = text.startswith(("[", "{"), at)
        if opening:
            seen.depth(at, len(path) + 1)
            inside.append(("]" if text[at] == "[" else "}", path, 0))
            at += 1
        else:
            end = _toml_scalar(text, at)
            if end is None:
                seen.stopped(at)
                return None
            at = end
        while True:
            if not inside:
                return at
            closer, container, index = inside[-1]
            at = _match_end(_TOML_SPACE, text, at)
            if not opening:
                if text.startswith(",", at):
                    at = _match_end(_TOML_SPACE, text, at + 1)
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
            assigned = _toml_assignment(text, at, container, seen, values)
    return None


def _toml_assignment(
    text: str, at: int, table: KeyPath, seen: _Positions, values: set[KeyPath]
) -> tuple[KeyPath, int] | None:
    """`a.b =`: the full path and the offset where its value starts."""
    segments, after = _toml_key(text, at)
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
        raise _duplicate(segments[-1][1], path[-1])
    values.add(path)
    return path, _match_end(_TOML_BLANK, text, after + 1)


def _toml_scalar(text: str, at: int) -> int | None:
    if text.startswith('"""', at):
        found = _TOML_LONG_BASIC.match(text, at)
    elif text.startswith("'''", at):
        found = _TOML_LONG_LITERAL.match(text, at)
    elif text.startswith('"', at):
        found = _TOML_BASIC.match(text, at)
    elif text.startswith("'", at):
        found = _TOML_LITERAL.match(text, at)
    else:
        found = _TOML_WORD.match(text, at)
        if found is not None and len(found[0]) > WORD_LIMIT:
            length = len(found[0])
            raise _FaultError(
                at, "number_too_large", f"a word of {length} characters, the limit is {WORD_LIMIT}"
            )
    if found is None and text[at : at + 1] in ("'", '"'):
        raise _FaultError(at, "toml_syntax", "this string is not closed")
    return found.end() if found else None
