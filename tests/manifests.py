"""Manifests of the plugins that tests write. A test says only what it is about."""

from __future__ import annotations

from typing import Any

SANDBOX = "[plugin.sandbox]\nenabled = true\n"


def nexo(plugin: str, command: str = "./run", *, version: str = "1.0.0") -> str:
    """The smallest manifest for nexo. It ends with the table of the entrypoint, which may go on."""
    return (
        f'[plugin]\nid = "{plugin}"\nversion = "{version}"\nname = "Demo"\ndescription = "d"\n'
        f'min_nexo_version = ">=0.1"\n[plugin.entrypoint]\ncommand = "{command}"\n'
    )


def rune(plugin: str, tool: str, command: str = "./run", **process: object) -> dict[str, Any]:
    """The smallest bundle for rune. It has one tool."""
    return {
        "plugin_id": plugin,
        "plugin_version": "1",
        "protocol_version": "rterm.plugin.v1",
        "process": {"command": command, **process},
        "tools": [{"name": tool}],
    }
