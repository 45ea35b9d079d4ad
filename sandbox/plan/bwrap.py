"""LaunchPlan -> bubblewrap's arguments. Pure; the only module that knows its options."""

from __future__ import annotations

import os

from sandbox.plan.layers import INSIDE_ID
from sandbox.plan.plan import (
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
from sandbox.spec import MemoryFile
from sandbox.typed import Iterable, Mapping
from sandbox.value import NamedTuple


class Slots(NamedTuple):
    """The descriptors of one launch, by what they are for."""

    sources: Mapping[str, int]  # by destination
    texts: Mapping[str, int]  # by destination, with the files that exist only in memory
    folders: Mapping[str, str]  # by destination: where temporary folders and idmapped mounts are already
    filters: tuple[int, ...]  # none: there is no filter for this machine, and the policy can do without
    status: int
    launcher: int | None = None  # None: it needs no name


# Where the launcher is, if it has to have a name.
LAUNCHER = "/.launcher"


def options(plan: LaunchPlan, slots: Slots) -> tuple[str, ...]:
    """bwrap's options, passed through --args: everything but the program."""
    program = () if slots.launcher is None else ("--perms", "0555", "--file", str(slots.launcher), LAUNCHER)
    # The cell's init has made the network namespace that the gate serves.
    inherits_network = plan.share_network or plan.egress is not None
    return (
        *_head(plan, inherits_network),
        "--json-status-fd",
        str(slots.status),
        # Each is asked, and the strictest answer holds.
        *_flat(("--add-seccomp-fd", str(fd)) for fd in slots.filters),
        *program,  # first: at the end the root is read-only
        *_flat(_with_descriptors(op, slots) for op in plan.operations),
        *_tail(plan),
    )


def command_line(
    plan: LaunchPlan, bwrap: str, seccomp_file: str, environ: Mapping[str, str] | None = None
) -> str:
    """The same launch as a line for bash, with paths where a launch has descriptors: for people to read and
    try. A path can be swapped between two looks; that is why the runner itself does not use it. What the
    runner mounts idmapped is a plain bind here. There is no gate, and so no host can be reached.

    What exists only in memory is read from a file here, named after the secret.

    A variable that has the value it has in `environ` is named instead of shown: it may be a secret, and a
    line that is read is also pasted.
    """
    from shlex import quote as quote_printable

    def quote(word: str) -> str:
        if word.isprintable():
            return quote_printable(word)
        # A stranger's file names go to a terminal: use bash's own notation for unprintable characters.
        return "$'" + "".join(c if c.isprintable() and c not in "'\\" else _escaped(c) for c in word) + "'"

    files = [op for op in plan.operations if isinstance(op, Text | MemoryFile)]
    texts = {op.dest: fd for fd, op in enumerate(files, 11)}
    options = [
        bwrap,
        *_head(plan, plan.share_network),
        *_flat(_with_paths(op, texts) for op in plan.operations),
        *_tail(plan._replace(env=())),
    ]
    variables = [
        f"--setenv {quote(name)} " + (f'"${name}"' if (environ or {}).get(name) == value else quote(value))
        for name, value in plan.env
    ]
    rest = [*(("--seccomp", "10") if plan.layers.seccomp_filter else ()), "--", *plan.argv]
    redirections = [f"10<{quote(seccomp_file)}"] if plan.layers.seccomp_filter else []
    for op in files:
        if isinstance(op, Text):
            content = op.content.decode(errors="replace")
            redirections.append(f"{texts[op.dest]}< <(printf %s {quote(content)})")
        else:  # a file that whoever tries the line has to bring
            redirections.append(f"{texts[op.dest]}<{quote(op.secret or os.path.basename(op.dest))}")
    return " ".join((*map(quote, options), *variables, *map(quote, rest), *redirections))


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def _head(plan: LaunchPlan, inherits_network: bool) -> tuple[str, ...]:
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
        str(INSIDE_ID),
        "--gid",
        str(INSIDE_ID),
        "--hostname",
        "plugin",
        "--cap-drop",
        "ALL",
        "--new-session",
        "--die-with-parent",
        "--clearenv",
    )


def _tail(plan: LaunchPlan) -> tuple[str, ...]:
    return (
        "--chdir",
        plan.directory,
        *_flat(("--setenv", name, value) for name, value in plan.env),
    )


def _with_descriptors(op: Operation, slots: Slots) -> tuple[str, ...]:
    match op:
        case Bind(dest, _, writable, _) if dest in slots.folders:  # an idmapped mount
            return ("--bind" if writable else "--ro-bind", slots.folders[dest], dest)
        case Bind(dest, _, writable, _):
            # Mounted by path all the same, but bwrap compares device and inode of what it mounted with the
            # descriptor's, and gives up if they differ.
            return ("--bind-fd" if writable else "--ro-bind-fd", str(slots.sources[dest]), dest)
        case Tmpfs(dest, _, _, inodes) if inodes:
            return ("--bind", slots.folders[dest], dest)
        case _:
            return _plain(op, slots.texts)


def _with_paths(op: Operation, texts: Mapping[str, int]) -> tuple[str, ...]:
    match op:
        case Bind(dest, real, writable, _):
            return ("--bind" if writable else "--ro-bind", real, dest)
        case _:
            return _plain(op, texts)


def _plain(op: Operation, texts: Mapping[str, int]) -> tuple[str, ...]:
    match op:
        case Text(dest, _):
            return ("--perms", "0444", "--file", str(texts[dest]), dest)
        case MemoryFile(dest, mode, _):
            # A file of the plugin's own. On the cage's root, which becomes read-only, not even its mode can
            # be changed afterwards.
            return ("--perms", f"{mode:04o}", "--file", str(texts[dest]), dest)
        case Tmpfs(dest, size, mode, _):
            return ("--perms", f"{mode:04o}", "--size", str(size), "--tmpfs", dest)
        case Symlink(dest, target):
            return ("--symlink", target, dest)
        case Mask(dest):
            return ("--ro-bind", "/dev/null", dest)
        case Proc(dest):
            return ("--proc", dest)
        case Dev(dest):
            return ("--dev", dest)
        case ReadOnly(dest):
            return ("--remount-ro", dest)
        case _:
            raise TypeError(op)


def _flat(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(word for group in groups for word in group)
