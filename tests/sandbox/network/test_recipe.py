"""From rules to messages and sockets: the same bytes every time, and remembered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import cache
from sandbox.network import recipe as recipes
from sandbox.network.egress import EgressPlan
from sandbox.network.recipe import find_recipe, make_recipe
from sandbox.spawn.network import HEADER
from sandbox.spawn.order import NetworkRecipe
from tests.conftest import ROOT


def listeners(recipe: NetworkRecipe) -> list[tuple[str, int]]:
    return [(each.address, each.port) for each in recipe.sockets if each.use == "listener"]


def numbers(messages: bytes) -> list[int]:
    found, at = [], 0
    while at < len(messages):
        length, _, flags, number, _ = HEADER.unpack_from(messages, at)
        assert length % 4 == 0
        if flags & 4:
            found.append(number)
        at += length
    assert at == len(messages)
    return found


# The messages in bytes, as the kernel's headers have them: a change of pyroute2 must not change them.
LOOPBACK_UP = bytes.fromhex("2000000010000500010000000000000000000000010000000100000001000000")
SYNTHETIC_ROUTE = bytes.fromhex(
    "3400000018000505010000000000000002110000ff03fe020000000008000100c6128000080004000100000008000f00ff000000"
)


def test_the_messages_of_every_namespace() -> None:
    up, fourth, sixth = make_recipe(EgressPlan(("example.com:443",))).requests
    assert (up.messages, fourth.messages) == (LOOPBACK_UP, SYNTHETIC_ROUTE)
    assert (up.version, fourth.version, sixth.version) == (4, 4, 6)
    assert bytes.fromhex("fd6ea9c152e7b04d") in sixth.messages


@pytest.mark.parametrize(
    ("rules", "routes"),
    [
        (("example.com:443", "*.example.org:80", "*:8080"), (1, 1)),  # names need no route of their own
        (("9.9.9.9:443", "10.0.0.0/8:443"), (3, 1)),
        (("10.1.0.0/16:443", "10.0.0.0/8:443", "10.9.9.9:80"), (2, 1)),  # one contains the others
        (("[2001:db8::7]:443", "[2001:db8:1::]/48:443"), (1, 3)),
        (("0.0.0.0/0:443",), (1, 1)),
    ],
)
def test_addresses_of_the_rules_lead_to_the_gate(rules: tuple[str, ...], routes: tuple[int, int]) -> None:
    _, fourth, sixth = make_recipe(EgressPlan(rules)).requests
    assert (numbers(fourth.messages), numbers(sixth.messages)) == tuple(
        list(range(1, count + 1)) for count in routes
    )


def test_many_addresses_are_sent_in_parts() -> None:
    plan = EgressPlan(tuple(f"9.9.{number}.1:443" for number in range(200)))
    parts = [each for each in make_recipe(plan).requests if "IPv4" in each.step]
    assert [len(numbers(part.messages)) for part in parts] == [64, 64, 64, 9]


@pytest.mark.parametrize(
    ("rules", "ports"),
    [
        (("example.com:443",), [443]),
        (("example.com:443", "example.org:80,443"), [80, 443]),
        (("example.com:8000-8002",), [8000, 8001, 8002]),
        (("example.com:53",), [53]),
    ],
)
def test_each_port_has_its_listeners(rules: tuple[str, ...], ports: list[int]) -> None:
    recipe = make_recipe(EgressPlan(rules))
    assert [each.use for each in recipe.sockets[:2]] == ["dns_udp", "dns_tcp"]
    assert listeners(recipe) == [(address, port) for port in ports for address in ("0.0.0.0", "::")]
    # Two sockets share a port only where the resolver's own port is listed.
    assert sum(each.shares_port for each in recipe.sockets) == (2 if 53 in ports else 0)


def test_every_port_needs_one_listener_and_no_other() -> None:
    recipe = make_recipe(EgressPlan(("*:*", "example.com:443"), every_port=True))
    assert listeners(recipe) == []
    assert [(each.use, each.port) for each in recipe.sockets[2:]] == [("redirected", 1)] * 2
    batches = [each for each in recipe.requests if "redirect" in each.step]
    assert [(batch.protocol, batch.version) for batch in batches] == [(12, 4), (12, 6)]
    # A table, two chains, three rules and one. The ends are not answered.
    assert [numbers(batch.messages) for batch in batches] == [list(range(2, 9))] * 2


def test_a_rule_for_every_port_is_not_forgotten() -> None:
    with pytest.raises(ValueError, match="every port"):
        make_recipe(EgressPlan(("example.com:*",)))


def test_a_wrong_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="no port"):
        make_recipe(EgressPlan(("example.com",)))


# --- remembered --------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(cache, "directory", lambda: str(folder))
    return folder


@pytest.mark.usefixtures("own_cache")
def test_a_recipe_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [EgressPlan(("example.com:443",)), EgressPlan(("example.com:80",))]
    plans.append(plans[0]._replace(every_port=True))
    made = [find_recipe(plan) for plan in plans]
    assert made == [make_recipe(plan) for plan in plans]
    monkeypatch.setattr(recipes, "make_recipe", None)
    assert [find_recipe(plan) for plan in plans] == made
    # What the messages do not depend on makes no other entry.
    assert find_recipe(plans[0]._replace(private=True)) == made[0]
    with pytest.raises(TypeError):
        find_recipe(EgressPlan(("example.com:22",)))


def test_a_damaged_entry_is_made_again(own_cache: Path) -> None:
    plan = EgressPlan(("example.com:443",))
    made = find_recipe(plan)
    (entry,) = own_cache.iterdir()
    entry.write_bytes(entry.read_bytes().replace(b"loopback", b"lookback"))
    assert find_recipe(plan) == made


def test_a_known_recipe_imports_nothing_slow(tmp_path: Path) -> None:
    act = (
        f"from sandbox import cache; cache.directory = lambda: {str(tmp_path / 'cache')!r}; "
        "import sys; from sandbox.network.egress import EgressPlan; "
        "from sandbox.network.recipe import find_recipe; find_recipe(EgressPlan(('example.com:443',))); "
        "print('pyroute2' in sys.modules, 'ipaddress' in sys.modules, 'socket' in sys.modules)"
    )
    argv, environ = [sys.executable, "-c", act], {"PYTHONPATH": str(ROOT)}
    said = [subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120) for _ in range(2)]
    assert [each.stdout.split() for each in said] == [["True"] * 3, ["False"] * 3], said[0].stderr
