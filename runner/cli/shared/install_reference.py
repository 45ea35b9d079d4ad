"""`runner install oci://HOST/NAME:TAG`: fetch a package of an OCI registry into the store, and update it."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from runner.cli.shared.install_terminal import confirm
from runner.cli.shared.registry import access_of, signature_text, trust_of
from runner.cli.shared.text import say
from runner.install.request import Request
from runner.install.store import Store
from runner.oci.reference import parse_reference
from runner.oci.stored import StoredPackage, find_set, find_stored
from runner.outcome import EXIT
from runner.plugin import Plugin
from sandbox.document.diagnostic import printable


def is_reference(word: str | None) -> bool:
    return word is not None and word.startswith("oci://")


def install_reference(args: argparse.Namespace, store: Store, word: str) -> int:
    """Raises PackageFault."""
    reference = parse_reference(word)
    if find_set(reference, store) is not None:
        say(f"{reference} is installed already; --update asks the registry again", sys.stdout)
        return EXIT["ok"]
    access = access_of(args)
    say(f"{reference} will be fetched from {reference.registry}", sys.stdout)
    if not args.yes and (refusal := confirm("Fetch and install?")) is not None:
        return refusal
    trust, required = trust_of(None)
    from runner.oci.client import wait_for
    from runner.oci.fetch import fetch

    tell = partial(say, stream=sys.stdout)
    package = wait_for(
        lambda: fetch(reference, store, trust=trust, required=required, access=access, tell=tell)
    )
    say(f"  installed {printable(package.plugin.id)} {printable(package.plugin.version)}", sys.stdout)
    say(f"  signature: {signature_text(package.signature, trust)}", sys.stdout)
    if reference.tag:
        say(
            f"  pinned to {package.digest}; it stays so until runner install --update {reference}", sys.stdout
        )
    return EXIT["ok"]


def update_reference(args: argparse.Namespace, store: Store, request: Request) -> int:
    """Raises PackageFault."""
    access, reference = access_of(args), parse_reference(request.packages[0])
    trust, required = trust_of(None)
    status = EXIT["ok"]
    from runner.oci.client import call_in_main, wait_for
    from runner.oci.fetch import fetch

    before = find_stored(reference, store)

    def accept(old: StoredPackage | None, plugin: Plugin, digest: str) -> bool:
        nonlocal status
        if old is None or old.digest == digest:
            return True
        versions = printable(f"{old.plugin.version} -> {plugin.version}")
        say(f"{reference}: {versions}, {old.digest} -> {digest}", sys.stdout)
        refusal = None if args.yes else call_in_main(lambda: confirm("Update?"))
        status = EXIT["ok"] if refusal is None else refusal
        return refusal is None

    now = wait_for(
        lambda: fetch(
            reference,
            store,
            trust=trust,
            required=required,
            access=access,
            update=True,
            older=args.downgrade,
            accept=accept,
            tell=partial(say, stream=sys.stdout),
        )
    )
    if status == EXIT["ok"]:
        same = before is not None and before.path == now.path
        say(f"{reference}: {'nothing newer' if same else 'updated'}", sys.stdout)
        with store.changing(lambda text: say(text, sys.stdout)):
            store.remove_unused()
    return status
