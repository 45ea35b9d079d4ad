"""marketplace.signature.json: what is signed, and each reason why it is not accepted."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.package.fault import PackageFault
from runner.package.keys import SigningKey, TrustedKey, load_key, make_key
from runner.package.listing import SIGNATURE_NAME, FileList, list_package
from runner.package.signature import (
    Signature,
    VerifiedPackage,
    canonical_json,
    parse_signature,
    read_signature,
    sign,
    verify,
    write_signature,
)

NOW = 1_800_000_000.0
TRUST = "/etc/runner/trusted-keys"


class Package:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "package"
        self.folder.mkdir()
        (self.folder / "manifest").write_text("m")
        (self.folder / "tool").write_text("t")
        self.key = self.new_key(folder, "acme")
        self.trusted = {"acme": TrustedKey("acme", self.key.public)}
        write_signature(str(self.folder), self.sign())

    def new_key(self, folder: Path, key_id: str) -> SigningKey:
        make_key(str(folder / key_id), key_id)
        return load_key(str(folder / key_id))

    def sign(self, package_id: str = "acme/tool", version: str = "1.0.0") -> Signature:
        return sign(list_package(str(self.folder)), package_id, version, self.key, NOW)

    def verify(self, raw: bytes | None = None, now: float = NOW) -> VerifiedPackage:
        raw = read_signature(str(self.folder)) if raw is None else raw
        return verify(raw, "acme/tool", "1.0.0", self.trusted, TRUST, now, self.listing)

    def listing(self) -> FileList:
        return list_package(str(self.folder))

    def edited(self, **changes: Any) -> bytes:
        """The signature with other values; None removes one."""
        document = {**json.loads(read_signature(str(self.folder))), **changes}
        return json.dumps({name: value for name, value in document.items() if value is not None}).encode()


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def test_a_signed_package_is_valid(package: Package) -> None:
    signed = package.verify()
    assert (signed.key_id, signed.files, signed.signed_at) == ("acme", 2, "2027-01-15T08:00:00Z")
    assert signed.digest == package.listing().digest
    assert signed.warning == ""


def test_the_document_has_the_stated_keys(package: Package) -> None:
    document = json.loads((package.folder / SIGNATURE_NAME).read_text())
    assert list(document) == [
        *("schema", "package_id", "version", "algorithm", "key_id", "digest", "signed_at", "signature")
    ]
    assert (document["schema"], document["algorithm"]) == (1, "ed25519")
    assert (package.folder / SIGNATURE_NAME).stat().st_mode & 0o777 == 0o644


def test_the_canonical_json_is_sorted_compact_and_utf_8(package: Package) -> None:
    assert canonical_json({"b": 'é\u2028"\\', "a": 1}) == '{"a":1,"b":"é\u2028\\"\\\\"}'.encode()
    message = package.sign().message
    assert message.startswith(b'{"algorithm":"ed25519","digest":"sha256:')
    assert b"signature" not in message and b" " not in message


def test_spaces_and_the_order_of_keys_in_the_file_do_not_matter(package: Package) -> None:
    document = json.loads(read_signature(str(package.folder)))
    assert package.verify(json.dumps(dict(reversed(document.items())), indent=7).encode())


def test_signing_again_replaces_the_file_and_leaves_nothing_else(package: Package) -> None:
    (package.folder / "tool").write_text("new")
    with pytest.raises(PackageFault, match="not those that were signed"):
        package.verify()
    write_signature(str(package.folder), package.sign())
    assert package.verify().files == 2
    assert sorted(os.listdir(package.folder)) == ["manifest", SIGNATURE_NAME, "tool"]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "tool").write_text("u"),
        lambda folder: (folder / "more").write_text(""),
        lambda folder: (folder / "tool").rename(folder / "Tool"),
        lambda folder: (folder / "tool").unlink(),
        lambda folder: (folder / "manifest").write_text("M"),
    ],
    ids=["one byte", "one more", "renamed", "removed", "the manifest"],
)
def test_a_changed_package_is_refused(package: Package, change: Callable[[Path], None]) -> None:
    change(package.folder)
    with pytest.raises(PackageFault) as refused:
        package.verify()
    assert refused.value.rule == "signature_digest" and refused.value.hint


def test_a_link_in_place_of_a_file_is_refused(package: Package, tmp_path: Path) -> None:
    (package.folder / "tool").rename(tmp_path / "tool")
    (package.folder / "tool").symlink_to(tmp_path / "tool")
    assert (package.folder / "tool").read_text() == "t"  # the same bytes
    with pytest.raises(PackageFault, match="a symbolic link"):
        package.verify()


def test_a_signature_of_another_package_is_refused(package: Package) -> None:
    for other in (package.sign("acme/other"), package.sign(version="1.0.1")):
        with pytest.raises(PackageFault) as refused:
            package.verify(canonical_json(other._asdict()))
        assert refused.value.rule == "signature_identity"


def test_an_untrusted_key_is_refused(package: Package, tmp_path: Path) -> None:
    package.key = package.new_key(tmp_path, "mallory")
    with pytest.raises(PackageFault, match="'mallory', which signed the package, is not trusted") as refused:
        package.verify(canonical_json(package.sign()._asdict()))
    assert refused.value.rule == "signature_untrusted" and TRUST in refused.value.hint


def test_the_id_of_a_trusted_key_is_not_enough(package: Package, tmp_path: Path) -> None:
    package.key = package.new_key(tmp_path, "mallory")._replace(key_id="acme")
    with pytest.raises(PackageFault) as refused:
        package.verify(canonical_json(package.sign()._asdict()))
    assert refused.value.rule == "signature_invalid"


def test_every_signed_value_is_protected(package: Package) -> None:
    """The values that no other check compares."""
    with pytest.raises(PackageFault) as refused:
        package.verify(package.edited(signed_at="2027-01-15T08:00:01Z"))
    assert refused.value.rule == "signature_invalid"
    flipped = bytearray(base64.b64decode(package.sign().signature))
    flipped[0] ^= 1
    with pytest.raises(PackageFault) as refused:
        package.verify(package.edited(signature=base64.b64encode(flipped).decode()))
    assert refused.value.rule == "signature_invalid"


def test_an_unsigned_package_is_refused(package: Package) -> None:
    (package.folder / SIGNATURE_NAME).unlink()
    with pytest.raises(PackageFault, match=f"has no {SIGNATURE_NAME}") as refused:
        package.verify()
    assert refused.value.rule == "signature_missing" and "runner package sign" in refused.value.hint


def test_the_checks_have_their_order(package: Package, tmp_path: Path) -> None:
    """With everything wrong, the first check refuses; then each is mended in turn."""
    (package.folder / "tool").write_text("changed")
    other = package.new_key(tmp_path, "mallory")
    listed: list[str] = []

    def listing() -> FileList:
        listed.append("listed")
        return package.listing()

    def rule(raw: bytes, package_id: str) -> str:
        with pytest.raises(PackageFault) as refused:
            verify(raw, package_id, "1.0.0", package.trusted, TRUST, NOW, listing)
        return refused.value.rule

    forged = package.edited(key_id="mallory")
    assert rule(package.edited(key_id="mallory", schema=2), "x") == "signature_malformed"
    assert rule(forged, "x") == "signature_untrusted"
    package.trusted["mallory"] = TrustedKey("mallory", other.public)
    assert rule(forged, "x") == "signature_identity"
    assert listed == []  # so far no file was read
    assert rule(forged, "acme/tool") == "signature_digest"
    (package.folder / "tool").write_text("t")
    assert rule(forged, "acme/tool") == "signature_invalid"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "a value is missing"),
        (b"\xff", "UTF-8"),
        (b"[]", ""),
        (b'{"schema": 1, "schema": 1}', "twice"),
        (b'{"schema": 1' + b" " * (65 << 10) + b"}", "missing"),
        (b'{"schema": ' + b"[" * 5000, ""),
    ],
)
def test_a_document_that_is_none_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(PackageFault) as refused:
        parse_signature(raw)
    assert refused.value.rule == "signature_malformed"
    assert said in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": None}, "schema is not 1"),
        ({"schema": 2}, "schema is not 1"),
        ({"schema": True}, "schema is not 1"),
        ({"schema": 1.0}, "schema is not 1"),
        ({"schema": "1"}, "schema is not 1"),
        ({"version": None}, "version is missing"),
        ({"version": 1}, "version is not a text"),
        ({"extra": "x"}, "'extra' is not a key"),
        ({"algorithm": "none"}, "only ed25519"),
        ({"algorithm": "Ed25519"}, "only ed25519"),
        ({"key_id": ""}, "cannot be the id"),
        ({"key_id": "a b"}, "cannot be the id"),
        ({"digest": "sha256:" + "A" * 64}, "its digest"),
        ({"digest": "md5:" + "a" * 32}, "its digest"),
        ({"digest": "sha256:" + "a" * 64 + "\n"}, "its digest"),
        ({"signed_at": "yesterday"}, "signed_at"),
        ({"signed_at": "2027-01-15T08:00:00"}, "signed_at"),
        ({"signed_at": "2027-01-15T08:00:00+01:00"}, "signed_at"),
        ({"signed_at": "2027-13-15T08:00:00Z"}, "signed_at"),
        ({"signature": ""}, "its signature"),
        ({"signature": "AAAA"}, "its signature"),
        ({"package_id": "\ud800"}, "surrogate"),
    ],
)
def test_a_document_of_another_shape_is_refused(package: Package, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PackageFault) as refused:
        package.verify(package.edited(**changes))
    assert refused.value.rule == "signature_malformed"
    assert said in str(refused.value) and str(refused.value).isprintable()


def test_a_huge_signature_is_not_read(package: Package) -> None:
    (package.folder / SIGNATURE_NAME).write_bytes(b" " * ((64 << 10) + 1))
    with pytest.raises(PackageFault, match="too large"):
        package.verify()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("tool"), os.mkfifo, os.mkdir])
def test_the_signature_is_a_file(package: Package, make: Callable[[Path], None]) -> None:
    (package.folder / SIGNATURE_NAME).unlink()
    make(package.folder / SIGNATURE_NAME)
    with pytest.raises(PackageFault):
        package.verify()


@pytest.mark.parametrize(("early", "warned"), [(0, False), (300, False), (301, True)])
def test_a_signature_from_the_future_is_valid_with_a_warning(
    package: Package, early: int, warned: bool
) -> None:
    signed = package.verify(now=NOW - early)
    assert ("in the future" in signed.warning) is warned
