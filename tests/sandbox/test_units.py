"""Sizes, durations and limits as people write them."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.spec import DURATIONS, SIZES, Limits
from sandbox.units import (
    DURATION_MAX,
    SIZE_MAX,
    format_duration,
    format_limit,
    format_size,
    parse_duration,
    parse_limit,
    parse_size,
)
from tests.tables import one_case


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
def test_an_invalid_size_is_refused_with_an_example(written: object) -> None:
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
def test_an_invalid_duration_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(written)


def test_refusals_are_short_for_any_input() -> None:
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


# --- limits --------------------------------------------------------------------------------------

COUNTS = ("pids", "open_files", "output_lines")


def test_every_limit_is_of_one_kind() -> None:
    kinds = (*SIZES, *DURATIONS, "cpu", *COUNTS)
    assert sorted(kinds) == sorted(Limits._fields)


@one_case(
    ("name", "written", "amount"),
    [
        *((name, "16M", 16 << 20) for name in sorted(SIZES)),
        *((name, 16 << 20, 16 << 20) for name in sorted(SIZES)),
        *((name, "1m30s", 90.0) for name in sorted(DURATIONS)),
        *((name, 0.5, 0.5) for name in sorted(DURATIONS)),
        *((name, 64, 64) for name in COUNTS),
        *((name, " 64 ", 64) for name in COUNTS),
        ("cpu", 2, 2.0),
        ("cpu", 0.25, 0.25),
        ("cpu", "0.25", 0.25),
        ("cpu", "2", 2.0),
        ("cpu", "50%", 0.5),
        ("cpu", "250 %", 2.5),
        # The least there can be.
        ("memory", "1M", 1 << 20),
        ("memory", 1 << 20, 1 << 20),
        ("cpu", 0.01, 0.01),
        ("cpu", "1%", 0.01),
        ("pids", 1, 1),
        ("open_files", 16, 16),
        ("output_lines", 1, 1),
        ("output", 1, 1),
        ("file_size", "4K", 4096),
        ("message_queues", 1, 1),
        ("tmp", "4K", 4096),
        ("io", "4K", 4096),
        ("deadline", "1ms", 0.001),
        # The most.
        ("memory", SIZE_MAX, SIZE_MAX),
        ("pids", 1 << 22, 1 << 22),
        ("open_files", 1 << 20, 1 << 20),
        ("output_lines", SIZE_MAX, SIZE_MAX),
        ("cpu", 10_000, 10_000.0),
        ("deadline", DURATION_MAX, DURATION_MAX),
    ],
)
def test_limits(name: str, written: object, amount: float) -> None:
    found = parse_limit(name, written)
    assert found == amount
    assert type(found) is (float if name == "cpu" or name in DURATIONS else int)


@one_case(
    ("name", "written", "said"),
    [
        *((name, 0, "it has to be more than 0") for name in Limits._fields),
        *((name, "0", "it has to be more than 0") for name in Limits._fields),
        *((name, True, "True is not") for name in Limits._fields),
        *((name, None, "a NoneType is not") for name in Limits._fields),
        *((name, [1], "a list is not") for name in Limits._fields),
        *((name, "", "'' is not") for name in Limits._fields),
        *((name, "-1", "'-1' is not") for name in Limits._fields),
        *((name, -1, "-1 is") for name in Limits._fields),
        *((name, math.nan, "nan is not") for name in Limits._fields),
        *((name, math.inf, "inf is not") for name in Limits._fields),
        *((name, 1.5, "1.5 is not a whole number") for name in COUNTS),
        *((name, "1K", "'1K' is not a whole number") for name in COUNTS),
        *((name, "٣", "is not a whole number") for name in COUNTS),
        ("cpu", "half", "'half' is not a number of cores: write 0.5, 2, or \"50%\" of one core"),
        ("cpu", "50%%", "is not a number of cores"),
        ("cpu", "0%", "it has to be more than 0"),
        ("cpu", 10_001, "10001 is not a possible number of cores"),
        ("memory", "lots", "'lots' is not a size"),
        ("deadline", "soon", "'soon' is not a duration"),
        # Too little, most often a forgotten unit.
        ("memory", 256, "256 is less than 1 MiB, and no program starts with less; did you mean 256M?"),
        ("memory", "256", "'256' is less than 1 MiB, and no program starts with less; did you mean 256M?"),
        ("memory", "256K", "'256K' is less than 1 MiB, and no program starts with less"),
        ("memory", (1 << 20) - 1, "1048575 is less than 1 MiB, and no program starts with less"),
        ("tmp", 64, "64 is less than 4 KiB, and it is counted in pages; did you mean 64M?"),
        ("shm", "64", "did you mean 64M?"),
        ("disk", "4095B", "'4095B' is less than 4 KiB"),
        ("io", 50, "did you mean 50M?"),
        ("locked_memory", "1K", "'1K' is less than 4 KiB, and it is counted in pages"),
        ("cpu", 0.009, "0.009 is less than 0.01, and the kernel gives no smaller share"),
        ("cpu", "0.5%", "'0.5%' is less than 0.01"),
        ("open_files", 15, "15 is less than 16, and the cage itself needs as many to start"),
        ("teardown", "0.5ms", "'0.5ms' is less than 1ms, and no clock here is finer"),
        # Too much.
        ("pids", (1 << 22) + 1, "4194305 is more than the largest possible value (4194304)"),
        ("open_files", "1048577", "'1048577' is more than the largest possible value (1048576)"),
        ("output_lines", SIZE_MAX + 1, "is more than"),
        ("memory", SIZE_MAX + 1, "is not a possible size"),
        ("deadline", DURATION_MAX * 2, "is not a possible duration"),
    ],
)
def test_impossible_limits(name: str, written: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        parse_limit(name, written)
    message = str(caught.value)
    assert len(message) < 200 and "\n" not in message
    assert ("did you mean" in message) == ("did you mean" in said)


@pytest.mark.parametrize("name", Limits._fields)
def test_a_number_that_python_will_not_print(name: str) -> None:
    for written in (1 << 20_000, -(1 << 20_000)):  # as hexadecimal TOML can have it
        with pytest.raises(ValueError, match="so large a number is"):
            parse_limit(name, written)


@given(
    st.sampled_from(Limits._fields),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.from_regex(r"\s*[0-9]{1,22}(\.[0-9]{1,3})?\s?(ms|[smhd%]|[kMGTP]i?B?)?", fullmatch=True),
)
def test_a_limit_is_possible_or_refused_with_a_sentence(name: str, written: object) -> None:
    try:
        amount = parse_limit(name, written)
    except ValueError as error:
        assert 0 < len(str(error)) < 200  # noqa: PT017 (either is right, and neither may be silent)
    else:
        assert 0 < amount <= SIZE_MAX and math.isfinite(amount)
        assert format_limit(name, amount) not in ("0", "0s", "0 B")


@given(st.sampled_from(Limits._fields), st.integers(1 << 20, 1 << 22))
def test_a_number_and_its_text_are_the_same_limit(name: str, amount: int) -> None:
    amount = amount % 10_000 + 16 if name in ("cpu", *COUNTS) else amount
    amount = min(amount, 9_999) if name == "cpu" else amount
    assert parse_limit(name, amount) == parse_limit(name, str(amount)) == amount
