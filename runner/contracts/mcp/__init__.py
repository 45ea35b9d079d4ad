"""MCP servers on stdio, read from the configuration files that hosts have."""

from __future__ import annotations

import os

from runner.contracts.contract import Contract, ContractVerb, Listing
from sandbox import look, surroundings
from sandbox.speed.typed import TYPE_CHECKING, Any, Callable, Mapping

if TYPE_CHECKING:
    from runner.contracts.configurations import EntryFound, HostFile, HostPlaces, WrappedCommand, WrappedEntry
    from runner.plugin import Allowance, LaunchFault, Plugin
    from runner.protocol.host_services import HostMethods
    from runner.supervision import Supervision
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format
    from sandbox.spec import KeyPath

FILE_NAMES = ("mcp.json", ".mcp.json", "claude_desktop_config.json")

# Prefixes of programs that may start another program. launchers.py, which takes a millisecond to import, is
# needed only for these.
_MAY_LAUNCH = tuple(
    (
        "npx npm pnp yarn bun uv pipx docker podman nerdctl cmd powershell env sh bash dash zsh ksh ash fish"
        " nice timeout nohup stdbuf setsid ionice"
    ).split()
)


def _current_folder() -> str:
    """The current folder; '' if it is gone."""
    try:
        return surroundings.working_folder()
    except OSError:
        return ""


def _may_launch(plugin: Plugin) -> bool:
    """Whether its program may be a launcher, by its name alone."""
    command, args = (plugin.entrypoint.command, plugin.entrypoint.args) if plugin.entrypoint else ("", ())
    name = command.replace("\\", "/").rpartition("/")[2].lower()
    return bool(
        name.startswith(_MAY_LAUNCH)
        or " " in command
        or (name.startswith("python") and "-m" in args)
        or (name.startswith("node") and args and args[0].endswith("-cli.js"))
    )


class McpConfigurations:
    def file_at(self, path: str) -> HostFile | None:
        from runner.contracts.configurations import HostFile
        from runner.contracts.mcp.hosts.find import MOST_BYTES, MOST_VALUES, place_of

        place = place_of(path, os.path.expanduser("~"), look.environment(surroundings.variables()))
        if place is None:
            return HostFile("json") if os.path.basename(path) in FILE_NAMES else None
        larger = place.own and place.host.live
        return HostFile(place.host.syntax, (MOST_BYTES, MOST_VALUES) if larger else None)

    def servers(self, document: Document) -> tuple[str, ...]:
        from runner.contracts.mcp.manifest import servers

        return servers(document)

    def fill(
        self, plugin: Plugin, variable: Callable[[str], str | None], read_file: Callable[[str, KeyPath], str]
    ) -> tuple[Plugin, tuple[str, ...]]:
        from runner.contracts.mcp.hosts.fill import fill

        return fill(plugin, variable, read_file)

    def is_users_own(self, path: str, environ: Mapping[str, str]) -> bool:
        from runner.contracts.mcp.hosts.find import place_of

        place = place_of(path, os.path.expanduser("~"), environ)
        return place is not None and place.own

    def find_entry(self, wrapped: WrappedEntry, environ: Mapping[str, str]) -> EntryFound:
        from runner.contracts.mcp.wrap.claim import find_entry

        return find_entry(wrapped, environ)

    def gateway_remark(self, path: str) -> str:
        from runner.contracts.mcp.wrap.gateway import entry_remark

        return entry_remark(path)

    def program_faults(self, document: Document, server: str | None) -> tuple[Diagnostic, ...]:
        from runner.contracts.mcp.manifest import program_faults

        return program_faults(document, server)

    def remarks(self, document: Document) -> tuple[Diagnostic, ...]:
        from runner.contracts.mcp.manifest import remarks
        from runner.contracts.mcp.wrap.entry_warnings import warnings

        return (*remarks(document), *warnings(document))

    def origin(self, document: Document) -> str:
        from runner.contracts.mcp.hosts.find import host_of

        host = host_of(document.path, document)
        return "" if host is None else host.name

    def wrapped(self, plugin: Plugin, environ: Mapping[str, str]) -> WrappedCommand | None:
        if plugin.entrypoint is None or plugin.template is None or not plugin.template.outer:
            return None
        from runner.contracts.configurations import WrappedCommand
        from runner.contracts.mcp.hosts.expand import expand_as_host
        from runner.manifest.fill import text_of

        # The host fills its words in before it starts the runner.
        rules, folder = plugin.template.rules, plugin.template.folder or _current_folder()
        home = os.path.expanduser("~")

        def file(path: str) -> str:
            base = os.path.dirname(plugin.manifest)
            return text_of(os.path.join(base, os.path.expanduser(path))).strip()

        def text(word: str) -> str:
            return expand_as_host(word, rules, folder, home, environ, file)

        return WrappedCommand(
            options=tuple(map(text, plugin.template.outer)),
            argv=tuple(map(text, plugin.entrypoint.words)),
            directory="" if plugin.project is None else plugin.entrypoint.directory,
            env=tuple(
                (each.name, text(each.value))
                for each in plugin.spec.env
                if each.value is not None and not each.fixed
            ),
        )

    def installed(self, plugin: Plugin, environ: Mapping[str, str]) -> Plugin:
        if not _may_launch(plugin):
            return plugin
        from runner.contracts.mcp.installed import installed

        return installed(plugin, environ)

    def keeps_nothing(self, plugin: Plugin) -> bool:
        from runner.contracts.mcp.sharing import keeps_nothing

        return keeps_nothing(plugin)

    def places(self) -> HostPlaces:
        from runner.contracts.configurations import HostPlaces
        from runner.contracts.mcp.hosts import places as of

        return HostPlaces(of.HOME_PLACES, of.SYSTEM_PLACES, of.VARIABLES, of.PROJECT_NAMES, of.TOKEN_FILES)


class McpContract(Contract):
    name = "mcp"
    about = "servers of the Model Context Protocol on stdio, from the configuration that hosts have"
    format: Format = "json"
    file_names = FILE_NAMES
    sign = "an mcpServers object"
    no_command_hint = 'give the server a command: "command": "./server"'
    configurations = McpConfigurations()
    calls: Mapping[str, tuple[str, ...]] = dict.fromkeys(
        ("tool", "prompt", "resource", "method"), ("traceparent", "tracestate")
    )
    plain_entries = True
    lists = (
        Listing("tools", kind="tool"),
        Listing("prompts", kind="prompt", offered_as="prompts"),
        Listing("resources", kind="resource", key="uri", offered_as="resources", complete=False),  # templates
        Listing("resource_templates", key="uriTemplate", offered_as="resources"),
    )
    verbs = (
        ContractVerb(
            "wrap",
            "runner.contracts.mcp.verb_wrap",
            "change a host's configuration so that its servers run in a cage, or undo that",
            "allow",
        ),
        ContractVerb(
            "install",
            "runner.contracts.mcp.verb_install",
            "fetch the packages of npx and uvx servers, images, or oci://… packages, once, and start them"
            " from a store",
            "allow",
        ),
        ContractVerb(
            "advice",
            "runner.contracts.mcp.verb_advice",
            "show what the runner told about the last starts of a host's servers, and what helps",
            "look",
        ),
    )

    def content_of(self, value: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = value
        return found

    def recognises(self, document: Document) -> bool:
        if document.format in ("json", "jsonc") and isinstance(document.data.get("mcpServers"), dict):
            return True
        from runner.contracts.mcp.hosts.find import host_by_content

        return host_by_content(document) is not None

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        from runner.contracts.mcp.manifest import read

        return read(document, server=server, home=home)

    def launch_fault(self, plugin: Plugin) -> LaunchFault | None:
        image = plugin.spec.image
        if plugin.entrypoint is None or (image is not None and image.starts_own) or not _may_launch(plugin):
            return None
        from runner.contracts.mcp.installed import store_fault
        from runner.contracts.mcp.launchers import FETCHES, container_fault, launcher_fault

        words = (plugin.entrypoint.command, *plugin.entrypoint.args)
        other = "" if image is None else image.reference
        has_file = plugin.template is not None and bool(plugin.template.env_file)
        if (fault := container_fault(words, other, has_env_file=has_file)) is not None:
            return fault
        fault = launcher_fault(words, plugin.spec.network, (each.name for each in plugin.spec.env))
        if fault is None or fault.cause != FETCHES:
            return fault
        return store_fault(words, look.environment(surroundings.variables())) or fault

    def check_files(self, document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
        if plugin is None:
            return ()
        from runner.contracts.mcp.manifest import check_files

        environ = look.environment(surroundings.variables())
        plugin = self.configurations.installed(plugin, environ)
        fault = self.launch_fault(plugin)
        if fault is None and plugin.spec.image is not None:
            from runner.install.images import image_fault

            fault = image_fault(plugin, environ)
        return check_files(document, plugin, fault)

    def services(self, plugin: Plugin, allowance: Allowance) -> HostMethods:
        from runner.contracts.mcp import services

        return services

    def supervision(self, plugin: Plugin) -> Supervision:
        from runner.supervision import Supervision

        return Supervision(health_call="ping")


CONTRACT = McpContract()
