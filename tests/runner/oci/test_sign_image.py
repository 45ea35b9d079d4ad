"""Signatures of images in registries: pushed, listed, fetched with the image, and refused."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from runner.cli import main
from runner.install.image_reference import image_request
from runner.install.store import Store
from runner.oci.artifact import INDEX
from runner.oci.client import RegistryAccess, wait_for
from runner.oci.fetch_image import FetchedImage, ImageRule, fetch_image
from runner.oci.image import this_architecture
from runner.outcome import EXIT, USAGE_ERROR
from runner.package.fault import PackageFault
from runner.package.image_signature import sign_image
from runner.package.keys import load_key, make_key
from runner.package.listing import list_package
from runner.package.signature import sign
from tests.runner.oci.images import BuiltImage, Member, build, index, layer, push
from tests.runner.oci.servers import FakeRegistry
from tests.tables import check_rows

Texts = pytest.CaptureFixture[str]


class Bench:
    """A publisher with a key, and somebody who trusts it."""

    def __init__(self, folder: Path, capsys: Texts) -> None:
        self.folder, self._capsys = folder, capsys
        for name in ("acme", "mallory"):
            make_key(str(folder / name), name)
        self.trust = str(folder / "acme.pub")
        (folder / "store").mkdir(mode=0o755)
        self.store = Store(str(folder / "store"))

    def package(self, *words: str) -> tuple[int, str]:
        try:
            status = main(["package", *words])
        except SystemExit as exited:
            status = int(str(exited.code))
        said = self._capsys.readouterr()
        return status, said.out + said.err

    def sign(self, reference: str, key: str = "acme") -> str:
        status, said = self.package("sign", f"docker://{reference}", "--key", str(self.folder / key))
        assert status == 0, said
        return said

    def fetch(
        self, reference: str, *named: str, trust: str | None = None, update: bool = False
    ) -> FetchedImage:
        rule = ImageRule(self.trust if trust is None else trust or None, named)
        access = RegistryAccess(deadline=60)
        return wait_for(
            lambda: fetch_image(image_request(reference), self.store, access=access, rule=rule, update=update)
        )

    def refused(self, reference: str, *named: str, update: bool = False) -> str:
        """The rule by which it is refused. Nothing of it may be in the store."""
        before = self.files()
        with pytest.raises(PackageFault) as refused:
            self.fetch(reference, *named, update=update)
        assert refused.value.hint and self.files() == before
        return refused.value.rule

    def files(self) -> set[str]:
        return {str(path) for path in Path(self.store.root).rglob("*") if path.name != "lock"}


@pytest.fixture
def bench(plugin_dir: Path, capsys: Texts) -> Bench:
    return Bench(plugin_dir, capsys)


def _image(text: bytes = b"1") -> BuiltImage:
    return build(layer([Member("own", text)]), Cmd=["x"])


@pytest.mark.needs("docker-registry")
def test_signed_in_a_registry_and_fetched(bench: Bench, registry: str) -> None:
    """Debian's, which has no list of referrers."""
    reference, image = f"{registry}/signed/x:1", _image()
    push(reference, image)
    assert bench.refused(reference) == "signature_missing"
    told = bench.sign(reference)
    assert f"docker://{reference}: signed: {registry}/signed/x" in told and image.digest in told
    found = bench.fetch(reference)
    assert found.is_new and found.signature.signed is not None and found.signature.signed.key_id == "acme"
    stored = bench.store.find(image_request(reference))
    assert stored is not None and [json.loads(text)["key_id"] for text in stored.signatures] == ["acme"]
    # By its digest it is the same image.
    assert bench.fetch(f"{registry}/signed/x@{image.digest}").signature.status == "trusted"

    # A second key signs: it is added, and asking again gets it.
    bench.sign(reference, "mallory")
    told = bench.package("inspect", f"docker://{reference}", "--trust", bench.trust)[1]
    assert "acme.pub" in told and "'mallory', which signed the image, is not trusted" in told, told
    assert "not checked: add --trust FILE" in bench.package("inspect", f"docker://{reference}")[1]
    again = bench.fetch(reference, update=True)
    assert not again.is_new and len(again.installed.signatures) == 2
    assert bench.store.find(image_request(reference)) == again.installed

    # The tag moves after it was signed.
    push(reference, _image(b"2"))
    assert bench.refused(reference, update=True) == "signature_missing"
    assert bench.store.find(image_request(reference)) == again.installed
    status, told = bench.package("inspect", f"docker://{reference}", "--format", "json")
    assert status == 0 and json.loads(told)["images"][0]["signatures"] == []
    bench.sign(reference)  # the control
    assert bench.fetch(reference, update=True).is_new


@pytest.mark.needs("docker-registry")
def test_of_an_index_each_image_is_signed(bench: Bench, registry: str) -> None:
    reference, here = f"{registry}/signed/index:1", this_architecture()
    other = "amd64" if here == "arm64" else "arm64"
    images = (_image(), build(layer([Member("own", b"o")]), Cmd=["x"], architecture=other))
    notes = build(layer([Member("note", b"1")], packing="plain"), architecture="unknown", system="unknown")
    for each in (*images, notes):
        push(f"{registry}/signed/index:part", each)
    listed = json.loads(index((here, images[0]), (other, images[1]), ("unknown", notes)))
    listed["manifests"][2]["platform"]["os"] = "unknown"
    push(reference, images[0], json.dumps(listed).encode(), INDEX)
    told = bench.sign(reference)
    assert all(f"{each.digest} linux/" in told for each in images) and notes.digest not in told
    assert bench.fetch(reference).digest == images[0].digest
    told = bench.package("inspect", f"docker://{reference}", "--trust", bench.trust)[1]
    assert told.count("trusted by") == 2 and f"linux/{other}" in told


def test_signatures_that_do_not_count(bench: Bench, server: FakeRegistry) -> None:
    """What anybody who may write to the registry can put beside an image. None is ever unpacked."""
    image, other = _image(), _image(b"other")
    server.publish_image(image)
    server.publish_image(other, "other")
    name, reference = f"{server.address}/acme/x", f"{server.address}/acme/x:1"
    acme, mallory = (load_key(str(bench.folder / each)) for each in ("acme", "mallory"))
    own = bench.folder / "package"
    own.mkdir()
    (own / "file").write_text("1")
    now = time.time()
    good = sign_image(name, image.digest, acme, now)
    of_package = sign(list_package(str(own)), name, "1", acme, now)
    rows: dict[str, tuple[bytes, str, str]] = {
        "of a package": (json.dumps(of_package._asdict()).encode(), "", "signature_missing"),
        "of a package, with this digest": (
            json.dumps(of_package._replace(digest=image.digest)._asdict()).encode(),
            *("", "signature_missing"),
        ),
        "of another image": (
            sign_image(name, other.digest, acme, now).text.encode(),
            *("", "signature_missing"),
        ),
        "of the same in another repository": (
            sign_image(f"{server.address}/acme/y", image.digest, acme, now).text.encode(),
            *("", "signature_missing"),
        ),
        "of a key that is not trusted": (
            sign_image(name, image.digest, mallory, now).text.encode(),
            *("", "signature_untrusted"),
        ),
        "of that key, with the name of another": (
            sign_image(name, image.digest, mallory._replace(key_id="acme"), now).text.encode(),
            *("", "signature_invalid"),
        ),
        "altered": (good._replace(signed_at="2026-01-01T00:00:00Z").text.encode(), "", "signature_invalid"),
        "for another subject": (good.text.encode(), other.digest, "signature_subject"),
        "nothing": (b"{}", "", "signature_missing"),
    }

    def check(_: str, row: tuple[bytes, str, str]) -> None:
        server.referrers.clear()
        server.sign(image.digest, row[0], row[1])
        assert bench.refused(reference) == row[2]

    check_rows(rows, check)
    assert not any(_layer_of(image) in each.path for each in server.seen)
    # The controls: without a need it is fetched all the same; if the policy names it; and if it is signed.
    assert bench.fetch(reference, trust="").signature.status == "absent"
    bench.store.remove(image_request(reference))
    server.referrers.clear()
    assert bench.refused(reference, name, reference, f"{name}@{other.digest}") == "signature_missing"
    assert bench.fetch(reference, f"{name}@{image.digest}").signature.status == "absent"
    bench.store.remove(image_request(reference))
    server.sign(image.digest, good.text.encode())
    assert bench.fetch(reference).signature.status == "trusted"


def _layer_of(image: BuiltImage) -> str:
    return str(json.loads(image.manifest)["layers"][0]["digest"])


def test_a_registry_that_tells_nothing_of_signatures(bench: Bench, server: FakeRegistry) -> None:
    """An image without them is installed, unless one is needed."""
    image = _image()
    server.publish_image(image)
    reference = f"{server.address}/acme/x:1"
    server.faults[f"/referrers/{image.digest}"] = lambda handler: handler.answer(400)
    assert bench.refused(reference).startswith("registry")
    named = f"{server.address}/acme/x@{image.digest}"
    assert bench.fetch(reference, named).signature.status == "absent"
    bench.store.remove(image_request(reference))
    found = bench.fetch(reference, trust="")
    assert found.is_new and found.installed.signatures == ()


def test_what_cannot_be_signed(bench: Bench, server: FakeRegistry) -> None:
    key = str(bench.folder / "acme")
    server.publish(b"x")  # a package, which has a command of its own for that
    image = f"docker://{server.address}/acme/x:1"
    rows: dict[str, tuple[tuple[str, ...], int, str]] = {
        "a package": (("sign", image, "--key", key), 1, "this is no image"),
        "what is not there": (("sign", f"{image}2", "--key", key), 1, "has no acme/x"),
        "no reference": (("sign", "docker://A B", "--key", key), USAGE_ERROR, "is no reference"),
        "no key": (("sign", image, "--key", f"{key}-none"), USAGE_ERROR, "cannot be opened"),
        "a trust file that is none": (("inspect", image, "--trust", key), EXIT["policy_invalid"], "key"),
        "a folder in a registry": (
            ("sign", str(bench.folder), "--key", key, "--plain-http"),
            EXIT["manifest_invalid"],
            "",
        ),
    }

    def check(_: str, row: tuple[tuple[str, ...], int, str]) -> None:
        status, said = bench.package(*row[0])
        assert (status, row[2] in said) == (row[1], True), (status, said)

    check_rows(rows, check)
    assert not any(each.method in ("PUT", "POST") for each in server.seen)
