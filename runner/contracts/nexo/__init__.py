"""nexo plugins: a TOML manifest, JSON-RPC lines on stdio."""

from __future__ import annotations

from runner.contracts.contract import Contract, Example
from runner.plugin import Switches
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.plugin import Allowance, Plugin
    from runner.protocol.host_services import HostMethods
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format

# The values that nexo's own host reads as yes. It reads anything else as no.
_YES = ("1", "true", "TRUE", "yes", "YES")
_REQUIRE_SANDBOX = "NEXO_PLUGIN_SANDBOX_REQUIRE"
_HOST_NETWORK = "NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW"


class NexoContract(Contract):
    name = "nexo"
    about = "JSON-RPC lines on stdio, contract 1.10; described by a TOML manifest"
    format: Format = "toml"
    file_names = ("plugin.toml", "nexo-plugin.toml")
    sign = "a [plugin] table"
    no_command_hint = 'give the manifest a command: [plugin.entrypoint] command = "./plugin.py"'
    policy_answers_hooks = True
    kinds = ("tool", "hook", "channel", "llm", "memory", "event", "method")
    context: Mapping[str, tuple[str, ...]] = {"tool": ("agent_id", "policy")}
    example = Example("greeter_greet")  # a tool's name begins with its plugin's id
    event_method = "broker.event"
    declared = ("hooks", "channels", "llm_providers", "memory_backends")

    def recognises(self, document: Document) -> bool:
        data = document.data
        # The second is the format before [plugin]. It is not hosted, but its manifests get a message that
        # says how to port them.
        # Another contract has a [plugin] table with a name and an ABI version, and no id.
        plugin = data.get("plugin")
        return (isinstance(plugin, dict) and not ("abi_version" in plugin and "id" not in plugin)) or (
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

    def switches(self, environ: Mapping[str, str]) -> Switches:
        return Switches(
            sandbox_required_by=_REQUIRE_SANDBOX if environ.get(_REQUIRE_SANDBOX) in _YES else "",
            host_network_by=_HOST_NETWORK if environ.get(_HOST_NETWORK) in _YES else "",
        )

    def services(self, plugin: Plugin, allowance: Allowance) -> HostMethods:
        from runner.contracts.nexo import services

        return services


CONTRACT = NexoContract()
