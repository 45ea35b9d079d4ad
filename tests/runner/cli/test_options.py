"""What exec and explain are told: limits on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli import verb_parser
from runner.cli.options import invocation_of
from sandbox.policy.policy import LIMIT_NAMES
from sandbox.spec import Limits
from sandbox.units import parse_limit
from tests.conftest import Caller

Write = Callable[..., Path]

OWN_OPTIONS = {"memory": "256M", "pids": "64", "cpu": "50%", "cpu_time": "1m", "deadline": "1h30m"}


def limits_of(*words: str, verb: str = "exec") -> Limits:
    return invocation_of(verb_parser(verb).parse_args([*words, "MANIFEST"])).overrides.limits


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize("verb", ["exec", "explain"])
@pytest.mark.parametrize(
    ("words", "limits"),
    [
        ((), Limits()),
        (("--memory", "256M"), Limits(memory=256 << 20)),
        (("--memory=1.5GiB",), Limits(memory=3 << 29)),
        (("--pids", "64"), Limits(pids=64)),
        (("--cpu", "0.5"), Limits(cpu=0.5)),
        (("--cpu", "50%"), Limits(cpu=0.5)),
        (("--cpu-time", "2m"), Limits(cpu_time=120.0)),
        (("--deadline", "30"), Limits(deadline=30.0)),
        (("--limit", "io=10M"), Limits(io=10 << 20)),
        (("--limit=call=1m30s",), Limits(call=90.0)),
        (
            ("--memory", "1G", "--limit", "tmp=1M", "--pids=5", "--limit", "output_lines=9"),
            Limits(memory=1 << 30, pids=5, tmp=1 << 20, output_lines=9),
        ),
    ],
)
def test_limits(verb: str, words: tuple[str, ...], limits: Limits) -> None:
    assert limits_of(*words, verb=verb) == limits


@pytest.mark.parametrize("name", LIMIT_NAMES)
def test_every_limit_can_be_given_by_its_name(name: str) -> None:
    found = limits_of("--limit", f"{name}={OWN_OPTIONS.get(name, '5000')}")
    assert found == Limits(**{name: parse_limit(name, OWN_OPTIONS.get(name, "5000"))})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_an_option_of_its_own_is_the_same_as_the_name(name: str) -> None:
    value = OWN_OPTIONS[name]
    assert limits_of(option(name), value) == limits_of("--limit", f"{name}={value}") != Limits()


TWICE = [
    (first, second)
    for name, value in OWN_OPTIONS.items()
    for first in ((option(name), value), ("--limit", f"{name}={value}"))
    for second in ((option(name), value), ("--limit", f"{name}={value}"))
]


@pytest.mark.parametrize(("first", "second"), TWICE)
def test_a_limit_given_twice_is_an_error_also_if_both_say_the_same(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    limits_of(*first)  # the control
    with pytest.raises(ValueError, match="is given twice") as caught:
        limits_of(*first, *second)
    assert str(caught.value).startswith(f"{' '.join(second)}: ")


@pytest.mark.parametrize("verb", ["exec", "explain"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "256"), "--memory 256: '256' is less than 1 MiB, and no program starts with less;"),
        (("--memory", "256"), "did you mean 256M?"),
        (("--memory", "lots"), "--memory lots: 'lots' is not a size"),
        (("--memory", ""), "--memory : '' is not a size"),
        (("--memory", "0"), "--memory 0: it has to be more than 0"),
        (("--memory", "-1"), "--memory -1: '-1' is not a size"),
        (("--pids", "many"), "--pids many: 'many' is not a whole number"),
        (("--pids", "0"), "--pids 0: it has to be more than 0"),
        (("--pids", "1.5"), "--pids 1.5: '1.5' is not a whole number"),
        (("--cpu", "all"), "--cpu all: 'all' is not a number of cores"),
        (("--cpu", "0.001"), "--cpu 0.001: '0.001' is less than 0.01"),
        (("--cpu-time", "soon"), "--cpu-time soon: 'soon' is not a duration"),
        (("--deadline", "0"), "--deadline 0: it has to be more than 0"),
        (("--limit", "memroy=1G"), "--limit memroy=1G: no limit is called 'memroy'; did you mean 'memory'?"),
        (("--limit", "cpu-time=1m"), "did you mean 'cpu_time'?"),
        (("--limit", "zzz=1"), f"no limit is called 'zzz'; there are {', '.join(LIMIT_NAMES)}"),
        (("--limit", "=1"), "--limit =1: no limit is called ''"),
        (("--limit", ""), "--limit : write NAME=VALUE, as in memory=256M"),
        (("--limit", "memory"), "--limit memory: write NAME=VALUE, as in memory=256M"),
        (("--limit", "memory="), "--limit memory=: '' is not a size"),
        (("--limit", "io=1=2"), "--limit io=1=2: '1=2' is not a size"),
    ],
)
def test_what_is_no_limit(verb: str, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=r"^--") as caught:
        limits_of(*words, verb=verb)
    assert said in str(caught.value)


@given(st.text(), st.sampled_from(["--limit", "--memory", "--cpu", "--deadline"]))
def test_any_word_is_a_limit_or_refused_with_a_sentence(word: str, name: str) -> None:
    try:
        found = limits_of(f"{name}={word}")
    except ValueError as error:
        assert str(error).startswith(name)  # noqa: PT017 (either is right, and neither may be silent)
    else:
        assert found != Limits()


# --- with manifest and policy ------------------------------------------------------------------------------

MANIFEST = """\
[plugin]
id = "demo"
version = "1.0.0"
name = "Demo"
description = "ends at once"
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "/bin/true"
[plugin.limits]
tmp = "8M"
"""
POLICY = """\
version = 1
[limits.tmp]
default = "2M"
ceiling = "16M"
[limits.shm]
default = "2M"
ceiling = "16M"
"""


@pytest.mark.parametrize(
    ("words", "name", "value", "who"),
    [
        ((), "tmp", 8, "manifest"),
        (("--limit", "tmp=4M"), "tmp", 4, "command line"),
        (("--limit", "tmp=12M"), "tmp", 8, "manifest"),  # lowered, never raised
        ((), "shm", 2, "policy"),
        (("--limit", "shm=1M"), "shm", 1, "command line"),
        (("--limit", "shm=12M"), "shm", 12, "command line"),  # a default is for silence
        (("--limit", "shm=1G"), "shm", 16, "policy"),
    ],
)
def test_the_lowest_of_the_three_wins(
    runner_as_user: Caller,
    plugin_dir: Path,
    write_file: Write,
    words: tuple[str, ...],
    name: str,
    value: int,
    who: str,
) -> None:
    manifest = write_file(plugin_dir / "plugin.toml", MANIFEST)
    policy = write_file(plugin_dir / "policy.toml", POLICY)
    said = runner_as_user("explain", "--format", "json", "--policy", policy, *words, manifest)
    granted = json.loads(said.stdout)["grant"]
    assert (granted["limits"][name], granted["decided_by"][name]) == (value << 20, who)


def test_help_names_every_limit_and_stays_short(runner_as_user: Caller) -> None:
    for verb in ("exec", "explain"):
        said = runner_as_user(verb, "--help").stdout
        limits = said.partition("\nlimits:\n")[2]
        words = set(limits.replace(",", " ").split())
        assert {option(name) for name in OWN_OPTIONS} <= words
        assert set(LIMIT_NAMES) - set(OWN_OPTIONS) <= words
        assert len(said.splitlines()) <= 45
