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

SCHEME = "docker://"


def is_image(word: str | None) -> bool:
    return word is not None and word.startswith(SCHEME)


def install_image(args: argparse.Namespace, store: Store, request: Request) -> int:
    """Raises PackageFault."""
    if store.find(request) is not None:
        say(f"{request} is installed already; --update asks the registry again", sys.stdout)
        return EXIT["ok"]
    access = access_of(args)
    say(f"{request} will be fetched from {registry_of(request)}", sys.stdout)
    if not args.yes and (refusal := confirm("Fetch and install?")) is not None:
        return refusal
    fetch_and_tell(store, request, access, args.disk)
    return EXIT["ok"]


def registry_of(request: Request) -> str:
    return request.name.partition("/")[0]


def fetch_and_tell(store: Store, request: Request, access: RegistryAccess | None, disk: str) -> None:
    """`access`: None for the usual one. Raises PackageFault."""
    try:
        from runner.oci.client import USUAL_ACCESS, wait_for
        from runner.oci.fetch_image import ImageRule, fetch_image
    except ModuleNotFoundError as error:
        raise extra_fault(error) from None
    tell = partial(say, stream=sys.stdout)
    most, through = int(parse_limit("disk", disk)), access or USUAL_ACCESS
    trust, named = _signing_rule()
    rule = ImageRule(trust, named)
    found = wait_for(lambda: fetch_image(request, store, access=through, most=most, rule=rule, tell=tell))
    say(f"  installed {request}", sys.stdout)
    say(f"  signature: {signature_text(found.signature, trust)}", sys.stdout)
    if request.unpinned:
        again = f"runner install --update {request.name}"
        say(f"  pinned to {found.digest}; it stays so until {again}", sys.stdout)


def _signing_rule() -> tuple[str | None, tuple[str, ...]]:
    """The trust file, if the policy in force requires signatures, and the images that it names. Raises
    PackageFault."""
    policy = policy_of(None)
    return policy.packages.trust if policy.packages.signature == "required" else None, policy.images


def update_image(args: argparse.Namespace, store: Store, request: Request) -> int:
    """Raises PackageFault."""
    access, status = access_of(args), EXIT["ok"]
    from runner.oci.client import call_in_main, wait_for
    from runner.oci.fetch_image import ImageRule, fetch_image

    def accept(before: Installed | None, digest: str) -> bool:
        nonlocal status
        if before is None:
            return True
        say(f"{request}: {image_digest(store, before)} -> {digest}", sys.stdout)
        refusal = None if args.yes else call_in_main(lambda: confirm("Update?"))
        status = EXIT["ok"] if refusal is None else refusal
        return refusal is None

    most = int(parse_limit("disk", args.disk))
    tell = partial(say, stream=sys.stdout)
    rule = ImageRule(*_signing_rule())
    found = wait_for(
        lambda: fetch_image(
            request, store, access=access, update=True, most=most, rule=rule, accept=accept, tell=tell
        )
    )
    if status == EXIT["ok"]:
        told = "updated; what was allowed for it will be asked again" if found.is_new else "nothing newer"
        say(f"{request}: {told}", sys.stdout)
        with store.changing(tell):
            store.remove_unused()
    return status
