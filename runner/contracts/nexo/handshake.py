"""Checks the plugin's answer to initialize: it has to be the manifest's plugin, with the manifest's tools.

Like the contract's own host, this does not check the version the plugin claims, unknown keys, or whether
the plugin has what the other lists of [plugin.extends] name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.nexo import exports
from runner.contracts.nexo import tools as catalogue
from runner.plugin import Plugin
from runner.protocol import wire
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import HandshakeFault, Identity, Violation
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault
from sandbox.document.diagnostic import printable, quoted
from sandbox.speed.value import NamedTuple

PROTOCOL = "1.10"

_MOST_CHARACTERS = 200  # of each text that a plugin reports about itself
_WORDS = frozenset(("manifest", "plugin", "id", "tools", "name"))  # keys that are read


class HandshakeAnswer(NamedTuple):
    identity: Identity
    tools: Mapping[str, catalogue.Tool]  # including those of the manifest
    missing: tuple[str, ...] = ()  # tools that the manifest declares and the plugin does not advertise


def read_handshake_answer(result: Any, plugin: Plugin) -> HandshakeAnswer:
    """Raises HandshakeFault."""
    manifest = result.get("manifest") if isinstance(result, dict) else None
    said = manifest.get("plugin") if isinstance(manifest, dict) else None
    tools = result.get("tools") if isinstance(result, dict) else None
    for table in (result, manifest, said, *(tools if isinstance(tools, list) else ())):
        if odd := odd_key(table, _WORDS):
            text = f"its answer to initialize has {odd}"
            raise HandshakeFault(Violation("malformed_response", text, "ambiguous"))
    name = said.get("id") if isinstance(said, dict) else None
    if not isinstance(name, str):
        message = "its answer to initialize has no result.manifest.plugin.id to tell which plugin it is"
        raise _fault("identity_missing", message)
    # An instance ("whatsapp.sales") may answer with the name of its plugin ("whatsapp").
    if name not in (plugin.id, plugin.id.partition(".")[0]):
        message = f"it says that it is {quoted(name)}, its manifest says {quoted(plugin.id)}"
        hint = "check that entrypoint.command starts the program of this manifest"
        raise _fault("identity_mismatch", message, hint)
    declared = dict(plugin.exports).get(exports.ADVERTISABLE, ())
    try:
        found = catalogue.read_advertised(result.get("tools", []), declared)
    except catalogue.CatalogueFault as fault:
        raise _fault("tool_catalogue", str(fault)) from None
    if declared and not found:
        what = "an empty list of tools" if "tools" in result else "no tools"
        message = f"its answer to initialize has {what}, and its manifest declares {quoted(declared[0])}"
        hint = "advertise it in result.tools, or remove it from [plugin.extends] tools"
        raise _fault("tools_missing", message, hint)
    tools = catalogue.manifest_tools(plugin) | found
    identity = Identity(
        id=name,
        version=_text(said, "version"),
        protocol=PROTOCOL,
        title=_text(said, "name"),
        tools=tuple(tools),
        details={"server_version": _text(result, "server_version")},
    )
    return HandshakeAnswer(identity, tools, tuple(tool for tool in declared if tool not in found))


def check_config(configuration: exports.Configuration, config: Any) -> None:
    """Whether a configuration fits the manifest's schema. Raises HandshakeFault."""
    if configuration.array and not isinstance(config, list | tuple):
        raise _misfit("it has to be an array, with one entry for each instance")
    document, cause, detail, _ = wire.message(configuration.schema.encode("utf-8", "replace"))
    if cause:
        raise _misfit(detail)
    try:
        schema = Schema(document)
        values = config if configuration.array else [config]
        faults = [str(fault) for value in values for fault in schema.faults(value)]
    except SchemaFault as fault:
        raise _misfit(f"the schema cannot be used: {fault}") from None
    if faults:
        raise _misfit("; ".join(faults[:5]))


def _fault(cause: str, message: str, hint: str = "") -> HandshakeFault:
    return HandshakeFault(Violation("handshake_failed", message, cause, hint))


def _misfit(why: str) -> HandshakeFault:
    hint = "[plugin.config_schema] in the manifest describes it"
    return _fault("config_invalid", f"its configuration does not fit: {printable(why)}", hint)


def _text(table: Any, name: str) -> str:
    value = table.get(name) if isinstance(table, dict) else None
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else ""
