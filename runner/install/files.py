"""FileStore: contents of files by their digest, so that images have what is the same only once.

    ROOT/files/4f/4f0c…      the SHA-256 of the content; with .x for a program

A set has hard links to these. Nothing changes a file: cages show sets read-only, or below a layer that takes
the changes. What no set has a link to any more is removed with the sets.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable

from runner.install.content import BadContent
from sandbox.files import write_all

_FOLDER = "files"
_NEW = "new"
_CHUNK_BYTES = 1 << 18


class FileStore:
    """The caller holds the store. `most`: bytes that may be added."""

    def __init__(self, root: str, most: int) -> None:
        self._folder = os.path.join(root, _FOLDER)
        self._most, self._left = most, most
        os.makedirs(self._folder, exist_ok=True)

    def add(self, content: Iterable[bytes], executable: bool) -> str:
        """Keep a content. Returns its digest. Raises BadContent and OSError."""
        sha256 = hashlib.sha256()
        new = os.path.join(self._folder, _NEW)
        with open(new, "wb") as file:
            for data in content:
                self._left -= len(data)
                if self._left < 0:
                    raise BadContent(f"its files have more than {self._most >> 20} MiB")
                sha256.update(data)
                file.write(data)
            # Writable by its owner, who is nobody's plugin: a server may change what it sees of it.
            os.fchmod(file.fileno(), 0o755 if executable else 0o644)
        digest = sha256.hexdigest()
        path = self._path(digest, executable)
        # One that a disk has damaged is replaced, and not linked to once more.
        if _digest_of(path) != digest:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.rename(new, path)
        return digest

    def link(self, digest: str, executable: bool, name: str, folder: int) -> None:
        """Give a content a name in an open folder. Raises OSError."""
        path = self._path(digest, executable)
        try:
            os.link(path, name, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            # The filesystem allows no more names for it: the next ones are for a copy.
            self._copy(path)
            os.link(path, name, dst_dir_fd=folder, follow_symlinks=False)

    def _copy(self, path: str) -> None:
        new = os.path.join(self._folder, _NEW)
        with open(path, "rb") as old, open(new, "wb") as file:
            while data := old.read(_CHUNK_BYTES):
                write_all(file.fileno(), data)
            os.fchmod(file.fileno(), os.fstat(old.fileno()).st_mode & 0o777)
        os.rename(new, path)

    def _path(self, digest: str, executable: bool) -> str:
        return os.path.join(self._folder, digest[:2], digest + (".x" if executable else ""))


def prune(root: str) -> None:
    """Remove what no set has. The caller holds the store."""
    for folder, _, names in os.walk(os.path.join(root, _FOLDER)):
        for name in names:
            path = os.path.join(folder, name)
            if name == _NEW or os.lstat(path).st_nlink == 1:
                os.unlink(path)


def _digest_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
