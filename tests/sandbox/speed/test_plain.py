"""The usual words of `runner exec`, `call`, `explain` and `check` mean the same without argparse."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli import verb_parser
from runner.cli.call import read_usual
from sandbox.speed.plain import read_plain, read_plain_check, read_plain_explain, read_plain_run


class Verb(NamedTuple):
    parser: argparse.ArgumentParser
    read: Callable[[Sequence[str]], argparse.Namespace | None]


EXEC = Verb(verb_parser("exec"), read_plain)
CALL = Verb(verb_parser("call"), read_usual)
EXPLAIN = Verb(verb_parser("explain"), read_plain_explain)
CHECK = Verb(verb_parser("check"), read_plain_check)

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
            *("greet", "--input", "--input={}", '{"a": 1}', "--json", "--json=1", "--events", "--timeout=3"),
            *("--events=e", "--events=", "3"),
            *("--context={}", "--kind=tool", "--secrets=-", "--input=-"),
            *("--env=A=1", "--tty", "--inspect", "--deadline", "3", "--help", "-h", "--secret=a=@b", "@x"),
            *("--network", "--network=1", "--format", "--format=json", "json", "--config={}"),
        ]
    ),
    max_size=6,
).filter(lambda found: "--" not in found and not {"-h", "--help"} & set(found))


def by_argparse(verb: Verb, found: list[str]) -> dict[str, Any] | None:
    """None: it refuses them."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return vars(verb.parser.parse_args(found))
        except SystemExit:
            return None


@pytest.mark.parametrize("verb", [EXEC, CALL, EXPLAIN, CHECK], ids=["exec", "call", "explain", "check"])
@given(words)
def test_what_is_understood_means_the_same(verb: Verb, found: list[str]) -> None:
    plain = verb.read(found)
    if plain is None:
        return
    full = by_argparse(verb, found)
    assert full is not None
    # Options of contracts that were not given stand there as None, and mean nothing.
    given_ones = {key: value for key, value in full.items() if not key.startswith("contract_option_")}
    assert vars(plain) == given_ones
    assert all(value is None for key, value in full.items() if key not in given_ones)


@pytest.mark.parametrize(
    ("verb", "found"),
    [
        (EXEC, ["m.toml"]),
        (EXEC, ["--report", "r.json", "m.toml"]),
        (EXEC, ["m.toml", "--report=r.json", "--policy", "strict"]),
        (EXEC, ["--contract=mcp", "--server", "a", "m.toml"]),
        (EXEC, ["--state-dir", "/s", "m.toml"]),
        (CALL, ["m.toml", "greet"]),
        (CALL, ["m.toml", "greet", "--input", '{"a": "-"}', "--json"]),
        (CALL, ["--events", "3", "m.toml", "--report=r.json", "--policy", "strict", "greet", "--input=-"]),
        (CALL, ["m.toml", "--timeout", "3", "greet", "--context={}", "--server", "a"]),
        (EXPLAIN, ["--policy", "strict", "m.toml", "--network", "--state-dir=/s"]),
        (CHECK, ["m.toml", "--contract", "mcp", "--server=a"]),
    ],
)
def test_the_usual_words_are_understood(verb: Verb, found: list[str]) -> None:
    plain, full = verb.read(found), by_argparse(verb, found)
    assert plain is not None and full is not None
    assert vars(plain).items() <= full.items()


@pytest.mark.parametrize(
    ("verb", "found"),
    [
        *((EXEC, found) for found in ([], ["a", "b"], ["--report", "m"], ["m", "--report"], ["-m"], [""])),
        *((EXEC, ["--report", "-r", "m"]), (EXEC, ["--report=", "m"]), (EXEC, ["m", "--tty"])),
        *((EXEC, ["m", "--env=A=1"]), (EXEC, ["m", "--polic=p"]), (EXEC, ["m", "--unknown"])),
        *((EXEC, ["--help"]), (EXEC, ["m", "--json"])),
        *((CALL, found) for found in ([], ["m"], ["m", "a", "b"], ["m", ""], ["m", "a", "--input"])),
        *((CALL, ["m", "a", "--input", "-"]), (CALL, ["m", "a", "--json=1"])),
        *((CALL, ["m", "a", "--kind=x"]), (CALL, ["m", "a", "--env=A=1"]), (CALL, ["m", "a", "--help"])),
        *((CALL, ["m", "a", "--"]), (CALL, ["a", "--", "program"])),
        *((EXPLAIN, ["m", "--format", "json"]), (EXPLAIN, ["--", "program"]), (EXPLAIN, ["m", "--report=r"])),
        *((CHECK, ["m", "n"]), (CHECK, ["m", "--format=json"]), (CHECK, ["m", "--policy=p"])),
    ],
)
def test_the_rest_is_left_to_argparse(verb: Verb, found: list[str]) -> None:
    assert verb.read(found) is None


RUN = verb_parser("run", of_command=True)
_OPTIONS = ("--name", "--read", "--write", "--net", "--cwd", "--env", "--policy", "--state-dir", "--wrapped")
_LIMITS = ("--memory", "--pids", "--cpu", "--cpu-time", "--deadline", "--limit", "--report", "--project")
_OTHERS = (
    "--rea",
    "--env-file",
    "--hide",
    "--tty",
    "--events",
    "--image",
    "--network",
    "-x",
    "@x",
    "--reports",
)
run_words = st.lists(
    st.one_of(
        st.sampled_from((*_OPTIONS, *_LIMITS, *_OTHERS)),
        st.sampled_from(
            ("", "-", "a b", "x", "7", "-7", "x=y", "write", "~", "~x/y", "é", "\udcff", "\0", "{}")
        ),
        st.tuples(
            st.sampled_from((*_OPTIONS, *_LIMITS, *_OTHERS)),
            st.sampled_from(("", "-x", "x", "x=y", "write", "read", "7", "--name", "~x")),
        ).map("=".join),
    ),
    max_size=6,
)


@given(run_words)
def test_the_words_that_decide_about_a_run_are_all_of_them(found: list[str]) -> None:
    """But for where the report goes: two lines with the same ones are the same launch."""
    plain = read_plain_run(found)
    if plain is None:
        return
    full = by_argparse(Verb(RUN, read_plain_run), found)
    if full is None:
        return  # a launch that is refused stores nothing
    again = by_argparse(Verb(RUN, read_plain_run), plain.deciding)
    assert again == {**full, "report": None}
    assert (plain.report, plain.wrapped, plain.command_name) == (
        full["report"],
        full["wrapped"],
        full["command_name"],
    )
    assert not any("=" in word for word in full["env"])


def test_what_of_a_run_is_understood() -> None:
    """The controls of the test above, and what is left to a launch that is decided each time."""
    for word in ("--read=/x", "--project", "--project=write", "--env=NAME", "--read=~", "--read=~/x"):
        assert read_plain_run([word]) is not None
    for word in ("--read", "--read=", "--project=", "--env=N=v", "--read=~ada/x", "--hide=x", "--rea=/x"):
        assert read_plain_run([word]) is None
