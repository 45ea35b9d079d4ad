"""A binding record: ties one export to a scope, with its configuration and narrower permissions.

    {"binding_id": "bind_1", "package_id": "acme/devkit", "package_version": "0.1.0", "export_id": "search",
     "scope": {"org_id": "org_1", "project_id": "proj_1"},
     "config": {…}, "secrets": {"token": "secret://org_1/token", "other": null},
     "status": "active", "rollout": {"traffic_percent": 100},
     "policy": {"timeout_ms": 5000, "network": "egress", "egress": ["api.example.com:443"], …}}

It is checked in this order, and the first step with a fault is the last: package, version, export, scope,
configuration, secrets, status, rollout, policy. A policy only narrows: a wider value is not used, and a
warning says so.

A file may have several records: {"bindings": [{…}, {…}]}. One of them is used, chosen by package, version,
export and scope. The one of the call's project goes before the one of its org, whatever its status.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from runner.contracts.bindings import BoundExport
from runner.contracts.vai.declared import PLURAL, DeclaredExport, Permissions, declared_by
from runner.manifest.table import Table
from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic, DocumentError, did_you_mean, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import parse
from sandbox.spec import KeyPath
from sandbox.speed.value import NamedTuple

Found = TypeVar("Found")

# Rules of diagnostics that mean something other than an unusable binding.
SECRET_MISSING = "binding_secret_missing"
INACTIVE = "binding_inactive"

SEVERAL = "bindings"  # the key of a file with several records
_MOST_SHOWN = 10  # bindings in a message

MOST_ID_CHARACTERS = 256
MOST_HOSTS = 256  # of `egress`
HTTPS_PORT = 443  # of a host in `egress` without a port

_KEYS = tuple(
    "binding_id package_id package_version export_id scope config secrets status rollout policy".split()
)
_POLICY_KEYS = ("timeout_ms", "max_concurrency", "network", "egress", "filesystem", "gateway_api_scopes")
_SECRET = re.compile(r"secret://(?P<org>[^/\s]+)/(?P<name>[^\s]+)\Z")


class Binding(NamedTuple):
    id: str = ""
    export: str = ""
    org: str = ""
    project: str = ""
    config: Mapping[str, Any] = {}
    slots: Mapping[str, str | None] = {}  # slot -> secret://ORG/NAME; None: no secret
    active: bool = True
    traffic_percent: int = 100
    # What it narrows. None: nothing.
    permissions: Permissions | None = None
    egress: tuple[str, ...] | None = None  # hosts, as in sandbox/network/rules.py
    timeout: float | None = None  # seconds
    max_concurrency: int | None = None
    record: Mapping[str, Any] = {}  # as it was written, if it is one of several

    @property
    def inactive(self) -> str:
        """Reason the binding is inactive, or ''."""
        if not self.active:
            return f"the binding {quoted(self.id)} is disabled"
        if not self.traffic_percent:
            return f"the binding {quoted(self.id)} has the traffic_percent 0, which leaves everybody out"
        return ""


def read_binding(
    text: str,
    file: str,
    plugin: Plugin,
    *,
    files: bool = False,
    context: Mapping[str, Any] | None = None,
    export: str = "",
) -> tuple[Binding | None, tuple[Diagnostic, ...]]:
    """The binding in `text`, checked against the package. `file`: for messages. None: it has an error, or is
    one of several for several exports, and `export` names none of these.

    `files`: the configuration is checked against the schema in the package, and gets its defaults. `context`:
    the identities of a call that is about to be made, with its export_id. Another export or scope, a disabled
    binding and a rollout that leaves the call out are errors then.
    """
    try:
        document = parse(file or "the binding", text.encode("utf-8", "surrogatepass"), "json")
    except DocumentError as error:
        return None, error.diagnostics
    faults = Faults(document)
    table: Table | None = Table(document.data)
    if table is not None and SEVERAL in table:
        asked = export or str((context or {}).get("export_id", ""))
        table = _choose(faults, table, plugin, asked, context or {})
    if table is None:
        return None, faults.diagnostics()
    return _read(faults, table, plugin, files, context), faults.diagnostics()


def check_bindings(text: str, file: str, plugin: Plugin) -> tuple[Diagnostic, ...]:
    """The faults of every binding in `text` that is for this package and version."""
    try:
        document = parse(file or "the binding", text.encode("utf-8", "surrogatepass"), "json")
    except DocumentError as error:
        return error.diagnostics
    table = Table(document.data)
    found: list[Diagnostic] = []
    for each in _of_package(table, plugin) if SEVERAL in table else [table]:
        faults = Faults(document)
        _read(faults, each, plugin, True, None)
        found += faults.diagnostics()
    return tuple(found)


def read_record(
    text: str, file: str, plugin: Plugin, *, own_id: str, orgs: Mapping[str, Collection[str]]
) -> tuple[BoundExport | None, tuple[Diagnostic, ...]]:
    """See Bindings.read_record."""
    try:
        document = parse(file, text.encode("utf-8", "surrogatepass"), "json")
    except DocumentError as error:
        return None, error.diagnostics
    faults, table = Faults(document), Table(document.data)
    _warn_unknown(faults, table, _KEYS, "a binding")
    found = _Record(faults, table, plugin, own_id, orgs).read(True, None)
    if found is None or faults.failed:
        return None, faults.diagnostics()
    export = declared_by(plugin).find(found.export)
    assert export is not None  # or it would be an error
    scope = (found.org, found.project, found.active, found.traffic_percent, found.slots)
    return BoundExport(found.export, PLURAL[export.kind], *scope), faults.diagnostics()


def _read(
    faults: Faults, table: Table, plugin: Plugin, files: bool, context: Mapping[str, Any] | None
) -> Binding | None:
    _warn_unknown(faults, table, _KEYS, "a binding")
    binding = _Record(faults, table, plugin).read(files, context)
    # The keys that lead to it: it is one of several.
    return binding if binding is None or not table.keys else binding._replace(record=table.data)


def _of_package(table: Table, plugin: Plugin) -> list[Table]:
    return [
        each
        for each in table.tables(SEVERAL)
        if (each.string("package_id"), each.string("package_version")) == (plugin.id, plugin.version)
    ]


def _choose(
    faults: Faults, table: Table, plugin: Plugin, export: str, context: Mapping[str, Any]
) -> Table | None:
    """The one record for the export, in the scope of the context. None: there is none, which is an error, or
    `export` is empty and they are for several exports."""
    _warn_unknown(faults, table, (SEVERAL,), "a file with several bindings")
    fitting = _of_package(table, plugin)
    exports = {each.string("export_id") for each in fitting}
    if not export and len(exports) > 1:
        return None
    what = f"{plugin.id} {plugin.version}" + (f" and its export {quoted(export)}" if export else "")
    org = context.get("org_id")
    of_org = (
        each
        for each in fitting
        if (not export or each.string("export_id") == export)
        and (not org or each.table("scope").string("org_id") == org)
    )
    found = nearest(of_org, context.get("project_id"), lambda each: each.table("scope").string("project_id"))
    if len(found) == 1:
        return found[0]
    if not found:
        message = f"none of the bindings is for {what}, in the scope of the call"
        hint = "add one, or correct org_id and project_id in --context"
        faults.error((SEVERAL,), "binding_invalid", message, hint)
    else:
        names = ", ".join(quoted(each.string("binding_id") or "") for each in found[:_MOST_SHOWN])
        message = f"several bindings are for {what}, in the same scope: {names}"
        hint = "leave one of them, or say org_id and project_id in --context"
        faults.error(found[1].keys, "binding_invalid", message, hint)
    return None


def nearest(
    records: Iterable[Found], project: str | None, project_of: Callable[[Found], str | None]
) -> list[Found]:
    """See Bindings.nearest."""
    by_project = [(project_of(each), each) for each in records]
    own = [each for of, each in by_project if of and project in (None, of)]
    return own or [each for of, each in by_project if not of]


def narrow_export(export: DeclaredExport, binding: Binding | None) -> DeclaredExport:
    """The export as its binding narrows it: permissions, timeout, max_concurrency. Slots that the binding
    leaves empty are removed."""
    if binding is None:
        return export
    permissions = export.permissions
    if binding.permissions is not None:
        permissions = _narrow_permissions(permissions, binding.permissions)
    kept = tuple(slot for slot in permissions.slots if binding.slots.get(slot) is not None)
    most = binding.max_concurrency or 0
    return export._replace(
        permissions=permissions._replace(slots=kept),
        timeout=min(export.timeout, binding.timeout) if binding.timeout else export.timeout,
        max_concurrency=min(export.max_concurrency or most, most or export.max_concurrency),
    )


def is_selected(binding: str, context: Mapping[str, Any], percent: int) -> bool:
    """Whether a rollout includes a call. The same session always gets the same answer; without a session the
    run decides, then the delivery, then the invocation."""
    import hashlib

    keys = ("session_id", "run_id", "delivery_id", "invocation_id")
    key = next((str(context[name]) for name in keys if context.get(name)), "")
    digest = hashlib.sha256(f"{binding}\0{key}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def _narrow_permissions(declared: Permissions, wanted: Permissions) -> Permissions:
    """The intersection of both."""
    return Permissions(
        network=declared.network if declared.network == wanted.network else "none",
        filesystem=declared.filesystem if declared.filesystem == wanted.filesystem else "none",
        scopes=tuple(scope for scope in declared.scopes if scope in wanted.scopes),
        slots=tuple(slot for slot in declared.slots if slot in wanted.slots),
    )


class _Record:
    """One binding while it is read. Each step may add faults."""

    def __init__(
        self,
        faults: Faults,
        table: Table,
        plugin: Plugin,
        own_id: str = "",
        orgs: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """`own_id`: if the record has none. `orgs`: the known ones, with references to their secrets; None:
        nobody has a list of them."""
        self.faults, self.table, self.plugin, self.own_id, self.orgs = faults, table, plugin, own_id, orgs

    def read(self, files: bool, context: Mapping[str, Any] | None) -> Binding | None:
        binding = self._identity(context)
        export = None if binding is None else declared_by(self.plugin).find(binding.export)
        if binding is None or export is None:
            return None
        for fields in self._steps(binding.id, export, files, context):
            if self.faults.failed:
                return None
            binding = binding._replace(**fields)
        return binding

    def _steps(
        self, name: str, export: DeclaredExport, files: bool, context: Mapping[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """Fields of the binding. A step runs only if the one before has found no fault."""
        yield self._scope(context)
        yield self._config(export, files)
        yield self._secrets(export)
        yield self._status(calling=context is not None)
        yield self._rollout(name, context)
        yield self._policy(export)

    def _identity(self, context: Mapping[str, Any] | None) -> Binding | None:
        """The binding's own id, the package, its version and the export."""
        plugin = self.plugin
        own = self.own_id if self.own_id and "binding_id" not in self.table else self._text("binding_id")
        known = (("package_id", plugin.id, "the package is"), ("package_version", plugin.version, "it has"))
        for key, expected, fact in known:
            found = self._text(key)
            if not self.faults.failed and found != expected:
                message = f"{key} is {quoted(found)}, and {fact} {quoted(expected)}"
                self._error(self.table.at(key), message, "use the binding of this package and version")
            if self.faults.failed:
                return None
        name = self._text("export_id")
        if self.faults.failed:
            return None
        exports = [export.id for export in declared_by(plugin).exports]
        if name not in exports:
            hint = did_you_mean(name, exports) or f"it exports {', '.join(exports[:10])}"
            self._error(self.table.at("export_id"), f"the package has no export {quoted(name)}", hint)
            return None
        if context is not None and context.get("export_id", name) != name:
            message = f"the binding is for the export {quoted(name)}"
            hint = f"the call is for {quoted(str(context['export_id']))}: give the --binding of that export"
            self._error(self.table.at("export_id"), message, hint)
            return None
        return Binding(own, name)

    def _scope(self, context: Mapping[str, Any] | None) -> dict[str, Any]:
        scope = self._object("scope", required=True)
        org = self._text("org_id", scope)
        project = self._text("project_id", scope) if scope.data.get("project_id") is not None else ""
        _warn_unknown(self.faults, scope, ("org_id", "project_id"), "a scope")
        for key, bound in (("org_id", org), ("project_id", project)):
            asked = (context or {}).get(key)
            if asked and bound and asked != bound:
                message = f"the call is for {key} {quoted(str(asked))}, and the binding for {quoted(bound)}"
                self._error(scope.at(key), message, f"leave {key} out of --context, or use another binding")
        if self.orgs is not None and not self.faults.failed and org not in self.orgs:
            hint = "the operator adds orgs to the settings of the control plane"
            self._error(scope.at("org_id"), f"there is no org {quoted(org)}", hint)
        return {"org": org, "project": project}

    def _config(self, export: DeclaredExport, files: bool) -> dict[str, Any]:
        config: Mapping[str, Any] = self._object("config").data
        if files and not self.faults.failed:
            # Imported here: a launch without a call checks no configuration.
            from runner.contracts.vai.package.schemas import complete_config

            config, found = complete_config(self.plugin, export, config)
            for fault in found:
                self._error((*self.table.keys, *_keys_of(fault)), fault)
        return {"config": config}

    def _secrets(self, export: DeclaredExport) -> dict[str, Any]:
        table, declared = self._object("secrets"), export.permissions.slots
        org = str(self.table.table("scope").data.get("org_id"))
        for slot in table.data:
            self._secret(table, slot, declared, org)
        for slot in declared:
            if slot not in table:
                message = f"the binding says nothing about the secret slot {quoted(slot)} of the export"
                hint = f'add "{slot}": "secret://{org}/NAME", or null if the plugin does without it'
                self.faults.error(table.keys, SECRET_MISSING, message, hint)
        return {"slots": dict(table.data)}

    def _secret(self, table: Table, slot: str, declared: tuple[str, ...], org: str) -> None:
        value = table.data[slot]
        if slot not in declared:
            hint = did_you_mean(slot, declared) or f"it has {', '.join(declared[:10]) or 'none'}"
            self._error(table.at(slot), f"the export has no secret slot {quoted(slot)}", hint)
        elif value is not None:
            # The value is not shown: it may be the secret itself, written here by mistake.
            found = _SECRET.match(value) if isinstance(value, str) else None
            if found is None:
                message = f"the slot {quoted(slot)} has no reference of the form secret://ORG/NAME"
                self._error(table.at(slot), message, f"write secret://{org}/{slot}, or null")
            elif found["org"] != org:
                message = f"the slot {quoted(slot)} refers to the org {quoted(found['org'])}"
                self._error(table.at(slot), message, f"the scope is {quoted(org)}: use a secret of that org")
            elif self.orgs is not None and value not in self.orgs[org]:
                message = f"the org {quoted(org)} has no secret {quoted(found['name'])}"
                hint = "the operator adds secrets to the settings of the control plane"
                self.faults.error(table.at(slot), SECRET_MISSING, message, hint)

    def _status(self, *, calling: bool) -> dict[str, Any]:
        status = self._text("status")
        if self.faults.failed:
            return {}
        if status not in ("active", "disabled"):
            message = f"the status is {quoted(status)}: it is neither active nor disabled"
            self._error(self.table.at("status"), message, did_you_mean(status, ("active", "disabled")))
        elif status == "disabled":
            add = self.faults.error if calling else self.faults.warn
            add(self.table.at("status"), INACTIVE, "the binding is disabled", 'calls need "status": "active"')
        return {"active": status == "active"}

    def _rollout(self, binding: str, context: Mapping[str, Any] | None) -> dict[str, Any]:
        rollout = self._object("rollout")
        _warn_unknown(self.faults, rollout, ("traffic_percent",), "a rollout")
        percent = rollout.data.get("traffic_percent", 100)
        at = rollout.at("traffic_percent")
        if isinstance(percent, bool) or not isinstance(percent, int) or not 0 <= percent <= 100:
            self._error(at, "traffic_percent is not an integer from 0 to 100")
        elif context is not None and not is_selected(binding, context, percent):
            message = f"the rollout of {percent} percent leaves this call out"
            hint = "raise traffic_percent, or call in a session that it includes"
            self.faults.error(at, INACTIVE, message, hint)
        return {"traffic_percent": percent}

    # --- the policy -----------------------------------------------------------------------------------------

    def _policy(self, export: DeclaredExport) -> dict[str, Any]:
        policy = self._object("policy")
        _warn_unknown(self.faults, policy, _POLICY_KEYS, "the policy of a binding")
        declared = export.permissions
        permissions = Permissions(
            self._choice(policy, "network", declared.network, ("none", "egress")),
            self._choice(policy, "filesystem", declared.filesystem, ("none", "scratch", "assets_ro")),
            self._scopes(policy, declared.scopes),
            declared.slots,
        )
        timeout = self._lower(policy, "timeout_ms", round(export.timeout * 1000))
        return {
            "permissions": None if permissions == declared else permissions,
            "egress": self._egress(policy, permissions),
            "timeout": None if timeout is None else timeout / 1000,
            "max_concurrency": self._lower(policy, "max_concurrency", export.max_concurrency),
        }

    def _lower(self, policy: Table, key: str, declared: int) -> int | None:
        if key not in policy:
            return None
        value = policy.integer(key)
        if value is None or value < 1:
            self._error(policy.at(key), f"{key} is not an integer above 0")
            return None
        if declared and value > declared:
            self._warn_wider(policy.at(key), f"{key} is {value}, and the manifest has {declared}")
            return None
        return value

    def _choice(self, policy: Table, key: str, declared: Any, known: tuple[str, ...]) -> Any:
        value = policy.data.get(key, declared)
        if value not in known:
            self._error(policy.at(key), f"{key} is none of {', '.join(known)}")
        elif value not in ("none", declared):
            self._warn_wider(policy.at(key), f"{key} is {value}, and the manifest has {declared}")
        else:
            return value
        return declared

    def _scopes(self, policy: Table, declared: tuple[str, ...]) -> tuple[str, ...]:
        key = "gateway_api_scopes"
        wanted = self._texts(policy, key)
        if wanted is None:
            return declared
        for index, scope in enumerate(wanted):
            if scope not in declared:
                at = (*policy.at(key), index)
                self._warn_wider(at, f"the manifest does not declare the scope {quoted(scope)}")
        return tuple(scope for scope in declared if scope in wanted)

    def _egress(self, policy: Table, permissions: Permissions) -> tuple[str, ...] | None:
        hosts = self._texts(policy, "egress")
        if hosts is None:
            return None
        at = policy.at("egress")
        if len(hosts) > MOST_HOSTS:
            self._error(at, f"egress has {len(hosts)} hosts; {MOST_HOSTS} are the most")
            return None
        # Imported here: a launch that asks for no host does not pay for the rules about hosts.
        from sandbox.network.rules import HostRule, parse_rule, ports_fault

        rules: dict[HostRule, None] = {}
        for index, host in enumerate(hosts):
            try:
                rules[parse_rule(host, default_ports=(HTTPS_PORT,))] = None
            except ValueError as error:
                self._error((*at, index), f"{quoted(host)} {error}", "write example.com:443")
        if fault := ports_fault(rules):
            self._error(at, f"egress {fault}", "name fewer ports, or * for every port of a host")
        if permissions.network == "none":
            self._warn_wider(at, "egress names hosts, and the export has no network")
            return None
        return tuple(map(str, rules))

    # --- values ---------------------------------------------------------------------------------------------

    def _text(self, key: str, table: Table | None = None) -> str:
        table = self.table if table is None else table
        value = table.data.get(key)
        if isinstance(value, str) and 0 < len(value) <= MOST_ID_CHARACTERS and value.isprintable():
            return value
        fault = "is missing" if key not in table else "has to be a text of 1 to 256 printable characters"
        self._error(table.at(key), f"{key} {fault}", f'write "{key}": "…"')
        return ""

    def _texts(self, table: Table, key: str) -> list[str] | None:
        if key not in table:
            return None
        value = table.data[key]
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return value
        self._error(table.at(key), f"{key} is not a list of strings")
        return None

    def _object(self, key: str, *, required: bool = False) -> Table:
        value = self.table.data.get(key, None if required else {})
        if not isinstance(value, dict):
            fault = "is missing" if key not in self.table else "is not an object"
            self._error(self.table.at(key), f"{key} {fault}")
        return self.table.table(key)

    def _error(self, keys: KeyPath, message: str, hint: str = "") -> None:
        self.faults.error(keys, "binding_invalid", message, hint)

    def _warn_wider(self, keys: KeyPath, message: str) -> None:
        hint = "a binding can only narrow what the manifest declares"
        self.faults.warn(keys, "binding_wider", f"{message}: the value is not used", hint)


def _keys_of(fault: str) -> KeyPath:
    """The keys of a fault in the configuration, from the JSON pointer at its beginning. If the pointer leads
    nowhere, because it was cut or names a default, the nearest place above."""
    pointer = fault.partition(": ")[0] if fault.startswith("/") else ""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    return ("config", *(int(part) if part.isdecimal() and len(part) < 9 else part for part in parts))


def _warn_unknown(faults: Faults, table: Table, known: tuple[str, ...], what: str) -> None:
    for key in table.data:
        if key not in known:
            hint = "" if faults.full else did_you_mean(key, known)
            faults.warn(table.at(key), "unknown_key", f"{quoted(key)} is not a key of {what}", hint)
