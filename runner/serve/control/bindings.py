"""Bindings of the control plane: created, changed, rolled back, checked.

A binding is checked in this order, and the first step with a fault is the last: the package is known, its
version is known and available, then what the contract checks: export, scope, configuration, secrets, status,
rollout, policy. A change names the revision that it changes. Every version stays in the history.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import trio

from runner.contracts.bindings import BoundExport
from runner.contracts.registry import find_contract
from runner.ledger.ledger import Ledger
from runner.protocol import wire
from runner.serve.control.caller import ControlCaller
from runner.serve.control.database import (
    BindingRow,
    ControlDatabase,
    ControlFile,
    HistoryRow,
    PackageRow,
    PackageUnavailable,
    canonical,
    require_revision,
)
from runner.serve.control.packages import (
    ControlPackages,
    OnChange,
    digest_of,
    plugin_at,
)
from runner.serve.control.settings import ControlSettings
from runner.serve.refusal import Refused
from sandbox.document.diagnostic import Diagnostic, DocumentError, quoted
from sandbox.document.read import parse

MOST_RECORD_BYTES = 64 << 10
# What a change may replace, each key as a whole. The others say what the binding is.
CHANGEABLE = ("package_version", "config", "secrets", "status", "rollout", "policy")
_MOST_REVISION = 1 << 32
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_STOP: Mapping[str, Any] = {"status": "disabled"}  # a change that has to be possible whatever is wrong


class CheckedBinding(NamedTuple):
    package: PackageRow | None  # None: it is not known
    bound: BoundExport | None  # None: there is an error among the faults
    faults: tuple[Diagnostic, ...] = ()


class ControlBindings:
    def __init__(
        self,
        database: ControlDatabase,
        ledger: Ledger,
        packages: ControlPackages,
        settings: Callable[[], ControlSettings],
        on_change: OnChange,
    ) -> None:
        self._database, self._ledger, self._packages = database, ledger, packages
        self._settings, self._on_change = settings, on_change

    # --- changing -------------------------------------------------------------------------------------------

    async def create(self, raw: bytes, caller: ControlCaller, change: str = "created") -> BindingRow:
        """Store a new binding. Raises Refused and RecordConflict."""
        record = _object(raw)
        if caller.org and "binding_id" in record:
            # The answer would tell whether another org has a binding of this name.
            hint = "leave it out: the answer has the id"
            raise Refused(400, "invalid_body", "binding_id is chosen by the control plane", hint)
        own_id = record.get("binding_id", f"bind_{secrets.token_hex(12)}")
        if not isinstance(own_id, str) or not _ID.match(own_id):
            hint = "use up to 128 letters, digits and . _ -"
            raise Refused(400, "invalid_body", "binding_id cannot be the id of a binding", hint)
        row = await self._checked_row(raw.decode(), {**record, "binding_id": own_id}, own_id, caller)
        return await self._put(row, 0, caller, change, None)

    async def change(
        self, name: str, revision: int, given: Mapping[str, Any], caller: ControlCaller
    ) -> BindingRow:
        """Replace some keys of a binding, or all of them by those of an earlier revision. Raises Refused and
        StaleRevision."""
        before = await self.find(name, caller)
        require_revision(before.revision, revision)  # it is `before` that is changed
        if set(given) == {"revision"}:
            record, change = await self._earlier(name, given["revision"]), "rolled back"
        else:
            record, change = merged(before, given), "changed"
        if given == _STOP:
            after = before._replace(record=canonical(record), active=0)
        else:
            after = await self._checked_row(canonical(record), record, name, caller, before.package)
        return await self._put(after, revision, caller, change, before)

    async def _earlier(self, name: str, revision: Any) -> dict[str, Any]:
        if type(revision) is not int or not 0 < revision <= _MOST_REVISION:
            raise Refused(400, "invalid_body", "revision is not a number of the binding's history")
        found = await self._database.do(ControlFile.at_revision, "binding", name, revision)
        if found is None:
            message = f"the history of {quoted(name)} has no revision {revision}"
            raise Refused(404, "unknown_revision", message, "runner binding history lists them")
        record: dict[str, Any] = json.loads(found.document)
        return record

    async def _checked_row(
        self, text: str, record: Mapping[str, Any], name: str, caller: ControlCaller, bound_to: str = ""
    ) -> BindingRow:
        """The row of a record that has no fault. `bound_to`: the package of the binding before. Raises
        Refused."""
        checked = await self._check(text, record, name, caller, bound_to)
        if checked.bound is None or checked.package is None:
            errors = [each for each in checked.faults if each.severity == "error"]
            more = {"faults": shown_faults(checked.faults)}
            first = errors[0]
            raise Refused(422, first.rule, f"{first.place}: {first.message}", first.hint, more=more)
        bound = checked.bound
        return BindingRow(
            name,
            bound.org,
            bound.project,
            checked.package.id,
            bound.export,
            bound.kind,
            int(bound.active),
            bound.traffic_percent,
            canonical(record),
        )

    async def _put(
        self, row: BindingRow, revision: int, caller: ControlCaller, change: str, before: BindingRow | None
    ) -> BindingRow:
        def order(file: ControlFile) -> BindingRow:
            package = file.package(row.package)
            # It may have been withdrawn since it was looked at.
            if row.active and (package is None or package.unavailable):
                raise PackageUnavailable("the package was withdrawn meanwhile")
            return file.put_binding(row, revision, caller.name, change)

        after: BindingRow = await self._database.submit(order)
        detail = {
            "change": change,
            "before": None if before is None else digest_of(before.record),
            "after": digest_of(after.record),
            "revision": after.revision,
            "org": after.org,
        }
        await self._ledger.note_surely("control", caller.name, after.id, json.dumps(detail))
        self._on_change("binding", after.id)
        return after

    # --- checking -------------------------------------------------------------------------------------------

    async def validate(self, raw: bytes, caller: ControlCaller) -> tuple[Diagnostic, ...]:
        """The faults of a draft. Raises Refused if it is not JSON."""
        record = _object(raw)
        return (await self._check(raw.decode(), record, "draft", caller)).faults

    async def validate_stored(
        self, name: str, given: Mapping[str, Any], caller: ControlCaller
    ) -> tuple[Diagnostic, ...]:
        """The faults that a binding has now, or would have after a change. Raises Refused."""
        row = await self.find(name, caller)
        record = merged(row, given)
        return (await self._check(canonical(record), record, name, caller, row.package)).faults

    async def _check(
        self, text: str, record: Mapping[str, Any], name: str, caller: ControlCaller, bound_to: str = ""
    ) -> CheckedBinding:
        if len(text.encode("utf-8", "surrogatepass")) > MOST_RECORD_BYTES:
            raise Refused(413, "binding_too_large", f"a binding has at most {MOST_RECORD_BYTES} bytes")
        file = f"binding {name}"
        try:
            document = parse(file, text.encode("utf-8", "surrogatepass"), "json")
        except DocumentError as error:
            return CheckedBinding(None, None, error.diagnostics)

        def fault(key: str, rule: str, message: str, hint: str = "") -> CheckedBinding:
            return CheckedBinding(None, None, (document.diagnostic((key,), rule, message, hint),))

        found = {row.version: row for row, _ in await self._versions(record.get("package_id"), caller)}
        hint = "runner package list shows the packages and their versions"
        if not found:
            shown = quoted(str(record.get("package_id", "")), 130)
            return fault("package_id", "package_unknown", f"there is no package {shown}", hint)
        package = found.get(str(record.get("package_version")))
        if package is None:
            message = f"the package has no version {quoted(str(record.get('package_version', '')))}"
            return fault("package_version", "version_unknown", message, hint)
        if package.unavailable:
            why = package.trust if caller.org and package.fault else package.unavailable
            return fault("package_version", "package_unavailable", f"the package is not available: {why}")
        if caller.org and package.id != bound_to and not package.is_for(caller.org):
            hint = "ask the operator to change its install policy"
            return fault("package_version", "install_policy", "the package is not for this org", hint)
        orgs = caller.orgs(self._settings())

        def read() -> tuple[BoundExport | None, tuple[Diagnostic, ...]]:
            rules = find_contract(package.contract).bindings
            assert rules is not None  # or it would not have been imported
            return rules.read_record(text, file, plugin_at(package.folder), own_id=name, orgs=orgs)

        return CheckedBinding(package, *await trio.to_thread.run_sync(read))

    async def _versions(self, package_id: Any, caller: ControlCaller) -> Sequence[tuple[PackageRow, bool]]:
        if not isinstance(package_id, str):
            return ()
        return await self._packages.search(caller, {"package_id": package_id}, "", 1000)

    # --- reading --------------------------------------------------------------------------------------------

    async def find(self, name: str, caller: ControlCaller) -> BindingRow:
        """Raises Refused: a binding of another org is answered as one that does not exist."""
        row = await self._database.do(ControlFile.binding, name)
        if row is None or not caller.sees(row.org):
            hint = "GET /v1/plugin-bindings and runner binding list show them"
            raise Refused(404, "unknown_binding", f"there is no binding {quoted(name, 130)}", hint)
        return row

    async def search(
        self, caller: ControlCaller, filters: Mapping[str, str], after: str, most: int
    ) -> list[BindingRow]:
        """By their ids. `filters`: org_id, project_id, package, kind."""
        org = filters.get("org_id", caller.only)
        if org is not None and not caller.sees(org):
            return []
        return await self._database.do(
            ControlFile.bindings,
            *(org, filters.get("project_id"), filters.get("package"), filters.get("kind")),
            after=after,
            most=most,
        )

    async def history(
        self, name: str, caller: ControlCaller, before: int | None, most: int
    ) -> list[HistoryRow]:
        """The versions of a binding, the newest first. Raises Refused."""
        await self.find(name, caller)
        return await self._database.do(ControlFile.history, "binding", name, before=before, most=most)


def _object(raw: bytes) -> dict[str, Any]:
    """Raises Refused."""
    try:
        raw.decode()  # the text is what is checked: nothing of it may be replaced
        found = wire.decode(raw)
    except ValueError as error:
        raise Refused(400, "invalid_json", f"the body is not JSON that can be used: {error}") from None
    if not isinstance(found, dict):
        raise Refused(400, "invalid_body", "the body has to be a JSON object")
    return found


def merged(row: BindingRow, given: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the keys of a change. Raises Refused."""
    for key in given:
        if key not in CHANGEABLE:
            hint = f"a change has {', '.join(CHANGEABLE)}; or revision alone, to roll back"
            raise Refused(400, "invalid_body", f"{quoted(key)} of a binding does not change", hint)
    return {**json.loads(row.record), **given}


def binding_document(row: BindingRow, package: PackageRow | None) -> dict[str, Any]:
    """A binding as the API shows it: the record, and beside it what the control plane knows."""
    inactive = row.inactive or ("" if package is None else package.unavailable)
    return {
        **json.loads(row.record),
        "package": row.package,
        "kind": row.kind,
        "inactive": inactive,
        "revision": row.revision,
        "created": row.created,
        "changed": row.changed,
    }


def shown_faults(faults: Sequence[Diagnostic]) -> list[dict[str, Any]]:
    return [{**each._asdict(), "place": each.place} for each in faults]


def record_of_install(package: PackageRow, given: Mapping[str, Any]) -> dict[str, Any]:
    """The binding record that an installation makes. Raises Refused."""
    for key in ("package_id", "package_version"):
        if key in given:
            raise Refused(400, "invalid_body", f"{key} is that of the package: leave it out")
    identity = {"package_id": package.package_id, "package_version": package.version}
    return {**identity, "status": "active", **given}
