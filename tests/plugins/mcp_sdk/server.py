"""A server on the official SDK: something of each thing a client can ask for.

The SDK speaks both protocol eras, whichever the client begins with.
"""

import asyncio
import warnings

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
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


@server.tool()
async def wait(seconds: float, ctx: Context) -> str:
    """Says that it has begun, then takes its time. For cancelling."""
    await ctx.report_progress(0, 1, "begun")
    await asyncio.sleep(seconds)
    return "waited"


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
    from mcp_types import SamplingMessage, TextContent

    question = SamplingMessage(role="user", content=TextContent(type="text", text=text))
    try:
        answer = await ctx.request_context.session.create_message(messages=[question], max_tokens=16)
    except Exception as error:
        return f"refused: {error}"
    return str(answer.content)


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


if __name__ == "__main__":
    server.run()
