"""The connection to the servers of a fleet: from a URL, or from a file that says who we are.

    servers = ["tls://nats1.example:4222", "tls://nats2.example:4222"]
    user = "alice"                 # as the servers' permissions name it
    password = "@alice.password"   # a file that only its owner can read; or nkey = "@…", or credentials = "…"
    ca = "ca.pem"                  # for tls://; with certificate and key if the servers ask for them
    api = "runner.api"             # for a submitter that has an account of its own: policies/nats/fleet.conf

The rules for the file are those of a policy: one that another user can write is not used.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import nats
import nats.errors
from nats.aio.client import Client as NatsClient
from nats.js.client import JetStreamContext

from runner.fleet.names import is_token
from runner.serve.peer import read_token
from sandbox.document.diagnostic import Diagnostic, DocumentError, did_you_mean
from sandbox.document.read import parse, read_bounded
from sandbox.policy.load import trust_fault

ANYONE = "anyone"  # the user where the servers ask for no name
API_SECONDS = 5.0
_CONNECT_SECONDS = 15.0
_CLOSE_SECONDS = 2
_ATTEMPTS = 20  # to reach each server again
_SILENT_SECONDS = 4  # for a server to answer a ping; until the next one, it is asked nothing
_PENDING_BYTES = 8 << 20  # that wait to be sent
_KEYS = ("servers", "user", "password", "nkey", "credentials", "ca", "certificate", "key", "api")


class NoFleet(Exception):
    """No server of the fleet answers, or it refuses us. The message says which and why."""


class FleetAddress(NamedTuple):
    servers: tuple[str, ...]
    user: str = ANYONE
    password: str = ""
    nkey: str = ""  # a seed
    credentials: str = ""  # the path of a file
    ca: str = ""
    certificate: str = ""
    key: str = ""
    api: str = "$JS.API"  # where JetStream answers; a submitter's account has another name for it

    @property
    def salt(self) -> bytes:
        """What only this user knows. Clients of one user have the same."""
        return _salt(self.user, self.password or self.nkey, self.credentials or self.key)

    def __repr__(self) -> str:
        return f"FleetAddress({', '.join(self.servers)}, {self.user})"


@lru_cache(16)
def _salt(user: str, secret: str, path: str) -> bytes:
    """Slowly: what it marks is seen by others, who could try passwords."""
    raw = secret.encode() if secret or not path else read_bounded(path)
    return hashlib.scrypt(raw, salt=f"runner fleet {user}".encode(), n=1 << 14, r=8, p=1)


def read_address(word: str) -> FleetAddress:
    """A URL, several with commas between them, or a file. Raises ValueError and DocumentError."""
    if "://" not in word:
        return _read_file(word)
    parts = word.split(",")
    found = urlsplit(parts[0])
    user, password = unquote(found.username or ANYONE), unquote(found.password or "")
    servers = tuple(_without_user(each) for each in parts)
    return _checked(FleetAddress(servers, user, password))


def _without_user(url: str) -> str:
    try:
        found = urlsplit(url)
        port = f":{found.port or 4222}"
    except ValueError as error:
        raise ValueError(f"{url.rpartition('@')[2]}: {error}") from None
    host = found.hostname or ""
    if found.scheme not in ("nats", "tls") or not host:
        raise ValueError(f"{found.scheme}://{host}: write nats://HOST:PORT or tls://HOST:PORT, or a file")
    return f"{found.scheme}://[{host}]{port}" if ":" in host else f"{found.scheme}://{host}{port}"


def _read_file(path: str) -> FleetAddress:
    if not os.path.isfile(path):
        raise ValueError(f"{path}: there is no such file; write nats://HOST:PORT, or a file with servers")
    if (fault := trust_fault(path, "the fleet's file")) is not None:
        raise ValueError(f"{path} is not used: {fault[0]}; {fault[1]}")
    document = parse(path, read_bounded(path), "toml")
    folder = os.path.dirname(os.path.abspath(path))
    given: dict[str, Any] = {}
    for key, value in document.data.items():
        right = list if key == "servers" else str
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS)
            line = Diagnostic(path, *document.where((key,)), "fleet_key", f"{key!a} is no key", hint)
            raise DocumentError(line)
        if not isinstance(value, right) or not value or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{path}: {key}: its value has the wrong type, or is empty")
        given[key] = value
    if "servers" not in given:
        raise ValueError(f'{path}: it names no servers; write servers = ["nats://HOST:PORT"]')
    for key in ("password", "nkey"):
        if key in given:
            if not given[key].startswith("@"):
                raise ValueError(
                    f'{path}: {key}: write the name of a file that has it, as in {key} = "@FILE"'
                )
            given[key] = read_token(os.path.join(folder, given[key][1:]), 8).decode()
    for key in ("credentials", "ca", "certificate", "key"):
        if key in given:
            given[key] = os.path.join(folder, given[key])
            if (fault := trust_fault(given[key], f"the file of {key}")) is not None:
                raise ValueError(f"{given[key]} is not used: {fault[0]}; {fault[1]}")
    return _checked(FleetAddress(**{**given, "servers": tuple(map(_without_user, given["servers"]))}))


def _checked(address: FleetAddress) -> FleetAddress:
    if not is_token(address.user):
        raise ValueError(
            f"user {address.user!a}: it is a part of subjects, so only letters, digits, _, -, ~ and @"
        )
    if not all(map(is_token, address.api.removeprefix("$").split("."))):
        raise ValueError(f'api {address.api!a}: it is a subject, such as "runner.api"')
    if sum(map(bool, (address.password, address.nkey, address.credentials))) > 1:
        raise ValueError("password, nkey, credentials: only one of them")
    return address


class Connected(NamedTuple):
    nc: NatsClient
    js: JetStreamContext
    address: FleetAddress


Heard = Callable[[str], Awaitable[None]]


@asynccontextmanager
async def connect(
    address: FleetAddress,
    name: str,
    *,
    on_lost: Heard | None = None,
    on_back: Heard | None = None,
    say: Callable[[str], None] = lambda text: None,
    stays: bool = False,
) -> AsyncIterator[Connected]:
    """On asyncio. `on_lost` is told which server was lost and why, `on_back` which one has taken its place.
    `stays`: a connection that is lost is sought for ever. Raises NoFleet."""

    closing = False
    heard: list[Exception] = []
    refused = asyncio.Event()

    async def hear_error(error: Exception) -> None:
        if not nc.is_connected:
            heard.append(error)
            if isinstance(error, ssl.SSLError):
                refused.set()
        if isinstance(error, nats.errors.Error) and "permissions violation" in str(error).lower():
            say(f"the server refuses what this user ({address.user}) may not do: {error}")
        elif not isinstance(error, nats.errors.Error | OSError | TimeoutError):
            say(f"internal: {type(error).__name__}: {error}")  # a bug of ours, in a callback

    async def lose() -> None:
        # It may have stopped, and still accept connections: the others are tried first.
        nc._server_pool.sort(key=lambda each: each is nc._current_server)
        silent = nc._pings_outstanding > nc.options["max_outstanding_pings"]
        why = "does not answer" if silent else "has closed the connection"
        text = f"the server {server_words(nc)} {why}"
        if on_lost is not None:
            await on_lost(text)
        elif not closing:
            say(f"the connection to the fleet is lost: {text}; another one is sought")

    async def come_back() -> None:
        text = f"the connection to the fleet is back, by the server {server_words(nc)}"
        if on_back is not None:
            await on_back(text)
        else:
            say(text)

    options: dict[str, Any] = {
        "servers": random.sample(address.servers, len(address.servers)),
        "dont_randomize": True,  # in the order of `lose` when the connection is lost
        "name": name,
        "inbox_prefix": f"_INBOX.{address.user}",
        "connect_timeout": 4,
        "reconnect_time_wait": 0.5,
        "max_reconnect_attempts": 1,  # until it is connected for the first time
        "ping_interval": _SILENT_SECONDS,
        "max_outstanding_pings": 1,
        "pending_size": _PENDING_BYTES,
        "error_cb": hear_error,
        "disconnected_cb": lose,
        "reconnected_cb": come_back,
    }
    if address.nkey:
        options["nkeys_seed_str"] = address.nkey
    elif address.credentials:
        options["user_credentials"] = address.credentials
    elif address.user != ANYONE:
        options |= {"user": address.user, "password": address.password}
    if any(each.startswith("tls:") for each in address.servers):
        options["tls"] = _tls(address)
    nc = NatsClient()
    connecting = asyncio.ensure_future(nc.connect(**options))
    refusing = asyncio.ensure_future(refused.wait())
    try:
        # nats-py waits for ever for a server whose certificate it does not accept.
        await asyncio.wait((connecting, refusing), timeout=_CONNECT_SECONDS, return_when="FIRST_COMPLETED")
        if not connecting.done():
            raise TimeoutError("there was no answer in time")
        connecting.result()
        nc.options["max_reconnect_attempts"] = -1 if stays else _ATTEMPTS
    except (nats.errors.Error, OSError, TimeoutError, ValueError) as error:
        await _close(nc)
        # After a refusal the server closes the connection, which is an error too.
        heard.sort(key=lambda each: "authorization" not in str(each).lower())
        shown, why = ", ".join(address.servers), words_of(heard[0] if heard else error)
        raise NoFleet(f"no server of the fleet at {shown} takes the user {address.user}: {why}") from None
    finally:
        for task in (connecting, refusing):
            task.cancel()
    try:
        yield Connected(nc, nc.jetstream(timeout=API_SECONDS, prefix=address.api), address)
    finally:
        closing = True
        await _close(nc)


async def _close(nc: NatsClient) -> None:
    """What is buffered is sent if it can be."""
    with suppress(Exception):
        async with asyncio.timeout(_CLOSE_SECONDS):
            if nc.is_connected:
                await nc.flush(_CLOSE_SECONDS)
    with suppress(Exception):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await nc.close()


def _tls(address: FleetAddress) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=address.ca or None)
        if address.certificate:
            context.load_cert_chain(address.certificate, address.key or None)
    except OSError as error:
        raise NoFleet(f"the certificates of the fleet's file cannot be used: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def server_words(nc: NatsClient) -> str:
    """The server that the client is, or was, connected to."""
    where = nc._current_server.uri.netloc.rpartition("@")[2] if nc._current_server is not None else ""
    name = str(nc._server_info.get("server_name", ""))[:100]
    return f"{name} ({where})" if name and name != where else where or "of the fleet"


def tells_full_disk(nc: NatsClient) -> bool:
    """A server before 2.10 says nothing more about a stream for which its disk had no room, and nothing at
    all to the client that wrote."""
    found = nc.connected_server_version
    return (found.major, found.minor) >= (2, 10)


def words_of(error: Exception, nc: NatsClient | None = None) -> str:
    """`nc`: the client that had no answer."""
    if nc is not None and isinstance(error, TimeoutError):
        hangs = "" if tells_full_disk(nc) else "; is its disk full? nats-server before 2.10 says nothing then"
        return f"no answer by way of the server {server_words(nc)}{hangs}"
    text = str(error).removeprefix("nats: ").strip("'\"")
    return text or type(error).__name__
