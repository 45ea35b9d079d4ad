"""A cage with one layer removed: the control of an attack. Everything else in it stays as planned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sandbox.attacks.attacks import Control
from sandbox.attacks.bounded import MOST_OUTPUT, BoundedRun, memory_file, run_bounded
from sandbox.paths.file_identity import FileIdentity
from sandbox.plan.bare import BareCommand, bare_command, vector
from sandbox.plan.plan import Bind, Dev, LaunchPlan, Mask, Operation, Proc, ReadOnly

# The lowest number of the descriptors that bwrap gets, above those of this process.
_FIRST = 200
_NO_IDENTITY = FileIdentity(0, 0, 0, 0)  # a bare command does not compare it


def without_layer(plan: LaunchPlan, control: Control) -> LaunchPlan:
    """The same plan without one layer."""
    layers, operations = plan.layers, plan.operations
    match control:
        case "filter":
            return plan._replace(layers=layers._replace(seccomp_filter=b""))
        case "lock":
            return plan._replace(layers=layers._replace(seccomp_filter=b"", user_namespace_lock=False))
        case "network" | "unix" if plan.seccomp == "strict" and layers.seccomp_filter:
            # This filter has no sockets. Without it the layer behind it would refuse.
            return without_layer(without_layer(plan, "filter"), control)
        case "network":
            return plan._replace(share_network=True)
        case "mounts" | "unix":
            return plan._replace(operations=(_bind("/"), Proc(), Dev(), _bind("/dev/shm")))
        case "masks":
            return plan._replace(operations=tuple(op for op in operations if not isinstance(op, Mask)))
        case "read_only":
            return plan._replace(operations=tuple(op for op in operations if not isinstance(op, ReadOnly)))
        case "pids":
            # Masks and the read-only mount of the cage's own /proc go with it.
            kept = [
                op
                for op in operations
                if not isinstance(op, Mask) and not (isinstance(op, ReadOnly) and op.dest == "/proc")
            ]
            return plan._replace(
                operations=tuple(_bind("/proc") if isinstance(op, Proc) else op for op in kept)
            )
        case _:
            return plan


def _bind(path: str) -> Operation:
    return Bind(path, path, True, _NO_IDENTITY)


def run_control(
    plan: LaunchPlan, bwrap: str, control: Control, program: bytes, most_output: int = MOST_OUTPUT
) -> BoundedRun:
    """Run the plan's command in bwrap, with `program` as its stdin. Without cgroups and rlimits."""
    command = bare_command(without_layer(plan, control), bwrap, "", _FIRST)
    if control == "pids":
        command = command._replace(options=tuple(word for word in command.options if word != "--unshare-pid"))
    uids = plan.layers.uid_range
    uid = uids[1] if os.geteuid() == 0 and uids is not None and control != "uid" else None
    with _opened(command, plan.layers.seccomp_filter) as numbers:
        return run_bounded(
            vector(command), stdin=program, env={}, uid=uid, pass_fds=numbers, most_output=most_output
        )


@contextmanager
def _opened(command: BareCommand, seccomp_filter: bytes) -> Iterator[list[int]]:
    """The files of a command, under the numbers that it names. The one without content is the filter."""
    numbers: list[int] = []
    try:
        for file in command.files:
            content = memory_file(seccomp_filter if file.content is None else file.content)
            os.dup2(content, file.number)
            os.close(content)
            numbers.append(file.number)
        yield numbers
    finally:
        for number in numbers:
            os.close(number)
