"""Changes that can be made to a text, and their effect on the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from sandbox.spec import KeyPath


class SetWord(NamedTuple):
    """Replace a scalar by a string."""

    keys: KeyPath
    word: str
    # How to write `word` in the text; '': as `encode_word` does. Restores the original spelling.
    as_written: str = ""


class SetNull(NamedTuple):
    """Replace a list by null."""

    keys: KeyPath


class Prepend(NamedTuple):
    """Insert strings before an item of a list. For the first position, the list may also be empty or null."""

    keys: KeyPath
    words: tuple[str, ...]
    before: int = 0


class DropFirst(NamedTuple):
    """Remove the first items of a list."""

    keys: KeyPath
    number: int


class InsertList(NamedTuple):
    """Insert a key with a list of strings, after a key of the same mapping."""

    after: KeyPath
    key: str
    words: tuple[str, ...]


class DeleteKey(NamedTuple):
    keys: KeyPath


class RenameKeys(NamedTuple):
    """Rename keys of a mapping, all at once. Values and order stay."""

    keys: KeyPath  # of the mapping
    names: tuple[tuple[str, str], ...]  # the old one and the new one


class SwapEntries(NamedTuple):
    """Put entries of a mapping in the place of others. The new ones stand where the first old one stood. Only
    for JSON."""

    keys: KeyPath  # of the mapping
    old: tuple[str, ...]
    new: tuple[tuple[str, str, Any], ...]  # of each its name, the text of its value, and the value


Change = SetWord | SetNull | Prepend | DropFirst | InsertList | DeleteKey | RenameKeys | SwapEntries


def apply_changes(data: Any, changes: Iterable[Change]) -> Any:
    """Return the data after the changes. `data` itself is not changed; what is changed is copied once."""
    copies = _Copies()
    for change in changes:
        match change:
            case SetWord(keys, word):
                data = copies.replace(data, keys, word)
            case SetNull(keys):
                data = copies.replace(data, keys, None)
            case Prepend(keys, words, before):
                items = _at(data, keys) or []
                data = copies.replace(data, keys, [*items[:before], *words, *items[before:]])
            case DropFirst(keys, number):
                data = copies.replace(data, keys, _at(data, keys)[number:])
            case InsertList(after, key, words):
                around = dict(_at(data, after[:-1]))
                around[key] = list(words)
                data = copies.replace(data, after[:-1], around)
            case DeleteKey(keys):
                around = {name: value for name, value in _at(data, keys[:-1]).items() if name != keys[-1]}
                data = copies.replace(data, keys[:-1], around)
            case RenameKeys(keys, names):
                new = dict(names)
                around = {new.get(name, name): value for name, value in _at(data, keys).items()}
                data = copies.replace(data, keys, around)
            case SwapEntries(keys, old, entries):
                around = {name: value for name, value in _at(data, keys).items() if name not in old}
                around.update((name, value) for name, _, value in entries)
                data = copies.replace(data, keys, around)
    return data


class _Copies:
    """Lists and mappings that were already copied, and may be changed."""

    def __init__(self) -> None:
        self._own: dict[int, Any] = {}  # by id; the reference keeps the id from being reused

    def replace(self, data: Any, keys: KeyPath, value: Any) -> Any:
        if not keys:
            return value
        if id(data) not in self._own:
            data = list(data) if isinstance(data, list) else dict(data)
            self._own[id(data)] = data
        data[keys[0]] = self.replace(data[keys[0]], keys[1:], value)
        return data


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and have equal types: in Python, 1 == 1.0 == True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def _at(data: Any, keys: KeyPath) -> Any:
    for key in keys:
        data = data[key]
    return data
