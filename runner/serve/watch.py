"""Waits for changes in folders, by inotify(7)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager

import trio

_CLOSE_WRITE, _MOVED, _CREATE, _DELETE, _SELF = 0x8, 0x40 | 0x80, 0x100, 0x200, 0x400 | 0x800
_ATTRIB, _ONLYDIR = 0x4, 0x0100_0000
_CHANGES = _CLOSE_WRITE | _MOVED | _CREATE | _DELETE | _SELF | _ATTRIB
_SETTLE_SECONDS = 0.2  # editors write, rename and change modes one after the other
_MOST_SETTLE_SECONDS = 3.0


class Watch:
    """Watched folders. What exactly has changed is not told: who asks reads again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._known: dict[str, int] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)

    def set(self, folders: Iterable[str]) -> bool:
        """Watch these folders and no others. One that cannot be watched is left out: SIGHUP remains. Returns
        whether one was not watched before."""
        before = set(self._known.values())
        wanted = {folder for folder in folders if folder}
        for folder in self._known.keys() - wanted:
            self._libc.inotify_rm_watch(self._fd, self._known.pop(folder))
        for folder in wanted:
            # Also for known ones: the folder may be another by now. The kernel knows one by its identity.
            number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), _CHANGES | _ONLYDIR)
            if number >= 0:
                self._known[folder] = number
        return not before.issuperset(self._known.values())

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yields after each change, when no other has followed for a moment."""
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            self._drop()
            last = trio.current_time() + _MOST_SETTLE_SECONDS
            with trio.move_on_after(_SETTLE_SECONDS) as settling:
                while True:
                    await trio.lowlevel.wait_readable(self._fd)
                    self._drop()
                    settling.deadline = min(trio.current_time() + _SETTLE_SECONDS, last)
            yield

    def _drop(self) -> None:
        try:
            while os.read(self._fd, 1 << 16):
                pass
        except BlockingIOError:
            pass


@contextmanager
def open_watch() -> Iterator[Watch | None]:
    """None: the kernel gives no inotify instance, because this user has too many."""
    fd = ctypes.CDLL(None, use_errno=True).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        yield None
        return
    try:
        yield Watch(fd)
    finally:
        os.close(fd)
