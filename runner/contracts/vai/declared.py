"""What a manifest declares about its exports: the details of the Plugin."""

from __future__ import annotations

from runner.plugin import Plugin
from sandbox.speed.typed import Any, Literal, Mapping
from sandbox.speed.value import NamedTuple

Kind = Literal["harness", "tool", "hook", "compactor"]
ExecutionClass = Literal["inline", "worker", "isolated"]
EffectClass = Literal["read_only", "idempotent_write", "non_idempotent_write", "unknown"]

KINDS: tuple[Kind, ...] = ("tool", "hook", "compactor", "harness")

PLURAL = {"tool": "tools", "hook": "hooks", "compactor": "compactors", "harness": "harnesses"}


class Permissions(NamedTuple):
    """Permissions as declared: the operator may grant fewer."""

    network: Literal["none", "egress"] = "none"
    filesystem: Literal["none", "scratch", "assets_ro"] = "none"
    scopes: tuple[str, ...] = ()  # gateway_api_scopes
    slots: tuple[str, ...] = ()  # secret_slots


class DeclaredExport(NamedTuple):
    id: str
    kind: Kind
    display_name: str
    description: str = ""
    execution_class: ExecutionClass = "isolated"
    timeout: float = 20.0  # seconds
    max_concurrency: int = 0  # 0: the host's own limit
    permissions: Permissions = Permissions()
    # Names of files in the package; empty: there is none.
    config_schema: str = ""
    input_schema: str = ""
    output_schema: str = ""
    effect_class: EffectClass = "unknown"  # of a tool
    streaming: bool = False  # of a tool
    mode: str = ""  # of a harness
    fidelity: str = ""  # of a harness
    supports: tuple[str, ...] = ()  # of a harness
    subscribes_to: tuple[str, ...] = ()  # of a hook
    target_context: str = ""  # of a compactor
    supports_pinned_items: bool = False  # of a compactor


class Declared(NamedTuple):
    exports: tuple[DeclaredExport, ...]
    chosen: str = ""  # the id of the export that the cage is for; empty: none was chosen
    # The chosen export as its binding narrows it: what its cage is made of. None: none was chosen.
    effective: DeclaredExport | None = None
    os: tuple[str, ...] = ()  # systems it was built for; empty: any
    arch: tuple[str, ...] = ()  # machines it was built for; empty: any
    inactive: str = ""  # reason the binding of the chosen export is inactive, or ''

    def find(self, name: str) -> DeclaredExport | None:
        return next((export for export in self.exports if export.id == name), None)


def exports_of(declared: Declared) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What `runner tools` lists."""
    return tuple((PLURAL[kind], tuple(e.id for e in declared.exports if e.kind == kind)) for kind in KINDS)


def details_of(declared: Declared) -> Mapping[str, Any]:
    effective = None if declared.effective is None else _plain(declared.effective)
    return {**declared._asdict(), "exports": tuple(map(_plain, declared.exports)), "effective": effective}


def declared_by(plugin: Plugin) -> Declared:
    found = {"exports": (), "effective": None, **plugin.details}
    exports, effective = tuple(map(_export, found["exports"])), found["effective"]
    return Declared(**{**found, "exports": exports, "effective": effective and _export(effective)})


def _plain(export: DeclaredExport) -> Mapping[str, Any]:
    return {**export._asdict(), "permissions": export.permissions._asdict()}


def _export(fields: Mapping[str, Any]) -> DeclaredExport:
    return DeclaredExport(**{**fields, "permissions": Permissions(**fields["permissions"])})
