"""Host keys, and the signatures by which a host proves a session, in SSH's formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sandbox.broker.agent.messages import Fields, Malformed

# RSA keys of fewer bits can be factored. More make a signature slow.
_RSA_BITS = range(2048, 16384 + 1)
_MOST_SIGNATURE_BYTES = 4096
_ECDSA = (b"ecdsa-sha2-nistp256", b"ecdsa-sha2-nistp384", b"ecdsa-sha2-nistp521")
_RSA = (b"rsa-sha2-256", b"rsa-sha2-512")  # not b"ssh-rsa", which is SHA-1

KINDS = frozenset((b"ssh-ed25519", b"ssh-rsa", *_ECDSA))

# Whether a signature, in SSH's format, is this key's under this text.
Verifier = Callable[[bytes, bytes], bool]


def read_kind(blob: bytes) -> bytes:
    """The kind of a key that we can verify signatures of. Raises Malformed."""
    fields = Fields(blob)
    kind = fields.string()
    if kind not in KINDS:
        raise Malformed
    number = fields.string()
    if kind != b"ssh-ed25519":
        number = fields.string()  # after the exponent, or the name of the curve
    if kind == b"ssh-rsa" and int.from_bytes(number).bit_length() not in _RSA_BITS:
        raise Malformed
    fields.end()
    return kind


def load_verifier(blob: bytes) -> Verifier:
    """Raises Malformed if it is no key, or one of another kind."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    kind = read_kind(blob)
    try:
        key = load_ssh_public_key(_as_text(kind, blob))
    except (ValueError, UnsupportedAlgorithm):
        raise Malformed from None
    check = _find_check(kind, key)

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
    for algorithm in (kind, *_RSA):
        for value in (b"\0" * 64, b"\0\0\0\x01\x01\0\0\0\x01\x01"):
            verify(_field(algorithm) + _field(value), b"")
    return verify


def _find_check(kind: bytes, key: Any) -> Callable[[bytes, bytes, bytes], None]:
    """A function that raises Malformed or InvalidSignature."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
    from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512

    hashes = dict(zip((*_ECDSA, *_RSA), (SHA256(), SHA384(), SHA512(), SHA256(), SHA512()), strict=True))

    def check_ed25519(algorithm: bytes, value: bytes, text: bytes) -> None:
        if algorithm != kind:
            raise Malformed
        key.verify(value, text)

    def check_ecdsa(algorithm: bytes, value: bytes, text: bytes) -> None:
        if algorithm != kind:
            raise Malformed
        fields = Fields(value)
        r, s = (int.from_bytes(fields.string(), signed=True) for _ in range(2))
        fields.end()
        if r <= 0 or s <= 0:
            raise Malformed
        key.verify(encode_dss_signature(r, s), text, ECDSA(hashes[kind]))

    def check_rsa(algorithm: bytes, value: bytes, text: bytes) -> None:
        if algorithm not in _RSA:
            raise Malformed
        key.verify(value, text, PKCS1v15(), hashes[algorithm])

    if kind == b"ssh-ed25519":
        return check_ed25519
    return check_rsa if kind == b"ssh-rsa" else check_ecdsa


def _as_text(kind: bytes, blob: bytes) -> bytes:
    from base64 import b64encode

    return kind + b" " + b64encode(blob)


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(4) + value
