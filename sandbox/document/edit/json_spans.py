"""Spans of a JSON text, with or without comments and trailing commas."""

from __future__ import annotations

import json
import re

from sandbox.document.edit.span import EditRefused, Span, SpanKind, Spans
from sandbox.document.json import parse, scan, string_end
from sandbox.document.jsonc import without_comments
from sandbox.document.positions import Fault
from sandbox.spec import KeyPath

# Possessive, see sandbox/document/json.py.
_SPACE = re.compile(r"[ \t\n\r]*+")
_WORD = re.compile(r"[^\s,:\[\]{}\"]++")
_KINDS: dict[str, SpanKind] = {"{": "map", "[": "list"}


def read(text: str) -> tuple[object, Spans]:
    """Raises EditRefused."""
    try:
        plain = without_comments(text)  # every other character keeps its offset
        seen = scan(plain, most_values=len(plain))
        data = parse(plain)
    except Fault as fault:
        raise EditRefused(fault.message, fault.offset) from None
    if seen.stop is not None:
        raise EditRefused("the text from here on cannot be read", seen.stop)
    reader = _JsonSpans(plain)
    start = reader.skip(0)
    reader.value((), start, start, start)
    return data, reader.spans


class _JsonSpans:
    """Scans a text that the real parser has accepted."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.spans: Spans = {}

    def skip(self, at: int) -> int:
        return self._behind(_SPACE, at)

    def value(self, keys: KeyPath, at: int, key_start: int, key_end: int) -> int:
        """Add the value at this offset and all that is in it. Returns the offset after it."""
        kind = _KINDS.get(self.text[at], "scalar")
        self.spans[keys] = Span(at, at, key_start, key_end, kind)  # before its members
        end = self._scalar_end(at) if kind == "scalar" else self._members(keys, at, kind)
        self.spans[keys] = self.spans[keys]._replace(end=end)
        return end

    def _members(self, keys: KeyPath, at: int, kind: SpanKind) -> int:
        number = 0
        at = self.skip(at + 1)
        while self.text[at] not in "]}":
            name: str | int = number
            start = end = at
            if kind == "map":
                end = self._scalar_end(at)
                name = json.loads(self.text[at:end])
                at = self.skip(self.skip(end) + 1)
            at = self.skip(self.value((*keys, name), at, start, end))
            if self.text[at] == ",":
                at = self.skip(at + 1)
            number += 1
        return at + 1

    def _scalar_end(self, at: int) -> int:
        return string_end(self.text, at) or self._behind(_WORD, at)

    def _behind(self, pattern: re.Pattern[str], at: int) -> int:
        found = pattern.match(self.text, at)
        return found.end() if found else at
