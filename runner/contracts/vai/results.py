"""The response to a request of each kind: checks its shape, and extracts the result for the caller.

A key that is null counts as absent. Keys that the contract does not have are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runner.protocol.dialect import Refusal, Reply, Violation
from runner.protocol.schema import Schema
from sandbox.document.diagnostic import cut, printable

INVALID_RESPONSE, INVALID_OUTPUT = "invalid_response", "invalid_output"
# The kind of a Refusal for ok=false. The others have the status as their kind.
PROTOCOL_ERROR = "protocol_error"

SUCCEEDED, ACK = "succeeded", "ack"
FAILURES = ("failed", "cancelled", "retryable_failure")

_MOST_CHARACTERS = 2000  # of an error's message
_MOST_CODE = 200  # characters of an error's code


class BadResponse(ValueError):
    """What is wrong with a response: the second half of a sentence."""


def read_response(
    token: int, kind: str, frame: Mapping[str, Any], schema: Schema | None
) -> Reply | Refusal | Violation:
    """The event for a response. A fault fails the call only. `schema`: for the structured output of a
    tool."""
    try:
        ok = frame.get("ok")
        if not isinstance(ok, bool):
            raise BadResponse("ok is missing or neither true nor false")
        if not ok:
            return _refused(token, frame)
        if frame.get("error") is not None:
            raise BadResponse("it has ok = true and an error")
        body = frame.get("body")
        if not isinstance(body, dict):
            raise BadResponse("it has ok = true, and its body is missing or not an object")
        return _answered(token, kind, body, schema)
    except BadResponse as fault:
        text = f"its response to the {kind} breaks the protocol: {fault}"
        return Violation("malformed_response", text, INVALID_RESPONSE, call=token)


def _refused(token: int, frame: Mapping[str, Any]) -> Refusal:
    if frame.get("body") is not None:
        raise BadResponse("it has ok = false and a body")
    error = frame.get("error")
    if not isinstance(error, dict):
        raise BadResponse("it has ok = false, and its error is missing or not an object")
    for key in ("code", "message"):
        if not isinstance(error.get(key), str):
            raise BadResponse(f"error.{key} is missing or not a string")
    code, message = _code(error["code"]), _text(error["message"])
    if not code:
        raise BadResponse("error.code is empty")
    return Refusal(
        token, code, message or f"the plugin answered with the error {code}", PROTOCOL_ERROR, error
    )


def _answered(
    token: int, kind: str, body: Mapping[str, Any], schema: Schema | None
) -> Reply | Refusal | Violation:
    status = body.get("status")
    if not isinstance(status, str):
        raise BadResponse("body.status is missing or not a string")
    if status in FAILURES:
        return _failed(token, status, body)
    if status != SUCCEEDED and not (status == ACK and kind == "hook"):
        known = ", ".join((*([ACK] if kind == "hook" else []), SUCCEEDED, *FAILURES))
        raise BadResponse(f"body.status is none of {known}")
    if body.get("error") is not None:
        raise BadResponse(f"body.status is {status}, and there is an error")
    if kind == "hook":
        return Reply(token, {"status": status})
    result = body.get("result")
    if not isinstance(result, dict):
        raise BadResponse("body.result is missing or not an object")
    _CHECKS[kind](result)
    if kind == "tool" and schema is not None and (why := _misfit(result, schema)):
        text = f"the structured_output of its result does not fit the output_schema of the export: {why}"
        return Violation("malformed_response", text, INVALID_OUTPUT, call=token)
    return Reply(token, result)


def _failed(token: int, status: str, body: Mapping[str, Any]) -> Refusal:
    error = body.get("error")
    if error is None:
        error = {}
    if not isinstance(error, dict):
        raise BadResponse("body.error is not an object")
    for key in ("code", "message"):
        if not isinstance(error.get(key) or "", str):
            raise BadResponse(f"body.error.{key} is not a string")
    code = _code(error.get("code") or "") or status
    message = _text(error.get("message") or "") or f"the plugin ended the request with the status {status}"
    return Refusal(token, code, message, status, body)


def _code(text: str) -> str:
    return printable(cut(text, _MOST_CODE)).strip()


def _text(text: str) -> str:
    return printable(cut(text, _MOST_CHARACTERS)).strip()


# --- the results of each kind -------------------------------------------------------------------------------


def _check_tool(result: Mapping[str, Any]) -> None:
    _check_content(result.get("content"), "result.content")
    for key in ("is_error", "retryable"):
        if not isinstance(result.get(key), bool | None):
            raise BadResponse(f"result.{key} is neither true nor false")


def _check_compactor(result: Mapping[str, Any]) -> None:
    blocks = result.get("seed_blocks")
    if not isinstance(blocks, list):
        raise BadResponse("result.seed_blocks is missing or not an array")
    for number, block in enumerate(blocks):
        place = f"result.seed_blocks[{number}]"
        if not isinstance(block, dict) or not isinstance(block.get("kind"), str):
            raise BadResponse(f"{place} is not an object with a kind")
        _check_content(block.get("content"), f"{place}.content")
    _check_summary(result)
    diagnostics = result.get("diagnostics")
    if not isinstance(diagnostics, dict | None):
        raise BadResponse("result.diagnostics is not an object")
    for key in ("input_tokens_estimate", "output_tokens_estimate"):
        amount = (diagnostics or {}).get(key)
        if amount is not None and (type(amount) not in (int, float) or amount < 0):
            raise BadResponse(f"result.diagnostics.{key} is not a number from 0 on")


def _check_harness(result: Mapping[str, Any]) -> None:
    checkpoint = result.get("checkpoint")
    if checkpoint is not None and (
        not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("kind"), str)
    ):
        raise BadResponse("result.checkpoint is not an object with a kind")
    _check_summary(result)
    if not isinstance(result.get("artifacts"), list | None):
        raise BadResponse("result.artifacts is not an array")


def _check_summary(result: Mapping[str, Any]) -> None:
    summary = result.get("summary")
    if summary is not None and (not isinstance(summary, dict) or not isinstance(summary.get("text"), str)):
        raise BadResponse("result.summary is not an object with a text")


def _check_content(content: Any, place: str) -> None:
    if not isinstance(content, list):
        raise BadResponse(f"{place} is missing or not an array")
    for number, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise BadResponse(f"{place}[{number}] is not an object with a type")
        if block["type"] == "text" and not isinstance(block.get("text"), str):
            raise BadResponse(f"{place}[{number}] has the type text, and no text")


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "tool": _check_tool,
    "compactor": _check_compactor,
    "harness": _check_harness,
}


def _misfit(result: Mapping[str, Any], schema: Schema) -> str:
    """Returns why the structured output does not fit, or ''. A result that reports an error to the model need
    not fit."""
    if result.get("is_error"):
        return ""
    if "structured_output" not in result:
        return "there is none"
    return "; ".join(schema.faults(result["structured_output"]))
