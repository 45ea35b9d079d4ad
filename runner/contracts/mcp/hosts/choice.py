"""Chooses the server of a configuration, and reports those that cannot be hosted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.contracts.mcp.hosts.entries import GENERIC, URLS
from runner.contracts.mcp.hosts.host import Host, HostServer
from sandbox.document import model
from sandbox.document.diagnostic import Diagnostic, did_you_mean, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document

_MOST_SHOWN = 20


def choose(
    faults: Faults, host: Host | None, servers: Sequence[HostServer], wanted: str | None
) -> HostServer | None:
    """The server to host. None: there is none, and `faults` says why."""
    keys = (host or GENERIC).servers[0]
    if not servers:
        _report_missing(faults, host or GENERIC)
        return None
    if wanted is None:
        return _only(faults, servers)
    found = _called(servers, wanted)
    if not found:
        labels = [server.label for server in servers]
        message = f"there is no server {quoted(wanted)}; there are {_listed(servers)}"
        faults.error(keys, "server_unknown", message, did_you_mean(wanted, labels[:100]))
        return None
    if len(found) > 1:
        scoped = [server for server in found if server.scope]
        message = f"{len(found)} servers are called {quoted(wanted)}"
        hint = (
            f"choose with --server {quoted(scoped[0].label, 200)}" if scoped else "give them different names"
        )
        faults.error(found[1].keys, "server_ambiguous", message + f": {_listed(found)}", hint)
        return None
    [server] = found
    if server.skipped:
        _refuse(faults, server)
        return None
    return server


def _called(servers: Sequence[HostServer], wanted: str) -> list[HostServer]:
    """The servers with this label, or else with this name. `check` asks for thousands of one file in a row,
    so the names of the last file are cached."""
    global _last
    if _last is None or _last[0] is not servers:
        names: dict[str, list[HostServer]] = {}
        labels: dict[str, list[HostServer]] = {}
        for server in servers:
            names.setdefault(server.name, []).append(server)
            labels.setdefault(server.label, []).append(server)
        _last = servers, labels, names
    _, labels, names = _last
    return labels.get(wanted) or names.get(wanted) or []


_Named = dict[str, list[HostServer]]
_last: tuple[Sequence[HostServer], _Named, _Named] | None = None


def _refuse(faults: Faults, server: HostServer) -> None:
    entry: Any = faults.document.data
    for step in server.keys:
        entry = entry[step]
    keys = server.keys
    if isinstance(entry, dict) and server.remote:
        keys = (*keys, next((key for key in (*URLS, "type", "transport") if key in entry), ""))
    faults.error(keys, "server_not_stdio", f"{quoted(server.name)} {server.skipped}")


def _only(faults: Faults, servers: Sequence[HostServer]) -> HostServer | None:
    """The server to use without --server: the only one that can be hosted and is not disabled."""
    hostable = [server for server in servers if not server.skipped]
    enabled = [server for server in hostable if not server.disabled]
    table = servers[0].keys[:-1]
    if len(enabled) == 1:
        return enabled[0]
    if enabled:
        message = f"there are {len(enabled)} servers: {_listed(enabled)}"
        faults.error(table, "server_needed", message, "choose one with --server NAME")
    elif hostable:
        server = hostable[0]
        message = f"{_listed(hostable)}: disabled in this file, and there is no other server to start"
        hint = f"enable it, or start it all the same with --server {quoted(server.label, 200)}"
        faults.error(server.keys, "server_disabled", message, hint)
    else:
        _refuse(faults, servers[0])
    return None


def _listed(servers: Sequence[HostServer]) -> str:
    shown = ", ".join(quoted(server.label, 200) for server in servers[:_MOST_SHOWN])
    return shown + (", …" if len(servers) > _MOST_SHOWN else "")


def _report_missing(faults: Faults, host: Host) -> None:
    """Report that the document has no server."""
    keys = host.servers[0]
    value: object = faults.document.data
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    name = ".".join(map(str, keys))
    what = "list" if host.named_list else "object"
    if isinstance(value, list if host.named_list else dict):
        faults.error(keys, "servers_missing", f"{name} has no entries")
        return
    found = (
        f"is {model.type_name(value, faults.document.format)}"
        if keys[0] in faults.document.data
        else "is missing"
    )
    faults.error(keys, "servers_missing", f"the {what} {name} {found}")


def comments_remark(document: Document, host: Host | None) -> tuple[Diagnostic, ...]:
    """A warning about comments in the file of a host that may not take them."""
    if host is None or document.format != "jsonc" or host.syntax != "json" or host.comments:
        return ()
    message = f"the file has comments or trailing commas, and {host.name} may read JSON alone"
    hint = f"if {host.name} does not find its servers, remove them"
    return (Diagnostic(document.path, 0, 0, "json_comments", message, hint, "warning"),)


def remarks_on(document: Document, servers: Sequence[HostServer]) -> tuple[Diagnostic, ...]:
    """A diagnostic about each server that cannot be hosted."""
    skipped = [server for server in servers if server.skipped]
    found = tuple(
        document.diagnostic(
            server.keys,
            "server_not_hosted",
            f"{quoted(server.label, 200)} {server.skipped}",
            "nothing to do: its host uses it as before",
            "warning",
        )
        for server in skipped[:_MOST_SHOWN]
    )
    if len(skipped) <= _MOST_SHOWN:
        return found
    more = f"{len(skipped) - _MOST_SHOWN} more servers cannot be hosted either"
    return (*found, Diagnostic(document.path, 0, 0, "server_not_hosted", more, "", "warning"))
