"""User ids for plugins, when the runner is root.

Every running plugin has a uid nobody else has: rlimits, inotify and signals are counted and allowed per
uid, so two plugins with one uid could starve or kill each other. A lease is one byte of one file, locked:
the kernel gives it back when the last holder of the descriptor is gone, and the tree's keeper holds it too:
a uid is free again only when the whole tree is dead, not when the runner is.

A plugin with a state directory keeps its uid over runs, because its files carry it: such a uid is reserved
for that directory and leased to nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from sandbox.value import NamedTuple
from sandbox.writing import write_all

_FLOCK = struct.Struct("hh4xqqi4x")  # struct flock of a 64-bit Linux; l_pid must be 0 for OFD locks

LEASES = "/run/runner/uids"  # one byte per uid, locked while leased
RESERVATIONS = "/var/lib/runner/uids"  # one file per reserved uid, holding the state directory's path


class UidsUnavailable(Exception):
    """No uid can be leased; the message says why."""


class UidLease(NamedTuple):
    uid: int
    fd: int  # holds the lock; to be inherited by the tree

    def close(self) -> None:
        os.close(self.fd)


def id_is_mapped(first: int, last: int | None = None, path: str = "/proc/self/uid_map") -> bool:
    """Whether ids first…last all have a meaning in this user namespace."""
    with open(path, encoding="ascii") as file:
        ranges = sorted((int(start), int(count)) for start, _, count in (line.split() for line in file))
    wanted = first
    for start, count in ranges:
        if start <= wanted < start + count:
            wanted = start + count
    return wanted > (first if last is None else last)


def lease_any(first: int, last: int, *, leases: str = LEASES, reservations: str = RESERVATIONS) -> UidLease:
    """A uid no running plugin has and no state directory owns."""
    fd = _open_leases(leases)
    reserved = _reserved(reservations)
    try:
        for uid in _shuffled(first, last):
            if uid not in reserved and _lock_unreserved(fd, uid, reservations):
                return UidLease(uid, fd)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    raise UidsUnavailable(_exhausted(first, last))


def lease_for_state(
    state_dir: str,
    owner: int,
    first: int,
    last: int,
    *,
    leases: str = LEASES,
    reservations: str = RESERVATIONS,
) -> UidLease:
    """The uid that belongs to `state_dir`, at present owned by `owner`.

    Instances of one plugin share its state and therefore its uid (a shared lock); nothing else gets it.
    The caller holds registry_lock, so that two first starts do not choose two uids for one directory, and so
    that what is stale can be swept away.
    """
    fd = _open_leases(leases)
    try:
        _private_directory(reservations)
        if first <= owner <= last:
            if _holder(reservations, owner) == state_dir and _lock(fd, owner, fcntl.F_RDLCK):
                return UidLease(owner, fd)
            candidates: Iterable[int] = (owner,)
        else:
            candidates = _shuffled(first, last)
        reserved = _reserved(reservations)
        _sweep(reservations)
        for uid in candidates:
            # Exclusive while the reservation is written: also a plugin without state may hold this uid.
            if uid not in reserved and _lock_unreserved(fd, uid, reservations):
                _reserve(reservations, uid, state_dir)
                _lock(fd, uid, fcntl.F_RDLCK)
                return UidLease(uid, fd)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    if first <= owner <= last:
        raise UidsUnavailable(
            f"uid {owner}, which owns {state_dir}, is in use by or reserved for another plugin"
        )
    raise UidsUnavailable(_exhausted(first, last))


def _exhausted(first: int, last: int) -> str:
    return f"all uids from {first} to {last} are in use or reserved; widen [user] uids in the policy"


@contextmanager
def registry_lock(reservations: str = RESERVATIONS) -> Iterator[None]:
    """One runner at a time, while a state directory and a uid are brought together."""
    _private_directory(reservations)
    fd = os.open(reservations, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _open_leases(path: str) -> int:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _private_directory(path: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass


def _lock(fd: int, uid: int, kind: int) -> bool:
    try:
        # An open-file-description lock: shared with whoever inherits the descriptor, unlike the
        # per-process kind, which a fork would not carry and any close() would drop.
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, uid, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _lock_unreserved(fd: int, uid: int, reservations: str) -> bool:
    """Lock `uid` for ourselves alone, unless it was reserved since we looked."""
    if not _lock(fd, uid, fcntl.F_WRLCK):
        return False
    if _stale(reservations, uid):
        return True
    _lock(fd, uid, fcntl.F_UNLCK)
    return False


def _reserved(reservations: str) -> set[int]:
    try:
        names = os.listdir(reservations)
    except FileNotFoundError:
        return set()
    return {int(name) for name in names if name.isdecimal() and not _stale(reservations, int(name))}


def _sweep(reservations: str) -> None:
    """Forget the uids of directories that are gone; one that still runs keeps its uid by its lease."""
    for name in os.listdir(reservations):
        if name.isdecimal() and _stale(reservations, int(name)):
            try:
                os.unlink(f"{reservations}/{name}")
            except FileNotFoundError:
                pass


def _holder(reservations: str, uid: int) -> str | None:
    """The state directory `uid` is reserved for."""
    try:
        with open(f"{reservations}/{uid}", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _stale(reservations: str, uid: int) -> bool:
    """A reservation whose directory is gone, or belongs to somebody else by now."""
    try:
        return os.lstat(_holder(reservations, uid) or "").st_uid != uid
    except OSError:
        return True


def _reserve(reservations: str, uid: int, state_dir: str) -> None:
    """Under the exclusive lock of `uid`. Cut short it leaves an empty file, which is a stale one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(f"{reservations}/{uid}", flags, 0o600)
    try:
        write_all(fd, os.fsencode(state_dir))
    finally:
        os.close(fd)


def _shuffled(first: int, last: int) -> Iterable[int]:
    """Each uid once, from a random start: runners starting together rarely ask for the same one."""
    count = last - first + 1
    start = int.from_bytes(os.urandom(4), "little") % count  # the random module is slow to import
    return (first + (start + i) % count for i in range(count))
