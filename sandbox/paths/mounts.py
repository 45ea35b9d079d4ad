"""The mount table: /proc/self/mountinfo as values.

A bind mount gives a directory a second name with other parents, so ".." from there never leads to the
original directory. Both names share the filesystem and the path inside it. mountinfo is the only place where
an unprivileged process can read these.
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox import look
from sandbox.speed.typed import Callable, Collection, Iterable, Iterator, Sequence
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


class Inside(NamedTuple):
    """A place by its filesystem and its path there: the same under every name that leads to it."""

    device: str  # "major:minor" of the superblock, not always st_dev (btrfs has one st_dev per subvolume)
    path: str


# Filesystems that record the time of each change themselves. Those of a server may show any time.
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
        """The place of `path` inside the filesystem. It must be at or below this mount's point."""
        return Inside(self.device, join(self.root, relative(path, self.point)))

    def name_of(self, inside: str) -> str:
        """The name that a path of the filesystem has through this mount. It must be at or below the mount's
        root. It is not normalised: the root of a removed folder has an empty segment in it."""
        rest = inside if self.root == "/" else inside[len(self.root) :]
        return self.point.rstrip("/") + rest.rstrip("/") or "/"


class Mounts:
    """The mount table at one moment. Immutable: later mounts are not in it."""

    __slots__ = (
        "_by_device",
        "_by_id",
        "_by_point",
        "_find",
        "_found",
        "_layers",
        "all",
        "devices",
        "overlays",
    )

    def __init__(
        self, mounts: Iterable[Mount], find: Callable[[str, Collection[str]], str] | None = None
    ) -> None:
        """`find`: see find_layer. Without it every layer is taken as it is written."""
        self.all = tuple(mounts)
        self._find = find
        self._found: dict[str, tuple[str, ...]] = {}
        self._by_id = {mount.id: mount for mount in self.all}
        self._by_point: dict[str, list[Mount]] = {}
        self._by_device: dict[str, list[Mount]] = {}
        for mount in self.all:
            self._by_point.setdefault(mount.point, []).append(mount)
            self._by_device.setdefault(mount.device, []).append(mount)
        self.devices: dict[str, str] = {mount.device: mount.fstype for mount in self.all}
        # Not for an overlay at the root: in a container its layers are paths of the host.
        roots = {mount.device for mount in self.all if mount.point == "/"}
        self._layers = {m.device: m.layers for m in self.all if m.layers and m.device not in roots}
        self.overlays = tuple(m for m in self.all if m.device in self._layers)

    def of_fd(self, fd: int) -> Mount | None:
        """The mount through which an open file was reached; None if it is newer than this table."""
        return self._by_id.get(mount_id(fd))

    def of_device(self, device: str) -> Sequence[Mount]:
        """Every mount of one filesystem, including hidden ones."""
        return self._by_device.get(device, ())

    def covering(self, path: str) -> Iterator[Mount]:
        """Every mount at or above `path`, including hidden ones: a directory under a later mount may still be
        visible where its filesystem is mounted a second time."""
        # By name: a host with many containers has thousands of mounts, and a launch calls this fifty times.
        for point in ancestry(path):
            yield from self._by_point.get(point, ())

    def layer_paths(self, inside: Inside) -> Iterator[str]:
        """The paths in the layers of a place on an overlay: the same files under other names and inode
        numbers. A layer that is on an overlay itself is resolved in turn."""
        open_ends, seen = [(inside, frozenset((inside.device,)))], {inside}
        while open_ends:
            place, above = open_ends.pop()
            for layer in self._layers_of(place.device):
                if not layer:
                    continue
                path = join(layer, place.path.lstrip("/"))
                yield path
                for below in {mount.inside(path) for mount in self.covering(path)} - seen:
                    # A layer cannot be on its own overlay, which is newer. Without this check an overlay that
                    # covers its layers (/d made of /d/low) would lead to /d/low/low, and so on without end.
                    if below.device not in above:
                        seen.add(below)
                        open_ends.append((below, above | {below.device}))

    def _layers_of(self, device: str) -> tuple[str, ...]:
        """The layers of an overlay, as they are written and where that leads now; "" for one that is not
        found. Looked up when first asked for: a host of containers has hundreds of overlays."""
        layers = self._layers.get(device, ())
        if self._find is None or not layers:
            return layers
        if device not in self._found:
            magic = {mount.device for mount in self.all if mount.fstype == "proc"}
            found = (name for each in layers if each for name in (each, self._find(each, magic)))
            self._found[device] = tuple(dict.fromkeys((*found, *(each for each in layers if not each))))
        return self._found[device]

    def has_unknown_layer(self, inside: Inside) -> bool:
        """Whether a place is on an overlay with a layer whose path is unknown."""
        return "" in self._layers_of(inside.device) or any(
            "" in self._layers_of(mount.device)
            for path in self.layer_paths(inside)
            for mount in self.covering(path)
        )

    def below(self, path: str) -> tuple[Mount, ...]:
        """Mounts strictly below `path`. bwrap's binds are recursive, and show them too."""
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
    """A field of mountinfo, in which the kernel writes special characters as three octal digits."""
    if b"\\" in field:
        import re  # late: most mounts need none, and compiling costs a launch half a millisecond

        field = re.sub(rb"\\([0-7]{3})", lambda match: bytes((int(match[1], 8) & 0xFF,)), field)
    return os.fsdecode(field)


def parse_mountinfo(raw: bytes) -> Mounts:
    """Parse proc_pid_mountinfo(5). A malformed line is an error and never skipped: it could hide a second
    name."""
    return Mounts(_parse_lines(raw))


def _parse_lines(raw: bytes) -> Iterator[Mount]:
    return (_parse_line(line) for line in raw.split(b"\n") if line)


def _parse_line(line: bytes) -> Mount:
    # The optional fields (propagation) vary in number and end with a lone dash.
    fields = line.split(b" ")
    try:
        dash = fields.index(b"-", 6)
        return Mount(  # without names, which take as long as all the rest: a host may have thousands
            int(fields[0]),
            int(fields[1]),
            fields[2].decode("ascii"),
            _unescape(fields[3]),
            _unescape(fields[4]),
            _unescape(fields[dash + 1]),
            _unescape(fields[dash + 2]),
            b"ro" not in fields[5].split(b","),
            _unescape(fields[dash + 3]),
            tuple(_layers(fields[dash + 3])) if fields[dash + 1] == b"overlay" else (),
        )
    except (ValueError, IndexError):
        raise ValueError(f"unexpected line in {MOUNTINFO}: {line[:200]!r}") from None


def _layers(options: bytes) -> Iterator[str]:
    """The layers in an overlay's options; "" for a relative one. That is relative to the working directory of
    the process that mounted it, which is unknown."""
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
        return Mounts(_parse_lines(file.read()), find_layer)


def find_layer(path: str, magic: Collection[str]) -> str:
    """The real path of the folder that a layer's name leads to now, or ''. The kernel keeps the name that was
    used to mount it, with its links. `magic`: devices of /proc, where a name means another file to each
    process (/proc/self/fd/9)."""
    from sandbox.paths.walk import Step, TooManyLinks, close, real_path, walk

    def check(steps: list[Step], is_last: bool) -> None:
        status = steps[-1].status
        device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
        if device in magic or (is_last and not stat.S_ISDIR(status.st_mode)):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    try:
        steps = walk(path, follow="all", check=check)
    except (OSError, TooManyLinks):
        return ""
    try:
        return real_path(steps)
    finally:
        close(steps)


def mount_id(fd: int) -> int:
    """The id, as in mountinfo, of the mount through which an open file was reached."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                return int(line[7:])
    raise ValueError(f"no mnt_id in /proc/self/fdinfo/{fd}")


def fd_path(fd: int) -> str:
    """The current path of an open file. The kernel follows renames; the path of a removed file ends in
    " (deleted)"."""
    return os.readlink(f"/proc/self/fd/{fd}")


def inside(fd: int, mounts: Mounts) -> tuple[Mount, Inside] | None:
    """The mount of an open file, and its place inside the filesystem; None if the mount is not in the
    table."""
    mount = mounts.of_fd(fd)
    if mount is None:
        return None
    path = fd_path(fd)
    if not contains(mount.point, path):
        return None
    return mount, mount.inside(path)
