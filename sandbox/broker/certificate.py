"""Certificates, written as DER (RFC 5280): the authority of a launch, and what it vouches for.

By hand, because `cryptography.x509` takes 50 ms of each launch: it loads every extension there is. Keys and
signatures are the library's. A fault here makes a client refuse the certificate, and the tests read each one
with that library.
"""

from __future__ import annotations

import binascii
import os
import time
from typing import Any, NamedTuple

_PrivateKey = Any  # the library's EllipticCurvePrivateKey, which is imported only where it is used

# The clock of the plugin may be another one. Clients accept a certificate of 398 days; a launch that lasts
# longer has to be repeated.
_DAYS_BEFORE, _DAYS_AFTER, _DAY = 1, 396, 86400
_NOBODY = "invalid"  # a name that no host has (RFC 2606), for constraints that allow no name at all

_BOOLEAN, _INTEGER, _BITS, _OCTETS, _OBJECT, _TEXT, _TIME = 1, 2, 3, 4, 6, 12, 24
_SEQUENCE, _SET = 0x30, 0x31
_DNS_NAME, _ADDRESS = 0x82, 0x87  # of a GeneralName
_COMMON_NAME, _ECDSA_SHA256 = "2.5.4.3", "1.2.840.10045.4.3.2"
_EC_KEY, _P256, _P256_BYTES = "1.2.840.10045.2.1", "1.2.840.10045.3.1.7", 32
_SERVER_AUTH = "1.3.6.1.5.5.7.3.1"
_OWN_KEY, _USAGE, _ALTERNATIVE_NAME, _BASIC, _CONSTRAINTS, _AUTHORITY_KEY, _PURPOSES = (
    f"2.5.29.{number}" for number in (14, 15, 17, 19, 30, 35, 37)
)


class Hosts(NamedTuple):
    names: tuple[str, ...]  # also *.example.com
    addresses: tuple[str, ...]


def make_certificates(hosts: Hosts) -> tuple[bytes, bytes]:
    """The authority's certificate; the key and the certificate for the plugin. All as PEM."""
    from cryptography.hazmat.primitives.asymmetric import ec

    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ids = os.urandom(20), os.urandom(20)  # of the keys; any unique text will do (RFC 5280, 4.2.1.2)
    names = _name(f"plugin-runner, one launch, {os.urandom(8).hex()}"), _name("plugin-runner")
    root = _sign(
        authority,
        authority,
        (names[0], names[0]),
        _extension(_BASIC, _sequence(_der(_BOOLEAN, b"\xff"), _integer(0)), critical=True),
        _extension(_USAGE, _der(_BITS, b"\x02\x04"), critical=True),  # keyCertSign
        _extension(_CONSTRAINTS, _constraints(hosts), critical=True),
        _extension(_OWN_KEY, _der(_OCTETS, ids[0])),
    )
    leaf = _sign(
        own,
        authority,
        (names[1], names[0]),
        _extension(
            _ALTERNATIVE_NAME, _sequence(*map(_dns_name, hosts.names), *map(_address, hosts.addresses))
        ),
        _extension(_BASIC, _sequence(), critical=True),
        _extension(_USAGE, _der(_BITS, b"\x07\x80"), critical=True),  # digitalSignature
        _extension(_PURPOSES, _sequence(_object(_SERVER_AUTH))),
        _extension(_AUTHORITY_KEY, _sequence(_der(0x80, ids[0]))),
        _extension(_OWN_KEY, _der(_OCTETS, ids[1])),
    )
    return root, _private_key(own) + leaf


def _sign(
    key: _PrivateKey,
    authority: _PrivateKey,
    names: tuple[bytes, bytes],
    *extensions: bytes,
) -> bytes:
    """The certificate of `key`. `names`: of the subject and of the authority."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    subject, issuer = names
    now, algorithm = time.time(), _sequence(_object(_ECDSA_SHA256))
    told = _sequence(
        _der(0xA0, _integer(2)),  # version 3
        _integer(int.from_bytes(os.urandom(16), "big") >> 1),
        algorithm,
        issuer,
        _sequence(_moment(now - _DAYS_BEFORE * _DAY), _moment(now + _DAYS_AFTER * _DAY)),
        subject,
        _public_key(key),
        _der(0xA3, _sequence(*extensions)),
    )
    signature: bytes = authority.sign(told, ec.ECDSA(hashes.SHA256()))
    whole = _sequence(told, algorithm, _der(_BITS, b"\0" + signature))
    return _pem("CERTIFICATE", whole)


def _constraints(hosts: Hosts) -> bytes:
    """For these hosts and nobody else. A kind of name that is not mentioned would not be constrained."""
    names = [_dns_name(name.removeprefix("*.")) for name in hosts.names or (_NOBODY,)]
    permitted = [*names, *(_net(f"{address}") for address in hosts.addresses)]
    excluded = [] if hosts.addresses else [_der(_ADDRESS, bytes(size)) for size in (8, 32)]  # every one
    parts = [_der(0xA0, *map(_sequence, permitted))]
    parts += [_der(0xA1, *map(_sequence, excluded))] if excluded else []
    return _sequence(*parts)


def _dns_name(name: str) -> bytes:
    return _der(_DNS_NAME, name.encode("ascii"))


def _address(address: str) -> bytes:
    import ipaddress  # 6 ms, and most hosts have names

    return _der(_ADDRESS, ipaddress.ip_address(address).packed)


def _net(text: str) -> bytes:
    import ipaddress

    net = ipaddress.ip_network(text)
    return _der(_ADDRESS, net.network_address.packed + net.netmask.packed)


def _public_key(key: _PrivateKey) -> bytes:
    return _sequence(_sequence(_object(_EC_KEY), _object(_P256)), _der(_BITS, b"\0" + _point(key)))


def _private_key(key: _PrivateKey) -> bytes:
    """As RFC 5915 has it."""
    secret: bytes = key.private_numbers().private_value.to_bytes(_P256_BYTES, "big")
    parts = _integer(1), _der(_OCTETS, secret), _der(0xA0, _object(_P256))
    return _pem("EC PRIVATE KEY", _sequence(*parts, _der(0xA1, _der(_BITS, b"\0" + _point(key)))))


def _point(key: _PrivateKey) -> bytes:
    at = key.public_key().public_numbers()
    x, y = (number.to_bytes(_P256_BYTES, "big") for number in (at.x, at.y))
    return b"\4" + bytes(x) + bytes(y)


def _pem(what: str, content: bytes) -> bytes:
    lines = [binascii.b2a_base64(content[at : at + 48]) for at in range(0, len(content), 48)]
    return f"-----BEGIN {what}-----\n".encode() + b"".join(lines) + f"-----END {what}-----\n".encode()


def _name(text: str) -> bytes:
    return _sequence(_der(_SET, _sequence(_object(_COMMON_NAME), _der(_TEXT, text.encode()))))


def _moment(seconds: float) -> bytes:
    """Until 2049 with two digits for the year, as the standard demands."""
    moment = time.gmtime(seconds)
    text = time.strftime("%Y%m%d%H%M%SZ", moment)
    return _der(_TIME - 1, text[2:].encode()) if moment.tm_year < 2050 else _der(_TIME, text.encode())


def _extension(kind: str, value: bytes, *, critical: bool = False) -> bytes:
    return _sequence(_object(kind), *([_der(_BOOLEAN, b"\xff")] * critical), _der(_OCTETS, value))


def _sequence(*parts: bytes) -> bytes:
    return _der(_SEQUENCE, *parts)


def _integer(number: int) -> bytes:
    return _der(_INTEGER, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _object(dotted: str) -> bytes:
    first, second, *others = map(int, dotted.split("."))
    return _der(_OBJECT, bytes([40 * first + second]), *map(_base_128, others))


def _base_128(number: int) -> bytes:
    found = [number & 0x7F]
    while number := number >> 7:
        found.append(number & 0x7F | 0x80)
    return bytes(reversed(found))


def _der(tag: int, *parts: bytes) -> bytes:
    """A value with its tag and its length."""
    body = b"".join(parts)
    size = len(body)
    if size < 0x80:
        return bytes([tag, size]) + body
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + body
