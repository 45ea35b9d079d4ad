"""vai packages (vai.plugin.v1): a TOML manifest, vai.rpc.v1 in header frames, one cage per export."""

from __future__ import annotations

from runner.contracts.contract import Contract, ContractOption
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.contracts.contract import LaunchFault, Prepared
    from runner.plugin import Plugin
    from runner.protocol.dialect import Call, CallEnd, Dialect, Setting
    from runner.protocol.host_services import Delegation
    from runner.protocol.inspector import Inspector
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format

PROTOCOL = "vai.rpc.v1"

HELLO_SECONDS = 10.0
SHUTDOWN_SECONDS = 5.0

# Where things are in the cage.
PACKAGE = "/sandbox/package"
SCRATCH = "/sandbox/scratch"
SECRETS = "/sandbox/secrets"

# Keys of a call's context that are sent in the request's `context`.
IDENTITIES = (
    *("invocation_id", "trace_id", "org_id", "project_id"),
    *("session_id", "chain_id", "run_id"),
)


class VaiContract(Contract):
    name = "vai"
    about = "JSON in Content-Length frames on stdio, vai.rpc.v1; packages with exports, described in TOML"
    format: Format = "toml"
    file_names = ("vai-plugin.toml",)
    sign = 'api_version = "vai.plugin.v1"'
    no_command_hint = 'give [runtime] an entrypoint: entrypoint = ["./bin/plugin"]'
    kinds = ("export", "tool", "hook", "compactor", "harness")
    context: Mapping[str, tuple[str, ...]] = {
        "export": (*IDENTITIES, "tool_execution_id", "attempt", "compaction_id"),
        "tool": (*IDENTITIES, "tool_execution_id"),
        "hook": (*IDENTITIES, "attempt"),
        "compactor": (*IDENTITIES, "compaction_id"),
        "harness": IDENTITIES,
    }
    declared = ("hooks", "compactors", "harnesses")
    example_namespace = "example/"
    prepares_calls = True
    options_shape_plugin = True
    prepared_options = ("timeout", "output_schema", "artifact")
    caller_keys = ("org_id", "project_id")
    options_of_one_call = ("invocation_id", "timeout", "delivery_id", "artifact")
    secret_files = True
    options = (
        ContractOption("--export", "ID", "the export that the cage is for", ("exec", "explain", "check")),
        ContractOption(
            "--binding",
            "FILE",
            "a binding record: configuration, secret slots, scope, rollout and narrower permissions",
            names_file=True,
            reads_file=True,
        ),
        ContractOption(
            "--invocation-id", "ID", "the name of the scratch folder", ("exec", "explain"), names_file=False
        ),
        ContractOption("--delivery-id", "ID", "the delivery of a hook's event", ("call",)),
        ContractOption("--gateway-url", "URL", "the base_url of the gateway", ("call",)),
        ContractOption(
            "--gateway-token",
            "@FILE|env:NAME",
            "a token for the gateway, delegated to this call",
            ("call",),
            secret=True,
        ),
    )

    def recognises(self, document: Document) -> bool:
        return document.data.get("api_version") == "vai.plugin.v1"

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.vai.manifest import read

        return read(document, options=options)

    def shape(
        self, plugin: Plugin, options: Mapping[str, str]
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.vai.cage import choose_export

        return choose_export(plugin, options)

    def check_files(self, document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
        from runner.contracts.vai.package.files import check_files

        return check_files(document, plugin)

    def launch_fault(self, plugin: Plugin) -> LaunchFault | None:
        from runner.contracts.vai.package.machine import launch_fault

        return launch_fault(plugin)

    def check_options(self, plugin: Plugin, options: Mapping[str, str]) -> tuple[Diagnostic, ...]:
        from runner.contracts.vai.cage import check_options

        return check_options(plugin, options)

    def choice_fault(self, plugin: Plugin, options: Mapping[str, str]) -> LaunchFault | None:
        from runner.contracts.vai.cage import choice_fault

        return choice_fault(plugin, options)

    def catalogue(self, plugin: Plugin) -> Mapping[str, list[dict[str, Any]]]:
        from runner.contracts.vai.package.catalogue import catalogue

        return catalogue(plugin)

    def rights(self, plugin: Plugin) -> tuple[tuple[str, str], ...]:
        from runner.contracts.vai.cage import exports_asked

        return exports_asked(plugin)

    def lint(self, document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
        from runner.contracts.vai.package.lint import lint

        return lint(document, plugin)

    def json_schema(self) -> dict[str, object]:
        from runner.contracts.vai.manifest import json_schema

        return json_schema()

    def prepare(
        self,
        plugin: Plugin,
        call: Call,
        *,
        seconds: float | None,
        options: Mapping[str, str],
        secrets: Mapping[str, str],
        config: Any,
        now: float,
    ) -> Prepared:
        from runner.contracts.vai.call.prepare import prepare

        return prepare(
            plugin, call, seconds=seconds, options=options, secrets=secrets, config=config, now=now
        )

    def with_delegation(self, prepared: Prepared, delegation: Delegation) -> Prepared:
        from runner.contracts.vai.call.prepare import with_delegation

        return with_delegation(prepared, delegation)

    def reuses(self, plugin: Plugin) -> int:
        from runner.contracts.vai.outcome import reuses

        return reuses(plugin)

    def concurrent(self, plugin: Plugin) -> int:
        from runner.contracts.vai.outcome import concurrent

        return concurrent(plugin)

    def record(
        self, plugin: Plugin, call: Call, end: CallEnd, options: Mapping[str, str]
    ) -> Mapping[str, Any] | None:
        from runner.contracts.vai.outcome import record

        return record(plugin, call, end, options)

    def dialect(self, setting: Setting) -> Dialect:
        from runner.contracts.vai.dialect import make

        return make(setting)

    def inspector(self, setting: Setting) -> Inspector:
        from runner.contracts.vai.inspector import make

        return make(setting)


CONTRACT = VaiContract()
