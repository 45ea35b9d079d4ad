"""Open a host path so that it can be shown to a plugin, or refuse it with the reason.

The path is walked one component at a time, and only the system's own links are followed. Every decision is
made on the open descriptor, and the same descriptor is mounted. So replacing the path afterwards does not
change the files that the plugin sees.
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox import look
from sandbox.paths.denied_paths import DENYLIST_RULE, lexical_fault, normal
from sandbox.paths.file_identity import FileIdentity
from sandbox.paths.guarded import GUARDED, TELLS, Names, endings, find_guarded_name, is_guarded
from sandbox.paths.mounts import KEEP_TIMES, KERNEL_FILESYSTEMS, Inside, Mounts, contains, fd_path
from sandbox.paths.scan import KINDS, SCAN_LIMIT, SHORTAGES, Scan, SourceRefused
from sandbox.paths.walk import LinkRefused, Step, TooManyLinks, close, real_path, walk
from sandbox.spec import Access
from sandbox.speed.typed import TYPE_CHECKING, Literal
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.paths.denylist import Denylist, Hit


class SourceMissing(Exception):
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
    uid: int = 0  # its owner
    gid: int = 0
    strangers: tuple[tuple[int, str], ...] = ()  # other owners in it, each with one path; see Scan
    # Paths in it that have to be guarded if it is opened for writing; see Scan.
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
    """Open `path` for a bind mount. Raises SourceRefused or SourceMissing; the caller closes it.

    `trusted` skips the scan (for the system's runtime and the plugin's own state), but not the denylist.
    `own_state`: it is the plugin's own state directory, see Denylist.hit. `mounts`: a newer mount table than
    the denylist's.
    """
    if mounts is None:
        mounts = denylist.mounts
    fault = lexical_fault(path)
    if fault is not None:
        raise SourceRefused("path", path, f"the path {fault}", "use an absolute path without '..'")
    asked = normal(path)
    # By name first: the message is clearer, and a denied path is refused even if it does not exist.
    named = denylist.name_hit(asked, access)
    if named is not None and not (own_state and denylist.is_among_states(asked, named)):
        raise _denied(asked, named)
    steps = _walk(asked, mounts)
    last = steps.pop()
    try:
        return _judge_source(asked, last, steps, access, denylist, mounts, scan_limit, trusted, own_state)
    except BaseException:
        os.close(last.fd)
        raise
    finally:
        close(steps)


def _denied(asked: str, hit: Hit) -> SourceRefused:
    rule = "self_grant" if hit.denied.origin == "deciding" else DENYLIST_RULE
    return SourceRefused(rule, asked, hit.sentence(), hit.hint())


# --- the walk -------------------------------------------------------------------------------------


def _walk(asked: str, mounts: Mounts) -> list[Step]:
    """Open `asked` and every directory on the way, outermost first, with links resolved."""

    def refuse_kernel(steps: list[Step], last: bool) -> None:
        # /dev/shm is an ordinary directory below a devtmpfs. Below the others there is none.
        fstype = mounts.devices.get(_device(steps[-1].status.st_dev))
        if fstype in KERNEL_FILESYSTEMS and (fstype != "devtmpfs" or last):
            raise _kernel(asked, real_path(steps), fstype or "")

    try:
        return walk(asked, check=refuse_kernel)
    except LinkRefused as refused:
        said = "it is" if refused.link == asked else f"its parent {refused.link} is"
        raise SourceRefused(
            "symlink",
            asked,
            f"{said} a symbolic link to {refused.target}, which users other than root could change",
            f"use the path it leads to: {refused.leads_to}",
        ) from None
    except TooManyLinks as refused:
        raise SourceRefused("symlink", asked, str(refused)) from None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise SourceMissing(asked) from None
        if error.errno in SHORTAGES:
            raise
        raise SourceRefused(
            "unreadable",
            asked,
            f"it cannot be opened: {error.strerror}",
            "check its permissions and its parents'",
        ) from None


def _device(st_dev: int) -> str:
    return f"{os.major(st_dev)}:{os.minor(st_dev)}"


def _kernel(asked: str, place: str, fstype: str) -> SourceRefused:
    where = "it is" if place == asked else f"{place} is"
    return SourceRefused(
        "kernel_filesystem",
        asked,
        f"{where} on a {fstype} filesystem, which is an interface to the kernel",
        "remove this path from the manifest; the cage has a /proc and a /dev of its own",
    )


def _require_known_layers(asked: str, real: str, shown: Inside, mounts: Mounts) -> None:
    """Refuse a place on an overlay that may show other folders than its layers' names say: the denylist has
    judged by these names. `real`: a name of the place."""
    hint = "mount the overlay by absolute paths that stay as they are, or ask for folders without an overlay"
    if mounts.has_unknown_layer(shown):
        reason = "it is on an overlay with a layer that has a relative path, or is not there under its name"
        raise SourceRefused("overlay", asked, f"{reason}: it could be any folder", hint)
    layers = tuple(mounts.layer_paths(shown))
    if not layers or not _shows(real, shown, mounts):
        return
    known = {name for layer in layers for name in _names_in(layer)}
    if lost := sorted(_names_in(real) - known):
        # Such as a bind mount that is gone: its place is still there, and empty.
        reason = f"it is on an overlay and shows {lost[0]!r}, which none of its layers has under its name"
        raise SourceRefused("overlay", asked, f"{reason}: it could be from any folder", hint)


def _shows(path: str, shown: Inside, mounts: Mounts) -> bool:
    """Whether a path still leads to this place. A later mount may hide it."""
    look.note(path)
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True  # it may be there
    try:
        found = mounts.of_fd(fd)
        return found is None or found.device == shown.device
    finally:
        os.close(fd)


def _names_in(path: str) -> set[str]:
    """The names in a folder; "." for a file. Empty if it is not there, or may not be read."""
    try:
        return set(look.listdir(path))
    except NotADirectoryError:
        return {"."}
    except OSError:
        return set()


# --- the judgement --------------------------------------------------------------------------------


def _judge_source(
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
    from sandbox.paths.denylist import Place  # here: a launch from a stored plan judges no place

    status = last.status
    kind = stat.S_IFMT(status.st_mode)
    if kind not in (stat.S_IFDIR, stat.S_IFREG):
        raise SourceRefused(
            "special_file",
            asked,
            f"it is {KINDS.get(kind, 'a special file')}",
            "only regular files and directories can be shown to a plugin",
        )
    real = real_path([*above, last]) if above else "/"
    mount = mounts.of_fd(last.fd)
    if mount is None or fd_path(last.fd) != real:
        raise _moved(asked)
    # The walk sees most of them. Not the end of a link that goes back to a devtmpfs ("/dev/shm/.."), and not
    # a filesystem that was mounted again, with the number of the old mount, after the table was read.
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
    names: Names = denylist.guarded_names if access == "write" else {}
    if own_state and any(contains(each, real) for each in denylist.states):
        names = {}
    if names and any(is_guarded(name.strip("/"), names) for name in (*place.names, place.inside.path)):
        raise SourceRefused(
            "self_grant", asked, GUARDED, "ask for another folder, and copy what is needed there"
        )
    if own_state and names and kind == stat.S_IFDIR and (held := find_guarded_name(last.fd, names)):
        raise SourceRefused("self_grant", asked, f"it holds {held}, which {TELLS}", "choose another folder")
    source = OpenSource(
        path=asked,
        real=real,
        fd=last.fd,
        identity=FileIdentity(status.st_dev, status.st_ino, status.st_mode, status.st_ctime_ns),
        kind="dir" if kind == stat.S_IFDIR else "file",
        access=access,
        uid=status.st_uid,
        gid=status.st_gid,
    )
    if trusted:
        return source
    again = f"{asked} can be written: what is in it is looked at each time" if access == "write" else ""
    if not again and any(shown.fstype not in KEEP_TIMES for shown in (mount, *below)):
        look.doubt(f"{asked} is on a filesystem that may not keep the times of its files")
    with look.looked_at_again(again):
        return look_inside(source, denylist, mounts, scan_limit, names)


def look_inside(
    source: OpenSource, denylist: Denylist, mounts: Mounts, scan_limit: int, names: Names
) -> OpenSource:
    """The source with what is in it now. Its own place was judged before. `names`: what is guarded in it.
    Raises SourceRefused."""
    asked, status, mount = source.path, os.fstat(source.fd), mounts.of_fd(source.fd)
    if mount is None:
        raise _moved(asked)
    below = mounts.below(source.real)
    _require_known_layers(asked, source.real, mount.inside(source.real), mounts)
    for mounted in below:
        _require_known_layers(asked, mounted.point, Inside(mounted.device, mounted.root), mounts)
    scan = Scan(asked, source.access, denylist, scan_limit)
    scan.names, scan.endings = names, endings(names)
    if source.access == "write" and os.geteuid() == 0:
        scan.owner = status.st_uid
    if source.kind == "dir":
        scan.directory(source.fd, ".", "", 0)
    else:
        scan.file(status, "")
    # With a mount below, a name could be counted twice, and a name outside would be overlooked.
    scan.check_links(frozenset((mount.device, *(m.device for m in below))), whole=not below)
    return source._replace(
        uid=status.st_uid,
        gid=status.st_gid,
        strangers=tuple(scan.strangers.items()),
        guarded=tuple(scan.guarded),
    )


def _moved(asked: str) -> SourceRefused:
    told = "it was moved, removed or mounted over while it was opened"
    return SourceRefused("source_changed", asked, told, "try again")
