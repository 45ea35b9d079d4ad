"""Faults and warnings about the files of a package of any contract, for `runner package lint`.

Unlike listing.py this does not stop at the first fault.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from runner.package.listing import MOST_BYTES, MOST_DEPTH, MOST_ENTRIES, SIGNATURE_NAME, kind_of, name_fault
from sandbox.document.diagnostic import Diagnostic, Severity

MOST_FINDINGS = 200

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_SEARCHED_BYTES = 8 << 20  # of a file, in which the first line of a private key is looked for

# Histories hold what was removed later, and their hooks are programs.
_HISTORIES = frozenset((".git", ".hg", ".svn", ".bzr", ".jj"))
_SECRET_NAMES = re.compile(
    r"(\.env(\..+)?|\.netrc|\.npmrc|\.pypirc|\.git-credentials|id_(rsa|dsa|ecdsa|ed25519)|.+\.(p12|pfx|jks|kdbx))\Z"
)
_HARMLESS_NAMES = re.compile(r"\.env\.(example|sample|template|dist)\Z")
# At the beginning of a line. Elsewhere it is mostly a program that knows such files.
_PRIVATE_KEY = re.compile(rb"^[ \t]*-----BEGIN ([A-Z0-9]{1,16} ){0,3}PRIVATE KEY( BLOCK)?-----", re.MULTILINE)
# In DER: a sequence of a version and of the algorithm (PKCS #8), the modulus (RSA) or the key itself (EC).
_DER_KEY = re.compile(
    rb"\x30([\x00-\x7f]|\x81.|\x82..)\x02\x01([\x00\x01]\x30.{1,2}\x06|\x00\x02\x82|\x01\x04[\x14-\x42])",
    re.DOTALL,
)


def find_faults(root: str) -> tuple[Diagnostic, ...]:
    """All findings. A package with an error is not signed."""
    search = _Search(root)
    found: list[Diagnostic] = []
    for finding in search.folder(None, root, "", 0):
        found.append(finding)
        if len(found) >= MOST_FINDINGS:
            found.append(search.finding("", "too_many_faults", "there are more faults than these", ""))
            break
    return tuple(found)


def _read_searched(file: int) -> bytes:
    found = b""
    while len(found) < _SEARCHED_BYTES and (data := os.read(file, _SEARCHED_BYTES - len(found))):
        found += data
    return found


class _Search:
    def __init__(self, root: str) -> None:
        self._root = root
        self._entries = 0
        self._bytes = 0

    def finding(
        self, path: str, rule: str, message: str, hint: str, severity: Severity = "error"
    ) -> Diagnostic:
        return Diagnostic(os.path.join(self._root, path).rstrip("/"), 0, 0, rule, message, hint, severity)

    def folder(self, parent: int | None, name: str, path: str, depth: int) -> Iterator[Diagnostic]:
        if depth > MOST_DEPTH:
            message = f"it is more than {MOST_DEPTH} folders deep"
            yield self.finding(path, "package_size", message, "move it up: packages are that deep at most")
            return
        try:
            fd = os.open(name, _FOLDER, dir_fd=parent)
        except OSError as error:
            yield self._unreadable(path, error)
            return
        try:
            if os.fstat(fd).st_mode & 0o022:
                yield self._writable(path)
            with os.scandir(fd) as entries:
                names = []
                for entry in entries:
                    self._entries += 1
                    if self._entries > MOST_ENTRIES:
                        message = f"the package has more than {MOST_ENTRIES} files and folders"
                        hint = "leave out what the plugin does not need, or pack files into an archive"
                        yield self.finding("", "package_size", message, hint)
                        return
                    names.append(entry.name)
            yield from self._twins(path, names)
            for each in sorted(names):
                yield from self._entry(fd, each, f"{path}/{each}" if path else each, depth)
        except OSError as error:
            yield self._unreadable(path, error)
        finally:
            os.close(fd)

    def _entry(self, fd: int, name: str, path: str, depth: int) -> Iterator[Diagnostic]:
        if (fault := name_fault(path)) is not None:
            yield self.finding(path, "package_name", *fault)
            return
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            yield self._unreadable(path, error)
            return
        if name in _HISTORIES:
            message = "the history of the sources is part of the package"
            hint = "sign a folder without it, for example one that git archive made"
            yield self.finding(path, "package_history", message, hint, "warning")
        if stat.S_ISDIR(status.st_mode):
            yield from self.folder(fd, name, path, depth + 1)
        elif stat.S_ISREG(status.st_mode):
            yield from self._file(fd, name, path, status)
        else:
            message = f"it is {kind_of(status.st_mode)}, which a signature cannot cover"
            hint = "put a copy of the file in its place, or remove it"
            yield self.finding(path, "package_kind", message, hint)

    def _file(self, fd: int, name: str, path: str, status: os.stat_result) -> Iterator[Diagnostic]:
        below, self._bytes = self._bytes <= MOST_BYTES, self._bytes + status.st_size
        if below and self._bytes > MOST_BYTES:
            message = f"the files are larger than {MOST_BYTES >> 20} MiB together"
            yield self.finding("", "package_size", message, "leave out what the plugin does not need")
        if status.st_mode & 0o022:
            yield self._writable(path)
        if status.st_mode & (stat.S_ISUID | stat.S_ISGID):
            message = "it is a set-id program, and no cage lets it gain rights"
            yield self.finding(path, "package_set_id", message, f"chmod ug-s {path}", "warning")
        if path == SIGNATURE_NAME:
            return
        secret = "the key is known to everybody who has the package: remove the file, and use another key"
        if _SECRET_NAMES.match(name) and not _HARMLESS_NAMES.match(name):
            message = "files of this name mostly hold passwords or keys"
            hint = "remove it from the package: everybody who has the package can read it"
            yield self.finding(path, "package_secret", message, hint, "warning")
        try:
            file = os.open(name, _FILE, dir_fd=fd)
        except OSError as error:
            yield self._unreadable(path, error)
            return
        try:
            content = _read_searched(file)
        except OSError as error:
            yield self._unreadable(path, error)
            return
        finally:
            os.close(file)
        if _DER_KEY.match(content) or _PRIVATE_KEY.search(content):
            yield self.finding(path, "package_secret", "it holds a private key", secret, "warning")

    def _twins(self, path: str, names: list[str]) -> Iterator[Diagnostic]:
        seen: dict[str, str] = {}
        for name in sorted(names):
            other = seen.setdefault(name.casefold(), name)
            if other != name:
                message = (
                    f"its name differs from {other} only in case: on some systems one replaces the other"
                )
                inner = f"{path}/{name}" if path else name
                yield self.finding(inner, "package_case", message, "rename one of the two", "warning")

    def _writable(self, path: str) -> Diagnostic:
        message = "its group or everybody can change it, also after it was signed"
        hint = f"chmod go-w {os.path.join(self._root, path).rstrip('/')}"
        return self.finding(path, "package_writable", message, hint, "warning")

    def _unreadable(self, path: str, error: OSError) -> Diagnostic:
        message = f"it cannot be read: {error.strerror}"
        return self.finding(path, "package_unreadable", message, "let the user who signs the package read it")
