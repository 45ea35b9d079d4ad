"""One hub for the clients of several hosts: what they share, and that nothing of one reaches another."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
import trio
from mcp import Client, MCPError
from mcp.client.stdio import get_default_environment

from tests.conftest import NODE_PEERS, ROOT, Caller
from tests.runner.gateway.entries import SECONDS, called, on_stdio
from tests.runner.session.test_real_peers import policy

pytestmark = [
    *(pytest.mark.launches, pytest.mark.fresh, pytest.mark.usefixtures("nothing_left")),
    # What the older protocol has and the newer not.
    pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),
]
TELLER = ROOT / "tests/plugins/mcp_teller/server.py"


class Hub:
    """Where the hub of a test listens; the first client starts it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hub.sock"

    def pid(self) -> int:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.path))
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("3i", raw)[0]
        return pid

    def end(self) -> None:
        """And wait until it has gone."""
        with suppress(FileNotFoundError, ConnectionRefusedError):
            os.kill(self.pid(), signal.SIGTERM)
        self.wait()

    def kill(self) -> None:
        """And wait until this process has gone. Another one may serve in its place at once."""
        ended = os.pidfd_open(self.pid())
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        select.select([ended], [], [])
        os.close(ended)

    def wait(self) -> None:
        """Until no hub serves there."""
        with suppress(FileNotFoundError), open(f"{self.path}.hub", "rb+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)


DEFAULT_HUB = "import os; from runner.gateway.via import default_hub; print(default_hub(dict(os.environ)))"


def output(caller: Caller, code: str) -> str:
    argv = [*caller.prefix, *caller.python, "-c", code]
    done = subprocess.run(argv, env=dict(caller.environ), cwd="/", check=True, capture_output=True, text=True)
    return done.stdout


@contextmanager
def hub_of(caller: Caller, folder: Path) -> Iterator[Hub]:
    place = folder / "hub"
    place.mkdir(mode=0o700)
    caller.give(place)
    hub = Hub(place)
    try:
        yield hub
    finally:
        hub.end()


@pytest.fixture
def hub(runner_as: Caller, plugin_dir: Path) -> Iterator[Hub]:
    with hub_of(runner_as, plugin_dir) as hub:
        yield hub


def put_teller(folder: Path, program: Path | None = None, **sandbox: Any) -> Path:
    """A shelf with the server that tells all, which may be shared. `program`: of another shelf."""
    folder.mkdir(exist_ok=True)
    if program is None:
        program = folder / "teller.py"
        program.write_bytes(TELLER.read_bytes())
    entry = {"command": str(program), "args": ["word"], "x-sandbox": {"shared": True, **sandbox}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"teller": entry}}))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    return folder


class Host:
    """A client, and all that it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.news = trio.Event()

    def _hear(self, what: Any) -> None:
        self.told.append(repr(what))
        self.news.set()
        self.news = trio.Event()

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self._hear(params)

    async def message(self, message: Any) -> None:
        self._hear(message)

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        self._hear(f"progress {message}")

    async def elicit(self, context: Any, params: Any) -> types.ElicitResult:
        self._hear(params)
        return types.ElicitResult(action="accept", content={})

    async def until(self, word: str) -> None:
        while not any(word in each for each in self.told):
            await self.news.wait()

    def has_heard(self, word: str) -> bool:
        return any(word in each for each in self.told)

    @asynccontextmanager
    async def open(self, caller: Caller, hub: Hub, config: Path, *options: str) -> AsyncIterator[Client]:
        client = on_stdio(
            caller,
            config,
            *("--via", str(hub.path), *options),
            mode="legacy",
            logging_callback=self.log,
            message_handler=self.message,
            elicitation_callback=self.elicit,
        )
        async with client as opened:
            yield opened


async def who(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await called(client, "teller__who"))[1])
    return found


@pytest.mark.both_callers
@pytest.mark.trio
async def test_a_client_never_hears_of_another(runner_as: Caller, plugin_dir: Path, hub: Hub) -> None:
    """One process for two clients, and a server that tells everything to everybody."""
    shelf, a, b = put_teller(plugin_dir / "shelf"), Host(), Host()
    async with a.open(runner_as, hub, shelf) as first:
        # The control: as long as it is alone, it hears all of this.
        await called(first, "teller__tell", {"word": "alone"})
        await a.until("'said': 'alone'")
        async with b.open(runner_as, hub, shelf) as second:
            one, other = await who(first), await who(second)
            assert one["token"] == other["token"]
            await first.subscribe_resource("runner:teller/memo://alpha")
            await second.subscribe_resource("runner:teller/memo://beta")
            for client in (first, second):
                await client.subscribe_resource("runner:teller/memo://end")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_hold, first, "alpha", a)
                nursery.start_soon(_hold, second, "beta", b)
                await a.until("progress alpha")
                await b.until("progress beta")
                await a.until("memo://alpha")
                await b.until("memo://beta")
                # Each answer goes to who asked, whoever causes it.
                await called(second, "teller__release", {"word": "alpha"})
                await called(first, "teller__release", {"word": "beta"})
            # No question: nobody could say whose it is.
            for client in (first, second):
                assert "-32601" in (await called(client, "teller__ask", {"word": "gamma"}))[1]
            await called(first, "teller__touch", {"word": "memo://end"})
            await a.until("memo://end")  # what was told before has arrived
            await b.until("memo://end")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_fail, second, "teller__hold", "delta", b)
                await b.until("progress delta")
                await _fail(first, "teller__crash", "epsilon", a)
            assert (await who(second))["token"] != one["token"]  # started anew
            heard = {"a": a, "b": b}
            theirs = {"a": ("beta", "delta"), "b": ("alpha", "alone", "epsilon")}
            found = [
                (name, word)
                for name, words in theirs.items()
                for word in words
                if heard[name].has_heard(word)
            ]
            assert found == [] and not a.has_heard("gamma") and not b.has_heard("gamma")


async def _hold(client: Client, word: str, host: Host) -> None:
    result = await client.call_tool("teller__hold", {"word": word}, progress_callback=host.progress)
    assert [part.text for part in result.content if isinstance(part, types.TextContent)] == [word]


async def _fail(client: Client, tool: str, word: str, host: Host) -> None:
    """The process ends during this call, and writes words of one of its calls where its failure is told."""
    result = await client.call_tool(tool, {"word": word}, progress_callback=host.progress)
    said = "".join(part.text for part in result.content if isinstance(part, types.TextContent))
    assert result.is_error and "which several clients share, failed: " in said
    assert not {"delta", "epsilon"} & set(said.replace(":", " ").split())


@pytest.mark.trio
async def test_who_shares_a_process(
    runner_as: Caller, plugin_dir: Path, hub: Hub, write_file: Callable[..., Path]
) -> None:
    """Six clients at once, and then each that differs in one thing."""
    shelf = put_teller(plugin_dir / "shelf")
    program = shelf / "teller.py"
    copy, alone = (
        put_teller(plugin_dir / "copy", program),
        put_teller(plugin_dir / "alone", program, shared=False),
    )
    asks = policy(plugin_dir, "elicitation/create")
    runner_as.give(asks)
    settings = write_file(
        plugin_dir / "settings.toml", '[plugins.teller]\nlimits = { memory = "100M" }\n', 0o600
    )
    runner_as.give(settings)
    variable = Caller(**{**vars(runner_as), "environ": {**runner_as.environ, "TZ": "Other/Place"}})
    rows: list[tuple[str, Caller, Path, tuple[str, ...]]] = [
        *((f"the same {number}", runner_as, shelf, ()) for number in range(5)),
        ("another file with the same entry", runner_as, copy, ()),
        ("another variable of the host", variable, shelf, ()),
        ("another limit", runner_as, shelf, ("--settings", str(settings))),
        ("not declared", runner_as, alone, ()),
        ("not declared again", runner_as, alone, ()),
        ("may ask its client", runner_as, shelf, ("--policy", str(asks))),
    ]
    found: dict[str, dict[str, Any]] = {}
    hosts: dict[str, Host] = {}
    everybody = trio.Event()

    async def use(name: str, caller: Caller, config: Path, options: tuple[str, ...]) -> None:
        hosts[name] = host = Host()
        async with host.open(caller, hub, config, *options) as client:
            found[name] = await who(client)
            if len(found) == len(rows):
                everybody.set()
            await everybody.wait()  # a process ends with its last client
            if name == "may ask its client":
                answer = json.loads((await called(client, "teller__ask", {"word": "mine"}))[1])
                assert answer == {"action": "accept", "content": {}}

    async with trio.open_nursery() as nursery:
        for row in rows:
            nursery.start_soon(use, *row)
    shared = found["the same 0"]["token"]
    assert {found[name]["token"] for name, *_ in rows[:6]} == {shared}
    others = [found[name]["token"] for name, *_ in rows[6:]]
    assert shared not in others and len(set(others)) == len(others)
    assert "TZ" not in found["the same 0"]["env"]
    assert found["another variable of the host"]["env"]["TZ"] == "Other/Place"
    assert [name for name, host in hosts.items() if host.has_heard("mine")] == ["may ask its client"]
    for each in found.values():  # nothing of the hub's, or of the host that started it
        assert not {"HOME", "TMPDIR", "PYTHONPATH"} & {
            name for name in each["env"] if each["env"][name] == runner_as.environ.get(name)
        }


@pytest.mark.needs("npm")
@pytest.mark.trio
async def test_six_official_clients_at_once(runner_as: Caller, plugin_dir: Path, hub: Hub) -> None:
    """Three in Python and three in TypeScript, which start the hub at the same time."""
    shelf, tokens, listed = put_teller(plugin_dir / "shelf"), [], []
    everybody = trio.Event()
    command = runner_as.command("gateway", "--config", shelf, "--list-wait", "100s", "--via", hub.path)
    script = str(Path(__file__).with_name("official_client.mjs"))
    node = [script, str(NODE_PEERS / "@modelcontextprotocol/sdk"), *command]

    async def join(token: str) -> None:
        tokens.append(token)
        if len(tokens) == 6:
            everybody.set()
        await everybody.wait()

    async def in_python(word: str) -> None:
        host = Host()
        async with host.open(runner_as, hub, shelf) as client:
            listed.append([tool.name for tool in (await client.list_tools()).tools])
            await join((await who(client))["token"])
            result = await client.call_tool("teller__tell", {"word": word}, progress_callback=host.progress)
            assert [part.text for part in result.content if isinstance(part, types.TextContent)] == [word]
            await host.until(f"progress {word}")
            assert not any(host.has_heard(other) for other in words if other != word)

    async def in_typescript(word: str) -> None:
        # As the client in Python adds variables.
        pipe, environ = subprocess.PIPE, {**get_default_environment(), **runner_as.environ}
        process = await trio.lowlevel.open_process(
            ["node", *node], stdin=pipe, stdout=pipe, env=environ, cwd="/"
        )
        assert process.stdin is not None and process.stdout is not None
        async with process.stdin, process.stdout, aclosing(_lines(process.stdout)) as lines:
            began = await anext(lines)
            listed.append(began["tools"])
            await join(began["token"])
            await process.stdin.send_all(f"{word}\n".encode())
            told = await anext(lines)
            # This client drops progress whose answer it reads at the same time.
            assert told["told"] == word and told["progress"] in ([], [word])
            await process.stdin.aclose()
            assert await process.wait() == 0

    words = [f"word-of-{number}" for number in range(6)]
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for number, word in enumerate(words):
                nursery.start_soon(in_python if number % 2 else in_typescript, word)
    assert len(set(tokens)) == 1
    assert all(each == listed[0] and "teller__who" in each for each in listed) and len(listed) == 6


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncGenerator[Any, None]:
    rest = b""
    async for more in stream:
        *whole, rest = (rest + more).split(b"\n")
        for line in whole:
            yield json.loads(line)


@pytest.mark.trio
async def test_a_hub_that_dies_loses_no_answer_and_comes_back(
    runner_as: Caller, plugin_dir: Path, hub: Hub
) -> None:
    shelf, host = put_teller(plugin_dir / "shelf"), Host()
    async with host.open(runner_as, hub, shelf) as client:
        await client.subscribe_resource("runner:teller/memo://kept")
        before, pid = await who(client), hub.pid()

        async def wait() -> None:
            with pytest.raises(MCPError, match="so nobody knows whether this was done"):
                await client.call_tool("teller__hold", {"word": "held"}, progress_callback=host.progress)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await host.until("progress held")
            await trio.to_thread.run_sync(hub.kill)
        after = await who(client)  # `initialize` was heard by the new hub
        assert hub.pid() != pid and after["token"] != before["token"]
        await host.until("ToolListChanged")
        await called(client, "teller__touch", {"word": "memo://kept"})
        await host.until("memo://kept")


@pytest.mark.both_callers
@pytest.mark.trio
async def test_the_entry_that_wrap_writes_starts_the_hub_of_this_user(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    shelf = put_teller(plugin_dir / "shelf")
    text = (shelf / "mcp.json").read_text()
    config = write_file(runner_as.home / ".cursor/mcp.json", text)
    runner_as.give(runner_as.home)
    wrapped = await trio.to_thread.run_sync(
        lambda: runner_as("wrap", "--gateway", "--shared", config, "--yes")
    )
    assert wrapped.returncode == 0, wrapped.stderr
    [entry] = json.loads(config.read_text())["mcpServers"].values()
    verb, shared, option, stored = entry["args"]
    assert (verb, shared, option) == ("gateway", "--shared", "--config")
    tokens = []
    hub = Hub(Path())
    hub.path = Path(output(runner_as, DEFAULT_HUB).strip())  # root's folder may have others' hubs
    place = runner_as.home / "run/runner/gateway" if runner_as.uid else Path("/run/runner-gateway")
    assert hub.path.parent == place and not hub.path.exists()
    try:
        for _ in range(2):
            async with on_stdio(runner_as, Path(stored), "--shared", mode="legacy") as client:
                tokens.append((await who(client))["token"])
        assert hub.path.exists() and place.stat().st_mode & 0o777 == 0o700
    finally:
        hub.end()
        for each in place.glob(f"{hub.path.name}.*"):
            each.unlink()
    assert len(set(tokens)) == 2  # a process ends with its last client
    undone = await trio.to_thread.run_sync(lambda: runner_as("wrap", "--gateway", config, "--undo", "--yes"))
    assert undone.returncode == 0 and config.read_text() == text, undone.stderr
    refused = await trio.to_thread.run_sync(lambda: runner_as("wrap", "--shared", config, "--yes"))
    assert refused.returncode == 2 and "--shared goes with --gateway" in refused.stderr


@pytest.mark.trio
async def test_what_is_not_used_ends_and_comes_back(runner_as: Caller, plugin_dir: Path, hub: Hub) -> None:
    shelf, host = put_teller(plugin_dir / "shelf"), Host()
    async with host.open(runner_as, hub, shelf, "--idle", "200ms") as client:
        before = await who(client)
        with suppress(ProcessLookupError):  # it has ended already
            ended = os.pidfd_open(pid_of(shelf / "teller.py"))
            try:
                await trio.lowlevel.wait_readable(ended)
            finally:
                os.close(ended)
        assert (await who(client))["token"] != before["token"]
    await trio.to_thread.run_sync(hub.wait)  # without a client
    assert not hub.path.exists()


def pid_of(program: Path) -> int:
    """Of the process that runs it, and not of those around it. Raises ProcessLookupError."""
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (each / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(program) in words and b"python" in words[0]:
                return int(each.name)
    raise ProcessLookupError
