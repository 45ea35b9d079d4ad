"""The request for each kind of call. Nothing is sent that the manifest does not declare.

    kind      name                          input
    tool      PLUGIN.TOOL, or just TOOL     its arguments, as its parameters_schema says
    method    a method of the manifest      its params
    hook      a hook of the manifest        what hooks.py says

The params on the wire are the input and `_context`: who calls, from which agent and session, and for which
project.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from runner.contracts.kaged import CONTEXT, CONTRACT, hooks
from runner.contracts.kaged.declared import Declared, DeclaredTool, declared_by
from runner.plugin import Plugin
from runner.protocol.dialect import Call, CallRefused, Refusal, stray_context
from runner.protocol.memory import COMPILED, BoundedCache
from runner.protocol.rpc_dialect import undeclared
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault
from sandbox.document.diagnostic import printable, quoted

KEY = "_context"
PRIMARY = "primary"
OPERATOR = "local"

_AGENT_PATH = re.compile(r"primary(\.subagents\.[A-Za-z0-9_-]+)*")
_INVALID_PARAMS, _UNSUPPORTED = "-32602", "-32601"
_LISTS = ("methods", "hooks", "notifications")

Ids = Callable[[], str]


def make_id() -> str:
    return str(uuid.uuid4())


class CallBook:
    """The calls that a plugin's manifest allows."""

    def __init__(self, plugin_id: str, declared: Declared) -> None:
        self._plugin_id = plugin_id
        self._declared = declared
        self._schemas = BoundedCache[Schema](COMPILED)  # compiled when a tool is first called

    def entries(self, name: str) -> Iterable[str | dict[str, Any]] | None:
        """A list of the manifest's, or None."""
        if name == "tools":
            return [
                {"name": tool.name, "description": tool.description, "input_schema": tool.schema}
                for tool in self._declared.tools.values()
            ]
        return getattr(self._declared, name) if name in _LISTS else None

    def request(self, token: int, call: Call, context: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
        """Method and params. Raises CallRefused."""
        declared = self._declared
        if call.kind == "tool":
            tool = self._tool(token, call.name)
            given = _object(token, call)
            self._check(token, tool, given)
            method = tool.name
        elif call.kind == "method":
            method, given = _known(token, "method", call.name, declared.methods), _object(token, call)
        elif call.kind == "hook":
            method = hooks.PREFIX + _known(token, "hook", call.name, declared.hooks)
            given = _object(token, call)
            _check_hook(token, call.name, given, context["agent_path"])
        else:
            message = f"a plugin of this contract has no {call.kind}s: it has tools, methods and hooks"
            raise CallRefused(Refusal(token, _UNSUPPORTED, message, "unsupported"))
        return method, {**given, KEY: dict(context)}

    def _tool(self, token: int, name: str) -> DeclaredTool:
        tools = self._declared.tools
        found = tools.get(name) or tools.get(f"{self._plugin_id}.{name}")
        if found is None:
            # If the caller wrote a short name, the suggestions are short names.
            known = [each if "." in name else each.rpartition(".")[2] for each in tools]
            raise _unknown(token, "tool", name, known)
        return found

    def _check(self, token: int, tool: DeclaredTool, arguments: Mapping[str, Any]) -> None:
        schema = self._schemas.get(tool.name)
        if schema is None:
            try:
                schema = Schema(tool.schema)
            except SchemaFault as fault:
                message = f"the parameters_schema of the tool {quoted(tool.name)} cannot be used: {fault}"
                raise CallRefused(Refusal(token, _INVALID_PARAMS, message, "bad_schema")) from None
            self._schemas.put(tool.name, schema, schema.size)
        faults = [printable(str(fault)) for fault in schema.faults(arguments)]
        if faults:
            message = f"the arguments do not fit the schema of {quoted(tool.name)}: {'; '.join(faults[:3])}"
            refusal = Refusal(token, _INVALID_PARAMS, message, "invalid_arguments", {"details": faults})
            raise CallRefused(refusal)


def check_hook(plugin: Plugin, call: Call) -> None:
    """Raises CallRefused."""
    if stray := stray_context(call, CONTRACT.calls):
        raise CallRefused(Refusal(0, _INVALID_PARAMS, stray, "invalid_context"))
    declared = declared_by(plugin)
    CallBook(plugin.id, declared).request(0, call, make_context(0, call, declared, "", make_id))


def make_context(token: int, call: Call, declared: Declared, session_id: str, ids: Ids) -> dict[str, str]:
    """All fields of `_context`, as strings. Raises CallRefused."""
    if fault := context_fault(call.context):
        raise CallRefused(Refusal(token, _INVALID_PARAMS, fault, "invalid_context"))
    context: dict[str, str] = {
        "operator_id": OPERATOR,
        "project_id": declared.project_id,
        "agent_path": PRIMARY,
        "session_id": session_id,
    }
    if declared.project_root:
        context["project_root"] = declared.project_root
    context.update({name: call.context[name] for name in CONTEXT if name in call.context})
    if "request_id" not in context:
        context["request_id"] = ids()
    return context


def context_fault(given: Mapping[str, Any]) -> str:
    """Returns the fault of the fields that a caller sets, or ''. `stray_context` checks unknown ones."""
    for name in CONTEXT:
        if name in given and not isinstance(given[name], str):
            return f"{name} in the context is not a string"
    if not _AGENT_PATH.fullmatch(given.get("agent_path", PRIMARY)):
        return f"agent_path in the context has to be {PRIMARY} or {PRIMARY}.subagents.KEY"
    return ""


def _bad_context(token: int, message: str) -> CallRefused:
    return CallRefused(Refusal(token, _INVALID_PARAMS, message, "invalid_context"))


def _object(token: int, call: Call) -> dict[str, Any]:
    if call.input is None:
        return {}
    if not isinstance(call.input, Mapping):
        message = f"the input of a {call.kind} has to be an object"
        raise CallRefused(Refusal(token, _INVALID_PARAMS, message, "invalid_params"))
    if KEY in call.input:
        message = f"the input has {KEY}, which the runner sets; give its fields with --context"
        raise CallRefused(Refusal(token, _INVALID_PARAMS, message, "invalid_params"))
    return dict(call.input)


def _check_hook(token: int, hook: str, given: Mapping[str, Any], agent_path: str) -> None:
    if fault := hooks.params_fault(hook, given):
        raise CallRefused(Refusal(token, _INVALID_PARAMS, fault, "invalid_params"))
    if hook in hooks.PRIMARY_ONLY and agent_path != PRIMARY:
        message = f"{hook} is for the primary agent only, and agent_path is {quoted(agent_path)}"
        raise _bad_context(token, message)


def _known(token: int, what: str, name: str, known: Collection[str]) -> str:
    if name not in known:
        raise _unknown(token, what, name, known)
    return name


def _unknown(token: int, what: str, name: str, known: Collection[str]) -> CallRefused:
    return undeclared(token, what, name, known, f"declare them under {what}s", " in the plugin's manifest")
