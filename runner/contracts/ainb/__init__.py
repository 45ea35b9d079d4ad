"""ainb plugins, contract v2: a TOML manifest beside an executable, JSON-RPC with Content-Length headers."""

from __future__ import annotations

from runner.contracts.contract import CommandOutput, Contract, ContractVerb, ExampleCall
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.plugin import Allowance, Plugin
    from runner.protocol.dialect import Call, Dialect, Setting
    from runner.protocol.host_services import HostMethods, Services
    from runner.protocol.inspector import Inspector
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format

ABI_VERSION = 2

# Seconds. The contract gives the render's and the shutdown's; the others are its plan, or ours.
INIT_SECONDS = 10.0
RENDER_SECONDS = 2.0
CLI_SECONDS = 60.0
ACTION_SECONDS = 60.0
SHUTDOWN_SECONDS = 5.0


class AinbContract(Contract):
    name = "ainb"
    about = "JSON-RPC with Content-Length headers on stdio, contract v2; described by a TOML manifest"
    format: Format = "toml"
    file_names = ("manifest.toml",)
    sign = "abi_version in a [plugin] table"
    no_command_hint = "put the executable beside the manifest, under the plugin's name"
    kinds = ("tool", "render", "action", "event")
    context: Mapping[str, tuple[str, ...]] = {}
    declared = ("screens", "commands", "snapshots")
    plugin_roots = True
    arguments_are_input = True
    verbs = (ContractVerb("render", "runner.contracts.ainb.verb_render", "draw the screen of a plugin"),)
    example_call = ExampleCall("greeter", '{"argv": ["hello", "world"]}')

    def recognises(self, document: Document) -> bool:
        plugin = document.data.get("plugin")
        return isinstance(plugin, dict) and "abi_version" in plugin

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.ainb.manifest import read

        return read(document, home=home)

    def check_files(self, document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
        from runner.contracts.ainb.manifest import check_files

        return check_files(document, plugin)

    def json_schema(self) -> dict[str, object]:
        from runner.contracts.ainb.manifest import json_schema

        return json_schema()

    def dialect(self, setting: Setting) -> Dialect:
        from runner.contracts.ainb.dialect import make

        return make(setting)

    def inspector(self, setting: Setting) -> Inspector:
        from runner.contracts.ainb.inspector import make

        return make(setting)

    def services(self, plugin: Plugin, allowance: Allowance) -> HostMethods:
        from runner.contracts.ainb.host.services import AinbMethods

        return AinbMethods(plugin, allowance)

    def rights(self, plugin: Plugin) -> tuple[tuple[str, str], ...]:
        from runner.contracts.ainb.declared import declared_by

        declared = declared_by(plugin)
        return tuple((name, " ".join(declared.lists.get(name, ("all",)))) for name in declared.granted)

    def provide(self, plugin: Plugin, services: Services, allowance: Allowance) -> Services:
        from runner.contracts.ainb.host.services import provide

        return provide(plugin, services, allowance)

    def command_output(self, call: Call, value: Any) -> CommandOutput | None:
        from runner.contracts.ainb.calls import exit_status, take_bytes

        if call.kind != "tool":
            return None
        stdout, stderr = take_bytes(value["stdout"]), take_bytes(value["stderr"])
        return CommandOutput(stdout, stderr, exit_status(value["exit_code"]))

    def event(self, call: Call) -> tuple[str, Any]:
        return "plugin/handle_event", {"topic": call.name, "payload": call.input}


CONTRACT = AinbContract()
