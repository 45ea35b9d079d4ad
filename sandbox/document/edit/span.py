"""Span: where a value of a document is in its text."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sandbox.spec import KeyPath

# "jsonc" is JSON with comments and trailing commas.
EditSyntax = Literal["json", "jsonc", "toml", "yaml"]
SpanKind = Literal["scalar", "list", "map"]


class Span(NamedTuple):
    start: int  # offset of the first character of the value
    end: int  # offset after its last character
    key_start: int  # of its key; for an item of a list the same as `start`
    key_end: int = 0
    kind: SpanKind = "scalar"
    # A list or mapping made of lines and not of brackets: a block of YAML, a table of TOML.
    block: bool = False
    obstacle: str = ""  # reason why it cannot be edited, such as "it has an anchor", or ''


Spans = dict[KeyPath, Span]


class EditRefused(Exception):
    """The text cannot be edited. The message says why, `offset` where."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.message, self.offset = message, offset


def children(spans: Spans) -> dict[KeyPath, list[KeyPath]]:
    """The key paths of the members of each mapping or list, in the order of the text."""
    found: dict[KeyPath, list[KeyPath]] = {}
    for keys in sorted(spans, key=lambda each: spans[each].key_start):
        if keys:
            found.setdefault(keys[:-1], []).append(keys)
    return found
