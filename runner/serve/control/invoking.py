"""The routes by which orgs use their bindings: calls, their records, and events for hooks.

The caller is an org, which finds its own bindings and calls and no others, or the operator, who finds all.
What belongs to somebody else is answered like what does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from runner.contracts.registry import find_contract
from runner.ledger.file import LedgerFile
from runner.ledger.ledger import Ledger
from runner.ledger.rows import DeliveryRow
from runner.protocol.calls import CallRequest
from runner.serve.answers import Json, read_document
from runner.serve.calling import answer_call, with_headers
from runner.serve.control.bindings import ControlBindings
from runner.serve.control.caller import ControlCaller, control_caller
from runner.serve.control.database import ControlFile, is_long
from runner.serve.control.discovery import KINDS
from runner.serve.control.events import event_id, read_event, subscribers
from runner.serve.control.records import read_query
from runner.serve.control.running import PREFIX, BindingCall, LiveBinding, RunningBindings
from runner.serve.deliveries import Deliveries
from runner.serve.desk import Desk
from runner.serve.openapi import Operation, Parameter, Schema
from runner.serve.refusal import Refused

_MOST_CALLS = 256  # of one org at once: the daemon has 1024 for all
_MOST_SESSIONS = 10_000  # that one request asks about
_MOST_ID = 256
_MOST_SHOWN = 10  # bindings in a message
_LINES = "application/x-ndjson"
_ONE: Schema = {"type": "object"}


def _call(name: str, path: str, text: str) -> Operation:
    parameters = (
        Parameter("Idempotency-Key", "header", "the same key gets the same answer, and no second call"),
        Parameter("Runner-Deadline", "header", "seconds for the call", {"type": "number"}),
    )
    return Operation(name, "POST", path, text, "Answer", 200, parameters, "Invoke", True, control="org")


class RunningRoutes:
    OPERATIONS = (
        _call(
            "invoke",
            "/v1/plugin-bindings/{binding}:invoke",
            "Call the export of a binding. Streams, cancels and repeats as POST /plugins/NAME/calls.",
        ),
        _call(
            "invoke_export",
            "/v1/plugin-{kind}/{export}:invoke",
            "Call an export by the binding of the project, or else of the org. The kind is a plural: tools.",
        ),
        Operation(
            "select",
            "POST",
            "/v1/plugin-bindings/{binding}:select",
            "Which sessions the rollout of a binding includes.",
            "Selected",
            body="Select",
            control="org",
        ),
        Operation(
            "invocations",
            "GET",
            "/v1/plugin-invocations",
            f"Records of calls by bindings, the newest first. With `Accept: {_LINES}` one a line.",
            "Invocations",
            parameters=(
                Parameter("since", "query", "started then or later: RFC 3339, or seconds since 1970"),
                Parameter("until", "query", "started before"),
                Parameter("binding", "query", "only by this binding"),
                Parameter("status", "query", "succeeded, failed, cancelled or retryable_failure"),
                Parameter("limit", "query", "how many, 100 if it is missing", {"type": "integer"}),
                Parameter(
                    "after", "query", "`after` of the answer before: further ones", {"type": "integer"}
                ),
                Parameter("org", "query", "of the operator: only of this org"),
            ),
            control="org",
        ),
        Operation(
            "invocation",
            "GET",
            "/v1/plugin-invocations/{call}",
            "The record of one call.",
            "Invocation",
            control="org",
        ),
        Operation(
            "cancel_invocation",
            "DELETE",
            "/v1/plugin-invocations/{call}",
            "Cancel a call that runs.",
            "Cancelled",
            202,
            control="org",
        ),
        Operation(
            "event",
            "POST",
            "/v1/plugin-events",
            "Store an event for every hook of the org's bindings that wants it. Each gets it at least once.",
            "Spread",
            202,
            body="OrgEvent",
            control="org",
        ),
        Operation(
            "event_deliveries",
            "GET",
            "/v1/plugin-events/{event}",
            "Whether an event has arrived.",
            "Spread",
            control="org",
        ),
    )
    SCHEMAS: Mapping[str, Schema] = {
        "Invoke": {
            "type": "object",
            "properties": {"input": {}, "context": _ONE, "package_id": {"type": "string"}},
            "additionalProperties": False,
        },
        "Select": {
            "type": "object",
            "properties": {"session_ids": {"type": "array", "items": {"type": "string"}}},
            "required": ["session_ids"],
            "additionalProperties": False,
        },
        "Selected": {
            "type": "object",
            "properties": {
                "traffic_percent": {"type": "integer"},
                "included": {"type": "array", "items": {"type": "string"}},
            },
        },
        "Invocation": _ONE,
        "Invocations": {
            "type": "object",
            "properties": {
                "invocations": {"type": "array", "items": _ONE},
                "after": {"type": ["integer", "null"]},
            },
        },
        "OrgEvent": {
            "type": "object",
            "properties": {
                "event": _ONE,
                **{
                    key: {"type": "string"}
                    for key in ("id", "org_id", "project_id", "session_id", "chain_id", "run_id", "trace_id")
                },
            },
            "required": ["event"],
            "additionalProperties": False,
        },
    }

    def __init__(
        self,
        running: RunningBindings,
        bindings: ControlBindings,
        desk: Desk,
        ledger: Ledger,
        deliveries: Deliveries,
    ) -> None:
        self._running, self._bindings, self._database = running, bindings, running.database
        self._desk, self._ledger, self._deliveries = desk, ledger, deliveries

    # --- calls ----------------------------------------------------------------------------------------------

    async def invoke(self, request: Request) -> Response:
        given = await _read_call(request)
        if "package_id" in given:
            raise Refused(400, "invalid_body", "package_id is for calls by the name of an export")
        live = await self._visible(request)
        return await self._invoke(request, live, given)

    async def invoke_export(self, request: Request) -> Response:
        kind, export = request.path_params["kind"], request.path_params["export"]
        if kind not in KINDS:
            message = f"there are no exports of the kind {kind[:_MOST_ID]!a}"
            raise Refused(404, "no_route", message, f"it is one of {', '.join(KINDS)}")
        given = await _read_call(request)
        context = given.get("context", {})
        org = _org_in(request, context.get("org_id"), "context.org_id")
        project = context.get("project_id")
        if not _is_id(project or "any"):
            raise Refused(400, "invalid_body", "context.project_id is not the id of a project")
        found = [
            each for each in await self._running.effective(org, project, kind) if each.row.export == export
        ]
        if (package := given.get("package_id")) is not None:
            found = [each for each in found if each.package.package_id == package]
        if not found:
            what = f"{export[:_MOST_ID]!a} among the {kind} of the org" + (
                " and the project" if project else ""
            )
            raise Refused(
                404, "no_such_binding", f"no binding is for {what}", f"GET /v1/plugin-{kind} lists them"
            )
        if len(found) > 1:
            names = ", ".join(each.row.id for each in found[:_MOST_SHOWN])
            message = f"several bindings are for {export} in this scope: {names}"
            raise Refused(409, "several_bindings", message, "call one of them by its id, or say package_id")
        return await self._invoke(request, found[0], given)

    async def _invoke(self, request: Request, live: LiveBinding, given: Mapping[str, Any]) -> Response:
        caller = _caller(request)
        if caller.org and self._desk.calls_of(caller.name) >= _MOST_CALLS:
            message = f"the org has {_MOST_CALLS} calls in flight, which is the most"
            raise Refused(429, "overloaded", message, "come back later", retry_after=1)
        call = CallRequest(
            live.name, live.row.export, given.get("input"), live.row.kind, context=given.get("context")
        )
        target = BindingCall(self._running, live)
        return await answer_call(self._desk, request, with_headers(request, call), target)

    async def select(self, request: Request) -> Response:
        given = await read_document(request)
        sessions = given.get("session_ids")
        if (
            given.keys() != {"session_ids"}
            or not isinstance(sessions, list)
            or not all(map(_is_id, sessions))
        ):
            raise Refused(400, "invalid_body", 'the body is {"session_ids": […]}, with ids of sessions')
        if len(sessions) > _MOST_SESSIONS:
            raise Refused(413, "too_many_sessions", f"{_MOST_SESSIONS} sessions at once are the most")
        live = await self._visible(request)
        bindings = find_contract(live.plugin.contract).bindings
        assert bindings is not None
        percent = 0 if live.inactive else live.row.traffic_percent
        included = [
            each for each in sessions if bindings.is_selected(live.row.id, {"session_id": each}, percent)
        ]
        return Json({"binding_id": live.row.id, "traffic_percent": percent, "included": included})

    async def _visible(self, request: Request) -> LiveBinding:
        row = await self._bindings.find(request.path_params["binding"], _caller(request))
        return await self._running.bound(row)

    # --- records --------------------------------------------------------------------------------------------

    async def invocations(self, request: Request) -> Response:
        asked, caller = read_query(request.query_params), _caller(request)
        if caller.org and asked.org not in (None, caller.org):
            raise Refused(403, "other_org", "org is another org than that of the token")
        rows = await self._database.do(
            ControlFile.records,
            *(asked.org or caller.only, asked.binding, asked.status, asked.since, asked.until),
            before=asked.before,
            most=asked.most,
        )
        after = rows[-1].number if len(rows) == asked.most or is_long(rows) else None
        if _LINES in request.headers.get("accept", ""):
            headers = {} if after is None else {"Runner-After": str(after)}
            return Response("".join(f"{row.document}\n" for row in rows), 200, headers, _LINES)
        # The documents are JSON already.
        text = f'{{"invocations":[{",".join(row.document for row in rows)}],"after":{json.dumps(after)}}}'
        return Response(text, media_type="application/json")

    async def invocation(self, request: Request) -> Response:
        call = request.path_params["call"]
        row = await self._database.do(ControlFile.record, call)
        if row is None or not _caller(request).sees(row.org):
            raise Refused(404, "no_such_call", f"there is no record of a call {call[:_MOST_ID]!a}")
        return Response(row.document, media_type="application/json")

    async def cancel_invocation(self, request: Request) -> Response:
        call = request.path_params["call"]
        caller = _caller(request)
        if not self._desk.cancel(call, caller.name if caller.org else None):
            message = f"the call {call[:_MOST_ID]!a} is not in flight"
            raise Refused(404, "no_such_call", message, "GET /v1/plugin-invocations/ID has its record")
        return Json({"id": call, "cancelled": True}, 202)

    # --- events ---------------------------------------------------------------------------------------------

    async def event(self, request: Request) -> Response:
        given = await read_document(request)
        org = _org_in(request, given.get("org_id"), "org_id")
        try:
            event, kind = read_event(given, org)
        except ValueError as error:
            raise Refused(400, "invalid_event", str(error)) from None
        hooks = await subscribers(self._running, event, kind)
        rows = await self._ledger.enqueue_all(event, hooks)
        self._deliveries.wake()
        return Json(_spread(event.id, rows), 202)

    async def event_deliveries(self, request: Request) -> Response:
        """By the id that the answer to the event has, or, for an org, by its own."""
        name, caller = request.path_params["event"], _caller(request)
        rows = await self._ledger.do(LedgerFile.deliveries_of, name)
        rows = rows or await self._ledger.do(LedgerFile.deliveries_of, event_id(caller.org, name))
        rows = [row for row in rows if caller.sees(json.loads(row.context).get("org_id", ""))]
        if not rows:
            raise Refused(404, "no_such_event", f"there is no event {name[:_MOST_ID]!a}, or nobody wanted it")
        return Json(_spread(name, rows))


def _spread(event: str, rows: list[DeliveryRow]) -> dict[str, Any]:
    deliveries = [
        {
            "id": row.id,
            "binding_id": row.plugin.removeprefix(PREFIX),
            "hook": row.hook,
            "state": row.state,
            "attempt": row.attempt,
            "code": row.code,
        }
        for row in rows
    ]
    return {"id": event, "deliveries": deliveries}


async def _read_call(request: Request) -> dict[str, Any]:
    given = await read_document(request)
    if strays := sorted(given.keys() - {"input", "context", "package_id"}):
        raise Refused(400, "invalid_body", f"the body has the unknown key {strays[0][:60]!a}")
    context = given.get("context", {})
    if not isinstance(context, dict) or not _is_id(given.get("package_id", "any")):
        raise Refused(400, "invalid_body", "context has to be an object, and package_id a text")
    if "invocation_id" in context:
        raise Refused(400, "invalid_body", "invocation_id: the daemon makes it; trace_id may be yours")
    return given


def _caller(request: Request) -> ControlCaller:
    return control_caller(request.scope["state"]["caller"])


def _org_in(request: Request, given: Any, where: str) -> str:
    """The org that a request is for. Raises Refused."""
    own = _caller(request).org
    if own and given not in (None, own):
        raise Refused(403, "other_org", f"{where} is another org than that of the token")
    found = own or given
    if not _is_id(found):
        raise Refused(400, "invalid_body", f"{where}: the operator has to say for which org")
    return str(found)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MOST_ID and value.isprintable()
