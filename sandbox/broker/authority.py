"""The authority of one launch, and the certificate that the broker shows to the plugin.

Both are made before the plugin runs, in a process of its own that then ends: the key of the authority is
needed for a moment only, and nobody can sign anything else with it afterwards. One
certificate is for all hosts, because a confined process can load no other: OpenSSL's context takes it from a
file. So a name that is more than one label below a rule such as *.example.com has no certificate.
"""

from __future__ import annotations

import _socket as socket
import os
import time

from sandbox.broker.curve_key import CurveKey
from sandbox.broker.der import TRUE, bits, integer, name_of, octets, pem, sequence, tlv
from sandbox.network.credentials import CertifiedHosts

# The clock of the plugin may be another one. Clients accept a certificate of 398 days; a launch that lasts
# longer has to be repeated.
_DAYS_BEFORE, _DAYS_AFTER = 1, 396
_NOBODY = "invalid"  # a name that no host has (RFC 2606), for constraints that allow no name at all
_NAMES = ("plugin-runner: the authority of one launch", "plugin-runner: a server of one launch")
_ID_BYTES = 20  # of a key
# Object identifiers: ecdsa-with-SHA256, id-ecPublicKey, prime256v1, id-at-commonName, id-kp-serverAuth.
_SIGNATURE, _EC_KEY, _CURVE = "1.2.840.10045.4.3.2", "1.2.840.10045.2.1", "1.2.840.10045.3.1.7"
_COMMON_NAME, _SERVER = "2.5.4.3", "1.3.6.1.5.5.7.3.1"
# Extensions, below 2.5.29 (RFC 5280, 4.2.1).
_SUBJECT_KEY, _KEY_USAGE, _ALTERNATIVE_NAMES, _BASIC_CONSTRAINTS = 14, 15, 17, 19
_NAME_CONSTRAINTS, _AUTHORITY_KEY, _PURPOSES = 30, 35, 37
_SIGNS_HANDSHAKES, _SIGNS_CERTIFICATES = bits(b"\x80", 7), bits(b"\x04", 2)
_DNS_NAME, _ADDRESS = 0x82, 0x87  # tags of a general name


def run_authority(hosts: CertifiedHosts, told: int, chain: int) -> None:
    """Make the certificates, in a process of its own. The authority's goes to the pipe `told`; the key and
    the certificate for the plugin go to `chain`."""
    authority, own = make_certificates(hosts)
    _write(told, authority)
    _write(chain, own)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
    os.close(fd)


def make_certificates(hosts: CertifiedHosts) -> tuple[bytes, bytes]:
    """The authority's certificate; the key and the certificate for the plugin. All as PEM."""
    keys = CurveKey(), CurveKey()
    ids = [os.urandom(_ID_BYTES) for _ in keys]
    certificates = [
        _sign(keys[0], keys[0].point, 0, _of_authority(hosts, ids[0])),
        _sign(keys[0], keys[1].point, 1, _of_server(hosts, ids[0], ids[1])),
    ]
    return certificates[0], pem("EC PRIVATE KEY", keys[1].private) + certificates[1]


def _sign(key: CurveKey, point: bytes, which: int, extensions: list[bytes]) -> bytes:
    """A certificate for the key at `point`."""
    algorithm = sequence(name_of(_SIGNATURE))
    content = sequence(
        tlv(0xA0, integer(2)),  # version 3
        integer(int.from_bytes(os.urandom(16), "big") >> 1),
        algorithm,
        _name(_NAMES[0]),
        sequence(*(_time(days) for days in (-_DAYS_BEFORE, _DAYS_AFTER))),
        _name(_NAMES[which]),
        sequence(sequence(name_of(_EC_KEY), name_of(_CURVE)), bits(point)),
        tlv(0xA3, sequence(*extensions)),
    )
    return pem("CERTIFICATE", sequence(content, algorithm, bits(key.sign(content))))


def _name(text: str) -> bytes:
    return sequence(tlv(0x31, sequence(name_of(_COMMON_NAME), tlv(0x0C, text.encode()))))


def _time(days: int) -> bytes:
    moment = time.gmtime(time.time() + days * 86400)
    if moment.tm_year < 2050:
        return tlv(0x17, time.strftime("%y%m%d%H%M%SZ", moment).encode())
    return tlv(0x18, time.strftime("%Y%m%d%H%M%SZ", moment).encode())


def _extension(number: int, content: bytes, *, critical: bool = False) -> bytes:
    return sequence(name_of(f"2.5.29.{number}"), TRUE if critical else b"", octets(content))


def _of_authority(hosts: CertifiedHosts, own: bytes) -> list[bytes]:
    """It is for these hosts and nobody else. A kind of name that is not mentioned would not be
    constrained."""
    names = [_dns(name.removeprefix("*.")) for name in hosts.names] or [_dns(_NOBODY)]
    addresses = [_network(packed, b"\xff" * len(packed)) for packed in map(_pack, hosts.addresses)]
    constraints = tlv(0xA0, *map(sequence, (*names, *addresses)))
    if not addresses:
        constraints += tlv(0xA1, *(sequence(_network(bytes(size), bytes(size))) for size in (4, 16)))
    return [
        _extension(_BASIC_CONSTRAINTS, sequence(TRUE, integer(0)), critical=True),
        _extension(_KEY_USAGE, _SIGNS_CERTIFICATES, critical=True),
        _extension(_NAME_CONSTRAINTS, sequence(constraints), critical=True),
        _extension(_SUBJECT_KEY, octets(own)),
    ]


def _of_server(hosts: CertifiedHosts, issuer: bytes, own: bytes) -> list[bytes]:
    addresses = [tlv(_ADDRESS, _pack(address)) for address in hosts.addresses]
    return [
        _extension(_ALTERNATIVE_NAMES, sequence(*map(_dns, hosts.names), *addresses)),
        _extension(_BASIC_CONSTRAINTS, sequence(), critical=True),
        _extension(_KEY_USAGE, _SIGNS_HANDSHAKES, critical=True),
        _extension(_PURPOSES, sequence(name_of(_SERVER))),
        _extension(_AUTHORITY_KEY, sequence(tlv(0x80, issuer))),
        _extension(_SUBJECT_KEY, octets(own)),
    ]


def _dns(name: str) -> bytes:
    return tlv(_DNS_NAME, name.encode("ascii"))


def _network(address: bytes, mask: bytes) -> bytes:
    return tlv(_ADDRESS, address, mask)


def _pack(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
