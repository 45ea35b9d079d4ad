"""Id-mapped mounts, in which the owner of a folder appears as the plugin.

They are made by mount_setattr(2) with MOUNT_ATTR_IDMAP: on such a mount the files of one host uid have the
plugin's uid, and files that the plugin writes belong to that host uid. No other uid is mapped. The kernel
refuses every change to a file whose owner has no mapping, also if its mode bits allow it.

All groups are mapped: a file whose group has no mapping could not be changed by its own owner. The owner's
group becomes the plugin's, the others stay as on the host. The plugin is in no other group, so they give it
no rights.

Root makes the mount here, outside of any mount namespace: the kernel requires CAP_SYS_ADMIN over the
filesystem, which a user namespace does not have. The spawner attaches it in the cell's own mounts.
"""

from __future__ import annotations

import errno
import os
import struct

from sandbox.files import write_once
from sandbox.speed.libc import Library, MachineWord, addressof, get_errno, open_libc, writable
from sandbox.speed.signals import signal
from sandbox.speed.typed import Iterator
from sandbox.speed.value import NamedTuple

_CLONE_VM = 0x00000100
_CLONE_NEWUSER = 0x10000000
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOUNT_ATTR_RDONLY = 0x1
_MOUNT_ATTR_NOSUID = 0x2
_MOUNT_ATTR_NODEV = 0x4
_MOUNT_ATTR_IDMAP = 0x100000
_MS_PRIVATE = 0x40000
_MOUNT_ATTR = struct.Struct("=4Q")  # attr_set, attr_clr, propagation, userns_fd


# How long a namespace's process lives, should we die before we kill it.
_NAMESPACE_SECONDS = 60
_STACK_BYTES = 64 << 10


class _MountNumbers(NamedTuple):
    open_tree: int
    mount_setattr: int


_SYSCALLS = {"x86_64": _MountNumbers(428, 442), "aarch64": _MountNumbers(428, 442)}


class FileOwner(NamedTuple):
    """A uid and a gid of the host."""

    uid: int
    gid: int


class IdmapUnavailable(Exception):
    """The mount cannot be made; the message names the refused step."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(f"{step}: {os.strerror(code)}")
        self.errno = code


def idmapped_mount(source: int, owner: FileOwner, plugin: FileOwner, *, read_only: bool = False) -> int:
    """A detached, recursive mount of `source`, in which `owner` appears as `plugin`.

    `source` is an open descriptor; O_PATH is enough. The opened file is mounted, also if its name leads
    elsewhere by now. The caller closes the returned descriptor.
    """
    if plugin.uid == 0 or (not read_only and (owner.uid == 0 or owner.gid == 0)):
        raise ValueError("root is never mapped")
    return _detached_mount(source, (owner, plugin), read_only)


def detached_mount(source: int) -> int:
    """The same without a mapping."""
    return _detached_mount(source, None, False)


def _detached_mount(source: int, mapped: tuple[FileOwner, FileOwner] | None, read_only: bool) -> int:
    numbers = _SYSCALLS.get(os.uname().machine)
    if numbers is None:
        raise IdmapUnavailable("make system calls on this architecture", errno.ENOSYS)
    libc = open_libc()

    def call(step: str, number: int, *arguments: object) -> int:
        result = int(libc.syscall(number, *arguments))
        if result < 0:
            raise IdmapUnavailable(step, get_errno())
        return result

    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    tree = call(
        "copy its mount", numbers.open_tree, source, b"", flags | _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
    )
    try:
        namespace = 0 if mapped is None else _mapping(libc, *mapped)
        try:
            wanted = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV | (_MOUNT_ATTR_RDONLY if read_only else 0)
            wanted |= 0 if mapped is None else _MOUNT_ATTR_IDMAP
            # Private: in a copy of a shared mount, later mounts of the host would appear.
            attributes = _MOUNT_ATTR.pack(wanted, 0, _MS_PRIVATE, namespace)
            step = "map the owner of its files"
            call(step, numbers.mount_setattr, tree, b"", flags, attributes, MachineWord(len(attributes)))
        finally:
            if mapped is not None:
                os.close(namespace)
    except BaseException:
        os.close(tree)
        raise
    return tree


def _mapping(libc: Library, owner: FileOwner, plugin: FileOwner) -> int:
    """A descriptor of a user namespace with the mapping. The kernel needs one; no program runs in it."""
    stack = writable(_STACK_BYTES)
    top = MachineWord(addressof(stack) + _STACK_BYTES)
    # The child runs nothing but sleep(), on a stack of its own, and is killed there, before that memory is
    # given back. So it needs no copy of ours: to make one takes ten times as long as all the rest. A line of
    # Python might wait there for ever: to hand the interpreter lock to a thread that wanted it in the parent,
    # and that the child does not have.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        flags = signal.SIGCHLD | _CLONE_NEWUSER | _CLONE_VM
        pid = int(libc.clone(libc.sleep, top, flags, MachineWord(_NAMESPACE_SECONDS)))
        code = get_errno()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid < 0:
        raise IdmapUnavailable("make a user namespace", code)
    try:
        # id in the filesystem, id in the kernel, count
        write_once(f"/proc/{pid}/uid_map", f"{owner.uid} {plugin.uid} 1\n")
        write_once(f"/proc/{pid}/gid_map", "".join(_groups(owner.gid, plugin.gid)))
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise IdmapUnavailable("write the mapping", error.errno or errno.EIO) from None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _groups(owner: int, plugin: int, path: str = "/proc/self/gid_map") -> Iterator[str]:
    """Lines of a gid_map in which the owner's group becomes the plugin's, and every other group stays."""
    yield f"{owner} {plugin} 1\n"
    with open(path, encoding="ascii") as file:
        ranges = [(int(start), int(start) + int(count)) for start, _, count in map(str.split, file)]
    for first, end in ranges:
        for taken in sorted({owner, plugin}):
            if first <= taken < end:
                if first < taken:
                    yield f"{first} {first} {taken - first}\n"
                first = taken + 1
        if first < end:
            yield f"{first} {first} {end - first}\n"
