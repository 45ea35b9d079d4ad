"""The signature of an image: what is signed, and each reason why it is not accepted."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from runner.package.fault import PackageFault
from runner.package.image_signature import (
    ImageSignature,
    choose_own,
    judge_image,
    parse_image_signature,
    sign_image,
    verify_image,
)
from runner.package.keys import SigningKey, TrustedKey, load_key, make_key
from runner.package.signature import Signature, canonical_json, parse_signature, verify
from tests.tables import check_rows

NOW = 1_800_000_000.0
TRUST = "/etc/runner/trusted-keys"
NAME, DIGEST, OTHER = "docker.io/acme/tools", "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    make_key(str(tmp_path / "key"), "acme")
    return load_key(str(tmp_path / "key"))


def _rule(raw: bytes, key: SigningKey, name: str = NAME, digest: str = DIGEST) -> str:
    """Why it is refused; '' if it is not."""
    try:
        verify_image(raw, name, digest, {"acme": TrustedKey("acme", key.public)}, TRUST, NOW)
    except PackageFault as fault:
        return fault.rule if fault.hint else "no hint"
    return ""


def _edited(signed: ImageSignature, **changes: Any) -> bytes:
    document = {**signed._asdict(), **changes}
    return json.dumps({name: value for name, value in document.items() if value is not None}).encode()


def test_a_valid_signature_and_every_change_of_it(key: SigningKey, tmp_path: Path) -> None:
    signed = sign_image(NAME, DIGEST, key, NOW)
    found = verify_image(
        signed.text.encode(), NAME, DIGEST, {"acme": TrustedKey("acme", key.public, "c")}, TRUST, NOW
    )
    assert (found.package_id, found.digest, found.key_id, found.comment) == (NAME, DIGEST, "acme", "c")
    assert found.warning == ""
    make_key(str(tmp_path / "other"), "acme")
    other = sign_image(NAME, DIGEST, load_key(str(tmp_path / "other")), NOW)
    rows = {
        "as it was signed": (_edited(signed), ""),
        "another repository, edited": (_edited(signed, image="docker.io/acme/x"), "signature_identity"),
        "another digest, edited": (_edited(signed, digest=OTHER), "signature_digest"),
        "another time": (_edited(signed, signed_at="2026-11-16T03:00:00Z"), "signature_invalid"),
        "another key of the same id": (other.text.encode(), "signature_invalid"),
        "a key that nobody trusts": (_edited(signed, key_id="mallory"), "signature_untrusted"),
        "another algorithm": (_edited(signed, algorithm="rsa"), "signature_malformed"),
        "another schema": (_edited(signed, schema=2), "signature_malformed"),
        "one key more": (_edited(signed, version="1"), "signature_malformed"),
        "one key less": (_edited(signed, image=None), "signature_malformed"),
        "one byte too long": (_padded(signed, 4097), "signature_malformed"),
        "as long as it may be": (_padded(signed, 4096), ""),
        "nothing": (b"", "signature_malformed"),
    }

    def check(name: str, row: tuple[bytes, str]) -> None:
        assert _rule(row[0], key) == row[1]

    check_rows(rows, check)
    raw = signed.text.encode()
    assert _rule(raw, key, name="docker.io/acme/other") == "signature_identity"
    assert _rule(raw, key, digest=OTHER) == "signature_digest"
    late = sign_image(NAME, DIGEST, key, NOW + 3600)
    warned = judge_image((late.text,), NAME, DIGEST, {"acme": TrustedKey("acme", key.public)}, TRUST, NOW)
    assert "the image says that it was signed at" in warned.warning


def _padded(signed: ImageSignature, size: int) -> bytes:
    raw = signed.text.encode()
    return raw + b" " * (size - len(raw))


def test_no_signature_of_a_package_is_one_of_an_image(key: SigningKey) -> None:
    """Neither by its document, nor by the bytes that the key has signed."""
    texts = {"schema": 1, "algorithm": "ed25519", "key_id": "acme", "signed_at": "2026-11-16T03:00:00Z"}
    package = Signature(package_id=NAME, version="1", digest=DIGEST, **texts)  # type: ignore[arg-type]
    package = package._replace(signature=base64.b64encode(key.sign(package.message)).decode())
    assert _rule(json.dumps(package._asdict()).encode(), key) == "signature_malformed"
    # The bytes of a package's statement, with the words of an image: as valid as they could be made.
    moved = ImageSignature(image=NAME, digest=DIGEST, **texts)  # type: ignore[arg-type]
    bare = canonical_json({name: value for name, value in moved._asdict().items() if name != "signature"})
    assert moved.message != bare and not moved.message.startswith(b"{")
    forged = moved._replace(signature=base64.b64encode(key.sign(bare)).decode())
    assert _rule(forged.text.encode(), key) == "signature_invalid"
    control = moved._replace(signature=base64.b64encode(key.sign(moved.message)).decode())
    assert _rule(control.text.encode(), key) == ""

    # And the other way round.
    with pytest.raises(PackageFault) as refused:
        parse_signature(control.text.encode())
    assert refused.value.rule == "signature_malformed"
    trusted = {"acme": TrustedKey("acme", key.public)}
    prefix = moved.message[: -len(bare)]
    forged_package = package._replace(signature=base64.b64encode(key.sign(prefix + package.message)).decode())

    class Files:
        digest, files = DIGEST, ()

    for each, rule in ((forged_package, "signature_invalid"), (package, "")):
        raw = json.dumps(each._asdict()).encode()
        with pytest.raises(PackageFault) if rule else nullcontext() as failed:
            verify(raw, NAME, "1", trusted, TRUST, NOW, Files)
        assert failed is None or failed.value.rule == rule


def test_one_good_signature_is_enough_and_the_newest_counts(key: SigningKey, tmp_path: Path) -> None:
    make_key(str(tmp_path / "new"), "new")
    new = load_key(str(tmp_path / "new"))
    trusted = {each.key_id: TrustedKey(each.key_id, each.public) for each in (key, new)}
    stranger = sign_image(NAME, DIGEST, key._replace(key_id="mallory"), NOW)
    texts = (
        stranger.text,
        sign_image(NAME, DIGEST, new, NOW + 1).text,
        sign_image(NAME, DIGEST, key, NOW).text,
    )
    assert judge_image(texts, NAME, DIGEST, trusted, TRUST, NOW).key_id == "new"
    del trusted["new"]
    assert judge_image(texts, NAME, DIGEST, trusted, TRUST, NOW).key_id == "acme"
    for documents, rule in ((texts[:2], "signature_untrusted"), ((), "signature_missing")):
        with pytest.raises(PackageFault) as refused:
            judge_image(documents, NAME, DIGEST, trusted, TRUST, NOW)
        assert refused.value.rule == rule


def test_what_is_stored_is_for_this_image(key: SigningKey) -> None:
    own, other = sign_image(NAME, DIGEST, key, NOW), sign_image(NAME, OTHER, key, NOW)
    elsewhere = sign_image("ghcr.io/acme/tools", DIGEST, key, NOW)
    found = [each.text.encode() for each in (own, other, elsewhere, own)]
    assert choose_own([*found, b"{}", b"\xff"], NAME, DIGEST) == (own.text,)
    assert parse_image_signature(own.text.encode()) == own
