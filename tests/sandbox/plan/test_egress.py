"""From a grant to what the gate lets through, and what this machine cannot enforce."""

from __future__ import annotations

import pytest

from sandbox.network.egress import EgressLimits, EgressPlan
from sandbox.network.trial import RecipeRefusal
from sandbox.plan.compile import plan_egress
from sandbox.plan.layers import Layers, LayerUnavailable, list_layers
from sandbox.policy.policy import NetworkRule
from sandbox.spawn.order import NetworkRecipe
from sandbox.spec import Network
from tests.sandbox.cages import grant, policy

NAMED = Network("allowlist", ("example.com:443", "*.example.org:80"))
ONE_FOR_EVERY_PORT = Network("allowlist", ("example.com:443", "example.org:*"))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[NetworkRecipe]:
    """The recipes that are tried, which is then not done."""
    found: list[NetworkRecipe] = []
    monkeypatch.setattr("sandbox.network.trial.try_recipe", found.append)
    return found


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (Network("none"), None),
        (Network("host"), None),
        (Network("allowlist", ()), None),  # an empty list is no network
        (NAMED, EgressPlan(NAMED.hosts)),
        (ONE_FOR_EVERY_PORT, EgressPlan(ONE_FOR_EVERY_PORT.hosts, every_port=True)),
        (Network("open"), EgressPlan(("*:*",), every_port=True)),
    ],
)
def test_the_gate_gets_the_hosts_of_the_grant(
    network: Network, expected: EgressPlan | None, tried: list[NetworkRecipe]
) -> None:
    assert plan_egress(grant()._replace(network=network), policy()) == expected
    # Only the redirection is tried: the rest needs nothing that a cage does not need.
    assert len(tried) == (expected is not None and expected.every_port)


def test_private_addresses_are_the_policys() -> None:
    rules = policy(network=NetworkRule(private=True))
    assert plan_egress(grant()._replace(network=NAMED), rules) == EgressPlan(NAMED.hosts, private=True)


def test_limits_are_the_policys() -> None:
    limits = EgressLimits(connections=3, bytes=1000, rate=100, idle=5.0)
    found = plan_egress(grant()._replace(network=NAMED), policy(network=NetworkRule(limits=limits)))
    assert found == EgressPlan(NAMED.hosts, limits=limits)


def test_without_a_cage_there_is_no_gate() -> None:
    assert plan_egress(grant()._replace(network=NAMED, unsandboxed=True), policy()) is None


def test_a_kernel_that_cannot_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(recipe: NetworkRecipe) -> None:
        raise RecipeRefusal("redirect every port of IPv4 to the gate", 95)

    monkeypatch.setattr("sandbox.network.trial.try_recipe", refuse)
    with pytest.raises(LayerUnavailable, match="redirect every port of IPv4") as caught:
        plan_egress(grant()._replace(network=ONE_FOR_EVERY_PORT), policy())
    assert caught.value.layer == "network" and "list the ports" in caught.value.hint
    assert str(caught.value).startswith("example.org:* allows every port")
    assert plan_egress(grant()._replace(network=NAMED), policy()) is not None


@pytest.mark.parametrize(
    ("network", "reach"),
    [
        (Network("none"), "loopback only"),
        (NAMED, "the 2 listed, by way of the gate"),
        (Network("open"), "every host by name, by way of the gate"),
        (Network("host"), "shares the host's network"),
    ],
)
def test_the_line_of_the_layer(network: Network, reach: str) -> None:
    rows = list_layers(Layers(b"", True, True, True, None), grant()._replace(network=network), policy())
    (row,) = (each for each in rows if each.name == "network")
    assert (row.requested, row.effective, row.detail) == (network.mode, network.mode, reach)
