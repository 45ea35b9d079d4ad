"""Push a plugin's folder, and its signature, to a registry."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import IO, NamedTuple, TypeVar

import trio

from runner.oci.archive import PackedFolder, pack
from runner.oci.artifact import (
    EMPTY_CONFIG,
    MANIFEST,
    Descriptor,
    digest_of,
    write_package,
    write_signature,
)
from runner.oci.client import FAILED, USUAL_ACCESS, RegistryAccess, RegistryClient, open_registry
from runner.oci.fetch import open_spool
from runner.oci.reference import Reference
from runner.package.fault import PackageFault
from runner.package.signature import SIGN_AGAIN, parse_signature
from runner.plugin import Plugin

_CHUNK_BYTES = 1 << 18
_MOST_TRIES = 8

_Result = TypeVar("_Result")


class PushedPackage(NamedTuple):
    reference: Reference  # by digest
    files: int
    size: int  # bytes of the tar
    key_id: str  # of the signature; empty: it is not signed
    replaced: str  # the digest that had the tag before; empty: none, or the same


async def push(
    plugin: Plugin,
    reference: Reference,
    *,
    access: RegistryAccess = USUAL_ACCESS,
    environ: Mapping[str, str] | None = None,
) -> PushedPackage:
    """Push the folder of a plugin. `reference` has the tag it gets. The same folder has the same digest.
    Raises PackageFault."""
    # A configuration beside the server that it starts has no folder of its own.
    root = plugin.root or os.path.dirname(plugin.manifest)
    if not reference.tag:
        message = f"{reference} has a digest, and that is known only when the package is packed"
        raise PackageFault("reference", message, "name a tag")
    with open_spool() as file:
        packed = await trio.to_thread.run_sync(pack, root, file)
        key_id = _require_own_signature(packed, plugin)
        manifest = write_package(packed.digest, packed.size, plugin.id, plugin.version, plugin.contract)
        subject = Descriptor(MANIFEST, digest_of(manifest), len(manifest))

        async def put_all(registry: RegistryClient) -> tuple[bytes, str] | None:
            """Returns what had the tag before."""
            await registry.put_blob(packed.digest, packed.size, lambda: _pieces(file))
            await registry.put_blob(digest_of(EMPTY_CONFIG), len(EMPTY_CONFIG), EMPTY_CONFIG)
            # The signature first: nobody finds the package by its tag without it.
            await registry.put_manifest(subject.digest, manifest)
            if packed.signature:
                await put_signature(registry, packed.signature, subject)
            before = await registry.get_manifest(reference.tag)
            await registry.put_manifest(reference.tag, manifest)
            return before

        async with open_registry(reference, access, environ, push=True) as registry:
            before = await tried_again(put_all, registry)
    by_digest = reference._replace(tag="", digest=subject.digest)
    replaced = "" if before is None or before[1] == subject.digest else before[1]
    return PushedPackage(by_digest, len(packed.listing.files), packed.size, key_id, replaced)


async def tried_again(
    act: Callable[[RegistryClient], Awaitable[_Result]], registry: RegistryClient
) -> _Result:
    """What `act` returns. It is repeated after faults that may be gone: nothing is written twice."""
    for _ in range(_MOST_TRIES - 1):
        try:
            return await act(registry)
        except PackageFault as fault:
            if fault.rule != FAILED:
                raise
    return await act(registry)


def _require_own_signature(packed: PackedFolder, plugin: Plugin) -> str:
    """The id of the key that signed the folder; "" if nobody did. Whether the signature is valid, only those
    who trust the key can tell. Raises PackageFault if it is for something else."""
    if not packed.signature:
        return ""
    claim = parse_signature(packed.signature)
    if (claim.package_id, claim.version, claim.digest) != (plugin.id, plugin.version, packed.listing.digest):
        message = "the package was changed after it was signed, or has the signature of another one"
        raise PackageFault("signature_digest", message, SIGN_AGAIN)
    return claim.key_id


async def put_signature(registry: RegistryClient, signature: bytes, subject: Descriptor) -> None:
    """Push the signature of a package or an image that has this manifest. Raises PackageFault."""
    await registry.put_blob(digest_of(signature), len(signature), signature)
    manifest = write_signature(signature, subject)
    made = Descriptor(MANIFEST, digest_of(manifest), len(manifest))
    if await registry.put_manifest(made.digest, manifest) != subject.digest:
        await registry.add_referrer(subject.digest, made)


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    file.seek(0)
    while data := file.read(_CHUNK_BYTES):
        yield data
