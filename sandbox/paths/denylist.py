"""What nobody can allow.

The paths below are constants: a policy adds to them and has no way to take one away. Each is refused in
three directions (itself, what is below it, what is above it, since a bind shows everything below) and by
what it *is* rather than by how it is written: device and inode for renames, links and hard links, and the
path inside the filesystem for bind mounts, which share neither name nor parents with what they show.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from sandbox.paths.mounts import Inside, Mounts, ancestry, contains, fd_path, join
from sandbox.spec import Access
from sandbox.value import NamedTuple

# The nexo contract's hard denylist, in its order.
HOST_PATHS: tuple[str, ...] = (
    "/etc/shadow",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/proc/sys",
    "/proc/kcore",
    "/proc/kallsyms",
    "/sys/firmware",
    "/sys/kernel",
    "/dev/mem",
    "/dev/kmem",
    "/dev/port",
    "/var/run/docker.sock",
    "/run/docker.sock",
    "/private/var/run/docker.sock",
    "/root",
    "/boot",
)

# Where limits are kept. The plugin of an ordinary user has the uid to which its own memory.max belongs: it
# must not even see the place, neither here nor wherever else one of these filesystems is mounted.
CGROUP_PATHS: tuple[str, ...] = ("/sys/fs/cgroup",)
CGROUP_FILESYSTEMS = frozenset({"cgroup", "cgroup2", "cpuset", "fuse.lxcfs"})

# The contract's home list (which its reference defines and never applies) …
CONTRACT_HOME_PATHS: tuple[str, ...] = (
    ".aws",
    ".ssh",
    ".gnupg",
    ".netrc",
    ".docker",
    ".kube",
    ".cargo/credentials",
    ".cargo/credentials.toml",
    ".npmrc",
    ".config/gh",
    ".config/git",
)

# … and ours: places that hold credentials in the same way.
HOME_PATHS: tuple[str, ...] = (
    *CONTRACT_HOME_PATHS,
    ".azure",
    ".config/gcloud",
    ".config/rclone",
    ".config/containers/auth.json",
    ".git-credentials",
    ".pypirc",
    ".pgpass",
    ".my.cnf",
    ".vault-token",
    ".terraform.d",
    ".password-store",
    ".local/share/keyrings",
    ".local/share/kwalletd",
    ".pki",
    ".mozilla",
    ".thunderbird",
    ".config/google-chrome",
    ".config/chromium",
    ".bash_history",
    ".zsh_history",
    ".python_history",
)

# Refused with everything below: sockets of daemons live here, and a read-only bind does not stop connect().
SOCKET_PATHS: tuple[str, ...] = ("/run", "/var/run")

# Refused as a whole, while a directory below may be granted.
_HOME_BASES = ("/home", "/var/home", "/export/home", "/Users")
WHOLE_PATHS: tuple[str, ...] = ("/", "/tmp", "/var/tmp", "/dev", "/dev/shm", *_HOME_BASES)

# Refused for writing: what the host itself runs or obeys. A plugin that may write there is out of its cage
# at the next login, cron job or package trigger.
HOST_WRITE_PATHS: tuple[str, ...] = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/var/spool/cron",
)
HOME_WRITE_PATHS: tuple[str, ...] = (
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".profile",
    ".zshrc",
    ".zshenv",
    ".zprofile",
    ".zlogin",
    ".config/fish",
    ".config/autostart",
    ".config/systemd",
    ".config/environment.d",
    ".local/bin",
    ".local/share/applications",
    ".gitconfig",
    ".vimrc",
    ".config/nvim",
)

# passwd gives daemons homes such as /usr/sbin or /bin. Taking those for homes would refuse /usr to everyone.
_NOT_HOMES = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", "/proc", "/sys", "/nonexistent")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Identity = tuple[int, int]  # st_dev, st_ino
Origin = Literal["host", "cgroups", "home", "sockets", "whole", "execute", "deciding", "policy", "runner"]
Relation = Literal["equal", "below", "above"]


# --- by name --------------------------------------------------------------------------------------


def lexical_fault(path: str) -> str | None:
    """Why `path` cannot be judged by its name, as half a sentence; None if it can.

    ".." is refused rather than resolved: whether /a/../b is /b depends on what /a is at that moment.
    """
    if not path:
        return "is empty"
    if "\0" in path:
        return "contains a NUL byte"
    if not path.startswith("/"):
        return "is not absolute"
    if ".." in path.split("/"):
        return "contains '..'"
    if len(os.fsencode(path)) >= 4096:  # PATH_MAX, with its NUL
        return "is longer than 4095 bytes"
    return None


def normal(path: str) -> str:
    """`path` without empty and "." segments and without a trailing slash. For paths without a fault."""
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def relation(path: str, denied: str) -> Relation | None:
    if path == denied:
        return "equal"
    if contains(denied, path):
        return "below"
    if contains(path, denied):
        return "above"
    return None


def lexical_hit(path: str, homes: Sequence[str] = (), extra: Sequence[str] = ()) -> str | None:
    """The denied path that `path` equals, lies below or lies above, judged by name alone."""
    wanted = normal(path)
    for denied in (*HOST_PATHS, *CGROUP_PATHS, *_home_paths(homes), *extra):
        if relation(wanted, normal(denied)):
            return denied
    return None


def _home_paths(homes: Iterable[str]) -> Iterator[str]:
    return (join(home, rest) for home in homes for rest in HOME_PATHS)


# --- homes ----------------------------------------------------------------------------------------


class _Account(NamedTuple):
    name: str
    uid: int
    home: str


def _accounts(passwd: str) -> list[_Account]:
    """Read directly: through NSS a directory server could be asked, which is slow and can hang."""
    try:
        with open(passwd, "rb") as file:
            lines = file.read(4 << 20).split(b"\n")
    except OSError:
        return []
    accounts = []
    for line in lines:
        fields = line.split(b":")
        if len(fields) == 7 and fields[2].isdigit():
            accounts.append(_Account(os.fsdecode(fields[0]), int(fields[2]), os.fsdecode(fields[5])))
    return accounts


def _is_person(account: _Account) -> bool:
    """Not a daemon's: by the uid distributions start people at (65534 is nobody), or by where it lives."""
    return (account.uid >= 1000 and account.uid != 65534) or account.home.startswith("/home/")


def _looked_up(who: int | str) -> list[str]:
    """The home of an account that is not in /etc/passwd: of a directory server, or systemd's. Asked only for
    the one or two accounts that matter: to list all of them could take for ever."""
    import pwd

    try:
        return [(pwd.getpwuid(who) if isinstance(who, int) else pwd.getpwnam(who)).pw_dir]
    except (KeyError, ValueError, OSError):
        return []


def _directories_in(base: str) -> list[str]:
    try:
        return [join(base, name) for name in os.listdir(base) if os.path.isdir(join(base, name))]
    except OSError:
        return []


def homes(
    environ: Mapping[str, str],
    *,
    euid: int | None = None,
    passwd: str = "/etc/passwd",
    bases: Sequence[str] = _HOME_BASES,
) -> tuple[str, ...]:
    """Whose credentials are at stake: the runner's user, who called sudo, and for root everybody.

    Both the written and the resolved form of each, since /home/u may be a link to /data/u.
    """
    uid = os.geteuid() if euid is None else euid
    accounts = _accounts(passwd)
    found = [environ.get("HOME", "")]
    found += [a.home for a in accounts if a.uid == uid] or _looked_up(uid)
    sudo_user = environ.get("SUDO_USER", "")
    if sudo_user:
        found += [a.home for a in accounts if a.name == sudo_user] or _looked_up(sudo_user)
    if uid == 0:
        # Those that exist: each costs half a millisecond, and an empty account has nothing to protect.
        found += [a.home for a in accounts if _is_person(a) and os.path.isdir(a.home)]
        # Not every account is in /etc/passwd, and a directory there is somebody's.
        found += [home for base in bases for home in _directories_in(base)]
    unique: dict[str, None] = {}
    for home in found:
        if lexical_fault(home) is not None:
            continue
        home = normal(home)
        if any(contains(system, home) for system in _NOT_HOMES):
            continue
        unique[home] = None
        unique[os.path.realpath(home)] = None
    return tuple(unique)


# --- by identity ----------------------------------------------------------------------------------


class Entry(NamedTuple):
    path: str
    origin: Origin
    whole_only: bool = False  # what lies below is not refused
    write_only: bool = False  # reading is not refused

    def applies(self, relation: Relation, access: Access) -> bool:
        return not (self.whole_only and relation == "below") and not (self.write_only and access == "read")


class Hit(NamedTuple):
    denied: Entry
    relation: Relation
    how: Literal["name", "identity", "mount", "mount below", "hard link"]

    def sentence(self) -> str:
        place = {"equal": "is", "below": "lies below", "above": "contains"}[self.relation]
        said = {
            "name": f"it {place} {self.denied.path}",
            "identity": f"what it opens {place} {self.denied.path}",
            "mount": f"it is a mount of something that {place} {self.denied.path}",
            "mount below": f"a mount below it shows something that {place} {self.denied.path}",
            "hard link": f"it holds a hard link to a file of {self.denied.path}",
        }[self.how]
        why = {
            "host": "which no policy can allow",
            "cgroups": "where limits are kept: a plugin could raise its own",
            "home": "which holds credentials and which no policy can allow",
            "sockets": "where daemons keep their sockets",
            "whole": "which is never given away as a whole",
            "execute": "which the host itself runs or obeys and nobody may write",
            "deciding": "which decides what the plugin may do: it would write its own next grant",
            "policy": "which this policy denies",
            "runner": "which is the runner's own",
        }[self.denied.origin]
        return f"{said}, {why}"


class Place(NamedTuple):
    """Everything an opened source is known by."""

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

    __slots__ = ("_above", "_at", "_inodes", "_inside", "_names", "_roots", "_walked", "entries", "mounts")

    def __init__(
        self,
        mounts: Mounts,
        *,
        homes: Sequence[str] = (),
        policy: Iterable[str] = (),
        runner: Iterable[str] = (),
        protected: Iterable[str] = (),
        deciding: Iterable[str] = (),
        runtime_dir: str | None = None,
    ) -> None:
        """`policy` and `runner` are denied like the constants; `protected` only for writing, as the runner's
        own code and bwrap are, and so are the `deciding` files, manifest and policy. `runtime_dir` is
        $XDG_RUNTIME_DIR."""
        self.mounts = mounts
        entries = [Entry(path, "host") for path in HOST_PATHS]
        entries += [Entry(path, "cgroups") for path in _cgroup_places(mounts)]
        entries += [Entry(path, "home") for path in _home_paths(homes)]
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
        entries += [Entry(normal(path), "runner") for path in runner]
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
            if stat.S_ISDIR(status.st_mode) and walked and entry.origin != "cgroups":  # which has no links
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
        """Judged by name alone: for a path that was not opened yet, or does not exist."""
        for found, entry in self._names.related("", normal(name)):
            if entry.applies(found, access):
                return Hit(entry, found, "name")
        return None

    def hit(self, place: Place, access: Access = "read", *, own_state: bool = False) -> Hit | None:
        """What of the denylist this source is, lies below of, or shows.

        `own_state`: the source is the asking plugin's own state directory, which lies below a directory
        that is the runner's. Only the runner's own entries make way for it.
        """
        for found in self._hits(place):
            if not found.denied.applies(found.relation, access):
                continue
            if own_state and found.denied.origin == "runner" and found.relation == "below":
                continue
            return found
        return None

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

    # Hard links. A file below a denied directory may have a second name anywhere on its filesystem.

    def file_hit(self, identity: Identity, access: Access) -> Hit | None:
        """A denied *file* under another name: no walk needed."""
        for entry in self._at.get(identity, ()):
            if entry.applies("equal", access):
                return Hit(entry, "equal", "hard link")
        return None

    def linked(
        self, wanted: Mapping[Identity, str], *, devices: Iterable[str], limit: int
    ) -> tuple[str, Hit] | None:
        """Which of `wanted` (files with several names) has one of them below a denied directory.

        Walks the denied directories on the same filesystems (`devices`, as mountinfo names them), each at
        most once per launch and only when a source holds such files, comparing the inode numbers that
        getdents gives without a stat. Raises Unproven beyond `limit` entries.
        A directory the runner may not list is left out: link(2) needs search permission on the path to
        the file, so whoever could have made such a link is not the one the runner is protecting from.
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
    """The usual place, and where there is a mount elsewhere. By name each stands for all below it."""
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
            status = os.stat(path)
        except OSError:
            continue
        found.append((status.st_dev, status.st_ino))
    return found


# Reasons to leave a directory out: not ours to list, or gone. Any other failure (too many open files)
# would make "found nothing" a lie.
_NOT_LISTED = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def _entries_below(root: str) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """Everything below `root` with the fd of its directory, never through a link."""
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
