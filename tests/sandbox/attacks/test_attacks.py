"""The list itself: every row can be tried, judged and explained."""

from __future__ import annotations

import inspect
import re
from typing import get_args

from sandbox.attacks import attacks, probe
from sandbox.attacks.attacks import ATTACKS, LAYERS, Control, Group
from sandbox.seccomp import syscalls


def test_every_class_has_attacks_and_every_layer_is_attacked() -> None:
    assert {each.group for each in ATTACKS} == set(get_args(Group))
    assert {each.layer for each in ATTACKS} == set(LAYERS)
    assert {layer.control for layer in LAYERS.values()} == set(get_args(Control))
    ids = {each.id for each in ATTACKS}
    assert len(ids) == len(ATTACKS)
    assert set(attacks._CVES) <= ids
    assert all(re.fullmatch(r"CVE-\d{4}-\d{4,}", cve) for each in ATTACKS for cve in each.cves)


def test_every_act_can_be_called() -> None:
    calls = {*syscalls.load("x86_64"), *syscalls.load("aarch64")}
    for attack in ATTACKS:
        name, *arguments = attack.act
        if name != "say":
            inspect.signature(getattr(probe, name)).bind(*arguments)
        named = {word[5:] for word in arguments if word.startswith("call:")}
        assert named <= calls, attack.id
        assert attack.held and "done" not in attack.held


def test_the_last_attack_on_limits_is_the_one_that_ends_the_plugin() -> None:
    assert [each.limit for each in ATTACKS if each.limit][-1] == "memory"
