"""The rehearsal tries what a launch uses: an option added to one must be added to the other."""

from __future__ import annotations

from sandbox.doctor import rehearsal
from sandbox.plan import bwrap
from sandbox.plan.plan import Bind, Text
from tests.sandbox.cages import compiled, request

# Not a wall but a way to hand something over; if bwrap did not know one of them, no launch would work.
NOT_WALLS = {
    "--chdir",
    "--setenv",
    "--json-status-fd",
    "--sync-fd",
    "--file",
    "--symlink",
    "--ro-bind",
    "--bind-fd",
    "--bind",
}


def test_every_wall_of_a_launch_is_rehearsed() -> None:
    plan = compiled(request("/bin/true"))
    slots = bwrap.Slots(
        {op.dest: 3 for op in plan.operations if isinstance(op, Bind)},
        {op.dest: 4 for op in plan.operations if isinstance(op, Text)},
        {op.dest: "/f" for op in plan.folders},
        (5,),
        6,
    )
    used = {word for word in bwrap.options(plan, slots) if word.startswith("--")} - NOT_WALLS
    tried = {word for group in rehearsal._groups(3, 4) for word in group.options}
    tried |= set(rehearsal.foundation())
    assert len(used) > 15
    assert used <= tried
