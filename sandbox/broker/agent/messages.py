"""Messages of the ssh agent's protocol, as bytes: draft-ietf-sshm-ssh-agent, and OpenSSH's PROTOCOL.agent.

A message is its length in four bytes, its kind in one, and fields. Nothing here decides anything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

# What a client asks, and what is answered.
REQUEST_IDENTITIES, SIGN_REQUEST, EXTENSION = 11, 13, 27
FAILURE, SUCCESS, IDENTITIES_ANSWER, SIGN_RESPONSE = 5, 6, 12, 14

SESSION_BIND = b"session-bind@openssh.com"
USERAUTH_REQUEST = 50  # SSH_MSG_USERAUTH_REQUEST of RFC 4252
PLAIN, HOST_BOUND = b"publickey", b"publickey-hostbound-v00@openssh.com"

LENGTH = struct.Struct(">I")
# The largest message that a client needs has two RSA keys of 16384 bits and a signature by one.
MOST_MESSAGE_BYTES = 16 << 10


class Malformed(Exception):
    """A message that is not what its kind says."""


class Fields:
    """Reads the fields of one message, in order. Raises Malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise Malformed
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        return int.from_bytes(self.take(4))

    def string(self) -> bytes:
        return self.take(self.number())

    def end(self) -> None:
        if self._at != len(self._data):
            raise Malformed


def string(value: bytes) -> bytes:
    return LENGTH.pack(len(value)) + value


def message(kind: int, *fields: bytes) -> bytes:
    return string(bytes((kind,)) + b"".join(fields))


def identities(keys: Iterable[tuple[bytes, str]]) -> bytes:
    """The answer that lists keys, each with its comment."""
    listed = [string(blob) + string(comment.encode()) for blob, comment in keys]
    return message(IDENTITIES_ANSWER, LENGTH.pack(len(listed)), *listed)


class SessionBind(NamedTuple):
    """A client says which session its connection to the agent is for."""

    host_key: bytes
    session: bytes  # the hash of the key exchange
    signature: bytes  # of `session`, by the host
    forwards: bool  # whether the connection is for the host at the other end


def read_session_bind(body: Fields) -> SessionBind:
    found = SessionBind(body.string(), body.string(), body.string(), body.byte() != 0)
    body.end()
    return found


class SignRequest(NamedTuple):
    key: bytes
    data: bytes
    flags: int


def read_sign_request(body: Fields) -> SignRequest:
    found = SignRequest(body.string(), body.string(), body.number())
    body.end()
    return found


class LogIn(NamedTuple):
    """What a client signs to log in (RFC 4252, section 7)."""

    session: bytes
    user: bytes
    algorithm: bytes
    key: bytes
    host_key: bytes  # b"" for PLAIN, which does not name it


def read_log_in(data: bytes) -> LogIn:
    """Raises Malformed for everything else that could be signed."""
    fields = Fields(data)
    session = fields.string()
    if fields.byte() != USERAUTH_REQUEST:
        raise Malformed
    user = fields.string()
    if fields.string() != b"ssh-connection":
        raise Malformed
    method = fields.string()
    if method not in (PLAIN, HOST_BOUND) or fields.byte() != 1:
        raise Malformed
    algorithm, key = fields.string(), fields.string()
    host_key = fields.string() if method == HOST_BOUND else b""
    fields.end()
    if method == HOST_BOUND and not host_key:
        raise Malformed
    return LogIn(session, user, algorithm, key, host_key)


def read_identities(answer: bytes) -> list[bytes]:
    """The keys in an agent's answer, without its length."""
    fields = Fields(answer)
    if fields.byte() != IDENTITIES_ANSWER:
        raise Malformed
    found = []
    for _ in range(fields.number()):
        found.append(fields.string())
        fields.string()  # the comment
    fields.end()
    return found


def read_signature(answer: bytes) -> bytes:
    """The algorithm of the signature in an agent's answer, without its length."""
    fields = Fields(answer)
    if fields.byte() != SIGN_RESPONSE:
        raise Malformed
    signature = Fields(fields.string())
    fields.end()
    return signature.string()
