"""A name for some bytes that nobody can make other bytes have."""

from __future__ import annotations

try:
    # hashlib loads OpenSSL to offer what CPython has built in: 3 ms of a launch.
    from _blake2 import blake2b
except ImportError:  # another Python than CPython
    from hashlib import blake2b


def fingerprint(*parts: bytes) -> str:
    """64 hexadecimal digits. Each part counts with its length, so that moving a border changes the name."""
    digest = blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return str(digest.hexdigest())
