"""The filter of `runner learn`: which calls it hands to the observer."""

from __future__ import annotations

import pytest

from sandbox.seccomp import syscalls
from sandbox.seccomp.filter import AUDIT_ARCH
from sandbox.seccomp.observation import AT_EMPTY_PATH, OBSERVED, USER_NOTIF, observed_calls, observing_filter
from tests.sandbox.seccomp.bpf_machine import Machine

ALLOW = 0x7FFF0000


@pytest.mark.parametrize("arch", syscalls.ARCHES)
def test_exactly_these_calls_are_observed(arch: str) -> None:
    machine, audit, table = Machine(observing_filter(arch)), AUDIT_ARCH[arch], syscalls.load(arch)
    assert machine.unreachable() == []
    verdicts = {name: machine.run(audit, number)[0] for name, number in table.items()}
    assert set(verdicts.values()) == {ALLOW, USER_NOTIF}
    assert {name for name, verdict in verdicts.items() if verdict == USER_NOTIF} == set(OBSERVED) & set(table)
    assert machine.run(audit, 100_000)[0] == ALLOW


@pytest.mark.parametrize("arch", syscalls.ARCHES)
def test_a_call_about_a_descriptor_is_not_observed(arch: str) -> None:
    machine, audit = Machine(observing_filter(arch)), AUDIT_ARCH[arch]
    judged = {number: call.empty for number, (_, call) in observed_calls(arch).items() if call.empty >= 0}
    assert len(judged) == 4
    for number, index in judged.items():
        arguments = [0] * 6
        arguments[index] = AT_EMPTY_PATH | 0x100
        assert machine.run(audit, number, *arguments)[0] == ALLOW
        arguments[index] = 0x100
        assert machine.run(audit, number, *arguments)[0] == USER_NOTIF


def test_calls_of_another_architecture_are_left_to_the_cage() -> None:
    for arch, other in zip(syscalls.ARCHES, reversed(syscalls.ARCHES), strict=True):
        machine = Machine(observing_filter(arch))
        assert {machine.run(AUDIT_ARCH[other], number)[0] for number in range(600)} == {ALLOW}
