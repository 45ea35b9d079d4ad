"""plugin/init: its params, and checks of the answer against the manifest.

Every plugin in use answers with its name and version, and further keys are ignored. Another version than the
manifest's is only a warning. The contract's text wants the manifest in the answer, with the ABI:

    {"manifest": {"plugin": {"name", "version", …}, …}, "abi_version": 2}

Such a manifest is an own copy of the plugin's, from when it was built. What it says has to agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.ainb.declared import CAPABILITIES, declared_by
from runner.contracts.ainb.terms import ABI_VERSION
from runner.plugin import Plugin
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import HandshakeFault, Identity, Notice, Setting, Violation
from runner.protocol.rpc_dialect import Welcome
from sandbox.document.diagnostic import quoted

INIT = "plugin/init"

# The host's pid is for plugins that watch whether their host runs. In the cage's pid namespace, pid 1 ends
# together with the host; the host's own pid does not exist there.
_HOST = {"kind": "cli", "pid": 1}
_MOST_CHARACTERS = 200  # of each text that a plugin reports about itself
_WORDS = frozenset(("name", "version", "manifest", "abi_version"))
_OPTIONAL = ("manifest", "abi_version")
_PLUGIN_WORDS = frozenset(("name", "version", "abi_version"))


def make_params(setting: Setting) -> dict[str, Any]:
    from runner.contracts.ainb.host.services import granted  # `exec --inspect` has no need of it

    return {
        "manifest_path": setting.plugin.manifest,
        "granted_capabilities": list(granted(setting.plugin, setting.allowance, setting.allows)),
        "abi_version": ABI_VERSION,
        "config": setting.config,
        "host": dict(_HOST),
    }


def read_handshake_answer(result: Any, plugin: Plugin) -> Welcome:
    """Raises HandshakeFault."""
    _require_clear(result, _WORDS, "it")
    # Null is nothing, as writers of JSON have it for an option that is not set.
    result = {key: value for key, value in result.items() if key not in _OPTIONAL or value is not None}
    manifest = result.get("manifest", {})
    _require_clear(manifest, frozenset(), "manifest")
    own = manifest.get("plugin", {})
    _require_clear(own, _PLUGIN_WORDS, "manifest.plugin")
    public = "name" in result or "version" in result
    _check_abi("abi_version", result.get("abi_version", ABI_VERSION if public else None))
    _check_abi("manifest.plugin.abi_version", own.get("abi_version", ABI_VERSION))
    name, version = (_said(key, result, own) for key in ("name", "version"))
    if name != plugin.id:
        message = f"it says that it is {quoted(name)}, its manifest says {quoted(plugin.id)}"
        raise _mismatch(message, name[:_MOST_CHARACTERS])
    for place, value in _tables(plugin).items():
        table, key = place.split(".")
        said = manifest.get(table)
        if isinstance(said, dict) and key in said and _plain(said[key]) != value:
            raise _mismatch(f"the manifest in its answer has another {place} than its manifest.toml")
    identity = Identity(
        id=name,
        version=version[:_MOST_CHARACTERS],
        protocol=str(ABI_VERSION),
        title=plugin.name,
        tools=dict(plugin.exports).get("tools", ()),
    )
    if version == plugin.version:
        return Welcome(identity)
    versions = {"manifest": plugin.version, "plugin": version[:_MOST_CHARACTERS]}
    return Welcome(identity, (Notice("version_differs", versions),))


def _said(key: str, *tables: Mapping[str, Any]) -> str:
    said = [table[key] for table in tables if key in table]
    if not said or not all(isinstance(each, str) for each in said):
        raise _malformed(f"{key} is missing or not a string")
    if len(set(said)) > 1:
        raise _mismatch(f"it says two things about its {key}")
    found: str = said[0]
    return found


def _check_abi(place: str, said: Any) -> None:
    if type(said) is not int:
        raise _malformed(f"{place} is missing or not an integer")
    if said != ABI_VERSION:
        raise _mismatch(f"it says {place} {said}, its manifest says {ABI_VERSION}")


def _tables(plugin: Plugin) -> Mapping[str, Any]:
    """What the manifest says, beside who it is, by the places of its values."""
    declared = declared_by(plugin)
    lists = {name: set(values) for name, values in declared.lists.items()}
    grants = {name: lists.get(name, True) if declared.allows(name) else False for name in CAPABILITIES}
    return {
        "plugin.version": plugin.version,
        **{f"capabilities.{name}": value for name, value in grants.items()},
        "provides.screens": set(declared.screens) or False,
        "provides.commands": set(declared.commands) or False,
        "provides.cli_namespaces": set(declared.cli_namespaces) or False,
        "provides.snapshots": set(declared.snapshots) or False,
        "subscribes.snapshots": set(declared.subscribes) or False,
        "subscribes.latest_state": set(declared.latest_state) or False,
        "lifecycle.spawn": dict(plugin.lifecycle).get("spawn", "lazy"),
    }


def _plain(value: Any) -> Any:
    """A value as `_tables` has it: a list as a set, and an empty one as False."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return set(value) or False
    return value if isinstance(value, bool | str) else None


def _require_clear(table: Any, words: frozenset[str], name: str) -> None:
    if not isinstance(table, dict):
        raise _malformed(f"{name} is not an object")
    if odd := odd_key(table, words):
        text = f"its answer to {INIT} has {odd}"
        raise HandshakeFault(Violation("malformed_response", text, "ambiguous"))


def _mismatch(message: str, name: str | None = None) -> HandshakeFault:
    hint = "check that the executable beside the manifest belongs to it"
    return HandshakeFault(Violation("handshake_failed", message, "identity_mismatch", hint, plugin_id=name))


def _malformed(why: str) -> HandshakeFault:
    message = f"its answer to {INIT} breaks the protocol: {why}"
    return HandshakeFault(Violation("handshake_failed", message, "malformed", "answer with name and version"))
