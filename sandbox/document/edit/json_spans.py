"""Spans of a JSON text, with or without comments and trailing commas."""

from __future__ import annotations

import json
import re

from sandbox.document.diagnostic import quoted
from sandbox.document.edit.span import EditRefused, Span, Spans
from sandbox.document.json import string_end
from sandbox.document.positions import DEPTH_LIMIT
from sandbox.spec import KeyPath

# Possessive, see sandbox/document/json.py.
_SPACE = re.compile(r"[ \t\n\r]*+")
_LINE_COMMENT = re.compile(r"//[^\n]*+")
_WORD = re.compile(r"[^\s,:\[\]{}\"/]++")


def read(text: str) -> tuple[object, Spans]:
    """Raises EditRefused."""
    reader = _JsonSpans(text)
    at = reader.skip(0)
    data, end = reader.value((), at, at, at)
    if reader.skip(end) != len(text):
        raise EditRefused("there is text after the end of the document", end)
    return data, reader.spans


class _JsonSpans:
    def __init__(self, text: str) -> None:
        self.text = text
        self.spans: Spans = {}

    def skip(self, at: int) -> int:
        """The offset after blanks and comments."""
        while True:
            found = _SPACE.match(self.text, at)
            at = found.end() if found else at
            if self.text.startswith("//", at):
                comment = _LINE_COMMENT.match(self.text, at)
                at = comment.end() if comment else at
            elif self.text.startswith("/*", at):
                end = self.text.find("*/", at + 2)
                if end < 0:
                    raise EditRefused("this comment is not closed", at)
                at = end + 2
            else:
                return at

    def value(self, keys: KeyPath, at: int, key_start: int, key_end: int) -> tuple[object, int]:
        if len(keys) > DEPTH_LIMIT:
            raise EditRefused(f"the document is nested deeper than {DEPTH_LIMIT} levels", at)
        if self.text.startswith("{", at):
            self.spans[keys] = Span(at, at, key_start, key_end, "map")
            data, end = self._members(keys, at)
        elif self.text.startswith("[", at):
            self.spans[keys] = Span(at, at, key_start, key_end, "list")
            data, end = self._items(keys, at)
        else:
            data, end = self._scalar(at)
            self.spans[keys] = Span(at, at, key_start, key_end)
        self.spans[keys] = self.spans[keys]._replace(end=end)
        return data, end

    def _members(self, keys: KeyPath, at: int) -> tuple[object, int]:
        found: dict[str, object] = {}
        at = self.skip(at + 1)
        while not self.text.startswith("}", at):
            name, end = self._scalar(at)
            if not isinstance(name, str):
                raise EditRefused("a key in double quotes is needed here", at)
            if name in found:
                raise EditRefused(f"the key {quoted(name)} appears twice; remove one of them", at)
            colon = self.skip(end)
            if not self.text.startswith(":", colon):
                raise EditRefused("a colon is missing after the key", end)
            found[name], after = self.value((*keys, name), self.skip(colon + 1), at, end)
            at = self._behind(after, "}")
        return found, at + 1

    def _items(self, keys: KeyPath, at: int) -> tuple[object, int]:
        found: list[object] = []
        at = self.skip(at + 1)
        while not self.text.startswith("]", at):
            value, after = self.value((*keys, len(found)), at, at, at)
            found.append(value)
            at = self._behind(after, "]")
        return found, at + 1

    def _behind(self, at: int, closer: str) -> int:
        """The offset of the next key or item, or of the closing bracket."""
        at = self.skip(at)
        if self.text.startswith(",", at):
            return self.skip(at + 1)
        if not self.text.startswith(closer, at):
            raise EditRefused("a comma or the closing bracket is missing here", at)
        return at

    def _scalar(self, at: int) -> tuple[object, int]:
        end = string_end(self.text, at)
        if end is None:
            word = _WORD.match(self.text, at)
            if word is None:
                raise EditRefused("a value is missing here", at)
            end = word.end()
        try:
            return json.loads(self.text[at:end]), end
        except (ValueError, RecursionError):
            raise EditRefused("this value cannot be read", at) from None
