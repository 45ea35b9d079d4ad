"""Packages of the control plane: imported, reviewed, available or not, withdrawn.

A package is available if a trusted key signed exactly its files, the review does not forbid it, and nobody
has withdrawn it. Otherwise it is imported and nothing can be bound to it. That is judged again when the
trusted keys or the settings change.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import trio

from runner.contracts.registry import find_contract
from runner.ledger.ledger import Ledger
from runner.manifest.load import lint, load
from runner.package.fault import PackageFault
from runner.package.listing import list_package
from runner.package.signature import parse_signature, verify
from runner.plugin import Plugin
from runner.serve.control.caller import OPERATOR, ControlCaller
from runner.serve.control.database import (
    STATES,
    TRUSTED,
    ControlDatabase,
    ControlFile,
    HistoryRow,
    PackageRow,
    RecordConflict,
)
from runner.serve.control.settings import ControlSettings
from runner.serve.control.store import ImportedFiles, PackageFolder
from runner.serve.refusal import Refused
from sandbox.document.diagnostic import quoted

REVIEWS = ("none", "approved", "rejected")
CHOSEN = ("publisher", "review", "install_policy")  # what the operator decides about a package
_CHANGE_HINT = "change it with runner package review, or PATCH"
FILTERS = ("state", "package_id", "publisher", "review", "signature", "source")
_PACKAGE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\Z")
_MOST_ID, _MOST_VERSION, _MOST_TEXT, _MOST_ORGS = 128, 64, 256, 100
_LOCAL = "/"  # begins the path of a folder or a tar

# Called with "package" or "binding" and an id, after something has changed.
OnChange = Callable[[str, str], None]


class _KnownFiles(NamedTuple):
    """The files of a stored package, by their digest."""

    digest: str
    files: tuple[object, ...] = ()


class ControlPackages:
    def __init__(
        self,
        database: ControlDatabase,
        ledger: Ledger,
        store: PackageFolder,
        settings: Callable[[], ControlSettings],
        on_change: OnChange,
        environ: Mapping[str, str],
    ) -> None:
        self._environ = environ
        self._database, self._ledger, self._store = database, ledger, store
        self._settings, self._on_change = settings, on_change

    # --- importing ------------------------------------------------------------------------------------------

    async def import_package(
        self, given: Mapping[str, Any], caller: ControlCaller
    ) -> tuple[PackageRow, bool]:
        """Import a package, or make a contract-ready entry. Returns the row, and whether it is new. Raises
        Refused and RecordConflict."""
        _require_keys(given, ("source", "package_id", "version", "name", *CHOSEN))
        chosen = _chosen(given)
        if "source" not in given:
            return await self._keep(_entry(given), chosen, caller)
        source = given["source"]
        if not isinstance(source, str) or not source.startswith((_LOCAL, "oci://")) or "\0" in source:
            hint = "write oci://HOST/NAME@sha256:DIGEST, or an absolute path"
            raise Refused(400, "invalid_source", "source is neither a reference nor a path", hint)
        try:
            if source.startswith(_LOCAL):
                files = await trio.to_thread.run_sync(self._store.add, source)
            else:
                files = await self._fetch(source)
            row = await trio.to_thread.run_sync(_read_package, files)
            for name in ("package_id", "version"):
                if given.get(name, getattr(row, name)) != getattr(row, name):
                    message = f"{name} is {quoted(str(given[name]))}, and the package has"
                    raise PackageFault("package_other", f"{message} {quoted(getattr(row, name))}")
        except PackageFault as fault:
            raise Refused(422, fault.rule, str(fault), fault.hint) from None
        return await self._keep(row, chosen, caller)

    async def _fetch(self, source: str) -> ImportedFiles:
        """The package of a registry. Raises Refused and PackageFault."""
        try:
            from runner.oci.client import RegistryAccess
            from runner.oci.fetch import fetch
            from runner.oci.reference import parse_reference
        except ModuleNotFoundError as error:
            hint = "there, runner install oci://HOST/NAME says how to install it"
            message = f"{error.name} is missing where this daemon runs"
            raise Refused(501, "not_installed", message, hint) from None
        settings, reference = self._settings(), parse_reference(source)
        if not settings.may_import(f"{reference.registry}/{reference.repository}"):
            message = f"packages of {reference.registry}/{reference.repository} may not be imported"
            hint = "add it, or a folder above it, to registries in the settings of the control plane"
            raise Refused(403, "registry_forbidden", message, hint)
        stored = await fetch(
            reference,
            self._store.of_registries,
            trust=settings.trust or None,
            required=False,
            access=RegistryAccess(ca=settings.registry_ca, hosts=settings.registry_hosts),
            environ=self._environ,
            update=True,
            older=True,
        )
        listing = await trio.to_thread.run_sync(list_package, stored.path)
        signature = stored.signature.document.decode("utf-8", "replace")
        return ImportedFiles(stored.path, listing, signature, f"{reference.name}@{stored.digest}")

    async def _keep(
        self, row: PackageRow, chosen: Mapping[str, Any], caller: ControlCaller
    ) -> tuple[PackageRow, bool]:
        def order(file: ControlFile) -> tuple[PackageRow | None, PackageRow, bool]:
            known = file.package(row.id)
            kept = {} if known is None else {name: getattr(known, name) for name in CHOSEN}
            for name, value in chosen.items():
                if known is not None and known.digest and kept[name] != value:
                    raise RecordConflict(f"the package is known with another {name}: {_CHANGE_HINT}")
            # Judged in the transaction: `judge_again` comes before it or after it, and misses no package.
            wanted = judged(row._replace(**{**kept, **chosen}), self._settings(), time.time())
            return known, *file.import_package(wanted, caller.name)

        before, after, fresh = await self._database.submit(order)
        await self._note_change("imported", caller, before, after)
        return after, fresh

    async def sweep(self) -> None:
        """Remove files that no package has. Only before anything runs. Raises PackageFault."""
        used = {row.folder for row in await self._database.do(ControlFile.packages)}
        await trio.to_thread.run_sync(self._store.sweep, used)

    # --- changing -------------------------------------------------------------------------------------------

    async def change(
        self, name: str, revision: int, given: Mapping[str, Any], caller: ControlCaller
    ) -> PackageRow:
        """Change review, publisher or install policy. Raises Refused and StaleRevision."""
        _require_keys(given, CHOSEN)
        return await self._change(name, revision, caller, "changed", _chosen(given))

    async def withdraw(self, name: str, caller: ControlCaller, withdrawn: bool) -> PackageRow:
        """Withdraw a package, so that its bindings take no calls, or restore it."""
        word = "withdrawn" if withdrawn else "restored"
        return await self._change(name, None, caller, word, {"withdrawn": int(withdrawn)})

    async def _change(
        self, name: str, revision: int | None, caller: ControlCaller, change: str, fields: Mapping[str, Any]
    ) -> PackageRow:
        def order(file: ControlFile) -> tuple[PackageRow | None, PackageRow | None]:
            known = file.package(name)
            if known is None:
                return None, None
            after = judged(known._replace(**fields), self._settings(), time.time())
            wanted = {**fields, "trust": after.trust, "fault": after.fault}
            return known, file.change_package(name, revision, caller.name, change, **wanted)

        before, after = await self._database.submit(order)
        if after is None:
            raise unknown_package(name)
        await self._note_change(change, caller, before, after)
        changed: PackageRow = after
        return changed

    async def judge_again(self) -> None:
        """Judge all packages by the settings as they are now: keys may be trusted or not trusted any more."""
        for row in await self._database.do(ControlFile.packages):
            if judged(row, self._settings(), time.time()) != row:
                await self._change(row.id, None, ControlCaller("settings"), "judged", {})

    async def _note_change(
        self, change: str, caller: ControlCaller, before: PackageRow | None, after: PackageRow
    ) -> None:
        if before == after:
            return
        detail = {
            "change": change,
            "before": None if before is None else digest_of(_card_text(before)),
            "after": digest_of(_card_text(after)),
            "revision": after.revision,
        }
        await self._ledger.note_surely("control", caller.name, after.id, json.dumps(detail))
        self._on_change("package", after.id)

    # --- reading --------------------------------------------------------------------------------------------

    async def find(self, name: str, caller: ControlCaller) -> tuple[PackageRow, bool]:
        """A package, and whether a binding of the caller's scope is for it. Raises Refused."""
        row = await self._database.do(ControlFile.package, name)
        used = await self._database.do(ControlFile.used_packages, caller.only)
        if row is None or not _is_visible(row, caller, used):
            raise unknown_package(name)
        return row, row.id in used

    async def search(
        self, caller: ControlCaller, filters: Mapping[str, str], after: str, most: int
    ) -> list[tuple[PackageRow, bool]]:
        """The packages that the caller sees, by their ids. Raises Refused."""
        if filters.get("state", STATES[0]) not in STATES:
            raise Refused(400, "invalid_query", f"state is one of {', '.join(STATES)}")
        used = await self._database.do(ControlFile.used_packages, caller.only)
        rows = await self._database.do(ControlFile.packages)
        found = [
            (row, row.id in used)
            for row in rows
            if row.id > after
            and _is_visible(row, caller, used)
            and all(_property(row, row.id in used, key) == value for key, value in filters.items())
        ]
        return found[:most]

    async def history(self, name: str, before: int | None, most: int) -> list[HistoryRow]:
        return await self._database.do(ControlFile.history, "package", name, before=before, most=most)


def unknown_package(name: str) -> Refused:
    hint = "GET /v1/plugin-packages and runner package list show them"
    return Refused(404, "unknown_package", f"there is no package {quoted(name, 200)}", hint)


def _is_visible(row: PackageRow, caller: ControlCaller, used: frozenset[str]) -> bool:
    return not caller.org or row.is_for(caller.org) or row.id in used


def _property(row: PackageRow, is_used: bool, key: str) -> str:
    if key == "state":
        return row.state(is_used)
    found: str = row.trust if key == "signature" else getattr(row, key)
    return found


# --- one package --------------------------------------------------------------------------------------------


def judged(row: PackageRow, settings: ControlSettings, now: float) -> PackageRow:
    """The package, with what its signature is worth and why it is not available."""
    if not row.digest:
        return row._replace(trust="", fault="")
    trust, fault = TRUSTED, ""
    try:
        if not row.signature:
            raise PackageFault("signature_missing", "the package is not signed")
        verify(
            row.signature.encode(),
            package_id=row.package_id,
            version=row.version,
            trusted=settings.trusted,
            trust_file=settings.trust or "the trust file",
            now=now,
            make_listing=lambda: _KnownFiles(row.digest),
        )
    except PackageFault as broken:
        trust, fault = broken.rule, str(broken)
    if row.review == "rejected":
        fault = "the operator has rejected the package"
    elif settings.review == "required" and row.review != "approved":
        fault = fault or "the operator has not approved the package yet"
    return row._replace(trust=trust, fault=fault)


def _read_package(files: ImportedFiles) -> PackageRow:
    """The row of imported files, before it is judged. Raises PackageFault."""
    reads = lint(files.folder)
    faults = [each for read in reads for each in read.diagnostics if each.severity == "error"]
    plugin = reads[0].plugin if len(reads) == 1 else None
    if faults or plugin is None or plugin.root != files.folder:
        told = faults[0].text().replace(files.folder, files.source) if faults else "it is not one plugin"
        raise PackageFault("manifest", f"the package cannot be used: {told}", "runner package lint lists all")
    if find_contract(plugin.contract).bindings is None:
        message = f"plugins of {plugin.contract} have no bindings, so a control plane has no use for them"
        raise PackageFault("package_contract", message)
    key_id = ""
    if files.signature:
        try:
            key_id = parse_signature(files.signature.encode()).key_id
        except PackageFault:
            pass  # it is judged later
    return _identified(plugin.id, plugin.version)._replace(
        contract=plugin.contract,
        name=plugin.name[:_MOST_TEXT],
        description=plugin.description[: 4 * _MOST_TEXT],
        digest=files.listing.digest,
        folder=files.folder,
        source=files.source,
        signature=files.signature,
        key_id=key_id,
    )


def _entry(given: Mapping[str, Any]) -> PackageRow:
    """A contract-ready entry: a name and a version, and no files yet. Raises Refused."""
    name = given.get("name", "")
    if not isinstance(name, str) or len(name) > _MOST_TEXT:
        raise Refused(400, "invalid_body", f"name is not a text of at most {_MOST_TEXT} characters")
    try:
        return _identified(given.get("package_id"), given.get("version"))._replace(name=name)
    except PackageFault as fault:
        hint = "a package has a source; an entry without one has package_id and version"
        raise Refused(400, "invalid_body", str(fault), hint) from None


def _identified(package_id: Any, version: Any) -> PackageRow:
    """Raises PackageFault."""
    for what, value, pattern, most in (
        ("package_id", package_id, _PACKAGE_ID, _MOST_ID),
        ("version", version, _VERSION, _MOST_VERSION),
    ):
        if not isinstance(value, str) or len(value) > most or not pattern.match(value):
            message = (
                f"the {what} {quoted(str(value))} is not one of at most {most} letters, digits and . _ -"
            )
            raise PackageFault("package_name", message)
    return PackageRow(package_key(package_id, version), package_id, version)


def package_key(package_id: str, version: str) -> str:
    """The id of a package's record, which can be part of a path."""
    return f"{package_id.replace('/', '~')}@{version}"


def _chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the operator decides about a package. Raises Refused."""
    found: dict[str, Any] = {}
    if "publisher" in given:
        publisher = given["publisher"]
        if not isinstance(publisher, str) or len(publisher) > _MOST_TEXT or not publisher.isprintable():
            message = f"publisher is not a text of at most {_MOST_TEXT} printable characters"
            raise Refused(400, "invalid_body", message)
        found["publisher"] = publisher
    if "review" in given:
        if given["review"] not in REVIEWS:
            raise Refused(400, "invalid_body", f"review is one of {', '.join(REVIEWS)}")
        found["review"] = given["review"]
    if "install_policy" in given:
        orgs = given["install_policy"]
        if (
            not isinstance(orgs, list)
            or len(orgs) > _MOST_ORGS
            or not all(isinstance(org, str) and 0 < len(org) <= _MOST_ID for org in orgs)
        ):
            hint = 'write ["*"] for all orgs, [] for the operator alone'
            raise Refused(400, "invalid_body", "install_policy is not a list of orgs", hint)
        found["install_policy"] = json.dumps(sorted(set(orgs)))
    return found


def _require_keys(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            message = f"the body has the unknown key {quoted(key)}"
            raise Refused(400, "invalid_body", message, f"there are {', '.join(known)}")


def package_card(row: PackageRow, is_used: bool, caller: ControlCaller) -> dict[str, Any]:
    """A package as the API shows it. Orgs are shown no paths of the operator's, and no other orgs."""
    is_local = row.source.startswith(_LOCAL)
    return {
        "id": row.id,
        "package_id": row.package_id,
        "version": row.version,
        "name": row.name,
        "description": row.description,
        "state": row.state(is_used),
        "reason": row.trust if caller.org and row.trust != TRUSTED else row.unavailable,
        "publisher": row.publisher,
        "review": row.review,
        "signature": {"state": row.trust, "key_id": row.key_id},
        "source": "local" if caller.org and is_local else row.source,
        "digest": row.digest,
        "install_policy": [
            each for each in json.loads(row.install_policy) if caller.sees(each) or each == "*"
        ],
        "revision": row.revision,
        "created": row.created,
        "changed": row.changed,
    }


def _card_text(row: PackageRow) -> str:
    return json.dumps(package_card(row, False, OPERATOR), sort_keys=True)


def digest_of(text: str) -> str:
    """For the audit: what changed, without the content."""
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


# --- its plugin ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def plugin_at(folder: str) -> Plugin:
    """The plugin of a stored package, whose files do not change. Blocks. Raises Refused."""
    read = load(folder)
    if read.plugin is None:
        told = next((each.text() for each in read.diagnostics if each.severity == "error"), folder)
        raise Refused(503, "package_unusable", f"a stored package cannot be read: {told}", "import it again")
    return read.plugin


@lru_cache(maxsize=64)
def catalogue_at(folder: str) -> Mapping[str, list[dict[str, Any]]]:
    """What a stored package exposes, by kind. Blocks. Raises Refused."""
    plugin = plugin_at(folder)
    calls = find_contract(plugin.contract).prepared_calls
    return {} if calls is None else calls.catalogue(plugin)
