"""A request that the door does not carry out, as the caller reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.outcome import Code, Outcome

# The HTTP status of each outcome of a call that is not `ok`.
STATUS: dict[Code, int] = {
    "plugin_error": 422,
    "invalid_call": 400,
    "launch_failed": 502,
    "handshake_failed": 502,
    "timeout": 504,
    "crashed": 502,
    "malformed_response": 502,
    "tool_not_exposed": 404,
    "protocol_version_mismatch": 502,
    "capability_not_declared": 502,
    "capability_not_allowed": 502,
    "manifest_invalid": 409,
    "policy_denied": 403,
    "sandbox_unavailable": 503,
    "quarantined": 503,
    "cancelled": 499,
    "overloaded": 429,
    "policy_invalid": 409,
    "internal": 500,
}


class Refused(Exception):
    """An answer that is an error. `code` is one word; `hint` says what to change."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str = "",
        *,
        retry_after: float | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """`more`: further keys of the answer."""
        super().__init__(message)
        self.more = more or {}
        self.status, self.code, self.message, self.hint = status, code, message, hint
        self.retry_after = retry_after

    def document(self) -> dict[str, Any]:
        return error_document(self.code, self.message, self.hint, **self.more)

    def headers(self) -> dict[str, str]:
        found = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            found["Retry-After"] = str(max(1, round(self.retry_after)))
        return found


def error_document(
    code: str, message: str, hint: str = "", phase: str = "", cause: str = "", **more: Any
) -> dict[str, Any]:
    error = {"code": code, "phase": phase, "cause": cause, "message": message, "hint": hint}
    return {"error": error, **more}


def outcome_error(outcome: Outcome, **more: Any) -> dict[str, Any]:
    return error_document(outcome.code, outcome.message, outcome.hint, outcome.phase, outcome.cause, **more)


class ControlUnusable(Exception):
    """The control plane cannot be opened: a daemon that should have one does not start. Every fault is a line
    of the message."""
