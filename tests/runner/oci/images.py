"""Images for tests: layers of what a test writes down, in a registry."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from runner.install.image_reference import image_request
from runner.oci.artifact import INDEX, MANIFEST, Descriptor, digest_of
from runner.oci.client import open_registry, wait_for
from runner.oci.image import this_architecture
from runner.oci.reference import parse_reference
from tests.conftest import busybox

CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
APPLETS = (
    "sh",
    "cat",
    "id",
    "ls",
    "env",
    "pwd",
    "mkdir",
    "touch",
    "rm",
    "mv",
    "echo",
    "sleep",
    "chown",
    "grep",
    "su",
)


class Member(NamedTuple):
    """An entry of a layer. Of a name alone, the content is that of a file."""

    name: str
    content: bytes = b""
    kind: bytes = tarfile.REGTYPE
    target: str = ""
    mode: int = 0o644
    pax: Mapping[str, str] = {}


def folder(name: str) -> Member:
    return Member(name, kind=tarfile.DIRTYPE, mode=0o755)


def program(name: str, content: bytes) -> Member:
    return Member(name, content, mode=0o755)


def link(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.SYMTYPE, target=target)


def hard_link(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.LNKTYPE, target=target)


def layer(members: Iterable[Member], *, packing: str = "gzip") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for each in members:
            about = tarfile.TarInfo(each.name)
            about.type, about.linkname, about.mode = each.kind, each.target, each.mode
            about.pax_headers = dict(each.pax)
            about.size = len(each.content) if each.kind == tarfile.REGTYPE else 0
            tar.addfile(about, io.BytesIO(each.content))
    raw = made.getvalue()
    if packing == "zstd":
        return zstandard.ZstdCompressor().compress(raw)
    return gzip.compress(raw, mtime=0) if packing == "gzip" else raw


def busybox_members() -> list[Member]:
    """All files of an image that has nothing but busybox."""
    return [
        *map(folder, ("bin", "etc", "root", "home")),
        program("bin/busybox", Path(busybox()).read_bytes()),
        *(link(f"bin/{name}", "busybox") for name in APPLETS),
        Member("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001:app:/home/app:/bin/sh\n"),
        Member("etc/group", b"root:x:0:\napp:x:1001:\n"),
    ]


class BuiltImage(NamedTuple):
    manifest: bytes
    blobs: tuple[bytes, ...]

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)


def build(
    *layers: bytes,
    kind: str = f"{LAYER}+gzip",
    architecture: str = "",
    system: str = "linux",
    **config: Any,
) -> BuiltImage:
    """An image of these layers. `config`: as its configuration has it: Entrypoint, Cmd, Env, …"""
    about = {"architecture": architecture or this_architecture(), "os": system, "config": config}
    raw = json.dumps(about).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": Descriptor(CONFIG, digest_of(raw), len(raw)).written(),
        "layers": [Descriptor(kind, digest_of(each), len(each)).written() for each in layers],
    }
    return BuiltImage(json.dumps(manifest).encode(), (raw, *layers))


def index(*images: tuple[str, BuiltImage]) -> bytes:
    """Of images by their architectures."""
    entries = [
        {
            **Descriptor(MANIFEST, image.digest, len(image.manifest)).written(),
            "platform": {"os": "linux", "architecture": architecture},
        }
        for architecture, image in images
    ]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode()


def push(reference: str, image: BuiltImage, document: bytes = b"", kind: str = MANIFEST) -> None:
    """Into a registry, under a reference as docker writes it. `document`: what gets the tag, if not the
    image's manifest."""
    where = parse_reference(image_request(reference).packages[0])

    async def put() -> None:
        async with open_registry(where, push=True) as registry:
            for blob in image.blobs:
                await registry.put_blob(digest_of(blob), len(blob), blob)
            await registry.put_manifest(image.digest, image.manifest)
            await registry.put_manifest(where.version, document or image.manifest, kind)

    wait_for(put)


def debian_members(*packages: str, libraries_of: Iterable[str] = ()) -> list[Member]:
    """The files of Debian's packages that are installed here, in the layout of a Debian image, with the
    libraries of some programs."""
    paths = ["/usr", "/etc", "/root", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64"]
    paths += [path for path in ("/bin", "/sbin", "/lib", "/lib64") if Path(path).is_symlink()]
    for package in packages:
        listed = subprocess.run(["/usr/bin/dpkg", "-L", package], capture_output=True, text=True, check=True)
        paths += [path for path in listed.stdout.splitlines() if path.startswith("/") and path != "/."]
    for each in libraries_of:
        told = subprocess.run(["/usr/bin/ldd", each], capture_output=True, text=True, check=True).stdout
        paths += [word for word in told.split() if word.startswith("/")]
    members = []
    for path in dict.fromkeys(paths):
        if "/share/" in path or not os.path.lexists(path):  # some systems leave documents out
            continue
        about = os.lstat(path)
        name = path.lstrip("/")
        if path.startswith("/lib") and stat.S_ISLNK(about.st_mode) and path not in ("/lib", "/lib64"):
            about = os.stat(path)  # of a library, whose file has another name
        if stat.S_ISLNK(about.st_mode):
            members.append(link(name, os.readlink(path)))
        elif stat.S_ISDIR(about.st_mode):
            members.append(folder(name))
        elif stat.S_ISREG(about.st_mode):
            members.append(Member(name, Path(path).read_bytes(), mode=about.st_mode & 0o7777))
    accounts = Member("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n")
    return [*members, accounts]


def python_members() -> list[Member]:
    """Debian's Python, without a shell or anything else that it does not need."""
    # What tests of images ask: ctypes for the attacks, ssl for the authorities.
    asked = (
        "import sys, _ctypes, _ssl\nprint('%d.%d' % sys.version_info[:2], _ctypes.__file__, _ssl.__file__)"
    )
    told = subprocess.run(
        ["/usr/bin/python3", "-IS", "-c", asked], capture_output=True, text=True, check=True
    )
    version, *modules = told.stdout.split()
    packages = (f"python{version}-minimal", f"libpython{version}-minimal", f"libpython{version}-stdlib")
    python = debian_members(*packages, libraries_of=(f"/usr/bin/python{version}", *modules))
    return [*python, link("usr/bin/python3", f"python{version}")]


def python_image(**config: Any) -> BuiltImage:
    """A Debian image with Python, as python:slim is one."""
    debian = debian_members("base-files", "dash", libraries_of=("/bin/dash",))
    return build(layer(debian), layer(python_members(), packing="plain"), **config)
