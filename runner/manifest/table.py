"""Reads one table of a document whose types may be wrong.

The rules run even if the document has faults, so that one pass finds all of them. A value of the wrong type
has been reported already (sandbox/document/model.py) and is treated as absent here.
"""

from __future__ import annotations

from sandbox.spec import KeyPath
from sandbox.speed.value import NamedTuple


class Item(NamedTuple):
    """A string, and the keys that lead to it."""

    keys: KeyPath
    text: str


class Table:
    """One table, and the keys that lead to it. An absent table reads as an empty one."""

    __slots__ = ("data", "keys")

    def __init__(self, data: object, keys: KeyPath = ()) -> None:
        self.data: dict[str, object] = data if isinstance(data, dict) else {}
        self.keys = keys

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def at(self, name: str) -> KeyPath:
        return (*self.keys, name)

    def table(self, name: str) -> Table:
        return Table(self.data.get(name), self.at(name))

    def tables(self, name: str) -> list[Table]:
        return [Table(value, (*self.at(name), index)) for index, value in self._list(name)]

    def string(self, name: str) -> str | None:
        value = self.data.get(name)
        return value if isinstance(value, str) else None

    def strings(self, name: str) -> list[Item]:
        return [
            Item((*self.at(name), index), value)
            for index, value in self._list(name)
            if isinstance(value, str)
        ]

    def pairs(self, name: str) -> list[tuple[str, Item]]:
        """The entries of a table of strings, such as an environment."""
        table = self.table(name)
        return [
            (key, Item(table.at(key), value)) for key, value in table.data.items() if isinstance(value, str)
        ]

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name)
        return value if isinstance(value, bool) else default

    def integer(self, name: str) -> int | None:
        value = self.data.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _list(self, name: str) -> list[tuple[int, object]]:
        value = self.data.get(name)
        return list(enumerate(value)) if isinstance(value, list) else []
