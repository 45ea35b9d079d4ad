"""Scans all files in a source before it is shown to a plugin.

A read-only bind stops neither connect() to a unix socket nor opening a FIFO or a device, and a hard link can
be another name of a denied file.
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox import look
from sandbox.paths.guarded import LINKED, Names, is_guarded
from sandbox.spec import Access
from sandbox.speed.typed import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox.paths.denylist import Denylist, Hit
    from sandbox.paths.denylist import Identity as Inode

SCAN_LIMIT = 200_000
# The most names that are read in denied directories to look for hard links, as a multiple of the scan limit:
# reading a name costs about a third of scanning a file.
LINK_WALK_FACTOR = 5
# One descriptor is open for each level. RLIMIT_NOFILE is 1024 by default, and node_modules is some 40 levels
# deep.
DEPTH_LIMIT = 200
# At most this many other owners of files in a folder are recorded.
MOST_STRANGERS = 8

# Errors of the runner itself, which say nothing about the path.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

KINDS = {
    stat.S_IFSOCK: "a unix socket",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class SourceRefused(Exception):
    """The source may not be shown to a plugin."""

    def __init__(self, rule: str, asked: str, reason: str, hint: str = "") -> None:
        super().__init__(f"{asked}: {reason}")
        self.rule = rule
        self.asked = asked
        self.reason = reason
        self.hint = hint


class _Linked:
    """A file with several names: how many it has, and how many the scan has seen."""

    __slots__ = ("name", "seen", "total")

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.seen = 0


class Scan:
    """The scan of one source, and what it has found."""

    __slots__ = (
        "access",
        "asked",
        "count",
        "denylist",
        "endings",
        "guarded",
        "limit",
        "links",
        "names",
        "owner",
        "strangers",
    )

    def __init__(self, asked: str, access: Access, denylist: Denylist, limit: int) -> None:
        self.asked = asked
        self.access = access
        self.denylist = denylist
        self.limit = limit
        self.count = 0
        self.links: dict[Inode, _Linked] = {}
        self.owner = -1  # the expected owner of everything in it; -1: owners are not checked
        self.names: Names = {}  # guarded names
        self.endings: tuple[str, ...] = ()  # of guarded names that are patterns
        # Paths with a guarded name, links below these, and folders that could be bare repositories.
        self.guarded: list[str] = []
        self.strangers: dict[int, str] = {}  # up to MOST_STRANGERS other owners, each with one path

    def directory(self, parent: int, name: str, path: str, depth: int) -> None:
        if depth > DEPTH_LIMIT:
            raise self._over(f"{self.asked}/{path} is more than {DEPTH_LIMIT} directories deep")
        # A socket, a FIFO, a device or a link that is added later changes the directory's time.
        look.note_listing(f"{self.asked}/{path}")
        try:
            fd = os.open(name, _LIST, dir_fd=parent)
        except OSError as error:
            self._unlisted(error, parent, name, path)
            return
        try:
            if self.owner >= 0 and path:
                self._note_owner(os.fstat(fd), path)
            directories = self._entries(fd, path)
            for child in directories:
                self.directory(fd, child, f"{path}/{child}" if path else child, depth + 1)
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            raise SourceRefused(
                "unreadable", self.asked, f"{self.asked}/{path} cannot be scanned: {error.strerror}"
            ) from None
        finally:
            os.close(fd)

    def _entries(self, fd: int, path: str) -> list[str]:
        """Scan the entries of a directory. Returns its subdirectories. This is the hot loop: it makes one
        getdents for a few hundred entries and one fstatat for each file."""
        directories = []
        count = self.count
        limit = self.limit
        names, ends = self.names, self.endings
        regular = stat.S_IFREG
        # A plugin that can write to a set-id program could change what runs with its owner's rights.
        kind = 0o176000 if self.access == "write" else 0o170000
        with os.scandir(fd) as items:
            for item in items:
                count += 1
                if count > limit:
                    raise self._over(f"it holds more than {limit} files")
                if item.name in names or item.name.endswith(ends):
                    self.guarded.append(f"{path}/{item.name}" if path else item.name)
                if item.is_dir(follow_symlinks=False):
                    directories.append(item.name)
                elif not item.is_symlink():
                    try:
                        status = item.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if self.owner >= 0:
                        self._note_owner(status, f"{path}/{item.name}" if path else item.name)
                    # d_type describes the entry itself, which a mount may cover, so stat decides.
                    if status.st_nlink != 1 or status.st_mode & kind != regular:
                        self.file(status, f"{path}/{item.name}" if path else item.name)
                elif names and item.name not in names:
                    name = f"{path}/{item.name}" if path else item.name
                    if is_guarded(name, names):
                        self.guarded.append(name)
        self.count = count
        if names and "objects" in directories and "refs" in directories:
            self.guarded.append(path)
        return directories

    def _note_owner(self, status: os.stat_result, name: str) -> None:
        if status.st_uid != self.owner and len(self.strangers) < MOST_STRANGERS:
            self.strangers.setdefault(status.st_uid, name)

    def file(self, status: os.stat_result, name: str) -> None:
        kind = stat.S_IFMT(status.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise SourceRefused(
                "special_file",
                self.asked,
                f"it contains {KINDS.get(kind, 'a special file')}: {self.asked}/{name}",
                "remove it, or ask for a narrower path: a read-only bind does not stop a plugin from "
                "using it",
            )
        if kind == stat.S_IFREG and self.access == "write" and status.st_mode & (stat.S_ISUID | stat.S_ISGID):
            raise SourceRefused(
                "set_id",
                self.asked,
                f"{self._named(name)} is a set-id program: the plugin could replace code that runs with "
                "its owner's rights",
                "remove its set-id bits (chmod ug-s), or ask for a narrower path",
            )
        if kind == stat.S_IFREG and status.st_nlink > 1:
            look.doubt(f"{self._named(name)} has several names, and may get another one elsewhere")
            identity = (status.st_dev, status.st_ino)
            hit = self.denylist.file_hit(identity, self.access)
            if hit is not None:
                raise self._linked(name, hit)
            if self.names and is_guarded(name, self.denylist.guarded_names):
                raise SourceRefused(
                    "hard_link", self.asked, f"{self._named(name)} {LINKED}", "make it a copy"
                )
            self.links.setdefault(identity, _Linked(name, status.st_nlink)).seen += 1

    def check_links(self, devices: frozenset[str], *, whole: bool) -> None:
        """Refuse the source if a file with names outside of it is also in a denied directory. `whole`: the
        scan has seen every name in the source exactly once."""
        wanted = {i: link.name for i, link in self.links.items() if not whole or link.seen < link.total}
        if not wanted:
            return
        from sandbox.paths.denylist import LinksUnproven  # here: few sources have such files

        try:
            found = self.denylist.find_linked(wanted, devices=devices, limit=self.limit * LINK_WALK_FACTOR)
        except LinksUnproven:
            name = next(iter(wanted.values()))
            raise SourceRefused(
                "hard_link",
                self.asked,
                f"{self._named(name)} has other hard links, and whether one of them is in a denied "
                f"directory could not be found out within {self.limit * LINK_WALK_FACTOR} files",
                "replace it with a copy, or raise scan_limit in the policy",
            ) from None
        if found is not None:
            raise self._linked(*found)

    def _linked(self, name: str, hit: Hit) -> SourceRefused:
        what = hit.denied.path if hit.relation == "equal" else f"a file of {hit.denied.path}"
        return SourceRefused(
            "hard_link",
            self.asked,
            f"{self._named(name)} is a hard link to {what}",
            "remove it: through it a plugin would read or change the denied file",
        )

    def _named(self, name: str) -> str:
        return f"{self.asked}/{name}" if name else "it"

    def _over(self, reason: str) -> SourceRefused:
        return SourceRefused(
            "scan_limit",
            self.asked,
            f"{reason}, so it was not searched for sockets, FIFOs and devices",
            "ask for a narrower path, or raise scan_limit in the policy",
        )

    def _unlisted(self, error: OSError, parent: int, name: str, path: str) -> None:
        """Handle a directory that cannot be listed. If it cannot be entered either, the plugin cannot enter
        it, which has no more rights than the runner. If it can be entered, it could hold a socket with a
        known name, and is refused."""
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and path:
            return  # removed or replaced meanwhile
        if error.errno in SHORTAGES:
            raise error
        enterable = os.access(name, os.X_OK, dir_fd=parent, effective_ids=True)
        if error.errno == errno.EACCES and path and not enterable:
            return
        raise SourceRefused(
            "unreadable",
            self.asked,
            f"{self._named(path)} cannot be listed ({error.strerror}), so it was not searched for sockets, "
            "FIFOs and devices",
            "let the runner read it, or ask for a narrower path",
        )
