"""How much lies in a folder while an untrusted program fills it.

The owner of the folder may rename, remove, nest and hide files while we count. So we use descriptors and no
paths, follow no link, do not recurse, and hold a bounded number of descriptors. The count ends: every name
counts for something, so the number of names is bounded by the limit of the folder. A directory that cannot be
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

# A name takes a directory entry and mostly an inode, which are part of no file's blocks.
ENTRY = 4096
# One descriptor is held for each level, as when a folder is scanned before it is shown.
DEPTH_LIMIT = 200

# A step is as long as it takes to look at this many names: a fraction of a millisecond.
_STEP_NAMES = 64
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_SPECULATION_BYTES = 64 << 10

EXT, XFS, TMPFS = 0xEF53, 0x58465342, 0x01021994  # filesystems, by their magic numbers
_WORD_BYTES = 8 if sys.maxsize > 1 << 32 else 4  # of a C long


class Size(NamedTuple):
    used: int  # bytes; if more than `enough`: a lower bound
    devices: frozenset[int]  # st_dev of all that was seen
    fault: str = ""  # why `used` may be too small


class _Fault(Exception):
    pass


class _Enough(Exception):
    pass


def size(fd: int, enough: int, *, ahead: bool = False) -> Generator[None, None, Size]:
    """Count the bytes in the directory, or the file, `fd`, until they are more than `enough`. A generator:
    between two steps the caller may do something else.

    `ahead`: the filesystem reserves space for growing files; see `occupied`.
    """
    count = _Count(enough, ahead)
    fault = ""
    try:
        yield from count.all(fd)
    except _Fault as found:
        fault = str(found)
    except OSError as error:
        fault = f"{count.path()} cannot be read: {error.strerror}"
    except _Enough:
        pass
    finally:
        count.close()
    return Size(count.used, frozenset(count.devices), fault)


def occupied(taken: int, length: int, ahead: bool) -> int:
    """The bytes that count, of those a file takes on its filesystem. A hole takes none.

    XFS reserves up to the size of a growing file on top of it, and frees that later. The plugin did not ask
    for it, so it does not count. A larger reservation was asked for, and counts.
    """
    if ahead and length < taken <= 2 * length + _SPECULATION_BYTES:
        return -(-length // ENTRY) * ENTRY
    return taken


class _Count:
    def __init__(self, enough: int, ahead: bool) -> None:
        self.enough = enough
        self.ahead = ahead
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
            self._closed(error, above, name)
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
                    # The directory can be listed but not entered. Its owner can enter it after a chmod.
                    if _ours(os.fstat(fd)):
                        raise _Fault(f"{self.path()} cannot be entered: {error.strerror}") from None
                    self._spend(ENTRY)

    def _add(self, status: os.stat_result) -> None:
        taken = occupied(status.st_blocks * 512, status.st_size, self.ahead)
        if status.st_nlink > 1 or taken > ENTRY:
            # Another name of a counted file, or the same name, moved while we counted.
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

    def _closed(self, error: OSError, above: int, name: str) -> None:
        """A directory that cannot be listed. If the plugin can neither enter it nor make it enterable, it
        holds nothing of the plugin's: the plugin has no more rights than we have."""
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and self._open:
            return  # removed or replaced meanwhile
        if error.errno == errno.EACCES:
            try:
                ours = _ours(os.stat(name, dir_fd=above, follow_symlinks=False))
            except FileNotFoundError:
                return
            if not ours and not os.access(name, os.X_OK, dir_fd=above, effective_ids=True):
                return
        raise _Fault(f"{self.path(name)} cannot be listed: {error.strerror}")

    def path(self, *last: str) -> str:
        """For a message; in ASCII, since the plugin chose the names."""
        names = [name for _, name, _ in self._open if name != "."]
        return ascii("/".join((*names, *last))) if names or last else "it"


def _ours(status: os.stat_result) -> bool:
    """Whether the plugin may own it: without root it has our uid, with root any."""
    return os.geteuid() in (0, status.st_uid)


def filesystem(fd: int) -> int:
    """The magic number from statfs(2), which Python does not offer. 0: not known."""
    answer = writable(256)
    if open_libc().fstatfs(fd, answer) != 0:
        return 0
    return int.from_bytes(answer.raw[:_WORD_BYTES], "little")
