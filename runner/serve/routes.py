"""What the door offers: one method for each route of runner/serve/openapi.py.

No route writes an approval, a policy or a manifest; a yes for good is kept by the gateway that
asked it. Who may call decides runner/serve/door.py.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from runner.build import build_version
from runner.exceptions import PluginError, PluginFailure
from runner.ledger.file import MOST_ROWS, LedgerFile, LedgerUnusable, is_long
from runner.ledger.ledger import Ledger
from runner.ledger.rows import (
    DeliveriesFull,
    Delivery,
    DeliveryConflict,
    DeliveryRow,
    DeliveryState,
    DeliveryTooLarge,
    InvocationRow,
)
from runner.ledger.sqlite_file import DatabaseUnusable
from runner.lifecycle.exceptions import UnknownPlugin
from runner.lifecycle.feed import LineTimes
from runner.protocol.calls import CallRequest
from runner.serve.alerts import Alerts
from runner.serve.answers import Json, read_document, read_moment, read_most
from runner.serve.calling import answer_call, read_seconds, with_headers
from runner.serve.control.database import ControlRefusal
from runner.serve.deliveries import Deliveries, delivery_of, posted_id, type_of, verdict_of
from runner.serve.desk import Desk
from runner.serve.event_stream import Emit, EventStream
from runner.serve.metrics import CONTENT_TYPE, LedgerGauges, Metrics
from runner.serve.mounted import Mounted
from runner.serve.openapi import OPERATIONS, Operation, RoutePart, document
from runner.serve.page.page import Handler, Page
from runner.serve.peer import PAGE, VISITOR, is_local, org_of
from runner.serve.pending import REMEMBERED, Consent, PendingConfirmations
from runner.serve.plugins import DoorPlugins
from runner.serve.refusal import STATUS, Refused, outcome_error
from runner.serve.roster import Roster
from runner.serve.sources import SourceFault

# The ledger keeps names whole. Without a bound they could hold what a body holds, and push out other rows.
_MOST_NAME = 4096  # characters: it may be the address of a resource
_MOST_KIND = 64
_MOST_HOOKS = 1000  # that one event goes to
_MOST_REASONS = 100  # of the daemon's health
_MOST_REASON = 500  # characters
_STATES: tuple[DeliveryState, ...] = ("queued", "running", "acked", "dead")


class Routes:
    def __init__(
        self,
        supervisor: DoorPlugins,
        ledger: Ledger,
        desk: Desk,
        deliveries: Deliveries,
        roster: Roster,
        metrics: Metrics,
        page: Page,
        drain: Callable[[float | None], None],
        reload: Callable[[], Awaitable[None]],
        alerts: Alerts,
        mounted: Mounted | None = None,
        pending: PendingConfirmations | None = None,
        parts: Sequence[RoutePart] = (),
        more_faults: Callable[[], Sequence[SourceFault]] = tuple,
    ) -> None:
        self._supervisor = supervisor
        self._ledger = ledger
        self._desk = desk
        self._deliveries = deliveries
        self._roster = roster
        self._metrics = metrics
        self._page = page
        self._drain = drain
        self._reload = reload
        self._alerts = alerts
        self._mounted = mounted
        self._pending = pending or PendingConfirmations()
        self._parts = parts
        self._more_faults = more_faults
        self.version = build_version()  # now: an upgrade replaces the files of a daemon that runs

    def application(self) -> ASGIApp:
        """A token of an org finds the routes of the control plane, and no others."""
        own = [self._route(each, getattr(self, each.name)) for each in OPERATIONS]
        more = [(each, getattr(part, each.name)) for part in self._parts for each in part.OPERATIONS]
        control = [self._route(each, handle) for each, handle in more if each.control]
        mounted = [] if self._mounted is None else [Route(self._mounted.path, self._mounted)]
        everybody = self._starlette([*own, *mounted, *self._page.routes(), *control], _no_route)
        orgs = self._starlette(control, _no_route_for_orgs)

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            found = orgs if org_of(scope["state"]["caller"]) else everybody
            await found(scope, receive, send)

        return serve

    def _starlette(self, routes: Sequence[Route], no_route: _MakeRefused) -> Starlette:
        def refusing(make: _MakeRefused) -> ExceptionHandler:
            async def refuse(request: Request, error: Exception) -> Response:
                refused = make(request, error)
                self._metrics.refusal(refused.code)
                return Json(refused.document(), refused.status, headers=refused.headers())

            return refuse

        async def fail(request: Request, error: Exception) -> Response:
            assert isinstance(error, PluginFailure | PluginError)  # of a start, a list or a reload
            return Json(outcome_error(error.outcome), STATUS[error.outcome.code])

        own = {HTTPException: no_route, DeliveriesFull: self._full_share}
        handlers = {kind: refusing(make) for kind, make in (_REFUSALS | own).items()}
        handlers |= {PluginFailure: fail, PluginError: fail}
        made = Starlette(routes=routes, exception_handlers=handlers)
        made.router.redirect_slashes = False
        return made

    def _full_share(self, request: Request, full: Exception) -> Refused:
        hint = "deliver again later, or remove some (DELETE /deliveries/ID); runner ps shows what their"
        hint += " plugins wait for"
        self._alerts.tell("full share", f"{full}; {hint}")
        return Refused(429, "overloaded", str(full), hint, retry_after=60)

    def _route(self, operation: Operation, handle: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            caller = request.scope["state"]["caller"]
            if caller == VISITOR:
                raise Refused(401, "wrong_token", "the request has no valid token")
            if operation.control:
                _require_control_right(caller, operation)
            if operation.local and not is_local(caller) and not (operation.page and caller == PAGE):
                raise Refused(403, "local_only", "this is for callers on the daemon's unix socket")
            _require_known_query(request, operation)
            name = request.path_params.get("name")
            if name is not None and not self._sees(request, name):
                raise UnknownPlugin(name)
            return await handle(request)

        return Route(operation.path, endpoint, methods=[operation.method])

    def _sees(self, request: Request, plugin: str) -> bool:
        """Whether a plugin exists for a caller. Bindings of orgs are plugins of the supervisor that are not
        in the roster: only the operator sees them here."""
        return is_local(request.scope["state"]["caller"]) or self._roster.knows(plugin)

    # --- the daemon -----------------------------------------------------------------------------------------

    async def live(self, request: Request) -> Response:
        return Json({"status": "live"})

    async def health(self, request: Request) -> Response:
        found = await self._health(request)
        return Json(found, 503 if found["status"] in ("draining", "unavailable") else 200)

    async def _health(self, request: Request) -> dict[str, Any]:
        """Who balances loads sends calls elsewhere while the daemon takes none. What concerns one plugin, or
        asks for a person, is no reason for that."""
        warnings = await self._warnings(request)
        word, reasons = "degraded" if warnings else "ok", warnings
        if fault := self._ledger.fault:
            word, reasons = "unavailable", [_reason("ledger", fault), *reasons]
        if self._desk.draining:
            word, reasons = "draining", [_reason("draining", "the daemon ends and takes no calls"), *reasons]
        if len(reasons) > _MOST_REASONS:
            more = _reason("more", f"{len(reasons) - _MOST_REASONS} further reasons")
            reasons = [*reasons[:_MOST_REASONS], more]
        return {
            "status": word,
            "reasons": reasons,
            "version": self.version,
            "ledger": {"fault": self._ledger.fault, "owed": self._ledger.owed},
            "calls": self._desk.in_flight,
            "configuration": self._faults(),
        }

    async def _warnings(self, request: Request) -> list[dict[str, str]]:
        seen = [each for each in self._supervisor.plugins() if self._sees(request, each.name)]
        held = [each for each in seen if each.state == "quarantined"]
        found = [_reason("quarantined", f"{each.name}: {each.reason}") for each in held]
        if dead := (await self._open_deliveries()).get("dead"):
            found.append(
                _reason("dead_deliveries", f"{dead} are dead: GET /deliveries?state=dead lists them")
            )
        return found + [
            _reason("configuration", f"{each['path']}: {each['message']}") for each in self._faults()
        ]

    async def _open_deliveries(self) -> dict[DeliveryState, int]:
        """Empty if the ledger cannot be read."""
        if not self._ledger.fault:  # else each look would wait for a lock of another program
            with suppress(LedgerUnusable):
                return await self._ledger.do(LedgerFile.open_deliveries)
        return {}

    def _faults(self) -> list[dict[str, str]]:
        faults = (*self._roster.faults, *self._more_faults())
        return [{"path": each.path, "message": each.message} for each in faults]

    async def metrics(self, request: Request) -> Response:
        seen = [each for each in self._supervisor.plugins() if self._sees(request, each.name)]
        ledger = LedgerGauges(self._ledger.owed, bool(self._ledger.fault), await self._open_deliveries())
        text = await trio.to_thread.run_sync(self._metrics.text, seen, ledger)
        return Response(text, media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        return Json(document(self._parts))

    async def drain(self, request: Request) -> Response:
        self._drain(read_seconds(request.query_params.get("seconds"), "seconds"))
        return Json({"draining": True}, 202)

    async def reload_all(self, request: Request) -> Response:
        await self._reload()
        return Json(await self._health(request))

    async def events(self, request: Request) -> Response:
        feed = self._supervisor.subscribe()

        async def produce(emit: Emit) -> None:
            async for event in feed:
                if self._sees(request, event.name):
                    await emit("lifecycle", event._asdict())

        return EventStream(produce, feed.close)

    async def open_page(self, request: Request) -> Response:
        return Json(self._page.open(), 201)

    async def end_sessions(self, request: Request) -> Response:
        return Json({"ended": self._page.sessions.end_all()})

    # --- confirmations --------------------------------------------------------------------------------------

    async def pending(self, request: Request) -> Response:
        return Json({"pending": self._pending.list()})

    async def approve(self, request: Request) -> Response:
        word = request.query_params.get("remember", "once")
        remembered = next((each for each in REMEMBERED if each == word), None)
        if remembered is None:
            raise Refused(400, "invalid_query", f"remember is one of {', '.join(REMEMBERED)}")
        return await self._decide(request, Consent(True, remembered))

    async def deny(self, request: Request) -> Response:
        return await self._decide(request, Consent(False))

    async def _decide(self, request: Request, consent: Consent) -> Response:
        number = request.path_params["confirmation"]
        by = request.scope["state"]["caller"]
        consent = consent._replace(by=by if consent.allowed else f"{by} said no")
        try:
            row = self._pending.decide(number, consent)
        except KeyError:
            message = f"no confirmation {number[:60]!a} waits for an answer: it has one, or its time is over"
            raise Refused(404, "no_such_confirmation", message, "runner ctl pending lists them") from None
        if row["kind"] == "host":  # of a call, the answer is noted by what waits for it
            detail = json.dumps({**row, **consent._asdict()})
            await self._ledger.note("confirm", by, row["plugin"], detail)
        return Json({**row, "allowed": consent.allowed})

    # --- plugins --------------------------------------------------------------------------------------------

    async def plugins(self, request: Request) -> Response:
        seen = (each for each in self._supervisor.plugins() if self._sees(request, each.name))
        described = [self._roster.describe(each) for each in seen]
        return Json({"plugins": described, "configuration": self._faults()})

    async def plugin(self, request: Request) -> Response:
        return Json(self._described(request))

    def _described(self, request: Request) -> dict[str, Any]:
        name = request.path_params["name"]
        for each in self._supervisor.plugins():
            if each.name == name:
                return self._roster.describe(each)
        raise UnknownPlugin(name)

    async def explain(self, request: Request) -> Response:
        return Json(await self._roster.explain(request.path_params["name"]))

    async def tools(self, request: Request) -> Response:
        return Json({"tools": await self._supervisor.tools(request.path_params["name"])})

    async def start(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._roster.supervisor_of(name).start(name)
        return Json(self._described(request))

    async def stop(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._roster.supervisor_of(name).stop(name)
        return Json(self._described(request))

    async def reset(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._roster.supervisor_of(name).reset(name)
        return Json(self._described(request))

    async def reload(self, request: Request) -> Response:
        await self._roster.reload(request.path_params["name"])
        return Json(self._described(request))

    async def logs(self, request: Request) -> Response:
        name, times = request.path_params["name"], LineTimes()
        supervisor = self._roster.supervisor_of(name)
        with_times = request.query_params.get("times") in ("1", "true")
        if with_times:
            text = "".join(map(times.write, supervisor.log_lines(name)))
        else:
            text = supervisor.logs(name)
        if request.query_params.get("follow") not in ("1", "true"):
            return Response(text, media_type="text/plain; charset=utf-8")
        feed = supervisor.follow(name)

        async def produce(emit: Emit) -> None:
            await emit("log", {"text": text})
            async for piece in feed:
                await emit("log", {"text": times.write(piece) if with_times else piece})

        return EventStream(produce, feed.close)

    # --- calls ----------------------------------------------------------------------------------------------

    async def call(self, request: Request) -> Response:
        return await answer_call(self._desk, request, await _call_request(request))

    async def cancel(self, request: Request) -> Response:
        call = request.path_params["call"]
        if self._desk.cancel(call, _only_own(request)):
            return Json({"id": call, "cancelled": True}, 202)
        raise Refused(
            404, "no_such_call", f"the call {call!a} is not in flight", "GET /calls/ID has its record"
        )

    async def calls(self, request: Request) -> Response:
        query, caller = request.query_params, _only_own(request)
        most, after = read_most(query.get("most")), query.get("after")
        if after is not None:
            row = await self._ledger.do(LedgerFile.invocation, after)
            if row is None or caller not in (None, row.caller):
                raise _no_row(after)
        times = read_moment(query, "since"), read_moment(query, "until")
        asked = query.get("plugin"), query.get("code"), caller, most, after, *times
        rows = await self._ledger.do(LedgerFile.invocations, *asked)
        return Json({"calls": [_row(row) for row in rows], "next": _next(rows, most)})

    async def record(self, request: Request) -> Response:
        call = request.path_params["call"]
        row = await self._ledger.do(LedgerFile.invocation, call)
        if row is None or _only_own(request) not in (None, row.caller):
            raise Refused(404, "no_such_call", f"there is no record of a call {call!a}")
        return Json(_row(row))

    # --- deliveries and audit -------------------------------------------------------------------------------

    async def deliver(self, request: Request) -> Response:
        document = await read_document(request)
        try:
            delivery = delivery_of(document)
            event = "" if delivery.hook else type_of(document)
        except ValueError as error:
            raise Refused(400, "invalid_delivery", str(error)) from None
        if delivery.plugin and not self._roster.knows(delivery.plugin):
            raise UnknownPlugin(delivery.plugin)  # a binding's events come by the control plane
        caller: str = request.scope["state"]["caller"]
        own = delivery.id if is_local(caller) else posted_id(caller, delivery.id)
        delivery = delivery._replace(id=own, poster=caller)
        if delivery.hook:
            if (fault := await self._hook_fault(delivery)) is not None:
                raise fault
            answer = (await self._ledger.enqueue(delivery))._asdict()
        else:
            answer = await self._fan_out(delivery, event)
        self._deliveries.wake()
        return Json(answer, 202)

    async def _fan_out(self, event: Delivery, kind: str) -> dict[str, Any]:
        hooks = self._roster.hooks_for(kind, event.plugin or None)
        if len(hooks) > _MOST_HOOKS:
            message = f"{len(hooks)} hooks want this event; {_MOST_HOOKS} are the most"
            raise Refused(413, "too_many_hooks", message, "deliver it to one plugin at a time")
        faults = [await self._hook_fault(event._replace(plugin=each, hook=hook)) for each, hook in hooks]
        if faults and None not in faults:
            raise next(filter(None, faults))
        rows = await self._ledger.enqueue_all(event, hooks)
        shown = ("id", "plugin", "hook", "state", "attempt")  # not the event, for each of them again
        return {"id": event.id, "deliveries": [{key: getattr(row, key) for key in shown} for row in rows]}

    async def _hook_fault(self, delivery: Delivery) -> PluginError | PluginFailure | None:
        """Why no attempt of the delivery can succeed, by the plugin's manifest. None: one may."""
        try:
            await self._roster.try_hook(delivery)
        except (PluginError, PluginFailure) as error:
            # Whatever is tried again, the hook will not be there.
            missing = error.outcome.code == "tool_not_exposed"
            return error if missing or verdict_of(error) == "dead" else None
        return None

    async def deliveries(self, request: Request) -> Response:
        state = _state_of(request)
        most, after = read_most(request.query_params.get("most")), request.query_params.get("after")
        if after is not None and await self._ledger.do(LedgerFile.delivery, after) is None:
            raise _no_row(after)
        rows = await self._ledger.do(LedgerFile.deliveries, state, most, after)
        return Json({"deliveries": [row._asdict() for row in rows], "next": _next(rows, most)})

    async def delivery(self, request: Request) -> Response:
        return Json((await self._own_delivery(request))._asdict())

    async def _own_delivery(self, request: Request) -> DeliveryRow:
        """The delivery that a request names: by its id, or by the one that the caller gave it. Those of
        others do not exist, but for the operator. Raises Refused."""
        name, caller = request.path_params["delivery"], _only_own(request)
        for each in (name,) if caller is None else (name, posted_id(caller, name)):
            row = await self._ledger.do(LedgerFile.delivery, each)
            if row is not None and caller in (None, row.poster):
                return row
        raise Refused(404, "no_such_delivery", f"there is no delivery {name!a}")

    async def repeat(self, request: Request) -> Response:
        row = await self._own_delivery(request)
        try:
            row = await self._ledger.do(LedgerFile.repeat, row.id)
        except DeliveryConflict as conflict:
            raise Refused(409, "delivery_conflict", str(conflict)) from None
        self._deliveries.wake()
        return Json(row._asdict(), 202)

    async def remove(self, request: Request) -> Response:
        row, state = await self._own_delivery(request), _state_of(request)
        try:
            row = await self._ledger.do(LedgerFile.remove, row.id, request.scope["state"]["caller"], state)
        except DeliveryConflict as conflict:
            hint = "wait until the attempt has ended, or stop the plugin: runner ctl stop NAME"
            if state is not None:
                hint = "runner ctl show NAME says how it is; runner ctl remove NAME drops one that waits"
            raise Refused(409, "delivery_conflict", str(conflict), hint) from None
        return Json({"id": row.id, "plugin": row.plugin, "hook": row.hook, "removed": True})

    async def audit(self, request: Request) -> Response:
        query = request.query_params
        rows = await self._ledger.do(LedgerFile.audit, query.get("what"), read_most(query.get("most")))
        return Json({"audit": [{**row._asdict(), "detail": json.loads(row.detail)} for row in rows]})


# --- requests and answers -----------------------------------------------------------------------------------


def _reason(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message[:_MOST_REASON]}


def _no_route(request: Request, error: Exception) -> Refused:
    message = f"there is no {request.method} {request.url.path}"
    return Refused(404, "no_route", message, "see /openapi.json")


def _no_route_for_orgs(request: Request, error: Exception) -> Refused:
    message = "a token of an org is for the routes of the control plane: /v1/plugin-…"
    return Refused(403, "org_token", message, "ask the operator, who uses the unix socket")


# What is answered when one of these, or of its kinds, is raised for a request.
_MakeRefused = Callable[[Request, Any], Refused]
_PS = "runner ps and GET /plugins list them"
_ONE_ID = "give each event an id of its own"
_SMALLER = "deliver it to one plugin at a time, or make the event smaller"
_REFUSALS: dict[type[Exception], _MakeRefused] = {
    Refused: lambda _, refused: refused,
    ControlRefusal: lambda _, error: Refused(error.status, error.code, str(error), error.hint),
    DatabaseUnusable: lambda _, error: Refused(503, "database", str(error), error.hint, retry_after=5),
    LedgerUnusable: lambda _, error: Refused(503, "ledger", str(error), error.hint, retry_after=5),
    UnknownPlugin: lambda _, error: Refused(404, "unknown_plugin", str(error), _PS),
    DeliveryConflict: lambda _, error: Refused(409, "delivery_conflict", str(error), _ONE_ID),
    DeliveryTooLarge: lambda _, error: Refused(413, "event_too_large", str(error), _SMALLER),
    # Starlette raises it again, so that the connection tells it.
    Exception: lambda _, error: Refused(500, "internal", "a bug of the daemon; its stderr says which"),
}


def _require_control_right(caller: str, operation: Operation) -> None:
    """The control plane is for the operator and for orgs, and for nobody else on the network. Raises
    Refused."""
    if org_of(caller) and operation.control != "org":
        raise Refused(403, "operator_only", "this is for the operator, on the daemon's unix socket")
    if not org_of(caller) and not is_local(caller):
        hint = "send the header Authorization: Bearer TOKEN, with a token of an org"
        raise Refused(403, "org_required", "this is for the operator and for tokens of orgs", hint)


def _require_known_query(request: Request, operation: Operation) -> None:
    """Raises Refused. A parameter that is not known, such as a filter with a wrong name, would be answered
    with everything."""
    if operation.name in ("live", "health", "metrics"):
        return  # load balancers and scrapers add parameters of their own
    known = [each.name for each in operation.parameters if each.place == "query"]
    given = [key for key, _ in request.query_params.multi_items()]
    if strays := [key for key in given if key not in known]:
        message = f"there is no parameter {strays[0][:60]!a}"
        hint = f"{operation.path} takes {', '.join(known)}" if known else f"{operation.path} takes none"
        raise Refused(400, "invalid_query", message, hint)
    if twice := [key for key in known if given.count(key) > 1]:
        raise Refused(400, "invalid_query", f"the parameter {twice[0]} is given twice")


def _no_row(after: str) -> Refused:
    message = f"after: there is no row {after[:60]!a}, or it is no longer kept"
    return Refused(400, "invalid_query", message, "begin again without `after`")


def _state_of(request: Request) -> DeliveryState | None:
    """The state of deliveries that a query names. Raises Refused."""
    word = request.query_params.get("state")
    state = next((each for each in _STATES if each == word), None)
    if word is not None and state is None:
        raise Refused(400, "invalid_query", f"state is one of {', '.join(_STATES)}")
    return state


def _only_own(request: Request) -> str | None:
    """The caller, if it may see and cancel its own calls only: a network caller has less than a local one."""
    caller: str = request.scope["state"]["caller"]
    return None if is_local(caller) else caller


async def _call_request(request: Request) -> CallRequest:
    given = await read_document(request)
    if strays := sorted(given.keys() - {"tool", "input", "kind", "context"}):
        raise Refused(400, "invalid_body", f"the body has the unknown key {strays[0][:60]!a}")
    tool, kind, context = given.get("tool"), given.get("kind"), given.get("context")
    if not isinstance(tool, str) or not 0 < len(tool) <= _MOST_NAME:
        message = f"tool: it has to be the name of what is called, of 1 to {_MOST_NAME} characters"
        raise Refused(400, "invalid_body", message)
    if (
        not isinstance(kind, str | None)
        or not isinstance(context, dict | None)
        or len(kind or "") > _MOST_KIND
    ):
        raise Refused(400, "invalid_body", "kind has to be a text, and context an object")
    asked = CallRequest(request.path_params["name"], tool, given.get("input"), kind, context=context)
    return with_headers(request, asked)


def _row(row: Any) -> dict[str, Any]:
    found: dict[str, Any] = row._asdict()
    found.pop("answer")
    return {**found, "record": json.loads(found["record"] or "null")}


def _next(rows: list[InvocationRow] | list[DeliveryRow], most: int) -> str | None:
    """What `after` of the request for the next rows is; None: there are none."""
    return rows[-1].id if rows and (len(rows) >= min(most, MOST_ROWS) or is_long(rows)) else None
