"""Packages from registries: what comes is checked before it is unpacked, and a failure leaves nothing."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import trio
from h11 import _readers

from runner.contracts.registry import contract_names, example_folder
from runner.install.store import Store
from runner.manifest import unpack
from runner.manifest.load import load
from runner.oci import client as client_module
from runner.oci import fetch as fetch_module
from runner.oci.artifact import INDEX, SIGNATURE, digest_of, write_package
from runner.oci.client import RegistryAccess
from runner.oci.fetch import fetch
from runner.oci.push import push
from runner.oci.reference import Reference, parse_reference
from runner.oci.stored import StoredPackage, find_stored
from runner.package.fault import PackageFault
from runner.package.keys import load_key, make_key
from runner.package.listing import SIGNATURE_NAME, list_package
from runner.package.signature import sign, write_signature
from runner.plugin import Plugin
from tests.runner.manifest.test_unpack import REFUSED
from tests.runner.manifest.test_unpack import write as write_tar
from tests.runner.oci.servers import FakeRegistry, Handler, fake_registry, tar_of
from tests.tables import check_rows

QUICK = RegistryAccess(deadline=30.0)


class Package:
    """A plugin's folder, with a key that signs it."""

    def __init__(self, folder: Path, contract: str = "rune") -> None:
        self.folder, self.key = folder / "plugin", folder / "key"
        shutil.copytree(example_folder(contract), self.folder)
        make_key(str(self.key), "acme")
        self.trust = f"{self.key}.pub"

    @property
    def plugin(self) -> Plugin:
        read = load(str(self.folder))
        assert read.plugin is not None, read.diagnostics
        return read.plugin

    def sign(self, key: Path | None = None, package_id: str = "") -> bytes:
        """Sign the folder. Returns the signature."""
        plugin, signer = self.plugin, load_key(str(key or self.key))
        listing = list_package(str(self.folder))
        made = sign(listing, package_id or plugin.id, plugin.version, signer, 0.0)
        write_signature(str(self.folder), made)
        return (self.folder / SIGNATURE_NAME).read_bytes()

    def set_version(self, version: str) -> None:
        path = self.folder / "rterm-plugin.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "plugin_version": version}))

    def tar(self) -> bytes:
        found = sorted(
            path for path in self.folder.rglob("*") if path.is_file() and path.name != SIGNATURE_NAME
        )
        return tar_of({str(path.relative_to(self.folder)): path.read_bytes() for path in found})


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def pushed(package: Package, reference: Reference) -> Reference:
    return trio.run(lambda: push(package.plugin, reference)).reference


def fetched(reference: Reference, store: Store, trust: str | None = None, **options: object) -> StoredPackage:
    options = {"required": trust is not None, "access": QUICK, **options}
    return trio.run(lambda: fetch(reference, store, trust=trust, **options))  # type: ignore[arg-type]


def refused(reference: Reference, store: Store, trust: str | None = None, **options: object) -> PackageFault:
    """The fault. Nothing of the package is left."""
    before = kept(store)
    with pytest.raises(PackageFault) as caught:
        fetched(reference, store, trust, **options)
    assert kept(store) == before
    return caught.value


def kept(store: Store) -> list[str]:
    """What a store has, without its lock and its empty folders."""
    root = Path(store.root)
    return sorted(str(path) for path in root.rglob("*") if path.is_file() and path.name != "lock")


# --- what works ---------------------------------------------------------------------------------------------


@pytest.mark.needs("docker-registry")
def test_a_package_of_every_contract_comes_back_as_it_was(registry: str, tmp_path: Path) -> None:
    def check(contract: str, name: str) -> None:
        (tmp_path / contract).mkdir()
        package = Package(tmp_path / contract, contract)
        store = Store(str(tmp_path / contract / "store"))
        is_signable = package.plugin.root is not None  # a configuration is not
        signature = package.sign() if is_signable else b""
        reference = parse_reference(f"oci://{registry}/every/{name}:1")
        by_digest = pushed(package, reference)
        found = fetched(reference, store, package.trust if is_signable else None)
        assert (found.digest, found.plugin.id) == (by_digest.digest, package.plugin.id)
        assert found.signature.status == ("trusted" if is_signable else "absent")
        assert list_package(found.path) == list_package(str(package.folder))
        assert found.signature.document == signature
        for path in (Path(found.path), *Path(found.path).rglob("*")):
            assert not path.stat().st_mode & 0o222, path
        # Both are there now: no registry is asked.
        nowhere = RegistryAccess(deadline=0.0)
        assert fetched(reference, store, access=nowhere).path == found.path
        assert fetched(by_digest, store, access=nowhere).path == found.path

    check_rows([(contract, contract) for contract in contract_names()], check)


@pytest.mark.needs("docker-registry")
def test_the_same_folder_has_the_same_digest(registry: str, package: Package) -> None:
    reference = parse_reference(f"oci://{registry}/same/x:1")
    first = pushed(package, reference)
    for path in (package.folder, *package.folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o077)
        os.utime(path, (1, 2))
    copy = package.folder.with_name("copy")
    for path in sorted(package.folder.rglob("*"), reverse=True):  # in another order
        copy.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    (copy / "empty").mkdir()
    package.folder = copy
    package.sign()
    assert pushed(package, reference) == first
    (copy / "plugin.py").chmod(0o644)  # the control: who may execute it is part of the package
    package.sign()
    assert pushed(package, reference) != first


@pytest.mark.needs("docker-registry")
def test_a_signature_can_be_added_later_and_by_several(
    registry: str, package: Package, tmp_path: Path, store: Store
) -> None:
    reference = parse_reference(f"oci://{registry}/later/x:1")
    first = pushed(package, reference)
    fault = refused(reference, store, package.trust)
    assert fault.rule == "signature_missing" and "no signature" in str(fault)
    make_key(str(tmp_path / "other"), "other")
    package.sign(tmp_path / "other")
    assert pushed(package, reference) == first
    assert refused(reference, store, package.trust).rule == "signature_untrusted"
    package.sign()
    assert pushed(package, reference) == first
    assert fetched(reference, store, package.trust).signature.status == "trusted"
    other = Store(str(tmp_path / "second"))
    assert fetched(reference, other, str(tmp_path / "other.pub")).signature.status == "trusted"
    third = Store(str(tmp_path / "third"))
    nobody = tmp_path / "nobody.pub"
    nobody.write_text("")
    found = fetched(first, third, str(nobody), required=False)
    assert found.signature.status == "untrusted" and "is not trusted" in found.signature.reason
    assert find_stored(first, third, trust=package.trust) is not None


@pytest.mark.needs("docker-registry")
def test_signatures_that_are_pushed_at_once_are_all_listed(
    registry: str, package: Package, tmp_path: Path
) -> None:
    reference = parse_reference(f"oci://{registry}/at-once/x:1")
    names = [f"key{number}" for number in range(4)]
    folders = {}
    for name in names:
        make_key(str(tmp_path / name), name)
        folders[name] = tmp_path / f"of-{name}"
        package.sign(tmp_path / name)
        shutil.copytree(package.folder, folders[name])

    async def push_all() -> None:
        async with trio.open_nursery() as nursery:
            for folder in folders.values():
                plugin = load(str(folder)).plugin
                assert plugin is not None
                nursery.start_soon(push, plugin, reference)

    trio.run(push_all)
    for name in names:
        found = fetched(reference, Store(str(tmp_path / f"store-{name}")), str(tmp_path / f"{name}.pub"))
        assert found.signature.status == "trusted", name


def test_an_entry_that_another_client_removed_is_written_again(
    server: FakeRegistry, package: Package
) -> None:
    """The registry has no referrers API. Three others had read the index before we wrote it. One of them
    writes after we have seen our entry there."""
    package.sign()
    lost: list[bytes] = []

    def lose(name: str) -> None:
        lost.append(server.manifests[name])
        theirs = {"mediaType": "x", "digest": digest_of(b"%d" % len(lost)), "size": 1, "artifactType": "x"}
        server.manifests[name] = json.dumps({"mediaType": INDEX, "manifests": [theirs]}).encode()

    def index(handler: Handler) -> None:
        name = handler.path.rpartition("/")[2]
        if handler.command == "PUT":
            server.manifests[name] = handler.body
            if len(lost) < 2:
                lose(name)
            handler.answer(201)
            return
        found = server.manifests.get(name)
        handler.answer(404) if found is None else handler.answer(200, found)
        if len(lost) == 2 and found is not None and SIGNATURE.encode() in found:
            lose(name)

    tag = trio.run(lambda: push(package.plugin, server.reference())).reference.digest.replace(":", "-")
    server.manifests.pop(tag)
    server.faults[tag] = index
    pushed(package, server.reference())
    listed = json.loads(server.manifests[tag])["manifests"]
    assert len(lost) == 3 and [each["artifactType"] for each in listed] == ["x", SIGNATURE]
    # The control: one that never stops is told.
    server.faults[tag] = lambda handler: handler.answer(201 if handler.command == "PUT" else 404)
    with pytest.raises(PackageFault, match="other clients keep removing it"):
        pushed(package, server.reference())


def test_a_registry_with_a_list_of_referrers_is_asked_for_it(
    server: FakeRegistry, package: Package, store: Store
) -> None:
    signature = package.sign()
    digest = server.publish(package.tar())
    server.sign(digest, signature)
    assert fetched(server.reference(), store, package.trust).signature.status == "trusted"
    assert not any("sha256-" in seen.path for seen in server.seen)


# --- what is refused ----------------------------------------------------------------------------------------

Fault = Callable[[FakeRegistry, bytes], Reference | None]


def _swap(kind: str) -> Fault:
    """Other bytes than those of the digest: "manifest", or "blob"."""

    def make(server: FakeRegistry, tar: bytes) -> Reference:
        digest = server.publish(tar)
        if kind == "manifest":
            server.manifests[digest] = server.manifests[digest] + b" "
        else:
            server.blobs[digest_of(tar)] = tar[:-1] + b"x"
        return server.reference(f"@{digest}")

    return make


def _with_blob(change: Callable[[bytes], bytes]) -> Fault:
    def make(server: FakeRegistry, tar: bytes) -> None:
        server.publish(tar)
        server.blobs[digest_of(tar)] = change(tar)

    return make


def _with_manifest(**changes: Any) -> Fault:
    def make(server: FakeRegistry, tar: bytes) -> None:
        server.publish(tar, **changes)

    return make


def _with_tar(content: bytes) -> Fault:
    def make(server: FakeRegistry, tar: bytes) -> None:
        server.publish(content)

    return make


def _with_layers(count: int, **changes: object) -> Fault:
    def make(server: FakeRegistry, tar: bytes) -> None:
        layer = json.loads(write_package(digest_of(tar), len(tar), "", "", ""))["layers"][0]
        server.publish(tar, layers=[{**layer, **changes}] * count)

    return make


def _answering(ending: str, answer: Callable[[Handler], None]) -> Fault:
    def make(server: FakeRegistry, tar: bytes) -> None:
        server.publish(tar)
        server.faults[ending or digest_of(tar)] = answer

    return make


def _endless(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")


def _no_http(handler: Handler) -> None:
    handler.wfile.write(b"hello\r\n\r\n")


def _send_blanks(handler: Handler, last: bytes, chunk: bytes = b"") -> None:
    head = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n"
    if chunk:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
    handler.wfile.write(head + b"X:" + b" " * 900 + last + b"\r\n\r\n")


def _redirect(place: str) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(307, Location=place)


BAD_REGISTRIES: dict[str, tuple[Fault, str, str]] = {
    "another manifest than the digest": (_swap("manifest"), "registry_digest", "gave a manifest that is not"),
    "other bytes of a blob": (_swap("blob"), "registry_digest", "gave other bytes than those of"),
    "a blob that is longer": (_with_blob(lambda tar: tar + b"x"), "registry_digest", "gave more bytes"),
    "a blob that is shorter": (
        _with_blob(lambda tar: tar[:-1]),
        "registry_digest",
        "bytes for a blob that has",
    ),
    "a digest in a header that lies": (
        _answering(
            "manifests/1", lambda handler: handler.answer(200, b"{}", Docker_Content_Digest="sha256:1")
        ),
        "registry_digest",
        "is not 'sha256:1'",
    ),
    "an artifact of others": (
        _with_manifest(artifactType="application/vnd.acme"),
        "package_foreign",
        "its artifact type 'application/vnd.acme'",
    ),
    "an image": (_with_manifest(artifactType=None), "package_foreign", "artifact type 'None'"),
    "an index": (_with_manifest(mediaType=INDEX, manifests=[]), "package_foreign", "image.index"),
    "a layer of another kind": (
        _with_layers(1, mediaType="application/zip"),
        "package_foreign",
        "its layer is 'application/zip'",
    ),
    "a layer in other places": (_with_layers(1, urls=["http://x/"]), "package_foreign", "in other places"),
    "two layers": (_with_layers(2), "package_foreign", "has 2 layers"),
    "no layer": (_with_layers(0), "package_foreign", "has 0 layers"),
    "a layer of 2 GiB": (_with_layers(1, size=2 << 30), "package_size", "'2147483648' bytes"),
    "a size that is none": (_with_layers(1, size="1"), "package_size", "'1' bytes"),
    "a digest of another kind": (
        _with_layers(1, digest="md5:1"),
        "registry_answer",
        "no media type or SHA-256",
    ),
    "a manifest that is no JSON": (
        _answering("manifests/1", lambda handler: handler.answer(200, b"{")),
        "registry_answer",
        "cannot be read",
    ),
    "a manifest of a thousand levels": (
        _answering("manifests/1", lambda handler: handler.answer(200, b'{"a":' + b"[" * 1000)),
        "registry_answer",
        "cannot be read",
    ),
    "an endless manifest": (
        _answering("manifests/1", _endless),
        "registry_answer",
        "more than 1048576 bytes",
    ),
    "an endless blob": (_answering("", _endless), "registry_digest", "gave more bytes"),
    "a compressed answer": (
        _answering("manifests/1", lambda handler: handler.answer(200, b"{}", Content_Encoding="gzip")),
        "registry_answer",
        "compressed its answer",
    ),
    "no HTTP": (
        _answering("manifests/1", _no_http),
        "registry_answer",
        "does not speak HTTP",
    ),
    "a header that h11 takes long for": (
        _answering("manifests/1", lambda handler: _send_blanks(handler, b"\0")),
        "registry_answer",
        "does not speak HTTP",
    ),
    "a trailer that h11 takes long for": (
        _answering("manifests/1", lambda handler: _send_blanks(handler, b"\0", b"0\r\n")),
        "registry_answer",
        "does not speak HTTP",
    ),
    "blanks in a header, as a control": (
        _answering("manifests/1", lambda handler: _send_blanks(handler, b"")),
        "registry_missing",
        "has no acme/x 1",
    ),
    "headers of 40 KB": (
        _answering("manifests/1", lambda handler: handler.answer(404, b"", X=f"{'a' * 40_000}")),
        "registry_answer",
        "does not speak HTTP",
    ),
    "headers of 8 KB, as a control": (
        _answering("manifests/1", lambda handler: handler.answer(404, b"", X=f"{'a' * 8_000}")),
        "registry_missing",
        "has no acme/x 1",
    ),
    "an error": (
        _answering("manifests/1", lambda handler: handler.answer(500, b'{"errors":[{"code":"UNKNOWN"}]}')),
        "registry_failed",
        "status 500 (UNKNOWN)",
    ),
    "nothing": (lambda server, tar: None, "registry_missing", "has no acme/x 1"),
    "a redirect to itself": (
        _answering("manifests/1", _redirect("/v2/acme/x/manifests/1")),
        "registry_redirect",
        "more than 5 times",
    ),
    "a redirect to a private host": (
        _answering("", _redirect("https://10.0.0.1/x")),
        "registry_redirect",
        "10.0.0.1",
    ),
    "a redirect to keys of the cloud": (
        _answering("", _redirect("https://169.254.169.254/latest")),
        "registry_redirect",
        "serves the keys of cloud machines",
    ),
    "a redirect to this machine": (
        _answering("", _redirect("https://127.0.0.1:1/")),
        "registry_redirect",
        "is this machine",
    ),
    "a redirect without TLS": (
        _answering("", _redirect("http://example.com/")),
        "registry_redirect",
        "without TLS",
    ),
    "a redirect to a file": (
        _answering("", _redirect("file:///etc/passwd")),
        "registry_redirect",
        "without TLS",
    ),
    "a redirect to nowhere": (_answering("", _redirect("https://[/")), "registry_redirect", "no address"),
    "files that are no plugin": (
        _with_tar(tar_of({"x": b""})),
        "manifest",
        "there is no manifest here",
    ),
    "a signature in the package": (
        _with_tar(tar_of({SIGNATURE_NAME: b""})),
        "package_tar",
        "signatures are beside a package",
    ),
    "a folder in place of a signature": (
        _with_tar(tar_of({f"{SIGNATURE_NAME}/x": b""})),
        "package_tar",
        "signatures are beside a package",
    ),
    "a redirect to a name that is none": (
        _answering("", _redirect("https://xn--data/")),
        "registry_answer",
        "does not speak HTTP",
    ),
    "a token server that is none": (
        _answering(
            "", lambda handler: handler.answer(401, b"", WWW_Authenticate='Bearer realm="https://xn--data/"')
        ),
        "registry_answer",
        "does not speak HTTP",
    ),
    "no tar": (_with_tar(b"x" * 2000), "package_tar", "cannot be unpacked"),
}


def test_a_bad_registry_is_refused_and_leaves_nothing(
    package: Package, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = package.tar()
    tried: list[bytes] = []
    validate = _readers.validate  # type: ignore[attr-defined]

    def watched(pattern: re.Pattern[bytes], line: bytes, *words: Any) -> Any:
        tried.append(bytes(line))
        return validate(pattern, line, *words)

    monkeypatch.setattr(_readers, "validate", watched)

    def check(name: str, row: tuple[Fault, str, str]) -> None:
        make, rule, reason = row
        with fake_registry() as server:
            reference = make(server, tar) or server.reference()
            fault = refused(reference, store)
            assert fault.rule == rule and reason in str(fault), str(fault)

    check_rows(BAD_REGISTRIES, check)
    # h11 tries its patterns on the blanks, and never on what it takes the square of their number for.
    assert any(b" " * 900 in line for line in tried) and not any(b"\0" in line for line in tried)
    with fake_registry() as server:  # the control
        server.publish(tar)
        assert fetched(server.reference(), store).plugin.id == "greeter"


def test_a_bad_tar_is_refused_and_leaves_nothing(
    package: Package, store: Store, tmp_path: Path, server: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(name: str, content: bytes, reason: str) -> None:
        server.publish(content)
        fault = refused(server.reference(), store)
        assert fault.rule == "package_tar" and reason in str(fault), str(fault)

    def check_row(name: str, row: tuple[tuple[Callable[..., None], ...], str]) -> None:
        check(name, Path(write_tar(tmp_path / "bad.tar", *row[0])).read_bytes(), row[1])

    check_rows(REFUSED, check_row)
    monkeypatch.setattr(unpack, "MOST_BYTES", 16 << 20)
    monkeypatch.setattr(unpack, "MOST_ENTRIES", 1000)
    check("many", tar_of({f"{number}": b"" for number in range(1001)}, "w:gz"), "more than 1000 entries")
    check("a bomb", tar_of({"large": bytes(17 << 20)}, "w:gz"), "more than 16777216 bytes")
    packed = gzip.compress(package.tar())
    check("damaged", packed[:100] + bytes(100) + packed[200:], "cannot be unpacked")
    server.publish(gzip.compress(package.tar()))  # the control
    assert fetched(server.reference(), store).plugin.id == "greeter"


def test_other_bytes_the_second_time_are_refused(
    server: FakeRegistry, package: Package, tmp_path: Path
) -> None:
    digest = server.publish(package.tar())
    reference = server.reference(f"@{digest}")
    fetched(reference, Store(str(tmp_path / "first")))
    server.blobs[digest_of(package.tar())] = package.tar().replace(b"Hello", b"Howdy")
    assert refused(reference, Store(str(tmp_path / "second"))).rule == "registry_digest"


@pytest.mark.parametrize("where", ["manifest", "blob"])
def test_a_slow_registry_is_given_up(
    server: FakeRegistry, package: Package, store: Store, where: str
) -> None:
    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"{")
        handler.rfile.read(1)  # until the client has gone

    server.publish(package.tar())
    server.faults["manifests/1" if where == "manifest" else digest_of(package.tar())] = drip
    fault = refused(server.reference(), store, access=RegistryAccess(deadline=0.5))
    assert fault.rule == "registry_slow" and "0.5 s for everything" in str(fault)


def test_a_deadline_ends_the_reading_of_an_archive_too(
    server: FakeRegistry, package: Package, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in a thread, which nothing can stop from outside."""

    def read_for_ever(file: IO[bytes]) -> None:
        while True:
            file.seek(0)
            assert file.peek(1) and file.read(1)  # type: ignore[attr-defined]

    monkeypatch.setattr(fetch_module, "list_archive", read_for_ever)
    server.publish(package.tar())
    fault = refused(server.reference(), store, access=RegistryAccess(deadline=0.5))
    assert fault.rule == "registry_slow" and "0.5 s for everything" in str(fault)


def test_signatures_of_others_do_not_count(
    server: FakeRegistry, package: Package, tmp_path: Path, store: Store
) -> None:
    good = package.sign()
    (tmp_path / "other").mkdir()
    other = Package(tmp_path / "other")
    (other.folder / "plugin.py").write_text("#!/bin/sh\n")
    digest = server.publish(package.tar())
    reference = server.reference(f"@{digest}")

    def attempt(signature: bytes, claimed: str = "", trust: str = package.trust) -> str:
        server.referrers.clear()
        server.sign(digest, signature, claimed)
        return refused(reference, store, trust).rule

    assert attempt(other.sign(package.key)) == "signature_digest"
    assert attempt(good, digest_of(b"another")) == "signature_subject"
    assert attempt(package.sign(other.key)) == "signature_invalid"  # its key has the same name
    assert attempt(b"{}") == "signature_malformed"
    assert attempt(package.sign(package_id="evil")) == "signature_identity"
    assert attempt(good.replace(b"1970", b"1971")) == "signature_invalid"
    server.referrers.clear()
    for number in range(65):
        server.sign(digest, b"%d" % number)
    assert refused(reference, store, package.trust).rule == "registry_answer"
    server.referrers.clear()
    server.sign(digest, package.sign(other.key))
    server.sign(digest, good)  # the control: one that is good is enough
    assert fetched(reference, store, package.trust).signature.status == "trusted"


def test_nothing_is_unpacked_before_its_signature_is_good(
    server: FakeRegistry, package: Package, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[str] = []

    def extract(*given: Any, **options: Any) -> None:
        unpacked.append("x")
        unpack.extract(*given, **options)

    monkeypatch.setattr(fetch_module, "extract", extract)
    digest = server.publish(package.tar())
    refused(server.reference(), store, package.trust)
    assert unpacked == [] and not os.path.exists(store.root)
    server.sign(digest, package.sign())
    fetched(server.reference(), store, package.trust)  # the control
    assert unpacked == ["x"]


def test_a_tag_is_pinned_and_an_older_version_is_told(
    server: FakeRegistry, package: Package, store: Store
) -> None:
    versions = {}
    for version in ("1.2.0", "1.10.0", "1.10.0-rc.1", "1.3.0"):
        package.set_version(version)
        server.publish(package.tar(), version)
        versions[version] = server.manifests[version]
    server.manifests["1"] = versions["1.2.0"]
    first = fetched(server.reference(), store)
    server.manifests["1"] = versions["1.10.0"]
    assert fetched(server.reference(), store) == first  # pinned
    assert fetched(server.reference(), store, update=True).plugin.version == "1.10.0"
    for older in ("1.3.0", "1.10.0-rc.1", "1.2.0"):
        server.manifests["1"] = versions[older]
        fault = refused(server.reference(), store, update=True)
        assert fault.rule == "version_older" and f"is {older} now, which is older than 1.10.0" in str(fault)
    assert fetched(server.reference(), store).plugin.version == "1.10.0"
    assert fetched(server.reference(), store, update=True, older=True).plugin.version == "1.2.0"


# --- credentials --------------------------------------------------------------------------------------------


def test_credentials_stay_with_their_registry(
    server: FakeRegistry, package: Package, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry with a token server redirects a blob to another host."""
    login(tmp_path, monkeypatch, server.address, "ada:s3cret-word")
    tar = package.tar()
    server.publish(tar)
    with fake_registry() as tokens, fake_registry() as blobs:
        blobs.blobs[digest_of(tar)] = tar

        def protected(handler: Handler) -> None:
            fault = server.faults.pop("/1", None), server.faults.pop(digest_of(tar), None)
            del fault
            if handler.headers.get("Authorization") != "Bearer t0ken":
                realm = f'Bearer realm="http://{tokens.address}/token",service="here"'
                handler.answer(401, b"", WWW_Authenticate=realm)
            elif handler.path.endswith("/1"):
                handler.answer(200, server.manifests["1"])
            else:
                handler.answer(307, Location=f"http://{blobs.address}/v2/acme/x/blobs/{digest_of(tar)}")
            server.faults["/1"] = server.faults[digest_of(tar)] = protected

        server.faults["/1"] = server.faults[digest_of(tar)] = protected
        tokens.faults["/token"] = lambda handler: handler.answer(200, b'{"token": "t0ken"}')
        fault = refused(server.reference(), store)
        assert fault.rule == "registry_redirect" and "wants your credentials sent to 'localhost'" in str(
            fault
        )
        assert tokens.seen == []
        named = RegistryAccess(hosts=(tokens.address,), deadline=30.0)
        fault = refused(server.reference(), store, access=named)
        assert fault.rule == "registry_redirect" and "127.0.0.1" in str(fault) and blobs.seen == []
        named = RegistryAccess(hosts=(tokens.address, blobs.address), deadline=30.0)
        assert fetched(server.reference(), store, access=named).plugin.id == "greeter"
        assert [seen.authorization for seen in blobs.seen] == [""]
        assert all(seen.authorization.startswith("Basic ") for seen in tokens.seen)
        assert "scope=repository%3Aacme%2Fx%3Apull" in tokens.seen[-1].path
        assert {seen.authorization for seen in server.seen} == {"", "Bearer t0ken"}


def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, word: str) -> None:
    import base64

    config = {"auths": {address: {"auth": base64.b64encode(word.encode()).decode()}}}
    (tmp_path / "docker").mkdir(exist_ok=True)
    (tmp_path / "docker/config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


def test_no_message_has_credentials_that_a_server_repeats(
    server: FakeRegistry, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login(tmp_path, monkeypatch, server.address, "ada:s3cret-word")
    repeated: list[str] = []

    def repeat(handler: Handler) -> None:
        given = handler.headers.get("Authorization", "")
        repeated.append(given)
        if not given:
            handler.answer(401, b"", WWW_Authenticate='Basic realm="x"')
            return
        body = json.dumps({"errors": [{"code": given, "message": given}]}).encode()
        if len(repeated) > 2:
            handler.wfile.write(f"HTTP/1.1 {given}\r\n{given}\r\n\r\n".encode())
        else:
            handler.answer(418, body, X_Echo=given)

    server.faults["/1"] = repeat
    for _ in range(2):
        fault = refused(server.reference(), store)
        assert repeated[-1].startswith("Basic ") and repeated[-1][6:] not in str(fault) + fault.hint


def test_only_public_addresses_are_dialled_and_exactly_those_that_were_judged(
    server: FakeRegistry, package: Package, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name leads to a public address when it is judged. What is dialled then is that address."""
    server.publish(package.tar())
    server.faults[digest_of(package.tar())] = _redirect("https://blobs.example.com/x")
    asked: list[str] = []

    async def resolve(name: str) -> list[str]:
        asked.append(name)
        return ["192.0.2.1", "10.0.0.1"] if len(asked) == 1 else ["127.0.0.1"]

    monkeypatch.setattr(client_module, "resolve_name", resolve)
    fault = refused(server.reference(), store)
    assert "192.0.2.1" in str(fault) and "documentation" in str(fault)
    monkeypatch.setattr(client_module, "vet", lambda address: "")
    fault = refused(server.reference(), store)  # the control: 127.0.0.1 is dialled, and has no TLS there
    assert asked == ["blobs.example.com"] * 2 and fault.rule == "registry_unreachable"


def test_an_identity_token_is_exchanged_at_the_registry_only(
    server: FakeRegistry, package: Package, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"auths": {server.address: {"identitytoken": "1dentity"}}})
    )
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    server.publish(package.tar())
    manifest, bodies = server.manifests["1"], list[bytes]()

    def protected(handler: Handler) -> None:
        if handler.headers.get("Authorization") == "Bearer t0ken":
            handler.answer(200, manifest)
        else:
            handler.answer(401, b"", WWW_Authenticate='Bearer realm="/token",service="here"')

    def exchange(handler: Handler) -> None:
        bodies.append(handler.body)
        handler.answer(200, b'{"access_token": "t0ken"}')

    server.faults.update({"/1": protected, "/token": exchange})
    assert fetched(server.reference(), store).plugin.id == "greeter"
    [body] = bodies
    assert b"grant_type=refresh_token" in body and b"refresh_token=1dentity" in body
    server.faults["/token"] = lambda handler: handler.answer(200, b'{"token": "a b"}')
    assert refused(server.reference(), Store(str(tmp_path / "other"))).rule == "registry_answer"


def test_only_this_machine_is_asked_without_tls() -> None:
    def scheme(host: str, access: RegistryAccess = QUICK) -> str:
        reference = parse_reference(f"oci://{host}/x:1")
        client = client_module.RegistryClient(None, reference, access, None, push=False)  # type: ignore[arg-type]
        return client._url("x").scheme

    assert {scheme(host) for host in ("localhost", "localhost:5000", "127.0.0.1:5000", "[::1]:5000")} == {
        "http"
    }
    others = ("registry.example.com", "localhost.example.com", "10.0.0.1:5000", "docker.io")
    assert {scheme(host) for host in others} == {"https"}
    assert scheme("10.0.0.1:5000", QUICK._replace(plain_http=True)) == "http"
    assert scheme("localhost:5000", QUICK._replace(ca="x")) == "https"


# --- at once, half-way, afterwards --------------------------------------------------------------------------


def test_a_tag_that_moves_between_two_fetches_at_once_is_pinned_once(
    server: FakeRegistry, package: Package, store: Store
) -> None:
    """The second fetch begins before the first is stored, and gets another version from the registry."""
    moved: list[StoredPackage] = []
    server.publish(package.tar())
    first = server.manifests["1"]
    package.set_version("9.9.9")
    server.publish(package.tar())

    def answer(handler: Handler) -> None:
        server.faults.clear()
        moved.append(fetched(server.reference(), store))
        handler.answer(200, first)

    server.faults["manifests/1"] = answer
    found = fetched(server.reference(), store)
    assert [each.plugin.version for each in moved] == ["9.9.9"] and found == moved[0]
    # An update that is older than what another one stored meanwhile is refused as well.
    package.set_version("10.0.0")
    server.publish(package.tar())
    newest = server.manifests["1"]
    package.set_version("9.9.10")
    server.publish(package.tar())
    older = server.manifests["1"]

    def update(handler: Handler) -> None:
        server.faults.clear()
        server.manifests["1"] = newest
        fetched(server.reference(), store, update=True)
        handler.answer(200, older)

    server.faults["manifests/1"] = update
    with pytest.raises(PackageFault, match=r"is 9\.9\.10 now, which is older than 10\.0\.0"):
        fetched(server.reference(), store, update=True)
    assert fetched(server.reference(), store, update=True).plugin.version == "10.0.0"


def test_who_waits_for_another_installation_is_told_and_can_be_cancelled(
    server: FakeRegistry, package: Package, store: Store
) -> None:
    server.publish(package.tar())
    told: list[str] = []

    async def wait() -> None:
        with trio.CancelScope() as scope:

            def tell(text: str) -> None:
                told.append(text)
                scope.cancel()

            await fetch(server.reference(), store, required=False, access=QUICK, tell=tell)

    with store.changing(told.append):
        trio.run(wait)
        assert len(told) == 1 and "Another installation is under way" in told[0] and kept(store) == []
    trio.run(wait)  # the control
    assert len(told) == 1 and kept(store)


def test_a_signature_for_another_plugin_is_not_trusted_later(
    server: FakeRegistry, package: Package, store: Store
) -> None:
    """It was stored when its key was not asked for. The key is trusted by those who ask then."""
    digest = server.publish(package.tar())
    server.sign(digest, package.sign(package_id="another"))
    fetched(server.reference(), store)
    found = find_stored(server.reference(), store, trust=package.trust)
    assert found is not None and found.signature.rule == "signature_identity" and not found.signature.signed
    assert refused(server.reference(), store, package.trust).rule == "signature_identity"
    server.referrers.clear()
    server.sign(digest, package.sign())  # the control
    fetched(server.reference(), store, update=True)
    assert fetched(server.reference(), store, package.trust).signature.status == "trusted"


def test_what_is_stored_without_a_signature_is_told_so(
    server: FakeRegistry, package: Package, store: Store
) -> None:
    server.publish(package.tar())
    fetched(server.reference(), store)
    fault = refused(server.reference(), store, package.trust)
    assert "the store has no signature" in str(fault) and "--update" in fault.hint


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_full_disk_is_told(
    server: FakeRegistry, package: Package, store: Store, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A small package fits into the buffer of the file, and fails when that is written."""
    (package.folder / "more").write_bytes(bytes(size))
    server.publish(package.tar())
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **options: open("/dev/full", "w+b"))  # noqa: SIM115
    fault = refused(server.reference(), store)
    assert fault.rule == "store_refused" and "No space left on device" in str(fault)
    with pytest.raises(PackageFault, match="No space left on device"):
        pushed(package, server.reference())
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    assert refused(server.reference(), store).rule == "store_refused"
    monkeypatch.delenv("TMPDIR")
    assert fetched(server.reference(), store).plugin.id == "greeter"  # the control


def test_a_push_follows_a_redirect_of_what_is_there_and_tells_what_it_replaces(
    server: FakeRegistry, package: Package
) -> None:
    def push_it() -> str:
        return trio.run(lambda: push(package.plugin, server.reference())).replaced

    assert push_it() == "" and push_it() == ""
    first = digest_of(server.manifests["1"])
    for digest in list(server.blobs):  # as registries do that keep blobs elsewhere
        path = f"/v2/acme/x/blobs/{digest}"
        server.faults[path] = lambda handler: (
            handler.answer(200) if "?" in handler.path else handler.answer(307, Location=f"{handler.path}?x")
        )
    assert push_it() == ""
    server.faults.clear()
    package.set_version("9.9.9")
    assert push_it() == first


def test_an_interrupt_ends_a_question_and_changes_nothing(
    server: FakeRegistry, package: Package, store: Store
) -> None:
    server.publish(package.tar())
    first = fetched(server.reference(), store)
    package.set_version("9.9.9")
    server.publish(package.tar())

    def accept(*known: object) -> bool:
        client_module.call_in_main(lambda: signal.raise_signal(signal.SIGINT))
        return True

    with pytest.raises(KeyboardInterrupt):
        fetched(server.reference(), store, update=True, accept=accept)
    assert fetched(server.reference(), store) == first
    assert fetched(server.reference(), store, update=True) != first  # the control
