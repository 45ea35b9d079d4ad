"""Apply a changeset: from the layer to the folder, one name at a time, each whole or not at all.

A new file is made in a folder of drafts, which nobody else may enter, and renamed to its place when it is
whole. Where there is a file already, the two exchange their names, and the old one is removed only if it is
the one that was compared: else they are exchanged back. The layer is only read. So an application that was
killed can be repeated: what is done is equal by then, and no change any more.

The layer's files are read while no process of its cage lives (`locked`). Programs of the host may work in the
folder meanwhile; no link of theirs is followed, and what they change is a conflict. As root, owners and modes
are set in the folder of drafts only, where nobody can put another file in the place of ours.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, NoReturn

from sandbox.files import write_all
from sandbox.paths.walk import close, walk_below
from sandbox.staged.journal import SOMEBODYS, Journal, Pending, read_journal
from sandbox.staged.layer import FORCEABLE, Change, identity, open_folder, open_own, user_attributes
from sandbox.staged.store import Changeset, StagingRefused

_NOREPLACE, _EXCHANGE = 1, 2
_PIECE_BYTES = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DRAFT = "draft"
_TRIES = 100
_CHANGED = "it was changed meanwhile"


_Act = Callable[[int, str, Change], None]  # the open folder, the name in it, and what becomes of it


class Applied(NamedTuple):
    change: Change
    fault: str = ""  # why it was not applied; '': it was


class _Conflict(Exception):
    pass


def apply(changeset: Changeset, changes: Sequence[Change], forced: Collection[str] = ()) -> Iterator[Applied]:
    """Apply these changes, in the order of `changes_of`. Within `locked`, after `recover`. `forced`: paths,
    absolute, whose refusals a person has overruled, each with everything below it. Raises OSError and
    StagingRefused."""
    with ExitStack() as stack:
        journal = Journal(changeset)
        stack.callback(journal.close)
        for number in range(len(changeset.folders)):
            own = [change for change in changes if change.folder == number]
            if own:
                with (
                    open_folder(changeset, number) as (layer, folder),
                    _Application(changeset, number, (layer, folder), journal, forced) as application,
                ):
                    yield from application.all(own)


def recover(changeset: Changeset, *, undo: bool = False) -> None:
    """Finish what a killed application was doing, or with `undo` take it back, where the folder is still
    there. Within `locked`, before the folder is compared with its layer. Raises OSError and
    StagingRefused."""
    progress = read_journal(changeset)
    for number, (name, inode) in progress.drafts.items():
        with ExitStack() as stack:
            if undo:
                stack.enter_context(suppress(StagingRefused))
            _, folder = stack.enter_context(open_folder(changeset, number))
            try:
                drafts = os.open(name, _FOLDER, dir_fd=folder)
            except FileNotFoundError:
                continue
            stack.callback(os.close, drafts)
            if not inode:  # it was killed when it had just made it
                with suppress(OSError):  # somebody else's has something in it
                    os.rmdir(name, dir_fd=folder)
                continue
            if os.fstat(drafts).st_ino != inode:
                continue  # somebody else's, in the place of ours
            journal = Journal(changeset)
            stack.callback(journal.close)
            if progress.pending is not None and progress.pending.number == number:
                _finish_pending(folder, drafts, progress.pending, journal, undo=undo)
            _drop(drafts, journal)
            os.rmdir(name, dir_fd=folder)
            journal.note("changed", number, "", os.fstat(folder).st_ctime_ns)


def _finish_pending(
    folder: int,
    drafts: int,
    pending: Pending,
    journal: Journal,
    *,
    undo: bool,
) -> None:
    number, path, before, is_folder = pending
    with suppress(FileNotFoundError, NotADirectoryError), _parent(folder, path) as (above, name):
        left = None
        with suppress(FileNotFoundError):
            left = identity(os.stat(_DRAFT, dir_fd=drafts, follow_symlinks=False))
        if before is not None and left is not None and left[0] == before[0]:  # it is the old file
            there = os.path.lexists(f"/proc/self/fd/{above}/{name}")
            if there and left != before:  # somebody had changed it before it was replaced
                _rename(drafts, _DRAFT, above, name, _EXCHANGE)
            if not there and (undo or left != before):
                _rename(drafts, _DRAFT, above, name, _NOREPLACE)
        journal.note("changed", number, path.rpartition("/")[0], os.fstat(above).st_ctime_ns)
        if is_folder:
            status = os.stat(name, dir_fd=above, follow_symlinks=False)
            journal.note("changed", number, path, status.st_ctime_ns)


class _Application:
    """The changes of one folder."""

    def __init__(
        self,
        changeset: Changeset,
        number: int,
        opened: tuple[int, int],
        journal: Journal,
        forced: Collection[str],
    ) -> None:
        self._real = changeset.folders[number].real.rstrip("/")
        self._owner = changeset.folders[number].owner
        self._number, self._journal = number, journal
        self._layer, self._folder = opened
        self._forced = tuple(path.rstrip("/") for path in forced)
        self._drafts = -1
        self._name = f".runner.{os.urandom(8).hex()}"
        self._began = changeset.began
        self._changed = dict(read_journal(changeset).changed)
        self._touched: tuple[str, int] | None = None  # the folder in which something was done last
        self._linked: dict[int, tuple[str, int]] = {}  # where a file of the layer with several names is now

    def __enter__(self) -> _Application:
        self._look_at("", self._folder)
        self._journal.note("drafts", self._number, self._name, 0)  # before it is there: see `recover`
        os.mkdir(self._name, 0o700, dir_fd=self._folder)
        self._drafts = os.open(self._name, _FOLDER, dir_fd=self._folder)
        status = os.fstat(self._drafts)
        # The owner of the folder may have put another one there, even one of root's.
        if status.st_uid != os.geteuid() or status.st_mode & 0o077 or os.listdir(self._drafts):
            os.close(self._drafts)
            raise StagingRefused(f"{self._real} is being changed by another program", "try again")
        self._journal.note("drafts", self._number, self._name, status.st_ino)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        with suppress(OSError):  # the next application looks again
            _drop(self._drafts, self._journal)
            os.rmdir(self._name, dir_fd=self._folder)
        os.close(self._drafts)
        self._note_changed("", self._folder)
        _libc.syncfs(self._folder)  # before the layer is removed

    def all(self, changes: Sequence[Change]) -> Iterator[Applied]:
        modes = []
        for change in changes:
            fault = self._one(change)
            if change.kind == "folder" and change.act != "D" and not fault:
                modes.append(change)
            else:
                yield Applied(change, fault)
        # At the end: a folder that its owner may not write takes no files.
        for change in reversed(modes):
            yield Applied(change, self._tried(change, self._set_mode))

    def _one(self, change: Change) -> str:
        """Returns why it was not applied, or ''."""
        if change.rule and not (change.rule in FORCEABLE and self._is_forced(change.path)):
            return f"{change.rule}: {change.reason}"
        if change.act == "D":
            return self._tried(change, self._remove)
        return self._tried(change, self._make_folder if change.kind == "folder" else self._put)

    def _tried(self, change: Change, act: _Act) -> str:
        try:
            with _parent(self._folder, change.path) as (above, name):
                self._enter(change.path.rpartition("/")[0], above)
                act(above, name, change)
        except _Conflict:
            return f"conflict: {_CHANGED}"
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and change.act == "D":
                return "conflict: it holds something that is not removed"
            return f"{error.strerror}"
        return ""

    def _enter(self, path: str, above: int) -> None:
        """Something is done in this folder next. What was done in the last one is complete."""
        if self._touched is None or self._touched[0] != path:
            self._leave()
            self._look_at(path, above)
            self._touched = path, os.dup(above)

    def _leave(self) -> None:
        if self._touched is not None:
            path, fd = self._touched
            self._note_changed(path, fd)
            os.close(fd)
            self._touched = None

    def _look_at(self, path: str, folder: int) -> None:
        """Note whether somebody else has changed a folder, before we do."""
        time = os.fstat(folder).st_ctime_ns
        known = self._changed.get((self._number, path))
        if time >= self._began and known not in (time, SOMEBODYS):
            self._changed[self._number, path] = SOMEBODYS
            self._journal.note("changed", self._number, path, SOMEBODYS)

    def _note_changed(self, path: str, folder: int) -> None:
        key = self._number, path
        if self._changed.get(key) != SOMEBODYS:
            self._changed[key] = os.fstat(folder).st_ctime_ns
            self._journal.note("changed", *key, self._changed[key])

    def _is_forced(self, path: str) -> bool:
        whole = f"{self._real}/{path}"
        return any(whole == each or whole.startswith(each + "/") for each in self._forced)

    # --- one name -------------------------------------------------------------------------------------------

    def _remove(self, above: int, name: str, change: Change) -> None:
        if change.kind == "folder":
            if _require_folder(above, name).st_ino != (change.before or (0,))[0]:
                raise _Conflict
            with _writable(above):
                os.rmdir(name, dir_fd=above)
            return
        _require_known(above, name, change)
        self._begin(change)
        with _writable(above):
            _rename(above, name, self._drafts, _DRAFT, _NOREPLACE)
            if identity(os.stat(_DRAFT, dir_fd=self._drafts, follow_symlinks=False)) != change.before:
                try:
                    _rename(self._drafts, _DRAFT, above, name, _NOREPLACE)
                except FileExistsError:
                    self._keep(above)
                raise _Conflict
        _drop(self._drafts, self._journal)

    def _make_folder(self, above: int, name: str, change: Change) -> None:
        if change.act == "M":
            # Its content comes next, and its own mode at the end.
            self._set_mode(above, name, change._replace(mode=change.mode | 0o700))
            return
        self._begin(change)
        _drop(self._drafts, self._journal)
        os.mkdir(_DRAFT, 0o700, dir_fd=self._drafts)
        fd = os.open(_DRAFT, _FOLDER, dir_fd=self._drafts)
        try:
            self._own(fd, above)
            os.fchmod(fd, (change.mode & 0o777) | 0o700 | (os.fstat(above).st_mode & stat.S_ISGID))
            with _writable(above):
                _rename(self._drafts, _DRAFT, above, name, _NOREPLACE)
            self._note_changed(change.path, fd)
        except FileExistsError:
            raise _Conflict from None
        finally:
            os.close(fd)

    def _set_mode(self, above: int, name: str, change: Change) -> None:
        """Of a folder of its owner's: somebody may have put root's there."""
        fd = os.open(name, _FOLDER, dir_fd=above)
        try:
            status = os.fstat(fd)
            is_owners = status.st_uid == (self._owner[0] if os.geteuid() == 0 else os.geteuid())
            if not is_owners or (change.before is not None and status.st_ino != change.before[0]):
                raise _Conflict
            self._look_at(change.path, fd)
            os.fchmod(fd, (change.mode & 0o1777) | (status.st_mode & stat.S_ISGID))
            self._note_changed(change.path, fd)
        finally:
            os.close(fd)

    def _put(self, above: int, name: str, change: Change) -> None:
        """Add or replace a file or a link."""
        known = None if change.act == "A" else _require_known(above, name, change)
        self._begin(change)
        _drop(self._drafts, self._journal)
        with _parent(self._layer, change.path) as (layer, _):
            self._draft(layer, name, above, change, known)
        ours = os.stat(_DRAFT, dir_fd=self._drafts, follow_symlinks=False)
        with _writable(above):
            if known is None:
                try:
                    _rename(self._drafts, _DRAFT, above, name, _NOREPLACE)
                except FileExistsError:
                    raise _Conflict from None
            else:
                self._exchange(above, name, change, ours.st_ino)
        if change.links > 1:
            self._linked[change.inode] = change.path, ours.st_ino

    def _exchange(self, above: int, name: str, change: Change, ours: int) -> None:
        _rename(self._drafts, _DRAFT, above, name, _EXCHANGE)
        if identity(os.stat(_DRAFT, dir_fd=self._drafts, follow_symlinks=False)) == change.before:
            _drop(self._drafts, self._journal)
            return
        # Somebody was faster, and may be so again: what is left here in the end is ours.
        for _ in range(_TRIES):
            _rename(self._drafts, _DRAFT, above, name, _EXCHANGE)
            if os.stat(_DRAFT, dir_fd=self._drafts, follow_symlinks=False).st_ino == ours:
                raise _Conflict
            ours = os.stat(name, dir_fd=above, follow_symlinks=False).st_ino
        self._keep(above)

    def _keep(self, above: int) -> NoReturn:
        """The draft is somebody's work, and its name is taken: leave it beside that. Raises OSError."""
        kept = f"{self._name}.kept"
        _rename(self._drafts, _DRAFT, above, kept, _NOREPLACE)
        raise OSError(errno.EBUSY, f"another program keeps replacing it, and one version of it is {kept} now")

    def _begin(self, change: Change) -> None:
        if change.kind == "folder":
            self._journal.note("folder", self._number, change.path)
            return
        before = None if change.act == "A" else change.before
        self._journal.note("draft", self._number, change.path, before)

    # --- drafts ---------------------------------------------------------------------------------------------

    def _draft(self, layer: int, name: str, above: int, change: Change, known: os.stat_result | None) -> None:
        if change.kind == "link":
            os.symlink(os.readlink(name, dir_fd=layer), _DRAFT, dir_fd=self._drafts)
            self._own_name(above, known)
            return
        if change.kind == "other":
            status = os.stat(name, dir_fd=layer, follow_symlinks=False)
            if not (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
                raise OSError(errno.EPERM, "a device is never made")
            os.mknod(_DRAFT, stat.S_IFMT(status.st_mode) | (change.mode & 0o777), dir_fd=self._drafts)
            self._own_name(above, known)
            return
        if known is None and change.links > 1 and self._link_again(change):
            return
        source = open_own(name, _READ, layer)
        try:
            if not stat.S_ISREG(os.fstat(source).st_mode):
                raise _Conflict
            target = os.open(_DRAFT, _NEW, 0o600, dir_fd=self._drafts)
            try:
                _copy_data(source, target)
                if known is not None and self._is_owners(known):
                    _copy_old_attributes(above, name, target)
                for each, value in user_attributes(source).items():
                    os.setxattr(target, each, value)
                self._own(target, above, known)
                os.fchmod(target, change.mode)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _link_again(self, change: Change) -> bool:
        """One more name of a file that was placed before. Copies could hold many times what the layer has."""
        path, inode = self._linked.get(change.inode, ("", 0))
        with suppress(OSError), _parent(self._folder, path) as (other, first):
            if path and os.stat(first, dir_fd=other, follow_symlinks=False).st_ino == inode:
                os.link(first, _DRAFT, src_dir_fd=other, dst_dir_fd=self._drafts, follow_symlinks=False)
                if os.stat(_DRAFT, dir_fd=self._drafts, follow_symlinks=False).st_ino == inode:
                    return True
                os.unlink(_DRAFT, dir_fd=self._drafts)
        return False

    def _own(self, fd: int, above: int, known: os.stat_result | None = None) -> None:
        """Give a new file its owner: that of the one that it replaces, else the folder's."""
        uid, gid = self._wanted(above, known)
        here = os.fstat(fd)
        if (here.st_uid, here.st_gid) != (uid, gid):
            if os.geteuid() == 0:
                os.fchown(fd, uid, gid)
            else:  # of another of our groups, if we are in it
                with suppress(PermissionError):
                    os.fchown(fd, -1, gid)

    def _is_owners(self, known: os.stat_result) -> bool:
        """Whether a file that is replaced is the folder's owner's. Another user's, such as root's, is
        replaced as its owner could: the new one is the owner's."""
        return os.geteuid() != 0 or known.st_uid == self._owner[0]

    def _own_name(self, above: int, known: os.stat_result | None) -> None:
        """The same for what cannot be opened. It is in the folder of drafts, so it is ours."""
        if os.geteuid() == 0:
            os.chown(_DRAFT, *self._wanted(above, known), dir_fd=self._drafts, follow_symlinks=False)

    def _wanted(self, above: int, known: os.stat_result | None) -> tuple[int, int]:
        if known is not None and self._is_owners(known):
            return known.st_uid, known.st_gid
        status = os.fstat(above)
        gid = self._owner[1] if os.geteuid() == 0 else os.getegid()
        return self._owner[0], status.st_gid if status.st_mode & stat.S_ISGID else gid


def _drop(drafts: int, journal: Journal) -> None:
    """Remove the draft, if there is one. Other names of the same file get another change time by that."""
    try:
        fd = os.open(_DRAFT, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=drafts)
    except FileNotFoundError:
        return
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.rmdir(_DRAFT, dir_fd=drafts)
            return
        os.unlink(_DRAFT, dir_fd=drafts)
        status = os.fstat(fd)
        if status.st_nlink:
            journal.note("other", status.st_ino, status.st_ctime_ns)
    finally:
        os.close(fd)


@contextmanager
def _parent(root: int, path: str) -> Iterator[tuple[int, str]]:
    """The open folder that a path is in, and the path's last name. No link is followed."""
    above, _, name = path.rpartition("/")
    steps = walk_below(root, above)
    try:
        yield steps[-1].fd, name
    finally:
        close(steps)


@contextmanager
def _writable(folder: int) -> Iterator[None]:
    """A folder that its owner may not write, while its owner changes it."""
    status = os.fstat(folder)
    closed = os.geteuid() != 0 and status.st_uid == os.geteuid() and status.st_mode & 0o300 != 0o300
    if closed:
        os.chmod(f"/proc/self/fd/{folder}", stat.S_IMODE(status.st_mode) | 0o700)
    try:
        yield
    finally:
        if closed:
            os.chmod(f"/proc/self/fd/{folder}", stat.S_IMODE(status.st_mode))


def _require_known(above: int, name: str, change: Change) -> os.stat_result:
    """The file that is there has to be the one that was compared."""
    try:
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        raise _Conflict from None
    if identity(found) != change.before:
        raise _Conflict
    return found


def _require_folder(above: int, name: str) -> os.stat_result:
    found = os.stat(name, dir_fd=above, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        raise _Conflict
    return found


def _copy_data(source: int, target: int) -> None:
    """Copy a file, and keep its holes."""
    size, at = os.fstat(source).st_size, 0
    os.ftruncate(target, size)
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        os.lseek(target, at, os.SEEK_SET)
        os.lseek(source, at, os.SEEK_SET)
        while at < end:
            piece = os.read(source, min(_PIECE_BYTES, end - at))
            if not piece:
                raise OSError(errno.ESTALE, "the layer was changed meanwhile")
            write_all(target, piece)
            at += len(piece)


def _copy_old_attributes(above: int, name: str, target: int) -> None:
    """Access lists and labels stay those of the file that is replaced. Capabilities do not: the content is
    new."""
    place = f"/proc/self/fd/{above}/{name}"
    with suppress(OSError):
        for each in os.listxattr(place, follow_symlinks=False):
            if not each.startswith("user.") and each != "security.capability":
                with suppress(OSError):
                    os.setxattr(target, each, os.getxattr(place, each, follow_symlinks=False))


_libc = ctypes.CDLL(None, use_errno=True)


def _rename(source: int, old: str, target: int, new: str, flags: int) -> None:
    """renameat2(2). Raises OSError."""
    if _libc.renameat2(source, os.fsencode(old), target, os.fsencode(new), flags) != 0:
        code = ctypes.get_errno()
        why = "this filesystem cannot exchange names" if code == errno.EINVAL else os.strerror(code)
        raise OSError(code, why, old)
