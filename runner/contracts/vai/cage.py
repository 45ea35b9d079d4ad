"""From an export and its binding to its cage. It works on a Plugin alone, so a cached one will do."""

from __future__ import annotations

import re

from runner.contracts.contract import LaunchFault
from runner.contracts.vai import SCRATCH, SECRETS
from runner.contracts.vai.declared import Declared, DeclaredExport, declared_by, exports_of
from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic, did_you_mean, printable, quoted
from sandbox.spec import EnvRequest, KeyPath, MemoryFile, Network, SandboxSpec, Scratch
from sandbox.speed.typed import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from runner.contracts.vai.binding import Binding

ASSETS = "assets"
_ALWAYS_SHOWN = ("bin", "schemas")

# Every host that the policy lists: what an export asks for whose binding lists none.
_LISTED_BY_POLICY = ("*",)

_INVOCATION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z", re.ASCII)
_MOST_URL_CHARACTERS = 2048
_MOST_SHOWN = 20  # exports in a message


class Misfit(Exception):
    """The options do not fit the package: rule, message, hint."""

    def __init__(self, rule: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.rule, self.message, self.hint = rule, message, hint


def choose_export(plugin: Plugin, options: Mapping[str, str]) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    """The plugin with the cage of the export that the options choose. Without a choice it asks for nothing.

    The answer: None if the options are wrong, and what is to be said about them. What was chosen before does
    not count.
    """
    plugin = _unchosen(plugin)
    declared = declared_by(plugin)
    binding: Binding | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    if "binding" in options:
        from runner.contracts.vai.binding import read_binding

        binding, diagnostics = read_binding(options["binding"], options.get("binding_file", ""), plugin)
        if binding is None:
            return None, diagnostics
    try:
        export = _chosen(declared, options, binding)
        if export is None:
            return plugin, diagnostics
        return caged(plugin, export, binding, options), diagnostics
    except Misfit as fault:
        refused = Diagnostic(plugin.manifest, 0, 0, fault.rule, fault.message, fault.hint)
        return None, (*diagnostics, refused)


def _unchosen(plugin: Plugin) -> Plugin:
    declared = declared_by(plugin)._replace(chosen="", effective=None, inactive="")
    return plugin._replace(
        spec=SandboxSpec(network=Network("none", where=("exports",))),
        exports=exports_of(declared),
        timeouts=tuple(pair for pair in plugin.timeouts if pair[0] != "call"),
        root_parts=tuple(part for part in plugin.root_parts if part != ASSETS),
    )


def _chosen(declared: Declared, options: Mapping[str, str], binding: Binding | None) -> DeclaredExport | None:
    named = options.get("export", "")
    if named and binding is not None and binding.export != named:
        message = f"--export names {quoted(named)}, and the binding is for {quoted(binding.export)}"
        raise Misfit("export_mismatch", message, "leave --export out, or give a binding of that export")
    name = named or (binding.export if binding is not None else "")
    if not name:
        return declared.exports[0] if len(declared.exports) == 1 else None
    found = declared.find(name)
    if found is None:
        known = [export.id for export in declared.exports]
        hint = did_you_mean(name, known) or f"there are {listed(declared)}"
        raise Misfit("export_unknown", f"the package has no export {quoted(name)}", hint)
    return found


def listed(declared: Declared) -> str:
    """All exports for a message: triage (harness), jira_search (tool)."""
    shown = ", ".join(f"{export.id} ({export.kind})" for export in declared.exports[:_MOST_SHOWN])
    return shown + (", …" if len(declared.exports) > _MOST_SHOWN else "")


def caged(
    plugin: Plugin, export: DeclaredExport, binding: Binding | None, options: Mapping[str, str]
) -> Plugin:
    """The plugin with the cage of this export, as far as its binding allows. Raises Misfit."""
    narrowed = export
    if binding is not None:
        from runner.contracts.vai.binding import effective

        narrowed = effective(export, binding)
    declared = declared_by(plugin)
    place: KeyPath = ("exports", declared.exports.index(export), "permissions")
    parts = plugin.root_parts  # never with assets: no program is there
    if narrowed.permissions.filesystem == "assets_ro":
        parts = (*parts, ASSETS)
    hosts = None if binding is None else binding.egress
    inactive = "" if binding is None else binding.inactive
    return plugin._replace(
        spec=_spec(narrowed, place, hosts, options),
        exports=exports_of(declared._replace(chosen=export.id, effective=narrowed, inactive=inactive)),
        timeouts=(*plugin.timeouts, ("call", narrowed.timeout)),
        root_parts=tuple(dict.fromkeys(parts)),
    )


def package_parts(program: str, manifest: str) -> tuple[str, ...]:
    """What every cage shows of the package: names in its folder. Those that do not exist are left out at the
    launch."""
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
    """The file that a call brings along, which is in its scratch folder. Raises Misfit."""
    if not path:
        return ()
    folder, _, name = path.rpartition("/")
    if scratch is None or folder != scratch.dest or name in ("", ".", ".."):
        message = f"the file {quoted(path)} of the call is not in the scratch folder of the export"
        raise Misfit("artifact", message, "only the runner itself names this file: leave the option out")
    return (MemoryFile(path, 0o600),)


def scratch_dir(invocation_id: str) -> str:
    """The scratch folder of an invocation, in the cage. Raises Misfit."""
    if not invocation_id:
        return SCRATCH
    if not _INVOCATION_ID.match(invocation_id):
        message = f"{quoted(invocation_id)} cannot be the id of an invocation: it names a folder"
        hint = "letters, digits, '.', '_' and '-', 128 at most, beginning with a letter or a digit"
        raise Misfit("invocation_id", message, hint)
    return f"{SCRATCH}/{invocation_id}"


def _network(export: DeclaredExport, place: KeyPath, hosts: tuple[str, ...] | None, gateway: str) -> Network:
    where = (*place, "network")
    allowed: tuple[str, ...] = ()
    if export.permissions.network == "egress":
        allowed = _LISTED_BY_POLICY if hosts is None else hosts
    if gateway and export.permissions.scopes:
        allowed = (*allowed, _gateway_host(gateway))
    allowed = tuple(dict.fromkeys(allowed))
    return Network("allowlist", allowed, where) if allowed else Network("none", where=where)


def _gateway_host(url: str) -> str:
    """HOST:PORT of a gateway's URL. Raises Misfit."""
    try:
        return gateway_host(url)
    except ValueError as error:
        hint = "give --gateway-url https://HOST"
        raise Misfit("gateway_url", f"the gateway's URL {error}", hint) from None


def gateway_host(url: Any) -> str:
    """The host and the port of a gateway's base_url, as a rule for the network: api.example.com:443.

    It is an https URL. http is for a gateway on this machine only. Raises ValueError with the second half of
    a sentence.
    """
    # Imported here: few launches have a gateway.
    from urllib.parse import urlsplit

    from sandbox.network.rules import parse_authority

    if not isinstance(url, str) or not 0 < len(url) <= _MOST_URL_CHARACTERS:
        raise ValueError(f"is not a text of 1 to {_MOST_URL_CHARACTERS} characters")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ValueError("has characters that no URL has")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in ("https", "http") or not parts.netloc:
        raise ValueError(f"is {quoted(url)}, and not an https URL")
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise ValueError("has a user name, a query or a fragment, which a base URL does not have")
    try:
        host, port = parse_authority(parts.netloc, 443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ValueError(f"has a host that {printable(str(error))}") from None
    if parts.scheme == "http" and host.text not in ("localhost", "::1") and not _is_loopback(host.text):
        raise ValueError("is an http URL of another machine: the token would travel in the open, use https")
    return f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    return bool(re.match(r"127\.\d+\.\d+\.\d+\Z", host))


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
        for fault in check_options(plugin, options):
            message = f"the binding's configuration cannot be used: {fault.message}"
            return LaunchFault(fault.rule, message, "correct config in the file that --binding names")
    return None


def check_options(plugin: Plugin, options: Mapping[str, str]) -> tuple[Diagnostic, ...]:
    """What is wrong with the binding's configuration, by the schema in the package."""
    if "binding" not in options:
        return ()
    from runner.contracts.vai.binding import read_binding

    text, file = options["binding"], options.get("binding_file", "")
    _, found = read_binding(text, file, _unchosen(plugin), files=True)
    return tuple(fault for fault in found if fault.severity == "error")


def exports_asked(plugin: Plugin) -> tuple[tuple[str, str], ...]:
    """What each export declares that it needs, in words, for `explain`."""
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
