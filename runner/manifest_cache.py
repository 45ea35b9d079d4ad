"""Manifests already read: the Plugin by the bytes it came from, so that a launch validates nothing.

Only what the bytes (and the user's home) decide is kept. The directory is the user's own; one that others can
write to, or a link, is not used. Not being able to write is no fault: it is a cache.
"""

from __future__ import annotations

import os
import stat

from runner import __version__
from runner.plugin import Plugin
from runner.plugin_codec import decode, encode
from sandbox.diagnostic import Diagnostic

SCHEMA = 1
ENTRIES = 256
ENTRY_LIMIT = 8 << 20

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_ENTRY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_ENTRY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def directory() -> str | None:
    """Where entries are kept, whether or not it exists yet. None: there is no such place, or it is off."""
    if os.environ.get("RUNNER_CACHE", "").lower() == "off":
        return None
    if os.geteuid() == 0:
        return "/var/cache/runner"
    # A relative XDG_CACHE_HOME is invalid by its specification and ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):
        home = os.path.expanduser("~")
        base = os.path.join(home, ".cache")
    return os.path.join(base, "runner") if base.startswith("/") else None


def key(path: str, raw: bytes, contract: str | None, server: str | None, home: str) -> str:
    """Everything a Plugin depends on, in one name."""
    try:
        # hashlib loads OpenSSL first, which takes 3 ms: half of what reading from the cache costs.
        from _blake2 import blake2b
    except ImportError:
        from hashlib import blake2b

    digest = blake2b(digest_size=32)
    options = (__version__, str(SCHEMA), path, home, _optional(contract), _optional(server), _code())
    for part in (*(os.fsencode(text) for text in options), raw):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _optional(text: str | None) -> str:
    return "-" if text is None else f"+{text}"


def _code() -> str:
    """Size and time of the modules that read manifests: in a checkout they change without a new version."""
    here = os.path.dirname(os.path.abspath(__file__))
    sandbox = os.path.join(os.path.dirname(here), "sandbox")
    files = [os.path.join(here, name) for name in ("requests.py", "shape.py", "plugin.py", "plugin_codec.py")]
    files += [os.path.join(sandbox, name) for name in ("document.py", "denylist.py", "units.py", "spec.py")]
    contracts = os.path.join(here, "contracts")
    marks: list[str] = []
    try:
        for name in sorted(os.listdir(contracts)):
            folder = os.path.join(contracts, name)
            if os.path.isdir(folder):
                files += [os.path.join(folder, file) for file in sorted(os.listdir(folder))]
        for file in files:
            if file.endswith(".py"):
                status = os.stat(file)
                marks.append(f"{file}:{status.st_size}:{status.st_mtime_ns}")
    except OSError:
        return ""  # not installed as files: then the version says it all
    return "\n".join(marks)


def load(name: str) -> tuple[Plugin, tuple[Diagnostic, ...]] | None:
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
        data = json.loads(raw)
        if not isinstance(data, dict) or data.pop("key", None) != name:
            return None
        return decode(data)
    except (ValueError, RecursionError):
        return None


def store(name: str, plugin: Plugin, diagnostics: tuple[Diagnostic, ...]) -> None:
    """Keeps an entry, if that is possible."""
    import json

    folder = _open_directory(create=True)
    if folder is None:
        return
    temporary = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        raw = json.dumps({"key": name, **encode(plugin, diagnostics)}, separators=(",", ":")).encode()
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
        folder = os.open(path, _OPEN_DIRECTORY)
    except (OSError, ValueError):
        return None
    if _is_ours(os.fstat(folder)):
        return folder
    os.close(folder)
    return None


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
