"""A client of the door for the command line: HTTP/1.1 on a unix socket, in a few lines.

The answers come from our own daemon, so that only what it sends has to be understood: a status line, headers,
and a body with a length or in chunks. An HTTP library would cost a warm call more than the call itself.
"""

from __future__ import annotations

import _socket as socket  # the module itself makes enumerations of all its constants: a third of a warm call
import json
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

_MOST_HEADER_BYTES = 64 << 10


class NoDaemon(Exception):
    """Nobody answers at the socket, or what answers is not a daemon of ours."""


class DoorAnswer:
    """The answer to one request. `lines` reads a body that arrives over time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        head = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        words = head[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise NoDaemon("what answers does not speak HTTP/1.1")
        self.status = int(words[1])
        self.headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:])
        }

    def _more(self) -> bytes:
        try:
            data = self._connection.recv(1 << 16)
        except OSError as error:
            raise NoDaemon(f"the connection to the daemon broke: {error.strerror or error}") from None
        if not data:
            raise NoDaemon("the daemon closed the connection before its answer was complete")
        return data

    def _until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            if len(self._buffer) > _MOST_HEADER_BYTES:
                raise NoDaemon("what answers does not speak HTTP/1.1")
            self._buffer += self._more()
        found, _, self._buffer = self._buffer.partition(end)
        return found

    def _exactly(self, count: int) -> bytes:
        parts, have = [self._buffer], len(self._buffer)
        while have < count:
            parts.append(self._more())
            have += len(parts[-1])
        whole = b"".join(parts)
        self._buffer = whole[count:]
        return whole[:count]

    def parts(self) -> Iterator[bytes]:
        """The body, as it arrives."""
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            if length := int(self.headers.get("content-length", "0") or "0"):
                yield self._exactly(length)
            return
        while size := int(self._until(b"\r\n").partition(b";")[0], 16):
            yield self._exactly(size)
            self._exactly(2)
        self._until(b"\r\n")

    def json(self) -> Any:
        raw = b"".join(self.parts())
        try:
            return json.loads(raw) if raw else None
        except ValueError:
            raise NoDaemon("the daemon's answer is not JSON") from None

    def events(self) -> Iterator[tuple[str, Any]]:
        """Server-sent events: the name of each and its data, which is JSON."""
        rest = b""
        for part in self.parts():
            *whole, rest = (rest + part).split(b"\n\n")
            for block in whole:
                fields = dict(line.partition(b": ")[::2] for line in block.split(b"\n") if line)
                if b"data" in fields:
                    yield fields.get(b"event", b"message").decode(), json.loads(fields[b"data"])


class Client:
    """One connection to the daemon. A context manager."""

    def __init__(self, path: str, seconds: float | None = None) -> None:
        """`seconds`: for each wait; None: a call may take any time."""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._connection.settimeout(seconds)
        try:
            self._connection.connect(path)
        except OSError as error:
            self._connection.close()
            raise NoDaemon(f"no daemon answers at {path}: {error.strerror}") from None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def request(
        self, method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None
    ) -> DoorAnswer:
        self.send(method, path, document, headers)
        return DoorAnswer(self._connection)

    def send(
        self, method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """A request whose answer is not read."""
        body = b"" if document is None else json.dumps(document).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        try:
            self._connection.sendall(head + body)
        except OSError as error:
            raise NoDaemon(f"the daemon does not take the request: {error.strerror}") from None


def default_socket(environ: Mapping[str, str]) -> str:
    """Where the daemon of this user listens."""
    if os.geteuid() == 0:
        return "/run/runner/serve.sock"
    base = environ.get("XDG_RUNTIME_DIR", "")
    return os.path.join(base if base.startswith("/") else f"/run/user/{os.geteuid()}", "runner/serve.sock")
