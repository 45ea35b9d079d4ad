"""Measures how many bytes a folder takes while an untrusted program may change it.

The program may rename, remove, nest and hide files while we count. So this uses descriptors and no paths,
follows no link, does not recurse, and opens a bounded number of descriptors. The count ends, because every
name counts for some bytes: the limit of the folder bounds the number of names. A directory that cannot be
read is a fault, and the caller decides what the fault means.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

from sandbox.speed.libc import open_libc, writable
from sandbox.speed.typed import Generator
from sandbox.speed.value import NamedTuple

# A name takes a directory entry and mostly an inode, which st_blocks does not count.
ENTRY = 4096
# One descriptor is open for each level.
DEPTH_LIMIT = 200

# A step of the measurement looks at this many names, in a fraction of a millisecond.
_STEP_NAMES = 64
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_SPECULATION_BYTES = 64 << 10

EXT, XFS, TMPFS = 0xEF53, 0x58465342, 0x01021994  # filesystems, by their magic numbers
_WORD_BYTES = 8 if sys.maxsize > 1 << 32 else 4  # of a C long


# The runner itself lacks something, which says nothing about the plugin's files.
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Size(NamedTuple):
    used: int  # bytes; a lower bound if more than `enough`
    devices: frozenset[int]  # st_dev of all files and directories that were seen
    fault: str = ""  # why `used` may be too small


class _Fault(Exception):
    pass


class _Enough(Exception):
    pass


def size(fd: int, enough: int, *, preallocates: bool = False) -> Generator[None, None, Size]:
    """Count the bytes in the directory or file `fd`, until they are more than `enough`. A generator: the
    caller may do other work between steps.

    `preallocates`: the filesystem reserves space for growing files; see `occupied`.
    """
    count = _Count(enough, preallocates)
    fault = ""
    try:
        yield from count.all(fd)
    except _Fault as found:
        fault = str(found)
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        fault = f"{count.path()} cannot be read: {error.strerror}"
    except _Enough:
        pass
    finally:
        count.close()
    return Size(count.used, frozenset(count.devices), fault)


def occupied(taken: int, length: int, preallocates: bool) -> int:
    """The bytes that count for a file that has `taken` bytes on its filesystem. A hole takes none.

    XFS reserves up to the size of a growing file in addition, and frees that later. The plugin did not ask
    for it, so it does not count. A larger reservation is the plugin's own, and counts.
    """
    if preallocates and length < taken <= 2 * length + _SPECULATION_BYTES:
        return -(-length // ENTRY) * ENTRY
    return taken


class _Count:
    def __init__(self, enough: int, preallocates: bool) -> None:
        self.enough = enough
        self.preallocates = preallocates
        self.used = 0
        self.devices: set[int] = set()
        self._seen: set[tuple[int, int]] = set()
        self._open: list[tuple[int, str, list[str]]] = []  # directory, its name, names still to be entered

    def all(self, fd: int) -> Generator[None, None, None]:
        status = os.fstat(fd)
        self.devices.add(status.st_dev)
        if not stat.S_ISDIR(status.st_mode):
            self._add(status)
            return
        yield from self._enter(fd, ".")
        while self._open:
            directory, _, names = self._open[-1]
            if names:
                yield from self._enter(directory, names.pop())
            else:
                os.close(self._open.pop()[0])

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop()[0])

    def _enter(self, above: int, name: str) -> Generator[None, None, None]:
        if len(self._open) > DEPTH_LIMIT:
            raise _Fault(f"it is nested more than {DEPTH_LIMIT} directories deep")
        try:
            fd = os.open(name, _LIST, dir_fd=above)
        except OSError as error:
            self._handle_unlisted(error, above, name)
            return
        names: list[str] = []
        self._open.append((fd, name, names))
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino)
        if identity in self._seen:
            return  # moved while we counted
        self._seen.add(identity)
        if status.st_dev not in self.devices:
            # A mount, which is in the cage as well; or a subvolume, which on btrfs any user can make.
            if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
                return
            self.devices.add(status.st_dev)
        self._spend(max(0, status.st_blocks * 512 - ENTRY))  # its name is counted already
        yield
        yield from self._list(fd, names)

    def _list(self, fd: int, directories: list[str]) -> Generator[None, None, None]:
        step = 0
        with os.scandir(fd) as entries:
            for entry in entries:
                step += 1
                if step % _STEP_NAMES == 0:
                    yield
                try:
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.name)
                        self._spend(ENTRY)
                    else:
                        self._add(entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue
                except PermissionError as error:
                    # The directory can be listed but not entered. Its owner could enter it after a chmod.
                    if _may_be_the_plugins(os.fstat(fd)):
                        raise _Fault(f"{self.path()} cannot be entered: {error.strerror}") from None
                    self._spend(ENTRY)

    def _add(self, status: os.stat_result) -> None:
        taken = occupied(status.st_blocks * 512, status.st_size, self.preallocates)
        if status.st_nlink > 1 or taken > ENTRY:
            # It may be another name of a counted file, or have been moved while we counted.
            identity = (status.st_dev, status.st_ino)
            if identity in self._seen:
                taken = 0
            self._seen.add(identity)
            self.devices.add(status.st_dev)
        self._spend(max(taken, ENTRY))

    def _spend(self, amount: int) -> None:
        self.used += amount
        if self.used > self.enough:
            raise _Enough

    def _handle_unlisted(self, error: OSError, above: int, name: str) -> None:
        """Handle a directory that cannot be listed. If the plugin, which has no more rights than we have, can
        neither enter it nor chmod it, there are no files of the plugin in it. Else it is a fault."""
        if error.errno in SHORTAGES:
            raise error
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and self._open:
            return  # removed or replaced meanwhile
        if error.errno == errno.EACCES:
            try:
                ours = _may_be_the_plugins(os.stat(name, dir_fd=above, follow_symlinks=False))
            except FileNotFoundError:
                return
            if not ours and not os.access(name, os.X_OK, dir_fd=above, effective_ids=True):
                return
        raise _Fault(f"{self.path(name)} cannot be listed: {error.strerror}")

    def path(self, *last: str) -> str:
        """The current path for messages, escaped to ASCII, because the plugin chose the names."""
        names = [name for _, name, _ in self._open if name != "."]
        return ascii("/".join((*names, *last))) if names or last else "it"


def _may_be_the_plugins(status: os.stat_result) -> bool:
    """Whether the plugin may own it: its uid is ours, or any if we are root."""
    return os.geteuid() in (0, status.st_uid)


def filesystem(fd: int) -> int:
    """The magic number of the filesystem from statfs(2), which Python does not offer; 0 if unknown."""
    answer = writable(256)
    if open_libc().fstatfs(fd, answer) != 0:
        return 0
    return int.from_bytes(answer.raw[:_WORD_BYTES], "little")
