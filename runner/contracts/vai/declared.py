"""What a manifest declares about its exports, stored in the exports of the Plugin. Only this module writes
and reads them.

An export of a Plugin is a kind and a tuple of strings, so the cache of manifests needs no code of this
contract.
"""

from __future__ import annotations

import json

from runner.plugin import Plugin
from sandbox.speed.typed import Any, Literal
from sandbox.speed.value import NamedTuple

Kind = Literal["harness", "tool", "hook", "compactor"]
ExecutionClass = Literal["inline", "worker", "isolated"]
EffectClass = Literal["read_only", "idempotent_write", "non_idempotent_write", "unknown"]

KINDS: tuple[Kind, ...] = ("tool", "hook", "compactor", "harness")

_EXPORT = "export."
_CHOSEN = "chosen"
_EFFECTIVE = "effective"
_INACTIVE = "inactive"
_OS = "os"
_ARCH = "arch"
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
    return (
        *((PLURAL[kind], tuple(e.id for e in declared.exports if e.kind == kind)) for kind in KINDS),
        *((_EXPORT + export.id, (_encode(export),)) for export in declared.exports),
        (_CHOSEN, (declared.chosen,)),
        (_EFFECTIVE, () if declared.effective is None else (_encode(declared.effective),)),
        (_INACTIVE, (declared.inactive,)),
        (_OS, declared.os),
        (_ARCH, declared.arch),
    )


def declared_by(plugin: Plugin) -> Declared:
    found = dict(plugin.exports)
    exports = tuple(_decode(row[0]) for kind, row in found.items() if kind.startswith(_EXPORT))
    narrowed = found.get(_EFFECTIVE, ())
    return Declared(
        exports,
        found.get(_CHOSEN, ("",))[0],
        _decode(narrowed[0]) if narrowed else None,
        found.get(_OS, ()),
        found.get(_ARCH, ()),
        found.get(_INACTIVE, ("",))[0],
    )


def _encode(export: DeclaredExport) -> str:
    fields = export._asdict()
    fields["permissions"] = export.permissions._asdict()
    return json.dumps(fields)


def _decode(text: str) -> DeclaredExport:
    fields: dict[str, Any] = json.loads(text)
    fields["permissions"] = Permissions(**_with_tuples(fields["permissions"]))
    return DeclaredExport(**_with_tuples(fields))


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
