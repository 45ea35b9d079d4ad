"""The files of a package with their SHA-256: what a signature covers.

Each file is read once, through one descriptor, and `FileSink` gets the bytes that were hashed. Folders count
only as part of the names of files: an empty folder is not listed. A name that is not UTF-8 or has a control
character is refused, because a line break in a name could forge a line of the list. Links, sockets, devices
and FIFOs are refused too: the list cannot describe them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from typing import NamedTuple, Protocol

from runner.package.fault import PackageFault
from sandbox.document.diagnostic import printable

SIGNATURE_NAME = "marketplace.signature.json"

MOST_ENTRIES = 20_000  # files and folders of a package
MOST_BYTES = 1 << 30  # of all its files together
MOST_DEPTH = 32  # folders inside each other; each is an open descriptor

_CHUNK_BYTES = 1 << 18
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a unix socket",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class ListedFile(NamedTuple):
    path: str  # relative to the package, with "/" between its parts
    sha256: str  # hexadecimal
    size: int  # bytes


class FileList(NamedTuple):
    files: tuple[ListedFile, ...]  # sorted by the bytes of their paths, without the signature

    @property
    def text(self) -> bytes:
        return "".join(f"{file.sha256}  {file.path}\n" for file in self.files).encode()

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.text).hexdigest()}"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class FileSink(Protocol):
    """Receives the files of a package while they are listed."""

    def open_file(self, path: str, mode: int, folder_modes: tuple[int, ...], size: int) -> None:
        """Begin a file: the next `size` bytes are its content. If there are more or fewer, PackageFault is
        raised after the last. `folder_modes`: of the package's folder and of each folder down to the file.
        Files come in an order that their names decide."""
        ...

    def write(self, data: bytes) -> None: ...

    def close_file(self) -> None: ...


def list_package(root: str, sink: FileSink | None = None) -> FileList:
    """Read every file of the package in the folder `root`. Raises PackageFault, and OSError of the sink."""
    try:
        fd = os.open(root, _FOLDER)
    except OSError as error:
        raise _unreadable(root, error) from None
    try:
        return _Walk(root, sink).listing(fd)
    finally:
        os.close(fd)


def name_fault(path: str) -> tuple[str, str] | None:
    """Why a file of a package cannot have this name: (reason, hint)."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8", "rename it: the list of files that is signed is UTF-8"
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in path):
        hint = "rename it: a line break in a name could forge a line of the list that is signed"
        return "its name has a control character", hint
    return None


def kind_of(mode: int) -> str:
    """Words for a file that is neither a regular file nor a folder."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


class _Walk:
    def __init__(self, root: str, sink: FileSink | None) -> None:
        self._root = root
        self._sink = sink
        self._files: list[ListedFile] = []
        self._entries = 0
        self._bytes = 0

    def listing(self, fd: int) -> FileList:
        self._folder(fd, "", (os.fstat(fd).st_mode,))
        return FileList(tuple(sorted(self._files, key=lambda file: file.path.encode())))

    def _folder(self, fd: int, prefix: str, modes: tuple[int, ...]) -> None:
        for name in self._names(fd, prefix):
            path = prefix + name
            fault = name_fault(path)
            if fault is not None:
                raise PackageFault("package_name", f"{self._shown(path)}: {fault[0]}", fault[1])
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    self._enter(fd, name, path, modes)
                elif stat.S_ISREG(status.st_mode):
                    self._file(fd, name, path, modes)
                else:
                    self._refuse_kind(path, status.st_mode)
            except FileNotFoundError:
                raise self._change_fault(path) from None

    def _names(self, fd: int, prefix: str) -> list[str]:
        found = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    self._entries += 1
                    if self._entries > MOST_ENTRIES:
                        hint = "leave out what the plugin does not need, or pack files into an archive"
                        raise PackageFault(
                            "package_size",
                            f"{self._root} has more than {MOST_ENTRIES} files and folders",
                            hint,
                        )
                    found.append(entry.name)
        except OSError as error:
            raise _unreadable(self._shown(prefix), error) from None
        return sorted(found)

    def _enter(self, fd: int, name: str, path: str, modes: tuple[int, ...]) -> None:
        if len(modes) > MOST_DEPTH:
            message = f"{self._shown(path)} is more than {MOST_DEPTH} folders deep"
            raise PackageFault("package_size", message, "move it up: packages are that deep at most")
        try:
            below = os.open(name, _FOLDER, dir_fd=fd)
        except OSError as error:
            raise self._open_fault(path, error) from None
        try:
            self._folder(below, path + "/", (*modes, os.fstat(below).st_mode))
        finally:
            os.close(below)

    def _file(self, fd: int, name: str, path: str, modes: tuple[int, ...]) -> None:
        try:
            file = os.open(name, _FILE, dir_fd=fd)
        except OSError as error:
            raise self._open_fault(path, error) from None
        try:
            before = os.fstat(file)
            if not stat.S_ISREG(before.st_mode):
                self._refuse_kind(path, before.st_mode)
            if self._bytes + before.st_size > MOST_BYTES:  # before anything of it is read: it may be sparse
                raise self._too_large()
            if self._sink is not None:
                self._sink.open_file(path, before.st_mode, modes, before.st_size)
            try:
                sha256, size = self._content(file, path)
            finally:
                if self._sink is not None:
                    self._sink.close_file()
            after = os.fstat(file)
            if (before.st_size, before.st_mtime_ns) != (size, after.st_mtime_ns):
                raise self._change_fault(path)
        finally:
            os.close(file)
        if path != SIGNATURE_NAME:
            self._files.append(ListedFile(path, sha256, size))

    def _content(self, file: int, path: str) -> tuple[str, int]:
        digest, size = hashlib.sha256(), 0
        while True:
            try:
                data = os.read(file, _CHUNK_BYTES)
            except OSError as error:
                raise _unreadable(self._shown(path), error) from None
            if not data:
                return digest.hexdigest(), size
            size += len(data)
            self._bytes += len(data)
            if self._bytes > MOST_BYTES:
                raise self._too_large()
            digest.update(data)
            if self._sink is not None:
                self._sink.write(data)

    def _too_large(self) -> PackageFault:
        message = f"the files of {self._root} are larger than {MOST_BYTES >> 20} MiB together"
        return PackageFault("package_size", message, "leave out what the plugin does not need")

    def _refuse_kind(self, path: str, mode: int) -> None:
        message = f"{self._shown(path)} is {kind_of(mode)}, which a signature cannot cover"
        raise PackageFault("package_kind", message, "put a copy of the file in its place, or remove it")

    def _open_fault(self, path: str, error: OSError) -> PackageFault:
        # It was no link and no file when it was looked at.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENOENT):
            return self._change_fault(path)
        return _unreadable(self._shown(path), error)

    def _change_fault(self, path: str) -> PackageFault:
        message = f"{self._shown(path)} changed while it was read"
        return PackageFault("package_changed", message, "try again when nothing writes to the package")

    def _shown(self, path: str) -> str:
        return printable(f"{self._root}/{path}".rstrip("/"))


def _unreadable(path: str, error: OSError) -> PackageFault:
    message = f"{printable(path)} cannot be read: {error.strerror}"
    return PackageFault("package_unreadable", message, "let the user who runs the runner read it")
