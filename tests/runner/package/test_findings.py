"""What `runner package lint` finds in the files of any package."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from runner.package import findings
from runner.package.findings import find_faults


def _package(folder: Path) -> Path:
    for path in (folder / "manifest", folder / "bin/tool"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        path.chmod(0o644)
    folder.chmod(0o755)
    (folder / "bin").chmod(0o755)
    return folder


def _write(name: str, text: str = "x") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o755)
        path.write_text(text)
        path.chmod(0o644)

    return write


def _write_der(make: Callable[[], Any], form: Any = PrivateFormat.PKCS8) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        made = make()
        path = folder / "data"
        path.write_bytes(made.private_bytes(Encoding.DER, form, NoEncryption()))
        path.chmod(0o644)
        public = folder / "public"  # is no fault
        public.write_bytes(made.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
        public.chmod(0o644)

    return write


def _make_rsa() -> Any:
    return rsa.generate_private_key(65537, 2048)


def _make_ec() -> Any:
    return ec.generate_private_key(ec.SECP256R1())


_KEY = "# mine\n-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"


def test_a_plain_package_has_no_faults(tmp_path: Path) -> None:
    assert find_faults(str(_package(tmp_path))) == ()


@pytest.mark.parametrize(
    ("make", "rule", "severity"),
    [
        (lambda folder: (folder / "bin/link").symlink_to("tool"), "package_kind", "error"),
        (lambda folder: os.mkfifo(folder / "bin/fifo"), "package_kind", "error"),
        (_write("bin/a\nb"), "package_name", "error"),
        (lambda folder: (folder / "bin/tool").chmod(0o664), "package_writable", "warning"),
        (lambda folder: (folder / "bin").chmod(0o777), "package_writable", "warning"),
        (lambda folder: folder.chmod(0o775), "package_writable", "warning"),
        (lambda folder: (folder / "bin/tool").chmod(0o4755), "package_set_id", "warning"),
        (_write(".git/config"), "package_history", "warning"),
        (_write(".env"), "package_secret", "warning"),
        (_write("deep/er/.env.production"), "package_secret", "warning"),
        (_write("id_ed25519"), "package_secret", "warning"),
        (_write("notes.txt", _KEY), "package_secret", "warning"),
        (_write("notes.txt", _KEY.replace("-----B", "\t -----B")), "package_secret", "warning"),
        (_write("notes.txt", "x\n" * 100_000 + _KEY), "package_secret", "warning"),
        (_write_der(ed25519.Ed25519PrivateKey.generate), "package_secret", "warning"),
        (_write_der(_make_rsa), "package_secret", "warning"),
        (_write_der(_make_rsa, PrivateFormat.TraditionalOpenSSL), "package_secret", "warning"),
        (_write_der(_make_ec), "package_secret", "warning"),
        (_write_der(_make_ec, PrivateFormat.TraditionalOpenSSL), "package_secret", "warning"),
        (_write("bin/TOOL"), "package_case", "warning"),
    ],
)
def test_each_fault_is_found(tmp_path: Path, make: Callable[[Path], None], rule: str, severity: str) -> None:
    package = _package(tmp_path)
    make(package)
    [found] = find_faults(str(package))
    assert (found.rule, found.severity) == (rule, severity)
    assert found.file.startswith(str(package)) and found.hint


@pytest.mark.parametrize("name", [".env.example", "environment", "key.pub", "bin/.env.sample"])
def test_harmless_names_are_no_finding(tmp_path: Path, name: str) -> None:
    package = _package(tmp_path)
    _write(name, 'KEY = "-----BEGIN PRIVATE KEY-----"\n-----BEGIN PUBLIC KEY-----\n')(package)
    assert find_faults(str(package)) == ()


def test_all_faults_are_found_at_once_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = _package(tmp_path)
    for number in range(5):
        (package / f"link{number}").symlink_to("manifest")
    assert len(find_faults(str(package))) == 5
    monkeypatch.setattr(findings, "MOST_FINDINGS", 3)
    assert [found.rule for found in find_faults(str(package))] == ["package_kind"] * 3 + ["too_many_faults"]


@pytest.mark.parametrize(("most", "counts"), [("MOST_ENTRIES", 3), ("MOST_BYTES", 2), ("MOST_DEPTH", 1)])
def test_the_limits_are_those_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str, counts: int
) -> None:
    package = _package(tmp_path)
    monkeypatch.setattr(findings, most, counts)
    assert find_faults(str(package)) == ()
    monkeypatch.setattr(findings, most, counts - 1)
    assert [found.rule for found in find_faults(str(package))] == ["package_size"]
