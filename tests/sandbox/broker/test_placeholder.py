from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.broker.placeholder import PREFIXES, cover, make_placeholder, same_shape
from tests.tables import one_case

JWT = b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


@one_case(
    ("value", "pattern"),
    [
        (b"ghp_" + b"aB3" * 12, rb"ghp_(?:[a-z][A-Z][0-9]){12}"),
        (b"github_pat_11ABCDEFG0abcdefghijkl_" + b"aB3" * 19, rb"github_pat_[0-9A-Za-z]{22}_[0-9A-Za-z]{57}"),
        (b"xoxb-123456789012-1234567890123-AbCdEfGhIjKlMnOp", rb"xoxb-\d{12}-\d{13}-[A-Za-z]{16}"),
        (b"0123456789abcdef0123456789abcdef", rb"[0-9a-f]{32}"),
        (b"0123456789ABCDEF0123456789ABCDEF", rb"[0-9A-F]{32}"),
        (b"12345678901234567890123456789012", rb"\d{32}"),
        (
            b"01234567-89ab-4cde-8f01-23456789abcd",
            rb"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-8[0-9a-f]{3}-[0-9a-f]{12}",
        ),
        (JWT, rb"eyJhbGciOiJIUzI1NiJ9\.eyJ[A-Za-z0-9]+\.[A-Za-z0-9]+_[A-Za-z0-9]+"),
        (b"sk-ant-api03-" + b"Zz9_" * 10, rb"sk-ant-[a-z]{3}\d\d-(?:[A-Z][a-z]\d_){10}"),
    ],
)
def test_the_form_is_kept(value: bytes, pattern: bytes) -> None:
    made = make_placeholder(value)
    assert re.fullmatch(pattern, made) and made != value and same_shape(value, made)
    assert make_placeholder(value) != made


def test_known_prefixes_are_kept() -> None:
    for prefix in PREFIXES:
        made = make_placeholder(prefix + b"aB3dE5gH7jK9mN1pQ3sT5vW7yZ")
        assert made.startswith(prefix)


def test_longer_prefixes_come_first() -> None:
    places = {prefix: place for place, prefix in enumerate(PREFIXES)}
    assert not [
        (one, other)
        for one in places
        for other in places
        if other.startswith(one) and places[one] < places[other]
    ]


@pytest.mark.parametrize(
    "value", [b"", b"short", b"ghp_abc", b"1" * 19, b"z" * 13, b"-" * 40, b"ghp_" + b"/" * 40]
)
def test_what_is_too_short_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="too short"):
        make_placeholder(value)


def test_a_little_more_is_enough() -> None:
    assert make_placeholder(b"1" * 20) and make_placeholder(b"z" * 14)


def test_it_is_never_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    value = b"zzzzzzzzzzzzzzzz"
    drawn = iter([25] * 16 + [1] * 16)
    monkeypatch.setattr(os, "urandom", lambda _: bytes([next(drawn)]))
    assert make_placeholder(value) == b"bbbbbbbbbbbbbbbb"


@one_case(
    ("value", "other", "same"),
    [
        (b"aB1/", b"1aB/", True),
        (b"aB1/", b"aB1-", False),
        (b"aB1/", b"aB1", False),
        (b"aB1/", b"a/1B", False),
    ],
)
def test_shapes(value: bytes, other: bytes, same: bool) -> None:
    assert same_shape(value, other) is same


TEXTS = st.lists(st.text("ab", min_size=1, max_size=8).map(str.encode), max_size=4)


@given(st.text("abc", max_size=40).map(str.encode), TEXTS)
def test_each_value_is_covered_wherever_it_stands(data: bytes, values: list[bytes]) -> None:
    """Also where two of them, or one and the same, overlap."""
    expected = bytearray(data)
    for value in values:
        for place in range(len(data)):
            if data.startswith(value, place):
                expected[place : place + len(value)] = expected[place : place + len(value)].upper()
    assert cover(data, [(value, value.upper()) for value in values]) == expected


@one_case(
    ("data", "pairs", "covered"),
    [
        (b"xabcdefy", [(b"abcd", b"1234"), (b"cdef", b"5678")], b"x125678y"),
        (b"xabcdefy", [(b"bc", b"12"), (b"abcdef", b"345678")], b"x345678y"),  # the longest has the last word
        (b"ababab", [(b"abab", b"1234")], b"123434"),
        (b"aaaa", [(b"aa", b"12")], b"1222"),
        (b"abc", [(b"", b"")], b"abc"),
        (b"1234", [(b"1234", b"abcd"), (b"abcd", b"wxyz")], b"abcd"),  # what was put there is no value
    ],
)
def test_what_covers_a_value(data: bytes, pairs: list[tuple[bytes, bytes]], covered: bytes) -> None:
    assert cover(data, pairs) == covered


def test_a_placeholder_of_another_length_covers_nothing() -> None:
    with pytest.raises(ValueError, match="length"):
        cover(b"abc", [(b"abc", b"ab")])
