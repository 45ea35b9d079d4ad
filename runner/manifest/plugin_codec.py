"""A Plugin as JSON and back, written out by hand: the launch path reads it without any model library.

Reading is strict. What was not written by `encode` raises ValueError, and the manifest is read anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from runner.plugin import Entrypoint, Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.policy.policy import FRACTIONAL_LIMITS
from sandbox.spec import (
    NETWORK_ORDER,
    SECCOMP_ORDER,
    EnvRequest,
    KeyPath,
    Limits,
    Network,
    PathRequest,
    Project,
    SandboxSpec,
)

T = TypeVar("T")

_LIMITS = Limits._fields


def encode(plugin: Plugin, diagnostics: tuple[Diagnostic, ...]) -> dict[str, object]:
    spec, entrypoint = plugin.spec, plugin.entrypoint
    return {
        "id": plugin.id,
        "version": plugin.version,
        "contract": plugin.contract,
        "name": plugin.name,
        "description": plugin.description,
        "manifest": plugin.manifest,
        "root": plugin.root,
        "entrypoint": entrypoint
        and [entrypoint.command, entrypoint.args, entrypoint.directory, entrypoint.bare_environment],
        "enabled": spec.enabled,
        "paths": spec.paths,
        "network": spec.network,
        "env": spec.env,
        "seccomp": spec.seccomp,
        "limits": [getattr(spec.limits, name) for name in _LIMITS],
        "where": spec.where,
        "exports": plugin.exports,
        "capabilities": plugin.capabilities,
        "timeouts": plugin.timeouts,
        "project": plugin.project,
        "diagnostics": diagnostics,
    }


def decode(data: object) -> tuple[Plugin, tuple[Diagnostic, ...]]:
    if not isinstance(data, dict) or set(data) != _KEYS:
        raise ValueError("not a plugin")
    contract = _text(data["contract"])
    if not contract.isidentifier():
        raise ValueError("not a contract")
    seccomp = data["seccomp"]
    if seccomp is not None and seccomp not in SECCOMP_ORDER:
        raise ValueError("not a profile")
    spec = SandboxSpec(
        enabled=_flag(data["enabled"]),
        paths=_many(data["paths"], _path),
        network=None if data["network"] is None else _network(data["network"]),
        env=_many(data["env"], _env),
        seccomp=seccomp,
        limits=_limits(data["limits"]),
        where=_many(data["where"], _place),
    )
    plugin = Plugin(
        id=_text(data["id"]),
        version=_text(data["version"]),
        contract=contract,
        name=_text(data["name"]),
        description=_text(data["description"]),
        manifest=_text(data["manifest"]),
        root=None if data["root"] is None else _text(data["root"]),
        entrypoint=None if data["entrypoint"] is None else _entrypoint(data["entrypoint"]),
        spec=spec,
        exports=_many(data["exports"], _export),
        capabilities=_many(data["capabilities"], _text),
        timeouts=_many(data["timeouts"], _timeout),
        project=None if data["project"] is None else _project(data["project"]),
    )
    return plugin, _many(data["diagnostics"], _diagnostic)


_KEYS = {
    "id",
    "version",
    "contract",
    "name",
    "description",
    "manifest",
    "root",
    "entrypoint",
    "enabled",
    "paths",
    "network",
    "env",
    "seccomp",
    "limits",
    "where",
    "exports",
    "capabilities",
    "timeouts",
    "project",
    "diagnostics",
}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a string")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not a boolean")
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("not an integer")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("not a number")
    return float(value)


def _many(value: object, each: Callable[[Any], T]) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise ValueError("not an array")
    return tuple([each(item) for item in value])


def _row(value: object, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError("not a row")
    return value


def _key(value: object) -> str | int:
    return value if isinstance(value, str) else _whole(value)


def _keys(value: object) -> KeyPath:
    return _many(value, _key)


def _path(value: object) -> PathRequest:
    path, access, required, where = _row(value, 4)
    if access not in ("read", "write"):
        raise ValueError("not an access")
    return PathRequest(_text(path), access, _flag(required), _keys(where))


def _network(value: object) -> Network:
    mode, hosts, where = _row(value, 3)
    if mode not in NETWORK_ORDER:
        raise ValueError("not a network")
    return Network(mode, _many(hosts, _text), _keys(where))


def _env(value: object) -> EnvRequest:
    name, text, required, where = _row(value, 4)
    return EnvRequest(_text(name), None if text is None else _text(text), _flag(required), _keys(where))


def _limits(value: object) -> Limits:
    found: dict[str, Any] = {}
    for name, amount in zip(_LIMITS, _row(value, len(_LIMITS)), strict=True):
        if amount is not None:
            found[name] = _number(amount) if name in FRACTIONAL_LIMITS else _whole(amount)
    return Limits(**found)


def _place(value: object) -> tuple[str, KeyPath]:
    name, where = _row(value, 2)
    return _text(name), _keys(where)


def _entrypoint(value: object) -> Entrypoint:
    command, args, directory, bare = _row(value, 4)
    return Entrypoint(_text(command), _many(args, _text), _text(directory), _flag(bare))


def _export(value: object) -> tuple[str, tuple[str, ...]]:
    kind, names = _row(value, 2)
    return _text(kind), _many(names, _text)


def _timeout(value: object) -> tuple[str, float]:
    phase, seconds = _row(value, 2)
    return _text(phase), _number(seconds)


def _project(value: object) -> Project:
    path, named, where, within, *later = _row(value, 6)
    if later != ["", ""]:
        raise ValueError("not a project of a manifest")
    return Project(_text(path), _flag(named), _keys(where), _text(within))


def _diagnostic(value: object) -> Diagnostic:
    file, line, column, rule, message, hint, severity = _row(value, 7)
    if severity != "warning":
        raise ValueError("an error is never cached")
    return Diagnostic(
        _text(file), _whole(line), _whole(column), _text(rule), _text(message), _text(hint), severity
    )
