"""Exports of the Plugin that hold more than names. Only this module writes and reads them.

An export is a kind and a tuple of strings, so the cache of manifests needs no code of this contract.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.plugin import Plugin
from sandbox.speed.value import NamedTuple

ADVERTISABLE = "extends.tools"
_CONFIGURATION = "config_schema"
_OUTBOUND_TOOL = "tools.outbound."

_OUTBOUND_METHOD = "outbound_tool.invoke"

Export = tuple[str, tuple[str, ...]]


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


def configuration(shape: str | None, schema: str) -> Export:
    return _CONFIGURATION, (shape or "object", schema)


def outbound_tool(
    name: str, method: str | None, milliseconds: int | None, description: str | None, schema: str
) -> Export:
    # An integer in a manifest can have more digits than Python converts to text.
    clock = str(milliseconds) if milliseconds is not None and 0 < milliseconds < 2**63 else ""
    return _OUTBOUND_TOOL + name, (method or _OUTBOUND_METHOD, clock, description or "", schema)


def configuration_of(plugin: Plugin) -> Configuration | None:
    for kind, row in plugin.exports:
        if kind == _CONFIGURATION:
            shape, schema = row
            return Configuration(shape == "array", schema)
    return None


def outbound_tools_of(plugin: Plugin) -> Mapping[str, OutboundTool]:
    found: dict[str, OutboundTool] = {}
    for kind, row in plugin.exports:
        if kind.startswith(_OUTBOUND_TOOL):
            method, clock, description, schema = row
            seconds = int(clock) / 1000 if clock else None
            found[kind.removeprefix(_OUTBOUND_TOOL)] = OutboundTool(method, seconds, description, schema)
    return found
