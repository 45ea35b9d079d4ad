#!/usr/bin/python3
"""A plugin on the nexoai SDK.

Its tools send requests to the host, and it answers an event by publishing one. `sdk_linger` is still running
when the shutdown comes: the SDK lets it finish, and sends its answer before the acknowledgement.
"""

import asyncio
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "vendor"))

from nexo_plugin_sdk import Event, Message, PluginAdapter, ToolDef  # noqa: E402
from nexo_plugin_sdk.errors import PluginError  # noqa: E402
from nexo_plugin_sdk.tools import (  # noqa: E402
    ToolArgumentInvalid,
    ToolDenied,
    ToolExecutionFailed,
    ToolNotFound,
    ToolUnavailable,
)

ANYTHING = {"type": "object"}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
FAILURES = {
    "not_found": lambda: ToolNotFound("sdk_fail"),
    "argument": lambda: ToolArgumentInvalid("not like that", details={"field": "kind"}),
    "execution": lambda: ToolExecutionFailed("it broke"),
    "unavailable": lambda: ToolUnavailable("not now", retry_after_ms=1500),
    "denied": lambda: ToolDenied("not you"),
    "python": lambda: ZeroDivisionError("unforeseen"),
}


async def echo(args, broker):
    # A print() to stdout, which the SDK diverts to stderr.
    print("echoing")
    return {"echo": args}


async def recall(args, broker):
    entries = await broker.memory_recall(agent_id="a1", query=args.get("query", "x"), limit=2)
    return [entry.content for entry in entries]


async def complete(args, broker):
    result = await broker.llm_complete(
        provider="p", model="m", messages=[Message("user", args.get("text", "hi"))], max_tokens=8
    )
    return {"content": result.content, "finish_reason": result.finish_reason}


async def stream(args, broker):
    answer = broker.llm_complete_stream(
        provider="p", model="m", messages=[Message("user", args.get("text", "hi"))], max_tokens=8
    )
    chunks = [chunk async for chunk in answer]
    result = await answer.final_result()
    return {"chunks": chunks, "finish_reason": result.finish_reason}


async def fail(args, broker):
    raise FAILURES[args.get("kind", "execution")]()


async def linger(args, broker):
    """Runs until the host shuts down, which it learns from a request that is not answered."""
    await broker.publish("seen.linger", Event.new("seen.linger", "sdk", {"state": "begun"}))
    try:
        await broker.memory_recall(agent_id="a1", query="linger", timeout=600)
    except PluginError as error:
        await asyncio.sleep(float(args.get("seconds", 0.2)))
        await broker.publish("seen.linger", Event.new("seen.linger", "sdk", {"state": "ended"}))
        return {"ended": type(error).__name__}
    return {"ended": "answered"}


async def publish(args, broker):
    # A forged event: its source and topic differ from those of the message.
    event = Event.new(args.get("inner", args["topic"]), "somebody-else", args.get("payload", {}))
    await broker.publish(args["topic"], event)
    return {"published": args["topic"]}


TOOLS = {
    "sdk_echo": (echo, TEXT),
    "sdk_recall": (recall, ANYTHING),
    "sdk_complete": (complete, ANYTHING),
    "sdk_stream": (stream, ANYTHING),
    "sdk_fail": (fail, ANYTHING),
    "sdk_linger": (linger, ANYTHING),
    "sdk_publish": (publish, ANYTHING),
}


async def on_tool(invocation, context):
    try:
        return await TOOLS[invocation.tool_name][0](invocation.args or {}, context.broker)
    except PluginError as error:  # the host's error reply to a request
        raise ToolExecutionFailed(f"{type(error).__name__}: {error}") from error


async def on_event(topic, event, broker):
    reply = {"topic": topic, "source": event.source, "payload": event.payload}
    await broker.publish("plugin.inbound.memo", Event.new("plugin.inbound.memo", "sdk", reply))


async def on_shutdown():
    sys.stderr.write("sdk: goodbye\n")
    sys.stderr.flush()


async def main():
    adapter = PluginAdapter(
        manifest_toml=(HERE / "nexo-plugin.toml").read_text(),
        server_version="1.2.3",
        tools=[ToolDef(name, name, schema) for name, (_, schema) in TOOLS.items()],
        on_tool_with_context=on_tool,
        on_event=on_event,
        on_shutdown=on_shutdown,
    )
    await adapter.run()


asyncio.run(main())
