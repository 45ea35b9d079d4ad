"""Who is at the other end of a connection, and whether they may use the door."""

from __future__ import annotations

import hmac
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from runner.serve.refusal import Refused
from sandbox.policy.load import trust_fault

if TYPE_CHECKING:
    import trio

_LEAST_TOKEN = 32
_MOST_TOKEN_BYTES = 4096
# What a browser sends as Host and Origin for a server on this machine. A page of a stranger's site whose name
# resolves to 127.0.0.1 sends that name.
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


class DoorPeer(NamedTuple):
    """The other end of a connection, before its requests are looked at."""

    uid: int | None  # by the kernel, for unix sockets; None: it came by TCP
    pid: int = 0
    subject: str = ""  # of the certificate that was verified; empty: it has to show a token
    expires: float = 0.0  # when that certificate does


class Departure:
    """Tells when the client of a connection has gone."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self.has_happened = False

    def happen(self) -> None:
        self.has_happened = True
        for each in self._calls:
            each()

    @contextmanager
    def calls(self, function: Callable[[], None]) -> Iterator[None]:
        """While this context lasts, the function is called when the client goes; at once, if it has gone."""
        if self.has_happened:
            function()
        self._calls.append(function)
        try:
            yield
        finally:
            self._calls.remove(function)


TOKEN = "token"  # the name of every caller with the token
PAGE = "page"  # of a session of the page
VISITOR = "visitor"  # of anybody, for the files of the page
CERT = "cert:"  # begins the name of a caller with a certificate
ORG = "org:"  # begins the name of a caller with a token of an org


class Rules(NamedTuple):
    """Who may use the door."""

    owner: int  # the uid of the daemon
    token: bytes = b""  # for TCP
    names: tuple[str, ...] = LOCAL_NAMES  # that a Host header may have, without the port
    orgs: Callable[[bytes], str] | None = None  # the org that a token belongs to, or ''; None: there are none


def unix_peer(connection: trio.socket.SocketType) -> DoorPeer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return DoorPeer(uid, pid)


def identify(
    peer: DoorPeer,
    headers: dict[str, list[str]],
    rules: Rules,
    by_page: Callable[[], str | None] | None = None,
) -> str:
    """The caller's name, as it stands in the ledger. Raises Refused.

    `headers`: by their names in small letters. `by_page`: the caller by TCP that the page knows, or None."""
    if peer.uid is not None:
        if peer.uid not in (rules.owner, 0):
            raise Refused(
                *(403, "not_owner", f"uid {peer.uid} may not use this door: it belongs to uid {rules.owner}"),
                "run the command as the user of the daemon, or as root",
            )
        _require_no_browser(headers)
        shown = _bearer(headers)
        if rules.orgs is None or shown is None:
            return f"uid:{peer.uid}"
        # A caller who says whose token it has is not the operator, whatever its uid is.
        if org := rules.orgs(shown):
            return ORG + org
        if not rules.token or not hmac.compare_digest(shown, rules.token):
            raise Refused(401, "wrong_token", "the token belongs to no org", "leave Authorization out")
        return f"uid:{peer.uid}"
    _require_name(headers, rules)
    _require_own_origin(headers, rules)
    if peer.subject and time.time() >= peer.expires:  # it was valid when the connection was made
        raise Refused(401, "certificate_expired", "the client's certificate has expired", "renew it")
    given = _bearer(headers)
    if rules.orgs is not None and given is not None and (org := rules.orgs(given)):
        return ORG + org
    if by_page is not None and (found := by_page()) is not None:
        return found
    if peer.subject:
        _require_no_other_page(headers)
        return CERT + peer.subject
    # Compared even if it is missing: the time must not tell one from the other.
    right = hmac.compare_digest(given or b"", rules.token)
    if not right or not rules.token:
        hint = "send the header Authorization: Bearer TOKEN, with the token in the daemon's token file"
        raise Refused(401, "wrong_token", "the request has no valid token", hint)
    return TOKEN


def _bearer(headers: dict[str, list[str]]) -> bytes | None:
    """The token that a request shows; empty: it shows something else. None: it has no such header."""
    given = headers.get("authorization")
    if given is None:
        return None
    scheme, _, word = (given[0] if len(given) == 1 else "").partition(" ")
    return word.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""


def org_of(caller: str) -> str:
    """The org of a caller with a token of one, or ''."""
    return caller.removeprefix(ORG) if caller.startswith(ORG) else ""


def is_local(caller: str) -> bool:
    """Whether a caller, as `identify` names it, came by the unix socket."""
    return caller.startswith("uid:")


def _require_no_browser(headers: dict[str, list[str]]) -> None:
    """A browser can be led to a unix socket only by a proxy of the user's own; its pages must not call."""
    if headers.get("origin"):
        raise Refused(403, "origin", "requests of web pages are refused", "send no Origin header")


def _require_name(headers: dict[str, list[str]], rules: Rules) -> None:
    hosts = headers.get("host", [])
    name = _without_port(hosts[0]) if len(hosts) == 1 else ""
    if name.lower() not in rules.names:
        raise Refused(
            *(421, "host", f"the Host header names {name!a}, which is not this door"),
            f"use one of {', '.join(rules.names)}; --http-name allows another",
        )


def _require_own_origin(headers: dict[str, list[str]], rules: Rules) -> None:
    for origin in headers.get("origin", []):
        scheme, _, host = origin.partition("://")
        if scheme not in ("http", "https") or _without_port(host).lower() not in rules.names:
            raise Refused(
                403, "origin", f"pages of {origin!a} may not call this door", "send no Origin header"
            )


def _require_no_other_page(headers: dict[str, list[str]]) -> None:
    """A browser shows the user's certificate whichever page makes the request: also one of another port of
    this machine, or one that somebody on the way has put into a connection without TLS."""
    own = [f"https://{each.lower()}" for each in headers["host"]]
    origins = [each.lower() for each in headers.get("origin", own)]
    if origins != own or not {"same-origin", "none"}.issuperset(headers.get("sec-fetch-site", ())):
        message = "only pages of this door itself may use the client's certificate"
        raise Refused(403, "origin", message, "send no Origin header")


def _without_port(host: str) -> str:
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and ":" in host else host


def read_token(path: str, least: int = _LEAST_TOKEN) -> bytes:
    """The token in a file that only this user can read, of so many characters at least. Raises ValueError."""
    fault = trust_fault(path, "the token file")
    if fault is not None:
        raise ValueError(f"{path} is not used: {fault[0]}; {fault[1]}")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
            raise ValueError(f"{path} is not used: others than its owner can read it; chmod 600 {path}")
        token = os.read(fd, _MOST_TOKEN_BYTES + 1).strip()
    finally:
        os.close(fd)
    if not least <= len(token) <= _MOST_TOKEN_BYTES or not token.isascii() or b" " in token:
        raise ValueError(
            f"{path}: a token has {least} or more ASCII characters and no space; make one with"
            f" python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > {path}"
        )
    return token
