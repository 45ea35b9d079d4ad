"""Make bubblewrap's arguments from a LaunchPlan. Pure. The only module that knows bubblewrap's options."""

from __future__ import annotations

from sandbox.plan.plan import (
    AgentFolder,
    Bind,
    Dev,
    LaunchPlan,
    Mask,
    Operation,
    Proc,
    ReadOnly,
    Symlink,
    Text,
    Tmpfs,
)
from sandbox.spawn.order import AGENT_FOLDER
from sandbox.spec import MemoryFile
from sandbox.speed.typed import Iterable, Mapping
from sandbox.speed.value import NamedTuple


class Slots(NamedTuple):
    """The descriptors of one launch, by purpose."""

    sources: Mapping[str, int]  # by destination
    texts: Mapping[str, int]  # by destination, including memory files
    folders: Mapping[str, str]  # by destination: temporary folders and idmapped mounts, already mounted there
    filters: tuple[
        int, ...
    ]  # empty: there is no filter for this machine, and the policy does not require one
    status: int
    launcher: int | None = None  # None: it needs no name
    own_network: bool = False  # the cell's init has made the plugin's network namespace
    overlays: tuple[str, ...] = ()  # destinations, among those of `folders`


# Path of the launcher in the cage, if it needs one.
LAUNCHER = "/.launcher"


def options(plan: LaunchPlan, slots: Slots) -> tuple[str, ...]:
    """bwrap's options, passed through --args: everything but the program."""
    program = () if slots.launcher is None else ("--perms", "0555", "--file", str(slots.launcher), LAUNCHER)
    return (
        *head(plan, plan.share_network or slots.own_network),
        "--json-status-fd",
        str(slots.status),
        # The kernel runs every filter, and the strictest result counts.
        *flat(("--add-seccomp-fd", str(fd)) for fd in slots.filters),
        *program,  # first: the last operations make the root read-only
        *flat(_with_descriptors(op, slots) for op in plan.operations),
        *tail(plan),
    )


def head(plan: LaunchPlan, inherits_network: bool) -> tuple[str, ...]:
    network = () if inherits_network else ("--unshare-net",)
    cgroup = ("--unshare-cgroup",) if plan.layers.cgroup_namespace else ()
    lock = ("--disable-userns", "--assert-userns-disabled") if plan.layers.user_namespace_lock else ()
    return (
        "--unshare-user",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        *network,
        *cgroup,
        *lock,
        "--uid",
        str(plan.inside[0]),
        "--gid",
        str(plan.inside[1]),
        "--hostname",
        "plugin",
        "--cap-drop",
        "ALL",
        "--new-session",
        "--die-with-parent",
        "--clearenv",
    )


def tail(plan: LaunchPlan) -> tuple[str, ...]:
    return (
        "--chdir",
        plan.directory,
        *flat(("--setenv", name, value) for name, value in plan.env),
    )


def _with_descriptors(op: Operation, slots: Slots) -> tuple[str, ...]:
    match op:
        case Bind(dest, _, writable, _) if dest in slots.folders:  # an idmapped mount or an overlay
            writable = writable or dest in slots.overlays
            return ("--bind" if writable else "--ro-bind", slots.folders[dest], dest)
        case Bind(dest, _, writable, _):
            # bwrap mounts by path here too, but compares device and inode of what it mounted with the
            # descriptor's, and fails if they differ.
            return ("--bind-fd" if writable else "--ro-bind-fd", str(slots.sources[dest]), dest)
        case Tmpfs(dest, _, _, inodes) if inodes:
            return ("--bind", slots.folders[dest], dest)
        case _:
            return without_source(op, slots.texts)


def without_source(op: Operation, texts: Mapping[str, int]) -> tuple[str, ...]:
    match op:
        case Text(dest, _, covers):
            return ("--perms", "0444", "--ro-bind-data" if covers else "--file", str(texts[dest]), dest)
        case MemoryFile(dest, mode, _):
            # A file that belongs to the plugin. On the read-only root of the cage it cannot even change the
            # mode.
            return ("--perms", f"{mode:04o}", "--file", str(texts[dest]), dest)
        case Tmpfs(dest, size, mode, _):
            return ("--perms", f"{mode:04o}", "--size", str(size), "--tmpfs", dest)
        case Symlink(dest, target):
            return ("--symlink", target, dest)
        case Mask(dest):
            return ("--ro-bind", "/dev/null", dest)
        case Proc(dest):
            return ("--proc", dest)
        case AgentFolder(dest):
            return ("--ro-bind", AGENT_FOLDER, dest)
        case Dev(dest):
            return ("--dev", dest)
        case ReadOnly(dest):
            return ("--remount-ro", dest)
        case _:
            raise TypeError(op)


def flat(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(word for group in groups for word in group)
