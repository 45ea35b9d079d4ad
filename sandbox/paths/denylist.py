"""The denylist by identity: paths that no policy can allow, recognised under any name.

The paths are constants: a policy can add paths and cannot remove one. Refused are the path itself, everything
below it, and every folder above it, because a bind shows all that is below. A file is recognised by device
and inode (renames, links, hard links) and by its path inside the filesystem (bind mounts, which have neither
the name nor the parents of the directory they show).
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect, bisect_left

from sandbox import look
from sandbox.paths.denied_paths import (
    CGROUP_FILESYSTEMS,
    CGROUP_PATHS,
    HOME_WRITE_PATHS,
    HOST_PATHS,
    HOST_WRITE_PATHS,
    INACCESSIBLE_NODES,
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
from sandbox.paths.guarded import GuardedName, guarded_table, is_guarded_at_top
from sandbox.paths.mounts import Inside, Mounts, ancestry, contains, fd_path, relative
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
    ancestors: tuple[Identity, ...]  # the directories it was reached through
    inside: Inside
    mounted_below: tuple[Inside, ...]


class LinksUnproven(Exception):
    """The denied directories could not be read completely, so hard links to their files cannot be ruled
    out."""


class Denylist:
    """All denied paths: the constants, those in homes, the policy's and the runner's own, each identified
    once.

    No descriptor stays open. A denied path that does not exist, or that the runner may not reach, still
    counts by name and by its place inside the filesystem.

    There are some fifty denied paths for each home, and a launch judges a few sources. So the places of
    denied paths inside their filesystems are not listed. Instead, for each mount of a source's filesystem,
    the name that the source has by that mount is compared with the denied names.
    """

    __slots__ = (
        "_above",
        "_at",
        "_copies",
        "_folders",
        "_inodes",
        "_names",
        "_order",
        "_roots",
        "_sorted",
        "_walked",
        "entries",
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
        states: Iterable[str] = (),
        protected: Iterable[str] = (),
        deciding: Iterable[str] = (),
        storage: Iterable[str] = (),
        runtime_dir: str | None = None,
        tokens: Iterable[str] = (),
        copies: Iterable[str] = (),
        guarded: Iterable[GuardedName] = (),
    ) -> None:
        """The places are those of `DeniedPlaces` (denied_places.py)."""
        self.mounts = mounts
        self.guarded_names = guarded_table(guarded)
        self._copies = tuple(copies)
        places = [normal(path) for path in runner]
        self.states = tuple(map(normal, states))
        entries = [Entry(path, "host") for path in HOST_PATHS]
        entries += [Entry(path, "cgroups") for path in _cgroup_places(mounts)]
        entries += _entries("home", home_paths(homes))
        entries += _entries("home", map(normal, tokens))
        entries += [Entry(path, "sockets") for path in SOCKET_PATHS]
        if runtime_dir and lexical_fault(runtime_dir) is None and normal(runtime_dir) != "/":
            entries.append(Entry(normal(runtime_dir), "sockets"))
        entries += [Entry(path, "whole", whole_only=True) for path in WHOLE_PATHS]
        entries += [Entry(home, "whole", whole_only=True) for home in homes]
        entries += _entries("execute", HOST_WRITE_PATHS, write_only=True)
        entries += _entries("execute", home_paths(homes, HOME_WRITE_PATHS), write_only=True)
        entries += _entries("execute", map(normal, protected), write_only=True)
        entries += _entries("deciding", map(normal, deciding), write_only=True)
        entries += _entries("policy", map(normal, policy))
        entries += _entries("runner", places)
        entries += [Entry(normal(path), "storage", read_above=True) for path in storage]
        self.entries = tuple(dict.fromkeys(entries))
        self._names: dict[str, list[Entry]] = {}  # by every name of a denied path
        self._folders: set[str] = set()  # every folder above one of these names
        self._sorted: list[str] = []  # these names, so that those below a folder are adjacent
        self._at: dict[Identity, list[Entry]] = {}
        self._above: dict[Identity, set[str]] = {}  # real paths of folders that contain a denied file
        self._roots: dict[str, Entry] = {}  # real path of each denied directory
        self._inodes: dict[str, set[int]] = {}  # by root, filled when first asked for
        self._walked = 0
        folders = _Folders()
        for entry in self.entries:
            folder = self._add_name(entry.path, entry)
            if folder not in folders.missing and not self._identify(entry, folders):
                folders.look_at(folder)
        for place, identity in folders.identities:
            self._above.setdefault(identity, set()).add(place)
        self._add_layers()

    def _add_name(self, name: str, entry: Entry) -> str:
        """Add a name of a denied path. Returns the folder that it is in."""
        if name in self._names:
            self._names[name].append(entry)
        else:
            self._names[name] = [entry]
        above = folder = name.rpartition("/")[0] or "/"
        while above not in self._folders:
            self._folders.add(above)
            above = above.rpartition("/")[0] or "/"
        return folder

    def _identify(self, entry: Entry, folders: _Folders) -> bool:
        """Add the identity of a denied path. Returns whether it exists."""
        # Only the identity is noted, and not the content: a shell history grows.
        if not look.note_identity(entry.path):
            return False
        try:
            fd = os.open(entry.path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            status = os.fstat(fd)
            # The kernel's name may differ even without links: a filesystem may ignore case.
            real = fd_path(fd)
            if real != entry.path:
                self._add_name(real, entry)
            self._at.setdefault((status.st_dev, status.st_ino), []).append(entry)
            walked = not entry.whole_only and not entry.write_only
            if stat.S_ISDIR(status.st_mode) and walked and entry.origin != "cgroups":  # no hard links there
                self._roots.setdefault(real, entry)
            folders.note_above(fd, status, real, plain=real == entry.path)
        finally:
            os.close(fd)
        return True

    def _add_layers(self) -> None:
        """For denied paths on overlays, add the names of the same files in the layers."""
        on_overlays = [
            (mount.inside(denied), entry)
            for mount in self.mounts.overlays
            for _, denied, entry in self._related(mount.point)
            if contains(mount.point, denied)
        ]
        for inside, entry in on_overlays:
            for name in self.mounts.layer_paths(inside):
                self._add_name(name, entry)

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
        """Whether an entry of the runner's own paths does not apply to `name`, because `name` is in one
        of the copies."""
        if not self._copies or entry.origin != "runner" or relation != "below" or access != "read":
            return False
        return any(contains(copy, name) for copy in self._copies)

    def _is_guarded_in(self, names: Iterable[str], entry: Entry, relation: Relation) -> bool:
        """Whether a folder may contain a `deciding` file, because the file is guarded there."""
        if relation != "above" or entry.origin != "deciding":
            return False
        return any(
            contains(name, entry.path) and is_guarded_at_top(relative(entry.path, name), self.guarded_names)
            for name in names
        )

    def related(self, name: str) -> Iterator[tuple[Relation, Entry]]:
        """Every entry that the name equals, lies below, or contains."""
        return ((relation, entry) for relation, _, entry in self._related(normal(name)))

    def _related(self, name: str) -> Iterator[tuple[Relation, str, Entry]]:
        """related() for a normal name, with the denied name."""
        for number, place in enumerate(ancestry(name)):
            for entry in self._names.get(place, ()):
                yield ("below" if number else "equal"), place, entry
        for denied, entry in self._below(name):
            yield "above", denied, entry

    def _below(self, folder: str) -> Iterator[tuple[str, Entry]]:
        """Every entry with a name below a folder, in the order of the entries."""
        if folder not in self._folders:
            return
        if len(self._sorted) != len(self._names):
            self._order = {name: number for number, name in enumerate(self._names)}
            self._sorted = sorted(self._names)
        path = folder.rstrip("/")
        found = self._sorted[
            bisect(self._sorted, path + "/") : bisect_left(self._sorted, path + "0")
        ]  # "/" + 1
        for denied in sorted(found, key=self._order.__getitem__):
            for entry in self._names[denied]:
                yield denied, entry

    def _related_inside(self, inside: Inside) -> Iterator[tuple[Relation, Entry]]:
        """Every entry that this place inside a filesystem equals, lies below, or contains. A mount that a
        later one hides counts too: its files may be visible elsewhere."""
        for mount in self.mounts.of_device(inside.device):
            if contains(mount.root, inside.path):
                name = mount.name_of(inside.path)
                for relation, denied, entry in self._related(name):
                    if contains(mount.point, denied):
                        yield relation, entry
            elif contains(inside.path, mount.root):
                for _, denied, entry in self._related(mount.point):
                    if contains(mount.point, denied):
                        yield "above", entry

    def hit(self, place: Place, access: Access = "read", *, own_state: bool = False) -> Hit | None:
        """The first entry that denies this source, or None.

        `own_state`: the source is the plugin's own state directory. Then the denied folder of state
        directories does not count.
        """
        for found in self._hits(place):
            if not found.denied.applies(found.relation, access):
                continue
            if own_state and self.is_among_states(place.names[-1], found):
                continue
            if self._is_guarded_in(place.names, found.denied, found.relation):
                continue
            if all(self._is_in_copy(name, found.denied, found.relation, access) for name in place.names):
                continue
            return found
        return None

    def is_among_states(self, path: str, found: Hit) -> bool:
        """Whether the only reason of the hit is that `path` is in a folder of state directories."""
        if found.denied.origin != "runner" or found.relation != "below":
            return False
        return any(contains(found.denied.path, each) and contains(each, path) for each in self.states)

    def _hits(self, place: Place) -> Iterator[Hit]:
        for name in place.names:
            for found, _, entry in self._related(name):
                yield Hit(entry, found, "name")
        for entry in self._at.get(place.identity, ()):
            yield Hit(entry, "equal", "identity")
        for ancestor in place.ancestors:
            for entry in self._at.get(ancestor, ()):
                yield Hit(entry, "below", "identity")
        for folder in self._above.get(place.identity, ()):
            for _, entry in self._below(folder):
                yield Hit(entry, "above", "identity")
        yield from self._shown(place.inside, "mount")
        for below in place.mounted_below:
            if not self._is_emptiness(below):
                yield from self._shown(below, "mount below")

    def _is_emptiness(self, inside: Inside) -> bool:
        """Whether it is one of the nodes that systemd mounts over a path to hide it. The same node may hide a
        denied path: with ProtectHome= it is /home."""
        for mount in self.mounts.of_device(inside.device):
            if not contains(mount.root, inside.path):
                continue
            folder, _, name = mount.name_of(inside.path).rpartition("/")
            if folder == INACCESSIBLE_NODES:
                try:
                    status = look.lstat(f"{folder}/{name}")
                except OSError:
                    return False
                return status.st_uid == 0 and not status.st_mode & 0o777
        return False

    def _shown(self, inside: Inside, how: Literal["mount", "mount below"]) -> Iterator[Hit]:
        for found, entry in self._related_inside(inside):
            yield Hit(entry, found, how)
        for name in self.mounts.layer_paths(inside):
            found_there = [(found, entry) for found, _, entry in self._related(name)]
            for mount in self.mounts.covering(name):
                found_there += self._related_inside(mount.inside(name))
            for found, entry in found_there:
                # systemd has layers of /usr below /run. The scan finds sockets in the overlay itself.
                if entry.origin != "sockets":
                    yield Hit(entry, found, how)

    # Hard links: a file below a denied directory may have a second name anywhere on its filesystem.

    def file_hit(self, identity: Identity, access: Access) -> Hit | None:
        """The entry of a denied *file* that has another name, or None. This needs no walk."""
        for entry in self._at.get(identity, ()):
            if entry.applies("equal", access):
                return Hit(entry, "equal", "hard link")
        return None

    def find_linked(
        self, wanted: Mapping[Identity, str], *, devices: Iterable[str], limit: int
    ) -> tuple[str, Hit] | None:
        """The first of `wanted` (files with several names) that has a name below a denied directory, or None.

        This walks the denied directories on the same filesystems (`devices`, as mountinfo names them), each
        at most once per launch. It compares inode numbers, which getdents gives without a stat. Raises
        LinksUnproven beyond `limit` entries. A directory that the runner may not list is left out: link(2)
        needs search permission on the path to the file, so the user who made such a link has more rights than
        the runner, and it need not protect against that user.
        """
        numbers = {inode for _, inode in wanted}
        for root, entry in self._outermost(frozenset(devices)):
            if root not in self._inodes:
                self._inodes[root] = self._walk(root, limit)
            if numbers.isdisjoint(self._inodes[root]):
                continue
            # There may be mounts below, and inode numbers repeat across filesystems: compare devices too.
            for fd, item in _entries_below(root):
                if item.inode() not in numbers:
                    continue
                try:
                    status = os.stat(item.name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    raise LinksUnproven from None
                if (status.st_dev, status.st_ino) in wanted:
                    return wanted[status.st_dev, status.st_ino], Hit(entry, "below", "hard link")
        return None

    def _walk(self, root: str, limit: int) -> set[int]:
        inodes: set[int] = set()
        for _, item in _entries_below(root):
            self._walked += 1
            if self._walked > limit:
                raise LinksUnproven
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


def _entries(origin: Origin, paths: Iterable[str], *, write_only: bool = False) -> list[Entry]:
    """Entries made without keyword arguments, which is faster: most entries are those of homes."""
    return [Entry._make((path, origin, False, write_only, False)) for path in paths]


def _cgroup_places(mounts: Mounts) -> Iterator[str]:
    """The usual mount point of cgroups, and every other one that is not below it."""
    yield from CGROUP_PATHS
    for mount in mounts.all:
        if mount.fstype in CGROUP_FILESYSTEMS and not any(contains(p, mount.point) for p in CGROUP_PATHS):
            yield mount.point


class _Folders:
    """The folders that contain denied paths: which exist, and their identities."""

    __slots__ = ("_named", "_present", "identities", "missing")

    def __init__(self) -> None:
        self.identities: set[tuple[str, Identity]] = set()  # real path and identity of each folder
        self.missing: set[str] = set()
        self._present: set[str] = set()
        self._named: set[str] = set()

    def look_at(self, folder: str) -> None:
        """Check whether a folder without a denied path exists. In a missing folder no other denied path has
        to be looked up."""
        if folder in self._present:
            return
        try:
            look.lstat(folder)
        except FileNotFoundError:
            self.missing.add(folder)
            return
        except OSError:  # it may be there
            pass
        self._present.add(folder)

    def note_above(self, fd: int, status: os.stat_result, real: str, *, plain: bool) -> None:
        """Note the directories above an open file. `plain`: its path has no links, so its parents are found
        by name. Otherwise they are found by "..", or by name if that fails."""
        parent = place = real.rpartition("/")[0] or "/"
        if plain or real == "/":
            self._note_by_name(parent)
            return
        look.note(parent)
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            up = os.open("..", flags, dir_fd=fd) if stat.S_ISDIR(status.st_mode) else os.open(parent, flags)
        except OSError:
            self._note_by_name(parent)
            return
        below: Identity | None = None
        try:
            while True:
                here = os.fstat(up)
                if below == (here.st_dev, here.st_ino):  # the root is its own parent
                    return
                below = here.st_dev, here.st_ino
                self.identities.add((place, below))
                place = place.rpartition("/")[0] or "/"
                above = os.open("..", flags, dir_fd=up)
                os.close(up)
                up = above
        except OSError:
            self._note_by_name(parent)
        finally:
            os.close(up)

    def _note_by_name(self, folder: str) -> None:
        for place in ancestry(folder):
            if place in self._named:
                return
            self._named.add(place)
            try:
                status = look.stat(place)
            except OSError:
                continue
            self.identities.add((place, (status.st_dev, status.st_ino)))


# Errors for which a directory is left out: no permission to list it, or removed. Other errors (too many open
# files) must not count as "no hard link found".
_NOT_LISTED = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def _entries_below(root: str) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """Every entry below `root` with the descriptor of its directory. No link is followed."""
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
                    raise LinksUnproven from None
            while fds and not pending[-1]:
                pending.pop()
                os.close(fds.pop())
            if not fds:
                return
            step = pending[-1].pop()
    finally:
        for fd in fds:
            os.close(fd)
