"""The meaning of a plugin's error, and of a message that is none."""

from __future__ import annotations

from typing import Any

from runner.outcome import Code
from runner.protocol import jsonrpc
from runner.protocol.dialect import Refusal, Violation
from sandbox.document.diagnostic import cut, printable

_MOST_CHARACTERS = 2000  # of a message
_MOST_QUOTED = 500  # of a message inside one of our sentences

# JSON-RPC leaves these codes to the program. All others are errors of the protocol.
_OWN_CODES = range(-32099, -32000 + 1)
_KINDS = {
    jsonrpc.PARSE_ERROR: "parse_error",
    jsonrpc.INVALID_REQUEST: "invalid_request",
    jsonrpc.METHOD_NOT_FOUND: "method_not_found",
    jsonrpc.INVALID_PARAMS: "invalid_params",
    jsonrpc.INTERNAL_ERROR: "internal",
}

_CHECK_COMMAND = "check that the manifest's command starts this plugin"


def make_refusal(call: int, code: int, message: str, data: Any) -> Refusal:
    kind = "plugin_error" if code in _OWN_CODES else _KINDS.get(code, "protocol_error")
    text = printable(cut(message, _MOST_CHARACTERS)).strip()
    return Refusal(call, str(code), text or f"the plugin answered with error {code}", kind, data)


def quote_error(code: object, message: object) -> str:
    """An error of the plugin's, inside one of our sentences."""
    text = message if isinstance(message, str) else ""
    number = code if type(code) is int else jsonrpc.INTERNAL_ERROR
    return f"{printable(cut(text, _MOST_QUOTED))} ({number})".strip()


def judge_unreadable(cause: str, detail: str) -> Violation:
    """A line that is not JSON, or JSON with a fault."""
    hint = "stdout is for messages only: print everything else to stderr" if cause == "bad_json" else ""
    text = f"a line on its stdout breaks the protocol: {detail}"
    return Violation("malformed_response", text, cause, hint)


def judge_stray(why: str, detail: str, *, ready: bool) -> Violation | None:
    """The fault of a message that is neither question nor answer. None: it is dropped and counted."""
    if why == "not_rpc":
        return Violation("malformed_response", f"a line on its stdout is no message: {detail}", "not_rpc")
    if why == "echo":
        text = f"it sends our own messages back: {detail}"
        code: Code = "malformed_response" if ready else "handshake_failed"
        return Violation(code, text, "echo", _CHECK_COMMAND)
    if why == "too_many":
        text = f"it does not wait for answers: {detail}"
        return Violation("malformed_response", text, "too_many_requests")
    return None


def judge_object(value: Any) -> Violation | None:
    """The fault of a value that is not a message of JSON-RPC 2.0."""
    if not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else "a single value"
        text = f"a line on its stdout is {kind}, and every message is an object"
        return Violation("malformed_response", text, "not_object")
    if value.get("jsonrpc") != "2.0":
        text = 'a message on its stdout lacks "jsonrpc": "2.0"'
        return Violation("malformed_response", text, "jsonrpc_version")
    return None
