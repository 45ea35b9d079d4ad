"""A server on the official SDK: something of each thing a client can ask for.

The SDK speaks both protocol eras, whichever the client begins with. With the argument `legacy` it is one of
the older era only: who asks for the newer one first gets the error that such servers answer with.
"""

import asyncio
import json
import os
import sys
import warnings

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    CreateMessageRequest,
    CreateMessageRequestParams,
    InputRequiredResult,
    ListRootsRequest,
    SamplingMessage,
    TextContent,
)
from pydantic import BaseModel

# It says at each log message that logging is deprecated. It is, and clients still have to cope.
warnings.simplefilter("ignore")

server = MCPServer("sdk", version="1.2.3", instructions="Ask it anything small.")


class Sum(BaseModel):
    total: int
    parts: list[int]


@server.tool()
def add(a: int, b: int) -> Sum:
    """Adds two numbers, with structured content."""
    return Sum(total=a + b, parts=[a, b])


@server.tool()
def echo(text: str) -> str:
    """Says the same again."""
    return text


@server.tool()
def fail(reason: str) -> str:
    """Fails in the way of tools: a result that says so."""
    raise ToolError(reason)  # of other exceptions the SDK tells nothing


@server.tool()
async def steps(count: int, ctx: Context) -> str:
    """Reports progress and logs at each of `count` steps."""
    for step in range(1, count + 1):
        await ctx.report_progress(step, count, f"step {step}")
        await ctx.info({"step": step})
    return f"{count} steps"


interrupted = asyncio.Event()


@server.tool()
async def wait(seconds: float, ctx: Context) -> str:
    """Says that it has begun, then takes its time. For cancelling."""
    await ctx.report_progress(0, 1, "begun")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        interrupted.set()
        raise
    return "waited"


@server.tool()
async def cancelled() -> str:
    """Answers when a `wait` was cancelled."""
    await interrupted.wait()
    interrupted.clear()
    return "cancelled"


@server.tool()
async def roots(ctx: Context) -> str:
    """Asks the client for its roots; what the client says to that is the result."""
    try:
        found = await ctx.request_context.session.list_roots()
    except Exception as error:
        return f"refused: {error}"
    return ", ".join(str(root.uri) for root in found.roots)


@server.tool()
async def sample(text: str, ctx: Context) -> str:
    """Asks the client's model; what the client says to that is the result."""
    question = SamplingMessage(role="user", content=TextContent(type="text", text=text))
    try:
        answer = await ctx.request_context.session.create_message(messages=[question], max_tokens=16)
    except Exception as error:
        return f"refused: {error}"
    return str(answer.content)


@server.tool()
async def input_roots(ctx: Context) -> str | InputRequiredResult:
    """As `roots`, in the way of the newer era: it is asked again with the answers."""
    if not ctx.input_responses:
        return InputRequiredResult(input_requests={"where": ListRootsRequest()}, request_state="asked")
    return f"{ctx.request_state}: {', '.join(str(root.uri) for root in ctx.input_responses['where'].roots)}"


@server.tool()
async def input_sample(text: str, ctx: Context) -> str | InputRequiredResult:
    """As `sample`, likewise."""
    if not ctx.input_responses:
        message = SamplingMessage(role="user", content=TextContent(type="text", text=text))
        question = CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=16))
        return InputRequiredResult(input_requests={"model": question}, request_state="asked")
    return f"{ctx.request_state}: {ctx.input_responses['model'].content.text}"


@server.resource("memo://today", mime_type="text/plain")
def today() -> str:
    return "nothing"


@server.resource("memo://{day}", mime_type="text/plain")
def of_day(day: str) -> str:
    return f"nothing on {day}"


@server.prompt()
def greet(name: str) -> str:
    """How to greet somebody."""
    return f"Say hello to {name}."


def refuse_the_newer_era():
    """Reads no further than the first line: the rest is the SDK's."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1) or b"\n"
    request = json.loads(line)
    if request["method"] != "server/discover":
        sys.exit("with `legacy`, it has to be asked for the newer era first")
    error = {"code": -32601, "message": "Method not found"}
    os.write(1, json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}).encode() + b"\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["legacy"]:
        refuse_the_newer_era()
    server.run()
