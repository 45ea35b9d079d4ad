"""The requests that an MCP server may send to its host: roots, sampling, elicitation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runner.contracts.mcp.host_methods import METHODS as METHODS
from runner.protocol.dialect import Answer
from runner.protocol.host_services import Emit, HostError, Services, Why
from runner.protocol.jsonrpc import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND

# What the client did not declare (versions.py), so that a server must not ask for it.
TOOL_KEYS: Final = ("tools", "toolChoice")

# The protocol has an error code for this refusal only.
REJECTED: Final = -1

BUSY: Final = "too many requests at once; ask again when one was answered"


async def serve(method: str, params: Any, services: Services, emit: Emit) -> Any:
    """Serve one request and return its result. Raises HostError."""
    asked = params if isinstance(params, dict) else {}
    if method == "roots/list" and services.roots is not None:
        return {"roots": _roots(await services.roots.roots())}
    if method == "sampling/createMessage" and services.sampling is not None:
        _check(asked, "messages", list)
        _check(asked, "maxTokens", int)
        if stray := next((key for key in TOOL_KEYS if asked.get(key) is not None), ""):
            raise HostError(INVALID_PARAMS, f"{stray}: this client did not declare sampling.tools")
        return _object(method, await services.sampling.sample(asked))
    if method == "elicitation/create" and services.elicitation is not None:
        _check(asked, "message", str)
        if asked.get("mode") not in (None, "form"):
            raise HostError(INVALID_PARAMS, "mode: this client declared elicitation by form only")
        result = _object(method, await services.elicitation.elicit(asked))
        if result.get("action") not in ("accept", "decline", "cancel"):
            raise HostError(INTERNAL_ERROR, "the host's answer to elicitation/create has no action")
        return result
    raise HostError(METHOD_NOT_FOUND, f"{method} is not supported")


def refused(method: str, why: Why) -> Answer:
    """The error for a missing capability, or the protocol's own refusal if it has one."""
    if why == "busy":
        return Answer(error=(INTERNAL_ERROR, BUSY, None))
    if why == "denied" and method == "sampling/createMessage":
        return Answer(error=(REJECTED, "User rejected sampling request", None))
    if why == "denied" and method == "elicitation/create":
        return Answer({"action": "decline"})
    service = METHODS.get(method)
    if service is None:
        return Answer(error=(METHOD_NOT_FOUND, "the host has no such method", None))
    reason = {"reason": f"Client does not have {service} capability"}
    return Answer(error=(METHOD_NOT_FOUND, f"{service.capitalize()} not supported", reason))


def _check(params: Mapping[str, Any], key: str, kind: type) -> None:
    value = params.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise HostError(INVALID_PARAMS, f"{key} is missing or of the wrong type")


def _roots(found: Any) -> list[dict[str, Any]]:
    roots = [dict(root) for root in found]
    if not all(isinstance(root.get("uri"), str) for root in roots):
        raise HostError(INTERNAL_ERROR, "a root of the host's has no uri")
    return roots


def _object(method: str, result: Any) -> dict[str, Any]:
    if not isinstance(result, Mapping):
        raise HostError(INTERNAL_ERROR, f"the host's answer to {method} is not an object")
    return dict(result)
