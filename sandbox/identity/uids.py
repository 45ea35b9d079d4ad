"""User ids for plugins, when the runner is root.

Every running plugin has its own uid: the kernel counts rlimits and inotify watches per uid, and allows
signals within one uid, so two plugins with the same uid could starve or kill each other. A lease is a lock on
one byte of one file. The kernel releases it when the last process with the descriptor has ended. The cell's
init has it too, so a uid becomes free only when the whole process tree has ended.

A plugin with a state directory has the same uid at every run, because its files belong to it. Such a uid is
reserved for that directory and leased to no other plugin. The lower half of the range is for reservations,
the upper half for plugins without state, so that many states cannot use up the uids of plugins without one.

reservations.py describes the files of a reservation.
"""

from __future__ import annotations

import fcntl
import os
import stat

from sandbox import look
from sandbox.cache import fingerprint
from sandbox.identity.leases import (
    FLOCK,
    LEASES,
    UidLease,
    UidsUnavailable,
    each_from,
    lock_byte,
    open_leases,
    random_below,
)
from sandbox.identity.reservations import (
    Reservation,
    is_stale,
    list_reservations,
    make_private_directory,
    name_file,
    read_reservation,
    read_text,
    remove_if_unneeded,
    remove_reservation,
    reserve,
    reserved_uids,
    write_file,
)
from sandbox.identity.uid_range import DEFAULT_RANGE, RESERVATIONS, in_use, is_ours, pools
from sandbox.speed.scopes import contextmanager
from sandbox.speed.typed import Iterator
from sandbox.speed.value import NamedTuple

_SWEPT_AT_ONCE = 32


class Occupancy(NamedTuple):
    """How many uids of a range are taken."""

    reserved: int  # of the uids for plugins with state
    for_states: int
    running: int  # of the uids for plugins without state
    for_others: int
    elsewhere: int  # reserved outside of the range: under an earlier policy or by an earlier version


# --- which uids --------------------------------------------------------------------------------------------


def may_be_a_plugins(uid: int, first: int, last: int, *, reservations: str = RESERVATIONS) -> bool:
    """Whether `uid` may belong to a plugin, under this policy or another one."""
    default = DEFAULT_RANGE[0] <= uid <= DEFAULT_RANGE[1]
    look.note(f"{reservations}/{uid}")  # a launch under another policy may reserve it later
    return default or is_ours(uid, first, last) or read_reservation(reservations, uid) is not None


# --- leases ------------------------------------------------------------------------------------------------


def lease_for_state(
    state_dir: str,
    owner: int,
    first: int,
    last: int,
    manifest: str = "",
    *,
    leases: str = LEASES,
    reservations: str = RESERVATIONS,
) -> UidLease:
    """Lease the uid of `state_dir`, whose current owner is `owner`.

    Instances of one plugin share its state and therefore its uid, by a shared lock. No other plugin gets it.
    The caller holds registry_lock, so that two first starts do not choose two uids for one directory, and so
    that stale reservations can be removed.
    """
    fd = open_leases(leases)
    try:
        make_private_directory(reservations)
        if not is_ours(owner, first, last):
            owner = _find_uid(state_dir, first, last, reservations)
        if owner >= 0:
            lease = _lease_owned(state_dir, owner, manifest, fd, reservations)
        else:
            lease = _lease_new(state_dir, first, last, manifest, fd, reservations)
        if lease.new:
            _sweep(reservations, fd, lease.uid)
        return lease
    except BaseException:
        os.close(fd)
        raise


def _lease_owned(state_dir: str, uid: int, manifest: str, fd: int, reservations: str) -> UidLease:
    """Lease the uid that already owns a directory."""
    held = read_reservation(reservations, uid)
    reserved = held is not None and held.state == state_dir
    alone = lock_byte(fd, uid, fcntl.F_WRLCK)
    # With the exclusive lock, whatever else uses the uid is not an instance of this plugin.
    if alone and (whose := in_use(uid)):
        raise UidsUnavailable(
            f"uid {uid}, which owns {state_dir}, is used elsewhere: {whose}; "
            f"end that process or service, or remove the state (runner state remove {state_dir})"
        )
    if not reserved and not (alone and remove_if_unneeded(reservations, uid)):
        raise UidsUnavailable(
            f"uid {uid}, which owns {state_dir}, is in use by, or reserved for, another plugin; choose "
            "another directory with --state-dir"
        )
    if reserved and not lock_byte(fd, uid, fcntl.F_RDLCK):
        raise UidsUnavailable(
            f"uid {uid}, which owns {state_dir}, is locked, because that state is being removed; try again"
        )
    if not reserved or (manifest and held is not None and held.manifest != manifest):
        reserve(reservations, Reservation(uid, state_dir, manifest))
    lock_byte(fd, uid, fcntl.F_RDLCK)
    return UidLease(uid, fd, new=not reserved)


def _lease_new(state_dir: str, first: int, last: int, manifest: str, fd: int, reservations: str) -> UidLease:
    (first, last), _ = pools(first, last)
    # The search starts at a uid that depends on the directory's path, so it finds its previous uid again. The
    # second search also takes uids of removed states whose manifests still exist.
    for out_of_uids in (False, True):
        for uid in each_from(_search_start(state_dir), first, last):
            # Exclusive while the reservation is written: a plugin without state may have leased this uid.
            if not lock_byte(fd, uid, fcntl.F_WRLCK):
                continue
            held = read_reservation(reservations, uid)
            mine = held is not None and held.state == state_dir
            if (mine or remove_if_unneeded(reservations, uid, out_of_uids=out_of_uids)) and not in_use(uid):
                reserve(reservations, Reservation(uid, state_dir, manifest))
                lock_byte(fd, uid, fcntl.F_RDLCK)
                return UidLease(uid, fd, new=not mine)
            lock_byte(fd, uid, fcntl.F_UNLCK)
    raise UidsUnavailable(
        f"all uids from {first} to {last} for plugins with state are reserved; remove states that nobody "
        "needs (runner state list, runner state remove), or widen the range with [user] uids in the policy"
    )


def lease_for_writing(
    state_dir: str,
    first: int,
    last: int,
    manifest: str,
    *,
    leases: str = LEASES,
    reservations: str = RESERVATIONS,
) -> UidLease:
    """lease_for_state() for a plugin without a state directory: `state_dir` is the one it would have. The
    caller holds registry_lock."""
    known = _find_uid(state_dir, first, last, reservations)
    lease = lease_for_state(state_dir, known, first, last, manifest, leases=leases, reservations=reservations)
    write_file(name_file(reservations, state_dir), str(lease.uid))
    return lease


def _find_uid(state_dir: str, first: int, last: int, reservations: str) -> int:
    """The uid of a state directory, by its owner or by its reservation; -1 if it has none."""
    try:
        status = os.lstat(state_dir)
        if stat.S_ISDIR(status.st_mode) and is_ours(status.st_uid, first, last):
            return status.st_uid
    except OSError:
        pass
    text = read_text(name_file(reservations, state_dir)) or ""
    held = read_reservation(reservations, int(text)) if text.isdecimal() else None
    if held is not None and held.state == state_dir and is_ours(held.uid, first, last):
        return held.uid
    return -1


def expected_uid(state_dir: str, first: int, last: int, *, reservations: str = RESERVATIONS) -> int | None:
    """The uid that a launch would reserve for `state_dir`, without reserving it; None if none is free."""
    known = _find_uid(state_dir, first, last, reservations)
    if known >= 0:
        return known
    (first, last), _ = pools(first, last)
    for uid in each_from(_search_start(state_dir), first, last):
        held = read_reservation(reservations, uid)
        if held is not None and held.state == state_dir:
            return uid
        if is_stale(reservations, uid) and not in_use(uid):
            return uid
    return None


@contextmanager
def registry_lock(reservations: str = RESERVATIONS) -> Iterator[None]:
    """Lock the reservations: only one runner at a time makes or removes one."""
    make_private_directory(reservations)
    fd = os.open(reservations, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def lease_exclusively(uid: int, *, leases: str = LEASES) -> UidLease | None:
    """Lease `uid` exclusively. None if a plugin runs with it."""
    fd = open_leases(leases)
    if lock_byte(fd, uid, fcntl.F_WRLCK):
        return UidLease(uid, fd)
    os.close(fd)
    return None


def make_exclusive(lease: UidLease) -> bool:
    """Make a shared lease exclusive. Returns False if another instance of the plugin runs."""
    return lock_byte(lease.fd, lease.uid, fcntl.F_WRLCK)


def release_reservation(lease: UidLease, state_dir: str, *, reservations: str = RESERVATIONS) -> None:
    """Remove the reservation of `lease.uid` for `state_dir`. The caller holds registry_lock and an exclusive
    lease."""
    held = read_reservation(reservations, lease.uid)
    if held is not None and held.state == state_dir:
        remove_reservation(reservations, lease.uid)


def is_leased(uid: int, *, leases: str = LEASES) -> bool:
    return _count_locked(leases, uid, uid) > 0


def occupancy(first: int, last: int, *, leases: str = LEASES, reservations: str = RESERVATIONS) -> Occupancy:
    states, others = pools(first, last)
    reserved = [each.uid for each in list_reservations(reservations)]
    inside = sum(states[0] <= uid <= states[1] for uid in reserved)
    return Occupancy(
        reserved=inside,
        for_states=states[1] - states[0] + 1,
        running=_count_locked(leases, *others),
        for_others=others[1] - others[0] + 1,
        elsewhere=len(reserved) - inside,
    )


def _count_locked(leases: str, first: int, last: int) -> int:
    try:
        fd = os.open(leases, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    try:
        return count_locked(fd, first, last)
    finally:
        os.close(fd)


def count_locked(fd: int, first: int, last: int) -> int:
    """How many bytes other processes have locked. The kernel reports only one conflicting lock, so the range
    is halved until there is none, or one byte is left."""
    asked = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, last - first + 1, 0)
    if FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] == fcntl.F_UNLCK:
        return 0
    if first == last:
        return 1
    middle = (first + last) // 2
    return count_locked(fd, first, middle) + count_locked(fd, middle + 1, last)


# --- reservations ------------------------------------------------------------------------------------------


def _search_start(state_dir: str) -> int:
    return int(fingerprint(os.fsencode(state_dir))[:8], 16)


def _sweep(reservations: str, fd: int, own: int) -> None:
    """Remove stale reservations. At most _SWEPT_AT_ONCE are checked, because thousands would take long."""
    names = reserved_uids(reservations)
    start = random_below(len(names)) if names else 0
    for uid in (names[start:] + names[:start])[:_SWEPT_AT_ONCE]:
        if uid != own and lock_byte(fd, uid, fcntl.F_WRLCK):
            remove_if_unneeded(reservations, uid)
            lock_byte(fd, uid, fcntl.F_UNLCK)
