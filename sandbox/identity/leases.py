"""Leases of uids, one for each running plugin. sandbox/identity/uids.py explains them."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from sandbox.identity.uid_range import RESERVATIONS, in_use, pools
from sandbox.speed.typed import Iterable
from sandbox.speed.value import NamedTuple


def is_unreserved(reservations: str, uid: int) -> bool:
    """Whether no state needs `uid`: it has no reservation, or a stale one."""
    try:
        os.stat(f"{reservations}/{uid}")
    except FileNotFoundError:
        return True
    from sandbox.identity.reservations import is_stale  # few uids of this pool were ever reserved

    return is_stale(reservations, uid)


FLOCK = struct.Struct("hh4xqqi4x")  # struct flock of a 64-bit Linux; l_pid must be 0 for OFD locks


LEASES = "/run/runner/uids"  # one byte per uid, locked while leased


class UidsUnavailable(Exception):
    """No uid can be leased; the message says why."""


class UidLease(NamedTuple):
    uid: int
    fd: int  # holds the lock; inherited by the cell's init
    new: bool = False  # the reservation was made with this lease

    def close(self) -> None:
        os.close(self.fd)


def lease_any(first: int, last: int, *, leases: str = LEASES, reservations: str = RESERVATIONS) -> UidLease:
    """Lease a uid that no running plugin has, no state directory owns, and nothing else on this machine
    uses."""
    fd = open_leases(leases)
    first, last = pools(first, last)[1]
    try:
        for uid in _shuffled(first, last):
            if not is_unreserved(reservations, uid) or not lock_byte(fd, uid, fcntl.F_WRLCK):
                continue
            # Check again: it may have been reserved meanwhile.
            if is_unreserved(reservations, uid) and not in_use(uid):
                return UidLease(uid, fd)
            lock_byte(fd, uid, fcntl.F_UNLCK)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    raise UidsUnavailable(
        f"all uids from {first} to {last} for plugins without state are in use; "
        "widen the range with [user] uids in the policy"
    )


def open_leases(path: str) -> int:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def lock_byte(fd: int, at: int, kind: int) -> bool:
    """Lock one byte of a file (F_WRLCK: exclusive, F_RDLCK: shared) or unlock it. Returns whether it
    could."""
    try:
        # An open-file-description lock belongs to every process that inherits the descriptor. A per-process
        # lock is not inherited by a fork, and any close() would drop it.
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _shuffled(first: int, last: int) -> Iterable[int]:
    """Each uid once, from a random start: runners that start together rarely try the same one."""
    return each_from(random_below(last - first + 1), first, last)


def each_from(start: int, first: int, last: int) -> Iterable[int]:
    count = last - first + 1
    return (first + (start + i) % count for i in range(count))


def random_below(count: int) -> int:
    return int.from_bytes(os.urandom(4), "little") % count  # the random module is slow to import
