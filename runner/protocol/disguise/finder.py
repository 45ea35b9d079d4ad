"""Finds secrets in a text, in every encoding that is recognised."""

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
    """Finds the secrets of one plugin. The needles are made when they are first used."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @cached_property
    def sought(self) -> tuple[Needles, Needles]:
        """Needles for texts and base64, and needles for hex."""
        return Needles(self._forms.texts, self._forms.base64), Needles(self._forms.hexes)

    @cached_property
    def _forms(self) -> Forms:
        return Forms(self._values)

    @property
    def longest(self) -> int:
        return self._forms.longest

    def find(self, data: bytes, *, at_end: bool = False) -> list[Span]:
        """Spans of the secrets in `data`. `at_end`: the text may break off inside of one."""
        texts, hexes = self.sought
        found: list[Span] = []
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES + self.longest]
            is_last = at_end and start + len(block) == len(data)
            digits = b""
            for view in views_of(block, at_end=is_last):
                reads = [(view, texts)]
                in_hex = hex_view(view)
                if in_hex.text != digits:  # it was searched already
                    digits = in_hex.text
                    reads.append((in_hex, hexes))
                for read, needles in reads:
                    for span in needles.find(read.text, at_end=is_last):
                        begin, end = read.map_back(*span)
                        found.append((start + begin, start + end))
        return found
