from __future__ import annotations

import pytest

from sandbox.broker.agent.host_key import load_verifier, read_kind
from sandbox.broker.agent.messages import Malformed, string
from tests.sandbox.broker.agent.keys import KeyPair, ecdsa_key, ed25519_key, mpint, rsa_key
from tests.tables import one_case

TEXT = b"the hash of a key exchange"
KEYS = {
    "ed25519": ed25519_key(),
    "nistp256": ecdsa_key(256),
    "nistp384": ecdsa_key(384),
    "nistp521": ecdsa_key(521),
    "rsa-sha2-256": rsa_key(b"rsa-sha2-256"),
    "rsa-sha2-512": rsa_key(b"rsa-sha2-512"),
}


@one_case("key", KEYS.values())
def test_a_signature_is_verified(key: KeyPair) -> None:
    verify = load_verifier(key.blob)
    signature = key.sign(TEXT)
    assert verify(signature, TEXT)
    assert not verify(signature, TEXT + b"\0")
    assert not verify(signature + b"\0", TEXT)
    assert not verify(signature[:-1], TEXT)
    assert not verify(signature[:-1] + bytes((signature[-1] ^ 1,)), TEXT)


@one_case("key", KEYS.values())
def test_no_key_verifies_what_another_signed(key: KeyPair) -> None:
    others = [other for other in KEYS.values() if other is not key]
    assert not any(load_verifier(key.blob)(other.sign(TEXT), TEXT) for other in others)


def test_sha1_does_not_count() -> None:
    key = rsa_key(b"ssh-rsa")
    assert not load_verifier(key.blob)(key.sign(TEXT), TEXT)


@one_case("r_and_s", [(0, 0), (0, 1), (1, 0), (1 << 256, 1)])
def test_numbers_that_are_no_signature(r_and_s: tuple[int, int]) -> None:
    verify = load_verifier(KEYS["nistp256"].blob)
    assert not verify(string(b"ecdsa-sha2-nistp256") + string(b"".join(map(mpint, r_and_s))), TEXT)
    assert not verify(string(b"ecdsa-sha2-nistp256") + string(string(b"\xff") + string(b"\xff")), TEXT)


ED25519 = KEYS["ed25519"].blob


@one_case(
    "blob",
    [
        b"",
        ED25519[:-1],
        ED25519 + b"\0",
        string(b"ssh-dss") + ED25519[15:],
        string(b"ssh-ed25519-cert-v01@openssh.com") + ED25519[15:],
        string(b"sk-ssh-ed25519@openssh.com") + ED25519[15:] + string(b"ssh:"),
        string(b"ecdsa-sha2-nistp256") + string(b"nistp256") + string(b"\x04" + bytes(64)),
        string(b"ecdsa-sha2-nistp256") + KEYS["nistp384"].blob[23:],
        rsa_key(bits=1024).blob,
        string(b"ssh-rsa") + mpint(65537) + mpint(1 << 16384),
    ],
)
def test_what_is_no_key_of_a_host(blob: bytes) -> None:
    with pytest.raises(Malformed):
        load_verifier(blob)


def test_the_kind_of_a_key_is_read() -> None:
    assert [read_kind(key.blob) for key in KEYS.values()] == [
        b"ssh-ed25519",
        *(b"ecdsa-sha2-nistp%d" % bits for bits in (256, 384, 521)),
        *(b"ssh-rsa",) * 2,
    ]
