"""Reservations of uids for state directories: files in one directory.

A reservation is a file named by the uid that holds the path of the state directory, as in every earlier
version. Next to it are the path of the manifest (`UID.manifest`) and the folders outside of the state in
which the plugin may have left files of that uid (`UID.left`). While one of these folders exists, no other
plugin gets the uid.
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox.cache import fingerprint
from sandbox.files import write_all
from sandbox.identity.removal import first_owned_by
from sandbox.identity.uid_range import RESERVATIONS
from sandbox.speed.typed import Iterable
from sandbox.speed.value import NamedTuple


class Reservation(NamedTuple):
    uid: int
    state: str
    manifest: str  # empty if an older runner made the reservation
    left: tuple[str, ...] = ()  # folders outside of the state that may hold files of this uid


def record_left_folders(uid: int, folders: Iterable[str], *, reservations: str = RESERVATIONS) -> None:
    """Record that `folders` may hold files of the reserved `uid`. The caller holds registry_lock."""
    known = read_left(reservations, uid)
    all_folders = tuple(dict.fromkeys((*known, *folders)))
    if all_folders != known:
        write_file(_left_file(reservations, uid), "\0".join(all_folders))


def make_private_directory(path: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass


def list_reservations(reservations: str = RESERVATIONS) -> list[Reservation]:
    """All reservations, without stale ones."""
    return [
        held
        for uid in reserved_uids(reservations)
        if not is_stale(reservations, uid) and (held := read_reservation(reservations, uid)) is not None
    ]


def reserved_uids(reservations: str) -> list[int]:
    try:
        names = os.listdir(reservations)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def read_reservation(reservations: str, uid: int) -> Reservation | None:
    state = read_text(f"{reservations}/{uid}")
    if state is None:
        return None
    return Reservation(
        uid, state, read_text(_manifest_file(reservations, uid)) or "", read_left(reservations, uid)
    )


def read_left(reservations: str, uid: int) -> tuple[str, ...]:
    text = read_text(_left_file(reservations, uid))
    return tuple(text.split("\0")) if text else ()


def read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _manifest_file(reservations: str, uid: int) -> str:
    return f"{reservations}/{uid}.manifest"


def _left_file(reservations: str, uid: int) -> str:
    return f"{reservations}/{uid}.left"


def name_file(reservations: str, state_dir: str) -> str:
    """The path of a file with the uid of a plugin that has no state directory. It is only a hint: the
    reservation of that uid decides."""
    return f"{reservations}/of.{fingerprint(os.fsencode(state_dir))}"


def is_stale(reservations: str, uid: int) -> bool:
    """Whether no state needs `uid`: it has no reservation, or its directory and its manifest do not exist any
    more.

    A directory in the runner's own folder belongs to one manifest. While that manifest exists, the uid stays
    reserved. A directory that the operator chose may be used by many manifests, so the manifest does not
    count.
    """
    held = read_reservation(reservations, uid)
    if held is not None and any(map(_exists, held.left)):
        return False
    if held is None or _is_state_missing(held):
        return held is None or not (_is_in_own_place(held, reservations) and _exists(held.manifest))
    return False


def _is_state_missing(held: Reservation) -> bool:
    """Whether the state directory is missing, or belongs to another uid now. One that cannot be read counts
    as existing."""
    if not held.state.startswith("/") or "\0" in held.state:
        return True  # the reservation was not written to its end
    try:
        status = os.lstat(held.state)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return status.st_uid != held.uid or not stat.S_ISDIR(status.st_mode)


def _is_in_own_place(held: Reservation, reservations: str) -> bool:
    own = os.path.join(os.path.dirname(reservations), "plugins")
    return os.path.dirname(held.state) in (own, os.path.realpath(own))


def _exists(path: str) -> bool:
    try:
        return path.startswith("/") and "\0" not in path and bool(os.lstat(path))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)


def remove_if_unneeded(reservations: str, uid: int, *, out_of_uids: bool = False) -> bool:
    """Remove the reservation of `uid` if nothing needs it any more. Returns whether it is gone.

    The caller holds registry_lock and the exclusive lock of `uid`. In the runner's own folder an empty
    directory whose manifest does not exist any more is removed too. `out_of_uids`: no other uid is free, so
    also give up a reservation of a removed state whose manifest still exists.
    """
    held = read_reservation(reservations, uid)
    if held is None:
        return True
    # Searching these folders takes long, so they are searched only when no other uid is free.
    if any(map(_exists, held.left)) and (
        not out_of_uids or _exists(held.manifest) or any(first_owned_by(uid, left) for left in held.left)
    ):
        return False
    if not _is_state_missing(held):
        if not (_is_in_own_place(held, reservations) and held.manifest and not _exists(held.manifest)):
            return False
        from sandbox.identity.host_side import host_side  # few launches come here

        if _exists(host_side(held.state)):
            return False  # what it changed of its package belongs to its uid
        try:
            os.rmdir(held.state)
        except OSError:
            return False  # it has content
    elif not out_of_uids and not is_stale(reservations, uid):
        return False
    remove_reservation(reservations, uid)
    return True


def remove_reservation(reservations: str, uid: int) -> None:
    # In this order: a process that is killed in between leaves a reservation without a manifest, not the
    # reverse.
    if (state := read_text(f"{reservations}/{uid}")) is not None:
        _unlink(name_file(reservations, state))
    _unlink(_left_file(reservations, uid))
    _unlink(_manifest_file(reservations, uid))
    _unlink(f"{reservations}/{uid}")


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def reserve(reservations: str, held: Reservation) -> None:
    """Write a reservation. The caller holds the exclusive lock of its uid. If it is killed half-way, the next
    reservation of the uid overwrites the files."""
    if held.manifest:
        write_file(_manifest_file(reservations, held.uid), held.manifest)
    else:
        _unlink(_manifest_file(reservations, held.uid))
    write_file(f"{reservations}/{held.uid}", held.state)


def write_file(path: str, text: str) -> None:
    draft = f"{path}.draft"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(draft, flags, 0o600)
    try:
        write_all(fd, os.fsencode(text))
    finally:
        os.close(fd)
    os.rename(draft, path)
