"""Keys of hosts and people, and what they sign, in SSH's formats."""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Callable
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA1, SHA256, SHA384, SHA512
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sandbox.broker.agent.messages import (
    EXTENSION,
    HOST_BOUND,
    LENGTH,
    PLAIN,
    SESSION_BIND,
    SIGN_REQUEST,
    USERAUTH_REQUEST,
    string,
)


class KeyPair(NamedTuple):
    blob: bytes
    sign: Callable[[bytes], bytes]  # a text; returns the signature in SSH's format


def _blob(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    text = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return b64decode(text.split()[1])


def mpint(value: int) -> bytes:
    return string(value.to_bytes(value.bit_length() // 8 + 1) if value else b"")


def ed25519_key(seed: bytes = b"") -> KeyPair:
    """`seed`: 32 bytes, for a key that is always the same."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed or os.urandom(32))
    return KeyPair(_blob(key), lambda text: string(b"ssh-ed25519") + string(key.sign(text)))


def ecdsa_key(bits: int) -> KeyPair:
    curve, hashed = {
        256: (ec.SECP256R1(), SHA256()),
        384: (ec.SECP384R1(), SHA384()),
        521: (ec.SECP521R1(), SHA512()),
    }[bits]
    key = ec.generate_private_key(curve)

    def sign(text: bytes) -> bytes:
        r, s = decode_dss_signature(key.sign(text, ec.ECDSA(hashed)))
        return string(b"ecdsa-sha2-nistp%d" % bits) + string(mpint(r) + mpint(s))

    return KeyPair(_blob(key), sign)


def rsa_key(algorithm: bytes = b"rsa-sha2-512", bits: int = 2048) -> KeyPair:
    key = rsa.generate_private_key(65537, bits)
    hashed = {b"rsa-sha2-256": SHA256(), b"rsa-sha2-512": SHA512(), b"ssh-rsa": SHA1()}[algorithm]
    return KeyPair(
        _blob(key), lambda text: string(algorithm) + string(key.sign(text, padding.PKCS1v15(), hashed))
    )


def session_bind(
    host: KeyPair, session: bytes, signature: bytes | None = None, forwards: bytes = b"\0", rest: bytes = b""
) -> bytes:
    signature = host.sign(session) if signature is None else signature
    parts = (string(SESSION_BIND), string(host.blob), string(session), string(signature), forwards, rest)
    return bytes((EXTENSION,)) + b"".join(parts)


def log_in(
    session: bytes,
    key: bytes,
    *,
    algorithm: bytes = b"ssh-ed25519",
    host_key: bytes | None = None,
    kind: int = USERAUTH_REQUEST,
    service: bytes = b"ssh-connection",
    method: bytes = PLAIN,
    has_signature: bytes = b"\1",
    rest: bytes = b"",
) -> bytes:
    """What a client signs. With a `host_key` it is bound to the host."""
    if host_key is not None:
        method, rest = HOST_BOUND, string(host_key) + rest
    parts = (string(session), bytes((kind,)), string(b"git"), string(service), string(method))
    return b"".join((*parts, has_signature, string(algorithm), string(key), rest))


def sign_request(key: bytes, data: bytes, flags: int = 0, rest: bytes = b"") -> bytes:
    return bytes((SIGN_REQUEST,)) + string(key) + string(data) + LENGTH.pack(flags) + rest
