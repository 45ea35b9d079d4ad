"""The name in clear text at the beginning of a connection: the server name of TLS, or Host of HTTP/1.

A reader that is unsure refuses: what we do not understand, the server may understand as another name. Of an
encrypted ClientHello the outer name is read; the inner one is what nobody on the way can see.
"""

from __future__ import annotations

import re

from sandbox.network.hosts import Host, parse_host
from sandbox.network.rules import parse_authority
from sandbox.value import NamedTuple

MOST_FIRST_BYTES = 16 * 1024
_MOST_RECORDS = 64  # in which a ClientHello comes
_RECORD_HEADER_BYTES = 5
_MOST_RECORD_BYTES = 16 * 1024
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_HTTP2_PREFACE = b"PRI * HTTP/2"

# Patterns, compiled when the first client speaks HTTP: all of them take 5 ms of a gate's start.
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_METHOD = _TOKEN + rb"{1,32}(?: |\Z)"
_REQUEST = rb"(?P<method>" + _TOKEN + rb"{1,32}) (?P<target>[\x21-\x7e]+) HTTP/1\.[01]\Z"
# One repetition after the colon: two that can share a blank would take the square of a line's length.
_HEADER = rb"(?P<name>" + _TOKEN + rb"+):(?P<value>[^\x00\r\n]*)\Z"
_ABSOLUTE = rb"(?i:https?)://(?P<authority>[^/?#@]*)(?:[/?#].*)?\Z"
_HTTP_PORT = 80


class ClearName(NamedTuple):
    host: Host | None = None
    refused: str = ""  # why nobody can tell the name, the second half of a sentence
    needed: int = 0  # look again when there are so many bytes


class _Refusal(Exception):
    pass


class _TooShort(Exception):
    def __init__(self, needed: int) -> None:
        self.needed = needed


def read_clear_name(data: bytes) -> ClearName:
    """Looks at the first bytes that a client has sent. Exactly one field of the result is set."""
    try:
        if not data:
            raise _TooShort(1)
        if data[0] == _HANDSHAKE:
            return ClearName(_read_server_name(_join_hello(data)))
        return ClearName(_read_host(data))
    except _Refusal as refusal:
        return ClearName(refused=str(refusal))
    except _TooShort as short:
        if len(data) >= MOST_FIRST_BYTES or short.needed > MOST_FIRST_BYTES:
            return ClearName(refused=f"sent no name within its first {MOST_FIRST_BYTES} bytes")
        return ClearName(needed=max(short.needed, len(data) + 1))


# --- TLS ---------------------------------------------------------------------------------------------


def _join_hello(data: bytes) -> bytes:
    """The ClientHello, out of the records it comes in."""
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
        hello += data[at : at + length]
        if hello and hello[0] != _CLIENT_HELLO:
            raise _Refusal("began TLS with something else than a ClientHello")
        whole = 4 + int.from_bytes(hello[1:4], "big") if len(hello) >= 4 else 4
        if whole > MOST_FIRST_BYTES:
            raise _Refusal(f"sent a ClientHello of {whole} bytes; {MOST_FIRST_BYTES} are the most")
        if len(hello) >= 4 and len(hello) >= whole:
            return bytes(hello[4:whole])
        if len(data) < at + length:
            raise _TooShort(min(at + length, len(data) + whole - len(hello)))
        at += length
    raise _Refusal(f"sent its ClientHello in more than {_MOST_RECORDS} pieces")


def _check_record_start(data: bytes) -> None:
    if data[:1] not in (b"", b"\x16") or data[1:2] not in (b"", b"\x03"):
        raise _Refusal("sent something else than TLS handshake records")


class _Fields:
    """Reads fields with a length in front. Nothing may be missing."""

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


def _read_server_name(hello: bytes) -> Host:
    fields = _Fields(hello)
    fields.take(2 + 32)  # version and random
    fields.block(1)  # session id
    fields.block(2)  # cipher suites
    fields.block(1)  # compression
    extensions = _Fields(fields.block(2) if fields.left else b"")
    if fields.left:
        raise _Refusal("sent a ClientHello with bytes after its end")
    names = []
    while extensions.left:
        kind, body = extensions.number(2), extensions.block(2)
        if kind == _SERVER_NAME:
            names.append(body)
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
    if not re.match(_METHOD, data[:33]):
        raise _Refusal("speaks neither TLS nor HTTP/1, by which a name is known on this port")
    end = data.find(b"\r\n\r\n")
    first_line_end = data.find(b"\r\n")
    if first_line_end >= 0 and not re.match(_REQUEST, data[:first_line_end]):
        raise _Refusal("sent a first line that is no request of HTTP/1")
    if end < 0:
        raise _TooShort(len(data) + 1)
    request, *headers = data[:end].split(b"\r\n")
    matched = re.match(_REQUEST, request)
    assert matched is not None
    hosts = []
    for line in headers:
        header = re.match(_HEADER, line)
        if header is None:
            raise _Refusal("sent an HTTP header that is not in its plain form")
        if header["name"].lower() == b"host":
            hosts.append(header["value"].strip(b" \t"))
    if len(hosts) != 1:
        raise _Refusal(
            "sent an HTTP request with two Hosts" if hosts else "sent an HTTP request without Host"
        )
    host = _parse_authority(hosts[0])
    _check_target(matched["method"], matched["target"], host)
    return host


def _check_target(method: bytes, target: bytes, host: Host) -> None:
    if method == b"CONNECT":
        raise _Refusal("asked for a tunnel (CONNECT), and what goes through it cannot be judged")
    if target.startswith(b"/") or target == b"*":
        return
    absolute = re.match(_ABSOLUTE, target)
    if absolute is None:
        raise _Refusal("sent an HTTP request with a target that is no path")
    if _parse_authority(absolute["authority"]) != host:
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
    """International names are in A-labels on the wire."""
    if not text.isascii():
        raise ValueError("has letters beyond ASCII")
    return text.decode("ascii")
