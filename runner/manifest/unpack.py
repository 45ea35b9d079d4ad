"""A package that is given as a tar: unpacked once, into a folder that is named by the tar's SHA-256.

    UNPACKED/DIGEST/        beside the state directories of plugins

Nobody but root (or the user who runs the runner) can write there, and each plugin sees its own folder only.
The digest is that of the bytes which were unpacked. The tar is somebody else's: only files and folders are
taken, none outside of the package, and all of it is bounded. The runner removes nothing there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from sandbox import look
from sandbox.document.diagnostic import Diagnostic, DocumentError, printable, quoted
from sandbox.files import write_all
from sandbox.identity.removal import remove_tree
from sandbox.identity.state import UNPACKED, state_root
from sandbox.paths.walk import LinkRefused, TooManyLinks, close, resolve, walk, walk_below
from sandbox.policy.load import trust_fault
from sandbox.speed.value import NamedTuple

MOST_ENTRIES = 20_000  # files and folders of a package
MOST_BYTES = 1 << 30  # of the whole tar, unpacked
MOST_DEPTH = 32  # folders inside each other
# Of all headers of one member. tarfile takes minutes for a few MiB of them, and nothing interrupts it.
MOST_HEADER_BYTES = 64 << 10
MOST_HEADER_FIELDS = 64
_MOST_EMPTY_READS = 100
_CHUNK_BYTES = 1 << 18
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_GZIP = b"\x1f\x8b"
_GZIP_BITS = 31  # for zlib: a whole gzip member, whose checksum it compares
_GZIP_STEP_BYTES = 1 << 16
# Each is a step of ours. gzip.GzipFile takes 13 s for 30 MB of empty ones, in one reading.
_MOST_GZIP_MEMBERS = 1000


class UnfitTar(Exception):
    """Why the tar is not unpacked."""


# What reading a stranger's tar may raise.
UNREADABLE = (UnfitTar, tarfile.TarError, EOFError, zlib.error, ValueError, RecursionError)


class TarMember(NamedTuple):
    path: str  # relative to the package, with "/" between its parts
    is_folder: bool
    executable: bool = False
    size: int = 0
    content: Iterable[bytes] = ()  # of a file, to be read once


class SequentialFile:
    """A file that is read from its beginning to its end, with a bound and the SHA-256 of what was read. A
    seek forward reads what it skips."""

    def __init__(self, file: IO[bytes] | GunzipFile, most: int) -> None:
        self.sha256 = hashlib.sha256()
        self._file, self._most = file, most
        self._at = self._empty = 0
        self.header_end: int | None = None  # while a header is read: where it has to end
        self.last = b""  # what was read last

    def read(self, size: int = -1) -> bytes:
        if size < 0 or (self.header_end is not None and self._at + size > self.header_end):
            raise UnfitTar("it has a header that is too long")
        data = self._file.read(size)
        self._at += len(data)
        self._empty += not data
        if self._at > self._most or self._empty > _MOST_EMPTY_READS:
            raise UnfitTar(f"it has more than {self._most} bytes, or is cut short")
        self.sha256.update(data)
        self.last = data
        return data

    def peek(self, size: int) -> bytes:
        found: bytes = self._file.peek(size)  # type: ignore[union-attr]  # a buffered file has it
        return found

    def tell(self) -> int:
        return self._at

    def seek(self, place: int) -> int:
        while self._at < place and self.read(min(place - self._at, _CHUNK_BYTES)):
            pass
        if self._at > place:
            raise UnfitTar("its members are not one after the other")
        return self._at

    def drain(self) -> str:
        """Read the rest. Returns the digest."""
        while self.read(_CHUNK_BYTES):
            pass
        return self.sha256.hexdigest()


class GunzipFile:
    """What is compressed in a file, read from its beginning to its end."""

    def __init__(self, file: IO[bytes] | SequentialFile, most_members: int = _MOST_GZIP_MEMBERS) -> None:
        self._file = file
        self._most_members = most_members
        self._inflate = zlib.decompressobj(_GZIP_BITS)
        self._members = 1
        self._data = b""  # what was read and is still compressed

    def read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size and (not self._inflate.eof or self._begin_member()):
            self._data = self._data or self._file.read(_GZIP_STEP_BYTES)
            if not self._data:
                raise EOFError("it is cut short")
            found += self._inflate.decompress(self._data, size - len(found))
            self._data = self._inflate.unused_data or self._inflate.unconsumed_tail
        return bytes(found)

    def _begin_member(self) -> bool:
        """Returns False at the end of the file."""
        while not (rest := self._data.lstrip(b"\0")):  # tapes end with zeros
            self._data = self._file.read(_GZIP_STEP_BYTES)
            if not self._data:
                return False
        self._data = rest
        self._inflate = zlib.decompressobj(_GZIP_BITS)
        self._members += 1
        if self._members > self._most_members:
            raise UnfitTar(f"it is compressed in more than {self._most_members} gzip members")
        return True


def unpack(path: str) -> str:
    """The folder with the package of the tar. Raises DocumentError."""
    look.doubt(f"{path} is a tar, whose content is read each time")
    try:
        with _open_tar(path) as file, _open_parent() as (place, parent):
            digest = SequentialFile(file, MOST_BYTES).drain()
            if not os.path.isdir(os.path.join(place, digest)):
                file.seek(0)
                digest = _unpack(file, parent)
            return os.path.join(place, digest)
    except UNREADABLE as error:
        hint = "make it with: tar -cf PACKAGE.tar -C FOLDER ."
        raise _refused(path, f"the package cannot be unpacked: {error}", hint) from None
    except (LinkRefused, TooManyLinks, OSError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        message, hint = f"the package cannot be unpacked: {why}", "unpack it yourself, and give the folder"
        raise _refused(path, message, hint) from None


def _open_tar(path: str) -> IO[bytes]:
    """Raises UnfitTar and OSError. Opening a pipe would wait for a writer, and a device has no end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnfitTar("it is not a regular file")
    return open(fd, "rb")


def _refused(path: str, message: str, hint: str) -> DocumentError:
    return DocumentError(Diagnostic(path, 0, 0, "package_tar", printable(message), hint))


def unpacked_folder() -> str:
    """Where packages are unpacked."""
    return os.path.join(os.path.dirname(state_root(os.environ)), UNPACKED)


@contextmanager
def _open_parent() -> Iterator[tuple[str, int]]:
    """The folder of all unpacked packages, made where it is missing: its path without links, a descriptor."""
    real = resolve(unpacked_folder(), follow="own")
    # The plugin's uid has to pass through root's folders. Folders of other users stay closed.
    steps = walk(real, follow="none", make=0o711 if os.geteuid() == 0 else 0o700)
    try:
        status = os.fstat(steps[-1].fd)
        fault = trust_fault(real, real)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022 or fault is not None:
            raise UnfitTar(f"others can change {real}" if fault is None else fault[0])
        if os.geteuid() == 0:
            os.chmod(".", 0o711, dir_fd=steps[-1].fd)
        yield real, steps[-1].fd
    finally:
        close(steps)


def _unpack(file: IO[bytes], parent: int) -> str:
    """Unpack into a new folder and name it by its digest, which is returned."""
    raw = SequentialFile(file, MOST_BYTES)
    name = f"new.{secrets.token_hex(16)}"
    os.mkdir(name, 0o700, dir_fd=parent)
    try:
        steps = walk_below(parent, name)
        try:
            extract(read_tar(raw), steps[-1].fd)
            digest = raw.drain()
            os.chmod(".", 0o755, dir_fd=steps[-1].fd)
            _flush(steps[-1].fd)
        finally:
            close(steps)
        try:
            os.rename(name, digest, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            remove_tree(name, parent, os.geteuid())  # another runner has unpacked the same
        return digest
    except BaseException:
        remove_tree(name, parent, os.geteuid())
        raise


def _flush(folder: int) -> None:
    """Write all of it to the disk. Later launches trust a folder by its name, also after a loss of power."""
    for _, _, files, fd in os.fwalk(".", dir_fd=folder):
        for name in (*files, "."):
            opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)


def read_tar(file: IO[bytes] | SequentialFile) -> Iterator[TarMember]:
    """The files and folders of a tar, which may be compressed, in its order. The content of a file has to be
    read before the next member. Raises what UNREADABLE has, for anything but plain files and folders below
    the tar's root, each once."""
    is_compressed = file.peek(len(_GZIP))[: len(_GZIP)] == _GZIP  # type: ignore[union-attr]
    inside: Any = GunzipFile(file) if is_compressed else file
    yield from _members(SequentialFile(inside, MOST_BYTES))


def _members(stream: SequentialFile) -> Iterator[TarMember]:
    files: set[str] = set()
    folders: set[str] = set()
    count = 0
    for tar, member in tar_entries(stream):
        count += 1
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if count > MOST_ENTRIES or len(parts) > MOST_DEPTH:
            raise UnfitTar(f"it has more than {MOST_ENTRIES} entries, or {MOST_DEPTH} folders in each other")
        if member.name.startswith("/") or ".." in parts or not member.name.isprintable():
            raise UnfitTar(f"{quoted(member.name)} is not a name in the package")
        inner = parts if member.isdir() else parts[:-1]
        above = {"/".join(parts[: depth + 1]) for depth in range(len(inner))}
        count += len(above - folders)
        folders |= above
        if count > MOST_ENTRIES:
            raise UnfitTar(f"it has more than {MOST_ENTRIES} entries and folders")
        path = "/".join(parts)
        if not member.isdir() and (not member.isreg() or member.issparse() or not parts):
            raise UnfitTar(f"{quoted(member.name)} is neither a file nor a folder")
        if not files.isdisjoint(above) or (not member.isdir() and (path in files or path in folders)):
            raise UnfitTar(f"{quoted(member.name)} is there twice, or is a file and a folder")
        if member.isdir():
            yield TarMember(path, is_folder=True)
        else:
            files.add(path)
            yield TarMember(path, False, bool(member.mode & 0o111), member.size, content_of(tar, member))


def tar_entries(stream: SequentialFile) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """All entries in their order, up to the end mark, with bounds on their headers. Nothing else is judged.
    Raises what UNREADABLE has."""
    stream.header_end = MOST_HEADER_BYTES
    with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
        while (member := tar.next()) is not None:
            stream.header_end = None
            tar.members = []  # it keeps all of them
            if len(member.pax_headers) + len(tar.pax_headers) > MOST_HEADER_FIELDS:
                raise UnfitTar(f"{quoted(member.name)} has more than {MOST_HEADER_FIELDS} header fields")
            yield tar, member
            stream.header_end = stream.tell() + MOST_HEADER_BYTES
    # tarfile takes a header that is cut or damaged for the end.
    if stream.last != bytes(tarfile.BLOCKSIZE):
        raise UnfitTar("it is cut short or damaged: it has no end mark where its last entry ends")
    stream.header_end = None


def content_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    content = tar.extractfile(member)
    assert content is not None
    size = 0
    while data := content.read(_CHUNK_BYTES):
        size += len(data)
        yield data
    if size != member.size:
        raise UnfitTar("it is cut short")


def extract(members: Iterable[TarMember], folder: int, *, read_only: bool = False) -> None:
    """Write the members of a tar into a new folder. `read_only`: nobody may write to its files. Raises what
    UNREADABLE has, and OSError."""
    for member in members:
        parts = member.path.split("/") if member.path else []
        _make_folders(folder, parts if member.is_folder else parts[:-1])
        if not member.is_folder:
            mode = 0o755 if member.executable else 0o644
            _extract_file(member, folder, parts, mode & 0o555 if read_only else mode)


def _extract_file(member: TarMember, folder: int, parts: list[str], mode: int) -> None:
    steps = walk_below(folder, "/".join(parts[:-1]))
    try:
        fd = os.open(parts[-1], _NEW_FILE, 0o600, dir_fd=steps[-1].fd)
        try:
            for data in member.content:
                write_all(fd, data)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
    finally:
        close(steps)


def _make_folders(folder: int, parts: list[str]) -> None:
    """Make the folders that are missing."""
    steps = walk_below(folder, "/".join(parts), make=True)
    try:
        for step in steps[1:]:
            os.chmod(".", 0o755, dir_fd=step.fd)
    finally:
        close(steps)
