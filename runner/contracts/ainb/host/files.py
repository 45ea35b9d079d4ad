"""host/fs/*: files and directories of the host that the manifest asks for and the policy granted.

The roots are the folders of the manifest, as far as they lie in granted paths: what the cage shows to the
plugin, or less. Each is opened once, when the session opens, and never by its name again. What the plugin can
change is no root: it could put a link there. A path is judged by its name first. Then it is opened so that no
link leads out of its root (sandbox/paths/beneath.py), and the opened file is judged again by the denylist.
The descriptor that was judged is the one that is read. A hard link is a file like any other: the launch
searched the granted paths for those to denied files.

A FileReader of the host's own is asked after the same judgement, with the name that the judged file has
without links. It is also asked for names in a root that do not exist: they may mean something to it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, TypeVar

import trio

from runner.contracts.ainb.host.params import FS_CAPABILITY, denied, invalid
from runner.protocol.bus import PAYLOAD_MOST_BYTES
from runner.protocol.host_services import DirectoryEntry, FileReader, Granted, HostError, granting
from runner.protocol.jsonrpc import INVALID_PARAMS
from sandbox import surroundings
from sandbox.paths.beneath import Escapes, open_beneath
from sandbox.paths.denied_paths import normal
from sandbox.paths.denylist import Denylist
from sandbox.paths.homes import homes
from sandbox.paths.mounts import contains, fd_path, read_mounts, relative
from sandbox.paths.walk import LinkRefused, TooManyLinks, close, real_path, resolve, walk

# Bytes of one file: as base64, the answer fits into a frame.
FILE_MOST_BYTES = PAYLOAD_MOST_BYTES
ENTRIES_MOST = 20_000  # of one directory
PATH_MOST_BYTES = 4095

# Calls at the same time, for one plugin: a file on a dead network filesystem blocks a thread for ever.
_THREADS = 4
_SHOWN = 512  # characters of a path in a message
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_NOBODY = 65534
_NO_ID = -1
# The system call changes only the thread that makes it; the function of the C library changes all threads.
_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159}
_libc = ctypes.CDLL(None, use_errno=True)

_T = TypeVar("_T")


class _Root(NamedTuple):
    name: str  # as granted
    real: str  # without links, when it was opened
    fd: int  # O_PATH


class GuardedFiles:
    def __init__(
        self,
        declared: Sequence[str],
        granted: Sequence[str],
        writable: Sequence[str] = (),
        denied: Sequence[str] = (),
        own: FileReader | None = None,
        flags: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`declared`: folders of the manifest; `granted`: paths that the policy granted; `writable`: those
        that the plugin can change; `denied`: those that the policy denies. All absolute. `own`: the host's
        own service, which reads in place of this one. `flags`: capabilities, each with the folder that it is
        for."""
        self._own = own
        self._roots = tuple(_open_roots(common_roots(declared, granted), writable, granted))
        weakref.finalize(self, _close_all, tuple(root.fd for root in self._roots))
        self._denied = tuple(denied)
        self._flags = tuple(flags)
        self._denylist: Denylist | None = None
        self._threads = trio.CapacityLimiter(_THREADS)

    async def read_file(self, path: str) -> bytes:
        asked = self._judge_name(path)
        if self._own is None:
            return await self._run(path, "read", lambda: self._find(path, asked, _read_file))
        judged = await self._run(path, "read", lambda: self._find_name(path, asked))
        with self._granting():
            data = await self._own.read_file(judged)
        if len(data) > FILE_MOST_BYTES:
            raise HostError(INVALID_PARAMS, f"read {path[:_SHOWN]}: it has more than {FILE_MOST_BYTES} bytes")
        return data

    async def read_dir(self, path: str) -> Sequence[DirectoryEntry]:
        asked = self._judge_name(path)
        if self._own is None:
            return await self._run(path, "read_dir", lambda: self._find(path, asked, _read_dir))
        judged = await self._run(path, "read_dir", lambda: self._find_name(path, asked))
        with self._granting():
            return await self._own.read_dir(judged)

    def _granting(self) -> AbstractContextManager[None]:
        return granting(Granted.current()._replace(folders=tuple(root.real for root in self._roots)))

    async def _run(self, path: str, verb: str, act: Callable[[], _T]) -> _T:
        """Raises HostError, for each error of the system too."""
        try:
            # Abandoned if its plugin ends: the thread cannot be stopped while the kernel waits for a disk.
            return await trio.to_thread.run_sync(act, abandon_on_cancel=True, limiter=self._threads)
        except OSError as error:
            reason = f"{error.strerror} (os error {error.errno})"
            raise HostError(INVALID_PARAMS, f"{verb} {path[:_SHOWN]}: {reason}") from None
        except _Unreadable as unfit:
            raise HostError(INVALID_PARAMS, f"{verb} {path[:_SHOWN]}: {unfit}") from None

    # --- by name --------------------------------------------------------------------------------------------

    def _judge_name(self, path: str) -> str:
        """The path without "." and "..". Raises HostError."""
        if "\0" in path or not path.startswith("/"):
            raise invalid("path is not absolute, or contains a NUL byte")
        if len(path) > PATH_MOST_BYTES or len(os.fsencode(path)) > PATH_MOST_BYTES:
            raise invalid(f"path is longer than {PATH_MOST_BYTES} bytes")
        asked = _collapse(path)
        if not self._roots:
            raise self._outside(path, asked)
        return asked

    def _outside(self, path: str, asked: str) -> HostError:
        """Names the capability that the plugin lacks."""
        flag = next((name for name, folder in self._flags if contains(folder, asked)), "")
        if flag:
            return denied(flag)
        if not self._roots:
            return denied(f"{FS_CAPABILITY} (no path-scoped fs read granted)")
        return denied(f"{FS_CAPABILITY}: {path[:_SHOWN]} is outside the granted envelope")

    # --- in a thread ----------------------------------------------------------------------------------------

    def _find(self, path: str, asked: str, act: Callable[[int], _T]) -> _T:
        """Open the file in the first root that has it, and return the result of `act`. Raises HostError,
        OSError."""
        denylist = self._denies()  # made with all rights that the runner has
        for root, inside in self._containing(asked):
            try:
                with _rights_of_nobody():
                    fd = _open_in(root, inside)
                    try:
                        if _is_denied(fd, denylist, fd_path(fd)):
                            raise self._outside(path, asked)
                        return act(fd)
                    finally:
                        os.close(fd)
            except Escapes:
                continue
        raise self._outside(path, asked)

    def _find_name(self, path: str, asked: str) -> str:
        """The name without links of a file that may be read, or that does not exist. Raises as `_find`."""
        denylist = self._denies()
        for root, inside in self._containing(asked):
            try:
                with _rights_of_nobody():
                    fd, missing = _open_existing(root, inside)
                    try:
                        name = os.path.join(fd_path(fd), missing) if missing else fd_path(fd)
                        # Somebody may have moved the root.
                        if not contains(root.real, name) or _is_denied(fd, denylist, name):
                            raise self._outside(path, asked)
                        if not missing:
                            _check_readable(fd)
                        return name
                    finally:
                        os.close(fd)
            except Escapes:
                continue
        raise self._outside(path, asked)

    def _containing(self, asked: str) -> Iterator[tuple[_Root, str]]:
        """The roots that have the path by name, and its name in there."""
        for root in self._roots:
            for name in dict.fromkeys((root.name, root.real)):
                if contains(name, asked):
                    yield root, relative(asked, name)
                    break

    def _denies(self) -> Denylist:
        if self._denylist is None:
            environ = surroundings.variables()
            self._denylist = Denylist(
                read_mounts(),
                homes=homes(environ),
                policy=self._denied,
                runtime_dir=environ.get("XDG_RUNTIME_DIR"),
            )
        return self._denylist


class _Unreadable(Exception):
    """Why a file or directory is not read: the second half of a sentence."""


def common_roots(declared: Sequence[str], granted: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_common(declared, granted)))


def _open_roots(paths: Sequence[str], writable: Sequence[str], granted: Sequence[str]) -> Iterator[_Root]:
    """Open the roots that exist. A root is skipped if it overlaps with something the plugin can write, or is
    reached through a link that is not root's. A link of the caller's own is followed if the very folder that
    it leads to is granted as well."""
    changing = {*map(normal, writable), *map(os.path.realpath, writable)}
    for path in paths:
        if _overlaps(path, changing):
            continue
        try:
            leads_to = resolve(path, follow="own")
            linked = leads_to != path and leads_to in map(normal, granted)
            steps = walk(leads_to if linked else path, follow="system")
        except (OSError, LinkRefused, TooManyLinks):
            continue
        try:
            real = real_path(steps)
            if not _overlaps(real, changing):
                yield _Root(path, real, os.dup(steps[-1].fd))
        finally:
            close(steps)


def _open_in(root: _Root, inside: str) -> int:
    """Raises Escapes and OSError."""
    # It may be a file.
    return open_beneath(root.fd, inside, (root.name, root.real)) if inside else os.dup(root.fd)


def _open_existing(root: _Root, inside: str) -> tuple[int, str]:
    """The deepest part of the path that exists, and the rest of it. Raises Escapes and OSError."""
    missing: list[str] = []
    while True:
        try:
            fd = _open_in(root, inside)
        except FileNotFoundError:
            inside, _, name = inside.rpartition("/")
            missing.insert(0, name)
            continue
        if not missing:
            return fd, ""
        try:
            os.stat(missing[0], dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return fd, "/".join(missing)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # a link that leads nowhere


def _overlaps(path: str, others: Iterable[str]) -> bool:
    return any(contains(other, path) or contains(path, other) for other in others)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _common(declared: Sequence[str], granted: Sequence[str]) -> Iterator[str]:
    """The paths that lie in a path of both lists."""
    for one in map(normal, declared):
        for other in map(normal, granted):
            if contains(other, one):
                yield one
            elif contains(one, other):
                yield other


def _collapse(path: str) -> str:
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del kept[-1:]
        elif part not in ("", "."):
            kept.append(part)
    return "/" + "/".join(kept)


def _is_denied(fd: int, denylist: Denylist, name: str) -> bool:
    """`name`: of the file, or of one that would be in this folder."""
    status = os.fstat(fd)
    if status.st_dev in _kernel_devices():
        return True
    identity = status.st_dev, status.st_ino
    return bool(denylist.name_hit(name) or denylist.file_hit(identity, "read"))


def _kernel_devices() -> set[int]:
    """Device numbers of procfs and sysfs: their files would tell about the runner or the host."""
    return {os.stat(path).st_dev for path in ("/proc", "/sys") if os.path.ismount(path)}


@contextmanager
def _rights_of_nobody() -> Iterator[None]:
    """If the runner is root, let this thread open files with the rights of uid nobody: the plugin's uid in
    the cage owns none of them either. File system ids are per thread. Meanwhile root's right to read
    everything and the runner's groups do not apply."""
    if os.geteuid() != 0:
        yield
        return
    groups = os.getgroups()
    try:
        _set_groups_of_thread([])
        _libc.setfsgid(_NOBODY)
        _libc.setfsuid(_NOBODY)
        # setfsuid and setfsgid report no error. Called with -1 they change nothing and return the current id.
        if (_libc.setfsuid(_NO_ID), _libc.setfsgid(_NO_ID)) != (_NOBODY, _NOBODY):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(os.getegid())
        _set_groups_of_thread(groups)


def _set_groups_of_thread(groups: Sequence[int]) -> None:
    if sorted(os.getgroups()) == sorted(groups):
        return
    number = _SYS_SETGROUPS.get(platform.machine()) if sys.maxsize > 1 << 32 else None
    if number is None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    given = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(number, len(groups), given) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _check_readable(fd: int) -> None:
    if stat.S_IFMT(os.fstat(fd).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise _Unreadable("it is not a regular file")
    os.close(_reopen(fd, _READ))


def _read_file(fd: int) -> bytes:
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise _Unreadable("it is not a regular file")
    if status.st_size > FILE_MOST_BYTES:
        raise _Unreadable(f"it has {status.st_size} bytes, and the most is {FILE_MOST_BYTES}")
    with open(_reopen(fd, _READ), "rb", buffering=0) as file:
        data = file.read(FILE_MOST_BYTES + 1) or b""
        while len(data) <= FILE_MOST_BYTES and (more := file.read(FILE_MOST_BYTES + 1 - len(data))):
            data += more
    if len(data) > FILE_MOST_BYTES:
        raise _Unreadable(f"it has more than {FILE_MOST_BYTES} bytes")
    return data


def _read_dir(fd: int) -> Sequence[DirectoryEntry]:
    entries: list[DirectoryEntry] = []
    listed = _reopen(fd, _READ | os.O_DIRECTORY)
    try:
        with os.scandir(listed) as items:
            for item in items:
                if len(entries) >= ENTRIES_MOST:
                    raise _Unreadable(f"it has more than {ENTRIES_MOST} entries")
                try:
                    status = item.stat(follow_symlinks=False)
                except OSError:
                    continue  # as the reference host does
                is_dir = stat.S_ISDIR(status.st_mode)
                name = os.fsencode(item.name).decode("utf-8", "replace")
                entries.append(DirectoryEntry(name, is_dir, 0 if is_dir else status.st_size))
    finally:
        os.close(listed)
    return entries


def _reopen(fd: int, flags: int) -> int:
    """Open the file again for reading, through its descriptor and not by its name."""
    return os.open(f"/proc/self/fd/{fd}", flags)
