"""What the manifest says about exports, beside their names: the details of the Plugin."""

from __future__ import annotations

from collections.abc import Mapping

from runner.plugin import Plugin
from sandbox.speed.typed import Any
from sandbox.speed.value import NamedTuple

ADVERTISABLE = "extends.tools"
_OUTBOUND_METHOD = "outbound_tool.invoke"


class Configuration(NamedTuple):
    """The plugin takes a configuration."""

    array: bool  # one object per instance, instead of one
    schema: str  # JSON


class OutboundTool(NamedTuple):
    """A tool that the manifest describes instead of the handshake."""

    method: str
    seconds: float | None  # None: the limit of every tool
    description: str
    schema: str  # JSON


def outbound_tool(
    method: str | None, milliseconds: int | None, description: str | None, schema: str
) -> OutboundTool:
    # An integer in a manifest can have more digits than a time limit, and than Python converts to text.
    seconds = milliseconds / 1000 if milliseconds is not None and 0 < milliseconds < 2**63 else None
    return OutboundTool(method or _OUTBOUND_METHOD, seconds, description or "", schema)


def details_of(
    configuration: Configuration | None, outbound_tools: Mapping[str, OutboundTool]
) -> Mapping[str, Any]:
    tools = {name: tool._asdict() for name, tool in outbound_tools.items()}
    found = {"configuration": configuration and configuration._asdict(), "outbound_tools": tools}
    return {name: value for name, value in found.items() if value}


def configuration_of(plugin: Plugin) -> Configuration | None:
    found = plugin.details.get("configuration")
    return None if found is None else Configuration(**found)


def outbound_tools_of(plugin: Plugin) -> Mapping[str, OutboundTool]:
    return {name: OutboundTool(**tool) for name, tool in plugin.details.get("outbound_tools", {}).items()}
