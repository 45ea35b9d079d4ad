"""What can be changed in a text, and what each change means for the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sandbox.spec import KeyPath
from sandbox.speed.value import NamedTuple


class SetWord(NamedTuple):
    """A scalar becomes another string."""

    keys: KeyPath
    word: str
    # As it is to be written, if that says the same as `word`: what stood there before.
    as_written: str = ""


class SetNull(NamedTuple):
    """A list becomes null."""

    keys: KeyPath


class Prepend(NamedTuple):
    """Strings before an item of a list. Before the first, the list may also be empty or null."""

    keys: KeyPath
    words: tuple[str, ...]
    before: int = 0


class DropFirst(NamedTuple):
    """A list without its first items."""

    keys: KeyPath
    number: int


class InsertList(NamedTuple):
    """A key with a list of strings, behind a key of the same mapping."""

    after: KeyPath
    key: str
    words: tuple[str, ...]


class DeleteKey(NamedTuple):
    keys: KeyPath


class RenameKeys(NamedTuple):
    """Keys of a mapping get other names, all at once. Their values and their order stay."""

    keys: KeyPath  # of the mapping
    names: tuple[tuple[str, str], ...]  # the old one and the new one


Change = SetWord | SetNull | Prepend | DropFirst | InsertList | DeleteKey | RenameKeys


def applied(data: Any, changes: Iterable[Change]) -> Any:
    """The data after the changes. Nothing of `data` is changed, and what several changes touch is copied
    once."""
    copies = _Copies()
    for change in changes:
        match change:
            case SetWord(keys, word):
                data = copies.replaced(data, keys, word)
            case SetNull(keys):
                data = copies.replaced(data, keys, None)
            case Prepend(keys, words, before):
                items = _at(data, keys) or []
                data = copies.replaced(data, keys, [*items[:before], *words, *items[before:]])
            case DropFirst(keys, number):
                data = copies.replaced(data, keys, _at(data, keys)[number:])
            case InsertList(after, key, words):
                around = dict(_at(data, after[:-1]))
                around[key] = list(words)
                data = copies.replaced(data, after[:-1], around)
            case DeleteKey(keys):
                around = {name: value for name, value in _at(data, keys[:-1]).items() if name != keys[-1]}
                data = copies.replaced(data, keys[:-1], around)
            case RenameKeys(keys, names):
                new = dict(names)
                around = {new.get(name, name): value for name, value in _at(data, keys).items()}
                data = copies.replaced(data, keys, around)
    return data


class _Copies:
    """Lists and mappings that were copied, and may be changed."""

    def __init__(self) -> None:
        self._own: dict[int, Any] = {}  # by id; kept here so that no other object gets the same one

    def replaced(self, data: Any, keys: KeyPath, value: Any) -> Any:
        if not keys:
            return value
        if id(data) not in self._own:
            data = list(data) if isinstance(data, list) else dict(data)
            self._own[id(data)] = data
        data[keys[0]] = self.replaced(data[keys[0]], keys[1:], value)
        return data


def same(one: Any, other: Any) -> bool:
    """Equal in value and kind: to Python, 1, 1.0 and True are equal."""
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
