"""The denylist as an index of all that is denied: the oracle for sandbox/paths/denylist.py.

It opens every denied path, and keeps each of its names, identities and places inside a filesystem, together
with everything above them. The product compares names instead, which is faster. The oracle turns nothing
around, so what it refuses has to be refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any, Literal

from sandbox.paths.denied_paths import Relation, normal
from sandbox.paths.denylist import Denylist, Entry, Hit, Identity, Place
from sandbox.paths.mounts import Inside, Mounts, ancestry, fd_path
from sandbox.spec import Access


class _Paths:
    """Denied paths of several name spaces."""

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


class IndexedDenylist(Denylist):
    """Has the entries of a Denylist and judges by the index alone."""

    def __init__(self, mounts: Mounts, **options: Any) -> None:
        super().__init__(mounts, **options)
        self._of_names = _Paths()
        self._of_insides = _Paths()
        self._of_files: dict[Identity, list[Entry]] = {}
        self._of_folders: dict[Identity, list[Entry]] = {}
        self._roots = {}
        for entry in self.entries:
            self._index(entry)

    def _index(self, entry: Entry) -> None:
        self._of_names.add("", entry.path, entry)
        self._index_place(entry.path, entry)
        try:
            fd = os.open(entry.path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        try:
            status = os.fstat(fd)
            real = fd_path(fd)
            if real != entry.path:
                self._of_names.add("", real, entry)
                self._index_place(real, entry)
            self._of_files.setdefault((status.st_dev, status.st_ino), []).append(entry)
            walked = not entry.whole_only and not entry.write_only
            if stat.S_ISDIR(status.st_mode) and walked and entry.origin != "cgroups":
                self._roots.setdefault(real, entry)
            for identity in _directories_above(fd, status, real):
                self._of_folders.setdefault(identity, []).append(entry)
        finally:
            os.close(fd)

    def _index_place(self, path: str, entry: Entry) -> None:
        for mount in self.mounts.covering(path):
            device, place = inside = mount.inside(path)
            if place.startswith("/"):  # nsfs and friends name things like "net:[4026531840]"
                self._of_insides.add(device, place, entry)
            for name in self.mounts.layer_paths(inside):
                self._of_names.add("", name, entry)

    def related(self, name: str) -> Iterator[tuple[Relation, Entry]]:
        return self._of_names.related("", normal(name))

    def _hits(self, place: Place) -> Iterator[Hit]:
        for name in place.names:
            for found, entry in self._of_names.related("", name):
                yield Hit(entry, found, "name")
        for entry in self._of_files.get(place.identity, ()):
            yield Hit(entry, "equal", "identity")
        for ancestor in place.ancestors:
            for entry in self._of_files.get(ancestor, ()):
                yield Hit(entry, "below", "identity")
        for entry in self._of_folders.get(place.identity, ()):
            yield Hit(entry, "above", "identity")
        yield from self._shown(place.inside, "mount")
        for below in place.mounted_below:
            yield from self._shown(below, "mount below")

    def _shown(self, inside: Inside, how: Literal["mount", "mount below"]) -> Iterator[Hit]:
        for found, entry in self._of_insides.related(*inside):
            yield Hit(entry, found, how)
        for name in self.mounts.layer_paths(inside):
            found_there = list(self._of_names.related("", name))
            for mount in self.mounts.covering(name):
                found_there += self._of_insides.related(*mount.inside(name))
            for found, entry in found_there:
                if entry.origin != "sockets":
                    yield Hit(entry, found, how)

    def file_hit(self, identity: Identity, access: Access) -> Hit | None:
        for entry in self._of_files.get(identity, ()):
            if entry.applies("equal", access):
                return Hit(entry, "equal", "hard link")
        return None


def _directories_above(fd: int, status: os.stat_result, real: str) -> list[Identity]:
    """Identities of the directories above an open file, by ".." from it."""
    if real == "/":
        return []
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    chain: list[Identity] = []
    if stat.S_ISDIR(status.st_mode):
        up = os.open("..", flags, dir_fd=fd)
    else:
        up = os.open(real.rpartition("/")[0] or "/", flags)
    while True:
        here = os.fstat(up)
        if chain and chain[-1] == (here.st_dev, here.st_ino):  # the root is its own parent
            os.close(up)
            return chain
        chain.append((here.st_dev, here.st_ino))
        above = os.open("..", flags, dir_fd=up)
        os.close(up)
        up = above
