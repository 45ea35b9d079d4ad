"""Values as bytes and back: for the cache, and for what one process of ours tells another.

    encode, decode    JSON, one line, for another process
    pack, unpack      marshal, for a file that only its owner can write: importing json takes 6 ms of a launch

JSON knows no tuples, so each tuple is an array that begins with its kind: the name of the class for a named
tuple, "" for a plain one, "list", "set" and "bytes" for those. Mappings and scalars are JSON's own. Text is
written in ASCII, so names that are no UTF-8 (lone surrogates) arrive as they were.

`decode` and `unpack` make only values of the classes they are given. They check how many fields each has and
not what is in them; and marshal trusts its bytes, which can make Python crash. So the bytes must be ours:
code that stores them has to guard them, as sandbox/cache.py does with a folder of its own and a digest.
"""

from __future__ import annotations

from sandbox.speed.typed import Any, Callable, Iterable, Sequence

_PLAIN, _LIST, _SET, _BYTES = "", "list", "set", "bytes"
# The oldest that has every kind we write. Every Python reads it, so one cache serves several.
MARSHAL_FORMAT = 4
BLANK = "blank"  # the kind of a text that was left out, followed by its number
_SCALARS = (str, int, float, bool, type(None))


def encode(value: object) -> bytes:
    """Raises TypeError for what `decode` could not give back."""
    import json

    return json.dumps(as_plain(value), separators=(",", ":")).encode()


def decode(raw: bytes, classes: Iterable[type[tuple[Any, ...]]]) -> Any:
    """Raises ValueError if this is not what `encode` wrote of these classes."""
    import json

    try:
        return _from_plain(json.loads(raw), _makers(classes))
    except (TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"not a value of ours: {error!r}") from None


def pack(value: object) -> bytes:
    """Raises TypeError for what `unpack` could not give back."""
    import marshal

    try:
        return marshal.dumps(as_plain(value), MARSHAL_FORMAT)
    except ValueError as error:  # it has a subclass of text or numbers in it
        raise TypeError(str(error)) from None


def unpack(raw: bytes, classes: Iterable[type[tuple[Any, ...]]]) -> Any:
    """Raises ValueError if this is not what `pack` wrote of these classes. The bytes have to be guarded."""
    import marshal

    try:
        return _from_plain(marshal.loads(raw), _makers(classes))
    except (TypeError, KeyError, IndexError, EOFError, RecursionError) as error:
        raise ValueError(f"not a value of ours: {error!r}") from None


def from_plain(plain: Any, classes: Iterable[type[tuple[Any, ...]]], blanks: Sequence[str]) -> Any:
    """What `as_plain` was given. `blanks`: the texts that were left out. Raises ValueError."""
    makers = _makers(classes)
    makers[BLANK] = lambda items: blanks[items[0]]
    try:
        return _from_plain(plain, makers)
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"not a value of ours: {error!r}") from None


def _makers(classes: Iterable[type[tuple[Any, ...]]]) -> dict[str, Callable[[list[Any]], object]]:
    return {
        _PLAIN: tuple,
        _LIST: list,
        _SET: frozenset,
        _BYTES: _bytes,
        **{each.__name__: _maker(each) for each in classes},
    }


def as_plain(value: Any) -> Any:
    """A value as lists, mappings, text and numbers."""
    if isinstance(value, tuple):
        # A plain tuple has no _fields, and its class must be `tuple` itself.
        kind = type(value).__name__ if hasattr(value, "_fields") else _PLAIN
        return [kind, *map(as_plain, value)]
    if isinstance(value, list):
        return [_LIST, *map(as_plain, value)]
    if isinstance(value, frozenset):
        return [_SET, *map(as_plain, sorted(value))]
    if isinstance(value, bytes):
        return [_BYTES, value.decode("latin-1")]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping has a key that is no string")
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, _SCALARS):
        return value
    raise TypeError(f"{type(value).__name__} cannot be written")


def _from_plain(value: Any, makers: dict[str, Callable[[list[Any]], object]]) -> Any:
    if isinstance(value, list):
        return makers[value[0]]([_from_plain(item, makers) for item in value[1:]])
    if isinstance(value, dict):
        return {key: _from_plain(item, makers) for key, item in value.items()}
    return value


def _maker(each: type[tuple[Any, ...]]) -> Callable[[list[Any]], object]:
    count = len(each._fields)  # type: ignore[attr-defined]  # every class of ours is a named tuple

    def make(items: list[Any]) -> object:
        if len(items) != count:
            raise ValueError(f"{each.__name__} has {count} fields, not {len(items)}")
        return each(*items)

    return make


def _bytes(items: list[Any]) -> bytes:
    [text] = items
    return bytes(text, "latin-1")
