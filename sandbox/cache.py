"""What was worked out before, by name: small files in a directory of the user's own.

A directory that others can write to, or a link, is not used. Being unable to write is no fault, and an entry
that cannot be trusted is no entry. Names are fingerprints of everything an entry depends on, so
nothing here ever goes stale: it is only forgotten, the oldest first.

Where the user's own directory cannot be written, as in a read-only image, one named by uid in /run (root) or
/tmp is used. There is never more than one: `directory` decides, and what it names no plugin is given.
"""

from __future__ import annotations

import os
import stat

ENTRIES = 256
ENTRY_LIMIT = 8 << 20

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_ENTRY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_ENTRY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# For who has no directory of their own that can be written: root, and everybody else.
_SHARED = ("/run", "/tmp")


def directory() -> str | None:
    """Where entries are kept, whether or not it exists yet. None: there is no such place, or it is off."""
    if os.environ.get("RUNNER_CACHE", "").lower() == "off":
        return None
    own = _own_directory()
    if own is None or _can_be_written(own):
        return own
    uid = os.geteuid()
    return f"{_SHARED[uid != 0]}/runner-cache-{uid}"


def unusable(path: str) -> str:
    """Why nothing can be kept in `path`, which `directory` gave; empty if it can. Makes nothing."""
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
    """`path`, or where it does not exist the directory in which it would be made."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


def code_mark(*files: str) -> str:
    """Size and time of modules an entry depends on: in a checkout they change without a new version."""
    marks = []
    for file in files:
        try:
            status = os.stat(file)
        except OSError:
            continue  # not installed as files: then the version says it all
        marks.append(f"{file}:{status.st_size}:{status.st_mtime_ns}")
    return "\n".join(marks)


def load(name: str) -> dict[str, object] | None:
    """The entry of that name, or None if there is none to be trusted."""
    folder = _open_directory(create=False)
    if folder is None:
        return None
    try:
        raw = _read(folder, f"{name}.json")
    except OSError:
        return None
    finally:
        os.close(folder)
    if raw is None:
        return None
    import json

    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.pop("key", None) != name:
        return None
    return entry


def store(name: str, entry: dict[str, object]) -> None:
    """Keep an entry, if that is possible."""
    folder = _open_directory(create=True)
    if folder is None:
        return
    import json

    temporary = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        raw = json.dumps({"key": name, **entry}, separators=(",", ":")).encode()
        descriptor = os.open(temporary, _CREATE_ENTRY, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(raw)
            os.rename(temporary, f"{name}.json", src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(temporary, dir_fd=folder)
            raise
        _prune(folder)
    except (OSError, ValueError):
        pass
    finally:
        os.close(folder)


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
    """Raises OSError, and ValueError if it is not ours alone to write."""
    parent, name = os.path.split(path)
    shared = os.open(parent, _OPEN_DIRECTORY) if parent in _SHARED else None
    try:
        if shared is not None:
            _check_shared(os.fstat(shared), parent)
        # By the parent that was checked, and through no link.
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
    """Without the sticky bit whoever can write to the parent could put another directory in our place."""
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


def _prune(folder: int) -> None:
    """Drops the oldest entries beyond the limit, and with them what a killed writer left."""
    names = os.listdir(folder)
    if len(names) <= ENTRIES:
        return
    ages: list[tuple[int, str]] = []
    for name in names:
        try:
            ages.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
        except FileNotFoundError:
            continue
    for _, name in sorted(ages)[: len(ages) - ENTRIES]:
        try:
            os.unlink(name, dir_fd=folder)
        except (FileNotFoundError, IsADirectoryError):
            continue
