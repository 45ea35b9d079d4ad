"""nexo plugins: a TOML manifest, JSON-RPC lines on stdio."""

from __future__ import annotations

from runner.contracts.contract import Contract, Example, Listing
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.contracts.contract import Takes
    from runner.plugin import Allowance, Plugin
    from runner.protocol.host_services import HostMethods
    from runner.supervision import Supervision
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format

# Lists of a manifest, beside its tools.
DECLARED = ("hooks", "channels", "llm_providers", "memory_backends")

# Required keys of [plugin] that no other contract has.
_OWN_KEYS = ("id", "min_nexo_version")


# Variables that configure nexo's own host, and the values that set one.
_SWITCHES = {
    "require_sandbox": "NEXO_PLUGIN_SANDBOX_REQUIRE",
    "host_network": "NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW",
}
_YES = ("1", "true", "TRUE", "yes", "YES")


class NexoContract(Contract):
    name = "nexo"
    about = "JSON-RPC lines on stdio, contract 1.10; described by a TOML manifest"
    format: Format = "toml"
    file_names = ("plugin.toml", "nexo-plugin.toml")
    sign = "id or min_nexo_version in a [plugin] table"
    no_command_hint = 'give the manifest a command: [plugin.entrypoint] command = "./plugin.py"'
    takes: Takes = ("hook_answers",)
    calls: Mapping[str, tuple[str, ...]] = {
        "tool": ("agent_id", "policy"),
        **dict.fromkeys(("hook", "channel", "llm", "memory", "event", "method"), ()),
    }
    example = Example("greeter_greet")  # a tool's name begins with its plugin's id
    lists = (Listing("tools"), *(Listing(what, declared=True) for what in DECLARED))

    def switches(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        return {asked: name for asked, name in _SWITCHES.items() if environ.get(name) in _YES}

    def recognises(self, document: Document) -> bool:
        data = document.data
        # A [plugin] table alone is not a sign: another contract has one too, with a name and an ABI version.
        plugin = data.get("plugin")
        return (isinstance(plugin, dict) and not plugin.keys().isdisjoint(_OWN_KEYS)) or (
            # The format before [plugin]. It is not hosted, but a message says how to port its manifests.
            data.get("manifest_version") == 1 and isinstance(data.get("transport"), dict)
        )

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.nexo.manifest import read

        return read(document, home=home)

    def check_files(self, document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
        from runner.contracts.nexo.manifest import check_files

        return check_files(document)

    def services(self, plugin: Plugin, allowance: Allowance) -> HostMethods:
        from runner.contracts.nexo import services

        return services

    def supervision(self, plugin: Plugin) -> Supervision:
        from runner.contracts.nexo.supervisor import supervision

        return supervision(plugin)

    def lifecycle_notice(
        self, plugin: Plugin, what: str, facts: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]] | None:
        from runner.contracts.nexo.supervisor import lifecycle_notice

        return lifecycle_notice(plugin, what, facts)


CONTRACT = NexoContract()
