"""Sign an image that a registry has: the signature is pushed beside it. And what signatures it has there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from runner.install.request import Request
from runner.oci.artifact import EMPTY_CONFIG, MANIFEST, Descriptor, digest_of, parse_document
from runner.oci.client import USUAL_ACCESS, RegistryAccess, RegistryClient, open_registry
from runner.oci.fetch import get_document, get_signatures
from runner.oci.fetch_image import MOST_BYTES
from runner.oci.image import KINDS, is_index, list_manifests, read_image
from runner.oci.push import put_signature, tried_again
from runner.oci.reference import Reference, parse_reference
from runner.package.image_signature import ImageSignature, choose_own, sign_image
from runner.package.keys import SigningKey


class RegistryImage(NamedTuple):
    """An image for one platform, as a registry has it."""

    manifest: Descriptor
    platform: str  # "linux/arm64", by its index; empty: the reference means this image alone
    signatures: tuple[str, ...] = ()  # not judged


async def inspect_images(
    request: Request, *, access: RegistryAccess = USUAL_ACCESS, environ: Mapping[str, str] | None = None
) -> list[RegistryImage]:
    """What a reference means now, with the signatures. Raises PackageFault."""
    reference = parse_reference(request.packages[0])
    found = []
    async with open_registry(reference, access, environ) as registry:
        for each in await _images_of(registry, reference):
            documents = await get_signatures(registry, each.manifest.digest)
            own = choose_own(documents, request.name, each.manifest.digest)
            found.append(each._replace(signatures=own))
    return found


async def sign_images(
    request: Request,
    key: SigningKey,
    *,
    access: RegistryAccess = USUAL_ACCESS,
    environ: Mapping[str, str] | None = None,
) -> list[tuple[RegistryImage, ImageSignature]]:
    """Sign what a reference means now, and push the signatures. Of an index, every image in it: a launch
    knows the digest of the one for its machine. Raises PackageFault."""
    reference = parse_reference(request.packages[0])
    done = []
    async with open_registry(reference, access, environ, push=True) as registry:
        for each in await _images_of(registry, reference):
            subject = each.manifest
            signature = sign_image(request.name, subject.digest, key, time.time())
            raw = signature.text.encode()
            await tried_again(partial(_push, raw, subject), registry)
            done.append((each, signature))
    return done


async def _push(raw: bytes, subject: Descriptor, registry: RegistryClient) -> None:
    await registry.put_blob(digest_of(EMPTY_CONFIG), len(EMPTY_CONFIG), EMPTY_CONFIG)
    await put_signature(registry, raw, subject)


async def _images_of(registry: RegistryClient, reference: Reference) -> list[RegistryImage]:
    raw, digest = await get_document(registry, reference, kinds=KINDS)
    if not is_index(raw):
        return [RegistryImage(_described(raw, digest), "")]
    found = []
    for listed, platform in list_manifests(raw):
        raw, digest = await get_document(registry, reference, listed.digest, KINDS)
        found.append(RegistryImage(_described(raw, digest), platform))
    return found


def _described(raw: bytes, digest: str) -> Descriptor:
    """The descriptor of an image by its manifest. Raises PackageFault for what is none."""
    read_image(raw, digest, MOST_BYTES)
    return Descriptor(str(parse_document(raw).get("mediaType", MANIFEST)), digest, len(raw))
