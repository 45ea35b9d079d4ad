"""A daemon in the test's process, with its doors on real sockets, and the words to speak to them."""

from __future__ import annotations

import json
import math
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from runner.ledger.file import LedgerFile
from runner.ledger.ledger import Ledger, open_ledger
from runner.ledger.rows import AuditRow
from runner.lifecycle.supervisor import open_supervisor
from runner.serve import listen
from runner.serve.control.control import ControlPlane, open_control
from runner.serve.daemon import Daemon, ServeOptions
from runner.serve.peer import Rules

TOKEN = b"t" * 43
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class House:
    """A daemon in this process, and its doors."""

    def __init__(self, ledger: Ledger, unix: str, tcp: int, control: ControlPlane | None = None) -> None:
        self.ledger, self.unix, self.tcp, self.control = ledger, unix, tcp, control

    async def connect(
        self, *, tcp: bool = False, tls: ssl.SSLContext | None = None
    ) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
        if not tcp and tls is None:
            return await trio.open_unix_socket(self.unix)
        stream = await trio.open_tcp_stream("127.0.0.1", self.tcp)
        if tls is None:
            return stream
        return trio.SSLStream(stream, tls, server_hostname="localhost", https_compatible=True)

    async def ask(self, raw: bytes, *, tcp: bool = False, tls: ssl.SSLContext | None = None) -> bytes:
        """Send bytes, and return the answer when the door has closed or its body is complete."""
        async with await self.connect(tcp=tcp, tls=tls) as stream:
            with suppress(trio.BrokenResourceError):  # it may be refused before all is sent
                await stream.send_all(raw)
            return await answer(stream)


async def answer(stream: trio.abc.ReceiveStream) -> bytes:
    found = b""
    with trio.fail_after(60):
        while b"\r\n\r\n" not in found or len(found.partition(b"\r\n\r\n")[2]) < _length(found):
            data = await stream.receive_some(1 << 16)
            if not data:
                break
            found += data
    return found


def _length(found: bytes) -> float:
    for line in found.partition(b"\r\n\r\n")[0].lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return math.inf


async def audited(ledger: Ledger, codes: int) -> list[AuditRow]:
    """The refusals in the audit, when there are so many different ones: no request waits for them."""
    while True:
        noted = await ledger.do(LedgerFile.audit, "refusal")
        if len({row.detail for row in noted}) >= codes:
            return noted


def status(raw: bytes) -> int:
    return int(raw.split(b" ")[1])


def code(raw: bytes) -> str:
    found: str = json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["code"]
    return found


@asynccontextmanager
async def house(
    folder: Path, told: list[str] | None = None, said: list[str] | None = None, **options: Any
) -> AsyncIterator[House]:
    """`told`: gets what the daemon says about bugs. `said`: gets all that it says."""

    def say(text: str) -> None:
        if said is not None:
            said.append(text)
        if told is not None and text.startswith("internal"):
            told.append(text)

    unix = listen.listen_unix(str(folder / "run/serve.sock"))
    tcp = listen.listen_tcp("127.0.0.1:0", anywhere=False)
    given = ServeOptions(
        listeners=(unix, tcp),
        **{
            "config": (str(folder / "none"),),
            "ledger": str(folder / "ledger/ledger.db"),
            "rules": Rules(os.geteuid(), TOKEN),
            **options,
        },
    )
    with unix, tcp:
        async with AsyncExitStack() as stack:
            ledger = await stack.enter_async_context(open_ledger(given.ledger, busy_seconds=0.0))
            supervisor = await stack.enter_async_context(open_supervisor())
            control = None
            if given.control is not None:
                opened = open_control(given.control, ledger, {}, say)
                control = await stack.enter_async_context(opened)
            daemon = Daemon(given, supervisor, ledger, {}, say, control=control)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(daemon.run)
                yield House(ledger, unix.getsockname(), tcp.getsockname()[1], control)
                daemon._drain(0.0)


def request(path: str = "/health", *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
