"""One HTTPS request for a plugin, to a host on its list, within a time and a size.

A name is looked up once for each connection, each of its addresses is vetted, and an address that passed is
dialled. So no second lookup can return another address. Each redirect is checked like the first URL. Proxies
of the environment are not used.
"""

from __future__ import annotations

import functools
import math
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

import trio

from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.request import (
    Headers,
    HttpsRequest,
    Target,
    check_request,
    parse_url,
    redirect,
    write_request,
)
from runner.protocol.https.response import HttpsResponse, ResponseReader, find_location
from sandbox import surroundings
from sandbox.network import addresses
from sandbox.network.hosts import read_address
from sandbox.network.rules import HostRule, judge

MOST_BODY_BYTES = 12 << 20  # of an answer, and of a request
FETCH_SECONDS = 30.0  # for everything, redirects included
CONNECT_SECONDS = 5.0  # for one of several addresses
MOST_REDIRECTS = 5
OK = 200
# A server can make the reader work most for the fewest bytes by tiny chunks: 16 KiB of them take some 25 ms.
_RECEIVE_BYTES = 16 << 10
# Lookups at a time. A lookup cannot be ended; its thread is left behind, and must not use up those of others.
_LOOKUPS = 8
_lookup_turns: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("lookups")

Resolve = Callable[[str], Awaitable[Sequence[str]]]
Connect = Callable[[str, int], Awaitable[trio.abc.Stream]]
Vet = Callable[[str], str]
Ask = Callable[[HttpsRequest, Target], Awaitable[HttpsResponse]]
# Called with the headers and all of the body so far, whenever more of it has come.
OnPart = Callable[[Headers, bytearray], None]


async def resolve_name(name: str) -> Sequence[str]:
    """The addresses of a name, by this machine's resolver. Raises OSError."""
    try:
        turns = _lookup_turns.get()
    except LookupError:
        turns = trio.CapacityLimiter(_LOOKUPS)
        _lookup_turns.set(turns)
    look_up = functools.partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    found = await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=turns)
    return tuple(dict.fromkeys(str(info[4][0]) for info in found))


async def connect_tcp(address: str, port: int) -> trio.abc.Stream:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    dialled = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        await dialled.connect((address, port))
    except BaseException:
        dialled.close()
        raise
    return trio.SocketStream(dialled)


async def fetch(
    request: HttpsRequest,
    rules: Sequence[HostRule],
    *,
    most_bytes: int = MOST_BODY_BYTES,
    most_request_bytes: int = MOST_BODY_BYTES,
    seconds: float = FETCH_SECONDS,
    resolve: Resolve = resolve_name,
    connect: Connect = connect_tcp,
    vet: Vet = addresses.vet,
    tls: ssl.SSLContext | None = None,
    on_part: OnPart | None = None,
) -> HttpsResponse:
    """The answer of a server, whatever its status. Raises FetchFailed.

    `vet` gives the reason why an address must not be dialled, or "". `tls`: a context of make_tls()
    that trusts other authorities than this machine does.
    """

    async def ask(wanted: HttpsRequest, target: Target) -> HttpsResponse:
        context = tls or await _own_tls()
        stream = await _open(target, context, resolve, connect, vet)
        try:
            reader = await _exchange(stream, wanted, target, most_bytes, on_part)
        finally:
            # The server is not waited for.
            await trio.aclose_forcefully(stream)
        return reader.answer(wanted.url)

    with trio.move_on_after(seconds):
        return await follow(request, rules, ask, most_request_bytes)
    raise FetchFailed("timeout", f"there was no whole answer within {seconds:g} s, the time for a request")


async def follow(
    request: HttpsRequest, rules: Sequence[HostRule], ask: Ask, most_request_bytes: int = MOST_BODY_BYTES
) -> HttpsResponse:
    """Follow redirects, and return the last answer. Each URL is checked before `ask` requests it. Raises
    FetchFailed."""
    wanted = check_request(request, most_request_bytes)
    for _ in range(MOST_REDIRECTS + 1):
        target = parse_url(wanted.url)
        _judge(rules, target, "" if wanted.url == request.url else request.url)
        answer = await ask(wanted, target)
        location = find_location(answer.status, answer.headers)
        if location is None:
            return answer
        wanted = redirect(wanted, answer.status, location)
    raise FetchFailed("protocol", f"the server redirects more than {MOST_REDIRECTS} times")


def _judge(rules: Sequence[HostRule], target: Target, redirected_from: str) -> None:
    if judge(rules, target.host, target.port) is None:
        by = "the server redirects there, and " if redirected_from else ""
        message = (
            f"{target.origin} was not asked: {by}no entry of the plugin's list of hosts allows it; "
            f'add "{target.origin}" to the list'
        )
        raise FetchFailed("denied", message)


async def _open(
    target: Target, context: ssl.SSLContext, resolve: Resolve, connect: Connect, vet: Vet
) -> trio.SSLStream[trio.abc.Stream]:
    """A connection to the target, whose certificate was checked."""
    found = [target.host.text] if target.host.version else await _look_up(target, resolve)
    allowed, reasons = [], []
    for address in found:
        reason = vet(address)
        if reason:
            reasons.append(reason)
        else:
            allowed.append(address)
    if not allowed:
        # The addresses are not named: the plugin would learn those of the network that it must not reach.
        message = f"{target.origin} was not asked: its address {' and '.join(dict.fromkeys(reasons))}"
        raise FetchFailed("denied", message)
    stream = await _dial(target, allowed, connect)
    secure = trio.SSLStream(stream, context, server_hostname=target.host.text)
    try:
        await secure.do_handshake()
    except BaseException as error:
        await trio.aclose_forcefully(secure)
        if isinstance(error, trio.BrokenResourceError):
            raise FetchFailed("unreachable", _tls_message(target, error)) from None
        raise
    return secure


async def _look_up(target: Target, resolve: Resolve) -> Sequence[str]:
    try:
        found = await resolve(target.host.text)
    except OSError as error:
        raise FetchFailed("unreachable", f"{target.host} has no address: {error.strerror}") from None
    if not found:
        raise FetchFailed("unreachable", f"{target.host} has no address")
    return found


async def _dial(target: Target, found: Sequence[str], connect: Connect) -> trio.abc.Stream:
    reason = ""
    for number, address in enumerate(found, 1):
        # The last address may take all the time that is left.
        with trio.move_on_after(CONNECT_SECONDS if number < len(found) else math.inf):
            try:
                return await connect(str(read_address(address)), target.port)
            except OSError as error:
                reason = error.strerror or str(error)
    raise FetchFailed("unreachable", f"there is no connection to {target.origin}: {reason or 'no answer'}")


def _tls_message(target: Target, error: trio.BrokenResourceError) -> str:
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"{target.origin} has no valid certificate for its name: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"{target.origin} and the runner found no way to speak TLS: {cause.reason or 'unknown reason'}"
    return f"{target.origin} ended the connection before TLS was set up"


async def _exchange(
    stream: trio.SSLStream[trio.abc.Stream],
    request: HttpsRequest,
    target: Target,
    most_bytes: int,
    on_part: OnPart | None,
) -> ResponseReader:
    """Send the request and read the answer at the same time: a server may answer before it read all."""
    connection, head = write_request(request, target)
    reader = ResponseReader(connection, most_bytes)
    failure: FetchFailed | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send, stream, head, request.body or b"")
        try:
            while not reader.complete:
                reader.feed(await stream.receive_some(_RECEIVE_BYTES))
                if on_part is not None and reader.status == OK:
                    on_part(reader.headers, reader.body)
        except trio.BrokenResourceError:
            # Also if the connection ends without the end of TLS: an attacker may have cut the answer.
            message = f"the connection to {target.origin} broke before the answer was complete"
            failure = FetchFailed("protocol", message)
        except FetchFailed as failed:
            failure = failed
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return reader


async def _send(stream: trio.SSLStream[trio.abc.Stream], head: bytes, body: bytes) -> None:
    try:
        await stream.send_all(head)
        await stream.send_all(body)
    except trio.BrokenResourceError:
        pass  # reading fails too then, or finds an answer that the server sent early


async def _own_tls() -> ssl.SSLContext:
    """With the authorities that the variables name, if they do: of a client that is served, its own. OpenSSL
    would read those of this process. Raises FetchFailed."""
    environ, usual = surroundings.variables(), ssl.get_default_verify_paths()
    file, folder = environ.get("SSL_CERT_FILE") or None, environ.get("SSL_CERT_DIR") or None
    if file or folder:
        file, folder = file or usual.cafile, folder or usual.capath
    try:
        return await trio.to_thread.run_sync(_shared_tls, file, folder)
    except OSError as error:
        message = f"the authorities of SSL_CERT_FILE cannot be read: {error.strerror or error}"
        raise FetchFailed("unreachable", message) from None


def make_tls(file: str | None = None, folder: str | None = None) -> ssl.SSLContext:
    """Certificates are checked by this machine's authorities. Reading those takes some milliseconds."""
    context = ssl.create_default_context(cafile=file, capath=folder)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python takes a connection that was cut for one that ended. An answer may end with its connection.
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    context.set_alpn_protocols(["http/1.1"])
    return context


_shared_tls = functools.lru_cache(16)(make_tls)
