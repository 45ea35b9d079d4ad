"""The requests that a nexo plugin may send to its host: memory.recall, llm.complete, and publishing events.

Checked in the contract's order: the service first, then each parameter. For a service that is missing or not
allowed the error is "not configured" (-32603) and not "no such method": the SDKs document only the former.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.nexo.host_methods import METHODS as METHODS
from runner.protocol.dialect import Answer
from runner.protocol.host_services import (
    Completion,
    Emit,
    HostError,
    LanguageModel,
    MemoryService,
    Services,
    Why,
)
from sandbox.document.diagnostic import quoted

NOT_FOUND, INVALID_PARAMS, INTERNAL = -32601, -32602, -32603

RECALL_DEFAULT, RECALL_MOST = 10, 1000
MAX_TOKENS_DEFAULT, MAX_TOKENS_MOST = 4096, 2**32 - 1
TEMPERATURE_DEFAULT = 0.7
ROLES = ("system", "user", "assistant", "tool")
FINISH_REASONS = ("stop", "length", "tool_use")


def refused(method: str, why: Why) -> Answer:
    if why == "unknown":
        return Answer(error=(NOT_FOUND, f"method not found: {quoted(method)}", None))
    if why == "absent" and method == "broker.publish":
        return Answer()  # there is no broker, but the session's events have it
    if why == "denied" and method == "broker.publish":
        # A notification has no answer. The operator sees this error instead.
        return Answer(error=(INTERNAL, "the policy does not allow it: see host under [capabilities]", None))
    if why == "busy":
        return Answer(error=(INTERNAL, "the host is busy with your other requests", None))
    return Answer(error=(INTERNAL, f"{METHODS.get(method, 'service')} not configured", None))


async def serve(method: str, params: Any, services: Services, emit: Emit) -> Any:
    given = params if isinstance(params, Mapping) else {}
    if method == "memory.recall" and services.memory is not None:
        return await _recall(given, services.memory)
    if method == "llm.complete" and services.llm is not None:
        return await _complete(given, services.llm, emit)
    if method == "broker.publish" and services.broker is not None:
        await services.broker.publish(given)
        return None
    error = refused(method, "absent" if method in METHODS else "unknown").error
    assert error is not None
    raise HostError(*error)


async def _recall(given: Mapping[str, Any], memory: MemoryService) -> dict[str, Any]:
    agent_id, query = _string(given, "agent_id"), _string(given, "query")
    limit = min(_natural(given.get("limit"), RECALL_DEFAULT), RECALL_MOST)
    entries = await memory.recall(agent_id, query, limit)
    return {"entries": [dict(entry) for entry in entries[:limit]]}


async def _complete(given: Mapping[str, Any], llm: LanguageModel, emit: Emit) -> dict[str, Any]:
    streams = given.get("stream") is True
    request = {**given, **_request(given), "stream": streams}
    if not streams:
        completion = await llm.complete(request, None)
        if not completion.content:
            _check_text(completion)
        return {"content": completion.content, **_ending(completion)}
    told = False

    async def delta(chunk: str) -> None:
        nonlocal told
        if chunk:
            told = True
            await emit(chunk)

    completion = await llm.complete(request, delta)
    if not told:
        _check_text(completion)
        if completion.content:
            await emit(completion.content)  # the model sent no pieces: the plugin gets the whole text as one
    return _ending(completion)


def _request(given: Mapping[str, Any]) -> dict[str, Any]:
    provider, model = _string(given, "provider"), _string(given, "model")
    messages = given.get("messages")
    if not isinstance(messages, list):
        raise HostError(INVALID_PARAMS, "messages is missing or not an array")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise HostError(INVALID_PARAMS, f"messages[{place}] needs a role, one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise HostError(INVALID_PARAMS, f"messages[{place}] needs its content as a string")
    if not messages:
        raise HostError(INVALID_PARAMS, "messages is empty")
    request: dict[str, Any] = {
        "provider": provider,
        "model": model,
        "messages": messages,
        "max_tokens": min(_natural(given.get("max_tokens"), MAX_TOKENS_DEFAULT), MAX_TOKENS_MOST),
        "temperature": TEMPERATURE_DEFAULT,
    }
    temperature = given.get("temperature")
    if isinstance(temperature, int | float) and not isinstance(temperature, bool):
        request["temperature"] = temperature
    if not isinstance(given.get("system_prompt"), str):
        request["system_prompt"] = None
    return request


def _check_text(completion: Completion) -> None:
    if completion.finish_reason == "tool_use":
        raise HostError(NOT_FOUND, "not implemented: the model answered with tool calls instead of text")


def _ending(completion: Completion) -> dict[str, Any]:
    reason = completion.finish_reason
    if reason not in FINISH_REASONS and not reason.startswith("other:"):
        reason = f"other:{reason}"
    usage = {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens}
    return {"finish_reason": reason, "usage": usage}


def _string(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise HostError(INVALID_PARAMS, f"{name} is missing or not a string")
    return value


def _natural(value: Any, default: int) -> int:
    """An integer from 0 on; the default for anything else."""
    return value if type(value) is int and value >= 0 else default
