"""One frame as a message. A frame that is none is dropped, and the conversation goes on.

That is how the reference host reads: only a broken header ends a plugin, and never the body of a frame. The
id of a request and of an answer is an integer of 64 bits without a sign. A message with a method is a request
or a notification, whatever else is in it.
"""

from __future__ import annotations

from typing import Any

from runner.protocol import wire
from runner.protocol.ambiguity import odd_key
from runner.protocol.header_frames import HeaderRules, read_signed_digits

BODY_LIMIT = 16 * 1024 * 1024  # bytes, both ways
RULES = HeaderRules(8 * 1024, BODY_LIMIT, read_length=read_signed_digits, last_counts=True)

_KEYS = frozenset(("jsonrpc", "id", "method", "params", "result", "error"))
_MOST_ID = 2**64 - 1
_LEAST_CODE, _MOST_CODE = -(2**31), 2**31 - 1


def read_json(raw: bytes, unique: bool = False) -> wire.Reading:
    """The value of a frame's body, or its fault. `unique`: no object in it may have a key twice."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return wire.Reading(None, "bad_json", f"byte {error.start} is not UTF-8")
    return wire.message(raw, identity=_KEYS, unique=unique)


def fault_of(value: Any) -> str:
    """Returns why a value is no message of this contract, or ''."""
    if not isinstance(value, dict):
        return "it is not an object"
    if value.get("jsonrpc") != "2.0":
        return 'it lacks "jsonrpc": "2.0"'
    number, method, error = value.get("id"), value.get("method"), value.get("error")
    if number is not None and (type(number) is not int or not 0 <= number <= _MOST_ID):
        return "its id is not an integer from 0 to 2^64-1"
    if method is not None and (not isinstance(method, str) or not method):
        return "its method is not a string, or empty"
    if error is not None and not _is_error(error):
        return "its error has no code (an integer of 32 bits) or no message (a string)"
    if method is None and number is None:
        return "it has neither a method nor an id"
    return odd_key(value, _KEYS)


def normalise(value: dict[str, Any]) -> dict[str, Any]:
    """A message without the keys that do not count: a method wins over an answer, and null means absent."""
    if value.get("method") is not None:
        kept = {"method": value["method"], "params": value.get("params")}
        return kept if value.get("id") is None else {"id": value["id"], **kept}
    if value.get("error") is not None:
        return {"id": value["id"], "error": value["error"]}
    return {"id": value["id"], "result": value.get("result")}


def _is_error(error: Any) -> bool:
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return False
    code = error.get("code")
    return type(code) is int and _LEAST_CODE <= code <= _MOST_CODE
