"""The contract's method and params for each kind of call.

    kind      name                       input
    tool      a tool                     its arguments
    hook      a hook                     the event
    channel   start, stop,               kind and instance; send_outbound: kind and msg
              send_outbound
    llm       a provider                 model, messages, …; stream; or request with the whole of it
    memory    vector_upsert,             backend, collection, and records, query or ids
              vector_search,
              vector_delete
    method    a method                   its params, unchanged

A channel, provider or backend need not be named if the manifest declares only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.nexo import CONTRACT, DECLARED
from runner.plugin import Plugin
from runner.protocol.dialect import Call, CallRefused, Refusal, stray_context
from runner.protocol.rpc_dialect import RpcCall, undeclared

_CHANNEL_VERBS = ("start", "stop", "send_outbound")
_MEMORY_VERBS = ("vector_upsert", "vector_search", "vector_delete")

# Sent by the session itself. As calls they would end it.
RESERVED = ("initialize", "shutdown")

DEFAULT_AGENT = "runner"


# What an RpcCall is about: its answer comes in pieces, or its errors have the codes of all families.
STREAM, OUTBOUND_TOOL = "stream", "outbound_tool"


def declared_entries(name: str, plugin: Plugin) -> tuple[str, ...] | None:
    """The manifest's list of a kind other than tools."""
    section = {"llms": "llm_providers", "memories": "memory_backends"}.get(name, name)
    return dict(plugin.exports).get(section, ()) if section in DECLARED else None


def check_hook(plugin: Plugin, call: Call) -> None:
    """Raises CallRefused."""
    if stray := stray_context(call, CONTRACT.calls):
        raise CallRefused(Refusal(0, "-32602", stray, "invalid_context"))
    request(0, call, plugin)


def request(token: int, call: Call, plugin: Plugin) -> RpcCall:
    """Every kind except tools, which the dialect checks against its list. Raises CallRefused."""
    exports = dict(plugin.exports)
    if call.kind == "hook":
        name = _declared(token, "hook", call.name, exports.get("hooks", ()))
        event = {} if call.input is None else call.input
        return RpcCall("hook.on_hook", {"plugin_id": plugin.id, "hook_name": name, "event": event}, name)
    if call.kind == "channel":
        return _channel(token, call, exports.get("channels", ()))
    if call.kind == "llm":
        return _llm(token, call, exports.get("llm_providers", ()))
    if call.kind == "memory":
        return _memory(token, call, exports.get("memory_backends", ()))
    if call.kind == "method":
        if call.name in RESERVED:
            message = f"{call.name} is sent by the runner itself, at the beginning or the end of a session"
            raise CallRefused(Refusal(token, "-32600", message, "reserved"))
        streams = (
            call.name == "llm.chat" and isinstance(call.input, dict) and call.input.get("stream") is True
        )
        return RpcCall(call.name, call.input, about=STREAM * streams)
    if call.kind == "event":
        message = "an event has no answer: send it as the notification broker.event"
        raise CallRefused(Refusal(token, "-32601", message, "unsupported"))
    message = f"a nexo plugin has no {call.kind}s"
    raise CallRefused(Refusal(token, "-32601", message, "unsupported"))


def tool(call: Call, plugin: Plugin, method: str) -> RpcCall:
    """The request for a tool whose name and arguments have been checked."""
    params: dict[str, Any] = {
        "plugin_id": plugin.id,
        "tool_name": call.name,
        "args": arguments(call),
        "agent_id": call.context.get("agent_id", DEFAULT_AGENT),
    }
    if "policy" in call.context:
        params["policy"] = call.context["policy"]
    return RpcCall(method, params, about="" if method == "tool.invoke" else OUTBOUND_TOOL)


def arguments(call: Call) -> Any:
    return {} if call.input is None else call.input


def method_of(call: Call) -> str:
    """The method of a call, valid or not. It decides the time limit."""
    if call.kind == "hook":
        return "hook.on_hook"
    if call.kind == "channel":
        return f"channel.{call.name.removeprefix('channel.')}"
    if call.kind == "memory":
        return f"memory.{call.name.removeprefix('memory.')}"
    if call.kind == "llm":
        return "llm.chat"
    return "tool.invoke" if call.kind == "tool" else call.name


def is_stream(call: Call) -> bool:
    named = call.kind == "llm" or (call.kind == "method" and call.name == "llm.chat")
    return named and isinstance(call.input, Mapping) and call.input.get("stream") is True


def _channel(token: int, call: Call, kinds: tuple[str, ...]) -> RpcCall:
    verb = call.name.removeprefix("channel.")
    if verb not in _CHANNEL_VERBS:
        raise _unknown(token, "channel call", call.name, _CHANNEL_VERBS)
    given = _object(token, call)
    kind = _chosen(token, "channel", "kind", given, kinds)
    if verb == "send_outbound":
        if not isinstance(given.get("msg"), Mapping):
            message = "channel.send_outbound needs the message as an object under msg"
            raise CallRefused(Refusal(token, "-32602", message, "invalid_params"))
        return RpcCall("channel.send_outbound", {**given, "kind": kind})
    if verb == "start":
        given = {"instance": None, **given}
    return RpcCall(f"channel.{verb}", {**given, "kind": kind})


def _llm(token: int, call: Call, providers: tuple[str, ...]) -> RpcCall:
    given = dict(_object(token, call))
    if call.name in providers:
        given["provider"] = call.name
    elif call.name not in ("chat", "llm.chat"):
        raise _unknown(token, "LLM provider", call.name, providers)
    provider = _chosen(token, "LLM provider", "provider", given, providers)
    streams = given.pop("stream", False) is True
    del given["provider"]
    inner = given.pop("request", None)
    if inner is None:
        inner = given
    if not isinstance(inner, Mapping) or not isinstance(inner.get("messages"), list):
        message = "llm.chat needs messages, as an array of objects with role and content"
        raise CallRefused(Refusal(token, "-32602", message, "invalid_params"))
    model = given.get("model", inner.get("model"))
    if not isinstance(model, str):
        raise CallRefused(Refusal(token, "-32602", "llm.chat needs the name of a model", "invalid_params"))
    params = {"provider": provider, "model": model, "stream": streams, "request": {"model": model, **inner}}
    return RpcCall("llm.chat", params, about=STREAM * streams)


def _memory(token: int, call: Call, backends: tuple[str, ...]) -> RpcCall:
    verb = call.name.removeprefix("memory.")
    if verb not in _MEMORY_VERBS:
        raise _unknown(token, "memory call", call.name, _MEMORY_VERBS)
    given = _object(token, call)
    backend = _chosen(token, "memory backend", "backend", given, backends)
    return RpcCall(f"memory.{verb}", {**given, "backend": backend})


def _object(token: int, call: Call) -> dict[str, Any]:
    if call.input is None:
        return {}
    if not isinstance(call.input, Mapping):
        message = f"the input of a {call.kind} call has to be an object"
        raise CallRefused(Refusal(token, "-32602", message, "invalid_params"))
    return dict(call.input)


def _chosen(token: int, what: str, key: str, given: Mapping[str, Any], declared: tuple[str, ...]) -> str:
    """The name in the input, or the only one that the manifest declares."""
    name = given.get(key)
    if name is None and len(declared) == 1:
        return declared[0]
    if name is None and declared:
        message = f"the plugin has several {what}s: {', '.join(declared)}; name one as {key}"
        raise CallRefused(Refusal(token, "-32602", message, "invalid_params"))
    return _declared(token, what, name if isinstance(name, str) else "", declared)


def _declared(token: int, what: str, name: str, declared: tuple[str, ...]) -> str:
    if name not in declared:
        raise _unknown(token, what, name, declared)
    return name


def _unknown(token: int, what: str, name: str, known: tuple[str, ...]) -> CallRefused:
    return undeclared(token, what, name, known, "declare them under [plugin.extends]")
