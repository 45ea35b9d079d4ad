"""kaged plugins (kaged_api 1): a YAML manifest, JSON-RPC lines on stdio."""

from __future__ import annotations

from runner.contracts.contract import Contract, ContractOption, Listing
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.contracts.contract import Declarations, Takes
    from runner.plugin import Allowance, Plugin
    from runner.protocol.host_services import HostMethods, Services
    from runner.supervision import Supervision
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format

CONTEXT = ("operator_id", "project_id", "agent_path", "session_id", "request_id", "project_root")


class KagedContract(Contract):
    name = "kaged"
    about = "JSON-RPC lines on stdio, kaged_api 1; described by a YAML manifest"
    format: Format = "yaml"
    file_names = ("kaged-plugin.yaml", "manifest.yaml")
    sign = "a kaged_api key"
    no_command_hint = 'give the manifest a command: command: ["./plugin.py"]'
    calls: Mapping[str, tuple[str, ...]] = {"tool": CONTEXT, "method": CONTEXT, "hook": CONTEXT}
    lists = (Listing("tools"), Listing("methods", declared=True), Listing("hooks", declared=True))
    takes: Takes = ("config", "secrets")
    options = (
        ContractOption(
            "--project", "DIR", "the project that the plugin works on: what project:/ paths lie below"
        ),
        ContractOption("--project-id", "ID", "the project's id; without it the name of its folder"),
    )

    def recognises(self, document: Document) -> bool:
        return "kaged_api" in document.data

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.kaged.manifest import read

        return read(document, home=home, options=options, config=config)

    def check_files(self, document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
        from runner.contracts.kaged.manifest import check_files

        return check_files(document, plugin)

    def declared_tools(self, plugin: Plugin) -> Sequence[Mapping[str, Any]]:
        from runner.contracts.kaged.declared import declared_by

        return [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema}
            for tool in declared_by(plugin).tools.values()
        ]

    def declarations(self, plugin: Plugin) -> tuple[Declarations, ...]:
        from runner.contracts.kaged.declared import declarations

        return declarations(plugin)

    def services(self, plugin: Plugin, allowance: Allowance) -> HostMethods:
        from runner.contracts.kaged.services import StorageMethods

        return StorageMethods(plugin.capabilities)

    def provide(self, plugin: Plugin, services: Services, allowance: Allowance) -> Services:
        from runner.contracts.kaged.services import provide

        return provide(plugin, services, allowance.state_dir)

    def supervision(self, plugin: Plugin) -> Supervision:
        from runner.supervision import Supervision

        given = dict(plugin.lifecycle)
        within = float(given.get("crashes_within", 600.0))
        return Supervision(
            eager=True,
            backoff=float(given.get("restart_after_first", 1.0)),
            backoff_most=float(given.get("restart_after_most", 60.0)),
            failures=int(given.get("crashes_most", 5)),
            within=within,
            healthy=within,
            health_interval=float(given.get("health_interval", 30.0)),  # its session asks, and ends it
            health_answer=float(given.get("health_answer", 5.0)),
            health_misses=int(given.get("health_misses", 1)),
            drain=dict(plugin.timeouts).get("hook", 10.0),
            calls=1,  # a plugin handles one line after the other
        )


CONTRACT = KagedContract()
