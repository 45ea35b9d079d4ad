"""Hosts and budgets as manifests write them."""

from __future__ import annotations

import math

import pytest

from runner.faults import Faults
from runner.requests import LIMITS, limits, parse_host
from runner.table import Table
from sandbox.document import parse
from sandbox.spec import Limits


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
        ("[2001:DB8::0:1]:443", "[2001:db8::1]:443"),
    ],
)
def test_hosts(written: str, host: str) -> None:
    assert parse_host(written) == host


@pytest.mark.parametrize(
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
def test_what_is_not_one_host(written: str) -> None:
    with pytest.raises(ValueError, match=r"is|has|contains"):
        parse_host(written)


def _limits(**values: object) -> tuple[Limits, list[str]]:
    faults = Faults(parse("f", b"", "toml"))
    found, _ = limits(faults, Table({"limits": values}), "limits")
    return found, [d.message for d in faults.diagnostics()]


def test_the_names_are_those_of_the_value() -> None:
    assert set(LIMITS) == set(Limits._fields)


@pytest.mark.parametrize(("written", "cores"), [(1, 1.0), (0.25, 0.25), ("50%", 0.5), ("250 %", 2.5)])
def test_cores(written: object, cores: float) -> None:
    assert _limits(cpu=written) == (Limits(cpu=cores), [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu", "half"),
        ("cpu", "0%"),
        ("cpu", -1),
        ("cpu", math.nan),
        ("cpu", 1e9),
        ("pids", 1.5),
        ("pids", "20"),
        ("pids", True),
        ("pids", 1 << 23),
        ("open_files", -1),
        ("memory", 0),
        ("memory", 1.5),
        ("deadline", math.inf),
        ("deadline", 0),
    ],
)
def test_impossible_budgets(name: str, value: object) -> None:
    found, messages = _limits(**{name: value})
    assert found == Limits()
    assert len(messages) == 1 and messages[0].startswith(f"{name}: ")
