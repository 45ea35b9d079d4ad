"""Host keys, and the signatures by which a host proves a session, in SSH's formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sandbox.broker.agent.messages import Fields, Malformed, string

# RSA keys of fewer bits can be factored. More make a signature slow.
_RSA_BITS = range(2048, 16384 + 1)
_MOST_SIGNATURE_BYTES = 4096
_ED25519, _RSA = b"ssh-ed25519", b"ssh-rsa"
_ECDSA = (b"ecdsa-sha2-nistp256", b"ecdsa-sha2-nistp384", b"ecdsa-sha2-nistp521")
_RSA_ALGORITHMS = (b"rsa-sha2-256", b"rsa-sha2-512")  # not b"ssh-rsa", which is SHA-1

# Whether a signature, in SSH's format, is this key's under this text.
Verifier = Callable[[bytes, bytes], bool]
# Raises Malformed, or InvalidSignature of `cryptography`. Takes the algorithm, its value and the text.
_Check = Callable[[bytes, bytes, bytes], None]


class _PublicKey(NamedTuple):
    kind: bytes
    values: tuple[bytes, ...]  # of Ed25519 the key; of ECDSA the curve and a point; of RSA e and n


def _read(blob: bytes) -> _PublicKey:
    fields = Fields(blob)
    kind = fields.string()
    if kind not in (_ED25519, _RSA, *_ECDSA):
        raise Malformed
    values: tuple[bytes, ...] = (fields.string(),) if kind == _ED25519 else (fields.string(), fields.string())
    fields.end()
    if kind == _RSA and _number(values[1]).bit_length() not in _RSA_BITS:
        raise Malformed
    if kind in _ECDSA and not kind.endswith(b"-" + values[0]):
        raise Malformed
    return _PublicKey(kind, values)


def _number(value: bytes) -> int:
    found = int.from_bytes(value, signed=True)
    if found <= 0:
        raise Malformed
    return found


def read_kind(blob: bytes) -> bytes:
    """The kind of a key that we can verify signatures of. Raises Malformed."""
    return _read(blob).kind


def load_verifier(blob: bytes) -> Verifier:
    """Raises Malformed if it is no key, or one of another kind."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    kind, values = _read(blob)
    try:
        load = {_ED25519: _load_ed25519, _RSA: _load_rsa}.get(kind, _load_ecdsa)
        check = load(kind, values)
    except (ValueError, UnsupportedAlgorithm):
        raise Malformed from None

    def verify(signature: bytes, text: bytes) -> bool:
        try:
            fields = Fields(signature[: _MOST_SIGNATURE_BYTES + 1])
            algorithm, value = fields.string(), fields.string()
            fields.end()
            check(algorithm, value, text)
        except (Malformed, InvalidSignature):
            return False
        return True

    # The first use loads what a confined process could not. None of these is a signature.
    for algorithm in (kind, *_RSA_ALGORITHMS):
        for value in (bytes(64), string(b"\1") * 2):
            verify(string(algorithm) + string(value), b"")
    return verify


def _load_ed25519(kind: bytes, values: tuple[bytes, ...]) -> _Check:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = Ed25519PublicKey.from_public_bytes(values[0])

    def check(algorithm: bytes, value: bytes, text: bytes) -> None:
        if algorithm != kind:
            raise Malformed
        key.verify(value, text)

    return check


def _load_ecdsa(kind: bytes, values: tuple[bytes, ...]) -> _Check:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    curves = (
        (ec.SECP256R1(), hashes.SHA256()),
        (ec.SECP384R1(), hashes.SHA384()),
        (ec.SECP521R1(), hashes.SHA512()),
    )
    curve, hashed = curves[_ECDSA.index(kind)]
    key = ec.EllipticCurvePublicKey.from_encoded_point(curve, values[1])

    def check(algorithm: bytes, value: bytes, text: bytes) -> None:
        if algorithm != kind:
            raise Malformed
        fields = Fields(value)
        r, s = _number(fields.string()), _number(fields.string())
        fields.end()
        key.verify(encode_dss_signature(r, s), text, ec.ECDSA(hashed))

    return check


def _load_rsa(kind: bytes, values: tuple[bytes, ...]) -> _Check:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers

    key = RSAPublicNumbers(*map(_number, values)).public_key()
    hashed = dict(zip(_RSA_ALGORITHMS, (hashes.SHA256(), hashes.SHA512()), strict=True))

    def check(algorithm: bytes, value: bytes, text: bytes) -> None:
        if algorithm not in hashed:
            raise Malformed
        key.verify(value, text, PKCS1v15(), hashed[algorithm])

    return check
