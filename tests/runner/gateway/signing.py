"""The tracker as a process, and what reaches it: the runner's own requests, with another resolver, another
authority and no objection to this machine's address."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import trio
import trustme

from runner.gateway.listed_hosts import Ask
from runner.protocol.https.fetch import OnPart, connect_tcp, fetch, make_tls
from runner.protocol.https.request import HttpsRequest, parse_url
from runner.protocol.https.response import HttpsResponse
from sandbox.network.rules import parse_rules
from sandbox.policy.policy import NetworkRule
from tests.conftest import ROOT
from tests.runner.gateway.tracker import LOGIN, TRACKER

RULE = NetworkRule(ceiling="allowlist", hosts=(f"{TRACKER}:443", f"{LOGIN}:443"))


class Tracker:
    def __init__(self, process: subprocess.Popen[str], port: int, tls: ssl.SSLContext) -> None:
        self._process, self._port, self._tls = process, port, tls
        self.asked: list[HttpsRequest] = []

    def tell(self, line: str = "look") -> list[str]:
        """Have it obey. Returns what has happened there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        found: list[str] = json.loads(self._process.stdout.readline())
        return found

    def asking(self, seconds: float = 60.0) -> Ask:
        async def ask(request: HttpsRequest, on_part: OnPart | None = None) -> HttpsResponse:
            self.asked.append(request)
            only = parse_rules((parse_url(request.url).origin,))
            return await fetch(
                request,
                only,
                seconds=seconds,
                resolve=self._resolve,
                connect=self._connect,
                vet=lambda address: "",
                tls=self._tls,
                on_part=on_part,
            )

        return ask

    async def redirect_of(self, url: str) -> str:
        asked = urlsplit(url)
        plain = await connect_tcp("127.0.0.1", self._port)
        stream = trio.SSLStream(plain, self._tls, server_hostname=asked.hostname, https_compatible=True)
        async with stream:
            head = f"GET {asked.path}?{asked.query} HTTP/1.1\r\nHost: {asked.hostname}\r\n"
            await stream.send_all(f"{head}Connection: close\r\n\r\n".encode())
            answer = b"".join([part async for part in stream]).decode()
        [location] = [line[10:] for line in answer.split("\r\n") if line.lower().startswith("location: ")]
        return location

    async def _resolve(self, name: str) -> Sequence[str]:
        return ("127.0.0.1",)

    async def _connect(self, address: str, port: int) -> trio.abc.Stream:
        return await connect_tcp(address, self._port)


@contextmanager
def running_tracker(folder: Path) -> Iterator[Tracker]:
    authority = trustme.CA()
    certificate = authority.issue_cert(LOGIN, TRACKER, "evil.example.com")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "tracker.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "tracker.key"))
    tls = make_tls()
    authority.configure_trust(tls)
    files = [str(folder / "tracker.pem"), str(folder / "tracker.key")]
    argv = [sys.executable, "-m", "tests.runner.gateway.tracker", *files]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield Tracker(process, int(process.stdout.readline()), tls)
        finally:
            process.kill()


async def browse(tracker: Tracker, url: str, **changed: str) -> str:
    """Open a link as a browser does, up to the callback. `changed`: parameters for the callback, in place of
    those that the authorization server gave. Returns what the page says."""
    place = urlsplit(await tracker.redirect_of(url))
    assert place.hostname == "127.0.0.1" and place.port is not None
    given = {**dict(parse_qsl(place.query)), **changed}
    return await get(place.port, f"{place.path}?{urlencode(given)}")


async def get(port: int, path: str) -> str:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        return b"".join([part async for part in stream]).decode()
