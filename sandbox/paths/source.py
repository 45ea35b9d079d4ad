"""Open a host path so that it can be shown to a plugin, or refuse it with the reason.

The path is walked one component at a time, and only the system's own links are followed. Every decision is
made on the open descriptor, and the same descriptor is mounted. Swapping the path afterwards changes a name,
not the files that the plugin sees.
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox import look
from sandbox.paths.denied_paths import DENYLIST_RULE, lexical_fault, normal
from sandbox.paths.denylist import Denylist, Hit, Place, Unproven
from sandbox.paths.denylist import Identity as Inode
from sandbox.paths.file_identity import FileIdentity
from sandbox.paths.guarded import GIT, GUARDED, LINKED, TELLS, held_name, is_guarded
from sandbox.paths.mounts import KEEP_TIMES, KERNEL_FILESYSTEMS, Inside, Mounts, contains, fd_path
from sandbox.paths.walk import LinkRefused, Step, TooManyLinks, close, real_path, walk
from sandbox.spec import Access
from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple

SCAN_LIMIT = 200_000
# Names below denied directories that are read before "no hard link" counts as unproven, as a multiple of
# the scan limit: getdents alone costs about a third of what a scanned file costs.
LINK_WALK_FACTOR = 5
# One descriptor is held for each level. RLIMIT_NOFILE is 1024 by default, and node_modules reach some 40.
DEPTH_LIMIT = 200
# At most this many other owners of files in a folder are named.
MOST_STRANGERS = 8

# A shortage of the runner itself is not a fault of the path.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_KINDS = {
    stat.S_IFSOCK: "a unix socket",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class Refused(Exception):
    """The source may not be shown to a plugin."""

    def __init__(self, rule: str, asked: str, reason: str, hint: str = "") -> None:
        super().__init__(f"{asked}: {reason}")
        self.rule = rule
        self.asked = asked
        self.reason = reason
        self.hint = hint


class Missing(Exception):
    """There is nothing at `path`."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} does not exist")
        self.path = path


class OpenSource(NamedTuple):
    path: str  # as asked, normal: where it appears inside
    real: str  # where it is on the host, without links
    fd: int  # O_PATH
    identity: FileIdentity
    kind: Literal["dir", "file"]
    access: Access
    scanned: int = 0  # entries looked at
    uid: int = 0  # its owner
    gid: int = 0
    strangers: tuple[tuple[int, str], ...] = ()  # other owners in it, each with one path; see _Scan
    # If it is opened for writing, see _Scan.
    guarded: tuple[str, ...] = ()

    def close(self) -> None:
        os.close(self.fd)


def open_source(
    path: str,
    *,
    access: Access,
    denylist: Denylist,
    mounts: Mounts | None = None,
    scan_limit: int = SCAN_LIMIT,
    trusted: bool = False,
    own_state: bool = False,
) -> OpenSource:
    """Open `path` for binding. Raises Refused or Missing; the caller closes it.

    `trusted` skips the scan (the system's runtime, the plugin's own state), never the denylist.
    `own_state` marks the asking plugin's own state directory, see Denylist.hit. `mounts` is the denylist's
    reading unless the caller has a newer one.
    """
    if mounts is None:
        mounts = denylist.mounts
    fault = lexical_fault(path)
    if fault is not None:
        raise Refused("path", path, f"the path {fault}", "use an absolute path without '..'")
    asked = normal(path)
    # By name first: its message is clearer, and a denied path is refused even if it does not exist.
    named = denylist.name_hit(asked, access)
    if named is not None and not (own_state and denylist.is_among_states(named)):
        raise _denied(asked, named)
    steps = _walk(asked, mounts)
    last = steps.pop()
    try:
        return _judged(asked, last, steps, access, denylist, mounts, scan_limit, trusted, own_state)
    except BaseException:
        os.close(last.fd)
        raise
    finally:
        close(steps)


def _denied(asked: str, hit: Hit) -> Refused:
    rule = "self_grant" if hit.denied.origin == "deciding" else DENYLIST_RULE
    return Refused(rule, asked, hit.sentence(), hit.hint())


# --- the walk -------------------------------------------------------------------------------------


def _walk(asked: str, mounts: Mounts) -> list[Step]:
    """Open `asked` and every directory it is reached through, outermost first, links resolved."""

    def refuse_kernel(steps: list[Step], last: bool) -> None:
        # /dev/shm is an ordinary directory behind a devtmpfs; the others have none behind them.
        fstype = mounts.devices.get(_device(steps[-1].status.st_dev))
        if fstype in KERNEL_FILESYSTEMS and (fstype != "devtmpfs" or last):
            raise _kernel(asked, real_path(steps), fstype or "")

    try:
        return walk(asked, check=refuse_kernel)
    except LinkRefused as refused:
        said = "it is" if refused.link == asked else f"its parent {refused.link} is"
        raise Refused(
            "symlink",
            asked,
            f"{said} a symbolic link to {refused.target}, which users other than root could change",
            f"use the path it leads to: {refused.leads_to}",
        ) from None
    except TooManyLinks as refused:
        raise Refused("symlink", asked, str(refused)) from None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise Missing(asked) from None
        if error.errno in _SHORTAGES:
            raise
        raise Refused(
            "unreadable",
            asked,
            f"it cannot be opened: {error.strerror}",
            "check its permissions and its parents'",
        ) from None


def _device(st_dev: int) -> str:
    return f"{os.major(st_dev)}:{os.minor(st_dev)}"


def _kernel(asked: str, place: str, fstype: str) -> Refused:
    where = "it is" if place == asked else f"{place} is"
    return Refused(
        "kernel_filesystem",
        asked,
        f"{where} on a {fstype} filesystem, which is an interface to the kernel",
        "remove this path from the manifest; the cage has a /proc and a /dev of its own",
    )


# --- the judgement --------------------------------------------------------------------------------


def _judged(
    asked: str,
    last: Step,
    above: list[Step],
    access: Access,
    denylist: Denylist,
    mounts: Mounts,
    scan_limit: int,
    trusted: bool,
    own_state: bool,
) -> OpenSource:
    status = last.status
    kind = stat.S_IFMT(status.st_mode)
    if kind not in (stat.S_IFDIR, stat.S_IFREG):
        raise Refused(
            "special_file",
            asked,
            f"it is {_KINDS.get(kind, 'a special file')}",
            "only regular files and directories can be shown to a plugin",
        )
    real = real_path([*above, last]) if above else "/"
    mount = mounts.of_fd(last.fd)
    if mount is None or fd_path(last.fd) != real:
        raise Refused(
            "source_changed", asked, "it was moved, removed or mounted over while it was opened", "try again"
        )
    if mount.fstype in KERNEL_FILESYSTEMS:
        raise _kernel(asked, asked, mount.fstype)
    below = mounts.below(real)
    for mounted in below:
        if mounted.fstype in KERNEL_FILESYSTEMS:
            raise _kernel(asked, mounted.point, mounted.fstype)
    inode = (status.st_dev, status.st_ino)
    place = Place(
        names=(asked,) if real == asked else (asked, real),
        identity=inode,
        ancestors=tuple((step.status.st_dev, step.status.st_ino) for step in above),
        inside=mount.inside(real),
        mounted_below=tuple(Inside(mounted.device, mounted.root) for mounted in below),
    )
    hit = denylist.hit(place, access, own_state=own_state)
    if hit is not None:
        raise _denied(asked, hit)
    if not trusted and any(mounts.unprovable(shown) for shown in (place.inside, *place.mounted_below)):
        raise Refused(
            "overlay",
            asked,
            "it is on an overlay with a relative layer path, which could mean any folder",
            "mount the overlay with absolute paths",
        )
    names = denylist.guarded_names if access == "write" else frozenset()
    if own_state and denylist.states and contains(denylist.states, real):
        names = frozenset()
    if names and any(is_guarded(name.strip("/"), names) for name in (*place.names, place.inside.path)):
        raise Refused("self_grant", asked, GUARDED, "ask for another folder, and copy what is needed there")
    if own_state and names and kind == stat.S_IFDIR and (held := held_name(last.fd, names)):
        raise Refused("self_grant", asked, f"it holds {held}, which {TELLS}", "choose another folder")
    scanned = 0
    guarded: tuple[str, ...] = ()
    strangers: tuple[tuple[int, str], ...] = ()
    if not trusted:
        if access == "write":
            look.doubt(f"{asked} can be written: what is in it has to be looked at each time")
        if any(shown.fstype not in KEEP_TIMES for shown in (mount, *below)):
            look.doubt(f"{asked} is on a filesystem that may not keep the times of its files")
        scan = _Scan(asked, access, denylist, scan_limit)
        scan.names = names | {GIT} if names else names
        if access == "write" and os.geteuid() == 0:
            scan.owner = status.st_uid
        if kind == stat.S_IFDIR:
            scan.directory(last.fd, ".", "", 0)
        else:
            scan.file(status, "")
        # A mount below could count a name twice, and then the file would seem to have no other names.
        scan.settle_links(frozenset((mount.device, *(m.device for m in below))), whole=not below)
        scanned, strangers, guarded = scan.count, tuple(scan.strangers.items()), tuple(scan.guarded)
    return OpenSource(
        path=asked,
        real=real,
        fd=last.fd,
        identity=FileIdentity(status.st_dev, status.st_ino, status.st_mode, status.st_ctime_ns),
        kind="dir" if kind == stat.S_IFDIR else "file",
        access=access,
        scanned=scanned,
        uid=status.st_uid,
        gid=status.st_gid,
        strangers=strangers,
        guarded=guarded,
    )


class _Linked:
    __slots__ = ("name", "seen", "total")

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.seen = 0


class _Scan:
    """Look at everything below one source. A read-only bind stops neither connect() to a unix socket nor
    opening a FIFO or a device, and a hard link can be another name of a denied file."""

    __slots__ = (
        *("access", "asked", "count", "denylist", "guarded", "limit", "links", "names", "owner", "strangers"),
    )

    def __init__(self, asked: str, access: Access, denylist: Denylist, limit: int) -> None:
        self.asked = asked
        self.access = access
        self.denylist = denylist
        self.limit = limit
        self.count = 0
        self.links: dict[Inode, _Linked] = {}
        self.owner = -1  # the expected owner of everything in it; -1: owners are not checked
        self.names: frozenset[str] = frozenset()  # that are guarded
        # The paths that have one, the links below these, and folders that could be bare repositories.
        self.guarded: list[str] = []
        self.strangers: dict[int, str] = {}  # up to MOST_STRANGERS other owners, each with one path

    def directory(self, parent: int, name: str, path: str, depth: int) -> None:
        if depth > DEPTH_LIMIT:
            raise self._over(f"{self.asked}/{path} is more than {DEPTH_LIMIT} directories deep")
        # A socket, a pipe, a device or a link that is put into it later changes its time.
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
            if error.errno in _SHORTAGES:
                raise
            raise Refused(
                "unreadable", self.asked, f"{self.asked}/{path} cannot be scanned: {error.strerror}"
            ) from None
        finally:
            os.close(fd)

    def _entries(self, fd: int, path: str) -> list[str]:
        """The hot loop: one getdents per few hundred entries and one fstatat for each file, nothing else."""
        directories = []
        count = self.count
        limit = self.limit
        regular = stat.S_IFREG
        # A plugin that can write to a set-id program decides what others run with its owner's rights.
        kind = 0o176000 if self.access == "write" else 0o170000
        with os.scandir(fd) as items:
            for item in items:
                count += 1
                if count > limit:
                    raise self._over(f"it holds more than {limit} files")
                if item.name in self.names:
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
                    # d_type describes the entry itself, which a mount may cover. So stat decides.
                    if status.st_nlink != 1 or status.st_mode & kind != regular:
                        self.file(status, f"{path}/{item.name}" if path else item.name)
                elif self.names and item.name not in self.names:
                    name = f"{path}/{item.name}" if path else item.name
                    if is_guarded(name, self.names):
                        self.guarded.append(name)
        self.count = count
        if self.names and "objects" in directories and "refs" in directories:
            self.guarded.append(path)
        return directories

    def _note_owner(self, status: os.stat_result, name: str) -> None:
        if status.st_uid != self.owner and len(self.strangers) < MOST_STRANGERS:
            self.strangers.setdefault(status.st_uid, name)

    def file(self, status: os.stat_result, name: str) -> None:
        kind = stat.S_IFMT(status.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise Refused(
                "special_file",
                self.asked,
                f"it contains {_KINDS.get(kind, 'a special file')}: {self.asked}/{name}",
                "remove it, or ask for a narrower path: a read-only bind does not stop a plugin from "
                "using it",
            )
        if kind == stat.S_IFREG and self.access == "write" and status.st_mode & (stat.S_ISUID | stat.S_ISGID):
            raise Refused(
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
                raise Refused("hard_link", self.asked, f"{self._named(name)} {LINKED}", "make it a copy")
            self.links.setdefault(identity, _Linked(name, status.st_nlink)).seen += 1

    def settle_links(self, devices: frozenset[str], *, whole: bool) -> None:
        """Look up files that have names outside this source among the files of the denied directories."""
        wanted = {i: link.name for i, link in self.links.items() if not whole or link.seen < link.total}
        if not wanted:
            return
        try:
            found = self.denylist.linked(wanted, devices=devices, limit=self.limit * LINK_WALK_FACTOR)
        except Unproven:
            name = next(iter(wanted.values()))
            raise Refused(
                "hard_link",
                self.asked,
                f"{self._named(name)} has other hard links, and whether one of them is in a denied "
                f"directory could not be found out within {self.limit * LINK_WALK_FACTOR} files",
                "replace it with a copy, or raise scan_limit in the policy",
            ) from None
        if found is not None:
            raise self._linked(*found)

    def _linked(self, name: str, hit: Hit) -> Refused:
        what = hit.denied.path if hit.relation == "equal" else f"a file of {hit.denied.path}"
        return Refused(
            "hard_link",
            self.asked,
            f"{self._named(name)} is a hard link to {what}",
            "remove it: through it a plugin would read or change the denied file",
        )

    def _named(self, name: str) -> str:
        return f"{self.asked}/{name}" if name else "it"

    def _over(self, reason: str) -> Refused:
        return Refused(
            "scan_limit",
            self.asked,
            f"{reason}, so it was not searched for sockets, FIFOs and devices",
            "ask for a narrower path, or raise scan_limit in the policy",
        )

    def _unlisted(self, error: OSError, parent: int, name: str, path: str) -> None:
        """A directory that we may neither list nor enter is closed to the plugin too, which has no more
        rights than we have. One that we may enter but not list could hold a socket whose name is known."""
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and path:
            return  # removed or replaced meanwhile
        if error.errno in _SHORTAGES:
            raise error
        enterable = os.access(name, os.X_OK, dir_fd=parent, effective_ids=True)
        if error.errno == errno.EACCES and path and not enterable:
            return
        raise Refused(
            "unreadable",
            self.asked,
            f"{self._named(path)} cannot be listed ({error.strerror}), so it was not searched for sockets, "
            "FIFOs and devices",
            "let the runner read it, or ask for a narrower path",
        )
