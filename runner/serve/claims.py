"""Who has a name, if several plugins ask for it. A plugin chooses its name itself, so a name proves nothing.

1. The settings may say which folder a name is for.
2. Else it stays with the place that had it first (runner/approvals/names.py).
3. Else who is alone gets it. Of several nobody does: neither the alphabet nor a race decides.

Who does not get its name is not served, and is a fault of the configuration that names both places.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from runner.approvals.names import NamePlace, place_at
from runner.serve.sources import PluginSource, SourceFault
from sandbox.document.diagnostic import printable

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z", re.ASCII)  # a key of TOML without quotes
_MOST_NAMED = 5  # places in a message


class SettledNames(NamedTuple):
    sources: tuple[PluginSource, ...]  # one for each name
    faults: tuple[SourceFault, ...] = ()


def place_of(source: PluginSource) -> NamePlace:
    return place_at(source.path, source.server)


def settle(
    claims: Sequence[PluginSource],
    chosen: Mapping[str, str],
    held: Mapping[str, Collection[NamePlace]],
    table: str = "[{}]",
) -> SettledNames:
    """`chosen`: the path that the settings have for a name. `held`: the place that had it first; several, if
    the configurations of their time were others. `table`: how the settings write the table of a name."""
    by_name: dict[str, list[PluginSource]] = {}
    for claim in claims:
        by_name.setdefault(claim.name, []).append(claim)
    sources: list[PluginSource] = []
    faults: list[SourceFault] = []
    for name, rivals in by_name.items():
        winner = _winner(rivals, chosen.get(name), held.get(name, ()))
        if winner is not None:
            sources.append(winner)
        for each in rivals:
            if winner is None or (each is not winner and _real(each) != _real(winner)):
                others = [str(place_of(other)) for other in rivals if other is not each]
                why = _reason(name, others, chosen.get(name), held.get(name, ()))
                key = name if _BARE.match(name) else f'"{name}"'
                way = f'folder = "{each.path}" in the table {table.format(key)} of the settings'
                message = f"{why}; so it is not served. Give it another id, or the name with {way}"
                faults.append(SourceFault(each.path, printable(message)))
    return SettledNames(tuple(sources), tuple(faults))


def _winner(
    rivals: Sequence[PluginSource], chosen: str | None, holders: Collection[NamePlace]
) -> PluginSource | None:
    if chosen is not None:
        fitting = [each for each in rivals if _is_at(each, chosen)]
    else:
        fitting = [each for each in rivals if not holders or place_of(each) in holders]
    # One folder that was found on two ways is one plugin.
    if len(fitting) > 1 and len({_real(each) for each in fitting}) > 1:
        return None
    return fitting[0] if fitting else None


def _real(source: PluginSource) -> tuple[str, str | None]:
    return os.path.realpath(source.path), source.server


def _is_at(source: PluginSource, path: str) -> bool:
    if place_at(path).path == place_at(source.path).path:
        return True
    return os.path.realpath(path) in (os.path.realpath(source.path), os.path.realpath(source.plugin.manifest))


def _reason(name: str, others: Sequence[str], chosen: str | None, holders: Collection[NamePlace]) -> str:
    if chosen is not None:
        return f"the settings say that the name {name} is for {chosen}"
    if holders:
        gone = "" if any(os.path.lexists(each.path) for each in holders) else ", which is not there now"
        listed = " and to ".join(sorted(map(str, holders)))
        return f"the name {name} belongs to {listed}, where it was first{gone}"
    more = f" and {len(others) - _MOST_NAMED} others" if len(others) > _MOST_NAMED else ""
    listed = ", ".join(others[:_MOST_NAMED])
    return f"{listed}{more} asks for the name {name} too, and none of them had it before"
