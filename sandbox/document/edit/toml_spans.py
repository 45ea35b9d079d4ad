"""Spans of a TOML text."""

from __future__ import annotations

import re
import tomllib

from sandbox.document.edit.span import EditRefused, Span, SpanKind, Spans
from sandbox.document.positions import DEPTH_LIMIT
from sandbox.document.toml import skip_space, string_end
from sandbox.spec import KeyPath

# Possessive, see sandbox/document/json.py.
_BLANK = re.compile(r"[ \t]*+")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]++")
_WORD = re.compile(r"[^,\]\[{}#\n\"'=]++")


def read(text: str) -> tuple[object, Spans]:
    """Raises EditRefused."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:
        raise EditRefused(f"this is not TOML: {error}") from None
    return data, _TomlSpans(text).read()


class _TomlSpans:
    """Scans a text that the real parser has accepted."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.spans: Spans = {}

    def read(self) -> Spans:
        table: KeyPath = ()
        arrays: dict[KeyPath, int] = {}  # arrays of tables: the index of the last one
        at = skip_space(self.text, 0)
        while at < len(self.text):
            if self.text[at] == "[":
                double = self.text.startswith("[[", at)
                names, end = self._key(at + (2 if double else 1))
                table = ()
                for number, name in enumerate(names):
                    table = (*table, name)
                    if double and number == len(names) - 1:
                        arrays[table] = arrays.get(table, -1) + 1
                        table = (*table, arrays[table])
                    elif table in arrays:
                        table = (*table, arrays[table])
                end = _behind(_BLANK, self.text, end) + (2 if double else 1)
                self.spans.setdefault(table, Span(at, end, at, end, "map", block=True))
                at = end
            else:
                at = self._pair(at, table)
            at = skip_space(self.text, at)
        return self.spans

    def _key(self, at: int) -> tuple[list[str], int]:
        """A dotted key, and the offset after its last part."""
        names: list[str] = []
        while True:
            at = _behind(_BLANK, self.text, at)
            bare = _BARE_KEY.match(self.text, at)
            end = bare.end() if bare else _quoted_end(self.text, at)
            if end is None:
                raise EditRefused("a key is missing here", at)
            word = self.text[at:end]
            names.append(word if bare else str(tomllib.loads(f"k={word}")["k"]))
            at = _behind(_BLANK, self.text, end)
            if not self.text.startswith(".", at):
                return names, end
            at += 1

    def _pair(self, at: int, table: KeyPath) -> int:
        names, key_end = self._key(at)
        equals = _behind(_BLANK, self.text, key_end)
        if not self.text.startswith("=", equals):
            raise EditRefused("an equals sign is missing after the key", equals)
        path = table
        for name in names[:-1]:
            path = (*path, name)
            self.spans.setdefault(path, Span(at, key_end, at, key_end, "map", block=True))
        return self._value((*path, names[-1]), _behind(_BLANK, self.text, equals + 1), at, key_end)

    def _value(self, keys: KeyPath, at: int, key_start: int, key_end: int) -> int:
        if len(keys) > DEPTH_LIMIT:
            raise EditRefused(f"the document is nested deeper than {DEPTH_LIMIT} levels", at)
        self.spans[keys] = Span(at, at, key_start, key_end)
        kind: SpanKind = "scalar"
        if self.text.startswith("[", at):
            end = self._items(keys, at)
            kind = "list"
        elif self.text.startswith("{", at):
            end = self._members(keys, at)
            kind = "map"
        else:
            end = self._scalar(at)
        self.spans[keys] = Span(at, end, key_start, key_end, kind)
        return end

    def _items(self, keys: KeyPath, at: int) -> int:
        number = 0
        at = skip_space(self.text, at + 1)
        while not self.text.startswith("]", at):
            at = skip_space(self.text, self._value((*keys, number), at, at, at))
            number += 1
            if self.text.startswith(",", at):
                at = skip_space(self.text, at + 1)
            elif not self.text.startswith("]", at):
                raise EditRefused("a comma or the closing bracket is missing here", at)
        return at + 1

    def _members(self, keys: KeyPath, at: int) -> int:
        at = skip_space(self.text, at + 1)
        while not self.text.startswith("}", at):
            at = skip_space(self.text, self._pair(at, keys))
            if self.text.startswith(",", at):
                at = skip_space(self.text, at + 1)
            elif not self.text.startswith("}", at):
                raise EditRefused("a comma or the closing brace is missing here", at)
        return at + 1

    def _scalar(self, at: int) -> int:
        if self.text.startswith(("'", '"'), at):
            end = string_end(self.text, at)
            if end is None:
                raise EditRefused("this string is not closed", at)
            return end
        found = _WORD.match(self.text, at)
        if found is None:
            raise EditRefused("a value is missing here", at)
        return at + len(found[0].rstrip())


def _quoted_end(text: str, at: int) -> int | None:
    """The offset after a quoted key. `""` is the empty key here, not the start of a long string."""
    if text.startswith(('""', "''"), at):
        return at + 2
    return string_end(text, at) if text.startswith(("'", '"'), at) else None


def _behind(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
