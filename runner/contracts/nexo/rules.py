"""The contract's rules about the content of a manifest, in its order. tables.py has the types."""

from __future__ import annotations

import re
from collections.abc import Callable

from runner.manifest.sandbox_request import Word
from runner.manifest.semver import Triple, admits, is_version
from runner.manifest.table import Item, Table
from sandbox.document.diagnostic import DocumentError, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import parse
from sandbox.spec import KeyPath

# The release of nexo that min_nexo_version is compared with. Contract 1.10 appeared with 0.1.x; published
# plugins that use it ask for up to >=0.2.0, so this is the lowest release that hosts them all.
NEXO_VERSION: Triple = (0, 2, 0)

ID_PATTERN = "^[a-z][a-z0-9_]{0,31}$"  # by the contract, of plugins and of what they extend
_ID = re.compile(ID_PATTERN.replace("$", r"\Z"), re.ASCII)
# A tool's name begins with its plugin's id. With the 32 characters of an id some could have none.
_TOOL = re.compile(r"[a-z][a-z0-9_]{0,63}\Z", re.ASCII)
_KEBAB = re.compile(r"[a-z][a-z0-9-]{0,40}\Z", re.ASCII)
_DRIVE = re.compile(r"[A-Za-z]:")

# The contract's own words for [plugin.limits]. Each takes a plain number of its unit.
LIMIT_WORDS = {
    "cpu_pct": Word("cpu", "%", "Processor, in percent of one core. The same as cpu."),
    "mem_mb": Word("memory", "M", "Memory, in MiB. The same as memory."),
    "startup_timeout_ms": Word(
        "handshake", "ms", "Time to its first answer, in milliseconds. The same as handshake."
    ),
}

EXTENDS = ("channels", "llm_providers", "memory_backends", "hooks", "tools")
STDERR_TAIL_MAX = 512
BACKOFF_MS = (100, 300_000)

CORE_SLOTS = (
    "core.sidebar.root",
    "core.sidebar.channels",
    "core.sidebar.integrations",
    "core.sidebar.settings",
    "core.agent_detail.tabs",
    "core.command_palette.actions",
)
_ICON_NAMES = """
    activity alert-triangle bar-chart bell bot calendar check clock cloud cpu database
    download edit external-link eye eye-off file filter folder globe grid home info key layout
    link list lock mail map-pin message-circle message-square pause phone pie-chart play plug plus puzzle
    refresh-cw search send server settings shield sliders star tag terminal tool trash upload user users
    webhook wrench x zap"""
ICONS = frozenset(_ICON_NAMES.split())


def check(faults: Faults, plugin: Table) -> None:
    """All rules except those of [plugin.sandbox], which manifest.py checks while it reads the requests."""
    rules: tuple[Callable[[Faults, Table], None], ...] = (
        _identity,
        _versions,
        _tool_namespace,
        _extends,
        _tools,
        _config_schema,
        _path_fields,
        _channels,
        _provides,
        _capability_gates,
        _supervisor,
        _pairing,
        _public_tunnel,
        _admin_ui,
    )
    for rule in rules:
        rule(faults, plugin)


def _identity(faults: Faults, plugin: Table) -> None:
    plugin_id = plugin.string("id")
    if plugin_id is not None and not _ID.match(plugin_id):
        message = f"the id {quoted(plugin_id)} is not allowed"
        faults.error(plugin.at("id"), "plugin_id", message, _ID_HINT.format(32))
    for name in ("name", "description"):
        text = plugin.string(name)
        if text is not None and not text.strip():
            faults.error(plugin.at(name), f"{name}_blank", f"the {name} is blank")


_ID_HINT = "a lower-case letter, then lower-case letters, digits and _; at most {} characters"


def _versions(faults: Faults, plugin: Table) -> None:
    version = plugin.string("version")
    if version is not None and not is_version(version):
        message = f"the version {quoted(version)} is not a semantic version"
        faults.error(plugin.at("version"), "plugin_version", message, 'write it as "1.2.3"')
    requirement = plugin.string("min_nexo_version")
    if requirement is None:
        return
    shown = quoted(requirement)
    host = ".".join(map(str, NEXO_VERSION))
    try:
        if not admits(requirement, NEXO_VERSION):
            message = f"the plugin needs nexo {shown}, this runner hosts plugins for nexo {host}"
            faults.error(plugin.at("min_nexo_version"), "min_nexo_version", message)
    except ValueError as error:
        message = f"{shown} {error}"
        faults.error(plugin.at("min_nexo_version"), "min_nexo_version", message, 'write it as ">=0.1.0"')


def _tool_namespace(faults: Faults, plugin: Table) -> None:
    plugin_id = plugin.string("id")
    if not plugin_id:
        return
    prefixes = (f"{plugin_id}_", f"ext_{plugin_id}_")
    for item in (*plugin.table("tools").strings("expose"), *plugin.table("extends").strings("tools")):
        if not any(item.text.startswith(p) and item.text != p for p in prefixes):
            message = f"the tool {quoted(item.text)} is outside the plugin's namespace"
            hint = f"names have to start with {quoted(prefixes[0])} or {quoted(prefixes[1])}"
            faults.error(item.keys, "tool_namespace", message, hint)


def _extends(faults: Faults, plugin: Table) -> None:
    extends = plugin.table("extends")
    homes: dict[str, str] = {}
    conflicts: set[str] = set()
    for section in EXTENDS:
        seen: set[str] = set()
        pattern, most = (_TOOL, 64) if section == "tools" else (_ID, 32)
        for item in extends.strings(section):
            if not pattern.match(item.text):
                message = f"{quoted(item.text)} in {section} is not an id"
                faults.error(item.keys, "extends_id", message, _ID_HINT.format(most))
            elif item.text in seen:
                message = f"{quoted(item.text)} is listed twice in {section}"
                faults.error(item.keys, "extends_duplicate", message, "remove one")
            elif homes.setdefault(item.text, section) != section and item.text not in conflicts:
                conflicts.add(item.text)
                message = f"{quoted(item.text)} is in {homes[item.text]} and in {section}"
                faults.error(item.keys, "extends_conflict", message, "list it in one of them only")
            seen.add(item.text)


def _tools(faults: Faults, plugin: Table) -> None:
    tools = plugin.table("tools")
    exposed = {item.text for item in tools.strings("expose")}
    for item in tools.strings("deferred"):
        if item.text not in exposed:
            message = f"the deferred tool {quoted(item.text)} is not in expose"
            faults.error(item.keys, "tools_deferred", message, "add it to tools.expose")
    for tool in tools.tables("outbound"):
        name = tool.string("name")
        if name is not None and name not in exposed:
            message = f"the outbound tool {quoted(name)} is not in expose"
            faults.error(tool.at("name"), "tools_outbound", message, "add it to tools.expose")
        _json_object(faults, tool, "input_schema", "tools_outbound")


def _config_schema(faults: Faults, plugin: Table) -> None:
    _json_object(faults, plugin.table("config_schema"), "schema", "config_schema")


def _json_object(faults: Faults, table: Table, name: str, rule: str) -> None:
    """A JSON schema as text, whose root describes an object."""
    text = table.string(name)
    if text is None:
        return
    try:
        schema = parse(name, text.encode(), "json").data
    except DocumentError as error:
        inner = error.diagnostics[0]
        place = f" (line {inner.line}, column {inner.column} of the text)" if inner.line else ""
        faults.error(table.at(name), rule, f"{name} is not a JSON object: {inner.message}{place}")
        return
    if schema.get("type") != "object":
        faults.error(table.at(name), rule, f'the root of {name} lacks "type": "object"')


def _path_fields(faults: Faults, plugin: Table) -> None:
    for section, name in (
        ("agents", "contributes_dir"),
        ("skills", "contributes_dir"),
        ("config", "schema_path"),
    ):
        table = plugin.table(section)
        path = table.string(name)
        if path is None:
            continue
        segments = path.replace("\\", "/").split("/")
        if path.startswith(("/", "\\")) or ".." in segments or _DRIVE.match(path):
            message = f"{section}.{name} {quoted(path)} leads out of the plugin's folder"
            faults.error(table.at(name), "path_field", message, "it has to be relative, without '..'")


def _channels(faults: Faults, plugin: Table) -> None:
    for channel in plugin.table("channels").tables("register"):
        kind = channel.string("kind")
        if kind is not None and not _ID.match(kind):
            message = f"the channel kind {quoted(kind)} is not allowed"
            faults.error(channel.at("kind"), "channel_kind", message, _ID_HINT.format(32))


def _provides(faults: Faults, plugin: Table) -> None:
    capabilities = plugin.table("capabilities")
    filled = {
        "tools": bool(plugin.table("tools").strings("expose") or plugin.table("extends").strings("tools")),
        "advisors": bool(plugin.table("advisors").strings("register")),
        "agents": bool(plugin.table("agents").string("contributes_dir")),
        "skills": bool(plugin.table("skills").string("contributes_dir") or capabilities.strings("skills")),
        "channels": bool(
            plugin.table("channels").tables("register") or plugin.table("extends").strings("channels")
        ),
    }
    for item in capabilities.strings("provides"):
        if not filled.get(item.text, True):
            message = f"{quoted(item.text)} is provided, but [plugin.{item.text}] is empty"
            faults.error(item.keys, "capability_section", message, "fill the section, or remove the entry")


def _capability_gates(faults: Faults, plugin: Table) -> None:
    seen: set[str] = set()
    for gate in plugin.table("capability_gates").tables("gate"):
        variable = gate.string("env_var")
        if variable is None:
            continue
        if variable in seen:
            message = f"two gates use the variable {quoted(variable)}"
            faults.error(gate.at("env_var"), "capability_gate", message, "each gate needs its own")
        seen.add(variable)


def _supervisor(faults: Faults, plugin: Table) -> None:
    supervisor = plugin.table("supervisor")
    bounds: list[tuple[str, int, int | None]] = [("stderr_tail_lines", 0, STDERR_TAIL_MAX)]
    if supervisor.flag("respawn", False):
        bounds += [("max_attempts", 1, None), ("backoff_ms", *BACKOFF_MS)]
    for name, low, high in bounds:
        value = supervisor.integer(name)
        if value is None or (value >= low and (high is None or value <= high)):
            continue
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        faults.error(supervisor.at(name), "supervisor_bounds", f"{name} is {value}; possible are {allowed}")
    for name in ("max_attempts", "backoff_ms"):
        value = supervisor.integer(name)
        if value is not None and value < 0 and not supervisor.flag("respawn", False):
            faults.error(supervisor.at(name), "supervisor_bounds", f"{name} is negative")


def _pairing(faults: Faults, plugin: Table) -> None:
    pairing = plugin.table("pairing")
    kind = pairing.string("kind")

    def fault(name: str, message: str) -> None:
        faults.error(pairing.at(name), "pairing", message)

    fields = bool(pairing.data.get("fields"))
    if kind == "form" and not fields:
        fault("kind", "pairing by form needs fields")
    if kind in ("custom", "info") and fields:
        fault("fields", f"pairing of kind {kind} has no fields")
    if kind == "custom" and not (pairing.string("rpc_namespace") or "").strip():
        fault("rpc_namespace", "pairing of kind custom needs an rpc_namespace")
    if "trigger" not in pairing:
        return
    if kind != "qr":
        fault("trigger", "a pairing trigger is only for pairing of kind qr")
    trigger = pairing.table("trigger")
    for name in ("start_method", "cancel_method"):
        if not (trigger.string(name) or "").strip():
            faults.error(trigger.at(name), "pairing", f"the pairing trigger needs a {name}")


def _public_tunnel(faults: Faults, plugin: Table) -> None:
    tunnel = plugin.table("public_tunnel")
    event = tunnel.string("close_on_event")
    if event is None:
        return
    if not event.strip():
        faults.error(tunnel.at("close_on_event"), "public_tunnel", "close_on_event is blank")
    elif any(segment in ("*", ">") for segment in event.split(".")):
        message = f"close_on_event {quoted(event)} contains a wildcard; one event has to be named"
        faults.error(tunnel.at("close_on_event"), "public_tunnel", message)


# --- admin_ui ----------------------------------------------------------------------------------------


def _admin_ui(faults: Faults, plugin: Table) -> None:
    ui = plugin.table("admin_ui")

    def fault(keys: KeyPath, message: str, hint: str = "") -> None:
        faults.error(keys, "admin_ui", message, hint)

    version = ui.integer("schema_version")
    if version is not None and version != 1:
        fault(ui.at("schema_version"), f"schema_version is {version}; only 1 exists")
    mode = ui.string("mode")
    if mode is not None and mode != "declarative":
        fault(ui.at("mode"), f"the mode is {quoted(mode)}; only 'declarative' exists")
    screens = _ids(fault, ui.tables("screens"), "screen")
    contributions = _ids(fault, ui.tables("contributions"), "contribution")
    for contribution in ui.tables("contributions"):
        _contribution(fault, contribution, plugin.string("id") or "", screens, contributions)
    for screen in ui.tables("screens"):
        _ids(fault, screen.tables("actions"), "action")


def _ids(fault: Callable[[KeyPath, str, str], None], tables: list[Table], what: str) -> set[str]:
    seen: set[str] = set()
    for table in tables:
        name = table.string("id")
        if name is None:
            continue
        if not _KEBAB.match(name):
            hint = "a lower-case letter, then lower-case letters, digits and -; at most 41 characters"
            fault(table.at("id"), f"the {what} id {quoted(name)} is not allowed", hint)
        if name in seen:
            fault(table.at("id"), f"the {what} id {quoted(name)} is used twice", "")
        seen.add(name)
    return seen


def _contribution(
    fault: Callable[[KeyPath, str, str], None],
    entry: Table,
    plugin_id: str,
    screens: set[str],
    siblings: set[str],
) -> None:
    slot, parent = entry.string("slot"), entry.string("parent")
    if parent is not None:
        if parent not in siblings or parent == entry.string("id"):
            fault(entry.at("parent"), f"the parent {quoted(parent)} is not another contribution", "")
    elif slot is None:
        if "slot" not in entry and "parent" not in entry:
            fault(entry.keys, "the contribution needs a slot or a parent", "")
    elif slot not in CORE_SLOTS:
        own = f"plugin.{plugin_id}."
        if not (slot.startswith(own) and _KEBAB.match(slot[len(own) :])):
            hint = f"known are {own}… and {', '.join(CORE_SLOTS)}"
            fault(entry.at("slot"), f"the slot {quoted(slot)} is unknown", hint)
    icon = entry.string("icon")
    if icon is not None and icon not in ICONS:
        fault(
            entry.at("icon"), f"the icon {quoted(icon)} is unknown", f"known are {', '.join(sorted(ICONS))}"
        )
    screen = entry.string("screen")
    if screen is not None and screen not in screens:
        fault(entry.at("screen"), f"the screen {quoted(screen)} is not declared", "")


def environment(faults: Faults, plugin: Table) -> list[tuple[str, Item]]:
    """entrypoint.env. Names that start with NEXO_ are reserved for the host's own configuration."""
    pairs = plugin.table("entrypoint").pairs("env")
    for name, item in pairs:
        if name.startswith("NEXO_"):
            message = f"the variable {quoted(name)} is reserved: names starting with NEXO_ are the host's"
            faults.error(item.keys, "env_reserved", message, "rename it")
    return pairs
