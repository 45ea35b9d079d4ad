"""A plugin's state directory: its first launch makes it, and removes it again if that launch fails."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from sandbox.files import write_all
from sandbox.identity import uids
from sandbox.identity.leases import UidLease, lock_byte
from sandbox.identity.owner import Owner, Writing, leased_owner
from sandbox.identity.removal import first_owned_by
from sandbox.identity.reservations import record_left_folders
from sandbox.identity.uid_range import RESERVATIONS, is_ours
from sandbox.paths.walk import (
    Follow,
    LinkRefused,
    Step,
    TooManyLinks,
    close,
    resolve,
    unmake,
    walk,
    walk_below,
)
from sandbox.speed.scopes import contextmanager, suppress
from sandbox.speed.typed import TYPE_CHECKING, Iterable, Iterator, Sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sandbox.identity.accounts import Account

PACKAGES = "packages"  # beside the folder of all states: checked copies of packages, one for each launch
UNPACKED = "unpacked"  # beside it too: packages that were given as a tar
IMPORTED = "imported"  # and packages of a control plane
RECORDS = ".manifests"  # beside an ordinary user's states: a file for each, with the path of its manifest

_MOST_DATED = 1000  # files that `last_used` looks at

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class StateRefused(Exception):
    """The directory cannot be used as state; the message says why, the hint what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class StateUnwritable(StateRefused):
    """The machine does not let the runner make or change the directory. Nobody has refused it."""


def unwritable(path: str, error: OSError) -> StateUnwritable | None:
    """The exception for an error of the place that `path` is in; None if something else is wrong with it."""
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None:
        return None
    place = path
    while not os.path.lexists(place) and place != "/":
        place = os.path.dirname(place)
    who = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    # Root reserves uids beside its own states, so another directory alone does not help it.
    is_needed = os.geteuid() == 0 and path.startswith(os.path.dirname(RESERVATIONS) + "/")
    also = "" if is_needed else "choose a writable directory with --state-dir"
    told = f"state directory {path} cannot be written: {error.strerror} ({place})"
    if os.geteuid() != 0 and "write in" in remedy and _is_system(place):
        return StateUnwritable(told, f"{also}; HOME and XDG_STATE_HOME say where it is otherwise")
    return StateUnwritable(told, ", or ".join(filter(None, (remedy.format(place=place, who=who), also))))


def _is_system(place: str) -> bool:
    """Whether a folder is one of root's, which nobody should open for an ordinary user's state."""
    try:
        return os.lstat(place).st_uid == 0
    except OSError:
        return False


# Who lists states, and a launch that failed and takes its new state back, locks one for a moment. A removal
# of many files takes longer.
_REMOVAL_SECONDS = 1.0
_REMEDIES = {
    errno.EROFS: "mount {place} read-write (in a container, give it a volume)",
    errno.EACCES: "let {who} write in {place}",
    errno.EPERM: "let {who} write in {place}",
    errno.ENOSPC: "make room on the filesystem of {place}",
    errno.EDQUOT: "make room on the filesystem of {place}: the quota of {who} is used up",
}


def state_root(environ: Mapping[str, str]) -> str:
    """The default folder of state directories."""
    if os.geteuid() == 0:
        return "/var/lib/runner/plugins"
    return os.path.join(users_state(environ), "plugins")


def users_state(environ: Mapping[str, str]) -> str:
    """Where the runner keeps what belongs to its caller, also if that is root."""
    # By its specification a relative XDG_STATE_HOME is ignored.
    base = environ.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return os.path.join(base, "runner")


def real_state_dir(path: str, *, follow: Follow = "system") -> str:
    """The real path of `path`. Links that users other than root could change are refused.

    The rule also holds for the user's own links: an ordinary user's plugins have the user's uid, so a plugin
    may have made them.
    """
    try:
        return resolve(path, follow=follow)
    except LinkRefused as refused:
        raise StateRefused(
            f"state directory {path}: {refused}", f"use the path it leads to: {refused.leads_to}"
        ) from None
    except TooManyLinks as refused:
        raise StateRefused(f"state directory {path}: {refused}", "use the path it leads to") from None
    except OSError as error:
        raise unwritable(path, error) or StateRefused(
            f"state directory {path} cannot be used: {error.strerror}",
            "choose another directory with --state-dir",
        ) from None


def last_used(path: str) -> float:
    """When a state directory was last used, in seconds since 1970; 0 if there is none. A launch sets the time
    of the directory. Earlier versions did not, so files at its top count too."""
    try:
        newest = os.lstat(path).st_mtime
        with os.scandir(path) as entries:
            for _, each in zip(range(_MOST_DATED), entries, strict=False):
                newest = max(newest, each.stat(follow_symlinks=False).st_mtime)
        return newest
    except OSError:  # it is gone, or another user's
        return 0.0


@contextmanager
def owned_state(
    path: str | None,
    uid_range: tuple[int, int] | None,
    parts: Sequence[str] = (),
    *,
    manifest: str = "",
    writing: Writing | None = None,
    account: Account | None = None,
) -> Iterator[Owner]:
    """The plugin's identity for one run; its state directory, if it has one, is prepared.

    `path`: the state directory, without links. `uid_range` None: the runner is not root, and the plugin has
    the runner's own uid. `parts`: folders below the directory that are made too. `manifest`: the plugin's
    manifest. `writing`: other folders the plugin writes to. `account`: the owner of the directory, instead of
    a reserved uid. Directories that were made for a launch that then fails are removed again, unless they
    have content.
    """
    if path is None and (writing is None or uid_range is None):
        with leased_owner(uid_range) as owner:
            yield owner
        return
    claim = _make_claim(path, uid_range, manifest, writing, account)
    try:
        try:
            claim.take(parts)
            yield claim.owner
        except BaseException:
            with suppress(OSError):
                claim.undo()
            raise
    finally:
        claim.close()


def _make_claim(
    path: str | None,
    uid_range: tuple[int, int] | None,
    manifest: str,
    writing: Writing | None,
    account: Account | None,
) -> _OwnClaim | _LeasedClaim | _WritingClaim:
    """The claim that prepares a plugin's state directory, or reserves its uid. See `owned_state`."""
    if path is not None and account is not None:
        return _AccountClaim(path, manifest, account)
    if path is None:
        assert writing is not None and uid_range is not None
        return _WritingClaim(writing, uid_range, manifest)
    if uid_range is None:
        return _OwnClaim(path, manifest)
    return _LeasedClaim(path, uid_range, manifest, () if writing is None else writing.folders)


class _Directory:
    """An open state directory, and what is needed to undo its creation."""

    def __init__(self, path: str) -> None:
        """Open it. If it is missing, make it with its parents. No link is followed: `path` is resolved."""
        self.path = path
        # Folders made below it, each list with the folder above them first.
        self._below: list[list[Step]] = []
        # Root's new parent directories are searchable by all, because the dropped uid walks through them.
        # Those of other users are closed: a plugin owns its directory and could open it to everybody.
        mode = 0o711 if os.geteuid() == 0 else 0o700
        try:
            self._steps = walk(path, follow="none", make=mode)
        except (OSError, LinkRefused) as error:
            if isinstance(error, OSError) and (known := unwritable(path, error)):
                raise known from None
            why = (error.strerror or "") if isinstance(error, OSError) else str(error)
            raise StateRefused(
                f"state directory {path} cannot be used: {why}",
                "it must be a directory and not a link: remove it, or choose another directory with "
                "--state-dir",
            ) from None
        try:
            self.fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._steps[-1].fd)
        except OSError as error:
            unmake(self._steps)
            close(self._steps)
            raise unwritable(path, error) or StateRefused(
                f"state directory {path} cannot be used: {error.strerror}",
                "it must be a directory and not a link: remove it, or choose another directory with "
                "--state-dir",
            ) from None
        self.before = os.fstat(self.fd)
        self.identities = {path: (self.before.st_dev, self.before.st_ino)}

    @property
    def above(self) -> int:
        return self._steps[-2].fd

    @property
    def is_new(self) -> bool:
        return self._steps[-1].made

    def make_below(self, parts: Sequence[str], uid: int, gid: int) -> None:
        """Make folders inside the directory. No link is followed: the plugin owns what is already there. Also
        sets its time, for `last_used`."""
        with suppress(OSError):
            os.utime(self.fd)
        for part in parts:
            try:
                steps = walk_below(self.fd, part, make=True)
                self._below.append(steps)
                content: list[str] = []
                for step in reversed(steps):
                    if step.made and uid != os.geteuid():
                        _hand_over(step, content, uid, gid)
                    content = [step.name]
            except OSError as error:
                other = "let the runner make folders there, or choose another directory with --state-dir"
                raise unwritable(f"{self.path}/{part}", error) or StateRefused(
                    f"{part} in the state directory cannot be used: {error.strerror}",
                    "remove it: it must be a folder" if isinstance(error, NotADirectoryError) else other,
                ) from None
            last = steps[-1].status
            self.identities[f"{self.path}/{part}"] = last.st_dev, last.st_ino
            while len(steps) > 1 and not steps[1].made:
                os.close(steps.pop(0).fd)

    def clear(self) -> bool:
        """Remove the folders that were made below it. Returns whether the directory is empty then."""
        for steps in reversed(self._below):
            unmake(steps)
        return not os.listdir(self.fd)

    def restore(self) -> None:
        """Restore its previous owner and mode, or remove it if it is new."""
        if self.is_new:
            unmake(self._steps)
        else:
            os.fchown(self.fd, self.before.st_uid, self.before.st_gid)
            os.fchmod(self.fd, stat.S_IMODE(self.before.st_mode))

    def close(self) -> None:
        os.close(self.fd)
        for steps in (self._steps, *self._below):
            close(steps)


def _hand_over(step: Step, content: list[str], uid: int, gid: int) -> None:
    """Make the plugin the owner of a new folder. Its content is checked first: a running instance of the
    plugin could have put another user's folder in its place."""
    fd = os.open(".", _DIRECTORY, dir_fd=step.fd)
    try:
        if os.listdir(fd) != content:
            raise OSError(errno.ESTALE, "it was replaced while it was being made")
        os.fchown(fd, uid, gid)
    finally:
        os.close(fd)


class _LeasedClaim:
    """For root: the directory belongs to the uid that is reserved for this plugin."""

    def __init__(
        self, path: str, uid_range: tuple[int, int], manifest: str, folders: Sequence[str] = ()
    ) -> None:
        self._path = path
        self._range = uid_range
        self._manifest = manifest
        self._folders = folders
        self._directory: _Directory | None = None
        self._lease: UidLease | None = None

    def take(self, parts: Sequence[str]) -> None:
        first, last = self._range
        # Two concurrent first starts would choose two owners. The lock is not on the directory itself,
        # because the plugin owns that and could hold the lock forever.
        with uids.registry_lock():
            self._directory = directory = _Directory(self._path)
            held = directory.before
            if not is_ours(held.st_uid, first, last) and os.listdir(directory.fd):
                raise StateRefused(
                    f"state directory {self._path} belongs to uid {held.st_uid}, which is not one of the "
                    f"plugins' uids ({first}-{last}), and it is not empty",
                    "choose an empty or a new directory with --state-dir",
                )
            lease = uids.lease_for_state(self._path, held.st_uid, first, last, self._manifest)
            self._lease = lease
            record_left_folders(lease.uid, self._folders)
            os.fchown(directory.fd, lease.uid, lease.uid)
            os.fchmod(directory.fd, 0o700)
            directory.make_below(parts, lease.uid, lease.uid)

    @property
    def owner(self) -> Owner:
        assert self._lease is not None and self._directory is not None
        return Owner(self._lease.uid, self._lease.uid, self._lease.fd, self._directory.identities)

    def undo(self) -> None:
        if self._directory is None:
            return
        with uids.registry_lock():
            lease = self._lease
            # Not if another instance of the plugin uses it now.
            if (lease is None or uids.make_exclusive(lease)) and self._directory.clear():
                if lease is not None and _has_left(lease.uid, self._folders):
                    return  # the plugin has run and left files: no other plugin may get this uid
                self._directory.restore()
                if lease is not None and lease.new:
                    uids.release_reservation(lease, self._path)

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
        if self._directory is not None:
            self._directory.close()


def _has_left(uid: int, folders: Iterable[str]) -> bool:
    return any(first_owned_by(uid, folder) for folder in folders)


class _WritingClaim:
    """For root, and a plugin without state that writes files elsewhere: only a uid is reserved."""

    def __init__(self, writing: Writing, uid_range: tuple[int, int], manifest: str) -> None:
        self._writing = writing
        self._range = uid_range
        self._manifest = manifest
        self._lease: UidLease | None = None

    def take(self, parts: Sequence[str]) -> None:
        assert not parts  # there is no state directory to make them in
        writing = self._writing
        with uids.registry_lock():
            self._lease = uids.lease_for_writing(writing.state_dir, *self._range, self._manifest)
            record_left_folders(self._lease.uid, writing.folders)

    @property
    def owner(self) -> Owner:
        assert self._lease is not None
        return Owner(self._lease.uid, self._lease.uid, self._lease.fd)

    def undo(self) -> None:
        lease = self._lease
        if lease is None or not lease.new:
            return
        with uids.registry_lock():
            # The plugin may have run before it was interrupted.
            if not _has_left(lease.uid, self._writing.folders) and uids.make_exclusive(lease):
                uids.release_reservation(lease, self._writing.state_dir)

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()


class _OwnClaim:
    """For an ordinary user: the directory belongs to the user. A record beside it names the manifest, and is
    locked while the plugin lives, so that `runner state` can see that it runs."""

    def __init__(self, path: str, manifest: str) -> None:
        self._path = path
        self._manifest = manifest
        self._directory: _Directory | None = None
        self._record: int | None = None

    def take(self, parts: Sequence[str]) -> None:
        self._directory = directory = _Directory(self._path)
        held, path = directory.before, self._path
        if held.st_uid != os.geteuid():
            raise StateRefused(
                f"state directory {path} belongs to uid {held.st_uid}",
                "choose another directory with --state-dir",
            )
        if stat.S_IMODE(held.st_mode) & 0o077:
            if os.listdir(directory.fd):
                raise StateRefused(
                    f"state directory {path} is not empty, and other users can enter it",
                    f"chmod 700 {path} if its content is the plugin's, or choose another directory with "
                    "--state-dir",
                )
            os.fchmod(directory.fd, 0o700)
        if self._manifest:
            self._record = lock_record(directory.above, path, self._manifest)
        directory.make_below(parts, os.geteuid(), os.getegid())

    @property
    def owner(self) -> Owner:
        assert self._directory is not None
        return Owner(os.geteuid(), os.getegid(), self._record, self._directory.identities)

    def undo(self) -> None:
        if self._directory is None or not (self._record is None or lock_exclusively(self._record)):
            return
        if not self._directory.clear():
            return
        if self._directory.is_new and self._record is not None:
            remove_record(self._directory.above, os.path.basename(self._path))
        self._directory.restore()

    def close(self) -> None:
        if self._record is not None:
            os.close(self._record)
        if self._directory is not None:
            self._directory.close()


class _AccountClaim(_OwnClaim):
    """For a plugin that root starts as an account: no uid is reserved, and the record names the manifest."""

    def __init__(self, path: str, manifest: str, account: Account) -> None:
        super().__init__(path, manifest)
        self._account = account

    def take(self, parts: Sequence[str]) -> None:
        from sandbox.identity.accounts import account_refusal  # imported here: few launches need it

        # As for a reserved uid: two concurrent first starts would see each other's half-made folders.
        with uids.registry_lock():
            self._directory = directory = _Directory(self._path)
            owner, content = directory.before.st_uid, os.listdir(directory.fd)
            if (refusal := account_refusal(self._path, self._account, owner, content)) is not None:
                raise StateRefused(*refusal)
            os.fchown(directory.fd, self._account.uid, self._account.gid)
            os.fchmod(directory.fd, 0o700)
            if self._manifest:
                self._record = lock_record(directory.above, self._path, self._manifest)
            directory.make_below(parts, self._account.uid, self._account.gid)

    @property
    def owner(self) -> Owner:
        assert self._directory is not None
        return Owner(self._account.uid, self._account.gid, self._record, self._directory.identities)


# --- records: the manifest of each state, where there are no reservations -----------------------------------


def record_path(state_dir: str) -> str:
    """The path of a record, to be read in the runner's own folder. In other folders a user could have put a
    link on the way."""
    folder, name = os.path.split(state_dir)
    return f"{folder}/{RECORDS}/{name}"


def open_record(above: int, name: str, *, make: bool) -> int:
    """Open the record of state directory `name` of the open folder `above`. No link is followed, and the
    folder of the records must be ours: root may have states where other users can write. Raises OSError."""
    while True:
        if make:
            with suppress(FileExistsError):
                os.mkdir(RECORDS, 0o700, dir_fd=above)
        try:
            with _records(above) as folder:
                flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
                return os.open(name, flags, 0o600, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
            # Another launch failed and removed the folder again.


def remove_record(above: int, name: str) -> None:
    """Raises OSError."""
    with _records(above) as folder:
        os.unlink(name, dir_fd=folder)
    with suppress(OSError):  # there are other records
        os.rmdir(RECORDS, dir_fd=above)


@contextmanager
def _records(above: int) -> Iterator[int]:
    fd = os.open(RECORDS, _DIRECTORY, dir_fd=above)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"{RECORDS} beside it can be changed by others")
        yield fd
    finally:
        os.close(fd)


def lock_record(above: int, state_dir: str, manifest: str) -> int:
    """Open the record of a state with a shared lock, and write its manifest into it. Closing it unlocks."""
    while True:
        try:
            fd = open_record(above, os.path.basename(state_dir), make=True)
        except OSError as error:
            known = unwritable(f"{os.path.dirname(state_dir)}/{RECORDS}", error)
            raise (None if error.errno == errno.EPERM else known) or StateRefused(  # EPERM: by _records
                f"state directory {state_dir}: its record in {RECORDS} cannot be made: {error.strerror}",
                f"remove {os.path.dirname(state_dir)}/{RECORDS}, or choose another --state-dir",
            ) from None
        try:
            until = time.monotonic() + _REMOVAL_SECONDS
            while not lock_byte(fd, 0, fcntl.F_RDLCK):
                if time.monotonic() >= until:
                    raise StateRefused(f"state directory {state_dir} is being removed", "try again") from None
                time.sleep(0.01)
            if os.fstat(fd).st_nlink:
                text = os.fsencode(manifest)
                if os.pread(fd, len(text) + 1, 0) != text:
                    os.ftruncate(fd, 0)
                    os.lseek(fd, 0, os.SEEK_SET)
                    write_all(fd, text)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def lock_exclusively(fd: int) -> bool:
    return lock_byte(fd, 0, fcntl.F_WRLCK)
