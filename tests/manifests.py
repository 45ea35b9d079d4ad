"""Manifests of the plugins that tests write. A test says only what it is about."""

from __future__ import annotations

SANDBOX = "[plugin.sandbox]\nenabled = true\n"


def nexo(plugin: str, command: str = "./run", *, version: str = "1.0.0") -> str:
    """The smallest manifest for nexo. It ends with the table of the entrypoint, which may go on."""
    return (
        f'[plugin]\nid = "{plugin}"\nversion = "{version}"\nname = "Demo"\ndescription = "d"\n'
        f'min_nexo_version = ">=0.1"\n[plugin.entrypoint]\ncommand = "{command}"\n'
    )
