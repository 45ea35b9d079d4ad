"""Other cells on this machine, as far as this process can see them."""

from __future__ import annotations

import os

from sandbox.cell.cell import descendants
from sandbox.files import kernel_text
from sandbox.spawn import reaper
from sandbox.speed.typed import Iterator


def other_cells(own: int) -> Iterator[tuple[bool, list[int]]]:
    """The processes of each cell but the one whose init is `own`, and whether its pid is above `own`. Both
    cells give opposite answers to that, so it can decide between them."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != own and _is_cell_init(name):
            yield int(name) > own, descendants(int(name))


def _is_cell_init(pid: str) -> bool:
    """Whether this is the init of a cell: it has the name, and is the first process of its pid namespace. A
    plugin can take the name, but in its namespace bwrap is the first process."""
    try:
        if kernel_text(f"/proc/{pid}/comm").rstrip("\n") != reaper.NAME:
            return False
        numbers = next(
            line for line in kernel_text(f"/proc/{pid}/status").splitlines() if line.startswith("NSpid:")
        )
    except (OSError, ValueError, StopIteration):  # it has ended; a name that is not ASCII
        return False
    return numbers.split()[-1] == "1"
