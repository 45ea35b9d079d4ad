"""The authority of one launch, and the certificate that the broker shows to the plugin.

Both are made before the plugin runs, in a process of its own that then ends: `cryptography` takes 16 MB, and the
key of the authority is needed for a moment only. Nobody can sign anything else with it afterwards. One
certificate is for all hosts, because a confined process can load no other: OpenSSL's context takes it from a file.
So a name that is more than one label below a rule such as *.example.com has no certificate.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sandbox.gate.confine import follow_parent
from sandbox.network.rules import LOCALHOST, HostRule

if TYPE_CHECKING:
    from cryptography import x509

# The clock of the plugin may be another one. Clients accept a certificate of 398 days; a launch that lasts longer
# has to be repeated.
_DAYS_BEFORE, _DAYS_AFTER = 1, 396
LOCAL_ADDRESSES = ("127.0.0.1", "::1")
_NOBODY = "invalid"  # a name that no host has (RFC 2606), for constraints that allow no name at all


class Hosts(NamedTuple):
    names: tuple[str, ...]  # also *.example.com
    addresses: tuple[str, ...]


def hosts_of(rules: Sequence[HostRule]) -> Hosts:
    names = {rule.host: None for rule in rules if rule.kind in ("name", "loopback")}
    names |= {f"*.{rule.host}": None for rule in rules if rule.kind == "below"}
    addresses = {rule.host: None for rule in rules if rule.kind == "address"}
    if LOCALHOST in names:
        addresses |= dict.fromkeys(LOCAL_ADDRESSES)
    return Hosts(tuple(names), tuple(addresses))


def fork_authority(hosts: Hosts, told: int, also_close: Sequence[int]) -> tuple[int, int]:
    """Make the certificates in a process of its own. The authority's goes to the pipe `told`; the key and the
    certificate for the plugin come from the second result, a pipe. The first result is the pid."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            for fd in also_close:
                os.close(fd)
            follow_parent(lambda: os.getppid() == parent)
            authority, chain = make_certificates(hosts)
            _write(theirs, chain)
            _write(told, authority)
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    return pid, ours


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
    os.close(fd)


def make_certificates(hosts: Hosts) -> tuple[bytes, bytes]:
    """The authority's certificate; the key and the certificate for the plugin. All as PEM."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID

    day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
        for text in (f"plugin-runner, one launch, {os.urandom(8).hex()}", "plugin-runner")
    ]

    def sign(which: int, extensions: Sequence[tuple[x509.ExtensionType, bool]]) -> bytes:
        builder = (
            x509.CertificateBuilder(names[0], names[which], keys[which].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAYS_BEFORE * day)
            .not_valid_after(now + _DAYS_AFTER * day)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(keys[0], hashes.SHA256()).public_bytes(Encoding.PEM)

    own = x509.SubjectKeyIdentifier.from_public_key(keys[0].public_key())
    authority = sign(
        0,
        [
            (x509.BasicConstraints(True, 0), True),
            (_usage(certificates=True), True),
            (_constraints(hosts), True),
            (own, False),
        ],
    )
    leaf = sign(
        1,
        [
            (x509.SubjectAlternativeName(_names(hosts)), False),
            (x509.BasicConstraints(False, None), True),
            (_usage(certificates=False), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), False),
            (x509.SubjectKeyIdentifier.from_public_key(keys[1].public_key()), False),
        ],
    )
    key = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return authority, key + leaf


def _usage(*, certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    others = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"),
        False,
    )
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=False,
        decipher_only=False,
        **others,
    )


def _names(hosts: Hosts) -> list[x509.GeneralName]:
    import ipaddress

    from cryptography import x509

    return [
        *(x509.DNSName(name) for name in hosts.names),
        *(x509.IPAddress(ipaddress.ip_address(address)) for address in hosts.addresses),
    ]


def _constraints(hosts: Hosts) -> x509.NameConstraints:
    """For these hosts and nobody else. A kind of name that is not mentioned would not be constrained."""
    import ipaddress

    from cryptography import x509

    names = [x509.DNSName(name.removeprefix("*.")) for name in hosts.names] or [x509.DNSName(_NOBODY)]
    addresses = [x509.IPAddress(ipaddress.ip_network(address)) for address in hosts.addresses]
    nets = [x509.IPAddress(ipaddress.ip_network(net)) for net in ("0.0.0.0/0", "::/0")]
    return x509.NameConstraints([*names, *addresses], None if addresses else nets)
