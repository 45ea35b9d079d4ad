"""fetch() against real TLS servers on loopback, which the default vetting refuses."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing
import trustme

from runner.protocol.https.failure import FetchFailed, Kind
from runner.protocol.https.fetch import (
    MOST_REDIRECTS,
    connect_tcp,
    fetch,
    make_tls,
    resolve_name,
)
from runner.protocol.https.request import Headers, HttpsRequest
from runner.protocol.https.response import HttpsResponse
from sandbox.network import addresses
from sandbox.network.rules import parse_rules
from sandbox.surroundings import ClientSurroundings, enter

NAMES = ("good.example", "other.example", "xn--bcher-kva.example", "127.0.0.1")
AUTHORITY = trustme.CA()
STRANGER = trustme.CA()  # no client trusts it

Handler = Callable[[trio.abc.Stream], Awaitable[None]]


def server_side(authority: trustme.CA = AUTHORITY, names: Sequence[str] = NAMES) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def client_side() -> ssl.SSLContext:
    context = make_tls()
    AUTHORITY.configure_trust(context)
    return context


SERVER = server_side()
CLIENT = client_side()


def allow_loopback(address: str) -> str:
    return "" if address == "127.0.0.1" else addresses.vet(address)


class Asked:
    """What the servers of one test were sent, and what was looked up and dialled."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.lookups: list[str] = []
        self.dialled: list[tuple[str, int]] = []

    async def connect(self, address: str, port: int) -> trio.abc.Stream:
        self.dialled.append((address, port))
        return await connect_tcp(address, port)

    def resolve(self, *answers: Sequence[str]) -> Callable[[str], Awaitable[Sequence[str]]]:
        """Each lookup gets the next answer, and any after that the last."""

        async def look_up(name: str) -> Sequence[str]:
            self.lookups.append(name)
            return answers[min(len(self.lookups), len(answers)) - 1]

        return look_up

    async def fetch(self, url: str, rules: Sequence[str] = ("*:*",), **change: Any) -> HttpsResponse:
        request = HttpsRequest(
            url, **{k: change.pop(k) for k in ("method", "headers", "body") if k in change}
        )
        options: dict[str, Any] = {
            "resolve": self.resolve(["127.0.0.1"]),
            "connect": self.connect,
            "vet": allow_loopback,
            "tls": CLIENT,
        }
        return await fetch(
            request, parse_rules(rules, default_ports=(443,), ranges=True), **{**options, **change}
        )


@contextlib.asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = SERVER) -> AsyncIterator[int]:
    """A server on loopback. The value is its port. `tls`: None for a server without."""

    async def serve(stream: trio.SocketStream) -> None:
        wrapped = trio.SSLStream(stream, tls, server_side=True, https_compatible=True) if tls else stream
        try:
            await handler(wrapped)
        except trio.BrokenResourceError:
            pass  # the client has what it wanted, or does not want it
        finally:
            await trio.aclose_forcefully(wrapped)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def read_head(stream: trio.abc.Stream) -> tuple[str, bytes]:
    """The head of a request, and what came after it."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = await stream.receive_some(65536)
        if not more:
            break
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head.decode("ascii"), bytes(rest)


def answering(asked: Asked, *answers: bytes, end: bool = True) -> Handler:
    """A server that answers one request on each connection: the first with the first answer, and so on."""

    async def handle(stream: trio.abc.Stream) -> None:
        head, body = await read_head(stream)
        length = next((int(x[15:]) for x in head.split("\r\n") if x.lower().startswith("content-length:")), 0)
        while len(body) < length:
            body += await stream.receive_some(65536)
        asked.heads.append(head)
        asked.bodies.append(body)
        await stream.send_all(answers[min(len(asked.heads), len(answers)) - 1])
        if end and isinstance(stream, trio.SSLStream):
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.unwrap()

    return handle


def answer(body: bytes = b"hello", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def to(url: str, status: int = 302) -> bytes:
    return answer(b"gone", f"{status} Moved", f"Location: {url}")


async def expect(kind: Kind, match: str, work: Awaitable[HttpsResponse]) -> None:
    with pytest.raises(FetchFailed, match=match) as caught:
        await work
    assert caught.value.kind == kind
    assert str(caught.value).isprintable()


# --- what works ------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_an_answer() -> None:
    asked = Asked()
    async with serving(answering(asked, answer(b"hello", "200 OK", "X-Y: z"))) as port:
        url = f"https://good.example:{port}/a?b#c"
        found = await asked.fetch(url, [f"good.example:{port}"], headers=(("X-Key", "k"),))
    assert found == HttpsResponse(200, (("Content-Length", "5"), ("X-Y", "z")), b"hello", url)
    assert asked.heads[0].startswith(f"GET /a?b HTTP/1.1\r\nHost: good.example:{port}\r\n")
    assert "\r\nX-Key: k\r\n" in asked.heads[0]
    assert asked.lookups == ["good.example"]
    assert asked.dialled == [("127.0.0.1", port)]


@pytest.mark.trio
async def test_a_body_is_sent_and_an_error_of_the_server_is_an_answer() -> None:
    asked = Asked()
    body = bytes(range(256)) * 4096
    async with serving(answering(asked, answer(b"no", "500 Internal Server Error"))) as port:
        url = f"https://good.example:{port}/"
        found = await asked.fetch(url, method="POST", body=body)
    assert (found.status, found.body) == (500, b"no")
    assert asked.bodies == [body]


@pytest.mark.trio
async def test_an_answer_that_ends_with_the_connection() -> None:
    asked = Asked()
    async with serving(answering(asked, b"HTTP/1.1 200 OK\r\n\r\nall of it")) as port:
        assert (await asked.fetch(f"https://good.example:{port}/")).body == b"all of it"


@pytest.mark.trio
async def test_an_international_name_is_looked_up_and_checked_by_its_a_label() -> None:
    asked = Asked()
    async with serving(answering(asked, answer())) as port:
        found = await asked.fetch(f"https://bücher.example:{port}/", [f"bücher.example:{port}"])
    assert found.status == 200
    assert asked.lookups == ["xn--bcher-kva.example"]
    assert f"Host: xn--bcher-kva.example:{port}" in asked.heads[0]


@pytest.mark.trio
async def test_an_address_is_dialled_without_a_lookup_if_a_rule_names_it() -> None:
    asked = Asked()
    async with serving(answering(asked, answer())) as port:
        assert (await asked.fetch(f"https://127.0.0.1:{port}/", [f"127.0.0.0/8:{port}"])).status == 200
        await expect("denied", "no entry", asked.fetch(f"https://127.0.0.1:{port}/", ["*:*"]))
    assert asked.lookups == []


@pytest.mark.trio
async def test_a_server_may_refuse_a_body_that_it_has_not_read() -> None:
    async def refuse(stream: trio.abc.Stream) -> None:
        await read_head(stream)
        await stream.send_all(answer(b"", "413 Content Too Large"))
        await trio.sleep_forever()

    async with serving(refuse) as port:
        found = await Asked().fetch(f"https://good.example:{port}/", method="PUT", body=bytes(8 << 20))
    assert found.status == 413


@pytest.mark.trio
async def test_the_answer_is_not_decoded() -> None:
    asked = Asked()
    async with serving(answering(asked, answer(b"\x1f\x8b", "200 OK", "Content-Encoding: gzip"))) as port:
        found = await asked.fetch(f"https://good.example:{port}/")
    assert found.body == b"\x1f\x8b" and ("Content-Encoding", "gzip") in found.headers
    assert "Accept-Encoding: identity" in asked.heads[0]


# --- what is denied --------------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize(
    "rules",
    [
        (),
        ("other.example:*",),
        ("*.good.example:*",),
        ("good.example:1",),
        ("good.example",),
        ("127.0.0.0/8:*",),
    ],
)
async def test_a_host_that_no_rule_allows_is_not_even_looked_up(rules: Sequence[str]) -> None:
    asked = Asked()
    async with serving(answering(asked, answer())) as port:
        message = rf"no entry of the plugin's list of hosts allows it; add \"good.example:{port}\""
        await expect("denied", message, asked.fetch(f"https://good.example:{port}/", rules))
        assert (asked.lookups, asked.dialled) == ([], [])
        await asked.fetch(f"https://good.example:{port}/", [f"good.example:{port}"])  # the control


@pytest.mark.trio
@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("http://good.example/", "denied"),
        ("https://u:p@good.example/", "invalid"),
        ("https://good.example/\r\nX: y", "invalid"),
    ],
)
async def test_a_request_that_cannot_be_sent_opens_no_connection(url: str, kind: Kind) -> None:
    asked = Asked()
    with pytest.raises(FetchFailed) as caught:
        await asked.fetch(url)
    assert caught.value.kind == kind
    assert (asked.lookups, asked.dialled) == ([], [])


@pytest.mark.trio
async def test_loopback_is_refused_unless_a_caller_allows_it() -> None:
    asked = Asked()
    async with serving(answering(asked, answer())) as port:
        url = f"https://good.example:{port}/"
        await expect(
            "denied", r"its address is this machine \(loopback\)", asked.fetch(url, vet=addresses.vet)
        )
        assert asked.dialled == []
        assert (await asked.fetch(url)).status == 200


@pytest.mark.trio
@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (["10.0.0.1"], "is private"),
        (["10.0.0.1", "192.168.1.1", "::1"], r"is private and is this machine \(loopback\)$"),
        (["169.254.169.254"], "metadata"),
        (["::ffff:10.0.0.1"], "is private"),
        (["64:ff9b::a00:1"], "carries an IPv4 address"),
        (["fe80::1%eth0"], "is not an address"),
        (["nonsense"], "is not an address"),
    ],
)
async def test_addresses_that_are_not_dialled(answers: list[str], reason: str) -> None:
    asked = Asked()
    work = asked.fetch("https://good.example/", resolve=asked.resolve(answers))
    await expect("denied", reason, work)
    assert asked.dialled == []


@pytest.mark.trio
async def test_only_addresses_that_passed_are_dialled() -> None:
    asked = Asked()
    async with serving(answering(asked, answer())) as port:
        resolve = asked.resolve(["10.0.0.1", "127.0.0.1", "192.168.0.1"])
        assert (await asked.fetch(f"https://good.example:{port}/", resolve=resolve)).status == 200
    assert asked.dialled == [("127.0.0.1", port)]


@pytest.mark.trio
async def test_a_name_that_changes_its_address_is_looked_up_once() -> None:
    """Rebinding: the second answer is another machine. Nobody asks for it."""
    asked = Asked()
    resolve = asked.resolve(["127.0.0.1"], ["10.0.0.1"])
    async with serving(answering(asked, answer())) as port:
        url = f"https://good.example:{port}/"
        assert (await asked.fetch(url, resolve=resolve)).status == 200
        assert asked.lookups == ["good.example"] and asked.dialled == [("127.0.0.1", port)]
        # The next request asks again, and is judged by what it gets.
        await expect("denied", "is private", asked.fetch(url, resolve=resolve))
    assert asked.dialled == [("127.0.0.1", port)]


# --- redirects -------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_a_redirect_to_a_listed_host_is_followed_without_the_secrets() -> None:
    asked = Asked()
    secrets: Headers = (("Authorization", "secret"), ("Cookie", "secret"), ("X-Api-Key", "secret"))
    headers: Headers = (*secrets, ("Accept", "text/k"))
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(serving(answering(asked, b"", b"", answer(b"there"))))
        first = answering(asked, to("/again"), to(f"https://other.example:{other}/x"))
        port = await stack.enter_async_context(serving(first))
        rules = [f"good.example:{port}", f"other.example:{other}"]
        found = await asked.fetch(f"https://good.example:{port}/", rules, headers=headers)
    assert (found.body, found.url) == (b"there", f"https://other.example:{other}/x")
    assert asked.lookups == ["good.example", "good.example", "other.example"]
    assert ["secret" in head for head in asked.heads] == [True, True, False]
    assert all("Accept: text/k" in head for head in asked.heads)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("location", "kind", "reason"),
    [
        (
            "https://unlisted.example/",
            "denied",
            "unlisted.example:443 was not asked: the server redirects there",
        ),
        ("https://good.example:1/", "denied", "good.example:1 was not asked"),
        ("https://good.example.evil.example/", "denied", "was not asked"),
        ("https://sub.good.example/", "denied", "was not asked"),
        ("//unlisted.example/", "denied", "was not asked"),
        ("http://good.example/", "denied", "not an https:// URL"),
        ("https://127.0.0.1/", "denied", "127.0.0.1:443 was not asked"),
        ("https://[::1]/", "denied", "was not asked"),
        ("https://169.254.169.254/latest", "denied", "was not asked"),
        ("https://2130706433/", "protocol", "plain spelling"),
        ("https://good.example@unlisted.example/", "protocol", "user name"),
        ("file:///etc/passwd", "denied", "not an https:// URL"),
    ],
)
async def test_redirects_that_are_not_followed(location: str, kind: Kind, reason: str) -> None:
    asked = Asked()
    async with serving(answering(asked, to(location), answer())) as port:
        work = asked.fetch(f"https://good.example:{port}/", [f"good.example:{port}"])
        await expect(kind, reason, work)
    assert len(asked.heads) == len(asked.lookups) == len(asked.dialled) == 1


@pytest.mark.trio
async def test_a_redirect_is_vetted_too() -> None:
    asked = Asked()
    async with serving(answering(asked, to("/again"), answer())) as port:
        resolve = asked.resolve(["127.0.0.1"], ["169.254.169.254"])
        await expect("denied", "metadata", asked.fetch(f"https://good.example:{port}/", resolve=resolve))
    assert len(asked.dialled) == 1


@pytest.mark.trio
async def test_a_loop_of_redirects_ends() -> None:
    asked = Asked()
    async with serving(answering(asked, to("/"))) as port:
        await expect("protocol", "more than 5 times", asked.fetch(f"https://good.example:{port}/"))
    assert len(asked.heads) == MOST_REDIRECTS + 1


@pytest.mark.trio
async def test_five_redirects_are_followed() -> None:
    asked = Asked()
    async with serving(answering(asked, *[to("/")] * MOST_REDIRECTS, answer())) as port:
        assert (await asked.fetch(f"https://good.example:{port}/")).status == 200


@pytest.mark.trio
async def test_the_body_of_a_redirect_is_not_waited_for() -> None:
    async def redirect_and_hang(stream: trio.abc.Stream) -> None:
        head, _ = await read_head(stream)
        if head.startswith("GET /there"):
            await stream.send_all(answer())
        await stream.send_all(b"HTTP/1.1 302 X\r\nLocation: /there\r\nContent-Length: 99999999999\r\n\r\n")
        await trio.sleep_forever()

    async with serving(redirect_and_hang) as port:
        assert (await Asked().fetch(f"https://good.example:{port}/")).body == b"hello"


@pytest.mark.trio
async def test_the_body_of_a_request_follows_only_where_it_may() -> None:
    asked = Asked()
    async with serving(answering(asked, to("/a", 307), to("/b", 303), answer())) as port:
        headers = (("Content-Type", "text/plain"),)
        await asked.fetch(f"https://good.example:{port}/", method="POST", body=b"data", headers=headers)
    assert [head.split()[0] for head in asked.heads] == ["POST", "POST", "GET"]
    assert asked.bodies == [b"data", b"data", b""]
    assert "Content-Type" not in asked.heads[2]


# --- servers that are not what they should be ------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize(
    ("tls", "reason"),
    [
        (server_side(STRANGER), "no valid certificate for its name: unable to get local issuer"),
        (server_side(names=["other.example"]), "no valid certificate for its name: Hostname mismatch"),
        (server_side(names=["good.example"]), None),
        (server_side(names=["127.0.0.1"]), "no valid certificate for its name: Hostname mismatch"),
        (None, "found no way to speak TLS"),
    ],
)
async def test_certificates(tls: ssl.SSLContext | None, reason: str | None) -> None:
    asked = Asked()

    async def in_plain(stream: trio.abc.Stream) -> None:
        await stream.send_all(answer())
        await trio.sleep_forever()

    async with serving(answering(asked, answer()) if tls else in_plain, tls) as port:
        work = asked.fetch(f"https://good.example:{port}/")
        if reason is None:
            assert (await work).status == 200  # the control
        else:
            await expect("unreachable", reason, work)
            assert asked.heads == []


@pytest.mark.trio
async def test_without_a_context_of_the_caller_this_machine_decides() -> None:
    context = make_tls()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.check_hostname and context.verify_mode == ssl.CERT_REQUIRED
    asked = Asked()
    async with serving(answering(asked, answer())) as port:
        await expect(
            "unreachable", "no valid certificate", asked.fetch(f"https://good.example:{port}/", tls=None)
        )


@pytest.mark.trio
async def test_authorities_of_the_variables_of_a_client(tmp_path: Path) -> None:
    """And not of the process that serves it."""
    file = tmp_path / "authority.pem"
    AUTHORITY.cert_pem.write_to_path(str(file))
    asked = Asked()
    async with serving(answering(asked, answer())) as port, trio.open_nursery() as nursery:

        async def fetch_with(environ: Mapping[str, str], reason: str) -> None:
            enter(ClientSurroundings(environ, "/"))
            work = asked.fetch(f"https://good.example:{port}/", tls=None)
            if reason:
                await expect("unreachable", reason, work)
            else:
                assert (await work).status == 200

        nursery.start_soon(fetch_with, {"SSL_CERT_FILE": str(file)}, "")
        nursery.start_soon(fetch_with, {}, "no valid certificate")
        nursery.start_soon(fetch_with, {"SSL_CERT_DIR": str(tmp_path)}, "no valid certificate")
        nursery.start_soon(fetch_with, {"SSL_CERT_FILE": "/nowhere"}, "SSL_CERT_FILE cannot be read")


@pytest.mark.trio
@pytest.mark.parametrize(
    ("raw", "kind", "reason"),
    [
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
            "protocol",
            "received 5 bytes, expected 100",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n", "too_large", "more than 100 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 101, "too_large", "more than 100 bytes"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"a" * 101,
            "too_large",
            "more than 100 bytes",
        ),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 101 + b"\r\n", "too_large", "more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70000, "too_large", "65536 bytes"),
        (b"", "protocol", "inside of its headers"),
        (b"SSH-2.0\r\n\r\n", "protocol", "not one of HTTP/1.1"),
    ],
)
async def test_answers_that_are_none(raw: bytes, kind: Kind, reason: str) -> None:
    asked = Asked()
    async with serving(answering(asked, raw)) as port:
        await expect(kind, reason, asked.fetch(f"https://good.example:{port}/", most_bytes=100))


@pytest.mark.trio
async def test_the_largest_answer() -> None:
    asked = Asked()
    async with serving(answering(asked, answer(bytes(12 << 20)), answer(bytes((12 << 20) + 1)))) as port:
        url = f"https://good.example:{port}/"
        assert len((await asked.fetch(url)).body) == 12 << 20
        await expect("too_large", "more than 12582912 bytes", asked.fetch(url))
        work = asked.fetch(url, method="POST", body=bytes((12 << 20) + 1))
        await expect("too_large", "12582912 are the most", work)


@pytest.mark.trio
async def test_an_answer_that_somebody_cut_off_is_not_taken_for_whole() -> None:
    """It would end with the connection. The connection ends without the end of TLS."""
    asked = Asked()
    async with serving(answering(asked, b"HTTP/1.1 200 OK\r\n\r\nhalf of", end=False)) as port:
        await expect("protocol", "broke before the answer", asked.fetch(f"https://good.example:{port}/"))


@pytest.mark.trio
@pytest.mark.parametrize("piece", [b"HTTP/1.1 100 Continue\r\n\r\n", b"X: y\r\n", b"1\r\na\r\n"])
async def test_a_server_that_never_ends(piece: bytes) -> None:
    start = {b"X": b"HTTP/1.1 200 OK\r\n", b"1": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"}

    async def flood(stream: trio.abc.Stream) -> None:
        await read_head(stream)
        await stream.send_all(start.get(piece[:1], b""))
        while True:
            await stream.send_all(piece * 100)

    async with serving(flood) as port:
        await expect("too_large", "more", Asked().fetch(f"https://good.example:{port}/", most_bytes=100_000))


@pytest.mark.trio
async def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets this port
        port = unused.getsockname()[1]
        work = Asked().fetch(f"https://good.example:{port}/")
        await expect("unreachable", "no connection to good.example:[0-9]+: .*refused", work)


@pytest.mark.trio
async def test_a_name_without_an_address() -> None:
    async def fail(name: str) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    work = Asked().fetch("https://good.example/", resolve=fail)
    await expect("unreachable", "good.example has no address: Name or service not known", work)
    asked = Asked()
    await expect(
        "unreachable", "has no address", asked.fetch("https://good.example/", resolve=asked.resolve([]))
    )


@pytest.mark.trio
async def test_the_next_address_is_tried() -> None:
    asked = Asked()

    async def connect(address: str, port: int) -> trio.abc.Stream:
        if address == "8.8.8.8":
            asked.dialled.append((address, port))
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        return await asked.connect(address, port)

    async with serving(answering(asked, answer())) as port:
        resolve = asked.resolve(["8.8.8.8", "127.0.0.1"])
        found = await asked.fetch(f"https://good.example:{port}/", resolve=resolve, connect=connect)
    assert found.status == 200
    assert asked.dialled == [("8.8.8.8", port), ("127.0.0.1", port)]


@pytest.mark.trio
async def test_this_machines_resolver() -> None:
    assert set(await resolve_name("localhost")) & {"127.0.0.1", "::1"}


@pytest.mark.trio
async def test_lookups_that_hang_do_not_take_the_threads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup cannot be ended. As many as there are threads for it hang; whoever comes then waits."""
    release = threading.Event()
    started: list[str] = []

    def hang(name: str, *_: object, **__: object) -> list[Any]:
        started.append(name)
        release.wait()
        return [(0, 0, 0, "", ("192.0.2.1", 0))]

    monkeypatch.setattr("runner.protocol.https.fetch.socket.getaddrinfo", hang)
    try:
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(resolve_name, f"{number}.example")
            while len(started) < 8:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert len(started) == 8
        assert await trio.to_thread.run_sync(str, 1) == "1"  # others still get a thread
    finally:
        release.set()
    assert await resolve_name("a.example") == ("192.0.2.1",)


# --- time: servers in memory, so that the clock can be turned -----------------------------------------


def in_memory(nursery: trio.Nursery, handler: Handler) -> Callable[[str, int], Awaitable[trio.abc.Stream]]:
    async def connect(address: str, port: int) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()

        async def serve() -> None:
            stream = trio.SSLStream(theirs, SERVER, server_side=True)
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await handler(stream)

        nursery.start_soon(serve)
        return ours

    return connect


async def hang(stream: trio.abc.Stream) -> None:
    await trio.sleep_forever()


async def drip_head(stream: trio.abc.Stream) -> None:
    await read_head(stream)
    for byte in answer(bytes(1000)):
        await stream.send_all(bytes([byte]))
        await trio.sleep(1)


async def drip_body(stream: trio.abc.Stream) -> None:
    await read_head(stream)
    await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await stream.send_all(b"1\r\na\r\n")
        await trio.sleep(1)


async def redirect_slowly(stream: trio.abc.Stream) -> None:
    await read_head(stream)
    await trio.sleep(8)
    await stream.send_all(to("/"))


async def never_read(stream: trio.abc.Stream) -> None:
    await stream.receive_some(1)
    await trio.sleep_forever()


@pytest.mark.trio
@pytest.mark.parametrize("handler", [hang, drip_head, drip_body, redirect_slowly, never_read])
async def test_a_server_has_so_much_time_for_everything(
    autojump_clock: trio.testing.MockClock, handler: Handler
) -> None:
    async with trio.open_nursery() as nursery:
        started = trio.current_time()
        connect = in_memory(nursery, handler)
        work = Asked().fetch("https://good.example/", connect=connect, method="POST", body=bytes(1 << 20))
        await expect("timeout", "no whole answer within 30 s", work)
        assert trio.current_time() - started == pytest.approx(30)
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_an_answer_just_in_time(autojump_clock: trio.testing.MockClock) -> None:
    async def take_time(stream: trio.abc.Stream) -> None:
        await read_head(stream)
        await trio.sleep(29)
        await stream.send_all(answer())

    async with trio.open_nursery() as nursery:
        found = await Asked().fetch("https://good.example/", connect=in_memory(nursery, take_time))
        assert found.body == b"hello"


@pytest.mark.trio
async def test_lookups_and_connections_are_part_of_the_time(autojump_clock: trio.testing.MockClock) -> None:
    async def wait(*_: object) -> Any:
        await trio.sleep_forever()

    await expect("timeout", "within 30 s", Asked().fetch("https://good.example/", resolve=wait))
    await expect("timeout", "within 2 s", Asked().fetch("https://good.example/", connect=wait, seconds=2))


@pytest.mark.trio
async def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    asked = Asked()

    async def quick(stream: trio.abc.Stream) -> None:
        await read_head(stream)
        await stream.send_all(answer())

    async with trio.open_nursery() as nursery:
        started = trio.current_time()
        answers = in_memory(nursery, quick)

        async def connect(address: str, port: int) -> trio.abc.Stream:
            if address != "127.0.0.1":
                await trio.sleep_forever()
            return await answers(address, port)

        resolve = asked.resolve(["8.8.8.8", "127.0.0.1"])
        found = await asked.fetch("https://good.example/", resolve=resolve, connect=connect)
        assert found.status == 200
        assert trio.current_time() - started == pytest.approx(5)


@pytest.mark.trio
async def test_a_fetch_can_be_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(3) as scope:
            await Asked().fetch("https://good.example/", connect=in_memory(nursery, hang))
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()
