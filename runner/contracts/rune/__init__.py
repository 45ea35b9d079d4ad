"""rune-terminal plugins (rterm.plugin.v1): a JSON bundle manifest, one request per process."""

from __future__ import annotations

from runner.contracts.contract import Contract
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.contracts.contract import Layout
    from runner.plugin import Plugin
    from runner.supervision import Supervision
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format


class RuneContract(Contract):
    name = "rune"
    about = "bundles of rune-terminal, rterm.plugin.v1: one handshake, one request, one response"
    format: Format = "json"
    file_names = ("rterm-plugin.json",)
    sign = "protocol_version rterm.plugin.v1, or plugin_id and process"
    layout: Layout = "archive"
    no_command_hint = 'give the manifest a command: "process": {"command": "./plugin"}'
    calls: Mapping[str, tuple[str, ...]] = {
        "tool": ("workspace_id", "widget_id", "repo_root", "role_id", "mode_id")
    }
    one_shot = True

    def recognises(self, document: Document) -> bool:
        data = document.data
        protocol = data.get("protocol_version")
        if isinstance(protocol, str) and protocol.strip().startswith("rterm.plugin."):
            return True
        return "plugin_id" in data and "process" in data

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.rune.manifest import read

        return read(document, home=home)

    def check_files(self, document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
        from runner.contracts.rune.files import check_files

        return check_files(document, plugin)

    def supervision(self, plugin: Plugin) -> Supervision:
        from runner.supervision import Supervision

        return Supervision(calls=16)  # each in a process of its own


CONTRACT = RuneContract()
