"""`runner package push`, `pull` and `inspect`: packages in registries."""

from __future__ import annotations

import argparse
import os
import secrets
from typing import IO, TYPE_CHECKING, Any

from runner.cli.shared.registry import access_of, signature_text
from runner.install.store import remove_tree
from runner.oci.artifact import PackageManifest
from runner.oci.reference import parse_reference
from runner.oci.stored import judge_signatures, read_plugin, read_trust, require_identity
from runner.package.fault import PackageFault
from runner.package.listing import FileList
from runner.package.signature import parse_signature
from runner.plugin import Plugin
from sandbox.document.diagnostic import printable

if TYPE_CHECKING:
    from runner.oci.fetch import PulledPackage


def push_folder(args: argparse.Namespace, plugin: Plugin, document: dict[str, Any]) -> list[str]:
    """Returns lines for people. Raises PackageFault."""
    access, reference = access_of(args), parse_reference(args.other)
    from runner.oci.client import wait_for
    from runner.oci.push import push

    pushed = wait_for(lambda: push(plugin, reference, access=access))
    document |= {
        "reference": str(reference),
        "digest": pushed.reference.digest,
        "files": pushed.files,
        "bytes": pushed.size,
        "key_id": pushed.key_id or None,
        "replaced": pushed.replaced or None,
    }
    signed = (
        printable(pushed.key_id) if pushed.key_id else "none: runner package sign DIR --key FILE, push again"
    )
    return [
        f"{printable(args.folder)}: pushed: {_name(plugin)}",
        f"  reference  {reference}",
        f"  digest     {pushed.reference}",
        f"  files      {pushed.files}, {pushed.size} bytes",
        f"  signature  {signed}",
        *([f"  replaced   {pushed.replaced}, which had this tag before"] if pushed.replaced else []),
    ]


def pull_folder(args: argparse.Namespace, document: dict[str, Any]) -> list[str]:
    """Write the package to a new folder. Returns lines for people. Raises PackageFault."""
    access, reference = access_of(args), parse_reference(args.folder)
    from runner.oci.client import open_registry, wait_for
    from runner.oci.fetch import (
        open_spool,
        pull,
        require_trusted,
        unpack_pulled,
    )

    target = os.path.abspath(args.other or reference.repository.rpartition("/")[2])
    if os.path.lexists(target):
        message = f"{printable(target)} exists already, and nothing is overwritten"
        raise PackageFault("target_exists", message, "name another folder behind the reference")
    trusted = read_trust(args.trust)

    async def fetch(file: IO[bytes]) -> PulledPackage:
        async with open_registry(reference, access) as registry:
            return await pull(registry, reference, file, trusted)

    new = f"{target}.new-{secrets.token_hex(8)}"
    with open_spool() as file:
        pulled = wait_for(lambda: fetch(file))
        require_trusted(pulled.signature, required=not args.unsigned)
        try:
            unpack_pulled(file, pulled, new)
            plugin = read_plugin(new, reference, args.contract)
            require_identity(pulled.signature, plugin)
            os.rename(new, target)
        except OSError as error:
            message = f"{printable(target)} cannot be written: {error.strerror}"
            raise PackageFault(
                "target_unwritable", message, "name another folder behind the reference"
            ) from None
        finally:
            remove_tree(new)
    by_digest = reference._replace(tag="", digest=pulled.manifest.digest)
    document |= {"reference": str(reference), "digest": by_digest.digest, "target": target}
    document |= {"signature": pulled.signature.status}
    return [
        f"{printable(target)}: pulled: {_name(plugin)}",
        f"  digest     {by_digest}",
        f"  files      {len(pulled.listing.files)}, {pulled.listing.size} bytes",
        f"  signature  {signature_text(pulled.signature, args.trust)}",
    ]


def inspect_reference(args: argparse.Namespace, document: dict[str, Any]) -> list[str]:
    """Returns what the registry says of a package. With --trust all of it is fetched and checked; nothing is
    written. Raises PackageFault."""
    access, reference = access_of(args), parse_reference(args.folder)
    from runner.oci.client import open_registry, wait_for
    from runner.oci.fetch import get_package, get_signatures, list_layer

    trusted = read_trust(args.trust)

    async def ask() -> tuple[PackageManifest, list[bytes], FileList | None]:
        async with open_registry(reference, access) as registry:
            package = await get_package(registry, reference)
            signatures = await get_signatures(registry, package.digest)
            return package, signatures, None if trusted is None else await list_layer(registry, package)

    package, signatures, listing = wait_for(ask)
    by_digest = reference._replace(tag="", digest=package.digest)
    shown = []
    for raw in signatures:
        claim = parse_signature(raw)
        told = "not checked: add --trust FILE"
        if listing is not None and trusted is not None:
            state = judge_signatures([raw], lambda: listing, trusted)
            told = signature_text(state, args.trust)
        shown.append({"key_id": claim.key_id, "signed_at": claim.signed_at, "state": told})
    document |= {
        "reference": str(reference),
        "digest": package.digest,
        "says": {"id": package.plugin_id, "version": package.version, "contract": package.contract},
        "bytes": package.layer.size,
        "media_type": package.layer.media_type,
        "signatures": shown,
    }
    names = " ".join(filter(None, (package.plugin_id, package.version)))
    return [
        f"{reference}: says that it is {printable(names)} ({printable(package.contract)})",
        f"  digest     {by_digest}",
        f"  layer      {package.layer.size} bytes, {printable(package.layer.media_type)}",
        *(f"  signature  {each['key_id']}, {each['signed_at']}: {each['state']}" for each in shown),
        *([] if shown else ["  signature  none"]),
    ]


def _name(plugin: Plugin) -> str:
    return printable(f"{plugin.id} {plugin.version}".rstrip() + f" ({plugin.contract})")
