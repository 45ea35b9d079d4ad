"""The responses of the four kinds (§5, §6): what the caller gets, and what breaks the protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.protocol.dialect import Call, CallRefused, Refusal, Reply, Violation
from tests.runner.contracts.vai.conversation import (
    COMPACTOR,
    CONTENT,
    HARNESS,
    HOOK,
    TOKEN,
    TOOL,
    called,
    frame,
    hear,
    ready,
    refused,
    response,
    succeeded,
)
from tests.tables import check_rows

SEED = {
    "seed_blocks": [{"kind": "system", "content": [{"type": "text", "text": "You are a coding agent."}]}],
    "summary": {"text": "Auth redirect fix in progress."},
    "diagnostics": {"input_tokens_estimate": 182000, "output_tokens_estimate": 5400},
}
RUN = {
    "checkpoint": {"kind": "checkpoint", "data": {"cursor": 12}},
    "summary": {"text": "Gathered context."},
    "artifacts": [],
}
ISSUES = {
    "content": CONTENT,
    "structured_output": {"issues": [{"key": "ENG-123"}]},
    "is_error": False,
    "retryable": False,
}
RIGHT: dict[str, tuple[Call, dict[str, Any]]] = {
    "a tool": (TOOL, ISSUES),
    "a tool, in short": (TOOL, {"content": []}),
    "an error for the model (A15)": (TOOL, {"content": CONTENT, "is_error": True, "retryable": True}),
    "content of another type": (TOOL, {"content": [{"type": "image", "data": "…"}]}),
    "null is absent": (TOOL, {"content": [], "is_error": None, "structured_output": None}),
    "more keys": (TOOL, {"content": [], "more": 1}),
    "a compactor": (COMPACTOR, SEED),
    "a compactor, in short": (COMPACTOR, {"seed_blocks": []}),
    "a harness": (HARNESS, RUN),
    "a harness, in short": (HARNESS, {}),
}


def test_a_result() -> None:
    def check(_: str, row: tuple[Call, dict[str, Any]]) -> None:
        call, result = row
        answer = {**response({"status": "succeeded", "result": result, "error": None}), "error": None}
        assert hear(called(call), answer) == [Reply(TOKEN, result)]

    check_rows(RIGHT, check)


@pytest.mark.parametrize("status", ["ack", "succeeded"])
def test_a_hook_is_acknowledged(status: str) -> None:
    """A1."""
    assert hear(called(HOOK), response({"status": status, "result": {}})) == [
        Reply(TOKEN, {"status": status})
    ]


@pytest.mark.parametrize("call", [TOOL, HOOK, COMPACTOR, HARNESS])
@pytest.mark.parametrize("status", ["failed", "cancelled", "retryable_failure"])
def test_a_status_that_is_no_success(call: Call, status: str) -> None:
    body: dict[str, Any] = {"status": status}
    message = f"the plugin ended the request with the status {status}"
    assert hear(called(call), response(body)) == [Refusal(TOKEN, status, message, status, body)]
    # A14: the plugin's own error is passed on.
    body["error"] = {"code": "jira.down", "message": "no\x1b answer", "retryable": True}
    assert hear(called(call), response(body)) == [Refusal(TOKEN, "jira.down", "no\\x1b answer", status, body)]
    body["error"] = {"code": "x" * 10_000, "message": "y" * 10_000}
    (came,) = hear(called(call), response(body))
    assert isinstance(came, Refusal) and (len(came.code), len(came.message)) == (200, 2000)


def test_ok_false() -> None:
    error = {"code": "protocol.invalid_frame", "message": "missing body"}
    assert hear(called(), refused()) == [
        Refusal(TOKEN, "protocol.invalid_frame", "missing body", "protocol_error", error)
    ]
    (came,) = hear(called(), {**refused(message=""), "body": None})
    assert isinstance(came, Refusal) and came.message


OK: dict[str, Any] = {"ok": True, "body": {"status": "succeeded", "result": {"content": CONTENT}}}
WRONG_FRAMES: dict[str, dict[str, Any]] = {
    "no ok": {"body": OK["body"]},
    "ok is 1": {**OK, "ok": 1},
    "ok is text": {**OK, "ok": "true"},
    "ok is null": {**OK, "ok": None},
    "no body": {"ok": True},
    "a body that is an array": {"ok": True, "body": []},
    "a body that is text": {"ok": True, "body": "succeeded"},
    "an error beside ok (A32)": {**OK, "error": {"code": "x", "message": "y"}},
    "an empty error beside ok (A32)": {**OK, "error": {}},
    "ok false without error": {"ok": False},
    "an error that is text": {"ok": False, "error": "no"},
    "an error without code": {"ok": False, "error": {"message": "no"}},
    "an error with an empty code": {"ok": False, "error": {"code": " ", "message": "no"}},
    "an error with a number": {"ok": False, "error": {"code": 7, "message": "no"}},
    "an error without message": {"ok": False, "error": {"code": "x"}},
    "ok false with a body": {**OK, "ok": False, "error": {"code": "x", "message": "y"}},
}
TEXT = {"type": "text", "text": "x"}
WRONG_BODIES: dict[str, tuple[Call, dict[str, Any]]] = {
    "no status": (TOOL, {"result": {"content": []}}),
    "a status that is no text": (TOOL, {"status": True, "result": {"content": []}}),
    "an unknown status": (TOOL, {"status": "done", "result": {"content": []}}),
    "a status in capital letters": (TOOL, {"status": "Succeeded", "result": {"content": []}}),
    "ack of a tool": (TOOL, {"status": "ack", "result": {"content": []}}),
    "an unknown status of a hook": (HOOK, {"status": "ok"}),
    "an error beside the success": (TOOL, {**OK["body"], "error": {"code": "x"}}),
    "an error beside ack": (HOOK, {"status": "ack", "error": {}}),
    "an error that is text": (TOOL, {"status": "failed", "error": "no"}),
    "an error with a number": (TOOL, {"status": "failed", "error": {"code": 7}}),
    "a message with a number": (TOOL, {"status": "failed", "error": {"message": 7}}),
}
WRONG_RESULTS: dict[str, tuple[Call, Any]] = {
    "a tool without result": (TOOL, None),
    "a compactor without result": (COMPACTOR, None),
    "a harness without result": (HARNESS, None),
    "an array": (TOOL, []),
    "text": (TOOL, "Found 3 issues."),
    "no content": (TOOL, {"structured_output": {}}),
    "content that is text": (TOOL, {"content": "x"}),
    "content that is one block": (TOOL, {"content": TEXT}),
    "a block that is text": (TOOL, {"content": ["x"]}),
    "a block without type": (TOOL, {"content": [TEXT, {"text": "x"}]}),
    "a text without text": (TOOL, {"content": [{"type": "text"}]}),
    "a text that is a number": (TOOL, {"content": [{"type": "text", "text": 1}]}),
    "is_error as text": (TOOL, {"content": [], "is_error": "false"}),
    "retryable as a number": (TOOL, {"content": [], "retryable": 0}),
    "no seed_blocks": (COMPACTOR, {"summary": {"text": "x"}}),
    "seed_blocks that are one block": (COMPACTOR, {"seed_blocks": {}}),
    "a seed block that is text": (COMPACTOR, {"seed_blocks": ["x"]}),
    "a seed block without kind": (COMPACTOR, {"seed_blocks": [{"content": []}]}),
    "a seed block without content": (COMPACTOR, {"seed_blocks": [{"kind": "system"}]}),
    "a seed block with broken content": (COMPACTOR, {"seed_blocks": [{"kind": "system", "content": [1]}]}),
    "a summary that is text": (COMPACTOR, {**SEED, "summary": "x"}),
    "a summary without text": (COMPACTOR, {**SEED, "summary": {}}),
    "diagnostics that are a number": (COMPACTOR, {**SEED, "diagnostics": 1}),
    "an estimate that is text": (COMPACTOR, {**SEED, "diagnostics": {"input_tokens_estimate": "1"}}),
    "an estimate that is true": (COMPACTOR, {**SEED, "diagnostics": {"input_tokens_estimate": True}}),
    "an estimate below 0": (COMPACTOR, {**SEED, "diagnostics": {"output_tokens_estimate": -1}}),
    "a checkpoint that is text": (HARNESS, {**RUN, "checkpoint": "x"}),
    "a checkpoint without kind": (HARNESS, {**RUN, "checkpoint": {"data": {}}}),
    "a summary of a harness that is text": (HARNESS, {**RUN, "summary": "x"}),
    "artifacts that are an object": (HARNESS, {**RUN, "artifacts": {}}),
}


def is_invalid(call: Call, answer: Any, cause: str = "invalid_response") -> None:
    """The one call has failed, and the conversation goes on."""
    conversation = called(call)
    (violation,) = hear(conversation, answer)
    assert isinstance(violation, Violation), violation
    assert (violation.code, violation.cause, violation.call) == ("malformed_response", cause, TOKEN)
    conversation.call(TOKEN + 1, TOOL)
    assert isinstance(hear(conversation, succeeded("req_2"))[0], Reply)


def test_a_response_that_breaks_the_protocol() -> None:
    check_rows(WRONG_FRAMES, lambda _, fields: is_invalid(TOOL, frame("response", id="req_1", **fields)))
    assert isinstance(hear(called(), frame("response", id="req_1", **OK))[0], Reply)  # the control


def test_a_body_that_breaks_the_protocol() -> None:
    check_rows(WRONG_BODIES, lambda _, row: is_invalid(row[0], response(row[1])))


def test_a_result_of_the_wrong_shape() -> None:
    def check(_: str, row: tuple[Call, Any]) -> None:
        is_invalid(row[0], response({"status": "succeeded", "result": row[1]}))

    check_rows(WRONG_RESULTS, check)


# --- the output schema --------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "required": ["issues"],
    "properties": {"issues": {"type": "array", "items": {"type": "object", "required": ["key"]}}},
}
OUTPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "it fits": ({"structured_output": {"issues": [{"key": "ENG-123"}]}}, ""),
    "a key is missing": ({"structured_output": {"issues": [{}]}}, "/issues/0"),
    "null": ({"structured_output": None}, "(the value)"),
    "there is none": ({}, "there is none"),
    "an error for the model has none": ({"is_error": True}, ""),
    "an error for the model has another": ({"is_error": True, "structured_output": 1}, ""),
}


def test_the_output_schema() -> None:
    def check(_: str, row: tuple[dict[str, Any], str]) -> None:
        result, fault = row
        (came,) = hear(called(options={"output_schema": json.dumps(SCHEMA)}), succeeded(**result))
        if not fault:
            assert came == Reply(TOKEN, {"content": CONTENT, **result})
            return
        assert isinstance(came, Violation)
        assert (came.code, came.cause, came.call) == ("malformed_response", "invalid_output", TOKEN)
        assert fault in came.message

    check_rows(OUTPUTS, check)
    assert isinstance(hear(called(), succeeded(structured_output=1))[0], Reply)  # without a schema
    hook = called(HOOK, options={"output_schema": json.dumps(SCHEMA)})
    assert isinstance(hear(hook, response({"status": "ack"}))[0], Reply)  # only a tool has one


def test_the_shape_comes_before_the_schema() -> None:
    conversation = called(options={"output_schema": json.dumps(SCHEMA)})
    (came,) = hear(conversation, response({"status": "succeeded", "result": {"structured_output": 1}}))
    assert isinstance(came, Violation) and came.cause == "invalid_response"


@pytest.mark.parametrize(
    "text", ["{", '{"type": "nothing"}', "[" * 100_000, '{"$ref": "https://example.com/s"}']
)
def test_an_output_schema_that_cannot_be_used_sends_nothing(text: str) -> None:
    with pytest.raises(CallRefused) as refusal:
        ready(options={"output_schema": text}).call(TOKEN, TOOL)
    fault = refusal.value.event
    assert isinstance(fault, Violation)
    assert (fault.code, fault.cause) == ("manifest_invalid", "output_schema")
