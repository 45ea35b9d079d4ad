"""What the doctor says about lists of hosts: tried for real, and each answer also forced the other way."""

from __future__ import annotations

import errno

import pytest

from sandbox.doctor import named_hosts as module
from sandbox.doctor.named_hosts import named_hosts
from sandbox.network.egress import EgressPlan
from sandbox.network.recipe import make_recipe
from sandbox.network.trial import RecipeRefusal, try_recipe
from sandbox.spawn.order import NetworkRecipe
from tests import elsewhere
from tests.conftest import Caller

REDIRECT = "redirect every port of IPv4 to the gate"


def refuse(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse_step(recipe: NetworkRecipe) -> None:
        if any(step == each.step for each in recipe.requests):
            raise RecipeRefusal(step, errno.EOPNOTSUPP)

    monkeypatch.setattr(module, "try_recipe", refuse_step)


def test_a_machine_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "switch on loopback")
    (found,) = named_hosts()
    assert (found.layer, found.status) == ("named_hosts", "missing")
    assert "could not switch on loopback: Operation not supported" in found.summary and found.remedy


def test_a_kernel_without_nftables(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, REDIRECT)
    works, lacks = named_hosts()
    assert (works.status, lacks.layer, lacks.status) == ("ok", "every_port", "info")
    assert REDIRECT in lacks.summary and "CONFIG_NFT_REDIR" in lacks.remedy


def examined() -> list[list[str]]:
    from sandbox.doctor.named_hosts import named_hosts

    return [[each.layer, each.status, each.summary] for each in named_hosts()]


def test_this_machine(runner_as: Caller) -> None:
    found = elsewhere.run(runner_as, examined)
    assert [row[0] for row in found] == ["named_hosts", "every_port"], found
    assert found[0][1] == "ok"  # the second depends on how the kernel was built


@pytest.mark.launches
def test_a_recipe_that_the_kernel_refuses_is_told_with_its_step() -> None:
    recipe = make_recipe(EgressPlan(("*:*",), every_port=True))
    broken = [
        each._replace(messages=each.messages.replace(b"redir\0", b"rodir\0"))
        if each.step == REDIRECT
        else each
        for each in recipe.requests
    ]
    with pytest.raises(RecipeRefusal, match=f"could not {REDIRECT}: No such file"):
        try_recipe(recipe._replace(requests=tuple(broken)))
    try_recipe(recipe)
