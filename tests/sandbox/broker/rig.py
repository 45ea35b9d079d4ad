"""A live broker between a client and servers of the test's own, with the test in the gate's place."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trustme

from tests.conftest import ROOT, SPARE_UID, SYSTEM_PATH

HOST = "api.example.com"
VALUE = b"ghp_Xk29fLqPz81mWv0RtYbNc74JhGsDaE35uOiT"
PLACEHOLDER = b"ghp_Ab12cDeFg34hIj5KlMnOp67QrStUvW89xYzA"
SECONDS = 60.0  # guards against hanging

Handler = Callable[[socket.socket], None]
Credentials = Sequence[tuple[str, Sequence[str], Sequence[str]]]


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def get(self, name: str) -> str:
        return ", ".join(value for key, value in self.headers if key.lower() == name.lower())


class Server:
    """Serves each connection with `handler`, in a thread."""

    def __init__(self, handler: Handler, context: ssl.SSLContext | None) -> None:
        self._handler, self._context = handler, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen = bytearray()  # what serve_http() has read
        self.connections = self.ended = 0
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(SECONDS)
                self.connections += 1
                self._threads.append(threading.Thread(target=self._handle, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _handle(self, connection: Any) -> None:
        try:
            if self._context is not None:
                connection = _wrapped(self._context, connection)
                connection.do_handshake()
            self._handler(connection)
        except (OSError, EOFError) as error:
            self.errors.append(str(error))
        finally:
            self.ended += 1
            with contextlib.suppress(OSError):
                if isinstance(connection, ssl.SSLSocket):
                    connection.unwrap()
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def join(self) -> None:
        """When the broker has ended: no descriptor is left to be closed in the middle of another test."""
        for thread in self._threads:
            thread.join(SECONDS)


def _wrapped(context: ssl.SSLContext, connection: socket.socket) -> ssl.SSLSocket:
    """Raises OSError."""
    try:
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    except OSError as error:
        # It has taken over a connection that was reset, and leaves it open.
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if isinstance(made := frame.f_locals.get("self"), ssl.SSLSocket):
                made.close()
        raise


class Reader:
    """Reads HTTP from a socket, for tests: nothing is checked."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = b""

    def _fill(self) -> bool:
        piece = self.connection.recv(65536)
        self.buffer += piece
        return bool(piece)

    def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            if not self._fill():
                raise EOFError(self.buffer)
        found, _, self.buffer = self.buffer.partition(mark)
        return found + mark

    def exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            if not self._fill():
                raise EOFError(self.buffer)
        found, self.buffer = self.buffer[:count], self.buffer[count:]
        return found

    def rest(self) -> bytes:
        while self._fill():
            pass
        return self.buffer

    def head(self) -> tuple[str, list[tuple[str, str]]]:
        first, *lines = self.until(b"\r\n\r\n").decode("latin-1").strip("\r\n").split("\r\n")
        pairs = [line.split(":", 1) for line in lines]
        return first, [(name, value.strip()) for name, value in pairs]

    def body(self, headers: list[tuple[str, str]], *, to_end: bool = False) -> bytes:
        named = {name.lower(): value for name, value in headers}
        if "chunked" in named.get("transfer-encoding", ""):
            body = b""
            while size := int(self.until(b"\r\n").split(b";")[0], 16):
                body += self.exactly(size)
                self.exactly(2)
            self.until(b"\r\n")
            return body
        if "content-length" in named:
            return self.exactly(int(named["content-length"]))
        return self.rest() if to_end else b""

    def answer(self, method: str = "GET") -> Answer:
        first, headers = self.head()
        status = int(first.split(" ")[1])
        has_body = method != "HEAD" and status >= 200 and status not in (204, 304)
        return Answer(status, headers, self.body(headers, to_end=True) if has_body else b"")


class Client(Reader):
    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def ask(
        self,
        target: str = "/",
        method: str = "GET",
        headers: Sequence[str] = (),
        body: bytes = b"",
        host: str = HOST,
    ) -> Answer:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        self.send("\r\n".join((*lines, "", "")).encode("latin-1") + body)
        return self.answer(method)


class Rig:
    def __init__(
        self,
        folder: Path,
        credentials: Credentials = (("TOKEN", (f"{HOST}:443",), ("header",)),),
        requests: Sequence[str] = (),
        hidden: Sequence[tuple[str, bytes, bytes]] = (("TOKEN", PLACEHOLDER, VALUE),),
        authorities: Mapping[str, Path] | None = None,
        **more: Any,
    ) -> None:
        """`authorities`: of a host's own. The roots of the system are `self.roots`."""
        self.roots = trustme.CA()
        self._folder = folder
        self._servers: list[Server] = []
        self.roots.cert_pem.write_to_path(str(folder / "roots.pem"))
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(SECONDS)
        ready, ready_w = os.pipe()
        chain, chain_w = os.pipe()
        alive, self.alive = os.pipe()
        uid = SPARE_UID if os.geteuid() == 0 else -1
        given = {
            "credentials": list(credentials),
            "requests": list(requests),
            "system": str(folder / "roots.pem"),
            "authorities": {host: str(file) for host, file in (authorities or {}).items()},
            "hidden": [(name, *(text.decode("latin-1") for text in texts)) for name, *texts in hidden],
        }
        argv = [sys.executable, "-m", "tests.sandbox.broker.broker_host"]
        argv += map(str, (theirs.fileno(), ready_w, chain, chain_w, alive, uid))
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": SYSTEM_PATH, "PYTHONPATH": str(ROOT)},
            pass_fds=(theirs.fileno(), ready_w, chain, chain_w, alive),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(given).encode())
        self.process.stdin.close()
        for fd in (ready_w, chain, chain_w, alive):
            os.close(fd)
        theirs.close()
        with open(ready, "rb") as file:
            self.authority = file.read().decode()

    def close(self) -> int:
        """Returns the exit code of the broker."""
        with contextlib.suppress(OSError):
            self.channel.close()
        for server in self._servers:
            server.close()
        code = self.process.wait(SECONDS)
        for server in self._servers:
            server.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        with contextlib.suppress(OSError):
            os.close(self.alive)
        return code

    # --- servers -----------------------------------------------------------------------------------

    def serve(
        self,
        handler: Handler,
        *,
        tls: bool = True,
        name: str = HOST,
        authority: trustme.CA | None = None,
        **more: Any,
    ) -> Server:
        context = None
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            (authority or self.roots).issue_cert(name, **more).configure_cert(context)
        self._servers.append(Server(handler, context))
        return self._servers[-1]

    # --- the plugin --------------------------------------------------------------------------------

    def hand_over(self, server: Server, host: str = HOST, port: int = 443) -> socket.socket:
        """The plugin's side of a connection."""
        ours, theirs = socket.socketpair()
        ours.settimeout(SECONDS)
        dialled = socket.create_connection(("127.0.0.1", server.port))
        with theirs, dialled:
            rights = array.array("i", [theirs.fileno(), dialled.fileno()])
            self.channel.sendmsg(
                [f"{port} {host}".encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            )
        return ours

    def connect(
        self,
        server: Server,
        host: str = HOST,
        port: int = 443,
        *,
        tls: bool = True,
        name: str | None = "",
        alpn: Sequence[str] = ("http/1.1",),
    ) -> Client:
        connection = self.hand_over(server, host, port)
        if tls:
            context = ssl.create_default_context(cadata=self.authority)
            context.set_alpn_protocols(alpn)
            connection = context.wrap_socket(connection, server_hostname=host if name == "" else name)
        return Client(connection)

    def line(self) -> dict[str, Any]:
        """The next line about a request."""
        verdict, _, line = self.channel.recv(4096).partition(b" ")
        found: dict[str, Any] = json.loads(line)
        assert found["kind"] == "request" and found["verdict"] == verdict.decode()
        return found


@contextlib.contextmanager
def open_rig(folder: Path, **how: Any) -> Iterator[Rig]:
    rig = Rig(folder, **how)
    try:
        yield rig
    finally:
        code = rig.close()
    assert code == 0


def http(answer: bytes | Callable[[str, list[tuple[str, str]], bytes], bytes]) -> Handler:
    """A server of HTTP that says the same, or what a function makes of each request."""

    def handle(connection: socket.socket) -> None:
        reader = Reader(connection)
        with contextlib.suppress(EOFError):
            while True:
                first, headers = reader.head()
                body = reader.body(headers)
                connection.sendall(answer if isinstance(answer, bytes) else answer(first, headers, body))

    return handle


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def echo(first: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    """What was asked, as the server has read it."""
    return ok(json.dumps([first, headers, body.decode("latin-1")]).encode())
