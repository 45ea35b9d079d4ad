"""MCP servers on stdio, read from an existing `mcpServers` configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runner.contracts.contract import Contract, HostPlaces, LaunchFault, Listing

if TYPE_CHECKING:
    from runner.plugin import Allowance, Plugin
    from runner.protocol.dialect import Dialect, Setting
    from runner.protocol.host_services import HostMethods
    from runner.protocol.inspector import Inspector
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format

# How the names of programs begin that may start another one. Only for these launchers.py is imported, which
# costs a launch a millisecond.
_MAY_LAUNCH = (
    *("npx", "npm", "pnp", "yarn", "bun", "uv", "pipx", "docker", "podman", "nerdctl", "cmd", "powershell"),
    *("env", "sh", "bash", "dash", "zsh", "ksh", "ash", "fish"),
)


class McpContract(Contract):
    name = "mcp"
    about = "servers of the Model Context Protocol on stdio, from the configuration that hosts have"
    format: Format = "json"
    file_names = ("mcp.json", ".mcp.json", "claude_desktop_config.json")
    sign = "an mcpServers object"
    several_plugins = True
    operators_own_command = True
    takes_commands = True
    no_command_hint = 'give the server a command: "command": "./server"'
    kinds = ("tool", "prompt", "resource", "method")
    lists = (
        Listing("tools", "tool"),
        Listing("prompts", "prompt", offered_as="prompts"),
        Listing("resources", "resource", "uri", offered_as="resources", complete=False),  # and templates
        Listing("resource_templates", key="uriTemplate", offered_as="resources"),
    )

    def recognises(self, document: Document) -> bool:
        return isinstance(document.data.get("mcpServers"), dict)

    def wrapped(self, plugin: Plugin) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        if plugin.entrypoint is None:
            return None
        from runner.contracts.mcp.hosts.wrapping import unwrapped

        found = unwrapped((plugin.entrypoint.command, *plugin.entrypoint.args))
        return None if found is None else (found.options, found.argv)

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.mcp.manifest import read

        return read(document, server=server, home=home)

    def servers(self, document: Document) -> tuple[str, ...]:
        from runner.contracts.mcp.manifest import servers

        return servers(document)

    def launch_fault(self, plugin: Plugin) -> LaunchFault | None:
        command, args = (plugin.entrypoint.command, plugin.entrypoint.args) if plugin.entrypoint else ("", ())
        name = command.replace("\\", "/").rpartition("/")[2].lower()
        if not (
            name.startswith(_MAY_LAUNCH)
            or " " in command
            or (name.startswith("python") and "-m" in args)
            or (name.startswith("node") and args and args[0].endswith("-cli.js"))
        ):
            return None
        from runner.contracts.mcp.launchers import launcher_fault

        return launcher_fault((command, *args), plugin.spec.network)

    def check_files(self, document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
        if (fault := self.launch_fault(plugin)) is None:
            return ()
        keys = ("mcpServers", plugin.id, "command")
        return (document.diagnostic(keys, fault.cause, fault.message, fault.hint, "warning"),)

    def json_schema(self) -> dict[str, object]:
        from runner.contracts.mcp.manifest import json_schema

        return json_schema()

    def host_places(self) -> HostPlaces:
        from runner.contracts.mcp.hosts.places import HOME_PLACES, PROJECT_NAMES, SYSTEM_PLACES, VARIABLES

        return HostPlaces(HOME_PLACES, SYSTEM_PLACES, VARIABLES, PROJECT_NAMES)

    def dialect(self, setting: Setting) -> Dialect:
        from runner.contracts.mcp.dialect import make

        return make(setting)

    def inspector(self, setting: Setting) -> Inspector:
        from runner.contracts.mcp.inspector import make

        return make(setting)

    def services(self, plugin: Plugin, allowance: Allowance) -> HostMethods:
        from runner.contracts.mcp import services

        return services


CONTRACT = McpContract()
