"""Read the beginning of a file or a whole kernel file; write without short writes, and replace a file
atomically."""

from __future__ import annotations

import os
import select
import stat

_READER_SECONDS = 10
_PIECE_BYTES = 16 << 10
_MOST_ACCOUNT_BYTES = 4 << 20


def text_at(path: str, limit: int) -> str:
    """The first `limit` bytes of a regular file as text; '' if it is missing or unreadable."""
    from sandbox import look  # here: callers that only write do not need it

    try:
        if not stat.S_ISREG(look.stat(path).st_mode):  # before opening: opening a device can have effects
            return ""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # the name may lead to another file by now
            return ""
        return os.read(fd, limit).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def kernel_text(path: str) -> str:
    """Read a whole kernel file (procfs, cgroups). They are all ASCII. Raises OSError.

    This takes three system calls. A file object takes eight, and imports a module to decode text.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(fd, _PIECE_BYTES):
            pieces.append(piece)
        return b"".join(pieces).decode("ascii")
    finally:
        os.close(fd)


def colon_fields(path: str) -> list[list[str]]:
    """The fields of each line of /etc/passwd, or of a file like it; none if it cannot be read.

    NSS is not used: it could ask a directory server, which may not answer.
    """
    from sandbox import look

    look.note_content(path)
    try:
        with open(path, "rb") as file:
            text = os.fsdecode(file.read(_MOST_ACCOUNT_BYTES))
    except OSError:
        return []
    return [line.split(":") for line in text.split("\n")]


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, or raise OSError.

    A single write may be cut short without an error: by RLIMIT_FSIZE, which counts for memory files as well,
    or by a full disk. A truncated list of bwrap options would leave out parts of the cage.
    """
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            # A descriptor of the caller's may be non-blocking, and we do not change that. Wait for a slow
            # reader, but not for one that is stuck.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            if not poll.poll(_READER_SECONDS * 1000):
                raise


def write_once(path: str, text: str) -> None:
    """Write to an existing file in a single write(2), which kernel files require (procfs, cgroups)."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def make_draft(folder: int, mode: int = 0o600) -> tuple[str, int]:
    """Make a file with a random name in an open folder. Returns its name and a descriptor to write it."""
    draft = f".runner.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return draft, os.open(draft, flags, mode, dir_fd=folder)


def replace_file(folder: int, name: str, data: bytes, mode: int = 0o600, *, sync: bool = False) -> None:
    """Write a draft and rename it, so that a reader has the whole old file or the whole new one. `sync`: it
    survives a crash of the machine, too. Raises OSError; then the old file is as it was."""
    draft, fd = make_draft(folder, mode)
    try:
        try:
            os.fchmod(fd, mode)  # whatever the umask is
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(draft, dir_fd=folder)
        raise
    if sync:
        os.fsync(folder)
