"""The routes of the door, as one table. The application and the OpenAPI document are made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from runner import __version__

Schema = dict[str, Any]
Place = Literal["query", "header"]
_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_ANY: Schema = {}


class Parameter(NamedTuple):
    name: str
    place: Place
    text: str
    schema: Schema = _TEXT


class Operation(NamedTuple):
    name: str  # of the method of runner/serve/routes.py
    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    text: str
    answer: str  # the name of a schema, or a media type for what is not JSON
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    body: str = ""  # the name of a schema
    streams: bool = False  # it may answer with server-sent events
    local: bool = False  # only for callers on the unix socket
    page: bool = False  # and for sessions of the page
    # Of the control plane: for the operator on the unix socket, and "org": for tokens of orgs too.
    control: Literal["", "org", "operator"] = ""


class RoutePart(Protocol):
    """Further routes. It has a method for each operation, by its name, which takes a request and returns the
    response. Path parameters may be followed by a word: /v1/things/{thing}:check."""

    @property
    def OPERATIONS(self) -> tuple[Operation, ...]: ...  # noqa: N802 -- a constant of the class
    @property
    def SCHEMAS(self) -> Mapping[str, Schema]: ...  # noqa: N802


_MOST = Parameter("most", "query", "how many rows, 100 if it is missing, 1000 at most", {"type": "integer"})
_AFTER = Parameter("after", "query", "`next` of the answer before: the rows that follow")

# A row for each route.
# fmt: off
OPERATIONS: tuple[Operation, ...] = (
    Operation("live", "GET", "/live", "200 as long as the daemon answers, whatever it lacks.", "Live"),
    Operation("health", "GET", "/health",
              "Whether the daemon takes calls, and what somebody should look at. 503 while it takes none.",
              "Health"),
    Operation("metrics", "GET", "/metrics", "Counters for Prometheus.", "text/plain"),
    Operation("openapi", "GET", "/openapi.json", "This document.", "Document"),
    Operation("events", "GET", "/events", "Changes in the lives of plugins.", "text/event-stream"),
    Operation("drain", "POST", "/drain", "End: finish calls in flight, then all plugins.", "Draining",
              status=202, parameters=(Parameter("seconds", "query", "for calls in flight", _NUMBER),),
              local=True),
    Operation("reload_all", "POST", "/reload", "Read the configuration again.", "Health", local=True),
    Operation("plugins", "GET", "/plugins", "All plugins and their states.", "Plugins"),
    Operation("plugin", "GET", "/plugins/{name}", "One plugin and its state.", "Plugin"),
    Operation("explain", "GET", "/plugins/{name}/explain", "What its cage would be now.", "Document",
              local=True),
    Operation("tools", "GET", "/plugins/{name}/tools", "What it exposes. Starts it.", "Tools"),
    Operation("start", "POST", "/plugins/{name}/start", "Start it, and wait until it is ready.", "Plugin"),
    Operation("stop", "POST", "/plugins/{name}/stop", "End it until it is started again.", "Plugin"),
    Operation("reset", "POST", "/plugins/{name}/reset", "Forget its failures, end its quarantine.", "Plugin"),
    Operation("reload", "POST", "/plugins/{name}/reload", "Read its manifest again, restart it.", "Plugin",
              local=True, page=True),
    Operation("logs", "GET", "/plugins/{name}/logs", "The end of its stderr.", "text/plain",
              parameters=(Parameter("follow", "query", "1: go on with what it writes, as events"),
                          Parameter("times", "query",
                                    "1: each line begins with the time at which it was read")),
              streams=True),
    Operation("call", "POST", "/plugins/{name}/calls",
              "Call it. Closing the connection cancels it. With `Accept: text/event-stream` the answer is"
              " a stream of `accepted`, `progress`, and `result` or `error`.",
              "Answer",
              parameters=(Parameter("Idempotency-Key", "header",
                                    "the same key gets the same answer, and no second call"),
                          Parameter("Runner-Deadline", "header", "seconds for the call", _NUMBER)),
              body="Call", streams=True),
    Operation("calls", "GET", "/calls", "Records of calls, the newest first.", "Calls",
              parameters=(Parameter("plugin", "query", "only of this plugin"),
                          Parameter("code", "query", "only with this outcome"),
                          Parameter("since", "query",
                                    "accepted then or later: RFC 3339, or seconds since 1970"),
                          Parameter("until", "query", "accepted before"), _MOST, _AFTER)),
    Operation("record", "GET", "/calls/{call}", "The record of one call.", "Record"),
    Operation("cancel", "DELETE", "/calls/{call}", "Cancel a call in flight.", "Cancelled", status=202),
    Operation("deliver", "POST", "/deliveries",
              "Store an event for a hook; without `hook`, for all that want its type. Each gets it at"
              " least once.",
              "Stored", status=202, body="Event"),
    Operation("deliveries", "GET", "/deliveries", "Deliveries, the oldest first.", "Deliveries",
              parameters=(Parameter("state", "query", "queued, running, acked or dead"), _MOST, _AFTER),
              local=True),
    Operation("delivery", "GET", "/deliveries/{delivery}", "One delivery, of the caller's own.", "Delivery"),
    Operation("repeat", "POST", "/deliveries/{delivery}/repeat", "Try a dead delivery again.", "Delivery",
              status=202),
    Operation("remove", "DELETE", "/deliveries/{delivery}", "Remove a delivery that does not run.", "Removed",
              parameters=(Parameter("state", "query", "only if it has this state"),)),
    Operation("pending", "GET", "/pending", "Confirmations that wait for a person.", "Pending", local=True),
    Operation("approve", "POST", "/pending/{confirmation}/approve", "Say yes to one.", "Confirmation",
              parameters=(Parameter("remember", "query", "once, session or always; once if it is missing"),),
              local=True),
    Operation("deny", "POST", "/pending/{confirmation}/deny", "Say no to one.", "Confirmation", local=True),
    Operation("audit", "GET", "/audit", "Grants, refusals and connections, the newest first.", "Audit",
              parameters=(Parameter("what", "query",
                                    "grant, refusal, connection, confirm, control, delegation or removal"),
                          _MOST),
              local=True),
    Operation("open_page", "POST", "/session/codes", "A code that begins a session of the page.", "Code",
              status=201, local=True),
    Operation("end_sessions", "DELETE", "/session/codes", "End all sessions of the page.", "Ended",
              local=True),
)
# fmt: on


def object_of(required: str = "", **properties: Schema) -> Schema:
    found: Schema = {"type": "object", "properties": properties}
    return {**found, "required": required.split()} if required else found


def list_of(of: str) -> Schema:
    return {"type": "array", "items": {"$ref": f"#/components/schemas/{of}"}}


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_DIGESTED = {
    f"{side}_{what}": _or_null(kind)
    for side in ("input", "output")
    for what, kind in (("digest", "string"), ("bytes", "integer"))
}
_SCHEMAS: dict[str, Schema] = {
    "Document": {"type": "object"},
    "Error": object_of(
        "error",
        error=object_of("code message", code=_TEXT, phase=_TEXT, cause=_TEXT, message=_TEXT, hint=_TEXT),
        id=_TEXT,
        data=_ANY,
        invocation=_or_null("object"),
    ),
    "Live": object_of("status", status={"type": "string", "enum": ["live"]}),
    "Health": object_of(
        "status reasons version",
        status={"type": "string", "enum": ["ok", "degraded", "unavailable", "draining"]},
        reasons={"type": "array", "items": object_of("code message", code=_TEXT, message=_TEXT)},
        version=_TEXT,
        configuration=list_of("Fault"),
    ),
    "Draining": object_of("draining", draining={"type": "boolean"}),
    "Cancelled": object_of("id cancelled", id=_TEXT, cancelled={"type": "boolean"}),
    "Code": object_of("urls seconds", urls={"type": "array", "items": _TEXT}, seconds=_NUMBER),
    "Ended": object_of("ended", ended={"type": "integer"}),
    "Plugin": object_of(
        "name state",
        name=_TEXT,
        contract=_TEXT,
        state=_TEXT,
        reason=_TEXT,
        restarts={"type": "integer"},
        in_flight={"type": "integer"},
        queued={"type": "integer"},
        parked={"type": "integer"},
        manifest=_TEXT,
        version=_TEXT,
    ),
    "Plugins": object_of("plugins", plugins=list_of("Plugin"), configuration=list_of("Fault")),
    "Fault": object_of("path message", path=_TEXT, message=_TEXT),
    "Tools": object_of("tools", tools={"type": "array", "items": {"type": "object"}}),
    "Call": {
        **object_of("tool", tool=_TEXT, input=_ANY, kind=_TEXT, context={"type": "object"}),
        "additionalProperties": False,
    },
    "Answer": object_of("id value", id=_TEXT, value=_ANY, invocation=_or_null("object")),
    "Record": object_of(
        "id plugin tool accepted code",
        **dict.fromkeys(("id", "plugin", "tool", "kind", "caller", "effect"), _TEXT),
        **dict.fromkeys(("key", "delivery", "code", "repeated_by"), _or_null("string")),
        **dict.fromkeys(("started", "ended"), _or_null("number")),
        **_DIGESTED,
        accepted=_NUMBER,
        attempt=_or_null("integer"),
        record=_or_null("object"),
    ),
    "Calls": object_of("calls next", calls=list_of("Record"), next=_or_null("string")),
    "Event": {
        **object_of(
            "event",
            **dict.fromkeys(("id", "plugin", "hook", "type"), _TEXT),
            event={"type": "object"},
            context={"type": "object"},
        ),
        "additionalProperties": False,
    },
    "Delivery": object_of(
        "id plugin hook state attempt",
        **dict.fromkeys(("id", "plugin", "hook", "event", "context"), _TEXT),
        state={"type": "string", "enum": ["queued", "running", "acked", "dead"]},
        attempt={"type": "integer"},
        poster=_TEXT,
    ),
    "Confirmation": object_of(
        "id kind plugin subject lines seconds",
        **dict.fromkeys(("id", "client", "plugin", "subject", "command"), _TEXT),
        kind={"type": "string", "enum": ["call", "host"]},
        lines={"type": "array", "items": _TEXT},
        asked=_NUMBER,
        seconds=_NUMBER,
        allowed={"type": "boolean"},
    ),
    "Pending": object_of("pending", pending=list_of("Confirmation")),
    "Removed": object_of("id removed", id=_TEXT, plugin=_TEXT, hook=_TEXT, removed={"type": "boolean"}),
    "Stored": {"oneOf": [{"$ref": f"#/components/schemas/{each}"} for each in ("Delivery", "Spread")]},
    "Spread": object_of("id deliveries", id=_TEXT, deliveries=list_of("Delivery")),
    "Deliveries": object_of("deliveries next", deliveries=list_of("Delivery"), next=_or_null("string")),
    "Audit": object_of("audit", audit={"type": "array", "items": {"type": "object"}}),
}


def document(parts: Sequence[RoutePart] = ()) -> dict[str, Any]:
    """The OpenAPI document (3.1)."""
    paths: dict[str, dict[str, Any]] = {}
    schemas = dict(_SCHEMAS)
    for part in parts:
        schemas |= part.SCHEMAS
    for each in (*OPERATIONS, *(each for part in parts for each in part.OPERATIONS)):
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "plugin-runner",
            "version": __version__,
            "description": "The door of `runner serve`. On its unix socket the kernel tells who calls; on TCP"
            " every request needs the token, or a connection with a certificate of a client.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "certificate": {"type": "mutualTLS"},
            },
        },
        "security": [{"token": []}, {"certificate": []}, {}],
    }


_FOR = {
    "": "",
    "org": " For the operator, on the unix socket, and for tokens of orgs.",
    "operator": " For the operator, on the unix socket.",
}


def _operation(each: Operation) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in re.findall(r"{(\w+)}", each.path)
    ]
    parameters += [
        {"name": given.name, "in": given.place, "description": given.text, "schema": given.schema}
        for given in each.parameters
    ]
    media = each.answer if "/" in each.answer else "application/json"
    content: dict[str, Any] = {media: {"schema": _TEXT if "/" in each.answer else _named(each.answer)}}
    if each.streams:
        content["text/event-stream"] = {"schema": _TEXT}
    made: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.text
        + (" Only on the unix socket." if not each.page else " Only on the unix socket and for the page.")
        * each.local
        + _FOR[each.control],
        "responses": {
            str(each.status): {"description": "as asked", "content": content},
            "default": {
                "description": "it was refused, or there is no answer",
                "content": {"application/json": {"schema": _named("Error")}},
            },
        },
    }
    if parameters:
        made["parameters"] = parameters
    if each.body:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _named(each.body)}},
        }
    return made


def _named(schema: str) -> Schema:
    return {"$ref": f"#/components/schemas/{schema}"}
