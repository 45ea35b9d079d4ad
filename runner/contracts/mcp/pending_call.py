"""One open call: the requests sent for it, and the meaning of each answer.

Most calls are one request. A list takes one request for each page. A modern server may answer "I need input
first": then the request is sent again with the input. The server decides how often, so all of it is limited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeGuard

from runner.contracts.mcp.versions import Era
from runner.protocol.dialect import Call, CallRefused, Refusal, Reply, Violation
from runner.protocol.jsonrpc import INVALID_PARAMS
from runner.protocol.memory import Share
from sandbox.document.diagnostic import printable, quoted
from sandbox.speed.value import NamedTuple

MOST_PAGES: Final = 100
MOST_ITEMS: Final = 10_000
# Characters of a cursor. Every cursor of a list is kept, and sent back.
MOST_CURSOR: Final = 64 * 1024

# How often a server may answer "I need input first", and for how many inputs at once. The official clients
# allow the same number of rounds.
MOST_ROUNDS: Final = 10
MOST_INPUTS: Final = 32
INPUTS: Final = ("roots/list", "sampling/createMessage", "elicitation/create")

# Characters of a tool's error text in the message. The data hold the whole text.
MESSAGE_LIMIT: Final = 4000

# name of a list -> method, key of the result, and the key each item must have
LISTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "tools": ("tools/list", "tools", "name"),
    "prompts": ("prompts/list", "prompts", "name"),
    "resources": ("resources/list", "resources", "uri"),
    "resource_templates": ("resources/templates/list", "resourceTemplates", "uriTemplate"),
}

# Requests that can need input.
WITH_INPUT: Final = ("tools/call", "prompts/get", "resources/read")

# The list that a result must hold, by method.
_PARTS: Final[Mapping[str, str]] = {"prompts/get": "messages", "resources/read": "contents"}

_SCHEMAS: Final = ("inputSchema", "outputSchema")

# Methods that callers must not send: they belong to the handshake.
_OURS: Final = ("initialize",)

_MEANINGS: Final[Mapping[int, str]] = {
    -32600: "invalid_request",
    -32601: "method_not_found",
    INVALID_PARAMS: "invalid_arguments",
    -32603: "internal_error",
    -32002: "resource_not_found",
    -32021: "missing_client_capability",
    -32022: "unsupported_version",
    -32042: "url_elicitation_required",
}


class More(NamedTuple):
    """Send the same method again."""

    params: Mapping[str, Any]


class Input(NamedTuple):
    key: str
    method: str
    params: Any


class Ask(NamedTuple):
    """Inputs that the host has to supply before the call goes on."""

    inputs: tuple[Input, ...]


Step = More | Ask | Reply | Refusal | Violation


def question(token: int, call: Call, modern: bool) -> tuple[str, Mapping[str, Any] | None]:
    """Method and params of a call. Raises CallRefused if the contract has no such call."""
    match call.kind:
        case "tool":
            # Never left out: some servers check missing arguments against the schema of an object.
            return "tools/call", {"name": call.name, "arguments": _arguments(token, call)}
        case "prompt":
            arguments = _arguments(token, call)
            if not all(isinstance(value, str) for value in arguments.values()):
                raise _unfit(token, "the arguments of a prompt have to be strings")
            return "prompts/get", {"name": call.name, "arguments": arguments}
        case "resource":
            return "resources/read", {"uri": call.name}
        case "list":
            if call.name not in LISTS:
                raise _unfit(token, f"there is no list of {quoted(call.name)}: {', '.join(LISTS)}")
            return LISTS[call.name][0], {}
        case "method":
            if call.name in _OURS or call.name.startswith("notifications/"):
                raise _unfit(token, f"{quoted(call.name)} cannot be called: the runner sends it itself")
            if call.input is not None and not isinstance(call.input, dict):
                raise _unfit(token, "the params of a method have to be an object")
            if call.name == "ping" and modern:
                return "server/discover", None  # the modern era has no ping, but every server answers this
            return call.name, call.input
        case _:
            raise _unfit(token, f"MCP servers have no {call.kind}: tool, prompt, resource, method")


class PendingCall:
    """A call that was sent and has no answer yet."""

    # Class attributes: most calls are one request and never change these, so an instance need not set them.
    stale = False  # the server has announced a change since the request
    weight = 0  # bytes of memory kept until the answer
    _items: Sequence[Any] = ()
    _cursors: frozenset[str] = frozenset()
    _pages = _rounds = 0
    _open: frozenset[str] = frozenset()  # keys of inputs without an answer
    _inputs: Mapping[str, Any] = MappingProxyType({})
    _state: str | None = None

    def __init__(self, token: int, call: Call, era: Era, standing: Share) -> None:
        self.token = token
        self.call = call
        self.method, self.params = question(token, call, era.modern)
        self.shows_progress = call.kind != "list" and self.method not in ("ping", "server/discover")
        self._standing = standing
        self._modern = era.modern

    def failed(self, code: int, message: str, data: Any) -> Refusal:
        return Refusal(self.token, str(code), message, _MEANINGS.get(code, ""), data)

    def result(self, value: Any, weight: int) -> Step:
        """`weight`: bytes of memory that the value takes."""
        if not isinstance(value, dict):
            return self.malformed("bad_type", f"the result of {self._name} is not an object")
        if self._modern:
            kind = value.get("resultType", "complete")
            if kind == "input_required" and self.method in WITH_INPUT:
                return self._input_required(value, weight)
            if kind != "complete":
                shown = quoted(kind) if isinstance(kind, str) else type(kind).__name__
                return self.malformed("result_type", f"a result of {self._name} of an unknown type: {shown}")
        if self.call.kind == "list":
            return self._page(value, weight)
        if self.call.kind == "method":
            return Reply(self.token, {} if self.call.name == "ping" else value)
        if self.method == "tools/call":
            return self._tool(value)
        part = _PARTS[self.method]
        if not _objects(value.get(part)):
            return self.malformed("bad_type", f"the result of {self._name} has no list of {part}")
        return Reply(self.token, value)

    def answered(self, key: str, value: Any) -> More | None:
        """Add an input that the server asked for. After the last one, the request is sent again."""
        if key not in self._open:
            return None
        self._open -= {key}
        self._inputs = {**self._inputs, key: value}
        return None if self._open else self._again()

    def release(self) -> None:
        """Release the memory it keeps."""
        if self.weight:
            self._standing.give_back(self.weight)
            self.weight = 0

    def _keeps(self, weight: int) -> bool:
        """Take memory for it, and return whether there was room. All calls of a session share one limit."""
        if not self._standing.take(weight):
            return False
        self.weight += weight
        return True

    def malformed(self, cause: str, message: str) -> Violation:
        """Ends this call only."""
        return Violation("malformed_response", message, cause, call=self.token)

    @property
    def _name(self) -> str:
        return f"{self.method} {quoted(self.call.name)}" if self.call.kind != "method" else self.method

    # --- tools --------------------------------------------------------------------------------------------

    def _tool(self, value: dict[str, Any]) -> Step:
        content, error = value.get("content", []), value.get("isError")
        if not _typed(content):
            return self.malformed("bad_type", f"the content of {self._name} is not a list of typed objects")
        if error is not None and not isinstance(error, bool):
            return self.malformed("bad_type", f"isError of {self._name} is neither true nor false")
        if not self._modern and not isinstance(value.get("structuredContent"), dict | None):
            return self.malformed("bad_type", f"the structuredContent of {self._name} is not an object")
        if not error:
            return Reply._make((self.token, value, ""))
        texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
        message = "\n".join(texts)
        if len(message) > MESSAGE_LIMIT:
            message = message[: MESSAGE_LIMIT - 1] + "…"
        return Refusal(self.token, "isError", message or "the tool failed", "tool_error", value)

    # --- lists --------------------------------------------------------------------------------------------

    def _page(self, value: dict[str, Any], weight: int) -> Step:
        _, key, identity = LISTS[self.call.name]
        items, cursor = value.get(key), value.get("nextCursor")
        if not _objects(items) or not all(isinstance(item.get(identity), str) for item in items):
            return self.malformed("bad_type", f"{self.method} has no list of objects with {identity}")
        if not all(isinstance(item.get(schema, {}), dict) for item in items for schema in _SCHEMAS):
            return self.malformed("bad_type", f"a schema in {self.method} is not an object")
        if cursor is not None and not isinstance(cursor, str):
            return self.malformed("bad_type", f"the nextCursor of {self.method} is not a string")
        if cursor is not None and len(cursor) > MOST_CURSOR:
            message = f"the nextCursor of {self.method} has more than {MOST_CURSOR} characters"
            return self.malformed("cursor_too_long", message)
        if not self._keeps(weight):
            most = self._standing.most >> 20
            message = f"{self.method} takes, with other lists on their way, more than {most} MiB of memory"
            return self.malformed("list_too_large", message)
        self._items = [*self._items, *items]
        self._pages += 1
        if len(self._items) > MOST_ITEMS:
            return self.malformed("too_many_items", f"{self.method} has more than {MOST_ITEMS} items")
        if cursor is None:
            return Reply(self.token, self._items)
        if cursor in self._cursors:
            message = f"{self.method} repeats the cursor {quoted(cursor)}: the list has no end"
            return self.malformed("cursor_repeats", message)
        if self._pages >= MOST_PAGES:
            return self.malformed("too_many_pages", f"{self.method} has more than {MOST_PAGES} pages")
        self._cursors |= {cursor}
        return More({"cursor": cursor})

    # --- input first --------------------------------------------------------------------------------------

    def _input_required(self, value: dict[str, Any], weight: int) -> Step:
        asked, state = value.get("inputRequests"), value.get("requestState")
        if state is not None and not isinstance(state, str):
            return self.malformed("bad_type", f"the requestState of {self._name} is not a string")
        if asked is not None and not isinstance(asked, dict):
            return self.malformed("bad_type", f"the inputRequests of {self._name} are not an object")
        if not asked and state is None:
            return self.malformed("input_required", f"{self._name} needs input and does not say which")
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            return self.malformed("too_many_rounds", f"{self._name} asked for input {self._rounds} times")
        self.release()  # the memory of the round before
        if not self._keeps(2 * weight):  # it is kept, and sent back
            most = self._standing.most >> 20
            message = (
                f"the state that {self._name} wants the host to keep takes more than {most} MiB of memory"
            )
            return self.malformed("state_too_large", message)
        inputs: list[Input] = []
        for key, request in (asked or {}).items():
            method = request.get("method") if isinstance(request, dict) else None
            if method not in INPUTS or len(inputs) == MOST_INPUTS:
                shown = f"more than {MOST_INPUTS}" if method in INPUTS else quoted(str(method))
                return self.malformed(
                    "input_required", f"{self._name} needs input that no host can give: {shown}"
                )
            inputs.append(Input(key, method, request.get("params")))
        self._state, self._inputs = state, {}
        self._open = frozenset(one.key for one in inputs)
        return Ask(tuple(inputs)) if inputs else self._again()

    def _again(self) -> More:
        params = dict(self.params or {})
        params.pop("inputResponses", None)
        params.pop("requestState", None)
        if self._inputs:
            params["inputResponses"] = self._inputs
        if self._state is not None:
            params["requestState"] = self._state
        return More(params)


def _arguments(token: int, call: Call) -> dict[str, Any]:
    if call.input is None:
        return {}
    if not isinstance(call.input, dict):
        raise _unfit(token, f"the arguments of a {call.kind} have to be an object")
    return call.input


def _unfit(token: int, message: str) -> CallRefused:
    return CallRefused(Refusal(token, str(INVALID_PARAMS), message, "invalid_arguments"))


def _objects(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _typed(content: Any) -> TypeGuard[list[dict[str, Any]]]:
    if not isinstance(content, list):
        return False
    for part in content:  # noqa: SIM110 -- most answers have one part: a generator costs more than the part
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            return False
    return True


def refused_input(token: int, method: str, code: int, message: str) -> Violation:
    """The host refused the input. The modern protocol cannot report that to the server, so the call fails."""
    return Violation(
        "capability_not_allowed",
        f"the server needs {method} for this call, which was refused: {code} {printable(message)}",
        f"input:{method}",
        "allow it in the policy and offer the service, or call without it",
        call=token,
    )
