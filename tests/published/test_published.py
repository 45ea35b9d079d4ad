"""Published MCP servers, as people have them: wrapped, allowed, and used by the official client.

Each stands in a host's configuration as its README says, with the installed program in the place of npx or
uvx. `runner wrap` changes the configuration, `runner allow` says what the server may have, and the client of
the official SDK starts the command that the configuration then has.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import mcp_types as types
import pytest
import trio
from mcp import Client, StdioServerParameters, stdio_client

from tests.conftest import TEMP_PREFIX, Caller
from tests.published.install import InstallationFailed, install
from tests.published.places import Desk, copy_programs, make_desk
from tests.published.servers import NEEDED, SERVERS, Published

pytestmark = [pytest.mark.needs("registry", "node"), pytest.mark.bound(1200)]

# For one server, on a machine that does much else.
SECONDS = 180.0
AT_ONCE = 3


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    try:
        installed = install()
    except InstallationFailed as error:
        pytest.fail(f"the registries answer, and the servers cannot be installed:\n{error}")
    folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir="/tmp"))
    folder.chmod(0o755)
    try:
        copy_programs(installed, folder)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def desk(runner_as: Caller, programs: Path, plugin_dir: Path, nothing_left: None) -> Desk:
    return make_desk(runner_as, programs, plugin_dir)


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


async def _use_all(desk: Desk, servers: dict[Published, Path], errors: Path) -> list[Tried]:
    found: list[Tried] = []
    limit = trio.CapacityLimiter(AT_ONCE)

    async def use(server: Published, file: Path) -> None:
        async with limit:
            found.append(
                await _used_by_the_official_client(desk, server, file, errors / f"{server.name}.stderr")
            )

    async with trio.open_nursery() as nursery:
        for server, file in servers.items():
            nursery.start_soon(use, server, file)
    return found


def _wrap(desk: Desk, file: Path) -> None:
    done = desk.caller("wrap", file, "--yes", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def _allow(desk: Desk, server: Published, file: Path) -> None:
    words = [desk.fill(word) for word in server.allowed]
    done = desk.caller("allow", file, "--server", server.name, *words, "--yes", timeout=120)
    assert done.returncode == 0, f"{server.name}: {done.stdout}{done.stderr}"


def test_published_servers_are_wrapped_allowed_listed_and_called(
    desk: Desk, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    files = desk.configure(SERVERS)
    for file in sorted(set(files.values())):
        _wrap(desk, file)
    for server in SERVERS:
        _allow(desk, server, files[server.name])
    tried = trio.run(_use_all, desk, {each: files[each.name] for each in SERVERS}, tmp_path)
    faults = [str(each) for each in tried if each.fault]
    called = [each for each in tried if not each.fault and each.server.call is not None]
    line = f"{desk.caller.name}: {len(called)} of {NEEDED} published servers listed and called"
    record_property("published", "\n".join([line, *(f"  {each}" for each in sorted(map(str, tried)))]))
    assert len(called) >= NEEDED, "\n".join([line, *faults])
    assert not faults, "\n".join([line, *faults])


def test_without_the_yes_a_wrapped_server_has_nothing_of_the_host(desk: Desk, tmp_path: Path) -> None:
    """The control: it is `runner allow` that made the others work."""
    server = next(each for each in SERVERS if each.name == "my_sqlite_db")
    files = desk.configure([server])
    _wrap(desk, files[server.name])
    [tried] = trio.run(_use_all, desk, {server: files[server.name]}, tmp_path)
    assert "unable to open database file" in tried.fault
    assert not (desk.work / server.leaves).exists()
