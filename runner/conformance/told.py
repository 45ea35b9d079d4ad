"""Hears what the processes of the stand-in tell: which files of its folder `told` they open.

runner/conformance/stand_in.py says why, and how a byte becomes a file. Nothing else opens these files. If
something does, the line it falls into is no record, and is dropped.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import time
from typing import Final

from runner.conformance.host_checks import PluginLog, ToldEntry

CHANNELS: Final = 2  # processes of the stand-in that can be heard at once
_TOLD_BYTES: Final = 1 << 20  # of one process. What it tells beyond that is not kept
_PROCESSES: Final = 64  # of one run

_IN_OPEN: Final = 0x20
_IN_CLOSE_NOWRITE: Final = 0x10
_IN_Q_OVERFLOW: Final = 0x4000
_EVENT: Final = struct.Struct("iIII")

# The files of a channel, and the byte that opening one of them tells: each has two, which take turns.
_BYTES: Final = {f"{half}{byte:02x}".encode(): byte for half in (0, 1) for byte in range(256)}

_START: Final[dict[str, type]] = dict.fromkeys(("argv", "descriptors", "environ"), list)
# What each record has, and of which type.
_FACTS: Final[dict[str, dict[str, type]]] = {
    "start": {**_START, "cwd": str, "folder": str, "variable": str},
    "frame": {"text": str, "size": int, "fault": str},
    "sent": {"text": str},
    "early": {"more": bool},
    "signal": {"number": int},
    "exit": {"code": int},
    "called": {},
    "eof": {},
}


def make_channels(folder: str) -> None:
    """Make `folder` anew. A process that still has a channel of the old one finds no more files, and ends."""
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(CHANNELS):
        channel = os.path.join(folder, str(number))
        os.makedirs(channel, 0o755)
        for name in ("lock", "alive", *(name.decode() for name in _BYTES)):
            os.close(os.open(os.path.join(channel, name), os.O_CREAT | os.O_WRONLY, 0o644))


def _refused(limit: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(
        code, f"{os.strerror(code)} (inotify: end programs that watch files, or raise {limit} with sysctl)"
    )


class ToldProcess:
    """What one process of the stand-in has told so far."""

    def __init__(self) -> None:
        self.closed: float | None = None
        self.entries: list[ToldEntry] = []
        self._line = bytearray()
        self._size = 0

    def hear(self, byte: int) -> None:
        self._size += 1
        if self._size > _TOLD_BYTES:
            return
        if byte != 0x0A:
            self._line.append(byte)
            return
        entry, self._line = self._entry(bytes(self._line)), bytearray()
        if entry is not None:
            self.entries.append(entry)

    def _entry(self, line: bytes) -> ToldEntry | None:
        """None for what has not the shape of a record. The first is a start, and no other is."""
        try:
            record = json.loads(line)
            what, when = record.pop("what"), record.pop("t")
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
            return None
        wanted = _FACTS.get(what) if isinstance(what, str) else None
        if wanted is None or not isinstance(when, float) or bool(self.entries) is (what == "start"):
            return None
        fits = all(isinstance(record.get(key), kind) for key, kind in wanted.items())
        return ToldEntry(what, when, record) if fits else None


class ToldListener:
    """Listens to one folder `told`. `lost`: the kernel dropped events, and what was heard is not complete."""

    def __init__(self, folder: str) -> None:
        self.processes: list[ToldProcess] = []
        self.lost = False
        self._speaking: dict[str, ToldProcess] = {}
        self._channels: dict[int, tuple[str, bool]] = {}
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _refused("fs.inotify.max_user_instances")
        for channel in map(str, range(CHANNELS)):
            path = os.path.join(folder, channel)
            for target in (path, os.path.join(path, "alive")):
                mask = _IN_OPEN if target == path else _IN_OPEN | _IN_CLOSE_NOWRITE
                number = libc.inotify_add_watch(self._fd, os.fsencode(target), mask)
                if number < 0:
                    fault = _refused("fs.inotify.max_user_watches")
                    os.close(self._fd)
                    raise fault
                self._channels[number] = channel, target != path

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def receive(self) -> None:
        """Hear what has come since the last time."""
        try:
            events = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        at = 0
        while at < len(events):
            number, mask, _, length = _EVENT.unpack_from(events, at)
            name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            if mask & _IN_Q_OVERFLOW:
                self.lost = True
            elif number in self._channels:
                self._event(*self._channels[number], mask, name)

    def _event(self, channel: str, is_alive: bool, mask: int, name: bytes) -> None:
        if is_alive:
            if ended := self._speaking.pop(channel, None):
                ended.closed = time.monotonic()
            if mask & _IN_OPEN and len(self.processes) < _PROCESSES:
                self._speaking[channel] = ToldProcess()
                self.processes.append(self._speaking[channel])
        elif name in _BYTES and channel in self._speaking:  # a host may open other files there
            self._speaking[channel].hear(_BYTES[name])

    @property
    def alive(self) -> bool:
        """Whether a process of the stand-in is there."""
        return bool(self._speaking)

    @property
    def logs(self) -> tuple[PluginLog, ...]:
        return tuple(PluginLog(tuple(each.entries), each.closed) for each in self.processes if each.entries)
