"""Questions about the machine that decide what a plugin gets. Asked here, each can be noted.

While a plan is made, `recording` notes every question and its answer (sandbox/facts.py). A later launch asks
the same questions again and takes the stored plan only if every answer is the same. So code that decides must
not ask `os` directly about a path: a question that is not noted is a change that is not seen. A test holds
all modules of the decision to that (tests/sandbox/test_look.py).

Each question is noted before it is asked. If the answer changes in between, the noted one is the older, and
the stored plan does not hold.
"""

from __future__ import annotations

import os
import stat as _stat
import time

from sandbox import facts
from sandbox.facts import Facts
from sandbox.speed.scopes import contextmanager
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.speed.typed import Iterator, Mapping

_LINKS = 40  # as many as the kernel follows
# Below /proc: what is asked about, and is the same for every process of one user.
_OWN_PROC_FILES = ("mountinfo", "cgroup", "uid_map", "gid_map", "ns/cgroup")
_PROC_FOLDERS = ("sys",)

_asked: Asked | None = None


class Asked:
    """The questions of one decision."""

    def __init__(self) -> None:
        self.facts = Facts({}, {}, {}, {}, {}, {}, {}, {}, {})
        self.began = time.time()
        self.doubt = ""  # why nothing may be kept; empty: it may

    def place(self, path: str) -> None:
        """Note what stands at a path and on the way to it, links included."""
        places = self.facts.places
        waiting = [path]
        followed = 0
        while waiting:
            path = waiting.pop()
            if path.startswith("/proc/"):
                self._kernel_place(path)
                continue
            if path.startswith("/sys/") and ".." in path.split("/"):
                self.doubt = self.doubt or f"{path} leads out of /sys"  # its facts are of another kind
                return
            while path and path not in places:
                places[path] = found = facts.place(path)
                above, _, _ = path.rpartition("/")
                if len(found) > 2 and _stat.S_ISLNK(_mode(found)):
                    followed += 1
                    target = self._target(path)
                    if target is None or followed > _LINKS:
                        self.doubt = self.doubt or f"{path} leads nowhere"
                        return
                    waiting.append(target if target.startswith("/") else f"{above}/{target}")
                path = above

    def _kernel_place(self, path: str) -> None:
        """Below /proc a name may mean another file to each process, and to this one at another time."""
        first, _, rest = path.removeprefix("/proc/").partition("/")
        fixed = rest in _OWN_PROC_FILES if first == "self" else first in _PROC_FOLDERS or not rest
        if not fixed or first.isdecimal() or ".." in rest.split("/"):
            self.doubt = self.doubt or f"{path} means another file to each process"
            return
        self.facts.places[path] = facts.place(path)

    def identity(self, path: str) -> None:
        """Note which file it is, and not what is in it. A link is noted as `place` does."""
        found = facts.identity(path)
        if len(found) > 2 and _stat.S_ISLNK(_mode(found)):
            self.place(path)
            return
        self.facts.identities[path] = found
        self.place(os.path.dirname(path))

    @staticmethod
    def _target(link: str) -> str | None:
        try:
            return os.readlink(link)
        except OSError:  # it was replaced meanwhile
            return None

    def settle(self) -> str:
        """Why these facts may not be kept; empty if they may. A file that was changed at nearly the same time
        as it was looked at may change once more without another time."""
        newest = int((self.began - SETTLED_SECONDS) * 1e9)
        dated = {path: found for path, found in self.facts.places.items() if len(found) == facts.DATED}
        for path, found in {**dated, **self.facts.listed}.items():
            if any(isinstance(when, int) and when > newest for when in found[-2:]):
                return f"{path} was changed a moment ago"
        return self.doubt


# The times of files are as coarse as the kernel's tick, on some filesystems two seconds.
SETTLED_SECONDS = 2.0


def _mode(found: facts.Place) -> int:
    mode = found[2]
    assert isinstance(mode, int)
    return mode


@contextmanager
def recording() -> Iterator[Asked]:
    """Note every question until the end of the context. Not for two decisions at once."""
    global _asked
    assert _asked is None
    _asked = Asked()
    try:
        yield _asked
    finally:
        _asked = None


def doubt(why: str) -> None:
    """Something was decided by what cannot be asked again, or not cheaply: nothing is kept."""
    if _asked is not None:
        _asked.doubt = _asked.doubt or why


def note(path: str) -> None:
    """For code that opens a path step by step itself."""
    if _asked is not None:
        _asked.place(path if path.startswith("/") else os.path.join(os.getcwd(), path))


def note_identity(path: str) -> None:
    """For code that opens a path itself and asks only which file it is: its content may change."""
    if _asked is not None:
        _asked.identity(path)


def note_below(folder: int, name: str) -> None:
    """For code that asks about a name in an open folder."""
    if _asked is not None:
        _asked.place(os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name))


def note_listing(path: str) -> None:
    """For code that looks at all entries of a folder itself."""
    if _asked is not None:
        _asked.facts.listed[path] = facts.listing(path)


def lstat(path: str) -> os.stat_result:
    note(path)
    return os.lstat(path)


def stat(path: str) -> os.stat_result:
    note(path)
    return os.stat(path)


def exists(path: str) -> bool:
    note(path)
    return os.path.exists(path)


def lexists(path: str) -> bool:
    note(path)
    return os.path.lexists(path)


def kernel_lexists(path: str) -> bool:
    """For a name below /proc that exists, or not, by how the kernel was built."""
    if _asked is not None:
        _asked.facts.places[path] = facts.place(path)
    return os.path.lexists(path)


def isdir(path: str) -> bool:
    note(path)
    return os.path.isdir(path)


def isfile(path: str) -> bool:
    note(path)
    return os.path.isfile(path)


def islink(path: str) -> bool:
    note(path)
    return os.path.islink(path)


def realpath(path: str) -> str:
    note(path)
    return os.path.realpath(path)


def readlink(path: str) -> str:
    note(path)
    return os.readlink(path)


def listdir(path: str) -> list[str]:
    note(path)
    note_listing(path)
    return os.listdir(path)


def scandir(path: str) -> os._ScandirIterator[str]:
    """As os.scandir, for the names in it and their kinds: a name that becomes something else changes the
    folder's time."""
    note(path)
    note_listing(path)
    return os.scandir(path)


def access(path: str, mode: int, *, effective_ids: bool = False) -> bool:
    note(path)
    if _asked is not None:
        _asked.facts.access[path, mode, effective_ids] = facts.access(path, mode, effective_ids)
    return os.access(path, mode, effective_ids=effective_ids)


def getxattr(path: str, name: str) -> bytes:
    note(path)
    if _asked is not None:
        _asked.facts.attributes[path, name] = facts.attribute(path, name)
    return os.getxattr(path, name)


def statvfs(path: str) -> os.statvfs_result:
    """Of a mount: its flags, which mountinfo tells too, and which is noted whenever a plan is made."""
    note(path)
    return os.statvfs(path)


def note_content(path: str) -> None:
    """For code that reads a file itself: its content counts."""
    note(path)
    if _asked is not None:
        _asked.facts.contents[path] = facts.content(path)


def note_alone(directory: str) -> None:
    """For code that asks who is in a cgroup beside us."""
    if _asked is not None:
        _asked.facts.alone[directory] = facts.is_alone(directory)


def home_of(who: int | str) -> str:
    """The home of an account that is not in /etc/passwd. Slow where a directory server is asked."""
    found = facts.home_of(who)
    if _asked is not None:
        _asked.facts.accounts[who] = found
    return found


class Environ:
    """Variables of a process; each that is looked at is noted. Behaves as a Mapping."""

    def __init__(self, environ: Mapping[str, str], asked: Asked) -> None:
        self._environ = environ
        self._asked = asked

    def _noted(self, name: str) -> str:
        self._asked.facts.variables[name] = facts.variable(self._environ.get(name))
        return name

    def __getitem__(self, name: str) -> str:
        return self._environ[self._noted(name)]

    def __contains__(self, name: str) -> bool:
        return self._noted(name) in self._environ

    def get(self, name: str, default: Any = None) -> Any:
        return self._environ.get(self._noted(name), default)

    def __bool__(self) -> bool:
        return bool(self._environ)

    def __iter__(self) -> Iterator[str]:
        doubt("all variables count")
        return iter(self._environ)

    def __len__(self) -> int:
        doubt("all variables count")
        return len(self._environ)

    def keys(self) -> Any:
        doubt("all variables count")
        return self._environ.keys()

    def items(self) -> Any:
        doubt("all variables count")
        return self._environ.items()

    def values(self) -> Any:
        doubt("all variables count")
        return self._environ.values()


def environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables, noted as they are looked at."""
    if _asked is None:
        return environ
    return Environ(environ, _asked)  # type: ignore[return-value]  # it has all that a Mapping has
