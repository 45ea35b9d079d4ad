"""One HTTPS request, checked before any of it is sent: nothing in it can end a line or name another host."""

from __future__ import annotations

import re
from typing import NamedTuple

import h11

from runner.protocol.https.failure import FetchFailed, Kind
from sandbox.network.hosts import Host
from sandbox.network.http_connection import HttpConnection
from sandbox.network.rules import parse_authority

HTTPS_PORT = 443
MOST_URL_CHARACTERS = 8192
MOST_HEADERS = 100
MOST_HEAD_BYTES = 64 << 10  # of all headers of a request, and of its answer with interim ones
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

# Answers that name another place to ask.
REDIRECTS = (301, 302, 303, 307, 308)

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z", re.ASCII)
_VALUE = re.compile(r"[\t\x20-\x7e]*\Z", re.ASCII)
# The runner writes these itself, or they are about the connection, which is not the plugin's.
_RESERVED = frozenset(
    (
        "host content-length transfer-encoding connection keep-alive te trailer upgrade expect"
        " http2-settings proxy-authorization proxy-authenticate proxy-connection"
    ).split()
)
# Headers that a redirect to another host keeps, with those of the body. Others may hold a key for the first
# host.
_HARMLESS = frozenset(("accept", "accept-language", "cache-control", "range", "user-agent"))
_OF_THE_BODY = frozenset(("content-type", "content-encoding", "content-language", "content-location"))

Headers = tuple[tuple[str, str], ...]


class HttpsRequest(NamedTuple):
    url: str
    method: str = "GET"
    headers: Headers = ()
    body: bytes | None = None


class Target(NamedTuple):
    """The parts of a URL."""

    host: Host
    port: int
    path: str  # with the query

    @property
    def origin(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The normalised URL, in which every parser finds the same host."""
        return f"https://{self.host if self.port == HTTPS_PORT else self.origin}{self.path}"


def check_request(request: HttpsRequest, most_bytes: int) -> HttpsRequest:
    """The request with its method in upper case; FetchFailed if it cannot be sent as it is."""
    parse_url(request.url)
    method = request.method.upper()
    if method not in METHODS:
        raise _invalid(f"the method {request.method[:40]!a} is not one of {', '.join(METHODS)}")
    if request.body is not None and len(request.body) > most_bytes:
        message = f"the body of the request has {len(request.body)} bytes; {most_bytes} are the most"
        raise FetchFailed("too_large", message)
    if request.body and method in ("GET", "HEAD"):
        raise _invalid(f"a {method} request has no body")
    headers = tuple((name, value.strip(" \t")) for name, value in request.headers)
    for name, value in headers:
        if not _TOKEN.match(name):
            raise _invalid(f"{name[:40]!a} is not the name of a header")
        if name.lower() in _RESERVED:
            raise _invalid(f"the header {name[:40]} is written by the runner; leave it out")
        if not _VALUE.match(value):
            raise _invalid(f"the header {name[:40]} has a line break or another character that headers lack")
    if (
        len(headers) > MOST_HEADERS
        or sum(len(name) + len(value) + 4 for name, value in headers) > MOST_HEAD_BYTES
    ):
        message = (
            f"the headers of the request are more than {MOST_HEADERS}, or more than {MOST_HEAD_BYTES} bytes"
        )
        raise FetchFailed("too_large", message)
    return request._replace(method=method, headers=headers)


def parse_url(url: str) -> Target:
    """Raises FetchFailed. The host of the result is the one that is judged, looked up and dialled."""
    if len(url) > MOST_URL_CHARACTERS:
        raise _invalid(f"the URL has {len(url)} characters; {MOST_URL_CHARACTERS} are the most")
    scheme, slashes, rest = url.partition("://")
    if not slashes or scheme.lower() != "https":
        raise FetchFailed("denied", f"{_shown(url)} is not an https:// URL, and no other is asked for")
    authority = re.split(r"[/?#\\]", rest, maxsplit=1)[0]
    path = rest[len(authority) :].partition("#")[0]
    if "@" in authority:
        raise _invalid(f"{_shown(url)} has a user name; send it in a header")
    # "\" is a "/" for browsers and a letter for others.
    if not re.fullmatch(r"[\x21-\x7e]*", path, re.ASCII) or "\\" in path:
        raise _invalid(f"{_shown(url)} has characters in its path that must be written with a percent sign")
    try:
        host, port = parse_authority(authority, HTTPS_PORT)
    except ValueError as error:
        raise _invalid(f"the host in {_shown(url)} {error}") from None
    return Target(host, port, path if path.startswith("/") else f"/{path}")


def write_request(request: HttpsRequest, target: Target) -> tuple[HttpConnection, bytes]:
    """Everything before the body, and the connection that can read the answer to it."""
    host = str(target.host) if target.port == HTTPS_PORT else target.origin
    given = {name.lower() for name, _ in request.headers}
    usual = [("Accept", "*/*"), ("Accept-Encoding", "identity"), ("User-Agent", "plugin-runner")]
    headers = [("Host", host), ("Connection", "close"), *request.headers]
    headers += [(name, value) for name, value in usual if name.lower() not in given]
    if request.body is not None or request.method in ("POST", "PUT", "PATCH"):
        headers.append(("Content-Length", str(len(request.body or b""))))
    connection = HttpConnection(h11.CLIENT, MOST_HEAD_BYTES)
    head = connection.send(h11.Request(method=request.method, target=target.path, headers=headers))
    assert head is not None
    return connection, head


def redirect(request: HttpsRequest, status: int, location: str) -> HttpsRequest:
    """The request that a redirect leads to. Its URL is not judged yet; parse_url() raises FetchFailed."""
    from urllib.parse import urljoin

    # Servers write paths in UTF-8; a header is read as Latin-1, so each character is one byte.
    location = re.sub(r"[\x80-\xff]", lambda byte: f"%{ord(byte[0]):02X}", location)
    if not re.fullmatch(r"[\x21-\x7e]+", location, re.ASCII) or "\\" in location:
        raise FetchFailed("protocol", f"the server redirects to {_shown(location)}, which is not a URL")
    try:
        url = urljoin(request.url.partition("#")[0], location)
    except ValueError:
        raise FetchFailed(
            "protocol", f"the server redirects to {_shown(location)}, which is not a URL"
        ) from None
    before = parse_url(request.url)
    try:
        after = parse_url(url)
    except FetchFailed as failed:
        kind: Kind = "denied" if failed.kind == "denied" else "protocol"
        raise FetchFailed(kind, f"the server redirects, but {failed}") from None
    method, body, dropped = request.method, request.body, frozenset[str]()
    if (status == 303 and method != "HEAD") or (status in (301, 302) and method == "POST"):
        method, body, dropped = "GET", None, _OF_THE_BODY
    headers = tuple(pair for pair in request.headers if pair[0].lower() not in dropped)
    if before.origin != after.origin:
        headers = tuple(pair for pair in headers if pair[0].lower() in _HARMLESS | _OF_THE_BODY)
    return HttpsRequest(url, method, headers, body)


def _invalid(message: str) -> FetchFailed:
    return FetchFailed("invalid", message)


def _shown(url: str) -> str:
    return ascii(url if len(url) <= 200 else url[:199] + "…")
