"""Where secrets stand in a text, however they are written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from runner.protocol.disguise.forms import Forms
from runner.protocol.disguise.needles import Needles, Span
from runner.protocol.disguise.views import hex_view, views_of

# Bytes that are searched at once, which bounds the memory that this takes.
_BLOCK_BYTES = 256 << 10


class SecretFinder:
    """What is looked for is made when it is first used."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @cached_property
    def sought(self) -> tuple[Needles, Needles]:
        """Texts, and what is looked for in hex."""
        return Needles(self._forms.texts, self._forms.base64), Needles(self._forms.hexes)

    @cached_property
    def _forms(self) -> Forms:
        return Forms(self._values)

    @property
    def longest(self) -> int:
        return self._forms.longest

    def find(self, data: bytes, *, at_end: bool = False) -> list[Span]:
        """Where secrets stand."""
        texts, hexes = self.sought
        found: list[Span] = []
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES + self.longest]
            is_last = at_end and start + len(block) == len(data)
            digits = b""
            for view in views_of(block, at_end=is_last):
                reads = [(view, texts)]
                in_hex = hex_view(view)
                if in_hex.text != digits:  # without line ends it is the same
                    digits = in_hex.text
                    reads.append((in_hex, hexes))
                for read, needles in reads:
                    for span in needles.find(read.text, at_end=is_last):
                        begin, end = read.place(*span)
                        found.append((start + begin, start + end))
        return found
