"""Results stored between launches: small files in a directory of the user's own.

A directory that others can write to, or a link, is not used. A cache that cannot be written is no error. An
entry that is damaged, or not the user's own, counts as missing. What an entry depends on is part of its name,
or is listed in the entry and compared when it is read: our own code (`code_marks`), the facts of a plan. So
no entry has to be removed when something changes. When there are too many, the oldest are removed.

Where the user's own directory cannot be written, as in a read-only image, one named by uid in /run (root) or
/tmp is used. `directory` decides which. No plugin is ever given it.
"""

from __future__ import annotations

import os
import stat

from sandbox import CODE_ROOT
from sandbox.speed.typed import Iterable
from sandbox.speed.value import NamedTuple

try:
    # hashlib loads OpenSSL to offer what CPython has built in: 3 ms of a launch.
    from _blake2 import blake2b
except ImportError:  # another Python than CPython
    from hashlib import blake2b

ENTRIES = 256
# The part of a name before a dash is its family. Each family has its own limit, so that a plugin started with
# different arguments each time does not push out the entries that all launches use.
FAMILY_ENTRIES = 64
_FORMAT = b"2"  # how values are written in entries: sandbox/speed/codec.py, pack
ENTRY_LIMIT = 8 << 20
_LONGEST_DIGEST = 128  # bytes in front of an entry

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_ENTRY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_ENTRY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# Parents of the fallback directory: for root, and for all other users.
_SHARED = ("/run", "/tmp")


def directory() -> str | None:
    """The directory for entries, whether or not it exists yet. None: there is none, or the cache is off."""
    if os.environ.get("RUNNER_CACHE", "").lower() == "off":
        return None
    own = _own_directory()
    if own is None or _can_be_written(own):
        return own
    uid = os.geteuid()
    return f"{_SHARED[uid != 0]}/runner-cache-{uid}"


def every_directory(homes: Iterable[str]) -> tuple[str, ...]:
    """Every directory where this user may have a cache. Entries there are trusted, so no plugin gets one, not
    even while the cache is off or elsewhere. `homes`: home directories."""
    own = _own_directory()
    places = [f"{shared}/runner-cache-{os.geteuid()}" for shared in _SHARED]
    places += ["/var/cache/runner", *(f"{home}/.cache/runner" for home in homes)]
    return tuple(dict.fromkeys(places if own is None else (own, *places)))


def unusable(path: str) -> str:
    """Reason why nothing can be stored in `path`, a result of `directory`, or ''. Creates nothing."""
    parent = os.path.dirname(path)
    if os.path.lexists(path):
        try:
            os.close(_open_checked(path))
        except (OSError, ValueError) as error:
            return getattr(error, "strerror", None) or str(error)
        return "" if os.access(path, os.W_OK | os.X_OK) else "it cannot be written"
    if parent in _SHARED and not _can_be_written(path):
        return f"{parent} cannot be written"
    return ""


def _own_directory() -> str | None:
    if os.geteuid() == 0:
        return "/var/cache/runner"
    # A relative XDG_CACHE_HOME is invalid by its specification and ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "runner") if base.startswith("/") else None


def _can_be_written(path: str) -> bool:
    """Whether `path` can be written or, if it does not exist, the directory it would be made in."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


class CodeMark(NamedTuple):
    """The state of one of our source files. In a checkout they change without a new version."""

    file: str  # below CODE_ROOT
    size: int
    changed: int  # st_mtime_ns


def fingerprint(*parts: bytes) -> str:
    """Digest the parts into 64 hexadecimal digits. Each part counts with its length, so that moving a border
    between two parts changes the result."""
    digest = blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return str(digest.hexdigest())


def code_marks(*modules: str, alone: Iterable[str] = ()) -> tuple[CodeMark, ...]:
    """Marks of these modules and of all our modules that they import, directly or not. `alone`: modules whose
    imports do not count.

    The imports are read from the source, so that no list has to be maintained. Called only to store an entry.
    """
    import re

    statement = re.compile(
        r"^\s*(?:from ([\w.]+) import (?:\(([^)]*)\)|([^\n(]*))|import ([\w.]+))", re.MULTILINE
    )
    found: dict[str, CodeMark] = {}
    # runner/__init__.py names the whole library, for programs, and imports none of it by itself.
    leaves = {"runner/__init__.py", *(_source_of(module) for module in alone)}
    waiting = [*modules, *alone]
    for module in waiting:
        if _source_of(module) is None:
            raise FileNotFoundError(f"there is no module {module} below {CODE_ROOT}")
    while waiting:
        file = _source_of(waiting.pop())
        if file is None or file in found:
            continue
        path = os.path.join(CODE_ROOT, file)
        status = os.stat(path)
        found[file] = CodeMark(file, status.st_size, status.st_mtime_ns)
        if file in leaves:
            continue
        with open(path, encoding="utf-8") as source:
            text = source.read()
        for package, several, single, module in statement.findall(text):
            top = module or package
            if top.partition(".")[0] in ("runner", "sandbox"):
                names = (several or single).split(",")
                waiting += [top, *(f"{package}.{name.split()[0]}" for name in names if name.strip())]
    return tuple(found[file] for file in sorted(found))


def _source_of(module: str) -> str | None:
    """The file of a module. None: the last part is a name inside a module."""
    stem = module.replace(".", "/")
    for file in (f"{stem}.py", f"{stem}/__init__.py"):
        if os.path.isfile(os.path.join(CODE_ROOT, file)):
            return file
    return None


def is_current(marks: Iterable[CodeMark]) -> bool:
    """Whether all of these files are unchanged."""
    for mark in marks:
        try:
            status = os.stat(os.path.join(CODE_ROOT, mark.file))
        except OSError:
            return False
        if (status.st_size, status.st_mtime_ns) != (mark.size, mark.changed):
            return False
    return True


def load(name: str) -> bytes | None:
    """The entry of that name. None: there is none, or it is damaged."""
    folder = _open_directory(create=False)
    if folder is None:
        return None
    try:
        raw = _read(folder, name)
    except OSError:
        return None
    finally:
        os.close(folder)
    digest, _, entry = (raw or b"").partition(b"\n")
    return entry if digest == _digest(name, entry) else None


def store(name: str, entry: bytes) -> None:
    """Store an entry, if possible."""
    if len(entry) > ENTRY_LIMIT - _LONGEST_DIGEST:  # `load` would refuse it
        return
    folder = _open_directory(create=True)
    if folder is None:
        return
    temporary = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        descriptor = os.open(temporary, _CREATE_ENTRY, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(_digest(name, entry) + b"\n" + entry)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(temporary, dir_fd=folder)
            raise
        _prune(folder, _family(name))
    except OSError:
        pass
    finally:
        os.close(folder)


def remove(name: str) -> None:
    """Remove an entry, if possible."""
    folder = _open_directory(create=False)
    if folder is None:
        return
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass
    finally:
        os.close(folder)


def _digest(name: str, entry: bytes) -> bytes:
    """Covers the name, so that a renamed entry is not read, and the format, so that entries of an older
    runner are not read."""
    return fingerprint(_FORMAT, name.encode(), entry).encode()


def _open_directory(*, create: bool) -> int | None:
    path = directory()
    if path is None:
        return None
    try:
        if create:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass
        return _open_checked(path)
    except (OSError, ValueError):
        return None


def _open_checked(path: str) -> int:
    """Open a cache directory. Raises OSError, and ValueError if others can write to it."""
    parent, name = os.path.split(path)
    shared = os.open(parent, _OPEN_DIRECTORY) if parent in _SHARED else None
    try:
        if shared is not None:
            _check_shared(os.fstat(shared), parent)
        # Relative to the parent that was checked, without following a link.
        folder = os.open(path if shared is None else name, _OPEN_DIRECTORY, dir_fd=shared)
    finally:
        if shared is not None:
            os.close(shared)
    status = os.fstat(folder)
    if _is_ours(status) and (shared is None or not status.st_mode & 0o077):
        return folder
    os.close(folder)
    raise ValueError("it belongs to somebody else, or others can use it")


def _check_shared(status: os.stat_result, parent: str) -> None:
    """Without the sticky bit, any user that can write to the parent could replace our directory."""
    if status.st_uid not in (0, os.geteuid()) or (
        status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    ):
        raise ValueError(f"others can replace what lies in {parent}")


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(folder: int, name: str) -> bytes | None:
    descriptor = os.open(name, _OPEN_ENTRY, dir_fd=folder)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status) or status.st_size > ENTRY_LIMIT:
            return None
        return file.read(ENTRY_LIMIT)


def _family(name: str) -> str:
    return name.lstrip(".").rpartition("-")[0]


def _prune(folder: int, family: str) -> None:
    """Remove the oldest entries beyond the limit, including temporary files of killed writers."""
    names = [name for name in os.listdir(folder) if _family(name) == family]
    most = FAMILY_ENTRIES if family else ENTRIES
    if len(names) <= most:
        return
    ages: list[tuple[int, str]] = []
    for name in names:
        try:
            ages.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
        except FileNotFoundError:
            continue
    for _, name in sorted(ages)[: len(ages) - most]:
        try:
            os.unlink(name, dir_fd=folder)
        except (FileNotFoundError, IsADirectoryError):
            continue
