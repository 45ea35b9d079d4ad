"""The documents of an image in a registry: its index, its manifest, and the descriptors of its layers.

Docker's media types and those of OCI name the same formats. Everything that is read here is a stranger's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from runner.install.images import MOST_CONFIG_BYTES
from runner.oci.artifact import (
    INDEX,
    MANIFEST,
    MOST_MANIFEST_BYTES,
    Descriptor,
    descriptor_of,
    parse_document,
)
from runner.package.fault import PackageFault
from sandbox.document.diagnostic import printable, quoted

_DOCKER = "application/vnd.docker"
_INDEXES = (INDEX, f"{_DOCKER}.distribution.manifest.list.v2+json")
_MANIFESTS = (MANIFEST, f"{_DOCKER}.distribution.manifest.v2+json")
KINDS = (*_INDEXES, *_MANIFESTS)
_CONFIGS = ("application/vnd.oci.image.config.v1+json", f"{_DOCKER}.container.image.v1+json")
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_DOCKER_LAYER = f"{_DOCKER}.image.rootfs.diff.tar"
_LAYERS = tuple(
    kind + packed
    for kind, packings in ((_LAYER, ("", "+gzip", "+zstd")), (_DOCKER_LAYER, ("", ".gzip", ".zstd")))
    for packed in packings
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MOST_IMAGES = 64  # of one index
_MOST_LAYERS = 128  # docker's own limit is 127
ANOTHER = "ask its publisher for another one, or name another image"


class ImageManifest(NamedTuple):
    digest: str
    config: Descriptor
    layers: tuple[Descriptor, ...]  # the lowest first


def this_architecture() -> str:
    """As images name it."""
    machine = os.uname().machine
    return _ARCHITECTURES.get(machine, machine)


def is_index(raw: bytes) -> bool:
    """Raises PackageFault."""
    document = parse_document(raw)
    return document.get("mediaType") in _INDEXES or isinstance(document.get("manifests"), list)


def choose_manifest(raw: bytes, reference: object) -> Descriptor:
    """The manifest of an index for this machine. Raises PackageFault."""
    entries = parse_document(raw).get("manifests")
    here = f"linux/{this_architecture()}"
    known: list[str] = []
    for entry, platform in _platforms(entries):
        if platform == here:
            return descriptor_of(entry, MOST_MANIFEST_BYTES)
        known.append(platform)
    have = ", ".join(dict.fromkeys(name for name in known if "unknown" not in name)) or "none"
    message = f"{reference} is not made for this machine ({here}); it is made for {printable(have)[:300]}"
    raise PackageFault("image_platform", message, "ask its publisher for one, or name another image")


def list_manifests(raw: bytes) -> list[tuple[Descriptor, str]]:
    """The images of an index, each with its platform. Notes about images, which builders put there as images
    for no platform, are left out. Raises PackageFault."""
    found = [
        (descriptor_of(entry, MOST_MANIFEST_BYTES), platform)
        for entry, platform in _platforms(parse_document(raw).get("manifests"))
        if "unknown" not in platform
    ]
    if not 0 < len(found) <= _MOST_IMAGES:
        message = f"its index has {len(found)} images; 1 to {_MOST_IMAGES} can be signed"
        raise PackageFault("image_foreign", message, "name one of its images by its digest")
    return found


def _platforms(entries: Any) -> Iterator[tuple[Any, str]]:
    for entry in entries if isinstance(entries, list) else ():
        about = entry.get("platform") if isinstance(entry, dict) else None
        if isinstance(about, dict) and entry.get("mediaType", MANIFEST) in _MANIFESTS:
            yield entry, f"{about.get('os', '')}/{about.get('architecture', '')}"


def read_image(raw: bytes, digest: str, most: int) -> ImageManifest:
    """`most`: bytes of all layers, as they are stored. Raises PackageFault."""
    document = parse_document(raw)
    kind = document.get("mediaType", MANIFEST)
    config, layers = document.get("config"), document.get("layers")
    if kind not in _MANIFESTS or not isinstance(config, dict) or config.get("mediaType") not in _CONFIGS:
        found = config.get("mediaType") if isinstance(config, dict) else kind
        told = f"this is no image: its media type is {quoted(str(found), 100)}"
        raise PackageFault("image_foreign", told, "an image of docker or OCI, of schema 2, is needed")
    if not isinstance(layers, list) or len(layers) > _MOST_LAYERS:
        message = f"its manifest has no list of up to {_MOST_LAYERS} layers"
        raise PackageFault("image_foreign", message, ANOTHER)
    found_layers = []
    for each in layers:
        layer = descriptor_of(each, most)
        if layer.media_type not in _LAYERS or "urls" in each:
            elsewhere = " in other places" if "urls" in each else ""
            message = f"it has a layer of the type {quoted(layer.media_type, 100)}{elsewhere}"
            raise PackageFault("image_foreign", f"{message}, which is not read", ANOTHER)
        found_layers.append(layer)
    if sum(layer.size for layer in found_layers) > most:
        message = f"its layers have more than {most >> 20} MiB as they are stored"
        raise PackageFault("image_size", message, "raise --disk, or name a smaller image")
    return ImageManifest(digest, descriptor_of(config, MOST_CONFIG_BYTES), tuple(found_layers))
