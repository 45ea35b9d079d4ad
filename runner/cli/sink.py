"""Where a report goes: a path or an open descriptor, chosen and opened before anything is started."""

from __future__ import annotations

import os
import stat
from typing import Any

from sandbox.writing import write_all


class SinkError(Exception):
    """The report cannot be written there; the text says why."""


class ReportSink:
    """What is opened now is what is written to in the end: a plugin that can write to the folder cannot lead
    the report somewhere else meanwhile."""

    def __init__(self, target: str | None) -> None:
        self._fd: int | None = None  # written to as it is
        self._folder: int | None = None  # in which the report replaces `_name`
        self._name = ""
        if target is None:
            return
        if target.isdecimal():
            self._fd = _descriptor(target)
            return
        try:
            self._open(target)
        except OSError as error:
            raise SinkError(f"--report {target}: {error.strerror}") from None

    def _open(self, target: str) -> None:
        path = os.path.realpath(target)  # the operator's own links, followed once
        folder, self._name = os.path.split(path)
        try:
            kind = os.stat(target).st_mode  # of what is behind a link that has no name: /dev/stdout
        except FileNotFoundError:
            kind = stat.S_IFREG
        if stat.S_ISDIR(kind):
            raise SinkError(f"--report {target}: is a directory")
        if not stat.S_ISREG(kind):
            # A terminal, a FIFO, /dev/stderr: written to, never replaced. Without a reader a FIFO refuses.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self._fd = os.open(target, flags)
            os.set_blocking(self._fd, True)
            return
        if not os.path.isdir(folder):
            raise SinkError(f"--report {target}: the directory {folder} does not exist")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SinkError(f"--report {target}: the directory {folder} is not writable")
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def wanted(self) -> bool:
        return self._fd is not None or self._folder is not None

    def write(self, document: dict[str, Any]) -> None:
        import json

        text = (json.dumps(document, ensure_ascii=True) + "\n").encode()
        try:
            if self._fd is not None:
                write_all(self._fd, text)
            elif self._folder is not None:
                _replace(self._folder, self._name, text)
        except OSError as error:
            raise SinkError(f"the report could not be written: {error.strerror}") from None


def _descriptor(target: str) -> int:
    if len(target) > 9:
        raise SinkError(f"--report {target}: there is no such descriptor")
    fd = int(target)
    if fd in (0, 1):
        raise SinkError(f"--report {target}: descriptors 0 and 1 are the plugin's")
    try:
        os.fstat(fd)
    except OSError:
        raise SinkError(f"--report {target}: descriptor {target} is not open (a file: ./{target})") from None
    return fd


def _replace(folder: int, name: str, text: bytes) -> None:
    """All or nothing, under a name nobody can have guessed."""
    draft = f".runner.{os.urandom(8).hex()}"
    fd = os.open(
        draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder
    )
    try:
        write_all(fd, text)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(draft, dir_fd=folder)
        raise
    finally:
        os.close(fd)
