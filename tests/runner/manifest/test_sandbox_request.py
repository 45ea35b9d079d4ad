"""Hosts and limits as manifests write them."""

from __future__ import annotations

import math
from typing import get_args

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.manifest.sandbox_request import LIMITS, Word, Words, hosts, limits, limits_schema, parse_host
from runner.manifest.table import Table
from sandbox.document import model
from sandbox.document.faults import Faults
from sandbox.document.read import parse
from sandbox.spec import Limits, SeccompProfile
from tests.tables import one_case


@pytest.mark.parametrize(
    ("written", "host"),
    [
        ("example.com:443", "example.com:443"),
        ("Example.COM:1", "example.com:1"),
        ("localhost:65535", "localhost:65535"),
        ("xn--bcher-kva.example:80", "xn--bcher-kva.example:80"),
        ("a-b.c1:80", "a-b.c1:80"),
        ("10.1.2.3:80", "10.1.2.3:80"),
        ("[::1]:443", "[::1]:443"),
        ("[::ffff:10.1.2.3]:443", "10.1.2.3:443"),
        ("[2001:DB8::0:1]:443", "[2001:db8::1]:443"),
    ],
)
def test_hosts(written: str, host: str) -> None:
    assert parse_host(written) == host


@one_case(
    "written",
    [
        "",
        "example.com",
        ":443",
        "example.com:",
        "example.com:0",
        "example.com:65536",
        "example.com:+1",
        "example.com:0443",
        "example.com:٤٤٣",
        "*.example.com:443",
        "*:443",
        "example.com:80,443",
        "example.com:80-81",
        "example.com:443,443",
        "10.0.0.0/8:443",
        "[fd00::]/8:443",
        "exa mple.com:443",
        "-a.com:443",
        "a-.com:443",
        "a..com:443",
        "example.com.:443",
        "a_b.com:443",
        f"{'a' * 64}.com:443",
        f"{'a.' * 127}com:443",
        "bücher.example:443",
        "http://example.com:443",
        "example.com/x:443",
        "127.1:80",
        "2130706433:80",
        "0x7f000001:80",
        "1.2.3.04:80",
        "1.2.3.256:80",
        "a.0x7f:80",
        "0.0.0.0:80",
        "224.0.0.1:80",
        "[::]:80",
        "[ff02::1]:80",
        "[fe80::1%eth0]:80",
        "[1.2.3.4:80",
        "::1:80",
    ],
)
def test_texts_that_are_not_one_host(written: str) -> None:
    with pytest.raises(ValueError, match=r"is|has|contains"):
        parse_host(written)


@pytest.mark.parametrize("host", ["example.com", "10.1.2.3", "[::1]"])
def test_every_port_of_a_host(host: str) -> None:
    assert parse_host(f"{host}:*") == f"{host}:*"


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("example.com", "example.com:443"),
        ("example.com:*", "example.com:*"),
        ("*.example.com", "*.example.com:443"),
        ("*.Example.com:80,443", "*.example.com:80,443"),
        ("db.example.com:5432-5440", "db.example.com:5432-5440"),
        ("10.1.2.3:80", "10.1.2.3:80"),
    ],
)
def test_entries_of_an_allowlist(written: str, rule: str) -> None:
    assert allowlist([written]) == ((rule,), [])


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (["*:443"], "stands for every name"),
        (["*"], "stands for every name"),
        (["10.0.0.0/8:443"], "ranges of addresses are for operators"),
        (["example.com:1-65"], "names 65 ports"),
        (["a.example:1-40", "b.example:101-140"], "the list names 80 ports"),
        (["bücher.example"], "outside ASCII"),
        (["example.com."], "a dot at the end"),
        (["*.10.1.2.3:80"], "wildcard in front of an address"),
        (["example.*:443"], "wildcard"),
        ([], "the allowlist is empty, so there is no network"),
    ],
)
def test_entries_that_an_allowlist_cannot_have(written: list[str], why: str) -> None:
    _, messages = allowlist(written)
    assert len(messages) == 1 and why in messages[0], messages


def allowlist(written: list[str]) -> tuple[tuple[str, ...], list[str]]:
    faults = Faults(parse("f", b"", "toml"))
    items = Table({"hosts": written}).strings("hosts")
    return hosts(faults, items, ("hosts",), "[]"), [each.message for each in faults.diagnostics()]


WORDS = {"mem_mb": Word("memory", "M", "In MiB."), "wait_ms": Word("call", "ms", "In milliseconds.")}


def _limits(words: Words | None = None, **values: object) -> tuple[Limits, list[tuple[str, str, str]]]:
    faults = Faults(parse("f", b"", "toml"))
    found, _ = limits(faults, Table({"limits": values}), "limits", words)
    return found, [(d.rule, d.message, d.hint) for d in faults.diagnostics()]


def test_limit_names_are_the_fields_of_limits() -> None:
    assert tuple(LIMITS) == Limits._fields
    assert list(limits_schema()["properties"]) == [*Limits._fields]
    assert list(limits_schema(WORDS)["properties"]) == [*Limits._fields, *WORDS]


ALL: dict[str, tuple[object, float]] = {
    "memory": ("256M", 256 << 20),
    "pids": (20, 20),
    "cpu": ("50%", 0.5),
    "cpu_time": ("1m", 60.0),
    "io": ("10M", 10 << 20),
    "open_files": (64, 64),
    "file_size": ("1G", 1 << 30),
    "locked_memory": ("64K", 64 << 10),
    "message_queues": (8192, 8192),
    "disk": ("1G", 1 << 30),
    "tmp": ("16M", 16 << 20),
    "shm": ("16M", 16 << 20),
    "output": ("1M", 1 << 20),
    "output_lines": (1000, 1000),
    "launch": ("5s", 5.0),
    "handshake": (2.5, 2.5),
    "call": ("1h30m", 5400.0),
    "idle": ("1d", 86400.0),
    "teardown": ("500ms", 0.5),
    "deadline": (30, 30.0),
}


def test_all_limits_with_their_positions() -> None:
    faults = Faults(parse("f", b"", "toml"))
    table = Table({"limits": {name: written for name, (written, _) in ALL.items()}}, ("plugin",))
    found, where = limits(faults, table, "limits")
    assert faults.diagnostics() == ()
    assert found == Limits(**{name: amount for name, (_, amount) in ALL.items()})  # type: ignore[arg-type]
    assert where == tuple((name, ("plugin", "limits", name)) for name in ALL)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cpu", "half", "cpu: 'half' is not a number of cores"),
        ("pids", 1.5, "pids: 1.5 is not a whole number"),
        ("pids", 0, "pids: it has to be more than 0"),
        (
            "memory",
            256,
            "memory: 256 is less than 1 MiB, and no program starts with less; did you mean 256M?",
        ),
        ("deadline", math.inf, "deadline: inf is not a possible duration"),
        ("deadline", {}, "deadline: a dict is not a duration"),
    ],
)
def test_impossible_limits(name: str, value: object, message: str) -> None:
    found, [(rule, said, _)] = _limits(None, **{name: value})
    assert found == Limits()
    assert rule == "limit_value" and said.startswith(message)


def test_an_unknown_limit_is_an_error_with_a_guess() -> None:
    assert _limits(memroy=1) == (
        Limits(),
        [("limit_unknown", "the limit 'memroy' is unknown", "did you mean 'memory'?")],
    )
    assert _limits(WORDS, men_mb=1)[1][0][2] == "did you mean 'mem_mb'?"
    # A contract's own word is nobody else's.
    [(rule, _, hint)] = _limits(mem_mb=1)[1]
    assert rule == "limit_unknown" and hint == f"known here: {', '.join(Limits._fields)}"


# --- a contract's own words ------------------------------------------------------------------------


def test_a_contracts_own_limit_names_are_translated_and_keep_their_position() -> None:
    faults = Faults(parse("f", b"", "toml"))
    table = Table({"limits": {"wait_ms": 1500, "mem_mb": 2.5, "pids": 3}})
    assert limits(faults, table, "limits", WORDS) == (
        Limits(memory=5 << 19, pids=3, call=1.5),
        (("call", ("limits", "wait_ms")), ("memory", ("limits", "mem_mb")), ("pids", ("limits", "pids"))),
    )
    assert faults.diagnostics() == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("256", "mem_mb: it has to be a number, not a string"),
        ("256M", "mem_mb: it has to be a number, not a string"),
        (True, "mem_mb: it has to be a number, not a boolean"),
        ([], "mem_mb: it has to be a number, not an array"),
        (0, "mem_mb: it has to be more than 0"),
        (-5, "mem_mb: it has to be more than 0"),
        (-math.inf, "mem_mb: it has to be more than 0"),
        (math.nan, "mem_mb: that is not a possible number"),
        (math.inf, "mem_mb: that is not a possible number"),
        pytest.param(1 << 20_000, "mem_mb: that is not a possible number", id="huge"),
        (0.5, "mem_mb: '0.5M' is less than 1 MiB, and no program starts with less"),
        (1e-7, "mem_mb: '1e-07M' is not a size"),
    ],
)
def test_impossible_numbers_under_a_contracts_own_limit_names(value: object, message: str) -> None:
    found, [(rule, said, _)] = _limits(WORDS, mem_mb=value)
    assert found == Limits() and rule == "limit_value" and said.startswith(message)


@pytest.mark.parametrize("order", [("memory", "mem_mb"), ("mem_mb", "memory")])
@pytest.mark.parametrize("first", [256, "nonsense"])
def test_two_names_for_one_limit_are_an_error_even_with_equal_values(
    order: tuple[str, str], first: object
) -> None:
    _, said = _limits(WORDS, **{order[0]: first, order[1]: 256})
    assert said[-1] == (
        "limit_twice",
        f"{order[0]} and {order[1]} set the same limit",
        "keep one of them",
    )


@given(st.sampled_from([*Limits._fields, *WORDS]), st.integers(-5, 10**13) | st.floats() | st.text())
def test_the_schema_accepts_every_limit_that_the_reader_accepts(name: str, value: object) -> None:
    found, said = _limits(WORDS, **{name: value})
    assert (found == Limits()) == bool(said)
    if found != Limits():
        jsonschema.validate({name: value}, limits_schema(WORDS), cls=jsonschema.Draft202012Validator)


def test_models_have_the_profiles_of_the_cage() -> None:
    assert get_args(model.Seccomp) == get_args(SeccompProfile) != ()
