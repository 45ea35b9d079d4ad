"""vai packages (vai.plugin.v1): a TOML manifest, vai.rpc.v1 in header frames, one cage per export."""

from __future__ import annotations

from runner.contracts.contract import Contract, ContractOption, Example, Listing
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.contracts.bindings import Bindings
    from runner.contracts.contract import Layout, Takes
    from runner.contracts.prepared_calls import Choice, PreparedCalls
    from runner.plugin import LaunchFault, Plugin
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format

# Keys of a call's context that are sent in the request's `context`.
IDENTITIES = tuple("invocation_id trace_id org_id project_id session_id chain_id run_id".split())


class VaiContract(Contract):
    name = "vai"
    about = "JSON in Content-Length frames on stdio, vai.rpc.v1; packages with exports, described in TOML"
    format: Format = "toml"
    file_names = ("vai-plugin.toml",)
    layout: Layout = "tar"
    sign = 'api_version = "vai.plugin.v1"'
    no_command_hint = 'give [runtime] an entrypoint: entrypoint = ["./bin/plugin"]'
    calls: Mapping[str, tuple[str, ...]] = {
        "export": (*IDENTITIES, "tool_execution_id", "attempt", "compaction_id"),
        "tool": (*IDENTITIES, "tool_execution_id"),
        "hook": (*IDENTITIES, "attempt", "delivery_id"),
        "compactor": (*IDENTITIES, "compaction_id"),
        "harness": IDENTITIES,
    }
    lists = (
        Listing("tools"),
        *(Listing(what, declared=True) for what in ("hooks", "compactors", "harnesses")),
    )
    example = Example(namespace="example/")
    takes: Takes = ("secret_files",)
    options = (
        ContractOption("--export", "ID", "the export that the cage is for", ("exec", "explain", "check")),
        ContractOption(
            "--binding",
            "FILE",
            "a binding record, or several: configuration, secret slots, scope, rollout, narrower permissions",
            names_file=True,
            reads_file=True,
        ),
        ContractOption(
            "--invocation-id", "ID", "the name of the scratch folder", ("exec", "explain"), names_file=False
        ),
        ContractOption(
            "--frame-limit", "SIZE", "the most bytes of a frame, up to 16M: 256K, 1M", ("exec", "call")
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
        *(ContractOption(flag, "", "", ()) for flag in ("--timeout", "--output-schema", "--artifact")),
    )

    def content_of(self, value: Any) -> Mapping[str, Any]:
        structured = value.get("structured_output")
        found = {"content": value.get("content", []), "isError": value.get("is_error") is True}
        return {**found, "structuredContent": structured} if isinstance(structured, dict) else found

    def recognises(self, document: Document) -> bool:
        return document.data.get("api_version") == "vai.plugin.v1"

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.vai.manifest import read

        return read(document, options=options)

    @property
    def choice(self) -> Choice:
        from runner.contracts.vai import cage

        return cage

    @property
    def prepared_calls(self) -> PreparedCalls:
        from runner.contracts.vai import prepared_calls

        return prepared_calls

    def check_files(self, document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
        from runner.contracts.vai.package.files import check_files

        return check_files(document, plugin)

    def launch_fault(self, plugin: Plugin) -> LaunchFault | None:
        from runner.contracts.vai.package.machine import launch_fault

        return launch_fault(plugin)

    def hooks_for(self, plugin: Plugin, event: str) -> tuple[str, ...]:
        from runner.contracts.vai.declared import declared_by

        return tuple(each.id for each in declared_by(plugin).exports if event in each.subscribes_to)

    def rights(self, plugin: Plugin) -> tuple[tuple[str, str], ...]:
        from runner.contracts.vai.cage import exports_asked

        return exports_asked(plugin)

    @property
    def bindings(self) -> Bindings:
        from runner.contracts.vai import binding

        return binding

    def lint(self, document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
        from runner.contracts.vai.package.lint import lint

        return lint(document, plugin)


CONTRACT = VaiContract()
