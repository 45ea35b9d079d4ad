"""The entries of a layer of an image: a tar, which may be compressed. It is a stranger's.

Nothing is written here. Names are taken apart, and what no image may have is refused; devices and FIFOs are
left out, as are owners, times, extended attributes, and set-id bits."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from typing import IO, Any, Literal, NamedTuple

from runner.extras import install_command
from runner.manifest.unpack import GunzipFile, SequentialFile, UnfitTar, content_of, tar_entries
from runner.package.fault import PackageFault
from sandbox.document.diagnostic import quoted

MOST_DEPTH = 100
MOST_PATH = 3000  # bytes
_MOST_NAME = 255
_MOST_TARGET = 4095
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_MOST_WINDOW = 128 << 20  # bytes of memory that a zstd layer may ask for, as the command zstd has it
# Some tools compress each file on its own, so that it can be fetched alone.
_MOST_GZIP_MEMBERS = 1_000_000

Kind = Literal["file", "folder", "link", "hard link", "left out"]


class LayerEntry(NamedTuple):
    parts: tuple[str, ...]  # of its path; empty: the root itself
    kind: Kind
    executable: bool = False
    target: str = ""  # of a link, as written
    content: Iterable[bytes] = ()  # of a file, to be read once


def read_layer(file: IO[bytes], most_bytes: int) -> Iterator[LayerEntry]:
    """The entries in their order. The content of a file has to be read before the next one. Raises what
    UNREADABLE has, also where a content is read, PackageFault and OSError."""
    return _entries(SequentialFile(_decompressed(file), most_bytes))


def _decompressed(file: IO[bytes]) -> Any:
    begin: bytes = file.peek(4)[:4]  # type: ignore[attr-defined]  # it is buffered
    if begin.startswith(_GZIP):
        return GunzipFile(file, _MOST_GZIP_MEMBERS)
    return _ZstdFile(file) if begin == _ZSTD else file


class _ZstdFile:
    def __init__(self, file: IO[bytes]) -> None:
        try:
            import zstandard
        except ModuleNotFoundError:
            message = "a layer of the image is compressed with zstd, and the package zstandard is missing"
            raise PackageFault(
                "extra_missing", message, f"install it with {install_command('oci')}"
            ) from None
        self._error = zstandard.ZstdError
        made = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        self._reader = made.stream_reader(file, read_across_frames=True)

    def read(self, size: int) -> bytes:
        try:
            return bytes(self._reader.read(size))
        except self._error as error:
            raise UnfitTar(f"its zstd data is damaged: {error}") from None


def _entries(stream: SequentialFile) -> Iterator[LayerEntry]:
    for tar, member in tar_entries(stream):
        yield _entry(tar, member)
    stream.drain()  # the checksum of what is compressed is at its end


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo) -> LayerEntry:
    parts = path_parts(member.name)
    if member.isdir():
        return LayerEntry(parts, "folder")
    if not parts:
        raise UnfitTar("its root is no folder")
    if member.issym():
        target = member.linkname.encode("utf-8", "surrogateescape")
        if not target or len(target) > _MOST_TARGET or b"\0" in target:  # an extended header may have one
            raise UnfitTar(f"{quoted(member.name)} is a link to nowhere, or too long")
        return LayerEntry(parts, "link", target=member.linkname)
    if member.islnk():
        return LayerEntry(parts, "hard link", target=member.linkname)
    if member.isreg() and not member.issparse():
        return LayerEntry(parts, "file", bool(member.mode & 0o111), content=content_of(tar, member))
    if member.ischr() or member.isblk() or member.isfifo():
        return LayerEntry(parts, "left out")
    raise UnfitTar(f"{quoted(member.name)} is of a kind that is not read")


def path_parts(name: str) -> tuple[str, ...]:
    """Of a path in the image: from its root, however it is written. Raises UnfitTar."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    raw = name.encode("utf-8", "surrogateescape")
    if ".." in parts or not name.isprintable() or len(raw) > MOST_PATH or len(parts) > MOST_DEPTH:
        raise UnfitTar(f"{quoted(name, 200)} is not a name that a file of an image can have")
    if any(len(part.encode("utf-8", "surrogateescape")) > _MOST_NAME for part in parts):
        raise UnfitTar(f"{quoted(name, 200)} has a part of more than {_MOST_NAME} bytes")
    return parts
