"""Where a report goes: a path or an open descriptor, checked before anything is started."""

from __future__ import annotations

import os
from typing import Any


class SinkError(Exception):
    """The report cannot be written there; the text says why."""


class ReportSink:
    def __init__(self, target: str | None) -> None:
        self._fd: int | None = None
        self._path: str | None = None
        if target is None:
            return
        if target.isdecimal():
            self._fd = int(target)
            if self._fd in (0, 1):
                raise SinkError(f"--report {target}: descriptors 0 and 1 are the plugin's")
            try:
                os.fstat(self._fd)
            except OSError:
                raise SinkError(
                    f"--report {target}: descriptor {target} is not open (a file: ./{target})"
                ) from None
            return
        self._path = os.path.abspath(target)
        folder = os.path.dirname(self._path)
        if os.path.isdir(self._path):
            raise SinkError(f"--report {target}: is a directory")
        if not os.path.isdir(folder):
            raise SinkError(f"--report {target}: the directory {folder} does not exist")
        if not os.access(folder, os.W_OK):
            raise SinkError(f"--report {target}: the directory {folder} is not writable")

    @property
    def wanted(self) -> bool:
        return self._fd is not None or self._path is not None

    def write(self, document: dict[str, Any]) -> None:
        import json

        text = (json.dumps(document, ensure_ascii=True) + "\n").encode()
        try:
            if self._fd is not None:
                _write_all(self._fd, text)
            elif self._path is not None:
                _replace(self._path, text)
        except OSError as error:
            raise SinkError(f"the report could not be written: {error.strerror}") from None


def _replace(path: str, text: bytes) -> None:
    """All or nothing, and never through a link somebody has put there meanwhile."""
    draft = f"{path}.{os.getpid()}.part"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        _write_all(fd, text)
        os.rename(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]
