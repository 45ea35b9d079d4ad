"""The search of writable folders after a plugin has ended, for what programs outside of the cage would obey.

Names in a folder that does not exist yet, or that nobody takes for a project yet, cannot be guarded: a plugin
that may write to `src` can make `src/.git`. So after the end all names of the table that are new or replaced
are found, and repositories of any name. What was guarded is known by its inode, which is held open while the
plugin runs, so that no other file gets its number.

What the plugin sizes is bounded: entries, depth, time, memory and what is reported. Folders near the top come
first, because people work there. Repositories are also looked for among installed packages and in those that
were there: `git status` runs in every repository that an index calls a submodule, wherever it lies. No link
is followed.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from sandbox.paths.guarded import (
    BARE_SIGNS,
    COMMON,
    UNGUARDED,
    VERSION_CONTROL,
    GuardedName,
    Names,
    endings,
    find_row,
    repositories,
)
from sandbox.paths.stand_in import is_harmless
from sandbox.speed.scopes import ExitStack, contextmanager, suppress
from sandbox.speed.typed import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections import deque
else:
    from _collections import deque  # the same class: a launch would import all of `collections`

MOST_ENTRIES = 200_000
_MOST_WAITING = 50_000  # folders that were seen and not yet listed
_DEPTH_LIMIT = 200
_SECONDS = 3.0  # a host waits for its monitor for 5 s after the last process has ended
MOST_FINDINGS = 50
_LONGEST_PATH = 1000  # characters
_LOOK_AT_CLOCK = 1024  # entries

_HERE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_SIGNS = frozenset((*BARE_SIGNS, COMMON))

Identity = tuple[int, int]


class ObeyedFile(NamedTuple):
    """A file or folder that was made or replaced while the plugin ran."""

    path: str  # absolute
    obeyed_by: str

    def text(self) -> str:
        return f"while it ran, {self.path} was made or changed, which {self.obeyed_by} obeys"


class Findings(NamedTuple):
    changed: tuple[ObeyedFile, ...] = ()
    more: int = 0  # how many are not in `changed`
    entries: int = 0  # that were looked at
    incomplete: str = ""  # why not everything was looked at

    def lines(self) -> Iterator[str]:
        """For people, to be escaped: names are as the plugin has chosen them."""
        for found in self.changed:
            yield found.text()
        if self.more:
            yield f"while it ran, {self.more} more of such files were made or changed"
        if self.changed:
            yield "look at them, or remove them, before you use these folders outside of the cage"
        if self.incomplete:
            yield f"what it wrote was not searched completely for files that programs obey: {self.incomplete}"


def findings_document(found: Findings, escape: Callable[[str], str]) -> dict[str, Any]:
    """The findings as a report holds them. `escape`: makes a hostile name printable."""
    changed = [{"path": escape(each.path), "obeyed_by": each.obeyed_by} for each in found.changed]
    return {**found._asdict(), "changed": changed, "incomplete": escape(found.incomplete)}


def read_findings(document: Mapping[str, Any] | None) -> Findings:
    """The findings that a report holds."""
    if document is None:
        return Findings()
    return Findings(**{**document, "changed": tuple(ObeyedFile(**each) for each in document["changed"])})


class WatchedFolder(NamedTuple):
    """A folder that the plugin may write."""

    real: str
    fd: int
    guarded: tuple[str, ...]  # paths in it that the plugin cannot change, and links that were there
    loose: tuple[str, ...] = ()  # those of them that nobody else holds open


class FolderSearch:
    """What was there before the plugin started, and what was found after its end."""

    def __init__(self, names: Names) -> None:
        self.started = False  # whether a plugin ran: only then there is something to search for
        self.findings: Findings | None = None
        self._names = names
        self._known: list[tuple[WatchedFolder, Mapping[str, Identity]]] = []

    @contextmanager
    def watching(self, folders: Sequence[WatchedFolder]) -> Iterator[None]:
        """Remember what is there, and hold it until the context ends. The descriptors of `folders` have to be
        open until then."""
        with ExitStack() as stack:
            for folder in folders:
                known: dict[str, Identity] = {}
                for path in folder.guarded:
                    with suppress(OSError):
                        if "/" not in path and path not in folder.loose:  # most: no step to it, none held
                            status = os.stat(path, dir_fd=folder.fd, follow_symlinks=False)
                            known[path] = _identity(status)
                            continue
                        fd = _open_below(folder.fd, path)
                        known[path] = _identity(os.fstat(fd))
                        if path in folder.loose:
                            stack.callback(os.close, fd)
                        else:
                            os.close(fd)
                self._known.append((folder, known))
            yield

    def search(self) -> None:
        """Search, if the plugin was started. All its processes have ended."""
        if not self.started:
            return
        walk = _EndWalk(self._names, time.monotonic() + _SECONDS)
        for folder, known in self._known:
            walk.folder(folder, known)
        self.findings = Findings(tuple(walk.changed), walk.more, walk.entries, walk.incomplete)


class _UnlistedFolder(NamedTuple):
    """A folder that is to be listed. The whole path is made when it is needed: a plugin could make it long,
    and many of them."""

    above: _UnlistedFolder | None
    name: str
    depth: int
    only_repositories: bool = False  # what else is in it, no program obeys
    is_judged: bool = False  # it was judged as a whole, by its name

    def names(self) -> list[str]:
        found: list[str] = []
        step: _UnlistedFolder | None = self
        while step is not None and step.name:
            found.append(step.name)
            step = step.above
        return found[::-1]


class _EndWalk:
    def __init__(self, names: Names, until: float) -> None:
        self.changed: list[ObeyedFile] = []
        self.more = self.entries = 0
        self.incomplete = ""
        self._names, self._ends, self._until = names, endings(names), until
        self._repositories = repositories(names)
        self._stopped = False

    def folder(self, folder: WatchedFolder, known: Mapping[str, Identity]) -> None:
        top = _UnlistedFolder(None, "", 0)
        waiting: deque[_UnlistedFolder] = deque([top])
        later: deque[_UnlistedFolder] = deque()
        # The folder whose children are listed, and its descriptor.
        parent: tuple[_UnlistedFolder, int] | None = None
        try:
            while (waiting or later) and not self._stopped:
                here = (waiting or later).popleft()
                try:
                    if here.above is None:
                        fd = os.open(".", _LIST, dir_fd=folder.fd)
                    else:
                        if parent is None or parent[0] is not here.above:
                            if parent is not None:
                                os.close(parent[1])
                                parent = None
                            parent = here.above, _open_steps(folder.fd, here.above.names())
                        fd = os.open(here.name, _LIST, dir_fd=parent[1])
                except OSError as error:
                    self._not_listed(error, None if parent is None else parent[1], here, folder)
                    continue
                try:
                    self._list(_Place(folder, known, fd, "/".join(here.names())), here, waiting, later)
                except OSError as error:
                    self._stop(f"{folder.real}: {error.strerror}")
                finally:
                    os.close(fd)
        finally:
            if parent is not None:
                os.close(parent[1])

    def _list(
        self,
        place: _Place,
        here: _UnlistedFolder,
        waiting: deque[_UnlistedFolder],
        later: deque[_UnlistedFolder],
    ) -> None:
        signs: set[str] = set()
        names, ends = (self._repositories, ()) if here.only_repositories else (self._names, self._ends)
        with os.scandir(place.fd) as items:
            for item in items:
                self.entries += 1
                if self.entries > MOST_ENTRIES:
                    self._stop(f"the search ended after {MOST_ENTRIES} entries")
                    return
                if self.entries % _LOOK_AT_CLOCK == 0 and time.monotonic() > self._until:
                    self._stop(f"the search ended after {_SECONDS:g} seconds and {self.entries} entries")
                    return
                if item.name in _SIGNS:
                    signs.add(item.name)
                row = names.get(item.name)
                if row is None and item.name[0] == ".":  # some filesystems do not tell .GIT from .git
                    row = names.get(item.name.lower())
                if row is None and item.name.endswith(ends):
                    row = find_row(item.name, names)
                if row is not None:
                    self._judge(place, item.name, row)
                    if row.sign is None:
                        continue
                if not item.is_dir(follow_symlinks=False) or place.is_known(item.name):
                    continue
                is_judged = row is not None and bool(row.sign)
                only_repositories = here.only_repositories or is_judged or item.name in UNGUARDED
                queue = later if only_repositories else waiting
                if here.depth >= _DEPTH_LIMIT:
                    self._miss(
                        f"{_shown(place.absolute(item.name))} is more than {_DEPTH_LIMIT} folders deep"
                    )
                elif len(queue) >= _MOST_WAITING:
                    self._miss(f"there are more than {_MOST_WAITING} folders")
                else:
                    queue.append(
                        _UnlistedFolder(here, item.name, here.depth + 1, only_repositories, is_judged)
                    )
        if time.monotonic() > self._until:
            self._stop(f"the search ended after {_SECONDS:g} seconds and {self.entries} entries")
        if not here.is_judged and _is_repository({sign for sign in signs if not place.is_known(sign)}):
            self._repository(place, "", VERSION_CONTROL[0])

    def _judge(self, place: _Place, name: str, row: GuardedName) -> None:
        """A name of the table was found."""
        if place.is_known(name) or is_harmless(place.fd, name, row.content):
            return
        if row.sign is not None and _is_folder(place.fd, name):
            self._repository(place, name, row)
        elif row.sign != "":
            self._found(place.absolute(name), row.obeyed_by)

    def _repository(self, place: _Place, name: str, row: GuardedName) -> None:
        """Name the parts of a folder that are new. '' is the folder `place` itself."""
        changed, guarded = 0, 0
        for part in row.parts:
            path = f"{name}/{part.name}" if name else part.name
            if not _lies_at(place.fd, path):
                continue
            if place.is_known(path):
                guarded += 1
            elif not is_harmless(place.fd, path, part.content):
                changed += 1
                self._found(place.absolute(path), part.obeyed_by)
        if not changed and not guarded and row.sign:
            self._found(place.absolute(name), row.obeyed_by)

    def _found(self, path: str, obeyed_by: str) -> None:
        if len(self.changed) >= MOST_FINDINGS:
            self.more += 1
            return
        self.changed.append(ObeyedFile(_shown(path), obeyed_by))

    def _not_listed(
        self, error: OSError, parent: int | None, here: _UnlistedFolder, folder: WatchedFolder
    ) -> None:
        if error.errno in _GONE:
            return
        path = "/".join((folder.real, *here.names()))
        if error.errno == errno.EACCES and parent is not None:
            with suppress(OSError):
                owner = os.stat(here.name, dir_fd=parent, follow_symlinks=False).st_uid
                enterable = os.access(here.name, os.X_OK, dir_fd=parent, effective_ids=True)
                if owner != os.geteuid() and not enterable:
                    return  # another user's, and closed to the plugin too
        self._miss(f"{_shown(path)} cannot be listed: {error.strerror}")

    def _miss(self, why: str) -> None:
        self.incomplete = self.incomplete or why

    def _stop(self, why: str) -> None:
        self.incomplete = why
        self._stopped = True


class _Place(NamedTuple):
    """A folder that is being listed."""

    folder: WatchedFolder
    known: Mapping[str, Identity]
    fd: int
    path: str  # below the writable folder; '' is that folder itself

    def is_known(self, name: str) -> bool:
        """Whether this is what was there when the plugin started, and what it could not change."""
        known = self.known.get(f"{self.path}/{name}" if self.path else name)
        if known is None:
            return False
        try:
            return _identity(os.stat(name, dir_fd=self.fd, follow_symlinks=False)) == known
        except OSError:
            return False

    def absolute(self, name: str) -> str:
        return "/".join(part for part in (self.folder.real.rstrip("/"), self.path, name) if part)


def _is_repository(signs: set[str]) -> bool:
    """Whether git takes a folder with these names for a repository."""
    return signs.issuperset(BARE_SIGNS) or signs.issuperset(("HEAD", COMMON))


def _shown(path: str) -> str:
    return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}…"


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _is_folder(parent: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _lies_at(folder: int, path: str) -> bool:
    try:
        os.stat(path, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def _open_below(folder: int, path: str) -> int:
    """Open a file or folder without following a link. Raises OSError."""
    *above, name = path.split("/")
    parent = _open_steps(folder, above)
    try:
        return os.open(name, _HERE, dir_fd=parent)
    finally:
        os.close(parent)


def _open_steps(folder: int, names: Sequence[str]) -> int:
    """Open the folder below `folder` that these names lead to. Raises OSError."""
    fd = os.open(".", _HERE | os.O_DIRECTORY, dir_fd=folder)
    for name in names:
        try:
            below = os.open(name, _HERE | os.O_DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd
