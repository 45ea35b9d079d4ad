"""The denylist by identity: paths that no policy can allow, found under any name.

The paths are constants: a policy adds to them and cannot remove one. Each is refused in three directions:
the path itself, everything below it, and everything above it, since a bind shows all that is below. A file
is recognised by device and inode (renames, links, hard links) and by its path inside the filesystem (bind
mounts, which share neither name nor parents with the directory they show).
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox import look
from sandbox.paths.denied_paths import (
    CGROUP_FILESYSTEMS,
    CGROUP_PATHS,
    HOME_WRITE_PATHS,
    HOST_PATHS,
    HOST_WRITE_PATHS,
    REASONS,
    SOCKET_PATHS,
    WHOLE_PATHS,
    Origin,
    Relation,
    denial_clause,
    denial_hint,
    home_paths,
    lexical_fault,
    normal,
)
from sandbox.paths.guarded import GuardedName, is_guarded_at_top
from sandbox.paths.mounts import Inside, Mounts, ancestry, contains, fd_path, join, relative
from sandbox.spec import Access
from sandbox.speed.typed import Iterable, Iterator, Literal, Mapping, Sequence
from sandbox.speed.value import NamedTuple

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Identity = tuple[int, int]  # st_dev, st_ino


class Entry(NamedTuple):
    path: str
    origin: Origin
    whole_only: bool = False  # paths below it are not refused
    write_only: bool = False  # reading is not refused
    read_above: bool = False  # reading a folder that contains it is not refused

    def applies(self, relation: Relation, access: Access) -> bool:
        if access == "read" and (self.write_only or (self.read_above and relation == "above")):
            return False
        return not (self.whole_only and relation == "below")


class Hit(NamedTuple):
    denied: Entry
    relation: Relation
    how: Literal["name", "identity", "mount", "mount below", "hard link"]

    def sentence(self) -> str:
        if self.how == "hard link":
            return f"it holds a hard link to a file of {self.denied.path}, {REASONS[self.denied.origin]}"
        subject = {
            "name": "it",
            "identity": "the file or folder it leads to",
            "mount": "it is a mount of something that",
            "mount below": "a mount below it shows something that",
        }[self.how]
        return f"{subject} {denial_clause(self.relation, self.denied.path, self.denied.origin)}"

    def hint(self) -> str:
        return denial_hint(self.relation, self.denied.origin)


class Place(NamedTuple):
    """All names and identities of an opened source."""

    names: tuple[str, ...]  # as asked and as resolved, both normal
    identity: Identity
    ancestors: tuple[Identity, ...]  # of the directories it was reached through
    inside: Inside
    mounted_below: tuple[Inside, ...]


class Unproven(Exception):
    """The denied directories could not be walked to the end, so nothing is known about hard links."""


class _Paths:
    """Denied paths of several name spaces, findable from a path in time proportional to its depth."""

    __slots__ = ("_above", "_at")

    def __init__(self) -> None:
        self._at: dict[tuple[str, str], list[Entry]] = {}
        self._above: dict[tuple[str, str], list[Entry]] = {}

    def add(self, space: str, path: str, entry: Entry) -> None:
        for number, place in enumerate(ancestry(path)):
            (self._above if number else self._at).setdefault((space, place), []).append(entry)

    def related(self, space: str, path: str) -> Iterator[tuple[Relation, Entry]]:
        for number, place in enumerate(ancestry(path)):
            for entry in self._at.get((space, place), ()):
                yield ("below" if number else "equal"), entry
        for entry in self._above.get((space, path), ()):
            yield "above", entry


class Denylist:
    """The constants, the homes, the policy's and the runner's own paths, opened and identified once.

    Nothing is kept open. A denied path that does not exist, or that the runner may not reach, still counts
    by name and by its place inside the filesystem.
    """

    __slots__ = (
        "_above",
        "_at",
        "_copy",
        "_inodes",
        "_inside",
        "_names",
        "_roots",
        "_walked",
        "entries",
        "guarded",
        "guarded_names",
        "mounts",
        "states",
    )

    def __init__(
        self,
        mounts: Mounts,
        *,
        homes: Sequence[str] = (),
        policy: Iterable[str] = (),
        runner: Iterable[str] = (),
        protected: Iterable[str] = (),
        deciding: Iterable[str] = (),
        storage: Iterable[str] = (),
        runtime_dir: str | None = None,
        copy: str = "",
        guarded: Iterable[GuardedName] = (),
    ) -> None:
        """`policy` and `runner` are denied like the constants. `protected` (the runner's own code, bwrap) and
        `deciding` (manifest and policy) are denied only for writing. `storage` (what hosts keep for
        plugins) is denied like the constants, but a folder that contains it may be read. `runtime_dir` is
        $XDG_RUNTIME_DIR. `copy`: a folder below one of `runner` that the plugin may read, a checked copy of
        its own. The first of `runner` holds the state directories. `guarded`: names that stay read-only in a
        writable folder; none: no name does."""
        self.mounts = mounts
        self.guarded = tuple(guarded)
        self.guarded_names = frozenset(each.name for each in self.guarded)
        self._copy = copy
        places = [normal(path) for path in runner]
        self.states = places[0] if places else ""
        entries = [Entry(path, "host") for path in HOST_PATHS]
        entries += [Entry(path, "cgroups") for path in _cgroup_places(mounts)]
        entries += [Entry(path, "home") for path in home_paths(homes)]
        entries += [Entry(path, "sockets") for path in SOCKET_PATHS]
        if runtime_dir and lexical_fault(runtime_dir) is None and normal(runtime_dir) != "/":
            entries.append(Entry(normal(runtime_dir), "sockets"))
        entries += [Entry(path, "whole", whole_only=True) for path in WHOLE_PATHS]
        entries += [Entry(home, "whole", whole_only=True) for home in homes]
        entries += [Entry(path, "execute", write_only=True) for path in HOST_WRITE_PATHS]
        entries += [
            Entry(join(h, rest), "execute", write_only=True) for h in homes for rest in HOME_WRITE_PATHS
        ]
        entries += [Entry(normal(path), "execute", write_only=True) for path in protected]
        entries += [Entry(normal(path), "deciding", write_only=True) for path in deciding]
        entries += [Entry(normal(path), "policy") for path in policy]
        entries += [Entry(path, "runner") for path in places]
        entries += [Entry(normal(path), "storage", read_above=True) for path in storage]
        self.entries = tuple(dict.fromkeys(entries))
        self._names = _Paths()
        self._inside = _Paths()
        self._at: dict[Identity, list[Entry]] = {}
        self._above: dict[Identity, list[Entry]] = {}
        self._roots: dict[str, Entry] = {}  # real path of each denied directory
        self._inodes: dict[str, set[int]] = {}  # by root, filled when first asked for
        self._walked = 0
        seen: dict[str, list[Identity]] = {}
        for entry in self.entries:
            self._identify(entry, seen)

    def _identify(self, entry: Entry, seen: dict[str, list[Identity]]) -> None:
        self._names.add("", entry.path, entry)
        self._place(entry.path, entry)
        look.note_identity(entry.path)  # a file that is denied may grow: a history of commands does
        try:
            fd = os.open(entry.path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        try:
            status = os.fstat(fd)
            real = fd_path(fd)
            if real != entry.path:
                self._names.add("", real, entry)
                self._place(real, entry)
            self._at.setdefault((status.st_dev, status.st_ino), []).append(entry)
            walked = not entry.whole_only and not entry.write_only
            if stat.S_ISDIR(status.st_mode) and walked and entry.origin != "cgroups":  # no hard links there
                self._roots.setdefault(real, entry)
            for identity in _directories_above(fd, status, real, seen):
                self._above.setdefault(identity, []).append(entry)
        finally:
            os.close(fd)

    def _place(self, path: str, entry: Entry) -> None:
        for mount in self.mounts.covering(path):
            device, place = inside = mount.inside(path)
            if place.startswith("/"):  # nsfs and friends name things like "net:[4026531840]"
                self._inside.add(device, place, entry)
            for name in self.mounts.layered(inside):
                self._names.add("", name, entry)

    def name_hit(self, name: str, access: Access = "read") -> Hit | None:
        """Judge by name alone: for a path that is not opened yet, or does not exist."""
        for found, entry in self.related(name):
            if (
                entry.applies(found, access)
                and not self._is_in_copy(normal(name), entry, found, access)
                and not self._is_guarded_in((normal(name),), entry, found)
            ):
                return Hit(entry, found, "name")
        return None

    def _is_in_copy(self, name: str, entry: Entry, relation: Relation, access: Access) -> bool:
        """Whether an entry of the runner's own does not count for `name`, because that is in the copy."""
        if not self._copy or entry.origin != "runner" or relation != "below" or access != "read":
            return False
        return contains(self._copy, name)

    def _is_guarded_in(self, names: Iterable[str], entry: Entry, relation: Relation) -> bool:
        """Whether a folder may contain a file that decides, because it is read-only in there."""
        if relation != "above" or entry.origin != "deciding":
            return False
        return any(
            contains(name, entry.path) and is_guarded_at_top(relative(entry.path, name), self.guarded_names)
            for name in names
        )

    def related(self, name: str) -> Iterator[tuple[Relation, Entry]]:
        """Every entry that the name is, lies below, or lies above."""
        return self._names.related("", normal(name))

    def hit(self, place: Place, access: Access = "read", *, own_state: bool = False) -> Hit | None:
        """The entry of the denylist that this source is, lies below, or shows.

        `own_state`: the source is the plugin's own state directory, which lies below a directory of the
        runner, or elsewhere by a person's choice. Only that directory is skipped for it.
        """
        for found in self._hits(place):
            if not found.denied.applies(found.relation, access):
                continue
            if own_state and self.is_among_states(found):
                continue
            if self._is_guarded_in(place.names, found.denied, found.relation):
                continue
            if all(self._is_in_copy(name, found.denied, found.relation, access) for name in place.names):
                continue
            return found
        return None

    def is_among_states(self, found: Hit) -> bool:
        """Whether the hit only says that a folder is one of the state directories."""
        denied = found.denied
        holds_states = denied.origin == "runner" and contains(denied.path, self.states)
        return holds_states and found.relation == "below"

    def _hits(self, place: Place) -> Iterator[Hit]:
        for name in place.names:
            for found, entry in self._names.related("", name):
                yield Hit(entry, found, "name")
        for entry in self._at.get(place.identity, ()):
            yield Hit(entry, "equal", "identity")
        for ancestor in place.ancestors:
            for entry in self._at.get(ancestor, ()):
                yield Hit(entry, "below", "identity")
        for entry in self._above.get(place.identity, ()):
            yield Hit(entry, "above", "identity")
        yield from self._shown(place.inside, "mount")
        for below in place.mounted_below:
            yield from self._shown(below, "mount below")

    def _shown(self, inside: Inside, how: Literal["mount", "mount below"]) -> Iterator[Hit]:
        for found, entry in self._inside.related(*inside):
            yield Hit(entry, found, how)
        for name in self.mounts.layered(inside):
            found_there = list(self._names.related("", name))
            for mount in self.mounts.covering(name):
                found_there += self._inside.related(*mount.inside(name))
            for found, entry in found_there:
                # systemd keeps layers of /usr below /run. Sockets are looked for in the overlay itself.
                if entry.origin != "sockets":
                    yield Hit(entry, found, how)

    # Hard links: a file below a denied directory may have a second name anywhere on its filesystem.

    def file_hit(self, identity: Identity, access: Access) -> Hit | None:
        """A denied *file* under another name: no walk needed."""
        for entry in self._at.get(identity, ()):
            if entry.applies("equal", access):
                return Hit(entry, "equal", "hard link")
        return None

    def linked(
        self, wanted: Mapping[Identity, str], *, devices: Iterable[str], limit: int
    ) -> tuple[str, Hit] | None:
        """The first of `wanted` (files with several names) that has a name below a denied directory.

        Walks the denied directories on the same filesystems (`devices`, as mountinfo names them), each at
        most once per launch and only when a source holds such files, comparing the inode numbers that
        getdents gives without a stat. Raises Unproven beyond `limit` entries.
        A directory the runner may not list is left out: link(2) needs search permission on the path to
        the file, so a user who could make such a link is not one that the runner protects against.
        """
        numbers = {inode for _, inode in wanted}
        for root, entry in self._outermost(frozenset(devices)):
            if root not in self._inodes:
                self._inodes[root] = self._walk(root, limit)
            if numbers.isdisjoint(self._inodes[root]):
                continue
            # Mounts may lie below and inode numbers repeat over filesystems: look again, device included.
            for fd, item in _entries_below(root):
                if item.inode() not in numbers:
                    continue
                try:
                    status = os.stat(item.name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    raise Unproven from None
                if (status.st_dev, status.st_ino) in wanted:
                    return wanted[status.st_dev, status.st_ino], Hit(entry, "below", "hard link")
        return None

    def _walk(self, root: str, limit: int) -> set[int]:
        inodes: set[int] = set()
        for _, item in _entries_below(root):
            self._walked += 1
            if self._walked > limit:
                raise Unproven
            inodes.add(item.inode())
        return inodes

    def _outermost(self, devices: frozenset[str]) -> Iterator[tuple[str, Entry]]:
        """Denied directories on one of `devices` that no other denied directory contains."""
        for root, entry in self._roots.items():
            if any(above in self._roots for above in ancestry(root) if above != root):
                continue
            mounts = (*self.mounts.covering(root), *self.mounts.below(root))
            if any(mount.device in devices for mount in mounts):
                yield root, entry


def _cgroup_places(mounts: Mounts) -> Iterator[str]:
    """The usual place, and every other mount point. By name each stands for all below it."""
    yield from CGROUP_PATHS
    for mount in mounts.all:
        if mount.fstype in CGROUP_FILESYSTEMS and not any(contains(p, mount.point) for p in CGROUP_PATHS):
            yield mount.point


def _directories_above(
    fd: int, status: os.stat_result, real: str, seen: dict[str, list[Identity]]
) -> list[Identity]:
    """Identities of the directories above an open file, by ".." from it; by name if it is not a directory
    or may not be searched. `seen` remembers by real path: denied paths share most of their parents."""
    if real == "/":
        return []
    parent = real.rpartition("/")[0] or "/"
    known = seen.get(parent)
    if known is not None:
        return known
    look.note(parent)
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    chain: list[Identity] = []
    try:
        up = os.open("..", flags, dir_fd=fd) if stat.S_ISDIR(status.st_mode) else os.open(parent, flags)
    except OSError:
        return _identities(ancestry(parent))
    try:
        while True:
            here = os.fstat(up)
            if chain and chain[-1] == (here.st_dev, here.st_ino):  # the root is its own parent
                break
            chain.append((here.st_dev, here.st_ino))
            above = os.open("..", flags, dir_fd=up)
            os.close(up)
            up = above
    except OSError:
        chain += _identities(ancestry(parent))
    finally:
        os.close(up)
    seen[parent] = chain
    return chain


def _identities(paths: Iterable[str]) -> list[Identity]:
    found = []
    for path in paths:
        try:
            status = look.stat(path)
        except OSError:
            continue
        found.append((status.st_dev, status.st_ino))
    return found


# Errors for which a directory is left out: no permission to list it, or removed. After any other error
# (too many open files) "found nothing" would be false.
_NOT_LISTED = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def _entries_below(root: str) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """Everything below `root` with the fd of its directory, never through a link."""
    look.doubt(f"{root} was searched for hard links")
    fds: list[int] = []
    pending: list[list[str]] = []  # directories still to be entered, for each of fds
    step = root
    try:
        while True:
            try:
                fds.append(os.open(step, _DIRECTORY, dir_fd=fds[-1] if fds else None))
                pending.append([])
                with os.scandir(fds[-1]) as items:
                    for item in items:
                        if item.is_dir(follow_symlinks=False):
                            pending[-1].append(item.name)
                        yield fds[-1], item
            except OSError as error:
                if error.errno not in _NOT_LISTED:
                    raise Unproven from None
            while fds and not pending[-1]:
                pending.pop()
                os.close(fds.pop())
            if not fds:
                return
            step = pending[-1].pop()
    finally:
        for fd in fds:
            os.close(fd)
