"""Look at the machine, and record every question that decides what a plugin gets.

While a plan is made, `recording` notes every question and its answer (sandbox/facts.py). A later launch asks
the same questions again and takes the stored plan only if every answer is the same. So code that decides must
not ask `os` about a path: the change behind a question that was not noted goes unseen. A test checks all
deciding modules for that (tests/sandbox/test_look.py).

Each question is noted before it is asked, and of one that is asked again the first answer. If the answer
changes in between, the older one is noted, and the stored plan is not used.
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
# The names below /proc that are asked about and are the same for every process of one user.
_OWN_PROC_FILES = ("mountinfo", "cgroup", "uid_map", "gid_map", "ns/cgroup")
_PROC_FOLDERS = ("sys",)

_asked: AskedFacts | None = None


class AskedFacts:
    """The questions of one decision, with their answers."""

    def __init__(self) -> None:
        self.facts = Facts({}, {}, {}, {}, {}, {}, {}, {}, {})
        self.began = time.time()
        self.doubt = ""  # reason why the decision must not be stored, or ''
        self.again = ""  # reason why whoever uses it has to look again, or ''

    def place(self, path: str) -> None:
        """Note what is at a path and on the way to it, including links."""
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
        """Note a path below /proc, unless the name leads to a different file in each process."""
        first, _, rest = path.removeprefix("/proc/").partition("/")
        fixed = rest in _OWN_PROC_FILES if first == "self" else first in _PROC_FOLDERS or not rest
        if not fixed or first.isdecimal() or ".." in rest.split("/"):
            self.doubt = self.doubt or f"{path} means another file to each process"
            return
        self.facts.places.setdefault(path, facts.place(path))

    def identity(self, path: str, found: facts.Place) -> None:
        """Note which file is there, without its content. A link is noted as `place` does."""
        if len(found) > 2 and _stat.S_ISLNK(_mode(found)):
            self.place(path)
            return
        self.facts.identities.setdefault(path, found)
        above = path.rpartition("/")[0] or "/"
        if above not in self.facts.places:
            self.place(above)

    @staticmethod
    def _target(link: str) -> str | None:
        try:
            return os.readlink(link)
        except OSError:  # it was replaced meanwhile
            return None

    def storing_fault(self, *, looks_again: bool = False) -> str:
        """Reason why these facts must not be stored, or ''. A file that was changed shortly before it was
        looked at may change again without a new time stamp. `looks_again`: who uses them asks again what was
        asked in `looked_at_again`."""
        newest = int((self.began - SETTLED_SECONDS) * 1e9)
        dated = {path: found for path, found in self.facts.places.items() if len(found) == facts.DATED}
        for path, found in {**dated, **self.facts.listed}.items():
            if any(isinstance(when, int) and when > newest for when in found[-2:]):
                return f"{path} was changed a moment ago"
        return self.doubt or ("" if looks_again else self.again)


# File times are as coarse as the kernel's tick, and two seconds on some filesystems.
SETTLED_SECONDS = 2.0


def _mode(found: facts.Place) -> int:
    mode = found[2]
    assert isinstance(mode, int)
    return mode


@contextmanager
def recording(asked: AskedFacts | None = None) -> Iterator[AskedFacts]:
    """Note every question until the end of the context, beside those of `asked`. Contexts must not be
    nested."""
    global _asked
    assert _asked is None
    _asked = asked or AskedFacts()
    try:
        yield _asked
    finally:
        _asked = None


def doubt(why: str) -> None:
    """Mark the decision as not storable, because a later launch could not repeat a question cheaply."""
    if _asked is not None:
        _asked.doubt = _asked.doubt or why


@contextmanager
def looked_at_again(why: str) -> Iterator[None]:
    """Note nothing until the end of the context: whoever uses the decision asks all of it again. For what
    changes from launch to launch, such as a folder that the plugin may write. '': note as usual."""
    global _asked
    if not why:
        yield
        return
    held, _asked = _asked, None
    if held is not None:
        held.again = held.again or why
    try:
        yield
    finally:
        _asked = held


def note(path: str) -> None:
    """Note a path. For code that opens it step by step itself."""
    if _asked is not None:
        _asked.place(path if path.startswith("/") else os.path.join(os.getcwd(), path))


def note_identity(path: str) -> bool:
    """Note which file is at a path, for code that opens it itself and does not depend on its content. Returns
    whether there is one that can be seen."""
    found = facts.identity(path)
    if _asked is not None:
        _asked.identity(path, found)
    return len(found) > 1


def note_below(folder: int, name: str) -> None:
    """Note a name in an open folder."""
    if _asked is not None:
        _asked.place(os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name))


def note_listing(path: str) -> None:
    """Note all entries of a folder, for code that lists it itself."""
    if _asked is not None:
        _asked.facts.listed.setdefault(path, facts.listing(path))


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
    """As lexists, for a name below /proc whose existence depends on how the kernel was built."""
    if _asked is not None:
        _asked.facts.places.setdefault(path, facts.place(path))
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
    """As os.scandir, for names and file types: replacing an entry changes the folder's time."""
    note(path)
    note_listing(path)
    return os.scandir(path)


def access(path: str, mode: int, *, effective_ids: bool = False) -> bool:
    note(path)
    if _asked is not None:
        found = facts.access(path, mode, effective_ids)
        _asked.facts.access.setdefault((path, mode, effective_ids), found)
    return os.access(path, mode, effective_ids=effective_ids)


def getxattr(path: str, name: str) -> bytes:
    note(path)
    if _asked is not None:
        _asked.facts.attributes.setdefault((path, name), facts.attribute(path, name))
    return os.getxattr(path, name)


def statvfs(path: str) -> os.statvfs_result:
    """As os.statvfs, for the flags of a mount. mountinfo has them too, and every plan notes that file."""
    note(path)
    return os.statvfs(path)


def note_content(path: str) -> None:
    """Note the content of a file, for code that reads it itself."""
    note(path)
    if _asked is not None:
        _asked.facts.contents.setdefault(path, facts.content(path))


def note_alone(directory: str) -> None:
    """Note whether a cgroup has only processes of ours."""
    if _asked is not None:
        _asked.facts.alone.setdefault(directory, facts.is_alone(directory))


def home_of(who: int | str) -> str:
    """The home of an account that is not in /etc/passwd. Slow where NSS asks a directory server."""
    found = facts.home_of(who)
    if _asked is not None:
        _asked.facts.accounts.setdefault(who, found)
    return found


class Environ:
    """Environment variables that are noted when they are read. Behaves as a Mapping."""

    def __init__(self, environ: Mapping[str, str], questions: AskedFacts, label: str = "") -> None:
        self._environ = environ
        self._asked = questions
        self._label = label

    def _noted(self, name: str) -> str:
        found = facts.variable(self._environ.get(name))
        self._asked.facts.variables.setdefault(self._label + name, found)
        return name

    def _name_all(self) -> None:
        if not self._label:  # a host's names are part of what is asked for
            doubt("all variables count")

    def __getitem__(self, name: str) -> str:
        return self._environ[self._noted(name)]

    def __contains__(self, name: str) -> bool:
        return self._noted(name) in self._environ

    def get(self, name: str, default: Any = None) -> Any:
        return self._environ.get(self._noted(name), default)

    def __bool__(self) -> bool:
        return bool(self._environ)

    def __iter__(self) -> Iterator[str]:
        self._name_all()
        return iter(self._environ)

    def __len__(self) -> int:
        self._name_all()
        return len(self._environ)

    def keys(self) -> Any:
        self._name_all()
        return self._environ.keys()

    def items(self) -> Any:
        doubt("all variables count")
        return self._environ.items()

    def values(self) -> Any:
        doubt("all variables count")
        return self._environ.values()


def environment(environ: Mapping[str, str], label: str = "") -> Mapping[str, str]:
    """The variables, which are noted when they are read. `label`: before their names, if they are not those
    of this process."""
    if _asked is None:
        return environ
    return Environ(environ, _asked, label)  # type: ignore[return-value]  # it has all that a Mapping has
