"""The place of --events: a path or an open descriptor, which gets a line of JSON for each event."""

from __future__ import annotations

import json
import os
import select
import time
from collections import deque
from typing import Any

from runner.cli.shared.report_file import ReportFile, is_descriptor
from sandbox.streams.endpoints import sink_for

# Bytes of lines that wait for a reader. Further lines are left out, and counted in one that says so.
WAITING_MOST_BYTES = 4 << 20
# When the plugin has ended: how long a reader may take nothing before the rest is left out.
_LAST_SECONDS = 2.0


class EventsFile:
    """Never blocks while a plugin runs. Each line is written whole or not at all; only the last one may be
    cut, if its reader stops reading and the plugin ends."""

    def __init__(self, target: str) -> None:
        """Raises ReportFileError."""
        fd = ReportFile(target, "--events").open()
        self.is_stderr = fd == 2
        self.path = "" if is_descriptor(target) else os.readlink(f"/proc/self/fd/{fd}")
        self._sink = sink_for(fd)
        self._lines: deque[memoryview] = deque()
        self._bytes = 0  # of all of them
        self._lost = 0
        self._over = False  # nobody reads them any more

    def write(self, kind: str, value: Any) -> None:
        self._send()
        line = _encode(kind, value)
        if self._over or (self._lines and self._bytes + len(line) > WAITING_MOST_BYTES):
            self._lost += 1
            return
        if self._lost:
            self._put(_encode("lost", {"lines": self._lost}))
            self._lost = 0
        self._put(line)
        self._send()

    def drain(self) -> None:
        """Write the waiting lines after the plugin has ended. Waits for the reader for a bounded time, then
        drops the rest."""
        until = time.monotonic() + _LAST_SECONDS
        poll = select.poll()
        poll.register(self._sink.fd, select.POLLOUT)
        while self._lines and (left := until - time.monotonic()) > 0:
            poll.poll(left * 1000)
            before = self._bytes
            self._send()
            if self._bytes < before:
                until = time.monotonic() + _LAST_SECONDS
        if self._lines:
            self._stop()

    def close(self) -> None:
        self.drain()
        self._stop()
        self._sink.close()

    def _stop(self) -> None:
        self._over = True
        self._lines.clear()

    def _put(self, line: bytes) -> None:
        self._lines.append(memoryview(line))
        self._bytes += len(line)

    def _send(self) -> None:
        try:
            while self._lines:
                line = self._lines[0]
                # A pipe takes a piece whole or not at all, so nobody else can write within a short line.
                taken = self._sink.write(bytes(line[: self._sink.piece]))
                self._bytes -= taken
                if taken < len(line):
                    self._lines[0] = line[taken:]
                else:
                    self._lines.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._stop()


def _encode(kind: str, value: Any) -> bytes:
    return json.dumps({"event": kind, "value": value}, separators=(",", ":"), default=str).encode() + b"\n"
