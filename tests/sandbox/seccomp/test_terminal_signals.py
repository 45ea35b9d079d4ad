"""The filter of a plugin with a terminal. Its purpose is tested in tests/runner/launch/test_terminals.py."""

from __future__ import annotations

import errno
import os

import pytest

from sandbox.seccomp import syscalls
from sandbox.seccomp.filter import AUDIT_ARCH
from sandbox.seccomp.terminal_signals import no_terminal_signals
from tests.sandbox.seccomp.bpf_machine import Machine

ALLOW, EPERM = 0x7FFF0000, 0x00050000 | errno.EPERM
HIGH = 0xFFFFFFFF_00000000
SETFL, FIOASYNC, FIONBIO = 4, 0x5452, 0x5421


@pytest.mark.parametrize("arch", sorted(AUDIT_ARCH))
def test_o_async_is_refused_and_nothing_else(arch: str) -> None:
    machine, audit, table = Machine(no_terminal_signals(arch)), AUDIT_ARCH[arch], syscalls.load(arch)
    assert machine.unreachable() == []
    assert {machine.run(audit, number)[0] for number in table.values()} == {ALLOW}
    fcntl, ioctl = table["fcntl"], table["ioctl"]
    for arguments, expected in (
        ((fcntl, 0, SETFL, os.O_ASYNC), EPERM),
        ((fcntl, 0, HIGH | SETFL, HIGH | os.O_ASYNC | os.O_NONBLOCK), EPERM),
        ((fcntl, 0, SETFL, os.O_NONBLOCK | os.O_APPEND), ALLOW),
        ((fcntl, SETFL, 3, os.O_ASYNC), ALLOW),
        ((ioctl, 0, FIOASYNC), EPERM),
        ((ioctl, 0, HIGH | FIOASYNC), EPERM),
        ((ioctl, FIOASYNC, FIONBIO), ALLOW),
        ((table["read"], 0, SETFL, os.O_ASYNC), ALLOW),
    ):
        assert machine.run(audit, *arguments)[0] == expected, arguments
    assert machine.run(0, ioctl, 0, FIOASYNC)[0] == ALLOW  # of another architecture
