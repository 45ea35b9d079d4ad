"""What can be changed in a text, and what each change means for the data."""

from __future__ import annotations

from typing import Any

from sandbox.spec import KeyPath
from sandbox.value import NamedTuple


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


Change = SetWord | SetNull | Prepend | DropFirst | InsertList | DeleteKey


def applied(data: Any, change: Change) -> Any:
    """The data after the change. Nothing of `data` is changed."""
    match change:
        case SetWord(keys, word):
            return _with(data, keys, word)
        case SetNull(keys):
            return _with(data, keys, None)
        case Prepend(keys, words, before):
            items = _at(data, keys) or []
            return _with(data, keys, [*items[:before], *words, *items[before:]])
        case DropFirst(keys, number):
            return _with(data, keys, _at(data, keys)[number:])
        case InsertList(after, key, words):
            around = dict(_at(data, after[:-1]))
            around[key] = list(words)
            return _with(data, after[:-1], around)
        case DeleteKey(keys):
            around = {name: value for name, value in _at(data, keys[:-1]).items() if name != keys[-1]}
            return _with(data, keys[:-1], around)


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


def _with(data: Any, keys: KeyPath, value: Any) -> Any:
    if not keys:
        return value
    copy: Any = list(data) if isinstance(data, list) else dict(data)
    copy[keys[0]] = _with(copy[keys[0]], keys[1:], value)
    return copy
