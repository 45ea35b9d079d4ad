"""The tools a plugin advertises in its handshake, each with the schema of its arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from runner.contracts.nexo import errors, exports
from runner.plugin import Plugin
from runner.protocol import wire
from runner.protocol.dialect import CallRefused, Refusal, Violation
from runner.protocol.memory import BoundedCache
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault
from sandbox.document.diagnostic import did_you_mean, printable, quoted


class CatalogueFault(Exception):
    """The list of tools breaks the contract, or the schema of a tool cannot be used."""


class Tool:
    """One tool. Its schema is compiled when the tool is called: most tools never are."""

    def __init__(
        self,
        name: str,
        description: str,
        schema: Any,
        method: str = "tool.invoke",
        seconds: float | None = None,
    ) -> None:
        self.name = name
        self.description = description
        self.schema = schema
        self.method = method
        self.seconds = seconds

    def faults(self, arguments: Any, compiled: BoundedCache[Schema]) -> list[str]:
        """The faults of the arguments. `compiled`: by the name of the tool. Raises CatalogueFault."""
        schema = compiled.get(self.name)
        if schema is None:
            try:
                schema = Schema(self.schema)
            except SchemaFault as fault:
                raise CatalogueFault(
                    f"the schema of the tool {quoted(self.name)} cannot be used: {fault}"
                ) from None
            compiled.put(self.name, schema, schema.size)
        return [printable(str(fault)) for fault in schema.faults(arguments)]

    def shown(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "input_schema": self.schema}


def read_advertised(tools: object, declared: Collection[str]) -> dict[str, Tool]:
    """The `tools` of an initialize result. Raises CatalogueFault."""
    if not isinstance(tools, list):
        raise CatalogueFault("its tools are not an array")
    found: dict[str, Tool] = {}
    for place, entry in enumerate(tools):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise CatalogueFault(f"entry {place} of its tools has no name")
        if not isinstance(entry.get("description"), str):
            raise CatalogueFault(f"the tool {quoted(name)} has no description")
        if not isinstance(entry.get("input_schema"), dict):
            raise CatalogueFault(f"the tool {quoted(name)} has no input_schema, or one that is not an object")
        if name not in declared:
            raise CatalogueFault(
                f"it advertises the tool {quoted(name)}, which is not in [plugin.extends] tools"
            )
        if name in found:
            raise CatalogueFault(f"it advertises the tool {quoted(name)} twice")
        found[name] = Tool(name, entry["description"], entry["input_schema"])
    return found


def find_tool(
    token: int, name: str, arguments: Any, tools: Mapping[str, Tool], compiled: BoundedCache[Schema]
) -> Tool:
    """The tool of that name, if the arguments fit it. Raises CallRefused."""
    tool = tools.get(name)
    if tool is None:
        message = f"the plugin does not offer the tool {quoted(name)}"
        hint = did_you_mean(name, tools) or f"it offers: {', '.join(tools) or 'none'}"
        raise CallRefused(Violation("tool_not_exposed", message, "tool", hint, token))
    try:
        faults = tool.faults(arguments, compiled)
    except CatalogueFault as fault:
        hint = "call it with --kind method as tool.invoke, which checks no schema"
        raise CallRefused(Violation("malformed_response", str(fault), "bad_schema", hint, token)) from None
    if faults:
        message = f"the arguments do not fit the schema of {quoted(name)}: {'; '.join(faults[:3])}"
        code = str(errors.TOOL_ARGUMENT_INVALID)
        raise CallRefused(Refusal(token, code, message, "invalid_arguments", {"details": faults}))
    return tool


def manifest_tools(plugin: Plugin) -> dict[str, Tool]:
    """Tools that the manifest describes itself."""
    return {
        name: Tool(name, tool.description, _schema(tool.schema), tool.method, tool.seconds)
        for name, tool in exports.outbound_tools_of(plugin).items()
    }


def _schema(text: str) -> Any:
    """The schema in a manifest. The manifest's rules ensure that it is an object, but they accept more JSON
    than the wire does. If the wire refuses it, the schema is None."""
    value, cause, *_ = wire.message(text.encode("utf-8", "replace"))
    return None if cause else value
