"""Wrap and allow servers, and use them as a host does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import mcp_types as types
import psutil
import trio
from mcp import Client, StdioServerParameters, stdio_client

from tests.published.places import Desk
from tests.published.servers import Published

# For one server, on a machine that does much else.
SECONDS = 180.0
AT_ONCE = 2


class Tried(NamedTuple):
    server: Published
    tools: int
    fault: str  # empty: it was listed, and called if it has something to call here

    def __str__(self) -> str:
        what = f"{self.server.name} ({self.server.package})"
        if self.fault:
            return f"{what}: {self.fault}"
        return f"{what}: {self.tools} tools, {'called' if self.server.call else 'listed'}"


@asynccontextmanager
async def _official_client(desk: Desk, file: Path, name: str, errors: Path) -> AsyncIterator[Client]:
    """As a host does: start the command of the configuration, with its variables on top of the own ones."""
    entry = desk.wrapped(file, name)
    argv: list[str] = [*desk.caller.prefix, entry["command"], *entry["args"]]
    environ = {**desk.caller.environ, **entry.get("env", {})}
    parameters = StdioServerParameters(command=argv[0], args=argv[1:], env=environ, cwd=str(desk.caller.home))
    with errors.open("w") as errlog:
        async with Client(stdio_client(parameters, errlog)) as client:
            yield client


async def _wrapped(desk: Desk, server: Published, file: Path, errors: Path) -> Tried:
    tools = 0
    try:
        with trio.fail_after(SECONDS):
            async with _official_client(desk, file, server.name, errors) as client:
                tools = len((await client.list_tools()).tools)
                if not tools:
                    return Tried(server, 0, "it lists no tools")
                fault = await _call(desk, client, server, "")
                return Tried(server, tools, fault or _fault_of_key(server))
    except Exception as error:  # noqa: BLE001 -- one server of many: the others are tried all the same
        return Tried(server, tools, f"{error!r}\n{_end_of(errors)}")


def _fault_of_key(server: Published) -> str:
    """Whether a process of the server has the key that it only uses."""
    key, name = server.hidden_key.encode(), "node" if server.where == "npm" else server.program
    for process in psutil.process_iter(["name"]) if key else ():
        if process.info["name"] == name:
            for file in ("environ", "cmdline"):
                with suppress(OSError):
                    if key in Path(f"/proc/{process.pid}/{file}").read_bytes():
                        return f"process {process.pid} has its key"
    return ""


async def _call(desk: Desk, client: Client, server: Published, prefix: str) -> str:
    """What is wrong with the answer; empty: nothing, or there is nothing to call."""
    if server.call is None:
        return ""
    result = await client.call_tool(prefix + server.call.tool, desk.filled(server.call.input))
    said = "\n".join(part.text for part in result.content if isinstance(part, types.TextContent))
    if result.is_error or server.call.answer not in said:
        return f"the answer is {said[:500]!r}"
    if server.leaves and not (desk.work / server.leaves).is_file():
        return f"{server.leaves} is not on the host"
    return ""


def _end_of(errors: Path) -> str:
    return errors.read_text(errors="replace")[-2000:]


async def use_all(
    desk: Desk, servers: Sequence[Published], files: Mapping[str, Path], errors: Path
) -> list[Tried]:
    found: list[Tried] = []
    limit = trio.CapacityLimiter(AT_ONCE)

    async def use(server: Published, file: Path) -> None:
        async with limit:
            found.append(await _wrapped(desk, server, file, errors / f"{server.name}.stderr"))

    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(use, server, files[server.name])
    return found


async def use_gateway(desk: Desk, servers: Sequence[Published], file: Path, errors: Path) -> list[Tried]:
    """Call each through the one entry that `wrap --gateway` left in this file."""
    found: list[Tried] = []
    limit = trio.CapacityLimiter(AT_ONCE)
    log = errors / f"{file.parent.name}.gateway.stderr"

    async def use(client: Client, server: Published) -> None:
        async with limit:
            try:
                with trio.fail_after(SECONDS):
                    fault = await _call(desk, client, server, f"{server.name}__")
            except Exception as error:  # noqa: BLE001 -- as above
                fault = repr(error)
            found.append(Tried(server, 0, f"{fault}\n{_end_of(log)}" if fault else ""))

    for server in servers:  # of an earlier call
        if server.leaves:
            (desk.work / server.leaves).unlink(missing_ok=True)
    async with _official_client(desk, file, "runner-gateway", log) as client, trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(use, client, server)
    return found


def wrap(desk: Desk, file: Path, *options: str) -> None:
    done = desk.caller("wrap", *options, file, "--yes", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def allow(desk: Desk, server: Published, file: Path) -> None:
    done = desk.caller("allow", file, "--server", server.name, *desk.allowed(server), "--yes", timeout=300)
    assert done.returncode == 0, f"{server.name}: {done.stdout}{done.stderr}"
