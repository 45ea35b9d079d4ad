"""Images of registries: fetched, merged, stored, and what of a hostile one is refused."""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.install import images
from runner.install.files import FileStore
from runner.install.image_reference import image_request, normal_reference
from runner.install.images import read_config
from runner.install.request import UnusableSpec
from runner.install.store import Store
from runner.oci import fetch_image as image_fetch
from runner.oci import image_tree
from runner.oci.artifact import INDEX, digest_of
from runner.oci.client import RegistryAccess, wait_for
from runner.oci.fetch_image import FetchedImage, fetch_image
from runner.oci.image import this_architecture
from runner.oci.stored import SignatureState
from runner.package.fault import PackageFault
from sandbox import look
from sandbox.spec import ImageRoot
from tests.runner.oci.images import (
    LAYER,
    BuiltImage,
    Member,
    build,
    folder,
    hard_link,
    index,
    layer,
    link,
    program,
    push,
)
from tests.runner.oci.servers import FakeRegistry, Handler
from tests.tables import check_rows


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir(mode=0o755)
    return Store(str(tmp_path / "store"))


def fetched(reference: str, store: Store, **more: object) -> FetchedImage:
    access = RegistryAccess(deadline=60)
    return wait_for(lambda: fetch_image(image_request(reference), store, access=access, **more))  # type: ignore[arg-type]


def tree_of(store: Store, found: FetchedImage) -> Path:
    return Path(store.tree(found.installed.set_name))


def left_in(store: Store) -> list[str]:
    """What a store has of images: sets, and files."""
    return sorted(
        os.path.relpath(os.path.join(at, name), store.root)
        for at, _, names in os.walk(store.root)
        for name in names
        if name not in ("lock",)
    )


def _is_written(text: str, wanted: str) -> None:
    assert normal_reference(text) == wanted


def test_references_as_docker_writes_them() -> None:
    hash_ = "sha256:" + "0" * 64
    check_rows(
        [
            ("mcp/fetch", "docker.io/mcp/fetch:latest"),
            ("python", "docker.io/library/python:latest"),
            ("python:3.12-slim", "docker.io/library/python:3.12-slim"),
            ("docker.io/python", "docker.io/library/python:latest"),
            ("index.docker.io/mcp/fetch:1", "docker.io/mcp/fetch:1"),
            ("registry-1.docker.io/mcp/fetch", "docker.io/mcp/fetch:latest"),
            ("ghcr.io/acme/x:1", "ghcr.io/acme/x:1"),
            ("localhost/x", "localhost/x:latest"),
            ("localhost:5000/a/b", "localhost:5000/a/b:latest"),
            ("docker://mcp/fetch:1", "docker.io/mcp/fetch:1"),
            (f"mcp/fetch@{hash_}", f"docker.io/mcp/fetch@{hash_}"),
            (f"mcp/fetch:1@{hash_}", f"docker.io/mcp/fetch@{hash_}"),
        ],
        _is_written,
    )
    for wrong in (
        "",
        "MCP/fetch",
        "a//b",
        "a:b:c",
        "a@sha256:12",
        "x:ä",
        "-x",
        "a b",
        "../x",
        "x:" + "a" * 129,
    ):
        with pytest.raises(UnusableSpec, match=r"none: write|no reference: write"):
            normal_reference(wrong)


BASE = layer(
    [
        folder("etc"),
        Member("etc/gone", b"1"),
        Member("etc/kept", b"kept"),
        folder("opaque"),
        Member("opaque/old", b"1"),
        folder("dropped/deep"),
        Member("dropped/deep/file", b"1"),
        folder("usr/lib"),
        link("lib", "usr/lib"),
        link("etc/resolv.conf", "/run/resolv.conf"),
        program("usr/bin/tool", b"#!/bin/sh\n"),
        Member("usr/bin/set-id", b"x", mode=0o4755),
        Member("dev/null", kind=tarfile.CHRTYPE),
        Member("pipe", kind=tarfile.FIFOTYPE),
        Member("odd", b"s", mode=0),
    ],
    packing="plain",
)
ABOVE = layer(
    [
        Member("etc/.wh.gone"),
        Member("opaque/new", b"2"),
        Member("opaque/.wh..wh..opq"),
        Member(".wh.dropped"),
        Member("dropped/again", b"3"),
        Member("lib/through", b"by a link"),
        hard_link("etc/same", "etc/kept"),
        folder("usr/bin"),
        Member(".wh..wh.plnk"),
    ]
)
TOP = layer([link("usr/bin/other", "tool"), Member("./usr/lib/zstd", b"z")], packing="zstd")


def test_layers_become_one_tree(registry: str, store: Store) -> None:
    """Of three packings, by docker-registry."""
    image = build(BASE, ABOVE, TOP, Entrypoint=["/usr/bin/tool"], Env=["A=1"], User="app")
    push(f"{registry}/shapes/tree:1", image)
    found = fetched(f"{registry}/shapes/tree:1", store)
    tree = tree_of(store, found)
    assert found.digest == image.digest and found.is_new
    names = {str(path.relative_to(tree)) for path in tree.rglob("*")}
    assert {"etc/kept", "etc/same", "opaque/new", "dropped/again", "usr/lib/through", "usr/lib/zstd"} <= names
    assert not names & {"etc/gone", "opaque/old", "dropped/deep", "pipe", "dev/null", ".wh.dropped"}
    assert not any(".wh." in name for name in names)
    assert os.readlink(tree / "lib") == "usr/lib" and (tree / "usr/bin/other").readlink() == Path("tool")
    # The cage's own files have a place, and what is there is no link.
    for name in ("resolv.conf", "hosts", "nsswitch.conf", "ssl/certs/ca-certificates.crt"):
        assert not (tree / "etc" / name).is_symlink() and (tree / "etc" / name).read_bytes() == b""
    modes = {
        name: (tree / name).lstat().st_mode & 0o7777 for name in ("usr/bin/set-id", "odd", "etc", "etc/kept")
    }
    assert modes == {"usr/bin/set-id": 0o755, "odd": 0o644, "etc": 0o755, "etc/kept": 0o644}
    assert {path.lstat().st_uid for path in tree.rglob("*")} == {os.geteuid()}
    assert (tree / "etc/same").samefile(tree / "etc/kept")
    assert store.changed(found.installed.set_name) == []
    (tree / "etc/kept").write_bytes(b"other")
    assert store.changed(found.installed.set_name) == ["etc/kept", "etc/same"]


def test_images_share_files_and_leave_none(registry: str, store: Store) -> None:
    one, other = (
        build(layer([Member("common", b"both"), Member(name, name.encode())])) for name in ("one", "other")
    )
    push(f"{registry}/shared/one", one)
    push(f"{registry}/shared/other", other)
    first, second = (fetched(f"{registry}/shared/{name}", store) for name in ("one", "other"))
    assert (tree_of(store, first) / "common").samefile(tree_of(store, second) / "common")
    # A file that a disk has damaged is not handed on.
    (tree_of(store, first) / "common").write_bytes(b"damaged")
    push(f"{registry}/shared/third", build(layer([Member("common", b"both")])))
    third = fetched(f"{registry}/shared/third", store)
    assert (tree_of(store, third) / "common").read_bytes() == b"both"
    with store.changing(lambda text: None):
        for each in (first, second, third):
            assert store.remove(each.installed.request)
    assert left_in(store) == []


def test_a_file_with_too_many_names_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filesystems bound the names of a file: ext4 allows 65,000."""
    (tmp_path / "tree").mkdir()
    files, real = FileStore(str(tmp_path), 100), os.link

    def link_twice(source: str, *names: str, **more: Any) -> None:
        if os.stat(source).st_nlink > 2:
            raise OSError(errno.EMLINK, "too many links")
        real(source, *names, **more)

    monkeypatch.setattr(os, "link", link_twice)
    digest = files.add((b"a", b"b"), True)
    at = os.open(tmp_path / "tree", os.O_RDONLY)
    for name in "123":
        files.link(digest, True, name, at)
    os.close(at)
    one, two, three = (tmp_path / "tree" / name for name in "123")
    assert one.samefile(two) and not one.samefile(three)
    assert three.read_bytes() == b"ab" and three.stat().st_mode & 0o777 == 0o755


def test_a_tag_is_pinned_until_it_is_updated(registry: str, store: Store) -> None:
    name = f"{registry}/pinned/x:1"
    old, new = (build(layer([Member("version", text)])) for text in (b"old", b"new"))
    push(name, old)
    assert fetched(name, store).digest == old.digest
    push(name, new)
    assert fetched(name, store).digest == old.digest
    asked = []

    def refuse(before: object, digest: str) -> bool:
        asked.append(digest)
        return False

    assert fetched(name, store, update=True, accept=refuse).digest == old.digest
    assert fetched(name, store, update=True).digest == new.digest and asked == [new.digest]
    assert not fetched(name, store, update=True).is_new
    by_digest = fetched(f"{registry}/pinned/x@{old.digest}", store)
    assert (tree_of(store, by_digest) / "version").read_bytes() == b"old"


def test_the_faster_of_two_installations_counts(server: FakeRegistry, store: Store) -> None:
    """The tag moves between them. What is told of the signature is about the image that is stored."""
    slow, fast = (build(layer([Member("version", text)])) for text in (b"slow", b"fast"))
    reference = f"{server.address}/acme/x:1"
    server.publish_image(slow)

    def let_another_pass(handler: Handler) -> None:
        server.publish_image(fast)
        assert fetched(reference, store).digest == fast.digest
        handler.answer(200, slow.blobs[1])

    server.faults = {digest_of(slow.blobs[1]): let_another_pass}
    trusted = SignatureState("trusted")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(image_fetch, "_judge", lambda signatures, request, digest, rule: trusted)
        found = fetched(reference, store)
    assert (found.digest, found.is_new, found.signature.status) == (fast.digest, False, "unchecked")


def test_the_platform_of_an_index(registry: str, store: Store) -> None:
    here, there = this_architecture(), "riscv64"
    image = build(layer([Member("a")]))
    strange = build(layer([Member("a")]), architecture=there)
    push(f"{registry}/index/strange:1", strange)
    push(f"{registry}/index/x:there", strange)
    push(f"{registry}/index/x:1", image, index((there, strange), (here, image)), INDEX)
    assert fetched(f"{registry}/index/x:1", store).digest == image.digest
    with pytest.raises(PackageFault, match=f"is made for linux/{there}, and this is linux/{here}"):
        fetched(f"{registry}/index/strange:1", store)
    push(f"{registry}/index/windows:1", build(layer([Member("a")]), system="windows"))
    with pytest.raises(PackageFault, match=f"is made for windows/{here}, and this is linux/{here}"):
        fetched(f"{registry}/index/windows:1", store)
    push(f"{registry}/index/other:1", strange, index((there, strange)), INDEX)
    with pytest.raises(PackageFault, match=f"not made for this machine .*it is made for linux/{there}"):
        fetched(f"{registry}/index/other:1", store)


# --- what is refused ----------------------------------------------------------------------------------------

_LONG = "/".join("d" * 200 for _ in range(10))
_DEEP = "/".join("d" * 20 for _ in range(101))
# A layer, and what is said of it.
HOSTILE: dict[str, tuple[list[Member], str]] = {
    "a name with ..": ([Member("a/../../x", b"1")], "not a name"),
    "a name with a control character": ([Member("a\nb", b"1")], "not a name"),
    "a hard link out of the root": ([hard_link("x", "../../../../etc/passwd")], "not a name"),
    "a hard link through a link out of the root": (
        [link("out", "/../../.."), hard_link("x", "out/etc/passwd")],
        "which is no file",
    ),
    "a hard link to a file of the host": ([hard_link("x", "/etc/hostname")], "which is no file"),
    "links in a circle": ([link("a", "b"), link("b", "a"), Member("a/x", b"1")], "more than 40 links"),
    "a file that is a folder too": ([Member("a", b"1"), Member("a/b", b"1")], "is a file, and a folder too"),
    "folders without end": ([Member(f"{_DEEP}/x", b"1")], "not a name"),
    "folders without end, by a link": (
        [folder("/".join("d" * 60)), link("l", "/".join("d" * 60)), Member("l/" + "/".join("e" * 60), b"1")],
        "more than 100 deep",
    ),
    "a whiteout of nothing": ([Member(".wh..")], "removes nothing that has a name"),
    "a file below a whiteout": ([Member(".wh.x/y", b"1")], "below the mark"),
    "more attributes than fit": (
        [Member("a", pax={f"SCHILY.xattr.user.{number}": "x" for number in range(100)})],
        "header fields",
    ),
    "an attribute without end": (
        [Member("a", pax={"SCHILY.xattr.user.x": "x" * 100_000})],
        "header that is too long",
    ),
    "more bytes than allowed": (
        [Member(str(number), os.urandom(1 << 20)) for number in range(3)],
        "2 MiB|2097152",
    ),
    "a link to a NUL": ([Member("x", kind=tarfile.SYMTYPE, pax={"linkpath": "a\0b"})], "a link to nowhere"),
    "a name with a NUL": ([Member("x", pax={"path": "a\0b"})], "not a name"),
    "a mark that removes ..": ([Member("a/.wh...", b"1")], "removes nothing that has a name"),
    "a file with holes": (
        [Member("a", b"1", pax={"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999"})],
        "of a kind that is not read",
    ),
    "a size that is too large": ([Member("a", b"1", pax={"size": "99999999"})], "unexpected end"),
    "a size that is too small": ([Member("a", b"1" * 2000, pax={"size": "1"})], "no end mark"),
    "a size below zero": ([Member("a", b"1", pax={"size": "-1"})], "cut short"),
    "a root that is a link": ([link(".", "/etc")], "its root is no folder"),
    "a kind that nobody knows": ([Member("a", kind=b"Z")], "of a kind that is not read"),
    "a hard link to itself": ([hard_link("a", "a")], "which is no file"),
    "zeros that compress well": ([Member("zeros", bytes(64 << 20))], "2 MiB|2097152"),
}


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_a_hostile_layer_leaves_nothing(server: FakeRegistry, store: Store, packing: str) -> None:

    def is_refused(name: str, row: tuple[list[Member], str]) -> None:
        members, said = row
        server.publish_image(build(layer([Member("fine", b"1")]), layer(members, packing=packing)))
        with pytest.raises(PackageFault, match=said):
            fetched(f"{server.address}/acme/x:1", store, most=2 << 20)
        assert left_in(store) == []

    check_rows(HOSTILE, is_refused)


def test_a_layer_that_never_ends(server: FakeRegistry, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries and the steps to them are counted, and not only bytes: they compress well. The bounds are
    lower here."""
    monkeypatch.setattr(image_tree, "MOST_ENTRIES", 5000)
    monkeypatch.setattr(image_tree, "MOST_STEPS", 100_000)
    monkeypatch.setattr(image_tree, "MOST_TEXT", 100_000)
    files = [Member(str(number)) for number in range(4000)]
    marks = [Member(".wh..wh..opq") for _ in range(900)]
    circle = [link(f"l{number}", f"{'./' * 2000}l{number + 1}") for number in range(20)]
    rows = {
        "entries": ([*files, *files], "more than 5000 files and folders"),
        "folders": (
            [Member(f"{number}/{'d/' * 90}x") for number in range(60)],
            "more than 5000 files and folders",
        ),
        "what links say": ([link(str(n), "a" * 4000) for n in range(30)], "100000 characters"),
        # The name of each is short in the layer, where a link leads to its folder.
        "paths": (
            [folder(_LONG), link("l", _LONG), *(Member(f"l/{n}") for n in range(200))],
            "100000 characters",
        ),
        "marks": ([*files, *marks], "more than 100000 times"),
        "links": (
            [*circle, folder("l20"), *(Member(f"l0/{number}") for number in range(10))],
            "100000 times",
        ),
    }

    def is_refused(name: str, row: tuple[list[Member], str]) -> None:
        server.publish_image(build(layer(row[0])))
        with pytest.raises(PackageFault, match=row[1]):
            fetched(f"{server.address}/acme/x:1", store)
        assert left_in(store) == []

    check_rows(rows, is_refused)
    server.publish_image(build(layer([*files, *marks[:1]])))
    assert len(os.listdir(tree_of(store, fetched(f"{server.address}/acme/x:1", store)))) > 4000


def test_a_link_leads_nowhere_outside(server: FakeRegistry, store: Store, tmp_path: Path) -> None:
    """Files below links of an earlier layer are files of the tree."""
    victim = tmp_path / "victim"
    victim.mkdir()
    members = [link("out", str(victim)), link("up", "../../../../../.."), Member(f"up{victim}/x", b"1")]
    server.publish_image(build(layer(members), layer([Member("out/y", b"1"), hard_link("z", f"{victim}/y")])))
    tree = tree_of(store, fetched(f"{server.address}/acme/x:1", store))
    assert os.listdir(victim) == []
    assert (tree / "z").read_bytes() == b"1"


def test_the_accounts_of_an_image_are_its_own(
    server: FakeRegistry, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a link, which leads to another file on the host. A stored plan depends on the image's alone."""
    own = Member("etc/group", b"app:x:12:34::/home/app:/bin/sh\n")
    server.publish_image(build(layer([link("etc/passwd", "/etc/group"), own]), User="app"))
    reference = f"{server.address}/acme/x:1"
    fetched(reference, store)
    monkeypatch.setattr(images, "store_roots", lambda environ: (store.root,))
    with look.recording() as asked:
        found = images.find_image(ImageRoot(reference), {})
    assert found is not None and (found[0].uid, found[0].gid, found[0].home) == (12, 34, "/home/app")
    assert not [path for path in asked.facts.contents if os.path.islink(path)]


def test_what_is_no_image_is_told(server: FakeRegistry, store: Store) -> None:
    cut = layer([Member("a", b"1" * 4096)], packing="plain")[:3000]
    rows: list[tuple[BuiltImage, str]] = [
        (build(b"no tar", kind=LAYER), "cannot be unpacked"),
        (build(cut, kind=LAYER), "unexpected end"),
        (build(layer([Member("a")])[:-9]), "cut short|damaged"),
        (build(layer([Member("a")]) + b"garbage"), "cannot be unpacked"),
        (build(layer([Member("a")], packing="zstd") + b"garbage"), "cannot be unpacked"),
        (build(layer([Member("a")], packing="zstd")[:-9]), "cannot be unpacked"),
        (
            build(layer([Member("a")]), kind="application/x-strange"),
            "layer of the type 'application/x-strange'",
        ),
        (build(layer([Member("a")]), Entrypoint="no list"), "Entrypoint is no list"),
        (build(layer([Member("a")]), Env=["A=\0"]), "Env is no text"),
        (BuiltImage(b'{"config": {"mediaType": "application/vnd.acme"}}', ()), "is no image"),
        (BuiltImage(b"[]", ()), "cannot be read"),
    ]

    def is_told(number: int, said: str) -> None:
        server.publish_image(rows[number][0])
        with pytest.raises(PackageFault, match=said) as told:
            fetched(f"{server.address}/acme/x:1", store)
        assert left_in(store) == [] and told.value.hint

    check_rows([(number, said) for number, (_, said) in enumerate(rows)], is_told)


def test_a_registry_that_lies_or_stops(server: FakeRegistry, store: Store) -> None:
    image = build(layer([Member("a", os.urandom(4096))]))
    server.publish_image(image)
    end = digest_of(image.blobs[1])

    def half(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(image.blobs[1])))
        handler.end_headers()
        handler.wfile.write(image.blobs[1][:100])
        handler.wfile.flush()
        handler.close_connection = True

    rows: list[tuple[Callable[[Handler], None], str]] = [
        (half, "broke off"),
        (lambda handler: handler.answer(200, image.blobs[1] + b"x"), "more bytes for a blob"),
        (lambda handler: handler.answer(200, b"x" * len(image.blobs[1])), "other bytes than those of"),
        (lambda handler: handler.answer(404), "does not have what was asked for"),
    ]
    for answer, said in rows:
        server.faults = {end: answer}
        with pytest.raises(PackageFault, match=said):
            fetched(f"{server.address}/acme/x:1", store)
        assert left_in(store) == []


def test_signals_that_end_an_image() -> None:
    check_rows(
        [
            ("", 15),
            ("SIGINT", 2),
            ("quit", 3),
            ("9", 9),
            ("SIGRTMIN+3", 15),
            ("0", 15),
            ("99", 15),
            ("²", 15),
        ],
        _stops_by,
    )


def _stops_by(text: str, number: int) -> None:
    assert read_config(b'{"config": {"StopSignal": "%s"}}' % text.encode()).stop_signal == number
