"""The documents of a package in a registry: an image manifest with one layer, and one for each signature.

    the package     artifactType PACKAGE, an empty config, one layer: a tar of the plugin's folder
    a signature     artifactType SIGNATURE, subject: the package's manifest, one layer:
                    marketplace.signature.json (runner/package/signature.py)

A signature is not part of the package: who adds one later, or another key's, does not change the digest.
Everything that is read here is a stranger's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from runner.package.fault import PackageFault
from runner.package.listing import MOST_BYTES
from sandbox.document.diagnostic import DocumentError, quoted
from sandbox.document.read import parse

PACKAGE = "application/vnd.plugin-runner.package.v1"
SIGNATURE = "application/vnd.plugin-runner.signature.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
_EMPTY = "application/vnd.oci.empty.v1+json"
_TAR = "application/vnd.oci.image.layer.v1.tar"
_TARS = (_TAR, f"{_TAR}+gzip")

EMPTY_CONFIG = b"{}"
MOST_MANIFEST_BYTES = 1 << 20
MOST_SIGNATURE_BYTES = 64 << 10
MOST_LAYER_BYTES = MOST_BYTES + (64 << 20)  # with the headers of 20 000 files
MOST_SIGNATURES = 64  # of one package

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TITLE = "org.opencontainers.image.title"
_VERSION = "org.opencontainers.image.version"
_CONTRACT = "dev.plugin-runner.contract"


class Descriptor(NamedTuple):
    """What a registry stores, by its digest."""

    media_type: str
    digest: str
    size: int

    def written(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


class PackageManifest(NamedTuple):
    """The manifest of a package. What it says of the plugin is not checked: the plugin's own manifest is."""

    digest: str
    layer: Descriptor
    plugin_id: str
    version: str
    contract: str

    @property
    def subject(self) -> str:
        return self.digest


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def fallback_tag(digest: str) -> str:
    """The tag of the index of referrers, in a registry that has no list of them."""
    return digest.replace(":", "-")


# --- writing ------------------------------------------------------------------------------------------------


def write_package(digest: str, size: int, plugin_id: str, version: str, contract: str) -> bytes:
    """The manifest of a package whose tar has this digest and size. The same values give the same bytes."""
    document = _manifest(PACKAGE, Descriptor(_TAR, digest, size))
    annotations = {_TITLE: plugin_id, _VERSION: version, _CONTRACT: contract}
    return _dump({**document, "annotations": {key: value for key, value in annotations.items() if value}})


def write_signature(signature: bytes, subject: Descriptor) -> bytes:
    """The manifest that ties a signature to the package with the manifest `subject`."""
    layer = Descriptor(SIGNATURE, digest_of(signature), len(signature))
    return _dump({**_manifest(SIGNATURE, layer), "subject": subject.written()})


def _manifest(kind: str, layer: Descriptor) -> dict[str, Any]:
    config = Descriptor(_EMPTY, digest_of(EMPTY_CONFIG), len(EMPTY_CONFIG))
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": kind,
        "config": config.written(),
        "layers": [layer.written()],
    }


def add_to_index(index: bytes | None, added: Descriptor) -> bytes:
    """The index of referrers with one more. `index`: None if there is none. Raises PackageFault."""
    entries = [] if index is None else _read_index(index)
    if len(entries) >= MOST_SIGNATURES * 4:
        raise PackageFault("registry_answer", "the registry has too many referrers of the package")
    kept = [each for each in entries if isinstance(each, dict) and each.get("digest") != added.digest]
    new = {**added.written(), "artifactType": SIGNATURE}
    return _dump({"schemaVersion": 2, "mediaType": INDEX, "manifests": [*kept, new]})


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


# --- reading ------------------------------------------------------------------------------------------------


def read_package(raw: bytes) -> PackageManifest:
    """Raises PackageFault for what is not the manifest of a package."""
    document = _read_manifest(raw, PACKAGE, "a package of plugin-runner")
    layer = _only_layer(document, _TARS, MOST_LAYER_BYTES)
    told = document.get("annotations")
    annotations = told if isinstance(told, dict) else {}
    values = (annotations.get(key, "") for key in (_TITLE, _VERSION, _CONTRACT))
    return PackageManifest(digest_of(raw), layer, *(str(value)[:200] for value in values))


def read_signature(raw: bytes, subject: str) -> Descriptor:
    """Where the signature is, of the package with the digest `subject`. Raises PackageFault."""
    document = _read_manifest(raw, SIGNATURE, "a signature")
    of = document.get("subject")
    if not isinstance(of, dict) or of.get("digest") != subject:
        message = "the registry gave a signature of something else"
        raise PackageFault("signature_subject", message, "do not use it; ask who runs the registry")
    return _only_layer(document, (SIGNATURE,), MOST_SIGNATURE_BYTES)


def read_referrers(raw: bytes) -> list[Descriptor]:
    """The manifests of signatures in an index of referrers. Raises PackageFault."""
    found = [
        descriptor_of(each, MOST_MANIFEST_BYTES)
        for each in _read_index(raw)
        if isinstance(each, dict) and each.get("artifactType") == SIGNATURE
    ]
    if len(found) > MOST_SIGNATURES:
        message = f"the registry has more than {MOST_SIGNATURES} signatures of the package"
        raise PackageFault("registry_answer", message, "remove those that nobody needs")
    return found


def _read_index(raw: bytes) -> list[Any]:
    document = parse_document(raw)
    found = document.get("manifests")
    if document.get("mediaType", INDEX) != INDEX or not isinstance(found, list):
        raise PackageFault("registry_answer", "the registry's list of referrers is no index")
    return found


def _read_manifest(raw: bytes, kind: str, wanted: str) -> dict[str, Any]:
    document = parse_document(raw)
    media, found = document.get("mediaType", MANIFEST), document.get("artifactType")
    if media != MANIFEST or found != kind:
        told = f"its media type is {quoted(str(media))}, its artifact type {quoted(str(found))}"
        raise PackageFault("package_foreign", f"this is not {wanted}: {told}", "give another reference")
    return document


def _only_layer(document: dict[str, Any], kinds: tuple[str, ...], most: int) -> Descriptor:
    layers = document.get("layers")
    if not isinstance(layers, list) or len(layers) != 1:
        count = len(layers) if isinstance(layers, list) else 0
        raise PackageFault("package_foreign", f"its manifest has {count} layers, and a package has one")
    layer = descriptor_of(layers[0], most)
    if layer.media_type not in kinds or "urls" in layers[0]:
        elsewhere = " in other places" if "urls" in layers[0] else ""
        message = f"its layer is {quoted(layer.media_type)}{elsewhere}, which is not read"
        raise PackageFault("package_foreign", message, "push it with runner package push")
    return layer


def descriptor_of(value: Any, most: int) -> Descriptor:
    """Raises PackageFault."""
    fields = value if isinstance(value, dict) else {}
    kind, digest, size = fields.get("mediaType"), fields.get("digest"), fields.get("size")
    if not isinstance(kind, str) or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise PackageFault("registry_answer", "a descriptor in its manifest has no media type or SHA-256")
    if type(size) is not int or not 0 <= size <= most:
        message = f"it has something of {quoted(str(size))} bytes; {most} are allowed"
        raise PackageFault("package_size", message)
    return Descriptor(kind, digest, size)


def parse_document(raw: bytes) -> dict[str, Any]:
    """A manifest or an index. Raises PackageFault."""
    try:
        return dict(parse("manifest", raw, "json", limit=MOST_MANIFEST_BYTES).data)
    except DocumentError as error:
        message = f"the registry gave a manifest that cannot be read: {error.diagnostics[0].message}"
        raise PackageFault("registry_answer", message, "check that this host is a registry") from None
