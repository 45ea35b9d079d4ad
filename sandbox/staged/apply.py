"""Apply a changeset: from the layer to the folder, one name at a time, each whole or not at all.

A new file is written under a name of its own in its folder and then renamed, so nobody sees half of it. Where
there is a file already, the two exchange their names, and the old one is removed only if it is the one that
was compared: else they are exchanged back. The layer is only read. So an application that was killed can be
repeated: what is done is equal by then, and no change any more. The journal names the one file that a crash
leaves behind.

The layer's files are read while no process of its cage lives (`locked`). Programs of the host may work in the
folder meanwhile; no link of theirs is followed, and what they change is a conflict.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from sandbox.files import write_all
from sandbox.paths.walk import Step, close, walk_below
from sandbox.staged.layer import FORCEABLE, Change, identity, open_folder, user_attributes
from sandbox.staged.store import Changeset

_NOREPLACE, _EXCHANGE = 1, 2
_PIECE_BYTES = 1 << 20
_LONGEST_JOURNAL = 16 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CHANGED = "it was changed meanwhile"


class Applied(NamedTuple):
    change: Change
    fault: str = ""  # why it was not applied; '': it was


class _Conflict(Exception):
    pass


def apply(changeset: Changeset, changes: Sequence[Change], forced: Collection[str] = ()) -> Iterator[Applied]:
    """Apply these changes, in the order of `changes_of`. Within `locked`, after `recover`. `forced`: paths,
    absolute, whose refusals a person has overruled, each with everything below it. Raises StagingRefused."""
    journal = _Journal(changeset)
    try:
        for number in range(len(changeset.folders)):
            own = [change for change in changes if change.folder == number]
            if own:
                with open_folder(changeset, number) as (layer, folder):
                    yield from _Application(changeset, number, layer, folder, journal, forced).all(own)
                    _sync(folder)
        journal.done()
    finally:
        journal.close()


def recover(changeset: Changeset) -> None:
    """Finish or undo what a killed application was doing. Within `locked`, before the folder is compared with
    its layer. Raises OSError and StagingRefused."""
    if os.path.lexists(changeset.journal):
        journal = _Journal(changeset)
        try:
            journal.recover()
        finally:
            journal.close()


class _Application:
    """The changes of one folder."""

    def __init__(
        self,
        changeset: Changeset,
        number: int,
        layer: int,
        folder: int,
        journal: _Journal,
        forced: Collection[str],
    ) -> None:
        self._real = changeset.folders[number].real.rstrip("/")
        self._owner = changeset.folders[number].owner
        self._number, self._layer, self._folder, self._journal = number, layer, folder, journal
        self._forced = tuple(path.rstrip("/") for path in forced)
        self._undone: set[str] = set()  # folders that could not be made

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
            try:
                with _Parent(self._folder, change.path) as (above, name):
                    _change_mode(above, name, change.mode)
                yield Applied(change)
            except OSError as error:
                yield Applied(change, f"{error.strerror}")

    def _one(self, change: Change) -> str:
        """Returns why it was not applied, or ''."""
        if change.rule and not (change.rule in FORCEABLE and self._is_forced(change.path)):
            return f"{change.rule}: {change.reason}"
        try:
            with _Parent(self._folder, change.path) as (above, name):
                if change.act == "D":
                    self._remove(above, name, change)
                elif change.kind == "folder":
                    self._make_folder(above, name)
                else:
                    self._put(above, name, change)
        except _Conflict:
            return f"conflict: {_CHANGED}"
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and change.act == "D":
                return "conflict: it holds something that is not removed"
            return f"{error.strerror}"
        return ""

    def _is_forced(self, path: str) -> bool:
        whole = f"{self._real}/{path}"
        return any(whole == each or whole.startswith(each + "/") for each in self._forced)

    def _remove(self, above: int, name: str, change: Change) -> None:
        if change.kind == "folder":
            os.rmdir(name, dir_fd=above)
            return
        _require_known(above, name, change)
        draft = self._journal.draft(change)
        _rename(above, name, draft, _NOREPLACE)
        if identity(os.stat(draft, dir_fd=above, follow_symlinks=False)) != change.before:
            _rename(above, draft, name, _NOREPLACE)
            raise _Conflict
        try:
            os.unlink(draft, dir_fd=above)
        except OSError:
            self._journal.leave()
            raise

    def _make_folder(self, above: int, name: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
            self._own(above, name)
        if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise _Conflict

    def _put(self, above: int, name: str, change: Change) -> None:
        """Add or replace a file or a link."""
        known = None if change.act == "A" else _require_known(above, name, change)
        draft = self._journal.draft(change)
        is_ours = True  # whether the draft is, and not the file that was there
        try:
            with _Parent(self._layer, change.path) as (layer, _):
                self._copy(layer, name, above, draft, change, known)
            if known is None:
                try:
                    _rename(above, draft, name, _NOREPLACE)
                except FileExistsError:
                    raise _Conflict from None
                return
            _rename(above, draft, name, _EXCHANGE)
            if identity(os.stat(draft, dir_fd=above, follow_symlinks=False)) != change.before:
                is_ours = False
                _rename(above, draft, name, _EXCHANGE)
                is_ours = True
                raise _Conflict
        finally:
            if is_ours:
                try:
                    os.unlink(draft, dir_fd=above)
                except FileNotFoundError:
                    pass
                except OSError:
                    self._journal.leave()

    def _copy(
        self, layer: int, name: str, above: int, draft: str, change: Change, known: os.stat_result | None
    ) -> None:
        if change.kind == "link":
            os.symlink(os.readlink(name, dir_fd=layer), draft, dir_fd=above)
            self._own(above, draft, known)
            return
        if change.kind == "other":
            status = os.stat(name, dir_fd=layer, follow_symlinks=False)
            if not (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
                raise OSError(errno.EPERM, "a device is never made")
            os.mknod(draft, status.st_mode, dir_fd=above)
            self._own(above, draft, known)
            return
        source = os.open(name, _READ, dir_fd=layer)
        try:
            if not stat.S_ISREG(os.fstat(source).st_mode):
                raise _Conflict
            target = os.open(draft, _NEW, 0o600, dir_fd=above)
            try:
                _copy_data(source, target)
                if known is not None:
                    _copy_old_attributes(above, change.path.rpartition("/")[2], target)
                for each, value in user_attributes(source).items():
                    os.setxattr(target, each, value)
                self._own(above, draft, known)
                os.fchmod(target, change.mode)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _own(self, above: int, name: str, known: os.stat_result | None = None) -> None:
        """Give a new file its owner: that of the one that it replaces, else the folder's."""
        uid, gid = self._owner if known is None else (known.st_uid, known.st_gid)
        here = os.stat(name, dir_fd=above, follow_symlinks=False)
        if known is None and os.fstat(above).st_mode & stat.S_ISGID:
            gid = here.st_gid
        if (here.st_uid, here.st_gid) != (uid, gid):
            if os.geteuid() == 0:
                os.chown(name, uid, gid, dir_fd=above, follow_symlinks=False)
            else:  # of another of our groups, if we are in it
                with suppress(PermissionError):
                    os.chown(name, -1, gid, dir_fd=above, follow_symlinks=False)


class _Parent:
    """The open folder that a path is in, and the path's last name. No link is followed."""

    def __init__(self, root: int, path: str) -> None:
        self._root = root
        self._above, _, self._name = path.rpartition("/")
        self._steps: list[Step] = []

    def __enter__(self) -> tuple[int, str]:
        self._steps = walk_below(self._root, self._above)
        return self._steps[-1].fd, self._name

    def __exit__(self, *_: object) -> None:
        close(self._steps)


class _Journal:
    """Names the file that is not in its place yet, and those that could not be removed, so that a later
    application finds them."""

    def __init__(self, changeset: Changeset) -> None:
        self._changeset = changeset
        self._fd = os.open(changeset.journal, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._token = os.urandom(8).hex()
        self._left = self._read()
        self._now: list[Any] = []

    def close(self) -> None:
        os.close(self._fd)

    def draft(self, change: Change) -> str:
        """Note the name that a file has until it is in its place, or that the old one has until it is
        removed."""
        draft = f".runner.{self._token}.{len(self._left)}"
        self._now = [change.folder, change.path, draft, change.before]
        self._write([*self._left, self._now])
        return draft

    def leave(self) -> None:
        """The last one could not be removed."""
        self._left.append(self._now)

    def done(self) -> None:
        self._write(self._left)

    def recover(self) -> None:
        self._left = [each for each in self._left if not self._is_mended(*each)]
        self.done()

    def _is_mended(self, number: int, path: str, draft: str, known: list[int] | None) -> bool:
        try:
            with open_folder(self._changeset, number) as (_, folder), _Parent(folder, path) as (above, name):
                left = list(identity(os.stat(draft, dir_fd=above, follow_symlinks=False)))
                if known is not None and left[0] == known[0] and left != known:
                    # It is the old file, and somebody had changed it before it was removed or replaced.
                    if not os.path.lexists(f"/proc/self/fd/{above}/{name}"):
                        _rename(above, draft, name, _NOREPLACE)
                        return True
                    _rename(above, draft, name, _EXCHANGE)
                os.unlink(draft, dir_fd=above)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _read(self) -> list[Any]:
        """Nothing if it is empty, or was killed while it was written: then no file was made."""
        try:
            found = json.loads(os.pread(self._fd, _LONGEST_JOURNAL, 0))
        except ValueError:
            return []
        return [each for each in found if isinstance(each, list) and len(each) == 4]

    def _write(self, entries: list[Any]) -> None:
        data = json.dumps(entries).encode()
        size = os.fstat(self._fd).st_size
        os.pwrite(self._fd, data + b" " * max(0, size - len(data)), 0)


def _require_known(above: int, name: str, change: Change) -> os.stat_result:
    """The file that is there has to be the one that was compared."""
    try:
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        raise _Conflict from None
    if identity(found) != change.before:
        raise _Conflict
    return found


def _change_mode(above: int, name: str, mode: int) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


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


def _rename(above: int, old: str, new: str, flags: int) -> None:
    """renameat2(2). Raises OSError."""
    if _libc.renameat2(above, os.fsencode(old), above, os.fsencode(new), flags) != 0:
        code = ctypes.get_errno()
        why = "this filesystem cannot exchange names" if code == errno.EINVAL else os.strerror(code)
        raise OSError(code, why, old)


def _sync(folder: int) -> None:
    """What was renamed survives a crash of the machine before its layer is removed."""
    _libc.syncfs(folder)
