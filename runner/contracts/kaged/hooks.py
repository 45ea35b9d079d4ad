"""Hooks: the params of each, which answers are valid, and the substitute for an invalid one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from runner.contracts.kaged.declared import COMPACTOR, OBSERVER
from runner.protocol.dialect import Events, Notice, Reply

PREFIX = "kaged.hook."
SESSION_START, SESSION_IDLE = "on_session_start", "on_session_idle"
PRE_COMPACT, POST_COMPACT = "pre_compact", "post_compact"
PRIMARY_ONLY = (SESSION_START, SESSION_IDLE)

# The params besides _context, each a string. None: any.
_PARAMS: Mapping[str, tuple[str, ...] | None] = {
    SESSION_START: (),
    SESSION_IDLE: ("transcript",),
    PRE_COMPACT: None,
    POST_COMPACT: ("messages_being_compacted", "messages_remaining", "strategy", "trigger"),
}

# Keys of an observer's answer that are added to the agent's context. A session start retains nothing.
_CONTRIBUTED: Mapping[str, tuple[str, ...]] = {
    SESSION_START: ("inject",),
    POST_COMPACT: ("retain", "inject"),
}


def params_fault(hook: str, params: Mapping[str, Any]) -> str:
    """The fault of what is sent with a hook; empty if it has none."""
    expected = _PARAMS[hook]
    if expected is None:
        return ""
    wanted = f"{hook} takes {', '.join(expected) or 'no params'}"
    for name in expected:
        if not isinstance(params.get(name), str):
            return f"{wanted}; {name} is missing or not a string"
    stray = [name for name in params if name not in expected]
    return f"{wanted}, and not {stray[0]}" if stray else ""


def result_fault(hook: str, value: Any, roles: Collection[str]) -> str:
    """The fault of a hook's answer; empty if it has none."""
    if hook == SESSION_IDLE:
        return "" if value is None else f"its answer to {hook} has to be null"
    if hook == PRE_COMPACT:
        return _compaction_fault(value, roles)
    if not isinstance(value, dict):
        return f"its answer to {hook} is not an object"
    if hook == POST_COMPACT and not isinstance(value.get("retain"), list):
        return "retain in its answer is missing or not an array"
    if "inject" in value and not isinstance(value["inject"], str):
        return "inject in its answer is not a string"
    return ""


def _compaction_fault(value: Any, roles: Collection[str]) -> str:
    if COMPACTOR not in roles:
        return "" if value is None else "only a compactor answers pre_compact; an observer's answer is null"
    if isinstance(value, dict) or (value is None and OBSERVER in roles):
        return ""
    return "a compactor's answer to pre_compact has to be an object"


def contribution(hook: str, value: Any) -> Any:
    """The part of a valid answer that is used: the keys of _CONTRIBUTED, if the hook has some."""
    names = _CONTRIBUTED.get(hook)
    return value if names is None else {name: value[name] for name in names if name in value}


def substitute_answer(token: int, hook: str, why: str) -> Events:
    """A hook that failed contributes nothing, and the session goes on."""
    return (Notice("hook_failed", {"hook": hook, "why": why}), Reply(token, None, why))
