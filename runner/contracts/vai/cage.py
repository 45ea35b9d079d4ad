"""Makes the cage of an export and its binding. Needs only a Plugin, which may come from the cache."""

from __future__ import annotations

import re

from runner.contracts.vai.declared import Declared, DeclaredExport, declared_by, details_of
from runner.contracts.vai.terms import SCRATCH, SECRETS
from runner.plugin import LaunchFault, Plugin
from sandbox.document.diagnostic import Diagnostic, did_you_mean, quoted
from sandbox.spec import EnvRequest, KeyPath, MemoryFile, Network, SandboxSpec, Scratch
from sandbox.speed.typed import TYPE_CHECKING, Mapping

if TYPE_CHECKING:
    from runner.contracts.vai.binding import Binding

ASSETS = "assets"
_ALWAYS_SHOWN = ("bin", "schemas")

# All hosts that the policy lists: the request of an export whose binding lists none.
_LISTED_BY_POLICY = ("*",)

_INVOCATION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z", re.ASCII)
_MOST_SHOWN = 20  # exports in a message


class OptionsFault(Exception):
    """The options do not fit the package: rule, message, hint. `option`: the one whose own value is wrong."""

    def __init__(self, rule: str, message: str, hint: str = "", option: str = "") -> None:
        super().__init__(message)
        self.rule, self.message, self.hint, self.option = rule, message, hint, option


def shape(plugin: Plugin, options: Mapping[str, str]) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    """The plugin with the cage of the export that the options choose. Without a choice it asks for nothing.

    Returns the plugin (None if the options are wrong) and diagnostics. An earlier choice is ignored.
    """
    plugin = _unchosen(plugin)
    declared = declared_by(plugin)
    binding: Binding | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    if "binding" in options:
        from runner.contracts.vai.binding import read_binding

        binding, diagnostics = read_binding(
            options["binding"], options.get("binding_file", ""), plugin, export=options.get("export", "")
        )
        if binding is None and any(each.severity == "error" for each in diagnostics):
            return None, diagnostics
    try:
        _check_frame_limit(options)
        export = _chosen(declared, options, binding)
        if export is None:
            return plugin, diagnostics
        return with_cage(plugin, export, binding, options), diagnostics
    except OptionsFault as fault:
        refused = Diagnostic(fault.option or plugin.manifest, 0, 0, fault.rule, fault.message, fault.hint)
        return None, (*diagnostics, refused)


def _check_frame_limit(options: Mapping[str, str]) -> None:
    """Raises OptionsFault."""
    if "frame_limit" not in options:
        return
    # Imported here: few launches set it.
    from runner.contracts.vai.messages import frame_limit

    try:
        frame_limit(options)
    except ValueError as error:
        raise OptionsFault("frame_limit", str(error), "write 256K or 1M", "--frame-limit") from None


def _unchosen(plugin: Plugin) -> Plugin:
    declared = declared_by(plugin)._replace(chosen="", effective=None, inactive="")
    return plugin._replace(
        spec=SandboxSpec(network=Network("none", where=("exports",))),
        details=details_of(declared),
        timeouts=tuple(pair for pair in plugin.timeouts if pair[0] != "call"),
        root_parts=tuple(part for part in plugin.root_parts if part != ASSETS),
    )


def _chosen(declared: Declared, options: Mapping[str, str], binding: Binding | None) -> DeclaredExport | None:
    named = options.get("export", "")
    if named and binding is not None and binding.export != named:
        message = f"--export names {quoted(named)}, and the binding is for {quoted(binding.export)}"
        raise OptionsFault("export_mismatch", message, "leave --export out, or give a binding of that export")
    name = named or (binding.export if binding is not None else "")
    if not name:
        return declared.exports[0] if len(declared.exports) == 1 else None
    found = declared.find(name)
    if found is None:
        known = [export.id for export in declared.exports]
        hint = did_you_mean(name, known) or f"there are {listed(declared)}"
        raise OptionsFault("export_unknown", f"the package has no export {quoted(name)}", hint)
    return found


def listed(declared: Declared) -> str:
    """All exports for a message: triage (harness), jira_search (tool)."""
    shown = ", ".join(f"{export.id} ({export.kind})" for export in declared.exports[:_MOST_SHOWN])
    return shown + (", …" if len(declared.exports) > _MOST_SHOWN else "")


def with_cage(
    plugin: Plugin, export: DeclaredExport, binding: Binding | None, options: Mapping[str, str]
) -> Plugin:
    """The plugin with the cage of this export, as far as its binding allows. Raises OptionsFault."""
    narrowed = export
    if binding is not None:
        from runner.contracts.vai.binding import narrow_export

        narrowed = narrow_export(export, binding)
    declared = declared_by(plugin)
    place: KeyPath = ("exports", declared.exports.index(export), "permissions")
    parts = plugin.root_parts  # never with assets: no program is there
    if narrowed.permissions.filesystem == "assets_ro":
        parts = (*parts, ASSETS)
    hosts = None if binding is None else binding.egress
    inactive = "" if binding is None else binding.inactive
    return plugin._replace(
        spec=_spec(narrowed, place, hosts, options),
        details=details_of(declared._replace(chosen=export.id, effective=narrowed, inactive=inactive)),
        timeouts=(*plugin.timeouts, ("call", narrowed.timeout)),
        root_parts=tuple(dict.fromkeys(parts)),
    )


def package_parts(program: str, manifest: str) -> tuple[str, ...]:
    """Names in the package folder that every cage shows. Missing ones are skipped at the launch."""
    first = program.removeprefix("./").partition("/")[0]
    return tuple(dict.fromkeys((*_ALWAYS_SHOWN, manifest, first)))


def _spec(
    export: DeclaredExport, place: KeyPath, hosts: tuple[str, ...] | None, options: Mapping[str, str]
) -> SandboxSpec:
    permissions = export.permissions
    at_files, at_slots = (*place, "filesystem"), (*place, "secret_slots")
    env: list[EnvRequest] = []
    scratch: Scratch | None = None
    if permissions.filesystem == "scratch":
        scratch = Scratch(scratch_dir(options.get("invocation_id", "")), where=at_files)
        env += [EnvRequest(name, scratch.dest, where=at_files, fixed=True) for name in ("HOME", "TMPDIR")]
    if permissions.slots:
        env.append(EnvRequest("VAI_SECRETS_DIR", SECRETS, where=at_slots, fixed=True))
    return SandboxSpec(
        network=_network(export, place, hosts, options.get("gateway_url", "")),
        env=tuple(env),
        scratch=scratch,
        memory_files=(
            *(MemoryFile(f"{SECRETS}/{slot}", secret=slot) for slot in permissions.slots),
            *_artifacts(scratch, options.get("artifact", "")),
        ),
    )


def _artifacts(scratch: Scratch | None, path: str) -> tuple[MemoryFile, ...]:
    """The file that a call brings along, which is in its scratch folder. Raises OptionsFault."""
    if not path:
        return ()
    folder, _, name = path.rpartition("/")
    if scratch is None or folder != scratch.dest or name in ("", ".", ".."):
        message = f"the file {quoted(path)} of the call is not in the scratch folder of the export"
        raise OptionsFault(
            "artifact", message, "only the runner itself names this file: leave the option out"
        )
    return (MemoryFile(path, 0o600),)


def scratch_dir(invocation_id: str) -> str:
    """The scratch folder of an invocation, in the cage. Raises OptionsFault."""
    if not invocation_id:
        return SCRATCH
    if not _INVOCATION_ID.match(invocation_id):
        message = f"{quoted(invocation_id)} cannot be the id of an invocation: it names a folder"
        hint = "letters, digits, '.', '_' and '-', 128 at most, beginning with a letter or a digit"
        raise OptionsFault("invocation_id", message, hint)
    return f"{SCRATCH}/{invocation_id}"


def _network(export: DeclaredExport, place: KeyPath, hosts: tuple[str, ...] | None, gateway: str) -> Network:
    where = (*place, "network")
    allowed = reachable_hosts(export, hosts, gateway)
    return Network("allowlist", allowed, where) if allowed else Network("none", where=where)


def reachable_hosts(
    export: DeclaredExport, hosts: tuple[str, ...] | None, gateway: str = ""
) -> tuple[str, ...]:
    """The hosts that an export asks for. "*": those that the policy lists. `hosts`: of its binding.
    `gateway`: its URL. Raises OptionsFault."""
    allowed: tuple[str, ...] = ()
    if export.permissions.network == "egress":
        allowed = _LISTED_BY_POLICY if hosts is None else hosts
    if gateway and export.permissions.scopes:
        allowed = (*allowed, _api_gateway_host(gateway))
    return tuple(dict.fromkeys(allowed))


def _api_gateway_host(url: str) -> str:
    """HOST:PORT of a gateway's URL. Raises OptionsFault."""
    # Imported here: few launches have a gateway.
    from runner.protocol.api_gateway import api_gateway_host

    try:
        return api_gateway_host(url)
    except ValueError as error:
        hint = "give --gateway-url https://HOST"
        raise OptionsFault("gateway_url", f"the gateway's URL {error}", hint) from None


def choice_fault(plugin: Plugin, options: Mapping[str, str]) -> LaunchFault | None:
    declared = declared_by(plugin)
    if not declared.chosen:
        message = f"the package has several exports, each with a cage of its own: {listed(declared)}"
        return LaunchFault("export_not_chosen", message, "choose one with --export ID or --binding FILE")
    if declared.inactive:
        hint = "change the record, or give another --binding; runner explain and runner check take this one"
        return LaunchFault("binding_inactive", declared.inactive, hint)
    # Only a schema can find fault with a configuration, and it is slow to import what compiles one.
    if "binding" in options and declared.effective is not None and declared.effective.config_schema:
        from runner.contracts.vai.binding import read_binding

        text, file = options["binding"], options.get("binding_file", "")
        _, found = read_binding(text, file, _unchosen(plugin), files=True, export=declared.chosen)
        for fault in (each for each in found if each.severity == "error"):
            message = f"the binding's configuration cannot be used: {fault.message}"
            return LaunchFault(fault.rule, message, "correct config in the file that --binding names")
    return None


def check_options(plugin: Plugin, options: Mapping[str, str]) -> tuple[Diagnostic, ...]:
    """What is wrong with the binding's configuration, by the schema in the package, or with one of several
    bindings."""
    if "binding" not in options:
        return ()
    from runner.contracts.vai.binding import check_bindings

    found = check_bindings(options["binding"], options.get("binding_file", ""), _unchosen(plugin))
    return tuple(fault for fault in found if fault.severity == "error")


def exports_asked(plugin: Plugin) -> tuple[tuple[str, str], ...]:
    """The permissions that each export declares, in words, for `explain`."""
    rows = []
    for export in declared_by(plugin).exports:
        asked = export.permissions
        words = [
            f"{export.kind}, {export.execution_class}",
            f"network {asked.network}",
            f"filesystem {asked.filesystem}",
            *([f"gateway {' '.join(asked.scopes)}"] if asked.scopes else []),
            *([f"secrets {' '.join(asked.slots)}"] if asked.slots else []),
        ]
        rows.append((export.id, "; ".join(words)))
    return tuple(rows)
