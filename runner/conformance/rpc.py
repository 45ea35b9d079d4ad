"""JSON-RPC 2.0 for rules: its messages, what is wrong with one, and rules that several contracts have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.conformance.rules import Row, Say, See, Sort, Step, mismatch, shown


def request(method: str, params: Any = None, as_id: Any = "#1") -> dict[str, Any]:
    made = {"jsonrpc": "2.0", "id": as_id, "method": method}
    return made if params is None else {**made, "params": params}


def notice(method: str, params: Any = None) -> dict[str, Any]:
    made = request(method, params)
    del made["id"]
    return made


def ask(method: str, params: Any, result: Any, as_id: str = "#1", **see: Any) -> tuple[Step, ...]:
    """A request whose answer is a result of this shape."""
    return Say(request(method, params, as_id)), See(as_id, {"result": result}, **see)


def refused(method: str, params: Any, code: Any = int, as_id: str = "#1", **see: Any) -> tuple[Step, ...]:
    """A request whose answer is an error with this code."""
    return Say(request(method, params, as_id)), See(as_id, {"error": {"code": code}}, **see)


def sort(value: Any) -> Sort:
    if not isinstance(value, dict):
        return "other", None
    if "method" in value:
        return ("request", value["id"]) if value.get("id") is not None else ("other", None)
    return ("answer", value.get("id")) if {"id", "result", "error"} & value.keys() else ("other", None)


def shape(value: Any) -> str:
    """Returns what is wrong with a message of JSON-RPC 2.0, or ''."""
    if not isinstance(value, dict):
        return f"a message is {shown(value)}, and not an object"
    if value.get("jsonrpc") != "2.0":
        return f'jsonrpc is {shown(value.get("jsonrpc"))}, and not "2.0"'
    if "method" in value:
        return mismatch({"method": str, "params?": (dict, list, None)}, value)
    if ("result" in value) == ("error" in value):
        return "an answer has both result and error, or neither"
    return mismatch({"error?": {"code": int, "message": str}}, value)


def no_such_method(value: Any) -> Any:
    """The answer to a plugin's request for something that is not offered."""
    error = {"code": -32601, "message": "this host offers nothing during a trial"}
    return {"jsonrpc": "2.0", "id": value.get("id"), "error": error}


# Fields of a RuleBook.
FIELDS: Mapping[str, Any] = {
    "sort": sort,
    "asks": lambda message: message.get("id") if "method" in message else None,
    "shape": shape,
    "reply": no_such_method,
}


# --- rules that several contracts have ----------------------------------------------------------------------


def unknown_method(place: str, method: str, params: Any = None, *fields: Any) -> Row:
    text = "A request for a method that does not exist is answered with the error -32601."
    return text, place, refused(method, params, -32601), *fields


def unanswered(place: str, method: str, params: Any, alive: tuple[Step, ...], name: str = "") -> Row:
    """`alive`: a request that is answered, and the wait for that."""
    text = f"{name or 'A notification that does not exist'} is not answered."
    return text, place, (Say(notice(method, params)), *alive)


def flood(place: str, count: int, method: str, params: Any = None) -> Row:
    ids = [f"#{number}" for number in range(count)]
    steps = (*(Say(request(method, params, each)) for each in ids), *map(See, ids))
    return f"{count} requests at once are all answered.", place, steps


def not_json(place: str, raw: bytes, alive: tuple[Step, ...]) -> Row:
    """It may be answered with an error, so `alive` must not forbid that."""
    return "A message that is not JSON does not end the plugin.", place, (Say(raw), *alive)


def watched(stdout: str, wire: str, place: str) -> tuple[Row, ...]:
    """The rules that all messages are held against. `stdout`: what it carries."""
    return (
        (stdout, wire, "message"),
        ("Each message is one of JSON-RPC 2.0.", place, "shape"),
        ("Each answer is to a request, and there is one.", place, "answer"),
    )
