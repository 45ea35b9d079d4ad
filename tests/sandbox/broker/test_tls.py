from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
import trustme

from sandbox.broker.authority import make_certificates
from sandbox.broker.der import name_of, tlv
from sandbox.broker.tls import AskedName, Context, make_plugin_context, make_server_context, wrap
from sandbox.network.credentials import CertifiedHosts
from tests.tables import one_case

NAMES = CertifiedHosts(("a.example", "*.b.example"), ())
BOTH = CertifiedHosts(("a.example",), ("192.0.2.7", "2001:db8::7"))


def settings(context: ssl.SSLContext | Context) -> dict[str, int]:
    ends = int(getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0))
    return {
        "options": int(context.options) & ~ends,
        "verify_mode": int(context.verify_mode),
        "check_hostname": context.check_hostname,
        "minimum_version": int(context.minimum_version),
    }


def test_a_server_is_judged_as_by_a_careful_client(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "roots.pem"))
    ours, usual = make_server_context((str(tmp_path / "roots.pem"),)), ssl.create_default_context()
    usual.options |= ssl.OP_NO_RENEGOTIATION
    usual.minimum_version = ssl.TLSVersion.TLSv1_2
    assert settings(ours) == settings(usual)
    assert [each["name"] for each in ours.get_ciphers()] == [each["name"] for each in usual.get_ciphers()]
    assert not ours.options & getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)


def test_only_the_roots_that_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the variables that OpenSSL reads."""
    roots = trustme.CA()
    roots.cert_pem.write_to_path(str(tmp_path / "roots.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots.pem"))
    without, beside = (make_server_context(files) for files in ((), (str(tmp_path / "roots.pem"),)))
    assert beside.cert_store_stats()["x509"] == without.cert_store_stats()["x509"] + 1
    with pytest.raises(OSError, match="No such file"):
        make_server_context((str(tmp_path / "missing.pem"),))


def shake_hands(hosts: CertifiedHosts, name: str, authority: bytes | None = None) -> None:
    """What OpenSSL says of the certificates, in memory."""
    made, chain = make_certificates(hosts)
    pipes = [ssl.MemoryBIO() for _ in range(2)]
    client_side = ssl.create_default_context(cadata=(authority or made).decode())
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    client = client_side.wrap_bio(pipes[0], pipes[1], server_hostname=name)
    asked = AskedName(lambda _: True)
    server = wrap(make_plugin_context(chain), pipes[1], pipes[0], asked=asked)
    for _ in range(3):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass


@one_case(
    ("hosts", "name", "fault"),
    [
        (NAMES, "a.example", ""),
        (NAMES, "x.b.example", ""),
        (NAMES, "b.example", "Hostname mismatch"),
        (NAMES, "y.x.b.example", "Hostname mismatch"),
        (NAMES, "c.example", "Hostname mismatch"),
        (BOTH, "192.0.2.7", ""),
        (BOTH, "2001:db8::7", ""),
        (BOTH, "192.0.2.8", "IP address mismatch"),
        (CertifiedHosts((), ("192.0.2.7",)), "192.0.2.7", ""),
    ],
)
def test_a_strict_client_accepts_the_certificates(hosts: CertifiedHosts, name: str, fault: str) -> None:
    if fault:
        with pytest.raises(ssl.SSLCertVerificationError, match=fault):
            shake_hands(hosts, name)
    else:
        shake_hands(hosts, name)


@one_case(
    ("allowed", "signed"),
    [
        (NAMES, CertifiedHosts(("c.example",), ())),
        (NAMES, CertifiedHosts(("a.example",), ("192.0.2.7",))),
        (NAMES, CertifiedHosts(("a.example",), ("2001:db8::7",))),
        (BOTH, CertifiedHosts(("a.example",), ("192.0.2.8",))),
        (CertifiedHosts((), ("192.0.2.7",)), CertifiedHosts(("a.example",), ("192.0.2.7",))),
    ],
)
def test_the_authority_is_for_its_hosts_alone(
    allowed: CertifiedHosts, signed: CertifiedHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its key signed for others."""
    from sandbox.broker import authority

    own = authority._of_authority
    monkeypatch.setattr(authority, "_of_authority", lambda _, number: own(allowed, number))
    name = signed.names[-1]
    with pytest.raises(ssl.SSLCertVerificationError, match=r"(?i)permitted subtree|excluded subtree"):
        shake_hands(signed, name)
    monkeypatch.setattr(authority, "_of_authority", own)
    shake_hands(signed, name)  # the control


def test_what_cryptography_reads_in_them() -> None:
    from cryptography import x509

    made, chain = make_certificates(BOTH)
    authority, leaf = x509.load_pem_x509_certificate(made), x509.load_pem_x509_certificate(chain)
    leaf.verify_directly_issued_by(authority)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.example"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "2001:db8::7"]
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(
        True, 0
    )
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert leaf.serial_number != authority.serial_number
    assert b"PRIVATE KEY" in chain and b"PRIVATE KEY" not in made


def test_no_two_launches_share_a_key() -> None:
    assert len({part for _ in range(2) for part in make_certificates(NAMES)}) == 4


def test_no_file_of_the_key_is_left() -> None:
    before = os.listdir("/proc/self/fd")
    make_plugin_context(make_certificates(NAMES)[1])
    assert os.listdir("/proc/self/fd") == before


@one_case(
    ("encoded", "expected"),
    [
        (tlv(0x30, b""), "3000"),
        (tlv(0x04, b"a" * 127)[:2], "047f"),
        (tlv(0x04, b"a" * 128)[:3], "048180"),
        (tlv(0x04, b"a" * 256)[:4], "04820100"),
        (name_of("2.5.29.17"), "0603551d11"),
        (name_of("1.2.840.10045.2.1"), "06072a8648ce3d0201"),
    ],
)
def test_der(encoded: bytes, expected: str) -> None:
    assert encoded.hex() == expected
