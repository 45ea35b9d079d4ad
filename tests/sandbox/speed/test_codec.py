"""Encoding values and decoding them: the result is equal, with the same types at every level."""

from __future__ import annotations

import json
import marshal
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.spec import Limits, PathRequest
from sandbox.speed import codec
from sandbox.speed.value import NamedTuple


class Leaf(NamedTuple):
    number: int
    text: str = ""


class Tree(NamedTuple):
    name: str
    parts: tuple[object, ...]


CLASSES = (Leaf, Tree)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(blacklist_categories=()))
)
values = st.recursive(
    scalars | st.binary(),
    lambda inner: (
        st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.builds(Tree, st.text(), st.lists(inner).map(tuple))
        | st.frozensets(st.text())
        | st.lists(inner)
    ),
)


def types(value: object) -> object:
    if isinstance(value, tuple | list):
        return type(value), [types(each) for each in value]
    if isinstance(value, dict):
        return {key: types(each) for key, each in value.items()}
    return type(value)


@given(values)
def test_every_value_is_decoded_unchanged(value: object) -> None:
    again = codec.decode(codec.encode(value), CLASSES)
    assert again == value and types(again) == types(value)
    again = codec.unpack(codec.pack(value), CLASSES)
    assert again == value and types(again) == types(value)


def test_the_encoding_is_ascii_json() -> None:
    raw = codec.encode(Leaf(1, "n\udcffme"))
    assert raw.isascii() and json.loads(raw) == ["Leaf", 1, "n\udcffme"]
    assert codec.decode(codec.encode(math.inf), ()) == math.inf


@pytest.mark.parametrize("value", [{1: 2}, [{1}], {1, 2}, object(), bytearray(b"x"), Leaf(1, [{1: 2}])])  # type: ignore[arg-type]
def test_values_that_could_not_be_decoded_are_not_encoded(value: object) -> None:
    with pytest.raises(TypeError):
        codec.encode(value)
    with pytest.raises(TypeError):
        codec.pack(value)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"[1]",
        b'["Leaf"]',
        b'["Leaf",1]',
        b'["Leaf",1,"a","b"]',
        b'["PathRequest","/a","read",true,[""]]',
        b'["bytes"]',
        b'["bytes",1]',
        b'["bytes","a","b"]',
        b'["set",{}]',
        b'[["Leaf",1,""]]',
        b'{"a":[]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_foreign_documents_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        codec.decode(raw, CLASSES)


def test_a_class_that_was_not_offered_is_refused() -> None:
    raw = codec.encode(PathRequest("/a", "read"))
    assert codec.decode(raw, (PathRequest,)) == PathRequest("/a", "read")
    with pytest.raises(ValueError, match="PathRequest"):
        codec.decode(raw, (Limits,))
    with pytest.raises(ValueError, match="PathRequest"):
        codec.unpack(codec.pack(PathRequest("/a", "read")), (Limits,))


@pytest.mark.parametrize(
    "raw", [b"", codec.pack(Leaf(1, "text"))[:-2], marshal.dumps([1]), marshal.dumps(["Leaf"])]
)
def test_what_was_not_packed_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        codec.unpack(raw, CLASSES)


class Text(str):
    __slots__ = ()


def test_a_subclass_of_text_is_not_packed() -> None:
    with pytest.raises(TypeError, match="unmarshallable"):
        codec.pack(Leaf(1, Text("x")))
