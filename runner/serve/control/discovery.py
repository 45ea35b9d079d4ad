"""What a caller can use: the exports of active bindings in its scope, by kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from runner.contracts.registry import find_contract
from runner.serve.control.caller import ControlCaller
from runner.serve.control.database import (
    MOST_ROWS,
    BindingRow,
    ControlDatabase,
    ControlFile,
    PackageRow,
)
from runner.serve.control.packages import catalogue_at

KINDS = ("harnesses", "tools", "hooks", "compactors")


class Discovery:
    def __init__(self, database: ControlDatabase) -> None:
        self._database = database

    async def exports(
        self,
        kind: str,
        caller: ControlCaller,
        org: str | None,
        project: str | None,
        *,
        after: str = "",
        most: int = MOST_ROWS,
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The exports of a kind, each with the binding to call it by, and the `after` of the next page.
        `org`: None is all that the caller sees. `project`: in this project, where its own binding goes before
        that of the whole org; None: the bindings of the org and of all its projects."""
        wanted = caller.only if org is None else org
        if wanted is not None and not caller.sees(wanted):
            return [], None
        rows: list[BindingRow] = []
        while page := await self._database.do(
            ControlFile.bindings, wanted, None, None, kind, after=rows[-1].id if rows else ""
        ):
            rows += page
        packages = {row.id: row for row in await self._database.do(ControlFile.packages)}
        counting = [
            row
            for row in effective(rows, packages, project)
            if row.id > after and not row.inactive and not packages[row.package].unavailable
        ]
        found = []
        for row in counting[:most]:
            package = packages[row.package]
            entries = (await trio.to_thread.run_sync(catalogue_at, package.folder)).get(kind, ())
            found += [_shown(row, package, each) for each in entries if each["name"] == row.export]
        return found, counting[most - 1].id if len(counting) > most else None


def effective(
    rows: Sequence[BindingRow], packages: Mapping[str, PackageRow], project: str | None
) -> list[BindingRow]:
    """The bindings that count in a project, whatever their status: for each export its own, or else those of
    the whole org. None: all."""
    if project is None:
        return list(rows)
    groups: dict[tuple[str, str, str], list[BindingRow]] = {}
    for row in rows:
        groups.setdefault((row.org, packages[row.package].package_id, row.export), []).append(row)
    found = []
    for group in groups.values():
        rules = find_contract(packages[group[0].package].contract).bindings
        assert rules is not None  # or it would not have been imported
        found += rules.nearest(group, project, lambda row: row.project)
    return sorted(found)


def _shown(row: BindingRow, package: PackageRow, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **entry,
        "binding_id": row.id,
        "export_id": row.export,
        "package_id": package.package_id,
        "package_version": package.version,
        "scope": json.loads(row.record)["scope"],
        "traffic_percent": row.traffic_percent,
    }
