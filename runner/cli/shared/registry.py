"""Packages in registries on the command line: options, exit statuses, and oci://… in place of a manifest."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runner.cli.shared.text import say, warn
from runner.extras import install_command
from runner.install.roots import main_store_root
from runner.install.store import Store
from runner.oci.reference import SCHEME, Reference, parse_reference
from runner.oci.stored import SignatureState, find_set
from runner.outcome import EXIT, USAGE_ERROR
from runner.package.fault import PackageFault
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.policy.load import load_policy
from sandbox.policy.policy import Policy
from sandbox.units import parse_limit

if TYPE_CHECKING:
    from runner.oci.client import RegistryAccess

_FAILED = 1


def add_registry(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "registries", "For oci://HOST/NAME:TAG, oci://HOST/NAME@sha256:DIGEST and docker://IMAGE."
    )
    group.add_argument(
        "--ca",
        metavar="FILE",
        default="",
        help="certificates in PEM that are trusted in place of the system's",
    )
    group.add_argument(
        "--plain-http", action="store_true", help="without TLS, as localhost is asked unless there is a --ca"
    )
    group.add_argument(
        "--allow-host",
        metavar="HOST",
        action="append",
        default=[],
        help="another host that the registry may send us to: for tokens, or in a private network",
    )


def given_options(args: argparse.Namespace) -> tuple[tuple[str, bool], ...]:
    """The options of `add_registry`, and which of them were given."""
    return ("--ca", bool(args.ca)), ("--plain-http", args.plain_http), ("--allow-host", bool(args.allow_host))


def access_of(args: argparse.Namespace) -> RegistryAccess:
    """Raises ValueError for a --deadline that is none, and PackageFault without the extra [oci]."""
    try:
        from runner.oci.client import RegistryAccess
    except ModuleNotFoundError as error:
        raise extra_fault(error) from None
    deadline = float(parse_limit("deadline", args.deadline))
    return RegistryAccess(args.ca, args.plain_http, tuple(args.allow_host), deadline)


def extra_fault(error: ModuleNotFoundError) -> PackageFault:
    hint = f"install it with {install_command('oci')}"
    return PackageFault("extra_missing", f"{error.name} is missing", hint)


def status_of(fault: PackageFault) -> int:
    """The exit status for a fault of a package or a registry."""
    if fault.rule.startswith("signature"):
        return EXIT["policy_denied"]
    if fault.rule.startswith(("trust", "policy")):
        return EXIT["policy_invalid"]
    if fault.rule.startswith(("package", "manifest")):
        return EXIT["manifest_invalid"]
    return USAGE_ERROR if fault.rule.startswith(("reference", "key")) else _FAILED


def say_fault(verb: str, fault: PackageFault) -> None:
    say(f"runner {verb}: {printable(str(fault))}")
    if fault.hint:
        say(f"    {printable(fault.hint)}")


def signature_text(state: SignatureState, trust: str | None) -> str:
    """One line for people."""
    if state.signed is not None:
        comment = f" ({state.signed.comment})" if state.signed.comment else ""
        return printable(f"{state.signed.key_id}{comment}, trusted by {trust}")
    return printable(
        {"absent": "none", "unchecked": "not checked"}.get(state.status, f"NOT trusted: {state.reason}")
    )


def trust_of(policy: str | None) -> tuple[str | None, bool]:
    """The trust file by the policy in force, and whether a signature is required. Raises PackageFault."""
    rule = policy_of(policy).packages
    return (rule.trust, True) if rule.signature == "required" else (None, False)


def policy_of(policy: str | None) -> Policy:
    """Raises PackageFault."""
    try:
        return load_policy(policy, os.environ)
    except DocumentError as error:
        first = error.diagnostics[0]
        raise PackageFault(f"policy_{first.rule}", first.text(), first.hint) from None


# --- in place of a manifest ---------------------------------------------------------------------------------


def localize(words: Sequence[str], args: argparse.Namespace) -> list[str]:
    """The words of a command line, with the folder in the store in place of each reference. What is not there
    is fetched. Raises PackageFault."""
    given: list[str] = getattr(args, "manifests", None) or [getattr(args, "manifest", "")]
    at = words.index("--") if "--" in words else len(words)
    found = {word: _find_or_fetch(word, args) for word in given if word.startswith(SCHEME)}
    return [*(found.get(word, word) for word in words[:at]), *words[at:]]


def _find_or_fetch(word: str, args: Any) -> str:
    reference = parse_reference(word)
    store = Store(main_store_root(os.environ))
    stored = find_set(reference, store)
    if stored is not None:
        return store.tree(stored.set_name)  # the launch checks its signature, if that is required
    trust, required = trust_of(getattr(args, "policy", None))
    return _fetch(reference, store, trust, required, getattr(args, "contract", None))


def _fetch(
    reference: Reference, store: Store, trust: str | None, required: bool, contract: str | None
) -> str:
    try:
        from runner.oci.client import wait_for
        from runner.oci.fetch import fetch
    except ModuleNotFoundError as error:
        raise extra_fault(error) from None

    try:
        package = wait_for(
            lambda: fetch(reference, store, trust=trust, required=required, contract=contract, tell=warn)
        )
    except PackageFault as fault:
        if "--" in fault.hint:  # an option which other verbs do not have
            fault.hint += f"; that is an option of runner install {reference}, which fetches it beforehand"
        raise
    if reference.tag:
        pinned = reference._replace(tag="", digest=package.digest)
        warn(f"{reference} is pinned to {pinned.digest} until runner install --update {reference}")
    return package.path
