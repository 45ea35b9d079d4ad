"""The `_context` of a call: who calls, from which agent and session, on which project."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from runner.contracts.kaged import CONTEXT
from runner.contracts.kaged.declared import Declared

KEY = "_context"
PRIMARY = "primary"
OPERATOR = "local"

_AGENT_PATH = re.compile(r"primary(\.subagents\.[A-Za-z0-9_-]+)*")

Ids = Callable[[], str]


def make_id() -> str:
    return str(uuid.uuid4())


class ContextFault(Exception):
    """A field that a caller gave is wrong."""


def make_context(given: Mapping[str, Any], declared: Declared, session_id: str, ids: Ids) -> dict[str, str]:
    """All fields, as strings. Raises ContextFault."""
    context: dict[str, str] = {
        "operator_id": OPERATOR,
        "project_id": declared.project_id,
        "agent_path": PRIMARY,
        "session_id": session_id,
    }
    if declared.project_root:
        context["project_root"] = declared.project_root
    for name in CONTEXT:
        if name not in given:
            continue
        if not isinstance(given[name], str):
            raise ContextFault(f"{name} in the context is not a string")
        context[name] = given[name]
    if not _AGENT_PATH.fullmatch(context["agent_path"]):
        raise ContextFault(f"agent_path in the context has to be {PRIMARY} or {PRIMARY}.subagents.KEY")
    if "request_id" not in context:
        context["request_id"] = ids()
    return context
