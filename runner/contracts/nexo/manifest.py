"""nexo manifests (manifest_version 2): the plugin they describe, and its requests for the cage.

tables.py has the keys and their types; rules.py has the rules for their content. Both run over the whole
document, so one pass finds every fault.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from runner.contracts.nexo import exports, rules, topics
from runner.contracts.nexo.supervisor import lifecycle
from runner.manifest import sandbox_request
from runner.manifest.program import check_program
from runner.manifest.table import Item, Table
from runner.plugin import Entrypoint, Plugin
from sandbox.document import model
from sandbox.document.diagnostic import Diagnostic, nearest, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document
from sandbox.spec import EnvRequest, KeyPath, Limits, Network, PathRequest, SandboxSpec
from sandbox.speed.typed import Any

# The contract's own clocks, in seconds; per-method ones belong to the dialect.
TIMEOUTS = (("handshake", 5.0), ("call", 60.0), ("teardown", 6.0))

_LEGACY_TABLES = (
    "transport",
    "capabilities",
    "context",
    "requires",
    "meta",
    "mcp_servers",
    "outbound_bindings",
)


def read(document: Document, *, home: str = "") -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    """The plugin of a manifest (None if there is an error), and all diagnostics."""
    faults = Faults(document)
    if not _is_current(faults, document):
        return None, faults.diagnostics()
    # Imported here: `check` of a known manifest looks at its files only.
    from runner.contracts.nexo import tables

    model.check(faults, tables.Manifest, document.data, (), _strict)
    plugin = Table(document.data).table("plugin")
    rules.check(faults, plugin)
    entrypoint, env = _entrypoint(faults, plugin, os.path.dirname(document.path))
    spec = _spec(faults, plugin, env, home)
    if faults.failed:
        return None, faults.diagnostics()
    capabilities = plugin.table("requires").strings("nexo_capabilities")
    found = Plugin(
        id=plugin.string("id") or "",
        version=plugin.string("version") or "",
        contract="nexo",
        name=plugin.string("name") or "",
        description=plugin.string("description") or "",
        manifest=document.path,
        root=os.path.dirname(document.path),
        entrypoint=entrypoint,
        spec=spec,
        exports=_exports(plugin),
        details=_details(plugin),
        capabilities=tuple(dict.fromkeys(item.text for item in capabilities)),
        timeouts=TIMEOUTS,
        lifecycle=lifecycle(plugin.table("supervisor")),
    )
    return found, faults.diagnostics()


def _strict(keys: KeyPath, value: object) -> str | None:
    """The contract's tables are closed. A key that only newer hosts know may be ignored, a table not: one
    that is misspelled would ask for less, or for more, than its author wrote."""
    if keys[:2] == ("plugin", "sandbox"):
        return "sandbox_unknown_key"
    tables = value if isinstance(value, list) else [value]
    is_table = any(isinstance(each, dict) for each in tables)
    return "unknown_table" if is_table else None


def _is_current(faults: Faults, document: Document) -> bool:
    """manifest_version 2. Version 1 has another format, and its plugins speak another protocol."""
    version = document.data.get("manifest_version")
    legacy = [name for name in _LEGACY_TABLES if isinstance(document.data.get(name), dict)]
    if (version == 1 and version is not True) or (version is None and legacy):
        where: KeyPath = ("manifest_version",) if version == 1 else (legacy[0],)
        message = "legacy manifest_version 1 is not hosted: its plugins speak another protocol"
        faults.error(where, "legacy_manifest", message, _port(document, legacy))
        return False
    if isinstance(version, int) and not isinstance(version, bool) and version != 2:
        message = f"manifest_version {version} does not exist"
        faults.error(("manifest_version",), "manifest_version", message, "write manifest_version = 2")
        return False
    return True


def _port(document: Document, legacy: Sequence[str]) -> str:
    """A hint with all steps that port a manifest of version 1."""
    transport = Table(document.data).table("transport")
    kind = transport.string("kind") or "stdio"
    if kind != "stdio":
        return f"only stdio plugins can be hosted, and this one is reached by {quoted(kind)}"
    found = Table(document.data).table("plugin")
    missing = [name for name in _REQUIRED if found.string(name) is None]
    steps = [
        "write manifest_version = 2",
        *([f"give [plugin] {', '.join(missing)}"] if missing else []),
        "move command and args from [transport] to [plugin.entrypoint]",
        f"remove {', '.join(f'[{name}]' for name in legacy)}" if legacy else "",
        "port the program to JSON-RPC lines with initialize (nexo's plugin contract 1.10)",
    ]
    return "; ".join(step for step in steps if step)


def check_files(document: Document) -> tuple[Diagnostic, ...]:
    """The program that the manifest names can be started here."""
    faults = Faults(document)
    if not _is_current(Faults(document), document):
        return ()
    table = Table(document.data).table("plugin").table("entrypoint")
    command = table.string("command")
    if "command" not in table or (command is not None and not command.strip()):
        near = nearest("command", [key for key in table.data if key != "command"])
        hint = f"did you mean 'command' by {quoted(near)}?" if near else 'write command = "./plugin.py" there'
        message = "there is no command in [plugin.entrypoint], so the runner has nothing to start"
        faults.error(table.at(near or "command"), "entrypoint_missing", message, hint)
    elif command is not None:
        root = os.path.dirname(document.path)
        check_program(faults, table.at("command"), command, root, "program_missing")
    return faults.diagnostics()


# Required keys of [plugin].
_REQUIRED = ("id", "version", "name", "description", "min_nexo_version")


def _entrypoint(faults: Faults, plugin: Table, directory: str) -> tuple[Entrypoint | None, list[EnvRequest]]:
    table = plugin.table("entrypoint")
    pairs = rules.environment(faults, plugin)
    args = table.strings("args")
    command = table.string("command")
    sandbox_request.check_vector(faults, Item(table.at("command"), command or ""), args, pairs)
    env = [EnvRequest(name, item.text, where=item.keys) for name, item in pairs]
    named = {name for name, _ in pairs}
    for item in plugin.table("requires").strings("env"):
        sandbox_request.check_env_name(faults, item.keys, item.text)
        if item.text not in named:
            named.add(item.text)
            env.append(EnvRequest(item.text, required=False, where=item.keys))
    if command is None or not command.strip():
        return None, env  # `check_files` says so: such a plugin cannot be launched, but explained
    return Entrypoint(command, tuple(item.text for item in args), directory), env


def _spec(faults: Faults, plugin: Table, env: list[EnvRequest], home: str) -> SandboxSpec:
    sandbox = plugin.table("sandbox")
    limits, where = sandbox_request.limits(faults, plugin, "limits", rules.LIMIT_WORDS)
    entrypoint = plugin.table("entrypoint")
    words = (*entrypoint.strings("args"), *(item for _, item in entrypoint.pairs("env")))
    state = sandbox_request.own_state(words)
    if not sandbox.flag("enabled", False):
        return SandboxSpec(enabled=False, paths=state, env=tuple(env), limits=limits, where=where)
    spec = _enabled_spec(faults, sandbox, env, home, limits, where)
    return spec._replace(paths=tuple(dict.fromkeys((*spec.paths, *state))))


def _enabled_spec(
    faults: Faults,
    sandbox: Table,
    env: list[EnvRequest],
    home: str,
    limits: Limits,
    where: sandbox_request.Where,
) -> SandboxSpec:
    paths: list[PathRequest] = []
    for item in sandbox.strings("fs_read_paths"):
        sandbox_request.check_path(faults, item, item.text, home, write=False)
        # Optional: the browser plugin lists four places where Chrome might be.
        paths.append(PathRequest(item.text, "read", required=False, where=item.keys))
    for item in sandbox.strings("fs_write_paths"):
        sandbox_request.check_path(faults, item, item.text, home, write=True)
        paths.append(PathRequest(item.text, "write", where=item.keys))
    seccomp, where = sandbox_request.seccomp(sandbox, where)
    if not sandbox.flag("drop_user", True):
        message = "drop_user = false has no effect: every plugin runs under a user of its own"
        faults.warn(sandbox.at("drop_user"), "drop_user_ignored", message)
    return SandboxSpec(
        enabled=True,
        paths=tuple(dict.fromkeys(paths)),
        network=_network(faults, sandbox),
        env=tuple(env),
        seccomp=seccomp,
        limits=limits,
        where=where,
    )


def _network(faults: Faults, sandbox: Table) -> Network:
    mode = sandbox.string("network")
    allowlist = sandbox.strings("network_allowlist")
    if mode == "allowlist":
        if "network_allowlist" not in sandbox:
            hint = 'list the hosts in network_allowlist, or write network = "deny"'
            faults.error(sandbox.at("network"), "network_allowlist", "there is no network_allowlist", hint)
            return Network("none", where=sandbox.at("network"))
        keys = sandbox.at("network_allowlist")
        hosts = sandbox_request.hosts(faults, allowlist, keys, 'network = "deny"')
        return Network("allowlist" if hosts else "none", hosts, where=sandbox.at("network"))
    if "network_allowlist" in sandbox:
        message = f"network_allowlist has no effect while network is {quoted(mode or 'deny')}"
        hint = 'set network = "allowlist", or remove the list'
        faults.error(sandbox.at("network_allowlist"), "network_allowlist", message, hint)
    if mode == "host":
        message = 'network = "host" has to be allowed by the operator'
        hint = (
            'it needs a policy whose [network] ceiling is "host", or NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW=1 in '
            'the runner\'s environment under a policy that says environment = "may_raise"'
        )
        faults.warn(sandbox.at("network"), "host_network_needs_operator", message, hint)
    where = sandbox.at("network") if mode else sandbox.keys
    return Network("host" if mode == "host" else "none", where=where)


def _exports(plugin: Table) -> tuple[tuple[str, tuple[str, ...]], ...]:
    extends = plugin.table("extends")
    found = {name: [item.text for item in extends.strings(name)] for name in rules.EXTENDS}
    found["tools"] = [item.text for item in plugin.table("tools").strings("expose")] + found["tools"]
    registered = [channel.string("kind") for channel in plugin.table("channels").tables("register")]
    kinds = [kind for kind in registered if kind]
    found["channels"] = kinds + found["channels"]
    # The handshake may advertise the tools of extends only; expose is another list.
    found[exports.ADVERTISABLE] = [item.text for item in extends.strings("tools")]
    broker = plugin.table("capabilities").table("broker")
    channels = [topics.channel_topics(kind) for kind in kinds]
    found[topics.SUBSCRIBE] = [pattern for subscribe, _ in channels for pattern in subscribe]
    found[topics.SUBSCRIBE] += [item.text for item in broker.strings("subscribe")]
    found[topics.PUBLISH] = [pattern for _, publish in channels for pattern in publish]
    found[topics.PUBLISH] += [item.text for item in broker.strings("publish")]
    return tuple((name, tuple(dict.fromkeys(names))) for name, names in found.items() if names)


def _details(plugin: Table) -> Mapping[str, Any]:
    config = plugin.table("config_schema")
    configuration, tools = None, {}
    if (schema := config.string("schema")) is not None:
        configuration = exports.Configuration(config.string("shape") == "array", schema)
    for tool in plugin.table("tools").tables("outbound"):
        name, schema = tool.string("name"), tool.string("input_schema")
        if name is not None and schema is not None:
            method, milliseconds = tool.string("rpc_method"), tool.integer("timeout_ms")
            tools[name] = exports.outbound_tool(method, milliseconds, tool.string("description"), schema)
    return exports.details_of(configuration, tools)


def json_schema() -> dict[str, object]:
    from runner.contracts.nexo import tables

    return model.editor_schema(tables.Manifest, "nexo-plugin.toml", closed=("SandboxTable",), tables=False)
