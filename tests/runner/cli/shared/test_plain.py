"""The usual words of `runner exec` mean the same without argparse."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli import verb_parser
from runner.cli.shared.plain import read_plain

PARSER = verb_parser("exec")

words = st.lists(
    st.sampled_from(
        [
            *(
                "m.toml",
                "dir/",
                "a b",
                "",
                "-",
                "--",
                "-x",
                "x=y",
                "é",
                "--report",
                "--report=r",
                "--report=",
            ),
            *("--policy", "--policy=p", "--policy=-p", "--contract", "--server=s", "--server", "--polic=p"),
            *("--state-dir", "--state-dir=/s", "--state-dir="),
            *("--env=A=1", "--tty", "--inspect", "--deadline", "3", "--help", "-h", "--secret=a=@b", "@x"),
        ]
    ),
    max_size=5,
).filter(lambda found: "--" not in found and not {"-h", "--help"} & set(found))


def by_argparse(found: list[str]) -> dict[str, Any] | None:
    """None: it refuses them."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return vars(PARSER.parse_args(found))
        except SystemExit:
            return None


@given(words)
def test_what_is_understood_means_the_same(found: list[str]) -> None:
    plain = read_plain(found)
    if plain is None:
        return
    full = by_argparse(found)
    assert full is not None
    # Options of contracts that were not given stand there as None, and mean nothing.
    given_ones = {key: value for key, value in full.items() if not key.startswith("contract_option_")}
    assert vars(plain) == given_ones
    assert all(value is None for key, value in full.items() if key not in given_ones)


@pytest.mark.parametrize(
    "found",
    [
        ["m.toml"],
        ["--report", "r.json", "m.toml"],
        ["m.toml", "--report=r.json", "--policy", "strict"],
        ["--contract=mcp", "--server", "a", "m.toml"],
        ["--state-dir", "/s", "m.toml"],
    ],
)
def test_the_usual_words_are_understood(found: list[str]) -> None:
    plain, full = read_plain(found), by_argparse(found)
    assert plain is not None and full is not None
    assert vars(plain).items() <= full.items()


@pytest.mark.parametrize(
    "found",
    [
        *([], ["a", "b"], ["--report", "m"], ["m", "--report"], ["--report", "-r", "m"], ["--report=", "m"]),
        *(
            ["-m"],
            ["m", "--tty"],
            ["m", "--env=A=1"],
            ["m", "--polic=p"],
            [""],
            ["m", "--unknown"],
            ["--help"],
        ),
    ],
)
def test_the_rest_is_left_to_argparse(found: list[str]) -> None:
    assert read_plain(found) is None
