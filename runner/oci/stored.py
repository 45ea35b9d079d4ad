"""StoredPackage: a package of a registry in the store of `runner install`, and what its signature is worth.

Nothing here asks a registry. runner/oci/fetch.py does, and describes both together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from runner.install.request import Request
from runner.install.store import Installed, Store, StoreRefused
from runner.manifest.load import load
from runner.oci.reference import Reference
from runner.package.fault import PackageFault
from runner.package.keys import TrustedKey, load_trusted
from runner.package.listing import SIGNATURE_NAME, FileList, list_package
from runner.package.signature import VerifiedPackage, parse_signature, verify
from runner.plugin import Plugin
from sandbox.document.diagnostic import DocumentError, printable

SignatureStatus = Literal["trusted", "untrusted", "absent", "unchecked"]


class SignatureState(NamedTuple):
    status: SignatureStatus
    reason: str = ""  # why it is not trusted
    signed: VerifiedPackage | None = None  # if it is trusted
    document: bytes = b""  # marketplace.signature.json; empty: there is none
    rule: str = ""  # by which it is not trusted
    hint: str = ""


class StoredPackage(NamedTuple):
    path: str  # a read-only folder with the files of the package
    digest: str  # of its manifest in the registry
    reference: Reference  # as it was asked for
    plugin: Plugin
    signature: SignatureState


class TrustedKeys(NamedTuple):
    """The keys of a trust file."""

    path: str
    keys: Mapping[str, TrustedKey]


def read_trust(path: str | None) -> TrustedKeys | None:
    """Raises PackageFault."""
    if path is None:
        return None
    try:
        return TrustedKeys(path, load_trusted(path))
    except DocumentError as error:
        first = error.diagnostics[0]
        raise PackageFault(first.rule, first.text(), first.hint) from None


def find_stored(reference: Reference, store: Store, *, trust: str | None = None) -> StoredPackage | None:
    """The package in the store: of the tag as it was pinned, or of the digest. Nothing is fetched. `trust`:
    as for `fetch`. Raises PackageFault."""
    trusted = read_trust(trust)
    found = find_set(reference, store)
    if found is None:
        return None
    path = store.tree(found.set_name)
    signature = SignatureState("absent")
    try:
        with open(os.path.join(path, SIGNATURE_NAME), "rb") as file:
            signature = judge_signatures([file.read()], lambda: list_package(path), trusted)
    except FileNotFoundError:
        pass
    digest, plugin = _digest_in(store, found.set_name), read_plugin(path, reference)
    try:
        require_identity(signature, plugin)
    except PackageFault as fault:  # its key was not trusted when it was stored
        signature = SignatureState("untrusted", str(fault), rule=fault.rule, hint=fault.hint)
    return StoredPackage(path, digest, reference, plugin, signature)


def find_set(reference: Reference, store: Store) -> Installed | None:
    """What the store has for a reference. Raises PackageFault."""
    try:
        found = store.find(request_of(reference))
        if found is None and reference.digest:
            of_name = (each for each in store.all() if each.request.name == reference.name)
            wanted = (each for each in of_name if _digest_in(store, each.set_name) == reference.digest)
            found = next((each for each in wanted if store.has(each.set_name)), None)
        return found if found is not None and _digest_in(store, found.set_name) else None
    except StoreRefused as refused:
        raise PackageFault("store_refused", str(refused), refused.hint) from None


def request_of(reference: Reference) -> Request:
    return Request("oci", (str(reference),))


def _digest_in(store: Store, set_name: str) -> str:
    """The digest of the package that a set was made from; "" if that is not known."""
    lock = store.lock_of(set_name)
    packages = () if lock is None else lock.packages
    return next((each.integrity for each in packages if each.name != SIGNATURE_NAME), "")


def read_plugin(folder: str, reference: Reference, contract: str | None = None) -> Plugin:
    read = load(folder, contract=contract)
    if read.plugin is None or read.plugin.id == SIGNATURE_NAME:
        faults = [each for each in read.diagnostics if each.severity == "error"]
        told = faults[0].text().replace(folder, str(reference)) if faults else "it has no plugin"
        raise PackageFault("manifest", f"the package cannot be used: {told}", "ask its publisher")
    return read.plugin


def require_identity(state: SignatureState, plugin: Plugin) -> None:
    """Raise PackageFault unless the signature is for the plugin that the manifest describes."""
    signed = state.signed
    if signed is not None and (signed.package_id, signed.version) != (plugin.id, plugin.version):
        message = (
            f"the signature is for {signed.package_id} {signed.version}, "
            f"and the manifest says {plugin.id} {plugin.version}"
        )
        raise PackageFault("signature_identity", printable(message), "ask its publisher")


def judge_signatures(
    signatures: Sequence[bytes], make_listing: Callable[[], FileList], trusted: TrustedKeys | None
) -> SignatureState:
    """The state by the newest signature that is trusted, else by the first one of these files, else by the
    first. Of the plugin's manifest only what the signature says of it is known here: `require_identity`."""
    trusted_ones: list[SignatureState] = []
    worst: list[tuple[bool, SignatureState]] = []
    for raw in signatures:
        try:
            claim = parse_signature(raw)
        except PackageFault as fault:
            worst.append((False, SignatureState("untrusted", str(fault), rule=fault.rule, hint=fault.hint)))
            continue
        if trusted is None:
            covers = claim.digest == make_listing().digest
            worst.append((covers, SignatureState("unchecked", document=raw if covers else b"")))
            continue
        try:
            signed = verify(
                raw, claim.package_id, claim.version, trusted.keys, trusted.path, time.time(), make_listing
            )
            trusted_ones.append(SignatureState("trusted", signed=signed, document=raw))
        except PackageFault as fault:
            covers = claim.digest == make_listing().digest
            kept = raw if covers else b""
            state = SignatureState("untrusted", str(fault), document=kept, rule=fault.rule, hint=fault.hint)
            worst.append((covers, state))
    if trusted_ones:
        # Who replaces a key signs again, and the old key may be trusted a while longer.
        return max(trusted_ones, key=lambda state: state.signed.signed_at if state.signed else "")
    return max(worst, key=lambda each: each[0])[1] if worst else SignatureState("absent")
