"""What a layer changes of its folder.

Overlayfs keeps the changes in the layer: new and changed files as they are, a removed name as a character
device 0/0, and `user.overlay.opaque` on a folder that replaced another one. The layer is the plugin's, marks
and all, so nothing in it is believed: it is compared with the folder as that is now. What is equal there is
no change. So a changeset that was applied half-way shows the other half.

No link is followed and no other mount is entered, in the layer and in the folder.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Literal, NamedTuple

from sandbox.paths.guarded import BARE_SIGNS, COMMON, VERSION_CONTROL, GuardedName, find_row, is_guarded
from sandbox.staged.journal import read_journal
from sandbox.staged.store import Changeset, StagingRefused, read_folders, write_folders

_MARK = "user.overlay."
_OPAQUE, _ORIGIN = _MARK + "opaque", _MARK + "origin"
_KNOWN_MARKS = frozenset({_OPAQUE, _ORIGIN, _MARK + "impure", _MARK + "uuid"})
MOST_CHANGES = 1_000_000  # of one folder: each takes about a kilobyte
_MOST_DEPTH = 200
_MOST_FOLDERS = 100_000
_PIECE_BYTES = 1 << 20
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER_MODE = 0o1777  # not set-gid, which says whose the files in it are, and comes from the folder above
_SIGNS = frozenset((*BARE_SIGNS, COMMON))
_GIT_PARTS = frozenset(part.name for part in VERSION_CONTROL[0].parts)

Kind = Literal["file", "folder", "link", "other"]
# Why a change is not applied.
Rule = Literal["", "unreadable", "mount", "conflict", "denied", "guarded", "special", "set-id", "link"]
# These are taken if a person names them.
FORCEABLE: frozenset[Rule] = frozenset({"guarded", "special", "set-id", "link"})


class Change(NamedTuple):
    """One name that is added (A), modified (M) or removed (D)."""

    folder: int  # its number in the changeset
    path: str  # below the folder
    act: Literal["A", "M", "D"]
    kind: Kind  # what there is now, or was
    size: int = 0  # bytes; of what is removed, its size
    mode: int = 0
    size_before: int = 0
    mode_before: int = 0
    before: tuple[int, int, int] | None = None  # `identity` of what is replaced or removed
    rule: Rule = ""
    reason: str = ""
    # Of a file in the layer: how many names it has there, and its number.
    links: int = 0
    inode: int = 0


class Judge(NamedTuple):
    """What else keeps a change from being applied."""

    names: Mapping[str, GuardedName]  # the guards' table
    denied: Callable[[str], str]  # of an absolute path: why it may not be written, or ''


def changes_of(changeset: Changeset, judge: Judge) -> Iterator[Change]:
    """All changes: removed names from the bottom up, then added and modified ones from the top down. Raises
    StagingRefused if a folder is not the one it was, and if there are too many."""
    for number in range(len(changeset.folders)):
        with open_folder(changeset, number) as (layer, folder):
            found = list(islice(_Comparison(changeset, number, judge, layer, folder).all(), MOST_CHANGES + 1))
        if len(found) > MOST_CHANGES:
            hint = f"discard it; what it wrote is in {changeset.layer(number)}"
            raise StagingRefused(f"{changeset.id} has more than {MOST_CHANGES:,} changes", hint)
        yield from (each for each in found if each.act == "D")
        yield from (each for each in found if each.act != "D")


def glance(
    changeset: Changeset, judge: Judge, *, most: int = 10_000, seconds: float = 2.0
) -> tuple[list[Change], bool]:
    """The first changes, for a summary at the end of a launch, and whether these are all of them. What ran
    does not decide how long that takes. Raises StagingRefused."""
    found: list[Change] = []
    until = time.monotonic() + seconds
    with suppress(_OutOfTime):
        for number in range(len(changeset.folders)):
            with open_folder(changeset, number) as (layer, folder):
                for change in _Comparison(changeset, number, judge, layer, folder, until).all():
                    if len(found) == most:
                        return found, False
                    found.append(change)
        return found, True
    return found, False


class _OutOfTime(Exception):
    pass


@contextmanager
def open_folder(changeset: Changeset, number: int) -> Iterator[tuple[int, int]]:
    """Descriptors of a layer, and of its folder, which has to be the same one still."""
    known = changeset.folders[number]
    layer = folder = -1
    try:
        try:
            layer = open_own(changeset.layer(number), _LIST)
            folder = os.open(known.real, _LIST)
            is_same = os.readlink(f"/proc/self/fd/{folder}") == known.real
        except OSError as error:
            raise StagingRefused(
                f"{known.real} cannot be compared: {error.strerror}", "put it back"
            ) from None
        status = os.fstat(folder)
        if not is_same or (status.st_dev, status.st_ino) != (known.device, known.inode):
            told = f"{known.real} is another folder than when {changeset.id} was made"
            raise StagingRefused(told, "put the folder back, or discard the changes")
        yield layer, folder
    finally:
        for fd in (layer, folder):
            if fd >= 0:
                os.close(fd)


def note_folders(changeset: Changeset) -> None:
    """At the end of a launch. Without it only the times of the folders tell whether they are the same."""
    with suppress(OSError, StagingRefused, RecursionError):
        write_folders(changeset, [_merged(changeset, number) for number in range(len(changeset.folders))])


def _merged(changeset: Changeset, number: int) -> dict[str, int]:
    """The folders that are in the layer and in the folder, with the inode numbers of the latter."""
    found: dict[str, int] = {}

    def look(path: str, layer: int, folder: int) -> None:
        for name in os.listdir(layer):
            status, below = _status(name, layer), _status(name, folder)
            if status and below and stat.S_ISDIR(status.st_mode) and stat.S_ISDIR(below.st_mode):
                if len(found) >= _MOST_FOLDERS or path.count("/") >= _MOST_DEPTH:
                    return
                one = open_own(name, _LIST, layer)
                try:
                    other = os.open(name, _LIST, dir_fd=folder)
                    try:
                        found[_join(path, name)] = os.fstat(other).st_ino
                        look(_join(path, name), one, other)
                    finally:
                        os.close(other)
                finally:
                    os.close(one)

    with open_folder(changeset, number) as (layer, folder):
        look("", layer, folder)
    return found


class _Compared(NamedTuple):
    """A folder that is being compared."""

    path: str
    layer: int
    folder: int | None  # None: there is none
    rule: Rule = ""  # why nothing in it can be applied
    reason: str = ""


class _Comparison:
    """One folder with its layer."""

    def __init__(
        self,
        changeset: Changeset,
        number: int,
        judge: Judge,
        layer: int,
        folder: int,
        until: float = math.inf,
    ) -> None:
        """`until`: raises _OutOfTime then, on the monotonic clock."""
        self._until = until
        self._changeset, self._number, self._judge = changeset, number, judge
        self._top = _Compared("", layer, folder)
        self._real = changeset.folders[number].real
        self._mount = _mount_of(folder)
        self._progress = read_journal(changeset)
        self._known = read_folders(changeset).get(number, {})

    def all(self) -> Iterator[Change]:
        yield from self._list(self._top, is_opaque=False, depth=0)

    def _list(self, place: _Compared, *, is_opaque: bool, depth: int) -> Iterator[Change]:
        try:
            names = sorted(os.listdir(place.layer))
        except OSError as error:
            yield self._change(place.path, "M", "folder", rule="unreadable", reason=f"{error.strerror}")
            return
        obeyed = self._obeyed_names(place, names)
        for name in names:
            for change in self._name(place, name, depth):
                if name in obeyed and not change.rule:
                    told = "it would be part of a repository, and git runs what that says"
                    change = change._replace(rule="guarded", reason=told)
                yield change
        if is_opaque and place.folder is not None:
            for name in sorted(set(os.listdir(place.folder)).difference(names)):
                yield from self._removed(_join(place.path, name), place.folder, name, place)

    def _name(self, place: _Compared, name: str, depth: int) -> Iterator[Change]:
        self._look_at_clock()
        path = _join(place.path, name)
        status = _status(name, place.layer)
        before = None if place.folder is None else _status(name, place.folder)
        if status is None:
            return
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            if before is not None and place.folder is not None:
                yield from self._removed(path, place.folder, name, place)
            return
        kind = _kind(status.st_mode)
        if before is not None and _kind(before.st_mode) != kind:
            assert place.folder is not None
            yield from self._removed(path, place.folder, name, place)
        same = before if before is not None and _kind(before.st_mode) == kind else None
        if kind == "folder":
            yield from self._folder(place, name, status, same, depth)
            return
        if same is not None and self._is_equal(place, name, kind, status, same):
            return
        change = self._change(path, "A" if same is None else "M", kind, status, same)
        yield self._judged(change, place, name, status, before)

    def _folder(
        self, place: _Compared, name: str, status: os.stat_result, before: os.stat_result | None, depth: int
    ) -> Iterator[Change]:
        path = _join(place.path, name)
        layer = folder = -1
        rule: Rule = place.rule
        reason = place.reason
        try:
            try:
                layer = open_own(name, _LIST, place.layer)
                if before is not None and place.folder is not None:
                    folder = os.open(name, _LIST, dir_fd=place.folder)
                    if _mount_of(folder) != self._mount:
                        rule, reason = "mount", "another filesystem is mounted there"
                    elif self._is_moved(path, os.fstat(folder)):
                        rule, reason = "conflict", f"the folder {path} was moved or changed meanwhile"
            except OSError as error:
                told = f"it cannot be opened: {error.strerror}"
                yield self._change(path, "M", "folder", status, before, "unreadable", told)
                return
            if depth >= _MOST_DEPTH:
                told = f"it is more than {_MOST_DEPTH} folders deep"
                yield self._change(path, "A", "folder", status, before, "unreadable", told)
                return
            if before is None or (before.st_mode ^ status.st_mode) & _FOLDER_MODE:
                act: Literal["A", "M"] = "A" if before is None else "M"
                change = self._change(path, act, "folder", status, before)
                change = self._judged(change, place, name, status, before)
                if rule in ("mount", "conflict"):
                    change = change._replace(rule=rule, reason=reason)
                yield change
                if before is None and change.rule and not rule:
                    rule, reason = change.rule, f"its folder {path} is not taken: {change.reason}"
            below = _Compared(path, layer, folder if folder >= 0 else None, rule, reason)
            is_opaque = _attribute(f"/proc/self/fd/{layer}", _OPAQUE) == b"y"
            yield from self._list(below, is_opaque=is_opaque, depth=depth + 1)
        finally:
            for fd in (layer, folder):
                if fd >= 0:
                    os.close(fd)

    def _removed(self, path: str, above: int, name: str, place: _Compared) -> Iterator[Change]:
        """A name of the folder that is gone, and everything below it."""
        self._look_at_clock()
        status = _status(name, above)
        if status is None:
            return
        kind = _kind(status.st_mode)
        size, mode = _size(kind, status), stat.S_IMODE(status.st_mode)
        change = Change(self._number, path, "D", kind, size, 0, 0, mode, identity(status))
        if kind == "folder":
            try:
                fd = os.open(name, _LIST, dir_fd=above)
            except OSError as error:
                yield change._replace(rule="unreadable", reason=f"it cannot be opened: {error.strerror}")
                return
            try:
                if _mount_of(fd) != self._mount:
                    yield change._replace(rule="mount", reason="another filesystem is mounted there")
                    return
                if self._is_changed(path, os.fstat(fd)) and place.rule != "conflict":
                    place = place._replace(rule="conflict", reason=f"the folder {path} was changed meanwhile")
                for each in sorted(os.listdir(fd)):
                    yield from self._removed(_join(path, each), fd, each, place)
            finally:
                os.close(fd)
        elif self._is_new(status):
            yield change._replace(rule="conflict", reason="it was changed meanwhile")
            return
        if place.rule and place.rule not in FORCEABLE:
            yield change._replace(rule=place.rule, reason=place.reason)
            return
        change = self._by_name(change)
        yield change if change.rule else change._replace(rule=place.rule, reason=place.reason)

    def _look_at_clock(self) -> None:
        if time.monotonic() > self._until:
            raise _OutOfTime

    # --- what somebody else has done ------------------------------------------------------------------------

    def _is_new(self, status: os.stat_result) -> bool:
        """Whether somebody else has changed a file since the changeset began, or put another one there. Our
        own application took one of its names away."""
        is_ours = self._progress.others.get(status.st_ino) == status.st_ctime_ns
        return status.st_ctime_ns >= self._changeset.began and not is_ours

    def _is_changed(self, path: str, status: os.stat_result) -> bool:
        """Whether somebody else has made, removed or renamed a name in a folder, or the folder itself."""
        is_ours = self._progress.changed.get((self._number, path)) == status.st_ctime_ns
        return status.st_ctime_ns >= self._changeset.began and not is_ours

    def _is_moved(self, path: str, status: os.stat_result) -> bool:
        """Whether a folder is another one than it was. A name in it that is made or removed sets both times
        to the same."""
        if self._known.get(path, status.st_ino) != status.st_ino:
            return True
        return self._is_changed(path, status) and status.st_ctime_ns != status.st_mtime_ns

    # --- what may not be applied ----------------------------------------------------------------------------

    def _judged(
        self,
        change: Change,
        place: _Compared,
        name: str,
        status: os.stat_result,
        before: os.stat_result | None,
    ) -> Change:
        def refused(rule: Rule, reason: str) -> Change:
            return change._replace(rule=rule, reason=reason)

        if place.rule not in FORCEABLE and place.rule:
            return refused(place.rule, place.reason)
        marks = _marks(name, place.layer)
        if marks - _KNOWN_MARKS:
            unknown = min(marks - _KNOWN_MARKS)
            return refused("unreadable", f"it has a mark of overlayfs that is not known: {unknown}")
        if status.st_uid != self._changeset.uid:
            return refused("unreadable", f"it belongs to uid {status.st_uid}, not to what ran")
        same = before is not None and _kind(before.st_mode) == change.kind
        if change.kind != "folder" and same and before is not None and self._is_new(before):
            return refused("conflict", "it was changed meanwhile")
        # A copy of a file of the folder has no original there any more: what ran has moved it, or somebody
        # else has, and changed its folder by that.
        is_copy = change.act == "A" and before is None and _ORIGIN in marks and place.folder is not None
        if is_copy and self._is_changed(place.path, os.fstat(place.folder or 0)):
            return refused("conflict", "it was removed or moved meanwhile")
        if why := self._judge.denied(f"{self._real.rstrip('/')}/{change.path}"):
            return refused("denied", why)
        if change.kind == "other":
            return refused("special", "it is no file, folder or link")
        if status.st_mode & (stat.S_ISUID | (0 if change.kind == "folder" else stat.S_ISGID)):
            return refused("set-id", "it would run with the rights of its owner or group")
        if change.kind == "link":
            target = os.readlink(name, dir_fd=place.layer)
            if why := self._leads_out(change.path, target):
                return refused("link", f"it leads to {target}, {why}")
        change = self._by_name(change)
        return change if change.rule else refused(place.rule, place.reason)

    def _by_name(self, change: Change) -> Change:
        names = self._judge.names
        for path in dict.fromkeys((change.path, change.path.lower())):
            if is_guarded(path, names):
                row = next((row for part in path.split("/") if (row := find_row(part, names))), None)
                told = f"{row.obeyed_by if row else 'a program'} outside of the cage obeys it"
                return change._replace(rule="guarded", reason=told)
        if why := self._judge.denied(f"{self._real.rstrip('/')}/{change.path}"):
            return change._replace(rule="denied", reason=why)
        return change

    def _leads_out(self, path: str, target: str) -> str:
        """Why a link is not as harmless as a file in the folder. Whether something is a link counts for the
        folder as it is and as it would be."""
        if target.startswith("/"):
            return "which is absolute"
        here = path.split("/")[:-1]
        below = False
        for part in target.split("/"):
            if part in ("", "."):
                continue
            if part == "..":
                if below:  # what it goes back from may become a link
                    return "which goes down and up again"
                if not here:
                    return "which is outside of the folder"
                here.pop()
                continue
            below = True
            here.append(part)
            for root in (self._top.layer, self._top.folder):
                if root is not None and _is_link("/".join(here), root):
                    return f"through the link {'/'.join(here)}"
        return ""

    def _obeyed_names(self, place: _Compared, names: list[str]) -> frozenset[str]:
        """The names of this folder that make it a bare repository, or that one runs: git runs its hooks, for
        a command in any folder below it."""
        if not _SIGNS.intersection(names) and not _GIT_PARTS.intersection(names):
            return frozenset()
        if ".git" in place.path.lower().split("/"):
            return frozenset()  # a part of the table
        there = {name for name in names if (found := _status(name, place.layer)) and not _is_whiteout(found)}
        if place.folder is not None:
            # Also those that the layer removes: somebody may take one change and not the other.
            there |= {sign for sign in _SIGNS if _status(sign, place.folder)}
        if not (there.issuperset(BARE_SIGNS) or there.issuperset(("HEAD", COMMON))):
            return frozenset()
        return _SIGNS | _GIT_PARTS

    # --- equal or not ---------------------------------------------------------------------------------------

    def _is_equal(
        self, place: _Compared, name: str, kind: Kind, status: os.stat_result, before: os.stat_result
    ) -> bool:
        assert place.folder is not None
        if kind == "link":
            return os.readlink(name, dir_fd=place.layer) == os.readlink(name, dir_fd=place.folder)
        if kind == "other":
            return stat.S_IFMT(status.st_mode) == stat.S_IFMT(before.st_mode)
        if stat.S_IMODE(status.st_mode) != stat.S_IMODE(before.st_mode) or status.st_size != before.st_size:
            return False
        try:
            one = open_own(name, _READ, place.layer)
        except OSError:
            return False
        try:
            other = os.open(name, _READ, dir_fd=place.folder)
        except OSError:
            os.close(one)
            return False
        with open(one, "rb", buffering=0) as new, open(other, "rb", buffering=0) as old:
            if user_attributes(new.fileno()) != user_attributes(old.fileno()):
                return False
            while piece := new.read(_PIECE_BYTES):
                self._look_at_clock()
                if piece != _read_exactly(old.fileno(), len(piece)):
                    return False
        return True

    def _change(
        self,
        path: str,
        act: Literal["A", "M"],
        kind: Kind,
        status: os.stat_result | None = None,
        before: os.stat_result | None = None,
        rule: Rule = "",
        reason: str = "",
    ) -> Change:
        size = mode = size_before = mode_before = 0
        known = None
        if status is not None:
            size, mode = _size(kind, status), stat.S_IMODE(status.st_mode)
        if before is not None:
            size_before, mode_before = _size(kind, before), stat.S_IMODE(before.st_mode)
            known = identity(before)
        links, number = (0, 0) if status is None else (status.st_nlink, status.st_ino)
        sizes = size, mode, size_before, mode_before
        return Change(self._number, path, act, kind, *sizes, known, rule, reason, links, number)


def identity(status: os.stat_result) -> tuple[int, int, int]:
    """What tells a file that somebody changed from the one that was there. Not its change time: a rename sets
    that too."""
    return status.st_ino, status.st_mtime_ns, status.st_size


def open_own(name: str, flags: int, folder: int | None = None) -> int:
    """Open something in a layer. An ordinary user's plugin may have taken its own permissions away: a file
    keeps its mode, a folder becomes open for its owner."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status, here = os.fstat(held), f"/proc/self/fd/{held}"
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode) | stat.S_ISDIR(status.st_mode):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        mode = stat.S_IMODE(status.st_mode)
        os.chmod(here, mode | 0o700)
        try:
            return os.open(name, flags, dir_fd=folder)
        finally:
            if stat.S_ISREG(status.st_mode):
                os.chmod(here, mode)
    finally:
        os.close(held)


def user_attributes(fd: int) -> dict[str, bytes]:
    """The attributes that a plugin may set, without the marks of overlayfs. Raises OSError."""
    try:
        names = [name for name in os.listxattr(fd) if name.startswith("user.") and not name.startswith(_MARK)]
        return {name: os.getxattr(fd, name) for name in names}
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENODATA):
            return {}
        raise


def _marks(name: str, folder: int) -> set[str]:
    try:
        found = os.listxattr(f"/proc/self/fd/{folder}/{name}", follow_symlinks=False)
    except OSError:
        return set()
    return {each for each in found if each.startswith(_MARK)}


def _attribute(path: str, name: str) -> bytes:
    try:
        return os.getxattr(path, name)
    except OSError:
        return b""


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := os.read(fd, count - len(data))):
        data += piece
    return data


def _mount_of(fd: int) -> tuple[int, str]:
    """The filesystem, and the number of the mount."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        number = next((line.split()[1] for line in file if line.startswith("mnt_id:")), "")
    return os.fstat(fd).st_dev, number


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_link(path: str, root: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(path, dir_fd=root, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # who knows
        return True


def _kind(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"


def _size(kind: Kind, status: os.stat_result) -> int:
    return status.st_size if kind in ("file", "link") else 0


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
