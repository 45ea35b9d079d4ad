"""What is mounted in a cage, in order: the system's runtime, the plugin's paths, and files of our own."""

from __future__ import annotations

import os

from sandbox import look
from sandbox.network.egress import DNS_ADDRESS
from sandbox.paths.mounts import contains, join, relative
from sandbox.plan.plan import (
    Bind,
    Dev,
    Mask,
    Operation,
    PlanRequest,
    Proc,
    ReadOnly,
    Symlink,
    Text,
    Tmpfs,
)
from sandbox.spawn.order import FOLDERS_ROOT
from sandbox.spec import Grant, MemoryFile
from sandbox.speed.typed import Callable, Iterable, Iterator, Sequence

DEFAULT_TMP_BYTES = 64 << 20


DEFAULT_SHM_BYTES = 16 << 20


# The system's read-only runtime, as far as it exists here. Directories of the old layout (/bin, /lib, …)
# are links on a merged system and become the same links inside.
RUNTIME_TREES = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/pki/tls/certs")


RUNTIME_LINKS = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32", "/etc/localtime")


_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/services")


_NETWORK_FILE_LIMIT = 1 << 20


# World-readable or merely root-only parts of a procfs that tell about the host and not about the plugin.
# And of the cage's own init: its memory still holds bwrap's options and the host's mount table.
PROC_MASKS = (
    *("kallsyms", "kcore", "keys", "timer_list", "interrupts", "sched_debug", "kmsg"),
    *("1/mem", "1/task/1/mem"),
)


_PASSWD = b"root:x:0:0:root:/:/usr/sbin/nologin\nnobody:x:65534:65534:plugin:/tmp:/usr/sbin/nologin\n"


_GROUP = b"root:x:0:\nnogroup:x:65534:\n"


_HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"


_NSSWITCH = b"passwd: files\ngroup: files\nhosts: files\n"


# The gate answers at once. A plugin whose gate has ended shall not wait for it.
_RESOLVER = f"nameserver {DNS_ADDRESS}\noptions timeout:5 attempts:1\n".encode()
_NSSWITCH_DNS = b"passwd: files\ngroup: files\nhosts: files dns\n"


def operations(
    request: PlanRequest, grant: Grant, binds: Sequence[Bind], links: Iterable[Symlink]
) -> tuple[Operation, ...]:
    limits = grant.limits
    early = [bind for bind in binds if bind.dest in RUNTIME_TREES or bind.dest in RUNTIME_LINKS]
    masks = [Mask(f"/proc/{name}") for name in PROC_MASKS if look.kernel_lexists(f"/proc/{name}")]
    covered = {bind.dest for bind in binds}
    concealed = [
        Mask(join(bind.dest, relative(path, bind.real)))
        for path in request.conceal
        for bind in binds
        if not bind.writable and contains(bind.real, path)
    ]
    ways = dict.fromkeys(links)
    return (
        *early,
        *(link for link in ways if link.dest in RUNTIME_LINKS),
        Proc(),
        *masks,
        # bwrap covers /proc/sys only where its caller could write to the folder itself, while the sysctls of
        # the plugin's own namespaces are writable one by one; so is its own oom_score_adj.
        ReadOnly("/proc"),
        Dev(),
        *(() if grant.seccomp == "compat" else _NO_TERMINALS),
        _folder("/dev/shm", limits.shm or DEFAULT_SHM_BYTES),
        ReadOnly("/dev"),
        _folder("/tmp", limits.tmp or DEFAULT_TMP_BYTES),
        *(link for link in ways if link.dest not in RUNTIME_LINKS),  # after /tmp: some are below it
        *(bind for bind in binds if bind not in early),
        *dict.fromkeys(concealed),
        *(Text(dest, content) for dest, content in _texts(grant) if dest not in covered),
        *_scratch(grant),
        *grant.memory_files,  # after the scratch folder, which some are in
        ReadOnly("/"),
    )


# kernel.pty.max is one number for the whole machine: a plugin could take all pseudo-terminals there are.
_NO_TERMINALS = (Tmpfs("/dev/pts", 4096, 0o755), ReadOnly("/dev/pts"))


_BYTES_PER_INODE = 4096  # an empty file takes a kilobyte of the kernel's memory, and nothing of the size


_FEWEST_INODES = 1024


def _folder(dest: str, size: int, mode: int = 0o1777) -> Tmpfs:
    bounded = look.isdir(FOLDERS_ROOT)  # not in a chroot that somebody made by hand
    return Tmpfs(dest, size, mode, max(_FEWEST_INODES, size // _BYTES_PER_INODE) if bounded else 0)


def _scratch(grant: Grant) -> Iterator[Tmpfs]:
    size = grant.scratch_bytes
    if grant.scratch is not None and size is not None:
        yield _folder(grant.scratch.dest, size, 0o700)._replace(is_scratch=True)


def _texts(grant: Grant) -> Iterator[tuple[str, bytes]]:
    yield "/etc/passwd", _PASSWD
    yield "/etc/group", _GROUP
    if grant.network.mode != "host":
        yield "/etc/hosts", _HOSTS
        if grant.network.mode == "none":
            yield "/etc/nsswitch.conf", _NSSWITCH
            return
        yield "/etc/nsswitch.conf", _NSSWITCH_DNS
        yield "/etc/resolv.conf", _RESOLVER
        yield from _copies(("/etc/services",))
        return
    yield from _copies(_NETWORK_FILES)


def _copies(paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    # Copied and not bound: resolv.conf is often a link into /run, where daemons keep their sockets.
    for path in paths:
        look.note_content(path)
        try:
            with open(path, "rb") as file:
                yield path, file.read(_NETWORK_FILE_LIMIT)
        except OSError:
            continue


_FIXED_FOLDERS = ("/tmp", "/dev/shm", "/dev/pts")  # under names that the host has too


def sight_of(operations: Iterable[Operation], roots: Iterable[str] = ()) -> Callable[[str], bool]:
    """A function that tells whether an absolute path of the host leads to the same file in the cage.

    A place that only the cage has counts as shown: who names it means the cage's. A folder of the host that
    has another name in the cage is not shown under its own.
    `roots`: folders that count as shown if a part of them is. Not below /tmp: what a plugin writes there
    beside the part would be gone with its cage.
    """
    places = shown_places(operations)
    parts = [
        root
        for root in roots
        if not contains("/tmp", root) and any(contains(root, place) for place in places)
    ]
    return lambda path: path in parts or any(contains(place, path) for place in places)


def shown_places(operations: Iterable[Operation]) -> tuple[str, ...]:
    """The paths of the cage that lead to the same file as on the host, or that only the cage has. What lies
    below one of them counts too."""
    operations = tuple(operations)
    places = [op.dest for op in operations if isinstance(op, Bind | Symlink | Text)]
    places += [os.path.dirname(op.dest) for op in operations if isinstance(op, MemoryFile)]
    places += [op.dest for op in operations if isinstance(op, Tmpfs) and op.dest not in _FIXED_FOLDERS]
    return tuple(places)
