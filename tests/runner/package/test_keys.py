"""Private keys, and the file of trusted ones."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from runner.package.fault import PackageFault
from runner.package.keys import (
    decode_base64,
    derive_key_id,
    format_line,
    is_key_id,
    load_key,
    load_trusted,
    make_key,
    parse_keys,
)
from sandbox.document.diagnostic import DocumentError
from tests.conftest import SPARE_UID

KEY = base64.b64encode(bytes(range(32))).decode()


def test_a_new_key_signs_and_its_line_verifies(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    made = make_key(path, comment="of the release")
    assert os.stat(path).st_mode & 0o777 == 0o600
    trusted = load_trusted(f"{path}.pub")
    assert trusted == {made.key_id: made}
    key = load_key(path)
    assert (key.key_id, key.public) == (made.key_id, made.public)
    signature = key.sign(b"message")
    assert made.verifies(signature, b"message")
    assert not made.verifies(signature, b"Message")
    assert not made.verifies(bytes(64), b"message")
    assert not made._replace(public=bytes(32)).verifies(signature, b"message")


def test_the_mode_of_a_new_key_does_not_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_key(str(tmp_path / "key"))
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("key", "key.pub")] == [0o600, 0o644]


@pytest.mark.parametrize("existing", ["key", "key.pub"])
def test_an_existing_file_is_never_overwritten(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(PackageFault, match="exists already"):
        make_key(str(tmp_path / "key"))
    assert os.listdir(tmp_path) == [existing]
    assert (tmp_path / existing).read_text() == "precious"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackageFault, match="exists already"):
        make_key(str(tmp_path / "key"))
    assert not (tmp_path / "elsewhere").exists()


def test_the_id_is_the_given_one_or_that_beside_the_key_or_derived(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    made = make_key(path, "acme-2026")
    assert load_key(path).key_id == "acme-2026"
    assert load_key(path, "other").key_id == "other"
    (tmp_path / "key.pub").write_text(f"wrong {KEY}\n")  # of another key
    assert load_key(path).key_id == derive_key_id(made.public)
    (tmp_path / "key.pub").unlink()
    assert load_key(path).key_id == derive_key_id(made.public)


@pytest.mark.parametrize("key_id", ["", " ", "-a", "a b", "a\nb", "é", "a" * 129, "#a"])
def test_an_id_that_would_break_a_line_is_refused(tmp_path: Path, key_id: str) -> None:
    assert not is_key_id(key_id)
    if key_id:
        with pytest.raises(PackageFault, match="cannot be the id"):
            make_key(str(tmp_path / "key"), key_id)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key_id", ["a", "a" * 128, "acme/release-2026", "me@example.com", "SHA256:x+/"])
def test_ids_in_use_are_possible(key_id: str) -> None:
    assert is_key_id(key_id)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_key_that_others_can_read_does_not_sign(tmp_path: Path, mode: int) -> None:
    make_key(str(tmp_path / "key"))
    (tmp_path / "key").chmod(mode)
    with pytest.raises(PackageFault, match="by others") as refused:
        load_key(str(tmp_path / "key"))
    assert "chmod 600" in refused.value.hint


@pytest.mark.needs("root")
def test_a_key_of_somebody_else_does_not_sign(tmp_path: Path) -> None:
    make_key(str(tmp_path / "key"))
    os.chown(tmp_path / "key", SPARE_UID, SPARE_UID)
    with pytest.raises(PackageFault, match=f"belongs to uid {SPARE_UID}"):
        load_key(str(tmp_path / "key"))


def _pem(key: object, password: bytes = b"") -> bytes:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a private key"),
        (b"x" * (17 << 10), "larger than"),
        (_pem(Ed25519PrivateKey.generate(), b"secret"), "encrypted"),
        (_pem(generate_private_key(SECP256R1())), "another algorithm"),
    ],
)
def test_a_file_that_is_no_such_key_says_what_it_is(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(PackageFault, match=said) as refused:
        load_key(str(path))
    assert refused.value.hint


def test_a_fifo_is_no_key_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(PackageFault, match="not a file"):
        load_key(str(tmp_path / "key"))


@pytest.mark.needs("openssl")
def test_a_key_of_openssl_signs_too(tmp_path: Path) -> None:
    path = tmp_path / "key"
    made = subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519"], capture_output=True)
    path.write_bytes(made.stdout)
    path.chmod(0o600)
    assert load_key(str(path)).key_id.startswith("ed25519-")


# --- trust files --------------------------------------------------------------------------------------------


def test_a_trust_file_has_comments_and_blank_lines() -> None:
    raw = f"# ours\n\n  \nacme {KEY}\r\nother\t{KEY}   of  the other one \n".encode()
    found = parse_keys("trust", raw)
    assert [(key.key_id, key.comment) for key in found.values()] == [
        ("acme", ""),
        ("other", "of  the other one"),
    ]
    assert found["acme"].public == bytes(range(32))
    assert parse_keys("trust", (format_line(found["other"]) + "\n").encode())["other"] == found["other"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("acme", "trust_line"),
        ("acme " + KEY[:-4], "trust_line"),
        ("acme " + KEY.rstrip("="), "trust_line"),
        ("acme !" + KEY[1:], "trust_line"),
        (f"acme {KEY[:-2]}9=", "trust_line"),  # the same bytes, written in another way
        (f"-acme {KEY}", "trust_line"),
        (f"first {KEY}", "trust_twice"),
    ],
)
def test_a_wrong_line_makes_the_whole_file_unusable(line: str, rule: str) -> None:
    with pytest.raises(DocumentError) as refused:
        parse_keys("trust", f"first {KEY}\n{line}\n".encode())
    [fault] = refused.value.diagnostics
    assert (fault.rule, fault.line) == (rule, 2) and fault.hint


def test_every_fault_of_a_trust_file_is_reported() -> None:
    with pytest.raises(DocumentError) as refused:
        parse_keys("trust", b"x\n\xff\ny\n")
    assert [fault.line for fault in refused.value.diagnostics] == [1, 2, 3]


def test_base64_has_one_spelling() -> None:
    assert decode_base64(KEY, 32) == bytes(range(32))
    for wrong in (KEY + "\n", " " + KEY, KEY + "=", KEY.replace("=", ""), "é" + KEY, KEY[:-2] + "9="):
        assert decode_base64(wrong, 32) is None
    assert decode_base64(KEY, 31) is None


@pytest.mark.parametrize(("mode", "trusted"), [(0o644, True), (0o600, True), (0o664, False), (0o646, False)])
def test_a_trust_file_that_others_can_write_is_refused(tmp_path: Path, mode: int, trusted: bool) -> None:
    path = tmp_path / "trust"
    path.write_text(f"acme {KEY}\n")
    path.chmod(mode)
    if trusted:
        assert list(load_trusted(str(path))) == ["acme"]
        return
    with pytest.raises(DocumentError, match="the trust file can be written") as refused:
        load_trusted(str(path))
    assert refused.value.diagnostics[0].hint.startswith("chmod go-w")


def test_a_missing_trust_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="file_missing"):
        load_trusted(str(tmp_path / "missing"))
