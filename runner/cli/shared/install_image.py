"""`runner install docker://IMAGE`: fetch an image into the store, and update it."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from runner.cli.shared.install_terminal import confirm
from runner.cli.shared.registry import access_of, extra_fault, policy_of, signature_text
from runner.cli.shared.text import say
from runner.install.images import image_digest
from runner.install.request import Request
from runner.install.store import Installed, Store
from runner.outcome import EXIT
from sandbox.units import parse_limit

if TYPE_CHECKING:
    from runner.oci.client import RegistryAccess
    from runner.oci.fetch_image import AcceptImage, FetchedImage


def is_image(word: str | None) -> bool:
    from runner.install.image_reference import SCHEME

    return word is not None and word.startswith(SCHEME)


def registry_of(request: Request) -> str:
    return request.name.partition("/")[0]


def fetch_and_tell(store: Store, request: Request, access: RegistryAccess | None, disk: str) -> None:
    """`access`: None for the usual one. Raises PackageFault."""
    trust = _trust()
    found = _fetch(store, request, access, disk)
    say(f"  installed {request}", sys.stdout)
    say(f"  signature: {signature_text(found.signature, trust)}", sys.stdout)
    if request.unpinned:
        again = f"runner install --update {request.name}"
        say(f"  pinned to {found.digest}; it stays so until {again}", sys.stdout)


def _fetch(
    store: Store,
    request: Request,
    access: RegistryAccess | None,
    disk: str,
    update: AcceptImage | None = None,
) -> FetchedImage:
    """`update`: ask the registry again, and this whether what it has now is taken. Raises PackageFault."""
    try:
        from runner.oci.client import USUAL_ACCESS, wait_for
        from runner.oci.fetch_image import ImageRule, fetch_image
    except ModuleNotFoundError as error:
        raise extra_fault(error) from None
    fetch = partial(
        fetch_image,
        request,
        store,
        access=access or USUAL_ACCESS,
        most=int(parse_limit("disk", disk)),
        rule=ImageRule(_trust(), policy_of(None).images),
        tell=partial(say, stream=sys.stdout),
    )
    return wait_for(fetch if update is None else partial(fetch, update=True, accept=update))


def _trust() -> str | None:
    """The trust file, if the policy in force requires signatures. Raises PackageFault."""
    packages = policy_of(None).packages
    return packages.trust if packages.signature == "required" else None


def update_image(args: argparse.Namespace, store: Store, request: Request) -> int:
    """Raises PackageFault."""
    access, status = access_of(args), EXIT["ok"]
    from runner.oci.client import call_in_main

    def accept(before: Installed | None, digest: str) -> bool:
        nonlocal status
        if before is None:
            return True
        say(f"{request}: {image_digest(store, before)} -> {digest}", sys.stdout)
        refusal = None if args.yes else call_in_main(lambda: confirm("Update?"))
        status = EXIT["ok"] if refusal is None else refusal
        return refusal is None

    found = _fetch(store, request, access, args.disk, accept)
    if status == EXIT["ok"]:
        told = "updated; what was allowed for it will be asked again" if found.is_new else "nothing newer"
        say(f"{request}: {told}", sys.stdout)
        with store.changing(partial(say, stream=sys.stdout)):
            store.remove_unused()
    return status
