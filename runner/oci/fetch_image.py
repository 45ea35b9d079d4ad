"""Fetch an image from a registry into the store of `runner install`, as one tree.

A tag is resolved once, as for packages. The layers lie in files without names until their digests were
checked; a fetch that fails or is cancelled leaves nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from typing import IO, NamedTuple, cast

import trio

from runner.install.content import BadContent
from runner.install.files import FileStore, prune
from runner.install.image_reference import HUB
from runner.install.images import CONFIG, image_digest, read_config
from runner.install.request import Request
from runner.install.store import Installed, Lock, Locked, Store, StoreRefused
from runner.oci.client import USUAL_ACCESS, RegistryAccess, RegistryClient, open_registry
from runner.oci.fetch import InterruptibleFile, get_document, get_signatures, keep_in_store, open_spool
from runner.oci.image import (
    ANOTHER,
    KINDS,
    ImageManifest,
    choose_manifest,
    is_index,
    read_image,
    this_architecture,
)
from runner.oci.image_tree import ImageTree
from runner.oci.layer import read_layer
from runner.oci.reference import Reference, parse_reference
from runner.oci.stored import SignatureState, read_trust
from runner.package.fault import PackageFault
from runner.package.image_signature import choose_own, judge_image
from sandbox.document.diagnostic import printable

MOST_BYTES = 4 << 30  # of all layers as they are stored, and of all files in them

# What a reference was, and the digest that it would be.
AcceptImage = Callable[[Installed | None, str], bool]


class ImageRule(NamedTuple):
    """What a policy says of the images that are fetched."""

    trust: str | None = None  # the file of trusted keys; None: no signature is needed
    named: tuple[str, ...] = ()  # references; those with a digest need no signature

    def needs_signature(self, request: Request, digest: str) -> bool:
        told = (*request.packages, f"{request.name}@{digest}")
        return self.trust is not None and not any("@" in each and each in self.named for each in told)


NO_RULE = ImageRule()


class FetchedImage(NamedTuple):
    installed: Installed
    digest: str  # of its manifest
    is_new: bool
    signature: SignatureState = SignatureState("unchecked")


async def fetch_image(
    request: Request,
    store: Store,
    *,
    access: RegistryAccess = USUAL_ACCESS,
    update: bool = False,
    most: int = MOST_BYTES,
    rule: ImageRule = NO_RULE,
    accept: AcceptImage = lambda before, digest: True,
    tell: Callable[[str], None] = lambda text: None,
) -> FetchedImage:
    """The image in the store, fetched if it is not there. Raises PackageFault, also for an image without the
    signature that `rule` needs, before any of its layers is fetched. `update`: ask the registry again.
    `most`: bytes of its layers, and of its files. `accept`: as for packages (fetch.py)."""
    before = await trio.to_thread.run_sync(_find, store, request)
    if before is not None and not update:
        return _as_it_was(store, before)
    reference = parse_reference(request.packages[0])
    config = BytesIO()
    spools: list[IO[bytes]] = []
    with ExitStack() as stack:
        async with open_registry(reference, access) as registry:
            manifest = await _get_manifest(registry, reference, most)
            signatures = await _get_signatures(registry, request, manifest.digest, rule, tell)
            signature = await trio.to_thread.run_sync(_judge, signatures, request, manifest.digest, rule)
            if before is not None and image_digest(store, before) == manifest.digest:
                same = before._replace(signatures=signatures or before.signatures)
                if same != before:
                    await keep_in_store(store, partial(_record, store, before, same), tell)
                return FetchedImage(same, manifest.digest, False, signature)
            await registry.get_blob(manifest.config, config)
            _require_this_machine(config.getvalue(), reference)
            for layer in manifest.layers:
                spools.append(stack.enter_context(open_spool()))
                await registry.get_blob(layer, spools[-1])
        for spool in spools:
            spool.flush()  # here: a full disk is told as that of the spool
        with trio.move_on_after(access.deadline):
            kept = await keep_in_store(
                store,
                lambda: _keep(
                    store, request, manifest, config.getvalue(), spools, signatures, most, accept, update
                ),
                tell,
            )
            # Another installation, which was faster, may have taken another image.
            return kept if kept.digest != manifest.digest else kept._replace(signature=signature)
    message = f"unpacking the image took more than {access.deadline:g} s"
    raise PackageFault("registry_slow", message, "raise --deadline")


def _require_this_machine(config: bytes, reference: Reference) -> None:
    """Raises PackageFault."""
    try:
        about = read_config(config)
    except BadContent as fault:
        raise PackageFault("image_foreign", f"the image cannot be used: {fault}", ANOTHER) from None
    made_for, here = (about.system or "linux", about.architecture), ("linux", this_architecture())
    if made_for not in (here, ("linux", "")):
        told = printable("/".join(made_for))[:80]
        message = f"{_shown(reference)} is made for {told}, and this is {'/'.join(here)}"
        raise PackageFault("image_platform", message, "name an image for this machine")


def _as_it_was(store: Store, before: Installed) -> FetchedImage:
    return FetchedImage(before, image_digest(store, before), False)


def _find(store: Store, request: Request) -> Installed | None:
    try:
        return store.find(request)
    except StoreRefused as refused:
        raise PackageFault("store_refused", str(refused), refused.hint) from None


def _record(store: Store, before: Installed, now: Installed) -> None:
    """Raises StoreRefused and OSError."""
    if store.find(before.request) == before:  # else another installation was faster
        store.record(now)


async def _get_signatures(
    registry: RegistryClient, request: Request, digest: str, rule: ImageRule, tell: Callable[[str], None]
) -> tuple[str, ...]:
    """Raises PackageFault if one is needed."""
    try:
        return choose_own(await get_signatures(registry, digest), request.name, digest)
    except PackageFault as fault:
        if rule.needs_signature(request, digest):
            raise
        # Not every registry has such a list, and nobody needs it now.
        tell(f"  its signatures cannot be fetched: {printable(str(fault))}")
        return ()


def _judge(signatures: tuple[str, ...], request: Request, digest: str, rule: ImageRule) -> SignatureState:
    """Raises PackageFault."""
    trusted = read_trust(rule.trust)
    if trusted is None or not rule.needs_signature(request, digest):
        return SignatureState("unchecked" if signatures else "absent")
    signed = judge_image(signatures, request.name, digest, trusted.keys, trusted.path, time.time())
    return SignatureState("trusted", signed=signed)


async def _get_manifest(registry: RegistryClient, reference: Reference, most: int) -> ImageManifest:
    found = await get_document(registry, reference, kinds=KINDS)
    if is_index(found[0]):
        chosen = choose_manifest(found[0], _shown(reference))
        found = await get_document(registry, reference, chosen.digest, KINDS)
    return read_image(*found, most)


def _shown(reference: Reference) -> str:
    name = str(reference).removeprefix("oci://")
    return name.removeprefix(f"{HUB}/library/") if reference.registry == HUB else name


def _keep(
    store: Store,
    request: Request,
    manifest: ImageManifest,
    config: bytes,
    spools: list[IO[bytes]],
    signatures: tuple[str, ...],
    most: int,
    accept: AcceptImage,
    update: bool,
) -> FetchedImage:
    """Unpack the image into the store, which this thread holds. Raises PackageFault, StoreRefused and
    OSError."""
    before = store.find(request)  # others may have changed it meanwhile
    if before is not None and not update:
        return _as_it_was(store, before)
    if not accept(before, manifest.digest):
        assert before is not None  # the first is asked for before anything is fetched
        return _as_it_was(store, before)
    name = request.name
    lock = Lock(
        "image",
        f"linux/{this_architecture()}",
        (Locked(name, "", manifest.digest), Locked(CONFIG, "", manifest.config.digest)),
    )
    installed = Installed(request, lock.name, (), ((name, manifest.digest),), signatures)
    try:
        with store.new_set() as new:
            listing = None
            if not store.has(lock.name):
                tree = ImageTree(FileStore(store.root, most))
                for spool in spools:
                    spool.seek(0)
                    tree.add_layer(read_layer(cast(IO[bytes], InterruptibleFile(spool)), most))
                tree.make_places(read_config(config).directory)
                listing = tree.write(os.path.join(new, "tree"))
                with open(os.path.join(new, CONFIG), "xb") as file:
                    file.write(config)
            store.add(installed, lock, new, listing=listing)
    except BadContent as fault:
        raise PackageFault("image_size", f"the image is not stored: {fault}", "raise --disk") from None
    finally:
        prune(store.root)
    return FetchedImage(installed, manifest.digest, True)
