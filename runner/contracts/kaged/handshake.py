"""The handshake: the params of initialize, and checks of the answer against the manifest.

The checks have an order, and the first that fails decides: shape, name, API version, methods, notifications,
capabilities. Another version than the manifest's is only a warning: plugins in use differ from theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import runner
from runner.contracts.kaged.declared import Declared, declared_by
from runner.contracts.kaged.terms import API_VERSION
from runner.plugin import Plugin
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import HandshakeFault, Identity, Notice, Setting, Violation
from runner.protocol.rpc_dialect import Welcome
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault
from sandbox.document.diagnostic import cut, printable, quoted

_MOST_CHARACTERS = 200  # of each text that a plugin reports about itself
_MOST_SHOWN = 5  # entries of a list, in a message
_MOST_FAULTS = 5

_LISTS = ("methods", "notifications", "capabilities_used")
_WORDS = frozenset(("name", "version", "api_version", *_LISTS))


# --- what it is told --------------------------------------------------------------------------------------


def make_params(setting: Setting, declared: Declared) -> dict[str, Any]:
    """The params of initialize. Raises HandshakeFault."""
    params: dict[str, Any] = {
        "daemon_version": runner.__version__,
        "api_version": API_VERSION,
        "plugin_name": setting.plugin.id,
        "storage_available": "storage" in setting.services,
        "projects": [declared.project_id],
    }
    config = setting.config
    if config is None or isinstance(config, Mapping):
        config = {**declared.defaults, **(config or {})}  # the knobs' defaults, where nothing was set
    # Also if nobody gave any: the schema may require some.
    if setting.config is not None or declared.config_schema is not None:
        given = setting.config is not None
        _check("configuration", "config_schema", config, declared.config_schema, given=given)
    if config or setting.config is not None:
        params["config"] = config
    if setting.secrets or declared.system_config_schema is not None:
        values, given = dict(setting.secrets or {}), setting.secrets is not None
        _check("secrets", "system_config_schema", values, declared.system_config_schema, given=given)
        if given:
            params["system_config"] = values
    return params


def _check(what: str, key: str, value: Any, schema: Any, *, given: bool) -> None:
    """Raises HandshakeFault. The schema's faults name the place and the rule, and never a value."""
    option = "--secrets" if what == "secrets" else "--config"
    hint = f"{'correct' if given else 'give'} {option}; {key} in the manifest describes it"
    if schema is None:
        message = f"the manifest has no {key} to check the {what} with, so nothing was sent"
        raise _misfit(what, message, f"leave {option} out, or declare {key} in the manifest")
    if not isinstance(value, Mapping):
        raise _misfit(what, f"{option} does not fit the manifest's {key}: it has to be an object", hint)
    try:
        faults = Schema(schema).faults(value)
    except SchemaFault as fault:
        raise _misfit(what, f"the {key} of the manifest cannot be used: {printable(str(fault))}") from None
    if faults:
        text = printable("; ".join(faults[:_MOST_FAULTS]))
        who = option if given else f"without {option}, what the plugin would get"
        raise _misfit(what, f"{who} does not fit the manifest's {key}: {text}", hint)


def _misfit(what: str, message: str, hint: str = "") -> HandshakeFault:
    cause = "secrets_invalid" if what == "secrets" else "config_invalid"
    return _fault(message, cause, hint)


def _fault(message: str, cause: str, hint: str = "") -> HandshakeFault:
    return HandshakeFault(Violation("handshake_failed", message, cause, hint))


# --- what it answers --------------------------------------------------------------------------------------


def read_handshake_answer(result: Any, plugin: Plugin) -> Welcome:
    """Raises HandshakeFault."""
    said = _shape(result)
    declared = declared_by(plugin)
    if said["name"] != plugin.id:
        message = f"it says that it is {quoted(said['name'])}, its manifest says {quoted(plugin.id)}"
        hint = "check that the manifest's command starts the program of this manifest"
        shown = cut(said["name"], _MOST_CHARACTERS)
        raise HandshakeFault(
            Violation("handshake_failed", message, "identity_mismatch", hint, plugin_id=shown)
        )
    if said["api_version"] != API_VERSION:
        message = f"it speaks version {said['api_version']} of the API; the runner speaks {API_VERSION}"
        hint = f"use a version of the plugin that speaks {API_VERSION}"
        raise HandshakeFault(Violation("protocol_version_mismatch", message, "api_version", hint))
    if missing := _beyond(declared.methods, said["methods"]):
        message = f"the plugin does not offer {_shown(missing)}, which its manifest lists under methods"
        hint = "remove it from the manifest's methods, or list it in the answer to initialize"
        raise HandshakeFault(Violation("tool_not_exposed", message, "method_missing", hint))
    if extra := _beyond(said["notifications"], declared.notifications):
        message = f"it wants to send {_shown(extra)}, which its manifest does not list under notifications"
        raise _fault(message, "notification_undeclared", "list it in the manifest's notifications")
    if extra := _beyond(said["capabilities_used"], plugin.capabilities):
        message = f"it uses {_shown(extra)}, which its manifest does not list under capabilities"
        hint = "list exactly this text in the manifest's capabilities"
        raise HandshakeFault(Violation("capability_not_declared", message, "capability_violation", hint))
    identity = Identity(
        id=said["name"],
        version=cut(said["version"], _MOST_CHARACTERS),
        protocol=str(API_VERSION),
        title=plugin.name,
        tools=tuple(declared.tools),
        details={name: said[name] for name in _LISTS},
    )
    return Welcome(identity, tuple(_warnings(said, plugin, declared)))


def _warnings(said: Mapping[str, Any], plugin: Plugin, declared: Declared) -> list[Notice]:
    found = []
    if said["version"] != plugin.version:
        shown = cut(said["version"], _MOST_CHARACTERS)
        versions = {"manifest": plugin.version, "plugin": shown}
        found.append(Notice("version_differs", versions))
    if extra := _beyond(said["methods"], (*declared.methods, *declared.tools)):
        why = f"{_shown(extra)}: neither a method nor a tool of the manifest"
        found.append(Notice("methods_ignored", {"count": len(extra), "why": why}))
    return found


def _shape(result: Any) -> dict[str, Any]:
    """The answer, which has all that the contract names. Raises HandshakeFault."""
    if not isinstance(result, dict):
        raise _malformed("it is not an object")
    if odd := odd_key(result, _WORDS):
        raise HandshakeFault(
            Violation("malformed_response", f"its answer to initialize has {odd}", "ambiguous")
        )
    for name in ("name", "version"):
        if not isinstance(result.get(name), str):
            raise _malformed(f"{name} is missing or not a string")
    if type(result.get("api_version")) is not int:
        raise _malformed("api_version is missing or not an integer")
    for name in _LISTS:
        value = result.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _malformed(f"{name} is missing or not an array of strings")
    return result


def _malformed(why: str) -> HandshakeFault:
    return _fault(f"its answer to initialize breaks the protocol: {why}", "malformed")


def _beyond(some: Any, known: Any) -> list[str]:
    """Those of `some` that are not in `known`."""
    known = frozenset(known)
    return [each for each in some if each not in known]


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(quoted(name) for name in names[:_MOST_SHOWN]) + more
