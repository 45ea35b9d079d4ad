"""The position of each value of a document, collected within limits.

The limits apply before the real parsers run: tomllib recurses once per nested array, and its work grows with
the square of a dotted key's length.
"""

from __future__ import annotations

from sandbox.document.diagnostic import quoted
from sandbox.spec import KeyPath

DEPTH_LIMIT = 64
VALUE_LIMIT = 20_000
# A bare word is a number, a date, a boolean or an unquoted key. Below 4300 digits int() does not
# raise its own "exceeds the limit for integer string conversion".
WORD_LIMIT = 1024
# tomllib visits every prefix of a dotted key, each from the root: n segments below a header of h
# cost about n * (h + n) steps. A manifest of VALUE_LIMIT ordinary keys needs some 60 000.
KEY_WORK_LIMIT = 200_000


class Fault(Exception):
    """A fault found while reading, with its offset, or with the line and column that another parser
    reported."""

    def __init__(
        self, offset: int, rule: str, message: str, hint: str = "", place: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.offset, self.rule, self.message, self.hint, self.place = offset, rule, message, hint, place


def line_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


class Positions:
    """Offsets by key path. Checks the limits while they are collected."""

    def __init__(self, most_values: int = VALUE_LIMIT) -> None:
        self.offsets: dict[KeyPath, int] = {}
        self._most_values = most_values
        self.values = 0
        self.key_work = 0
        self.stop: int | None = None  # where the scan met a syntax error

    def stopped(self, offset: int) -> Positions:
        self.stop = offset
        return self

    def value(self, offset: int, depth: int) -> None:
        self.values += 1
        if self.values > self._most_values:
            raise Fault(offset, "too_many_values", f"the document has more than {self._most_values} values")
        self.depth(offset, depth)

    def depth(self, offset: int, depth: int) -> None:
        if depth > DEPTH_LIMIT:
            raise Fault(offset, "too_deep", f"the document is nested deeper than {DEPTH_LIMIT} levels")

    def key(self, offset: int, segments: int, below: int) -> None:
        self.key_work += segments * (below + segments)
        if self.key_work > KEY_WORK_LIMIT:
            raise Fault(offset, "too_many_values", "the document has too many long dotted keys")


def duplicate(offset: int, key: str | int) -> Fault:
    return Fault(offset, "duplicate_key", f"the key {quoted(str(key))} appears twice", "remove one of them")
