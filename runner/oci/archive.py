"""The tar of a package: the same folder gives the same bytes, and a stranger's is listed before it is
unpacked.

Names in one order, no times, no owners, two modes, and no compression: the output of a compressor depends on
its version, and a digest must not. Folders are there only as parts of names, as in the list that is signed.
"""

from __future__ import annotations

import hashlib
import tarfile
from typing import IO, NamedTuple

from runner.manifest.unpack import UNREADABLE, read_tar
from runner.package.fault import PackageFault
from runner.package.listing import SIGNATURE_NAME, FileList, ListedFile, list_package
from sandbox.document.diagnostic import printable

_BLOCK = tarfile.BLOCKSIZE
_MOST_SIGNATURE_BYTES = 64 << 10


class PackedFolder(NamedTuple):
    listing: FileList
    digest: str  # of the tar
    size: int
    signature: bytes  # marketplace.signature.json, which is not in the tar; empty: there is none


def pack(root: str, file: IO[bytes]) -> PackedFolder:
    """Write the tar of the package in the folder `root`. Raises PackageFault and OSError."""
    sink = _TarWriter(file)
    listing = list_package(root, sink)
    sink.finish()
    file.seek(0)
    # What could not be fetched again is not pushed, such as a name that cannot be printed.
    if list_archive(file) != listing:
        raise PackageFault("package_tar", f"the tar of {printable(root)} does not have its files")
    return PackedFolder(listing, f"sha256:{sink.sha256.hexdigest()}", sink.size, bytes(sink.signature))


def list_archive(file: IO[bytes]) -> FileList:
    """The files of a tar with their digests. Nothing is written. Raises PackageFault for what is not the tar
    of a package."""
    found: list[ListedFile] = []
    try:
        for member in read_tar(file):
            if member.path.partition("/")[0] == SIGNATURE_NAME:
                message = f"its tar has a {SIGNATURE_NAME}: signatures are beside a package, not in it"
                raise PackageFault("package_tar", message)
            if member.is_folder:
                continue
            digest = hashlib.sha256()
            for data in member.content:
                digest.update(data)
            found.append(ListedFile(member.path, digest.hexdigest(), member.size))
    except UNREADABLE as error:
        message = f"the package cannot be unpacked: {printable(str(error))}"
        raise PackageFault("package_tar", message, "ask its publisher for another one") from None
    file.seek(0)
    return FileList(tuple(sorted(found, key=lambda each: each.path.encode())))


class _TarWriter:
    """Writes the files of a package while they are listed (a FileSink)."""

    def __init__(self, file: IO[bytes]) -> None:
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.signature = bytearray()
        self._file = file
        self._is_signature = False

    def open_file(self, path: str, mode: int, folder_modes: tuple[int, ...], size: int) -> None:
        self._is_signature = path == SIGNATURE_NAME
        if self._is_signature:
            if size > _MOST_SIGNATURE_BYTES:
                raise PackageFault("signature_malformed", f"{path} is larger than a signature")
            return
        member = tarfile.TarInfo(path)
        member.size, member.mode = size, 0o755 if mode & 0o111 else 0o644
        self._put(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"))

    def write(self, data: bytes) -> None:
        if self._is_signature:
            self.signature += data
            return
        self._put(data)

    def close_file(self) -> None:
        if not self._is_signature:
            self._put(bytes(-self.size % _BLOCK))

    def finish(self) -> None:
        self._put(bytes(2 * _BLOCK))

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self.sha256.update(data)
        self.size += len(data)
