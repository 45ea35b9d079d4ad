"""Reads the name in clear text at the beginning of a connection: the server name of TLS, or Host of HTTP/1.

In doubt it refuses: the server may read another name from bytes that we do not understand. Of an encrypted
ClientHello the outer name is read; the inner one is invisible.

Only the first request or the first ClientHello of a connection is read. Anything behind it in the same bytes
is refused, except for the early data that a ClientHello announces: application records, with one
ChangeCipherSpec in front (RFC 8446, 2.3 and D.4). Later bytes are not checked: a client that waits a moment
can send anything.
"""

from __future__ import annotations

from sandbox.network.hosts import Host, parse_host
from sandbox.network.rules import parse_authority
from sandbox.speed.value import NamedTuple

MOST_FIRST_BYTES = 16 * 1024
_MOST_RECORDS = 64  # over which a ClientHello is spread
_RECORD_HEADER_BYTES = 5
_MOST_RECORD_BYTES = 16 * 1024
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_EARLY_DATA = 42  # an extension of a ClientHello
_CHANGE_CIPHER_SPEC, _APPLICATION_DATA = b"\x14\x03\x03\x00\x01\x01", 23
_MOST_SEALED_BYTES = _MOST_RECORD_BYTES + 256  # of an encrypted record
_HTTP2_PREFACE = b"PRI * HTTP/2"

# Without regular expressions: importing `re` would take a third of a gate's start.
_TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_MOST_METHOD_BYTES = 32
_VISIBLE = bytes(range(0x21, 0x7F))
_VERSIONS = (b"HTTP/1.0", b"HTTP/1.1")
_SCHEMES = (b"http", b"https")
_HTTP_PORT = 80
_MOST_HEADERS = 128  # 4000 of them, which fit into the first bytes, would take 4 ms
_MOST_EARLY_LINE_BYTES = 1024  # a longer first line is checked only when all headers are there
_HEX_DIGITS = b"0123456789abcdefABCDEF"
_MOST_CHUNK_DIGITS = 8
_MOST_LENGTH_DIGITS = 18


class ClearName(NamedTuple):
    """The result: exactly one field is set."""

    host: Host | None = None
    refused: str = ""  # why the name is unknown: the rest of a sentence that begins with the host
    needed: int = 0  # call again when there are so many bytes


class _Refusal(Exception):
    pass


class _TooShort(Exception):
    def __init__(self, needed: int) -> None:
        self.needed = needed


def read_clear_name(data: bytes) -> ClearName:
    """The name in the first bytes that a client has sent."""
    try:
        if not data:
            raise _TooShort(1)
        if data[0] == _HANDSHAKE:
            hello, end = _join_hello(data)
            extensions = _read_extensions(hello)
            _check_rest(data, end, any(kind == _EARLY_DATA for kind, _ in extensions))
            return ClearName(_read_server_name(extensions))
        return ClearName(_read_host(data))
    except _Refusal as refusal:
        return ClearName(refused=str(refusal))
    except _TooShort as short:
        if len(data) >= MOST_FIRST_BYTES or short.needed > MOST_FIRST_BYTES:
            return ClearName(refused=f"sent no name within its first {MOST_FIRST_BYTES} bytes")
        return ClearName(needed=max(short.needed, len(data) + 1))


# --- TLS ---------------------------------------------------------------------------------------------


def _join_hello(data: bytes) -> tuple[bytes, int]:
    """The ClientHello, joined from its records, and the offset behind the last of them."""
    hello = bytearray()
    at = 0
    for _ in range(_MOST_RECORDS):
        if len(data) < at + _RECORD_HEADER_BYTES:
            _check_record_start(data[at:])
            raise _TooShort(at + _RECORD_HEADER_BYTES)
        _check_record_start(data[at:])
        length = int.from_bytes(data[at + 3 : at + 5], "big")
        if not 0 < length <= _MOST_RECORD_BYTES:
            raise _Refusal("sent a TLS record of a length that no ClientHello has")
        at += _RECORD_HEADER_BYTES
        before = len(hello)
        hello += data[at : at + length]
        if hello and hello[0] != _CLIENT_HELLO:
            raise _Refusal("began TLS with something else than a ClientHello")
        whole = 4 + int.from_bytes(hello[1:4], "big") if len(hello) >= 4 else 4
        if whole > MOST_FIRST_BYTES:
            raise _Refusal(f"sent a ClientHello of {whole} bytes; {MOST_FIRST_BYTES} are the most")
        if len(hello) >= 4 and before + length > whole:
            # By the announced length: the rest of the record may not have arrived yet.
            raise _Refusal("sent more of a TLS handshake than its ClientHello")
        if len(hello) >= 4 and len(hello) == whole:
            return bytes(hello[4:]), at + length
        if len(data) < at + length:
            raise _TooShort(min(at + length, len(data) + whole - len(hello)))
        at += length
    raise _Refusal(f"sent its ClientHello in more than {_MOST_RECORDS} pieces")


def _check_record_start(data: bytes) -> None:
    if data[:1] not in (b"", b"\x16") or data[1:2] not in (b"", b"\x03"):
        raise _Refusal("sent something else than TLS handshake records")


def _check_rest(data: bytes, at: int, offers_early_data: bool) -> None:
    """Refuse everything but early data behind the ClientHello. There could be a second ClientHello with
    another name, for a server that asks for one."""
    if not offers_early_data:
        if len(data) > at:
            raise _Refusal("sent more than its ClientHello at once; a client waits for the server's answer")
        return
    start = data[at : at + len(_CHANGE_CIPHER_SPEC)]
    if start and _CHANGE_CIPHER_SPEC.startswith(start):
        at += len(start)
    while at < len(data):
        length = int.from_bytes(data[at + 3 : at + 5], "big") if len(data) >= at + _RECORD_HEADER_BYTES else 1
        if (
            data[at] != _APPLICATION_DATA
            or data[at + 1 : at + 2] not in (b"", b"\x03")
            or not 0 < length <= _MOST_SEALED_BYTES
        ):
            raise _Refusal("sent something else behind its ClientHello than early data")
        at += _RECORD_HEADER_BYTES + length


class _Fields:
    """Reads fields with a length in front. Refuses data that ends within a field."""

    def __init__(self, data: bytes) -> None:
        self.left = data

    def take(self, count: int) -> bytes:
        if len(self.left) < count:
            raise _Refusal("sent a ClientHello that ends within a field")
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> bytes:
        return self.take(self.number(size))


def _read_extensions(hello: bytes) -> list[tuple[int, bytes]]:
    """Type and body of each extension."""
    fields = _Fields(hello)
    fields.take(2 + 32)  # version and random
    fields.block(1)  # session id
    fields.block(2)  # cipher suites
    fields.block(1)  # compression
    extensions = _Fields(fields.block(2) if fields.left else b"")
    if fields.left:
        raise _Refusal("sent a ClientHello with bytes after its end")
    found = []
    while extensions.left:
        found.append((extensions.number(2), extensions.block(2)))
    return found


def _read_server_name(extensions: list[tuple[int, bytes]]) -> Host:
    names = [body for kind, body in extensions if kind == _SERVER_NAME]
    if not names:
        raise _Refusal("sent a ClientHello without a server name")
    if len(names) > 1:
        raise _Refusal("sent a ClientHello with two server names")
    outer = _Fields(names[0])
    entries = _Fields(outer.block(2))
    kind, name = entries.number(1), entries.block(2)
    if outer.left or entries.left or kind != _HOST_NAME:
        raise _Refusal("sent a ClientHello with more than one server name")
    return _parse(name)


# --- HTTP --------------------------------------------------------------------------------------------


def _read_host(data: bytes) -> Host:
    if data.startswith(_HTTP2_PREFACE):
        raise _Refusal("speaks HTTP/2 without TLS, which hides the name; use TLS or HTTP/1.1")
    if not _is_method(data[: _MOST_METHOD_BYTES + 1].partition(b" ")[0]):
        raise _Refusal("speaks neither TLS nor HTTP/1, by which a name is known on this port")
    end = data.find(b"\r\n\r\n")
    first_line_end = data.find(b"\r\n")
    early = 0 <= first_line_end <= _MOST_EARLY_LINE_BYTES
    method = target = b""
    if early or end >= 0:
        method, target = _read_request(data[:first_line_end])
    # Checked before each line is read.
    if data.count(b"\r\n", 0, end + 2 if end >= 0 else len(data)) > 1 + _MOST_HEADERS:
        raise _Refusal(f"sent an HTTP request with more than {_MOST_HEADERS} headers")
    if end < 0:
        raise _TooShort(len(data) + 1)
    headers: dict[bytes, list[bytes]] = {}
    for line in data[:end].split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _is_token(name) or b"\0" in value or b"\r" in value or b"\n" in value:
            raise _Refusal("sent an HTTP header that is not in its plain form")
        headers.setdefault(name.lower(), []).append(value.strip(b" \t"))
    hosts = headers.get(b"host", [])
    if len(hosts) != 1:
        raise _Refusal(
            "sent an HTTP request with two Hosts" if hosts else "sent an HTTP request without Host"
        )
    host = _parse_authority(hosts[0])
    _check_target(method, target, host)
    _check_upgrade(headers.get(b"upgrade", []))
    _check_body(headers, data[end + 4 :])
    return host


def _is_token(text: bytes) -> bool:
    return bool(text) and not text.strip(_TOKEN)


def _is_method(text: bytes) -> bool:
    return _is_token(text) and len(text) <= _MOST_METHOD_BYTES


def _read_request(line: bytes) -> tuple[bytes, bytes]:
    """The method and the target of the first line."""
    words = line.split(b" ")
    if len(words) == 3:
        method, target, version = words
        if _is_method(method) and target and not target.strip(_VISIBLE) and version in _VERSIONS:
            return method, target
    raise _Refusal("sent a first line that is no request of HTTP/1")


def _check_upgrade(protocols: list[bytes]) -> None:
    """Refuse a change to HTTP/2, in which each request has its own name, or to TLS, which could hide
    another."""
    if any(protocol.lower() != b"websocket" for protocol in protocols):
        raise _Refusal(
            "asked to change to another protocol than websocket (the header Upgrade), in which a name cannot"
            " be judged; use HTTP/1.1 without Upgrade, or TLS from the first byte"
        )


def _check_body(headers: dict[bytes, list[bytes]], rest: bytes) -> None:
    """Refuse bytes behind the body that the headers announce: they would be a second request."""
    lengths, codings = headers.get(b"content-length", []), headers.get(b"transfer-encoding", [])
    if len(lengths) + len(codings) > 1:
        raise _Refusal("sent an HTTP request that says twice how long its body is")
    body = 0
    if lengths:
        if not lengths[0].isdigit() or len(lengths[0]) > _MOST_LENGTH_DIGITS:
            raise _Refusal("sent an HTTP request with a Content-Length that is no number")
        body = int(lengths[0])
    elif codings:
        if codings[0].rpartition(b",")[2].strip(b" \t").lower() != b"chunked":
            raise _Refusal("sent an HTTP request with a body that is not chunked (Transfer-Encoding)")
        body = _measure_chunks(rest)
    if len(rest) > body:
        raise _Refusal(
            "sent more than one HTTP request at once; only the first of a connection can be judged:"
            " wait for the answer, or use a connection for each"
        )


def _measure_chunks(rest: bytes) -> int:
    """The length of a chunked body; more than that of `rest` if the body is not complete."""
    at = 0
    while True:
        end = rest.find(b"\r\n", at)
        if end < 0:
            return len(rest) + 1
        digits = rest[at:end].partition(b";")[0].rstrip(b" \t")
        if not 0 < len(digits) <= _MOST_CHUNK_DIGITS or digits.strip(_HEX_DIGITS):
            raise _Refusal("sent a chunked HTTP body that is not in its plain form")
        size = int(digits, 16)
        if not size:
            break
        at = end + 2 + size
        if len(rest) < at + 2:
            return len(rest) + 1
        if rest[at : at + 2] != b"\r\n":
            raise _Refusal("sent a chunked HTTP body that is not in its plain form")
        at += 2
    # Trailers, and the empty line behind them.
    done = rest.find(b"\r\n\r\n", end)
    return done + 4 if done >= 0 else len(rest) + 1


def _check_target(method: bytes, target: bytes, host: Host) -> None:
    if method == b"CONNECT":
        raise _Refusal("asked for a tunnel (CONNECT), and what goes through it cannot be judged")
    if target.startswith(b"/") or target == b"*":
        return
    scheme, found, rest = target.partition(b"://")
    authority = rest.replace(b"?", b"/").replace(b"#", b"/").partition(b"/")[0]
    if not found or scheme.lower() not in _SCHEMES or b"@" in authority:
        raise _Refusal("sent an HTTP request with a target that is no path")
    if _parse_authority(authority) != host:
        raise _Refusal("sent an HTTP request with another name in its target than in Host")


def _parse_authority(text: bytes) -> Host:
    try:
        return parse_authority(_decode(text), _HTTP_PORT)[0]
    except ValueError as error:
        raise _Refusal(f"sent a name in clear text that {error}") from None


def _parse(text: bytes) -> Host:
    try:
        return parse_host(_decode(text))
    except ValueError as error:
        raise _Refusal(f"sent a name in clear text that {error}") from None


def _decode(text: bytes) -> str:
    """The text as ASCII. International names are sent as A-labels, so anything else raises ValueError."""
    if not text.isascii():
        raise ValueError("has letters beyond ASCII")
    return text.decode("ascii")
