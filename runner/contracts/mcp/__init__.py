"""MCP servers on stdio, from the configuration file people already have."""

from __future__ import annotations

from collections.abc import Mapping

from runner.plugin import Switches
from sandbox.document.read import Document, Format

NAME = "mcp"
FORMAT: Format = "json"
FILE_NAMES = ("mcp.json", ".mcp.json", "claude_desktop_config.json")
SIGN = "an mcpServers object"
IN_SUBDIRECTORY = False
OPERATORS_OWN_COMMAND = True


def recognises(document: Document) -> bool:
    return isinstance(document.data.get("mcpServers"), dict)


def switches(environ: Mapping[str, str]) -> Switches:
    return Switches()
