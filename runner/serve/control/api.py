"""The routes of packages, bindings and discovery. Other modules add routes of their own in the same way: a
class with OPERATIONS, SCHEMAS and a method for each operation, which `ControlPlane.parts` lists.

Every binding and package has an ETag, its revision. A PATCH needs it as If-Match, so that nobody overwrites
what he has not seen. What belongs to another org is answered as if it did not exist.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from runner.serve.answers import Json, read_document, read_most
from runner.serve.control.bindings import (
    ControlBindings,
    binding_document,
    record_of_install,
    shown_faults,
)
from runner.serve.control.caller import ControlCaller, control_caller
from runner.serve.control.database import MOST_ROWS, BindingRow, HistoryRow, PackageRow
from runner.serve.control.discovery import Discovery
from runner.serve.control.operations import OPERATIONS, SCHEMAS
from runner.serve.control.packages import FILTERS, ControlPackages, package_card
from runner.serve.refusal import Refused


class ControlApi:
    OPERATIONS = OPERATIONS
    SCHEMAS = SCHEMAS

    def __init__(self, packages: ControlPackages, bindings: ControlBindings, discovery: Discovery) -> None:
        self._packages, self._bindings, self._discovery = packages, bindings, discovery

    # --- packages -------------------------------------------------------------------------------------------

    async def import_package(self, request: Request) -> Response:
        row, is_new = await self._packages.import_package(await read_document(request), _caller(request))
        return await self._package(row.id, request, 201 if is_new else 200)

    async def packages(self, request: Request) -> Response:
        query, caller = request.query_params, _caller(request)
        most = _rows(request)
        filters = {name: query[name] for name in FILTERS if name in query}
        found = await self._packages.search(caller, filters, query.get("after", ""), most)
        cards = [package_card(row, is_used, caller) for row, is_used in found]
        return Json({"packages": cards, "next": cards[-1]["id"] if len(cards) == most else None})

    async def package(self, request: Request) -> Response:
        return await self._package(request.path_params["package"], request)

    async def _package(self, name: str, request: Request, status: int = 200) -> Response:
        row, is_used = await self._packages.find(name, _caller(request))
        return Json(package_card(row, is_used, _caller(request)), status, headers=_etag(row))

    async def change_package(self, request: Request) -> Response:
        name, given = request.path_params["package"], await read_document(request)
        await self._packages.find(name, _caller(request))
        await self._packages.change(name, _revision(request), given, _caller(request))
        return await self._package(name, request)

    async def package_history(self, request: Request) -> Response:
        name = request.path_params["package"]
        await self._packages.find(name, _caller(request))
        return _history(await self._packages.history(name, _before(request), _rows(request)))

    async def withdraw(self, request: Request) -> Response:
        row = await self._packages.withdraw(request.path_params["package"], _caller(request), True)
        return await self._package(row.id, request)

    async def restore(self, request: Request) -> Response:
        row = await self._packages.withdraw(request.path_params["package"], _caller(request), False)
        return await self._package(row.id, request)

    async def install(self, request: Request) -> Response:
        caller = _caller(request)
        package, _ = await self._packages.find(request.path_params["package"], caller)
        record = record_of_install(package, await read_document(request))
        row = await self._bindings.create(json.dumps(record, indent=2).encode(), caller, "installed")
        return await self._binding(row, 201, request)

    # --- bindings -------------------------------------------------------------------------------------------

    async def create_binding(self, request: Request) -> Response:
        row = await self._bindings.create(await request.body(), _caller(request))
        return await self._binding(row, 201, request)

    async def bindings(self, request: Request) -> Response:
        query, caller = request.query_params, _caller(request)
        most = _rows(request)
        names = ("org_id", "project_id", "package", "kind")
        filters = {name: query[name] for name in names if name in query}
        rows = await self._bindings.search(caller, filters, query.get("after", ""), most)
        packages = {row.id: row for row, _ in await self._packages.search(caller, {}, "", MOST_ROWS)}
        shown = [binding_document(row, packages.get(row.package)) for row in rows]
        return Json({"bindings": shown, "next": rows[-1].id if len(rows) == most else None})

    async def binding(self, request: Request) -> Response:
        row = await self._bindings.find(request.path_params["binding"], _caller(request))
        return await self._binding(row, 200, request)

    async def _binding(self, row: BindingRow, status: int, request: Request) -> Response:
        package, _ = await self._packages.find(row.package, _caller(request))
        return Json(binding_document(row, package), status, headers=_etag(row))

    async def change_binding(self, request: Request) -> Response:
        caller, name, given = _caller(request), request.path_params["binding"], await read_document(request)
        await self._bindings.find(name, caller)  # what does not exist is told before what is missing
        row = await self._bindings.change(name, _revision(request), given, caller)
        return await self._binding(row, 200, request)

    async def validate_draft(self, request: Request) -> Response:
        return _validation(await self._bindings.validate(await request.body(), _caller(request)))

    async def validate_binding(self, request: Request) -> Response:
        given = await read_document(request) if await request.body() else {}
        name = request.path_params["binding"]
        return _validation(await self._bindings.validate_stored(name, given, _caller(request)))

    async def binding_history(self, request: Request) -> Response:
        name = request.path_params["binding"]
        rows = await self._bindings.history(name, _caller(request), _before(request), _rows(request))
        return _history(rows)

    # --- discovery ------------------------------------------------------------------------------------------

    async def plugin_harnesses(self, request: Request) -> Response:
        return await self._exports("harnesses", request)

    async def plugin_tools(self, request: Request) -> Response:
        return await self._exports("tools", request)

    async def plugin_hooks(self, request: Request) -> Response:
        return await self._exports("hooks", request)

    async def plugin_compactors(self, request: Request) -> Response:
        return await self._exports("compactors", request)

    async def _exports(self, kind: str, request: Request) -> Response:
        query = request.query_params
        scope = (_caller(request), query.get("org_id"), query.get("project_id"))
        found, following = await self._discovery.exports(
            kind, *scope, after=query.get("after", ""), most=_rows(request)
        )
        return Json({kind: found, "next": following})


def _caller(request: Request) -> ControlCaller:
    return control_caller(request.scope["state"]["caller"])


def _rows(request: Request) -> int:
    return max(1, min(read_most(request.query_params.get("most")), MOST_ROWS))


def _before(request: Request) -> int | None:
    word = request.query_params.get("before")
    if word is None:
        return None
    if not word.isascii() or not word.isdigit() or len(word) > 9:
        raise Refused(400, "invalid_query", "before: it has to be a revision")
    return int(word)


def _etag(row: PackageRow | BindingRow) -> dict[str, str]:
    return {"ETag": f'"{row.revision}"'}


def _revision(request: Request) -> int:
    """The revision that the caller has seen. Raises Refused."""
    given = request.headers.get("if-match")
    if given is None:
        hint = "read it, and send its ETag as If-Match"
        raise Refused(428, "if_match_required", "a change needs the header If-Match", hint)
    word = given.strip().removeprefix('"').removesuffix('"')
    if not word.isascii() or not word.isdigit() or len(word) > 9:
        return -1  # the ETag of nothing
    return int(word)


def _history(rows: list[HistoryRow]) -> Response:
    shown = [
        {
            "revision": row.revision,
            "at": row.at,
            "caller": row.caller,
            "change": row.change,
            "document": json.loads(row.document),
        }
        for row in rows
    ]
    return Json({"history": shown})


def _validation(faults: Any) -> Response:
    valid = not any(each.severity == "error" for each in faults)
    return Json({"valid": valid, "faults": shown_faults(faults)})
