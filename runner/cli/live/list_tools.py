"""Everything a plugin exposes, as one list."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from runner.cli.live.output import Output
from runner.cli.live.session import SessionRequest, run_session, write_in_thread
from runner.cli.shared.seen_tools import remember_tools
from runner.cli.shared.text import fit
from runner.contracts.registry import find_contract
from runner.exceptions import PluginError
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.session.session import Session
from sandbox.document.diagnostic import printable


def list_all(request: SessionRequest, output: Output) -> int:
    async def work(session: Session) -> None:
        found = await _everything(session)
        remember_tools(session.terms.plugin, (str(each.get("name")) for each in found["tools"]))
        if session.is_one_shot:
            await session.conclude()
        identity, contract = session.identity, session.terms.plugin.contract
        assert identity is not None
        if output.as_json:
            about = {"id": identity.id, "version": identity.version, "protocol": identity.protocol}
            await write_in_thread(output.result, {"plugin": {**about, "contract": contract}, **found})
        else:
            title = printable(" ".join(filter(None, (identity.id, identity.version, f"({contract})"))))
            text = fit("\n".join((title, *_listing(found))), sys.stdout)
            await write_in_thread(output.tell, text)

    return run_session(request, output, "tools", work)


def tell_declared(plugin: Plugin, found: Mapping[str, list[dict[str, Any]]], output: Output) -> None:
    """Print what the manifest declares, without a session."""
    if output.as_json:
        about = {"id": plugin.id, "version": plugin.version, "contract": plugin.contract}
        output.result({"plugin": about, **found})
    else:
        title = printable(f"{plugin.id} {plugin.version} ({plugin.contract})")
        output.tell(fit("\n".join((title, *_listing(found))), sys.stdout))


async def _everything(session: Session) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"tools": []}
    with contextlib.suppress(PluginError):  # it has none
        found["tools"] = await session.call(Call("list", "tools"))
    identity, plugin = session.identity, session.terms.plugin
    assert identity is not None
    contract = find_contract(plugin.contract)
    for listing in contract.lists:
        # A plugin that does not offer a list may not even answer.
        offered = not listing.offered_as or listing.offered_as in identity.details
        if offered and not listing.declared and listing.what not in found:
            with contextlib.suppress(PluginError):
                found[listing.what] = await session.call(Call("list", listing.what))
    declared = {listing.what for listing in contract.lists if listing.declared}
    found.update(
        {what: [{"name": name} for name in names] for what, names in plugin.exports if what in declared}
    )
    return found


def _listing(found: Mapping[str, list[Any]]) -> list[str]:
    lines = []
    for what, listed in found.items():
        if not listed and what == "tools":
            lines += ["", "no tools"]
        elif listed:
            lines += ["", f"{what.replace('_', ' ')}:"]
            names = [_name(entry) for entry in listed]
            width = min(_NAME_COLUMNS, max(map(len, names)))
            for name, entry in zip(names, listed, strict=True):
                lines.append(f"  {name:<{width}}  {_about(entry)}".rstrip())
    return lines


_NAME_COLUMNS, _DESCRIPTION_CHARACTERS = 40, 90


def _name(entry: Mapping[str, Any]) -> str:
    """The name as `runner call` takes it."""
    return printable(str(entry.get("uri") or entry.get("uriTemplate") or entry.get("name") or ""))


def _about(entry: Mapping[str, Any]) -> str:
    lines = str(entry.get("description") or entry.get("title") or "").strip().splitlines()
    return printable(lines[0])[:_DESCRIPTION_CHARACTERS] if lines else ""
