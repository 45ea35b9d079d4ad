"""Credentials of docker and podman, and a real registry that asks for them, by TLS with its own authority."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio
import trustme

from runner.install.store import Store
from runner.oci.client import RegistryAccess
from runner.oci.credentials import Credentials, find_credentials
from runner.oci.fetch import fetch
from runner.oci.push import push
from runner.oci.reference import Reference, parse_reference
from runner.package.fault import PackageFault
from tests.conftest import SYSTEM_PATH
from tests.runner.oci.servers import docker_registry
from tests.runner.oci.test_fetch import Package
from tests.tables import check_rows

HERE = "oci://registry.example.com/acme/devkit:1"
ADA = Credentials("ada", "s3cret-word")
BCRYPT = "$2y$05$abcdefghijklmnopqrstuuEpHRRKIlpAGo.iP7Bpa.htQEJMAAnRe"  # of that password


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


ENTRY = {"auth": encoded("ada:s3cret-word")}
OTHER = {"auth": encoded("eve:other-word")}
REGISTRY = "registry.example.com"
DOCKER, PODMAN = ".docker/config.json", ".config/containers/auth.json"


def docker(**content: object) -> Mapping[str, object]:
    return {DOCKER: content}


# The files below HOME, the reference, and what is found.
FILES: dict[str, tuple[Mapping[str, object], str, Credentials | None]] = {
    "nothing": ({}, HERE, None),
    "docker": (docker(auths={REGISTRY: ENTRY}), HERE, ADA),
    "docker, with a scheme": (docker(auths={f"https://{REGISTRY}": ENTRY}), HERE, ADA),
    "podman": ({PODMAN: {"auths": {REGISTRY: ENTRY}}}, HERE, ADA),
    "podman, before docker": (
        {PODMAN: {"auths": {REGISTRY: ENTRY}}, DOCKER: {"auths": {REGISTRY: OTHER}}},
        HERE,
        ADA,
    ),
    "podman, the narrowest": ({PODMAN: {"auths": {REGISTRY: OTHER, f"{REGISTRY}/acme": ENTRY}}}, HERE, ADA),
    "another registry": (docker(auths={f"{REGISTRY}:5000": ENTRY}), HERE, None),
    "another namespace": (docker(auths={f"{REGISTRY}/evil": ENTRY}), HERE, None),
    "docker's own": (
        docker(auths={"https://index.docker.io/v1/": ENTRY}),
        "oci://docker.io/acme/devkit:1",
        ADA,
    ),
    "an identity token": (
        docker(auths={REGISTRY: {"identitytoken": "t0ken"}}),
        HERE,
        Credentials(identity_token="t0ken"),
    ),
    "in plain": (docker(auths={REGISTRY: {"username": "ada", "password": "s3cret-word"}}), HERE, ADA),
    "a helper": (docker(credHelpers={REGISTRY: "good"}), HERE, ADA),
    "a store": (docker(credsStore="good", auths={REGISTRY: {}}), HERE, ADA),
    "a store that has a token": (docker(credsStore="token"), HERE, Credentials(identity_token="s3cret-word")),
    "a store that has nothing": (docker(credsStore="empty"), HERE, None),
    "a helper for another": (docker(credHelpers={"example.com": "good"}), HERE, None),
}
BAD: dict[str, tuple[Mapping[str, object], str]] = {
    "no JSON": ({DOCKER: '{"auths": "s3cret-word'}, "cannot be read as JSON"),
    "no base64": (docker(auths={REGISTRY: {"auth": "s3cret-word!"}}), "cannot be read"),
    "no helper": (docker(credsStore="missing"), "is not on PATH"),
    "a helper that is a path": (docker(credsStore="../../bin/good"), "is not on PATH"),
    "a helper that fails": (docker(credsStore="fails"), f"failed for {REGISTRY}"),
    "a helper that says nothing": (docker(credsStore="silent"), "an answer that is none"),
}
ANSWER = """cat >/dev/null; echo '{"ServerURL": "x", "Username": "%s", "Secret": "s3cret-word"}'"""
HELPERS = {
    "good": f'read name; [ "$name" = {REGISTRY} ] || [ -z "$name" ] || exit 1; ' + ANSWER % "ada",
    "token": ANSWER % "<token>",
    "empty": "echo credentials not found in native keychain; exit 1",
    "fails": "echo s3cret-word; exit 3",
    "silent": "cat >/dev/null",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, script in HELPERS.items():
        helper = tmp_path / "bin" / f"docker-credential-{name}"
        helper.write_text(f"#!/bin/sh\n{script}\n")
        helper.chmod(0o755)
    return tmp_path


def look_up(home: Path, files: Mapping[str, object], word: str) -> Credentials | None:
    for name in (".docker/config.json", ".config/containers/auth.json"):
        (home / name).unlink(missing_ok=True)
    for name, content in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return find_credentials(parse_reference(word), {"HOME": str(home), "PATH": f"{home}/bin:{SYSTEM_PATH}"})


def test_what_docker_and_podman_have_stored_is_found(home: Path) -> None:
    def check(name: str, row: tuple[Mapping[str, object], str, Credentials | None]) -> None:
        assert look_up(home, row[0], row[1]) == row[2]

    check_rows(FILES, check)
    moved = {"REGISTRY_AUTH_FILE": str(home / "x.json"), "HOME": "/nowhere", "PATH": ""}
    (home / "x.json").write_text(json.dumps({"auths": {"registry.example.com": ENTRY}}))
    assert find_credentials(parse_reference(HERE), moved) == ADA


def test_what_cannot_be_used_is_told_without_its_content(home: Path) -> None:
    def check(name: str, row: tuple[Mapping[str, object], str]) -> None:
        with pytest.raises(PackageFault) as caught:
            look_up(home, row[0], HERE)
        fault = caught.value
        assert fault.rule == "credentials" and row[1] in str(fault) and fault.hint
        assert "s3cret" not in str(fault) + fault.hint

    check_rows(BAD, check)
    assert "s3cret" not in repr(ADA)


REFERENCES: dict[str, Reference | None] = {
    "oci://registry.example.com/acme/devkit:1.2.0": Reference("registry.example.com", "acme/devkit", "1.2.0"),
    "registry.example.com:443/x:1": Reference("registry.example.com", "x", "1"),
    "oci://localhost:5000/x@sha256:" + "a" * 64: Reference("localhost:5000", "x", "", "sha256:" + "a" * 64),
    "oci://[::1]:5000/x:1": Reference("[::1]:5000", "x", "1"),
    "oci://registry.example.com/x": None,
    "oci://registry.example.com": None,
    "oci://registry.example.com/X:1": None,
    "oci://registry.example.com/../x:1": None,
    "oci://registry.example.com/x:1@sha256:" + "a" * 64: None,
    "oci://registry.example.com/x@sha256:abc": None,
    "oci://registry.example.com/x@sha512:" + "a" * 128: None,
    "oci://registry.example.com/x:-1": None,
    "oci://ada:word@registry.example.com/x:1": None,
    "oci:///x:1": None,
    "oci://a b/x:1": None,
    "oci://registry.example.com/x:1?y": None,
    "oci://registry.example.com/" + "x" * 600 + ":1": None,
}


def test_references_are_read_strictly() -> None:
    def check(text: str, wanted: Reference | None) -> None:
        if wanted is not None:
            found = parse_reference(text)
            assert found == wanted and parse_reference(str(found)) == found
            return
        with pytest.raises(PackageFault) as caught:
            parse_reference(text)
        assert caught.value.rule == "reference" and "word@" not in str(caught.value)

    check_rows(REFERENCES, check)


@pytest.mark.needs("docker-registry")
def test_a_registry_with_a_password_and_an_authority_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "tls.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    (tmp_path / "htpasswd").write_text(f"ada:{BCRYPT}\n")
    package, store = Package(tmp_path), Store(str(tmp_path / "store"))
    package.sign()
    lines = (
        f"auth: {{htpasswd: {{realm: here, path: {tmp_path}/htpasswd}}}}",
        f"  tls: {{certificate: {tmp_path}/tls.pem, key: {tmp_path}/tls.pem}}",
    )
    with docker_registry(tmp_path, *lines) as address:
        reference = parse_reference(f"oci://{address}/acme/x:1")
        own = RegistryAccess(ca=str(tmp_path / "ca.pem"), deadline=60.0)

        def attempt(access: RegistryAccess, auths: Mapping[str, object]) -> str:
            (tmp_path / "config.json").write_text(json.dumps({"auths": {address: auths}}))
            monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
            with pytest.raises(PackageFault) as caught:
                trio.run(lambda: push(package.plugin, reference, access=access))
            assert "s3cret" not in str(caught.value) + caught.value.hint
            return caught.value.rule

        assert attempt(RegistryAccess(deadline=60.0), ENTRY) == "registry_answer"  # there is no HTTP
        assert attempt(own._replace(ca=str(tmp_path / "other.pem")), ENTRY) == "registry_unreachable"
        assert attempt(own, {}) == "registry_denied"
        assert attempt(own, OTHER) == "registry_denied"
        assert attempt(own._replace(ca=str(tmp_path / "nothing")), ENTRY) == "registry_ca"
        (tmp_path / "config.json").write_text(json.dumps({"auths": {address: ENTRY}}))  # the control
        trio.run(lambda: push(package.plugin, reference, access=own))
        found = trio.run(lambda: fetch(reference, store, trust=package.trust, access=own))
        assert found.signature.status == "trusted"
