"""`runner package`: lint, sign, verify."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.cli import main
from runner.contracts.registry import example_folder, find_contract
from runner.outcome import EXIT
from runner.package.keys import make_key
from runner.package.listing import SIGNATURE_NAME
from sandbox.document.diagnostic import Diagnostic

Write = Callable[..., Path]


class Author:
    def __init__(self, folder: Path, write_file: Write, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.root = folder / "greeter"
        self.capsys = capsys
        for path in Path(example_folder("rune")).iterdir():
            if path.is_file():
                write_file(self.root / path.name, path.read_bytes(), 0o755)
        self.key = folder / "key"
        make_key(str(self.key), "acme", "of Acme")
        self.trust = folder / "key.pub"

    def __call__(self, *words: str | Path) -> tuple[int, str]:
        try:
            status = main(["package", *map(str, words)])
        except SystemExit as exited:
            status = int(str(exited.code))
        said = self.capsys.readouterr()
        return status, said.out + said.err

    def lint(self, *words: str) -> tuple[int, str]:
        return self("lint", self.root, *words)

    def sign(self, *words: str) -> tuple[int, str]:
        return self("sign", self.root, "--key", self.key, *words)

    def verify(self, *words: str) -> tuple[int, str]:
        return self("verify", self.root, "--trust", self.trust, *words)


@pytest.fixture
def author(plugin_dir: Path, write_file: Write, capsys: pytest.CaptureFixture[str]) -> Author:
    return Author(plugin_dir, write_file, capsys)


def test_a_package_is_linted_signed_and_verified(author: Author) -> None:
    status, said = author.lint()
    assert (status, said) == (0, f"{author.root}: ok: greeter 0.1.0 (rune)\n")
    status, said = author.verify()
    assert status == EXIT["policy_denied"] and f"has no {SIGNATURE_NAME}" in said
    status, said = author.sign()
    assert status == 0 and "signed: greeter 0.1.0" in said and "acme" in said and "sha256:" in said
    status, said = author.verify()
    assert status == 0 and "acme (of Acme), trusted by" in said and "sha256:" in said
    with (author.root / "plugin.py").open("a") as file:
        file.write("\n")
    status, said = author.verify()
    assert (
        status == EXIT["policy_denied"]
        and "not those that were signed" in said
        and "runner package sign" in said
    )
    assert author.sign()[0] == author.verify()[0] == 0


def test_an_error_keeps_a_package_from_being_signed(author: Author) -> None:
    (author.root / "link").symlink_to("plugin.py")
    for status, said in (author.lint(), author.sign()):
        assert status == EXIT["manifest_invalid"]
        assert "link: error: package_kind" in said and "the package has 1 error" in said
    assert not (author.root / SIGNATURE_NAME).exists()


def test_a_faulty_manifest_keeps_a_package_from_being_signed(author: Author) -> None:
    (author.root / "rterm-plugin.json").write_text("{}")
    for status, said in (author.lint(), author.sign(), author.verify()):
        assert status == EXIT["manifest_invalid"] and "rterm-plugin.json" in said
    assert not (author.root / SIGNATURE_NAME).exists()


def test_a_warning_does_not(author: Author) -> None:
    (author.root / ".env").write_text("TOKEN=x")
    (author.root / ".env").chmod(0o644)
    status, said = author.lint()
    assert status == 0 and ".env: warning: package_secret" in said
    assert author.sign()[0] == 0


def test_the_contract_is_asked_too(author: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Diagnostic("rterm-plugin.json", 1, 1, "unwise", "this is unwise", "think again", "warning")
    monkeypatch.setattr(type(find_contract("rune")), "lint", lambda self, document, plugin: (found,))
    status, said = author.lint()
    assert status == 0 and "warning: unwise: this is unwise" in said


def test_a_key_that_others_can_read_does_not_sign(author: Author) -> None:
    author.key.chmod(0o644)
    status, said = author.sign()
    assert status == 2 and "chmod 600" in said
    assert not (author.root / SIGNATURE_NAME).exists()


def test_a_key_in_the_package_does_not_sign(author: Author) -> None:
    author.key = author.key.rename(author.root / "key")
    status, said = author.sign()
    assert status == 2 and "lies in the package" in said


def _der(key: Path) -> bytes:
    return base64.b64decode("".join(key.read_text().splitlines()[1:-1]))


HELD: dict[str, Callable[[Path, Path], object]] = {
    "copy": lambda key, path: path.write_bytes(key.read_bytes()),
    "hard link": lambda key, path: os.link(key, path),
    "indented": lambda key, path: path.write_text(key.read_text().replace("\n", "\n    ")),
    "in the middle": lambda key, path: path.write_bytes(b"x" * ((1 << 18) - 60) + key.read_bytes()),
    "DER": lambda key, path: path.write_bytes(b"x" + _der(key)),
    "hexadecimal": lambda key, path: path.write_text(_der(key).hex()),
    "base64": lambda key, path: path.write_bytes(base64.b64encode(_der(key)[16:])),
}


@pytest.mark.parametrize("name", HELD)
def test_the_key_itself_in_a_file_of_the_package_does_not_sign(author: Author, name: str) -> None:
    HELD[name](author.key, author.root / "notes")
    status, said = author.sign()
    assert status == 2 and "notes holds the private key" in said and "runner keygen" in said
    assert not (author.root / SIGNATURE_NAME).exists()


def test_the_public_key_in_the_package_signs(author: Author) -> None:
    (author.root / "notes").write_text(author.trust.read_text())
    assert author.sign()[0] == 0


def test_an_untrusted_key_and_a_faulty_trust_file_are_told_apart(author: Author) -> None:
    author.sign("--key-id", "other")
    status, said = author.verify()
    assert status == EXIT["policy_denied"] and "'other', which signed the package, is not trusted" in said
    author.trust.write_text("nonsense\n")
    status, said = author.verify()
    assert status == EXIT["policy_invalid"] and "key.pub:1:1: trust_line" in said


@pytest.mark.parametrize("action", ["lint", "sign", "verify"])
def test_each_action_has_a_document(author: Author, action: str) -> None:
    author.sign()
    status, said = getattr(author, action)("--format", "json")
    document: dict[str, Any] = json.loads(said)
    assert status == 0
    assert (document["schema"], document["action"], document["ok"]) == ("runner.package.v1", action, True)
    if action == "sign":
        assert document["signature"]["key_id"] == "acme" and document["files"] == 3
    if action == "verify":
        assert document["signed"]["key_id"] == "acme"
    (author.root / "link").symlink_to("plugin.py")
    status, said = getattr(author, action)("--format", "json")
    document = json.loads(said)
    assert status != 0 and document["ok"] is False and document["message"] and document["hint"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sign", "."), "required: --key (use runner package sign [--contract CONTRACT] --key FILE"),
        (("verify", "."), "required: --trust (use runner package verify "),
        (("lint", ".", "--key", "k"), "--key goes with runner package sign (use runner package lint "),
        (
            ("sign", ".", "--key", "k", "--trust", "t"),
            "--trust goes with runner package verify, pull, inspect (use runner package sign",
        ),
        (("lint", ".", "--key-id", "k"), "--key-id goes with runner package sign"),
    ],
)
def test_options_belong_to_actions(author: Author, words: tuple[str, ...], said: str) -> None:
    status, told = author(*words)
    assert status == 2 and said in told


def test_a_configuration_is_no_package(author: Author, write_file: Write) -> None:
    manifest = write_file(author.folder / "mcp/mcp.json", '{"mcpServers": {"x": {"command": "/bin/true"}}}')
    status, said = author("lint", manifest.parent)
    assert status == EXIT["manifest_invalid"] and "no part of a package" in said
    two = '{"mcpServers": {"x": {"command": "/bin/true"}, "y": {"command": "/bin/true"}}}'
    write_file(manifest, two)
    status, said = author("lint", manifest.parent)
    assert status == EXIT["manifest_invalid"] and "here are several" in said


def test_a_name_that_could_disturb_a_terminal_is_escaped(author: Author) -> None:
    (author.root / "a\x1b[31mb").write_text("")
    status, said = author.lint()
    assert status == EXIT["manifest_invalid"] and "\\x1b" in said and "\x1b" not in said
