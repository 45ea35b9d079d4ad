"""The few forms of DER and PEM that the certificates of a launch need. `cryptography.x509` does the same, and
takes 50 to 70 ms to import, while a launch waits."""

from __future__ import annotations

import binascii

TRUE = b"\x01\x01\xff"
_PEM_CHARACTERS = 64  # of a line


def tlv(tag: int, *parts: bytes) -> bytes:
    """A tag, the length, and the parts."""
    content = b"".join(parts)
    length = len(content)
    if length < 0x80:
        return bytes((tag, length)) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(size))) + size + content


def sequence(*parts: bytes) -> bytes:
    return tlv(0x30, *parts)


def integer(value: int) -> bytes:
    return tlv(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def octets(content: bytes) -> bytes:
    return tlv(0x04, content)


def bits(content: bytes, unused: int = 0) -> bytes:
    return tlv(0x03, bytes((unused,)), content)


def name_of(oid: str) -> bytes:
    """An object identifier, such as 2.5.29.17."""
    first, second, *rest = map(int, oid.split("."))
    encoded = b""
    for number in (40 * first + second, *rest):
        group = [number & 0x7F]
        while number := number >> 7:
            group.append(0x80 | number & 0x7F)
        encoded += bytes(reversed(group))
    return tlv(0x06, encoded)


def pem(kind: str, content: bytes) -> bytes:
    text = binascii.b2a_base64(content, newline=False).decode()
    lines = [text[at : at + _PEM_CHARACTERS] for at in range(0, len(text), _PEM_CHARACTERS)]
    return "\n".join((f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", "")).encode()
