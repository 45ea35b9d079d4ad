"""The certificates of a launch, as the library reads them."""

from __future__ import annotations

import datetime
import ipaddress

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import verification

from sandbox.broker.authority import make_certificates
from sandbox.network.credentials import CertifiedHosts
from tests.tables import one_case

MANY = tuple(f"host-{number}.with-a-long-name.example.com" for number in range(60))
ALL = CertifiedHosts(
    ("a.example", "*.b.example", "localhost", *MANY), ("192.0.2.7", "2001:db8::7", "127.0.0.1", "::1")
)


def read(hosts: CertifiedHosts) -> tuple[x509.Certificate, x509.Certificate]:
    authority, chain = make_certificates(hosts)
    own = x509.load_pem_x509_certificate(chain[chain.index(b"-----BEGIN CERTIFICATE") :])
    key = load_pem_private_key(chain, None)
    assert key.public_key() == own.public_key()
    return x509.load_pem_x509_certificate(authority), own


@one_case("hosts", [ALL, CertifiedHosts(("a.example",), ()), CertifiedHosts((), ("192.0.2.7",))])
def test_what_they_say(hosts: CertifiedHosts) -> None:
    authority, own = read(hosts)
    now = datetime.datetime.now(datetime.UTC)
    for each in (authority, own):
        assert each.version == x509.Version.v3 and each.issuer == authority.subject
        assert each.not_valid_before_utc < now - datetime.timedelta(hours=23)
        assert now + datetime.timedelta(days=390) < each.not_valid_after_utc
        assert (each.not_valid_after_utc - each.not_valid_before_utc).days <= 398
        assert each.serial_number > 0 and each.serial_number.bit_length() < 160
        each.verify_directly_issued_by(authority)

    def extension(of: x509.Certificate, kind: type[x509.ExtensionType]) -> tuple[object, bool]:
        found = of.extensions.get_extension_for_class(kind)
        return found.value, found.critical

    assert extension(authority, x509.BasicConstraints) == (x509.BasicConstraints(True, 0), True)
    assert extension(own, x509.BasicConstraints) == (x509.BasicConstraints(False, None), True)
    names = [x509.DNSName(name) for name in hosts.names]
    addresses = [x509.IPAddress(ipaddress.ip_address(each)) for each in hosts.addresses]
    assert extension(own, x509.SubjectAlternativeName)[0] == x509.SubjectAlternativeName([*names, *addresses])
    server = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    assert extension(own, x509.ExtendedKeyUsage) == (server, False)
    for each, signs in ((authority, False), (own, True)):
        usage, critical = extension(each, x509.KeyUsage)
        assert isinstance(usage, x509.KeyUsage) and critical
        assert (usage.digital_signature, usage.key_cert_sign, usage.crl_sign) == (signs, not signs, False)
    key_ids = [
        each.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
        for each in (authority, own)
    ]
    issuer = own.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert issuer.key_identifier == key_ids[0] != key_ids[1]


def test_two_launches_share_nothing() -> None:
    (one, own), (other, other_own) = read(ALL), read(ALL)
    assert one.public_key() != other.public_key() and one.serial_number != other.serial_number
    assert own.serial_number != other_own.serial_number and own.public_key() != other_own.public_key()
    with pytest.raises(InvalidSignature):
        own.verify_directly_issued_by(other)


@one_case(
    ("hosts", "names", "addresses", "no_addresses"),
    [
        (CertifiedHosts(("a.example", "*.b.example"), ()), ["a.example", "b.example"], [], True),
        (CertifiedHosts(("a.example",), ("192.0.2.7",)), ["a.example"], ["192.0.2.7/32"], False),
        (CertifiedHosts((), ("2001:db8::7",)), ["invalid"], ["2001:db8::7/128"], False),
    ],
)
def test_the_authority_vouches_for_nobody_else(
    hosts: CertifiedHosts, names: list[str], addresses: list[str], no_addresses: bool
) -> None:
    found = read(hosts)[0].extensions.get_extension_for_class(x509.NameConstraints)
    permitted = [
        *map(x509.DNSName, names),
        *(x509.IPAddress(ipaddress.ip_network(each)) for each in addresses),
    ]
    every = [x509.IPAddress(ipaddress.ip_network(net)) for net in ("0.0.0.0/0", "::/0")]
    assert found.critical
    assert found.value == x509.NameConstraints(permitted, every if no_addresses else None)


@one_case(
    ("name", "good"), [("a.example", True), ("x.b.example", True), ("b.example", False), ("c.example", False)]
)
def test_a_verifier_takes_the_listed_names(name: str, good: bool) -> None:
    authority, own = read(CertifiedHosts(("a.example", "*.b.example"), ()))
    verifier = (
        verification.PolicyBuilder()
        .store(verification.Store([authority]))
        .build_server_verifier(x509.DNSName(name))
    )
    if good:
        assert verifier.verify(own, []) == [own, authority]
        return
    with pytest.raises(verification.VerificationError):
        verifier.verify(own, [])
