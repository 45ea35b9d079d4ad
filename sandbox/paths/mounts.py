"""The mount table: /proc/self/mountinfo as values.

A bind mount gives a directory a second name whose parents are not the first one's parents, so walking
".." from it never meets the directory it was taken from. Both names share the filesystem and the path
inside it. mountinfo is the only place where an unprivileged process can read those.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.speed.typed import Iterable, Iterator
from sandbox.speed.value import NamedTuple

MOUNTINFO = "/proc/self/mountinfo"

# Filesystems that are interfaces to the kernel or to daemons. procfs carries the magic links
# (/proc/self/root, /proc/self/fd/N, and /dev/fd/N which leads there); nsfs would hand out namespaces.
# fmt: off
KERNEL_FILESYSTEMS = frozenset({
    "proc", "sysfs", "cgroup", "cgroup2", "cpuset", "debugfs", "tracefs", "securityfs", "bpf",
    "devpts", "devtmpfs", "nsfs", "pidfs", "mqueue", "configfs", "efivarfs", "pstore", "fusectl",
    "binfmt_misc", "selinuxfs", "smackfs", "autofs", "rpc_pipefs", "nfsd", "binder", "functionfs",
    "resctrl", "openpromfs", "xenfs", "sockfs", "pipefs", "anon_inodefs", "bdev",
})
# fmt: on

# The kernel escapes space, tab, newline, backslash (and "#") in mountinfo as three octal digits.


class Inside(NamedTuple):
    """A place named by its filesystem: the same under every name that leads to it."""

    device: str  # "major:minor" of the superblock, not always st_dev (btrfs has one st_dev per subvolume)
    path: str


# Filesystems that keep the time of each change themselves. A server behind another one may tell any time.
KEEP_TIMES = frozenset(
    (
        "bcachefs",
        "btrfs",
        "erofs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "overlay",
        "squashfs",
        "tmpfs",
        "xfs",
        "zfs",
    )
)


class Mount(NamedTuple):
    id: int
    parent: int
    device: str
    root: str  # the directory (or file) of the filesystem that is mounted
    point: str  # where it is mounted
    fstype: str
    source: str
    writable: bool = True
    options: str = ""  # of the filesystem, not of this mount of it
    layers: tuple[str, ...] = ()  # the directories an overlay is made of; "": one whose path is not known

    def inside(self, path: str) -> Inside:
        """The filesystem's own name for `path`, which must be at or below this mount's point."""
        return Inside(self.device, join(self.root, relative(path, self.point)))


class Mounts:
    """One reading of the mount table. Immutable: mounts made later are not in it."""

    __slots__ = ("_by_id", "_by_point", "_layers", "all", "devices")

    def __init__(self, mounts: Iterable[Mount]) -> None:
        self.all = tuple(mounts)
        self._by_id = {mount.id: mount for mount in self.all}
        self._by_point: dict[str, list[Mount]] = {}
        for mount in self.all:
            self._by_point.setdefault(mount.point, []).append(mount)
        self.devices: dict[str, str] = {mount.device: mount.fstype for mount in self.all}
        # Not for an overlay at the root: in a container its layers are names of the host.
        roots = {mount.device for mount in self.all if mount.point == "/"}
        self._layers = {m.device: m.layers for m in self.all if m.layers and m.device not in roots}

    def by_id(self, mount_id: int) -> Mount | None:
        return self._by_id.get(mount_id)

    def of_fd(self, fd: int) -> Mount | None:
        """The mount an open file was reached through; None if it came after this reading."""
        return self._by_id.get(mount_id(fd))

    def covering(self, path: str) -> Iterator[Mount]:
        """Every mount at or above `path`, hidden ones too: a directory under a later mount may still be
        visible where its filesystem is mounted a second time."""
        # By name, because hosts full of containers have thousands of mounts, and a launch asks fifty times.
        for point in ancestry(path):
            yield from self._by_point.get(point, ())

    def layered(self, inside: Inside) -> Iterator[str]:
        """The paths that a place on an overlay is made of: the same files under other names and numbers. A
        layer that lies on an overlay itself is resolved in turn."""
        open_ends, seen = [(inside, frozenset((inside.device,)))], {inside}
        while open_ends:
            place, above = open_ends.pop()
            for layer in self._layers.get(place.device, ()):
                if not layer:
                    continue
                path = join(layer, place.path.lstrip("/"))
                yield path
                for below in {mount.inside(path) for mount in self.covering(path)} - seen:
                    # A layer existed before its overlay. An overlay that covers its own layers (/d made of
                    # /d/low) would otherwise lead to /d/low/low, and so on without end.
                    if below.device not in above:
                        seen.add(below)
                        open_ends.append((below, above | {below.device}))

    def unprovable(self, inside: Inside) -> bool:
        """Whether a place is on an overlay with a layer whose path is not known."""
        layers = self._layers.get(inside.device, ())
        return "" in layers or any(
            "" in self._layers.get(mount.device, ())
            for path in self.layered(inside)
            for mount in self.covering(path)
        )

    def below(self, path: str) -> tuple[Mount, ...]:
        """Mounts strictly below `path`. bwrap makes a recursive bind, which shows them too."""
        return tuple(m for m in self.all if m.point != path and contains(path, m.point))


def contains(directory: str, path: str) -> bool:
    """Whether `path` is `directory` or below it. Both normal: no trailing slash, no empty segment."""
    return path == directory or directory == "/" or path.startswith(directory + "/")


def ancestry(path: str) -> Iterator[str]:
    """`path` and every directory above it, innermost first."""
    while path != "/":
        yield path
        path = path.rpartition("/")[0] or "/"
    yield "/"


def relative(path: str, directory: str) -> str:
    return path[len(directory) :].lstrip("/") if directory != "/" else path[1:]


def join(directory: str, rest: str) -> str:
    if not rest:
        return directory
    return directory.rstrip("/") + "/" + rest


def _unescape(field: bytes) -> str:
    if b"\\" in field:
        import re  # late: most mounts need none, and compiling costs a launch half a millisecond

        field = re.sub(rb"\\([0-7]{3})", lambda match: bytes((int(match[1], 8) & 0xFF,)), field)
    return os.fsdecode(field)


def parse_mountinfo(raw: bytes) -> Mounts:
    """Parse proc_pid_mountinfo(5). A malformed line is an error, never skipped: it could hide an alias."""
    return Mounts(_parse_line(line) for line in raw.split(b"\n") if line)


def _parse_line(line: bytes) -> Mount:
    # The optional fields (propagation) vary in number and end with a lone dash.
    fields = line.split(b" ")
    try:
        dash = fields.index(b"-", 6)
        return Mount(
            id=int(fields[0]),
            parent=int(fields[1]),
            device=fields[2].decode("ascii"),
            root=_unescape(fields[3]),
            point=_unescape(fields[4]),
            fstype=_unescape(fields[dash + 1]),
            source=_unescape(fields[dash + 2]),
            writable=b"ro" not in fields[5].split(b","),
            options=_unescape(fields[dash + 3]),
            layers=tuple(_layers(fields[dash + 3])) if fields[dash + 1] == b"overlay" else (),
        )
    except (ValueError, IndexError):
        raise ValueError(f"unexpected line in {MOUNTINFO}: {line[:200]!r}") from None


def _layers(options: bytes) -> Iterator[str]:
    """A relative layer is relative to the working directory of the mounting process, which is not known."""
    import re

    for option in options.split(b","):  # a comma in a path is escaped
        name, _, value = option.partition(b"=")
        paths: Iterable[str] = ()
        if name == b"lowerdir":
            # A colon that is part of a path has a backslash before it.
            paths = re.findall(r"((?:\\.|[^:\\])+)", _unescape(value))
        elif name in (b"upperdir", b"lowerdir+", b"datadir+"):
            paths = (_unescape(value),)
        for path in paths:
            plain = re.sub(r"\\(.)", r"\1", path)
            yield "/" + plain.strip("/") if plain.startswith("/") else ""


def read_mounts(path: str = MOUNTINFO) -> Mounts:
    look.note_content(path)
    with open(path, "rb") as file:
        return parse_mountinfo(file.read())


def mount_id(fd: int) -> int:
    """The id of the mount an open file was reached through, as mountinfo counts them."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                return int(line[7:])
    raise ValueError(f"no mnt_id in /proc/self/fdinfo/{fd}")


def fd_path(fd: int) -> str:
    """Where an open file is now. The kernel follows renames; a removed file's path ends in " (deleted)"."""
    return os.readlink(f"/proc/self/fd/{fd}")


def inside(fd: int, mounts: Mounts) -> tuple[Mount, Inside] | None:
    """The mount and the filesystem's own name of an open file; None if its mount is not in the table."""
    mount = mounts.of_fd(fd)
    if mount is None:
        return None
    path = fd_path(fd)
    if not contains(mount.point, path):
        return None
    return mount, mount.inside(path)
