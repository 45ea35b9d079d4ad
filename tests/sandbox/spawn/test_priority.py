"""What it does is tested in tests/escape/test_processes.py, with a caller that has every higher priority."""

from __future__ import annotations

import pytest

from sandbox.seccomp import syscalls
from sandbox.spawn.priority import SYSCALLS


@pytest.mark.parametrize("arch", sorted(SYSCALLS))
def test_numbers_are_those_of_the_tables(arch: str) -> None:
    table = syscalls.load(arch)
    assert SYSCALLS[arch]._asdict() == {name: table[name] for name in SYSCALLS[arch]._fields}
