"""A server on the official SDK, with one example of everything a client can request.

The SDK speaks both protocol eras, whichever the client begins with. With the argument `legacy` it speaks the
older era only: a client that asks for the newer one first gets the error that such servers return.
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

# The SDK warns at each log message that logging is deprecated. Clients still have to support it.
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
    """Returns its input."""
    return text


@server.tool()
def fail(reason: str) -> str:
    """Fails with a result that is marked as an error."""
    raise ToolError(reason)  # the SDK hides the text of other exceptions


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
    """Reports progress once, then waits. For tests of cancelling."""
    await ctx.report_progress(0, 1, "begun")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        interrupted.set()
        raise
    return "waited"


@server.tool()
async def cancelled() -> str:
    """Returns when a `wait` was cancelled."""
    await interrupted.wait()
    interrupted.clear()
    return "cancelled"


@server.tool()
async def roots(ctx: Context) -> str:
    """Requests the client's roots and returns the answer."""
    try:
        found = await ctx.request_context.session.list_roots()
    except Exception as error:
        return f"refused: {error}"
    return ", ".join(str(root.uri) for root in found.roots)


@server.tool()
async def sample(text: str, ctx: Context) -> str:
    """Requests a sample from the client's model and returns the answer."""
    question = SamplingMessage(role="user", content=TextContent(type="text", text=text))
    try:
        answer = await ctx.request_context.session.create_message(messages=[question], max_tokens=16)
    except Exception as error:
        return f"refused: {error}"
    return str(answer.content)


@server.tool()
async def input_roots(ctx: Context) -> str | InputRequiredResult:
    """Like `roots`, in the newer era: the client repeats the call with the answers."""
    if not ctx.input_responses:
        return InputRequiredResult(input_requests={"where": ListRootsRequest()}, request_state="asked")
    return f"{ctx.request_state}: {', '.join(str(root.uri) for root in ctx.input_responses['where'].roots)}"


@server.tool()
async def input_sample(text: str, ctx: Context) -> str | InputRequiredResult:
    """Like `sample`, in the newer era."""
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
    """Reads only the first line, and leaves the rest to the SDK."""
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
