"""rune-terminal plugins (rterm.plugin.v1): a JSON bundle manifest, one request per process."""

from __future__ import annotations

from collections.abc import Mapping

from runner.plugin import Switches
from sandbox.document.read import Document, Format

NAME = "rune"
FORMAT: Format = "json"
FILE_NAMES = ("rterm-plugin.json",)
SIGN = "protocol_version rterm.plugin.v1, or plugin_id and process"
IN_SUBDIRECTORY = True
OPERATORS_OWN_COMMAND = False


def recognises(document: Document) -> bool:
    data = document.data
    protocol = data.get("protocol_version")
    if isinstance(protocol, str) and protocol.strip().startswith("rterm.plugin."):
        return True
    return "plugin_id" in data and "process" in data


def switches(environ: Mapping[str, str]) -> Switches:
    return Switches()
