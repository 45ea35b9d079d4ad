"""ainb plugins, contract v2: a TOML manifest beside an executable, JSON-RPC with Content-Length headers."""

from __future__ import annotations

from runner.contracts.contract import CommandOutput, Contract, ContractVerb, Example, Listing
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.contracts.contract import Layout
    from runner.plugin import Allowance, Plugin
    from runner.protocol.bus import Handler
    from runner.protocol.dialect import Call
    from runner.protocol.host_services import Ask, HostMethods, Services
    from runner.supervision import Supervision
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format


class AinbContract(Contract):
    name = "ainb"
    about = "JSON-RPC with Content-Length headers on stdio, contract v2; described by a TOML manifest"
    format: Format = "toml"
    file_names = ("manifest.toml",)
    sign = "abi_version in a [plugin] table"
    no_command_hint = "put the executable beside the manifest, under the plugin's name"
    calls: Mapping[str, tuple[str, ...]] = dict.fromkeys(("tool", "render", "action", "event"), ())
    lists = (
        Listing("tools"),
        *(Listing(what, declared=True) for what in ("screens", "commands", "snapshots")),
    )
    layout: Layout = "root"
    commands = True
    verbs = (
        ContractVerb(
            "render",
            "runner.contracts.ainb.verb_render",
            "draw the screen of a plugin: in colour on a terminal, as text elsewhere",
        ),
    )
    example = Example("greeter", '{"argv": ["hello", "world"]}')

    def command_output(self, call: Call, value: Any) -> CommandOutput | None:
        from runner.contracts.ainb.calls import exit_status, take_bytes

        if call.kind != "tool":
            return None
        stdout, stderr = take_bytes(value["stdout"]), take_bytes(value["stderr"])
        return CommandOutput(stdout, stderr, exit_status(value["exit_code"]))

    def recognises(self, document: Document) -> bool:
        plugin = document.data.get("plugin")
        return isinstance(plugin, dict) and "abi_version" in plugin

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.ainb.manifest import read

        return read(document, home=home)

    def check_files(self, document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
        from runner.contracts.ainb.files import check_files

        return check_files(document, plugin)

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

    def actions(self, plugin: Plugin, ask: Ask) -> Mapping[str, Handler]:
        from runner.contracts.ainb.declared import declared_by
        from runner.contracts.ainb.host.services import actions_of

        return actions_of(declared_by(plugin), ask)

    def declared_tools(self, plugin: Plugin) -> Sequence[Mapping[str, Any]]:
        argv = {"type": "array", "items": {"type": "string"}, "description": "the words of its command line"}
        schema = {"type": "object", "properties": {"argv": argv}, "additionalProperties": False}
        names = dict(plugin.exports).get("tools", ())
        return [{"name": each, "description": plugin.description, "input_schema": schema} for each in names]

    def supervision(self, plugin: Plugin) -> Supervision:
        from runner.contracts.ainb.declared import declared_by
        from runner.supervision import Supervision

        given, declared = dict(plugin.lifecycle), declared_by(plugin)
        # A plugin that is away would miss what is published. Of some topics it only needs the latest.
        awaited = set(declared.subscribes) - set(declared.latest_state)
        reap = given.get("idle_reap", "never")
        first = float(given.get("backoff_first", 1.0))
        return Supervision(
            eager=given.get("spawn") == "eager",
            backoff=first,
            factor=float(given.get("backoff_second", 4.0)) / first,
            backoff_most=float(given.get("backoff_most", 16.0)),
            failures=int(given.get("quarantine_failures", 3)),
            within=float(given.get("quarantine_within", 60.0)),
            healthy=float(given.get("quarantine_within", 60.0)),
            idle=0.0 if awaited or reap == "never" else float(reap),
        )


CONTRACT = AinbContract()
