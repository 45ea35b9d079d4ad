"""Keys on the curve P-256, by the OpenSSL that Python's own module ssl uses. The package cryptography does
the same; importing it takes 20 ms of a launch, which waits for the certificates."""

from __future__ import annotations

import _ssl
import sys

from sandbox.speed.libc import Library, MachineWord, addressof, writable

_P256 = 415  # NID_X9_62_prime256v1
_DIGEST_BYTES, _MOST_SIGNATURE_BYTES, _POINTER_BYTES = 32, 128, 8


class CurveKey:
    """A new key. It lives as long as the process."""

    def __init__(self) -> None:
        """Raises RuntimeError if this Python's OpenSSL makes none."""
        # A Python that has the module built in has OpenSSL's functions, too.
        self._openssl = Library(getattr(_ssl, "__file__", None))
        try:
            self._key = MachineWord(self._openssl.pointer("EC_KEY_new_by_curve_name")(_P256))
            made = self._openssl.EC_KEY_generate_key(self._key)
        except AttributeError as missing:
            raise RuntimeError(f"the OpenSSL of this Python cannot be used: {missing}") from None
        if made != 1:
            raise RuntimeError("OpenSSL has made no key")
        self.private = self._encode("i2d_ECPrivateKey")  # RFC 5915
        self.point = self._encode("i2o_ECPublicKey")

    def sign(self, content: bytes) -> bytes:
        """ECDSA with SHA-256, in DER."""
        digest, signature = writable(_DIGEST_BYTES), writable(_MOST_SIGNATURE_BYTES)
        size = writable(4)
        self._openssl.SHA256(content, MachineWord(len(content)), digest)
        if self._openssl.ECDSA_sign(0, digest, _DIGEST_BYTES, signature, size, self._key) != 1:
            raise RuntimeError("OpenSSL has made no signature")
        return bytes(signature.raw[: int.from_bytes(size.raw, sys.byteorder)])

    def _encode(self, name: str) -> bytes:
        encode = getattr(self._openssl, name)
        encoded = writable(encode(self._key, None))
        place = writable(_POINTER_BYTES)  # OpenSSL writes where this points to
        place.raw = addressof(encoded).to_bytes(_POINTER_BYTES, sys.byteorder)
        encode(self._key, place)
        return bytes(encoded.raw)
