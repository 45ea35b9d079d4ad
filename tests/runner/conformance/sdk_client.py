"""A host that is the official client of the `mcp` package: sdk_client.py PROGRAM [ARGS]."""

from __future__ import annotations

import sys

import anyio
from mcp import Client, StdioServerParameters, stdio_client


async def main() -> None:
    parameters = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:])
    async with Client(stdio_client(parameters)) as client:
        await client.call_tool("echo", {})


anyio.run(main)
