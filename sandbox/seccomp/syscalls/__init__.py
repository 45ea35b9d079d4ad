"""System call numbers by name, one committed table per architecture.

The tables are data, not code: they come from the kernel's own exported headers and are written by
scripts/syscall-tables. Carrying them, instead of asking the installed libc or libseccomp, is what
makes the filters the same on every machine and lets them name calls newer than the machine's
libseccomp (2.5.4 has never heard of statmount or open_tree_attr).

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
