"""Hooks: which answers are invalid, and the answer used instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from runner.protocol.dialect import Events, Notice, Reply
from sandbox.document.diagnostic import quoted

# By the contract, a hook that fails does not stop the message it was asked about.
CONTINUE: Mapping[str, Any] = {"abort": False}


def substitute_answer(token: int, hook: str, why: str, on_failure: Literal["continue", "abort"]) -> Events:
    """The policy's answer for a hook that failed."""
    answer: dict[str, Any] = dict(CONTINUE)
    if on_failure == "abort":
        answer = {"abort": True, "reason": f"the hook {quoted(hook)} failed: {why}", "decision": "block"}
    told = {"hook": hook, "why": why, "on_failure": on_failure}
    return (Notice("hook_failed", told), Reply(token, answer, why))


def fault(value: Any) -> str:
    """The fault of a hook's answer; empty if it has none."""
    if not isinstance(value, dict):
        return "its answer is not an object"
    for name in ("abort", "do_not_reply_again"):
        if name in value and not isinstance(value[name], bool):
            return f"{name} in its answer is not a boolean"
    for name in ("reason", "transformed_body"):
        if value.get(name) is not None and not isinstance(value[name], str):
            return f"{name} in its answer is not a string"
    if value.get("decision") not in (None, "allow", "block", "transform"):
        return "decision in its answer is none of allow, block and transform"
    return ""


def without_odd_override(token: int, hook: str, value: dict[str, Any]) -> Events:
    """The answer of a hook. An override changes an event key by key, so one that is no object is ignored, and
    the rest of the answer counts."""
    override = value.get("override")
    if override is None or isinstance(override, dict):
        return (Reply(token, value),)
    rest = {name: each for name, each in value.items() if name != "override"}
    told = {"hook": hook, "why": "override in its answer is not an object"}
    return (Notice("override_ignored", told), Reply(token, rest))
