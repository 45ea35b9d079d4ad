"""Sizes and durations as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.units import DURATION_MAX, SIZE_MAX, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("1K", 1024),
        ("1k", 1024),
        ("256M", 256 << 20),
        ("256MB", 256 << 20),
        ("256 MiB", 256 << 20),
        ("1.5GiB", 3 << 29),
        ("2t", 2 << 40),
        (SIZE_MAX, SIZE_MAX),
    ],
)
def test_sizes(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written",
    [
        "",
        "M",
        "lots",
        "1e3",
        "-1",
        "1,5G",
        "1.5.5G",
        "5X",
        "٣M",
        -1,
        1.5,
        True,
        None,
        [],
        SIZE_MAX + 1,
        "9999999999P",
    ],
)
def test_what_is_not_a_size_is_refused_with_an_example(written: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(written)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (0, 0.0),
        (2.5, 2.5),
        ("2", 2.0),
        ("500ms", 0.5),
        ("30s", 30.0),
        ("2m", 120.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("1d", 86400.0),
    ],
)
def test_durations(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        "",
        "soon",
        "30x",
        "30m1h",
        "1m1m",
        "-5s",
        -1,
        math.nan,
        math.inf,
        10**400,
        True,
        None,
        {},
        DURATION_MAX * 2,
    ],
)
def test_what_is_not_a_duration_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(written)


def test_refusals_are_short_whatever_was_written() -> None:
    for parse in (parse_size, parse_duration):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the length is the point)
            parse("9" * 100_000)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (256 << 20, "256 MiB"),
        (3 << 29, "1.5 GiB"),
    ],
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.5, "500ms"),
        (0.9999999, "1s"),
        (1.25, "1.25s"),
        (59.9999, "1m"),
        (60, "1m"),
        (90, "1m30s"),
        (5400, "1h30m"),
        (90000, "1d1h"),
    ],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(0, 1 << 40))
def test_a_formatted_size_parses_to_nearly_the_same(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size * 0.005


@given(st.integers(1, 10**8))
def test_a_formatted_duration_parses_to_the_same(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
