"""System call numbers by name, one committed table per architecture.

The tables are data: scripts/syscall-tables writes them from the kernel's exported headers. They do not come
from the installed libc or libseccomp, so the filters are the same on every machine, and can name calls that
are newer than the machine's libseccomp (2.5.4 does not know statmount or open_tree_attr).

A launch reads none of this: it uses the compiled filters. Only compiling, explaining and testing do.
"""

from __future__ import annotations

import os

ARCHES: tuple[str, ...] = ("aarch64", "x86_64")

_DIRECTORY = os.path.dirname(os.path.abspath(__file__))


def table_path(arch: str) -> str:
    if arch not in ARCHES:
        raise ValueError(f"no system call table for {arch}; there are tables for {', '.join(ARCHES)}")
    return os.path.join(_DIRECTORY, f"{arch}.txt")


def load(arch: str) -> dict[str, int]:
    """Name to number, in ascending order of numbers."""
    with open(table_path(arch), encoding="ascii") as lines:
        rows = [line.split() for line in lines if not line.startswith("#")]
    return {name: int(number) for number, name in rows}
