"""Where each value of a document stands in its text, from its first character to behind its last."""

from __future__ import annotations

from typing import Literal

from sandbox.spec import KeyPath
from sandbox.speed.value import NamedTuple

# How a file is written. "jsonc" is JSON with comments and trailing commas.
EditSyntax = Literal["json", "jsonc", "toml", "yaml"]
SpanKind = Literal["scalar", "list", "map"]


class Span(NamedTuple):
    start: int  # of the value
    end: int
    key_start: int  # of its key; of an item of a list: as `start`
    key_end: int = 0
    kind: SpanKind = "scalar"
    # Whether lines make it, and not brackets: a list or mapping of YAML, a table of TOML.
    block: bool = False
    odd: str = ""  # why it cannot be changed: "it has an anchor"


Spans = dict[KeyPath, Span]


class EditRefused(Exception):
    """The text cannot be changed as wanted. The message says why, `offset` where."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.message, self.offset = message, offset


def children(spans: Spans) -> dict[KeyPath, list[KeyPath]]:
    """The keys or items of each mapping or list, in the order of the text."""
    found: dict[KeyPath, list[KeyPath]] = {}
    for keys in sorted(spans, key=lambda each: spans[each].key_start):
        if keys:
            found.setdefault(keys[:-1], []).append(keys)
    return found
