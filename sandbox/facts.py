"""Facts: what a decision found on the machine, and whether that is still so.

A fact is the answer to one question about a path, a kernel file or a variable. Facts are plain values
and can be stored. `sandbox/look.py` notes them while a plan is made. `Facts.changed` asks each again.
"""

from __future__ import annotations

import os

from sandbox.speed.typed import TYPE_CHECKING
from sandbox.speed.value import NamedTuple

try:
    from _blake2 import blake2b
except ImportError:  # another Python than CPython
    from hashlib import blake2b

if TYPE_CHECKING:
    from sandbox.speed.typed import Iterable, Iterator, Mapping

_KIND = 0o170000
_DIRECTORY = 0o040000
_LINK = 0o120000
_REGULAR = 0o100000

# File times there are made up by the kernel, and /proc/self differs from process to process.
_PROC, _SYS = "/proc/", "/sys/"
_CGROUPS = "/sys/fs/cgroup/"
_DIGEST_BYTES = 32
_MOST_ENVIRON_BYTES = 4 << 20

# Before the name of a variable of the host that started an entry. The runner has dropped these itself.
HOST_VARIABLE = "host "

Place = tuple[object, ...]
DATED = 6  # number of fields of a place that includes file times


class Facts(NamedTuple):
    """All facts that one decision depends on, by the kind of question."""

    places: dict[str, Place]  # what is at each path
    listed: dict[str, Place]  # folders of which every name counts
    contents: dict[str, bytes]  # digests of whole files
    access: dict[tuple[str, int, bool], bool]
    attributes: dict[tuple[str, str], bytes]  # digests
    alone: dict[str, bool]  # whether all members of a cgroup are ours
    variables: dict[str, bytes]  # digests
    accounts: dict[int | str, str]  # the homes of accounts that had to be looked up
    identities: dict[str, Place]  # which file is at a path, without its content

    def changed(self, environ: Mapping[str, str]) -> str:
        """Name the first path, variable or account that has changed, or ''. Cheap questions come first."""
        for name, digest in self.variables.items():
            if variable(environ.get(name)) != digest:
                return f"${name}"
        for path, was in self.places.items():
            if place(path) != was:
                return path
        for path, was in self.identities.items():
            if identity(path) != was:
                return path
        for path, was in self.listed.items():
            if listing(path) != was:
                return path
        for path, digest in self.contents.items():
            if content(path) != digest:
                return path
        for (path, mode, effective), allowed in self.access.items():
            if access(path, mode, effective) != allowed:
                return path
        for (path, name), digest in self.attributes.items():
            if attribute(path, name) != digest:
                return path
        for path, alone in self.alone.items():
            if is_alone(path) != alone:
                return path
        for who, home in self.accounts.items():
            if home_of(who) != home:
                return f"the account {who}"
        return ""


def place(path: str) -> Place:
    """Describe what is at a path, without following a link at its end.

    The entries of a folder do not count. The content of a file counts by its size and times. Below /proc only
    the file type counts.
    """
    try:
        held = os.lstat(path)
    except OSError as error:
        return (error.errno,)
    except ValueError:  # a NUL: no path
        return ()
    mode = held.st_mode
    kind = mode & _KIND
    if path.startswith(_PROC):
        return (kind,)
    if kind == _DIRECTORY:
        if path.startswith(_CGROUPS):  # a cgroup that was removed and made again counts as the same
            return held.st_dev, 0, mode, held.st_uid, held.st_gid
        return held.st_dev, held.st_ino, mode, held.st_uid, held.st_gid
    if kind not in (_REGULAR, _LINK) or (kind == _REGULAR and path.startswith(_SYS)):
        return held.st_rdev, 0, mode, held.st_uid, held.st_gid
    return held.st_dev, held.st_ino, mode, held.st_size, held.st_mtime_ns, held.st_ctime_ns


def identity(path: str) -> Place:
    """Identify the file or folder at a path, without following a link at its end."""
    try:
        held = os.lstat(path)
    except OSError as error:
        return (error.errno,)
    return held.st_dev, held.st_ino, held.st_mode, held.st_uid, held.st_gid


def listing(path: str) -> Place:
    """Identify a folder, with the time at which an entry was last added or removed."""
    try:
        held = os.stat(path)
    except OSError as error:
        return (error.errno,)
    return held.st_dev, held.st_ino, held.st_mode, held.st_mtime_ns, held.st_ctime_ns


def content(path: str) -> bytes:
    """Digest a regular file. Anything else gives a constant: it is not opened, because opening a FIFO can
    block and opening a device can have effects."""
    try:
        if os.stat(path).st_mode & _KIND != _REGULAR:
            return b""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        return b"%d" % (error.errno or 0)
    except ValueError:  # a NUL: no path
        return b""
    try:
        read = blake2b(digest_size=_DIGEST_BYTES)
        while part := os.read(fd, 1 << 16):
            read.update(part)
    except OSError as error:
        return b"%d" % (error.errno or 0)
    finally:
        os.close(fd)
    return bytes(read.digest())


def access(path: str, mode: int, effective: bool) -> bool:
    try:
        return os.access(path, mode, effective_ids=effective)
    except (OSError, ValueError):
        return False


def attribute(path: str, name: str) -> bytes:
    try:
        return digest(os.getxattr(path, name))
    except OSError as error:
        return b"%d" % (error.errno or 0)


def is_alone(directory: str) -> bool:
    """Whether no process is in a cgroup but ours."""
    return not strangers(members(directory), 1)


def members(directory: str) -> list[int]:
    """List the processes directly in a cgroup. 0 stands for one that our pid namespace does not show."""
    try:
        with open(f"{directory}/cgroup.procs", "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


# The process that started all our others: the command `runner`, or a host's fork server. 0: this process. It
# counts only while it is an ancestor of this one, because its pid may be reused later.
first_of_ours = 0


def strangers(pids: Iterable[int], most: int | None = None) -> list[int]:
    """Return those of `pids` that are not ours, at most `most`. Ours are `first_of_ours` and its
    descendants."""
    first = me = os.getpid()
    others = [pid for pid in pids if pid != me]
    parents: dict[int, int] = {}
    if others and first_of_ours and first_of_ours in _ancestry(me, parents):
        first = first_of_ours
    found: list[int] = []
    for pid in others:
        if len(found) == most:
            break
        if first not in _ancestry(pid, parents) and _exists(pid):
            found.append(pid)
    return found


def is_of_this_user(pid: int) -> bool:
    """Whether all uids of a process (real, effective, saved, file system) are our effective uid."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            uids = next(line for line in file if line.startswith(b"Uid:")).split()[1:]
    except (OSError, StopIteration):
        return False
    return {int(uid) for uid in uids} == {os.geteuid()}


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:  # it has ended since the group was read
        return False
    except OSError:  # it is another user's
        return True
    return True


def _ancestry(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """Yield a process and its ancestors, as far as they can be seen. `parents` caches what was read."""
    while pid > 0:
        yield pid
        if pid not in parents:
            parents[pid] = _parent(pid)
        pid = parents[pid]


def _parent(pid: int) -> int:
    """The parent's pid; 0 if there is none, or it cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b") ")[2].split()[1])
    except (OSError, IndexError):
        return 0


def search_path_of(pid: int) -> str:
    """The PATH that a process was started with; '' if it has none, or it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read(_MOST_ENVIRON_BYTES).split(b"\0")
    except OSError:
        return ""
    return next((os.fsdecode(pair[5:]) for pair in pairs if pair.startswith(b"PATH=")), "")


def home_of(who: int | str) -> str:
    """The home of an account, by uid or name, from any source that NSS knows; '' if there is none."""
    import pwd

    try:
        return (pwd.getpwuid(who) if isinstance(who, int) else pwd.getpwnam(who)).pw_dir
    except (KeyError, ValueError, OSError):
        return ""


def variable(value: str | None) -> bytes:
    return b"" if value is None else digest(os.fsencode(value))


def digest(raw: bytes) -> bytes:
    return bytes(blake2b(raw, digest_size=_DIGEST_BYTES).digest())
