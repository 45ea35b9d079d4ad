"""Wrap and allow servers, and use them as a host does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mcp_types as types
import trio
from mcp import Client, StdioServerParameters, stdio_client

from tests.published.places import Desk
from tests.published.servers import Published

# For one server, on a machine that does much else.
SECONDS = 180.0
AT_ONCE = 3


class Tried(NamedTuple):
    server: Published
    tools: int
    fault: str  # empty: it was listed, and called if it has something to call here

    def __str__(self) -> str:
        what = f"{self.server.name} ({self.server.package})"
        if self.fault:
            return f"{what}: {self.fault}"
        return f"{what}: {self.tools} tools, {'called' if self.server.call else 'listed'}"


async def _used_by_the_official_client(desk: Desk, server: Published, file: Path, errors: Path) -> Tried:
    """As a host does: start the command of the configuration, with its variables on top of the own ones."""
    entry = desk.wrapped(file, server.name)
    argv: list[str] = [*desk.caller.prefix, entry["command"], *entry["args"]]
    environ = {**desk.caller.environ, **entry.get("env", {})}
    parameters = StdioServerParameters(command=argv[0], args=argv[1:], env=environ, cwd=str(desk.caller.home))
    tools = 0
    try:
        with trio.fail_after(SECONDS), errors.open("w") as errlog:
            async with Client(stdio_client(parameters, errlog)) as client:
                tools = len((await client.list_tools()).tools)
                if not tools:
                    return Tried(server, 0, "it lists no tools")
                if server.call is None:
                    return Tried(server, tools, "")
                result = await client.call_tool(server.call.tool, desk.filled(server.call.input))
    except Exception as error:  # noqa: BLE001 -- one server of many: the others are tried all the same
        return Tried(server, tools, f"{error!r}\n{_end_of(errors)}")
    said = "\n".join(part.text for part in result.content if isinstance(part, types.TextContent))
    if result.is_error or server.call.answer not in said:
        return Tried(server, tools, f"the answer is {said[:500]!r}\n{_end_of(errors)}")
    if server.leaves and not (desk.work / server.leaves).is_file():
        return Tried(server, tools, f"{server.leaves} is not on the host")
    return Tried(server, tools, "")


def _end_of(errors: Path) -> str:
    return errors.read_text(errors="replace")[-2000:]


async def use_all(
    desk: Desk, servers: Sequence[Published], files: Mapping[str, Path], errors: Path
) -> list[Tried]:
    found: list[Tried] = []
    limit = trio.CapacityLimiter(AT_ONCE)

    async def use(server: Published, file: Path) -> None:
        async with limit:
            found.append(
                await _used_by_the_official_client(desk, server, file, errors / f"{server.name}.stderr")
            )

    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(use, server, files[server.name])
    return found


def wrap(desk: Desk, file: Path) -> None:
    done = desk.caller("wrap", file, "--yes", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def allow(desk: Desk, server: Published, file: Path) -> None:
    words = [desk.fill(word) for word in server.allowed]
    done = desk.caller("allow", file, "--server", server.name, *words, "--yes", timeout=120)
    assert done.returncode == 0, f"{server.name}: {done.stdout}{done.stderr}"
