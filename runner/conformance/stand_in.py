#!/usr/bin/env python3
"""The stand-in plugin of `runner conformance --host`: answers a host by a table, and tells what it sees.

A copy of this file is the program of the stand-in. It runs wherever the host starts it, also in a cage, so it
needs nothing but Python. Beside it are stand_in.json, which is the table, and the folder `told`.

A cage shows a plugin's folder read-only, and without sockets or FIFOs. But the kernel tells a watcher of a
folder (inotify) which files in it are opened, from whatever cage. So a line is told by opening one file for
each byte. Each process takes a channel of its own: a folder with two sets of 256 empty files, used by turns
because the kernel merges an event with an equal one before it. The end of the process closes `alive`.
A process that has no channel answers its host all the same, and is not seen.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

_TOLD_BYTES = 8192  # of one frame. Of a longer one only the beginning and the size are told
_WATCH_SECONDS = 1.0  # how often it looks whether the checker is still there
_STDERR_BYTES = 1 << 20  # sixteen times what a pipe holds
_FRAME_BYTES = 32 << 20  # a host that sends a longer frame is not read any further
_PIECE_SECONDS = 0.02
_EARLY_SECONDS = 0.3  # what a host sends so long after the handshake did not wait for the answer


class StandInProgram:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        with open(os.path.join(folder, "stand_in.json"), encoding="utf-8") as file:
            self._table: dict[str, Any] = json.load(file)
        self._run: str = self._table["run"]
        self._channel = -1
        self._set = 0
        self._telling = False
        self._signals: list[tuple[int, float]] = []  # not told yet
        self._ended = False
        self._held = b""  # of stdin: read, and not yet a whole frame

    def main(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._start()
        waiting: Any = None  # in the run "asks": the answer to the call, until the host has answered
        for message in self._messages():
            if waiting and "method" not in message and message.get("id") == self._table["ask"]["id"]:
                self._send(waiting)
                waiting = None
            replies = self._table["replies"]
            kind = str(message.get("method") or message.get("type"))
            reply = replies.get(kind) or (replies.get("*") if "method" in message else None)
            if reply is None:
                continue
            if reply["opening"] and self._run == "stderr":
                _write(2, (b"." * 99 + b"\n") * (_STDERR_BYTES // 100))
            if reply["opening"] and self._run == "pieces":
                more, _, _ = select.select([0], [], [], _EARLY_SECONDS)
                self._tell("early", more=bool(more or self._held))
            if reply["call"]:
                self._tell("called")
                if self._run == "silent":
                    continue
            answer = self._fill(reply["other"].get(self._run, reply["send"]), message)
            if self._run == "extra" and answer is not None:
                # Of JSON-RPC's own keys there are no others: what may grow is the result.
                grows = answer if "jsonrpc" not in answer else answer.get("result")
                if isinstance(grows, dict):
                    grows["unknown_key"] = {"of": ["the", "stand-in"]}
                for each in self._table["extra"] if reply["call"] else ():
                    self._send(self._fill(each, message))
            if reply["call"] and self._run == "asks":
                self._send(self._table["ask"])
                waiting = answer
            elif answer is not None and ("id" in message or "jsonrpc" not in answer):
                self._send(answer)  # a notification gets none
            if reply["exits"]:
                self._end()
        self._tell("eof")
        self._end()
        self._ended = True
        self._wait()

    # --- what is told to the checker ----------------------------------------------------------------------

    def _start(self) -> None:
        descriptors = [number for number in range(256) if _is_open(number)]
        try:
            # os.environ would have a variable more: Python sets LC_CTYPE where there is no locale.
            with open("/proc/self/environ", encoding="utf-8", errors="replace") as file:
                environ = dict(pair.partition("=")[::2] for pair in file.read().split("\0") if pair)
        except OSError:
            environ = dict(os.environ)
        self._take_channel()
        self._tell(
            "start",
            argv=sys.argv[1:],
            cwd=os.getcwd(),
            folder=self._folder,
            descriptors=descriptors,
            environ=sorted(environ),
            variable=environ.get("STAND_IN", ""),
            manifest=self._table["manifest"],
        )

    def _take_channel(self) -> None:
        """The checker's own folder first: a host may have copied this one, and shown it or not."""
        for top in (self._table["told"], os.path.join(self._folder, "told")):
            for number in range(self._table["channels"]):
                try:
                    channel = os.open(os.path.join(top, str(number)), os.O_RDONLY | os.O_DIRECTORY)
                    lock = os.open("lock", os.O_RDONLY, dir_fd=channel)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.open("alive", os.O_RDONLY, dir_fd=channel)
                except OSError:
                    continue  # no such folder, or the channel of another process
                self._channel = channel
                return
        _write(2, b"the stand-in is not seen: its folder `told` is not the checker's\n")

    def _tell(self, what: str, **facts: Any) -> None:
        self._telling = True  # a signal may come within it
        self._tell_line({"what": what, "t": time.monotonic(), **facts})
        self._telling = False
        self._tell_signals()

    def _tell_line(self, record: dict[str, Any]) -> None:
        for byte in b"\n%s\n" % json.dumps(record).encode() if self._channel >= 0 else b"":
            try:
                os.close(os.open(f"{self._set}{byte:02x}", os.O_RDONLY, dir_fd=self._channel))
            except OSError:
                os._exit(3)  # the checker has gone
            self._set ^= 1

    def _wait(self) -> None:
        """Wait for stdin, and end when the checker has gone: so no process stays that its host has
        forgotten."""
        while not select.select([0] if not self._ended else [], [], [], _WATCH_SECONDS)[0]:
            if self._channel >= 0 and not os.access("alive", os.F_OK, dir_fd=self._channel):
                os._exit(3)

    # --- its end --------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append((number, time.monotonic()))
        if not self._telling:
            self._tell_signals()

    def _tell_signals(self) -> None:
        while self._signals:
            number, when = self._signals.pop(0)
            self._tell_line({"what": "signal", "t": when, "number": number})
            self._end(128 + number)

    def _end(self, code: int = 0) -> None:
        """The host wants this process to end. The stubborn one waits for the host to do more about it."""
        if self._run != "stubborn":
            self._tell("exit", code=code)
            os._exit(code)

    # --- frames -------------------------------------------------------------------------------------------

    def _messages(self) -> Iterator[dict[str, Any]]:
        for raw, fault in self._frames():
            message = None
            if not fault:
                try:
                    message = json.loads(raw.decode("utf-8"))
                    fault = "" if isinstance(message, dict) else "not a JSON object"
                except (ValueError, RecursionError) as error:
                    fault = f"not JSON in UTF-8: {error}"
            text = raw[:_TOLD_BYTES].decode("utf-8", "backslashreplace")
            self._tell("frame", text=text, size=len(raw), fault=fault)
            if isinstance(message, dict):
                yield message

    def _frames(self) -> Iterator[tuple[bytes, str]]:
        """Each frame, and what is wrong with it."""
        while chunk := self._read():
            self._held += chunk
            while (cut := self._cut(self._held)) is not None:
                raw, fault, self._held = cut
                yield raw, fault
            if len(self._held) > _FRAME_BYTES:
                yield self._held[:200], f"more than {_FRAME_BYTES} bytes without an end of the frame"
                return
        if self._held:
            yield self._held, "stdin ended within a frame"

    def _read(self) -> bytes:
        self._wait()
        return os.read(0, 1 << 16)

    def _cut(self, held: bytes) -> tuple[bytes, str, bytes] | None:
        """The first frame, its fault, and the bytes after it. None: it is not complete."""
        if self._table["framing"] == "lines":
            raw, end, rest = held.partition(b"\n")
            return (raw, "", rest) if end else None
        header, end, rest = held.partition(b"\r\n\r\n")
        if not end:
            return None
        found = re.search(rb"(?i)(?:^|\n)content-length:[ \t]*([0-9]{1,9})", header)
        if found is None:
            return held, "a header without a Content-Length", b""
        length = int(found[1])
        if len(rest) < length:
            return None
        fault = "" if re.fullmatch(rb"Content-Length: [0-9]+", header) else f"its header is {header[:200]!r}"
        return rest[:length], fault, rest[length:]

    def _send(self, message: Any) -> None:
        raw = json.dumps(message, ensure_ascii=False).encode()
        self._tell("sent", text=raw[:400].decode("utf-8", "replace"), id=message.get("id"))
        lines = self._table["framing"] == "lines"
        raw = raw + b"\n" if lines else b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw)
        parts = (raw[:1], raw[1:20], raw[20:-1], raw[-1:]) if self._run == "pieces" else (raw,)
        for part in parts:
            _write(1, part)
            time.sleep(_PIECE_SECONDS if self._run == "pieces" else 0)

    def _fill(self, template: Any, frame: Any) -> Any:
        """The template with values of the frame: "$params.name" is one of them, "$large" a long text."""
        if isinstance(template, dict):
            return {key: self._fill(value, frame) for key, value in template.items()}
        if isinstance(template, list):
            return [self._fill(value, frame) for value in template]
        if template == "$large":
            return "x" * (self._table["large"] if self._run == "large" else 4)
        if not isinstance(template, str) or not template.startswith("$"):
            return template
        for key in template[1:].split("."):
            frame = frame.get(key) if isinstance(frame, dict) else None
        return frame


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _write(number: int, data: bytes) -> None:
    while data:
        data = data[os.write(number, data) :]


if __name__ == "__main__":
    StandInProgram(os.path.dirname(os.path.abspath(__file__))).main()
