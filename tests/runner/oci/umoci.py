"""Images that Debian's umoci makes: its layers, its marks of what a layer removes, its documents."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zstandard

from runner.oci.artifact import MANIFEST, Descriptor, digest_of
from tests.conftest import SYSTEM_PATH, umoci
from tests.runner.oci.images import LAYER, BuiltImage, Member


def make_image(folder: Path, *steps: Callable[[Path], None], options: Iterable[str] = ()) -> BuiltImage:
    """Each step changes the root, and what it changed becomes a layer. `options`: of `umoci config`."""
    layout, bundle = folder / "layout", folder / "bundle"
    image = f"{layout}:made"
    _umoci("init", "--layout", str(layout))
    _umoci("new", "--image", image)
    _umoci("unpack", "--rootless", "--image", image, str(bundle))
    for step in steps:
        step(bundle / "rootfs")
        _umoci("repack", "--refresh-bundle", "--image", image, str(bundle))
    _umoci("config", "--image", image, *options)
    return _read(layout)


def image_of_tar(folder: Path, tar: Path, options: Iterable[str] = ()) -> BuiltImage:
    """With one layer, which is this tar."""
    image = f"{folder / 'layout'}:made"
    _umoci("init", "--layout", str(folder / "layout"))
    _umoci("new", "--image", image)
    _umoci("raw", "add-layer", "--image", image, str(tar))
    _umoci("config", "--image", image, *options)
    return _read(folder / "layout")


def with_zstd(image: BuiltImage) -> BuiltImage:
    """The same tars, packed as newer tools do: umoci of Debian 12 knows gzip only."""
    config, *layers = image.blobs
    packed = [zstandard.ZstdCompressor().compress(gzip.decompress(each)) for each in layers]
    document = json.loads(image.manifest)
    document["layers"] = [
        Descriptor(f"{LAYER}+zstd", digest_of(each), len(each)).written() for each in packed
    ]
    return BuiltImage(json.dumps(document).encode(), (config, *packed))


def write_members(root: Path, members: Iterable[Member]) -> None:
    """Members as files of a folder."""
    for each in members:
        path = root / each.name
        if each.kind == tarfile.DIRTYPE:
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if each.kind == tarfile.SYMTYPE:
            os.symlink(each.target, path)
        else:
            path.write_bytes(each.content)
            path.chmod(each.mode)


def _umoci(*words: str) -> None:
    done = subprocess.run([umoci(), *words], env={"PATH": SYSTEM_PATH}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _read(layout: Path) -> BuiltImage:
    def blob(descriptor: dict[str, Any]) -> bytes:
        return (layout / "blobs" / str(descriptor["digest"]).replace(":", "/")).read_bytes()

    [entry] = json.loads((layout / "index.json").read_bytes())["manifests"]
    assert entry["mediaType"] == MANIFEST
    raw = blob(entry)
    document = json.loads(raw)
    return BuiltImage(raw, (blob(document["config"]), *map(blob, document["layers"])))
