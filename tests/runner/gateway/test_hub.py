"""Whom a hub serves, and that no client of it is in another's way."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from runner import __version__
from runner.gateway import via
from runner.gateway.confinement import is_confined, less_allowed, read_marks
from runner.gateway.hub import MOST_CLIENTS, HubLines, HubWriter, has_ended
from runner.gateway.via import manager_words
from tests.conftest import Caller
from tests.runner.gateway.test_shared import (
    DEFAULT_HUB,
    Host,
    Hub,
    hub,  # noqa: F401 -- a fixture
    output,
    put_teller,
    who,
)
from tests.tables import check_rows


def launches(test: Callable[..., Any]) -> Callable[..., Any]:
    for mark in (
        *(pytest.mark.launches, pytest.mark.fresh, pytest.mark.usefixtures("nothing_left")),
        pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),
    ):
        test = mark(test)
    return test


# --- who may do less ----------------------------------------------------------------------------------------

FREE = {
    "Umask": "0022",
    "Gid": "1000 1000 1000 1000",
    "Groups": "27 1000",
    "NoNewPrivs": "0",
    "Seccomp": "0",
    "Seccomp_filters": "0",
    "CapPrm": "0000000000000000",
    "CapBnd": "000001ffffffffff",
    "security label": "unconfined",
}
LESS: Mapping[str, tuple[dict[str, str], dict[str, str], str]] = {  # of the client, of the hub, what is told
    "the same": ({}, {}, ""),
    "no new privileges": ({"NoNewPrivs": "1"}, {}, "NoNewPrivs"),
    "both without": ({"NoNewPrivs": "1"}, {"NoNewPrivs": "1"}, ""),
    "a hub that may do less": ({}, {"NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "1"}, ""),
    "a filter": ({"Seccomp": "2", "Seccomp_filters": "1"}, {}, "Seccomp"),
    "one filter more": (
        {"Seccomp": "2", "Seccomp_filters": "2"},
        {"Seccomp": "2", "Seccomp_filters": "1"},
        "Seccomp_filters",
    ),
    "a group less": ({"Groups": "1000"}, {}, "Groups"),
    "a group more": ({"Groups": "4 27 1000"}, {}, ""),
    "another group of its own": ({"Gid": "27 27 27 27"}, {}, ""),
    "the hub's own group": ({}, {"Gid": "4 4 4 4"}, "Groups"),
    "a capability less": ({"CapBnd": "000001fffffffffe"}, {}, "CapBnd"),
    "capabilities more": ({"CapPrm": "0000000000000001"}, {}, ""),
    "root without one": ({"CapPrm": "0000000000000001"}, {"CapPrm": "0000000000000003"}, "CapPrm"),
    "files for others": ({"Umask": "0002"}, {}, "Umask"),
    "a profile": ({"security label": "snap.editor.editor (enforce)"}, {}, "security label"),
    "a profile that allows all": ({"security label": "editor (unconfined)"}, {}, ""),
    "a label": (
        {"security label": "u:r:container_t:s0"},
        {"security label": "u:r:unconfined_t:s0"},
        "security label",
    ),
}


def test_a_client_that_may_do_less_is_told_why() -> None:
    def check(name: str, row: tuple[dict[str, str], dict[str, str], str]) -> None:
        client, served, expected = row
        assert less_allowed({**FREE, **client}, {**FREE, **served}) == expected, name

    check_rows(LESS, check)
    assert not is_confined(FREE) and is_confined({**FREE, "NoNewPrivs": "1"})
    assert is_confined({**FREE, "security label": "snap.editor.editor (enforce)"})
    assert not is_confined({**FREE, "security label": "u:r:unconfined_t:s0"})
    assert set(FREE) >= set(read_marks("self")) >= {"Umask", "NoNewPrivs", "CapBnd", "Groups"}


def within(caller: Caller, *wrapper: str) -> Caller:
    """The same user, whose commands are started by this."""
    return dataclasses.replace(caller, prefix=(*caller.prefix, *wrapper))


WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "NoNewPrivs": ("setpriv", "--no-new-privs"),
    "Umask": ("sh", "-c", 'umask 077; exec "$@"', "sh"),
}


@launches
@pytest.mark.both_callers
def test_a_hub_does_for_nobody_what_that_may_not_do(
    runner_as: Caller,
    plugin_dir: Path,
    hub: Hub,  # noqa: F811
) -> None:
    words = ("gateway", "--via", hub.path, "--config", put_teller(plugin_dir / "shelf"))
    started = runner_as(*words, input="")
    assert started.returncode == 0, started.stderr  # the control
    places_of = {output(runner_as, DEFAULT_HUB)}
    for name, wrapper in WRAPPERS.items():
        less = within(runner_as, *wrapper)
        refused = less(*words, input="")
        assert refused.returncode == 1 and f"({name} in /proc/PID/status)" in refused.stderr, refused.stderr
        places_of.add(output(less, DEFAULT_HUB))
    assert len(places_of) == 3  # with --shared each has one of its own


# Connects, leaves the connection to a child, and ends when it is told.
PASSES_ON = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
if os.fork():
    sys.stdin.read(1)
else:
    connection.recv(1)
"""


def passing_on(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PASSES_ON, str(path)], stdin=subprocess.PIPE)


@pytest.mark.trio
async def test_a_connection_that_was_passed_on(tmp_path: Path) -> None:
    """The id of who connected may be another process's by now, which the hub would look at."""
    listener = trio.socket.socket(trio.socket.AF_UNIX)
    await listener.bind(str(tmp_path / "s"))
    listener.listen()
    with passing_on(tmp_path / "s") as process:
        connection, _ = await listener.accept()
        with connection:
            try:
                os.close(connection.getsockopt(socket.SOL_SOCKET, 77))
            except OSError:
                pytest.skip("needs Linux 6.5: SO_PEERPIDFD")
            assert not has_ended(connection)
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            assert has_ended(connection)
    listener.close()


def test_a_unit_gets_the_places_and_nothing_of_its_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd/private").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path == "/usr/bin/systemd-run")
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/home/a", "LD_PRELOAD": "/x.so", "TOKEN": "secret"}
    monkeypatch.setattr(via, "read_marks", lambda process: {**FREE, "Umask": "0077"})
    words = manager_words("/run/hub.sock", ("runner",), environ)
    assert words[0] == "/usr/bin/systemd-run" and "--property=UMask=0077" in words
    assert words[words.index("--") :] == ["--", "/usr/bin/env", "-i", "HOME=/home/a"]
    assert "--description=the hub of runner gateway" in words  # without it, the journal has the variables
    monkeypatch.setattr(via, "read_marks", lambda process: {**FREE, "NoNewPrivs": "1"})
    assert manager_words("/run/hub.sock", ("runner",), environ) == []


# --- in nobody's way ----------------------------------------------------------------------------------------


def hello_of(caller: Caller, folder: str, *words: str) -> bytes:
    said = {"version": __version__, "words": words, "environ": dict(caller.environ), "folder": folder}
    return json.dumps(said).encode() + b"\n"


def running(argv: list[str]) -> subprocess.Popen[bytes]:
    """A context at whose end its stdin ends."""
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"all\n"
    return process


# Says what it was started with, hangs up, and lives until the hub has opened its audit.
HANGS_UP = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.sendall(sys.stdin.buffer.read())
while not os.path.exists(sys.argv[2]):
    pass
"""


# Connections that say nothing, until stdin ends.
CONNECTIONS = """
import socket, sys
held = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for each in held:
    each.connect(sys.argv[1])
print("all", flush=True)
sys.stdin.read()
"""


@launches
def test_a_client_that_is_refused_leaves_nothing_and_takes_no_place(
    runner_as: Caller,
    plugin_dir: Path,
    hub: Hub,  # noqa: F811
) -> None:
    shelf, audit = put_teller(plugin_dir / "shelf"), plugin_dir / "hub/audit"
    words = ("gateway", "--via", hub.path, "--config", shelf)
    argv = [*runner_as.prefix, *runner_as.python, "-c", CONNECTIONS, str(hub.path)]
    assert runner_as(*words, input="").returncode == 0
    with running([*argv, str(MOST_CLIENTS)]):
        refused = runner_as(*words, input="")
        assert refused.returncode == 1 and "64 clients use this hub" in refused.stderr
    while runner_as(*words, input="").returncode:
        pass  # the hub notices that they have gone
    refused = runner_as(*words, "--audit", audit, "--policy", "nowhere", input="")
    told = "gateway: nowhere: policy_unknown: no policy is called 'nowhere'; there are "
    assert refused.returncode == 1 and told in refused.stderr and audit.exists()
    code = "import os; print([os.path.realpath(each.path) for each in os.scandir({!r})])"
    assert str(audit) not in output(runner_as, code.format(f"/proc/{hub.pid()}/fd"))
    # Nor does one that has gone before it was taken.
    audit.unlink()
    argv = [*runner_as.prefix, *runner_as.python, "-c", HANGS_UP, str(hub.path), str(audit)]
    hello = hello_of(runner_as, "/", "--config", str(shelf), "--audit", str(audit))
    subprocess.run(argv, env=dict(runner_as.environ), cwd="/", check=True, input=hello)
    looks = (output(runner_as, code.format(f"/proc/{hub.pid()}/fd")) for _ in range(100))
    assert any(str(audit) not in each for each in looks)  # one is enough, as a rule
    # What stands in the way of a hub is told.
    for ending in ("lock", "log"):
        hub.end()
        path = Path(f"{hub.path}.{ending}")
        path.unlink(missing_ok=True)
        path.symlink_to("/nowhere")
        refused = runner_as(*words, input="")
        told = f"no hub can be started: Too many levels of symbolic links: {path}"
        assert refused.returncode == 1 and told in refused.stderr, refused.stderr
        path.unlink()


@launches
@pytest.mark.trio
async def test_a_hub_without_descriptors_goes_on(
    runner_as: Caller,
    plugin_dir: Path,
    hub: Hub,  # noqa: F811
) -> None:
    shelf = put_teller(plugin_dir / "shelf")
    async with Host().open(runner_as, hub, shelf) as client:
        before = await who(client)
        pid, log = hub.pid(), trio.Path(f"{hub.path}.log")
        few = 20 + int(output(runner_as, f"import os; print(len(os.listdir('/proc/{pid}/fd')))"))
        limit = (*runner_as.prefix, "prlimit", "--pid", str(pid))
        await trio.run_process([*limit, f"--nofile={few}:"])
        argv = [*runner_as.prefix, *runner_as.python, "-c", CONNECTIONS, str(hub.path)]
        with running([*argv, "40"]):
            while "no client can be accepted: Too many open files" not in await log.read_text():
                pass
        await trio.run_process([*limit, "--nofile=4096:"])
        async with Host().open(runner_as, hub, shelf) as other:
            assert (await who(other))["token"] == (await who(client))["token"] == before["token"]
        assert hub.pid() == pid


@launches
@pytest.mark.trio
async def test_a_client_that_does_not_read_is_in_nobodys_way(
    runner_as: Caller,
    plugin_dir: Path,
    hub: Hub,  # noqa: F811
) -> None:
    shelf, word, count = put_teller(plugin_dir / "shelf"), "x" * (32 << 10), 100
    words = ("gateway", "--via", str(hub.path), "--config", str(shelf), "--list-wait", "100s")
    process = runner_as.start(*words)
    assert process.stdin is not None and process.stdout is not None
    with process:
        about = {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "a", "version": "1"},
        }
        say(process.stdin, {"id": 0, "method": "initialize", "params": about})
        assert json.loads(process.stdout.readline())["id"] == 0
        say(process.stdin, {"method": "notifications/initialized"})

        def send() -> None:
            for number in range(1, count + 1):
                params = {"name": "teller__tell", "arguments": {"word": word}}
                say(process.stdin, {"id": number, "method": "tools/call", "params": params})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, send)
            async with Host().open(runner_as, hub, shelf) as other:
                for _ in range(5):
                    assert (await who(other))["token"]
            answered = await trio.to_thread.run_sync(read_answers, process.stdout, count)
        assert answered == set(range(1, count + 1))
        await trio.to_thread.run_sync(process.communicate)
        assert process.returncode == 0


class RawClient:
    """Says what it likes, with the numbers that it likes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.heard: list[dict[str, Any]] = []
        about = {"protocolVersion": "2025-11-25", "capabilities": {"roots": {"listChanged": True}}}
        self.ask(1, "initialize", **about, clientInfo={"name": "raw", "version": "1"})
        self.until(lambda message: message.get("id") == 1)
        self.say({"method": "notifications/initialized"})

    def say(self, message: dict[str, Any]) -> None:
        say(self.process.stdin, message)

    def ask(self, number: int, method: str, **params: Any) -> None:
        self.say({"id": number, "method": method, "params": params})

    def call(self, number: int, tool: str, word: str = "") -> None:
        meta = {"progressToken": "same"}
        self.ask(number, "tools/call", name=f"teller__{tool}", arguments={"word": word}, _meta=meta)

    def until(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        assert self.process.stdout is not None
        while not self.heard or not is_it(self.heard[-1]):
            self.heard.append(json.loads(self.process.stdout.readline()))
        return self.heard[-1]

    def answer(self, number: int) -> str:
        found = self.until(lambda message: message.get("id") == number and "method" not in message)
        [part] = found["result"]["content"]
        text: str = part["text"]
        return text

    def progress(self, word: str) -> None:
        self.until(lambda message: message.get("params", {}).get("message") == word)


@launches
@pytest.mark.both_callers
def test_equal_numbers_and_tokens_of_two_clients(
    runner_as: Caller,
    plugin_dir: Path,
    hub: Hub,  # noqa: F811
) -> None:
    words = ("gateway", "--via", str(hub.path), "--config", str(put_teller(plugin_dir / "shelf")))
    with ExitStack() as stack:
        a, b, c = (
            RawClient(stack.enter_context(runner_as.start(*words, "--list-wait", "100s"))) for _ in "abc"
        )
        for each in (a, b, c):
            each.call(2, "who")
        [process] = {json.loads(each.answer(2))["token"] for each in (a, b, c)}
        for each, word in ((a, "alpha"), (b, "beta"), (c, "gamma")):
            each.call(7, "hold", word)
            each.progress(word)
        # Each numbers as the others do, and tries to end what is not its own.
        c.process.kill()
        b.say({"method": "notifications/cancelled", "params": {"requestId": 7}})
        b.say({"method": "notifications/progress", "params": {"progressToken": "same", "progress": 9}})
        b.say({"method": "notifications/roots/list_changed"})
        for number in (0, 7, "q-alpha", "runner-1"):
            b.say({"id": number, "result": {"content": [], "action": "accept"}})
        b.call(8, "release", "alpha")
        assert b.answer(8) == "alpha"
        assert a.answer(7) == "alpha"
        for last in itertools.count(9):
            b.call(last, "who")
            told = json.loads(b.answer(last))
            if told["heard"].count("notifications/cancelled") == 2:  # of b, and of c, which has gone
                break
        a.call(9, "who")
        assert told["token"] == json.loads(a.answer(9))["token"] == process  # it has outlived the client
        assert not [each for each in told["heard"] if "roots" in each or "progress" in each], told["heard"]
        for each, others in ((a, ("beta", "gamma")), (b, ("gamma",))):
            tellers = (2, *range(9, last + 1))
            said = json.dumps([message for message in each.heard if message.get("id") not in tellers])
            assert not [word for word in others if word in said], said
        beside = [message for message in b.heard if message.get("id") != 8]
        assert "alpha" not in json.dumps(beside)
        assert not [message for message in b.heard if message.get("id") == 7]  # it was given up
        for each in (a, b):
            each.process.communicate()


@launches
@pytest.mark.trio
async def test_whose_variables_decide(
    runner_as: Caller,
    plugin_dir: Path,
    hub: Hub,  # noqa: F811
) -> None:
    """Those of each client, and those of the hub, which the first one has started, mean nothing."""
    shelf = plugin_dir / "shelf"
    teller = put_teller(shelf) / "teller.py"
    rows: dict[str, dict[str, str]] = {}
    for name in ("one", "two"):
        folder = plugin_dir / name
        folder.mkdir()
        program = folder / "teller-tool"
        program.write_text(teller.read_text().replace("TOKEN = os.urandom(8).hex()", f'TOKEN = "{name}"'))
        for path in (folder, program):
            path.chmod(0o755)
        rows[name] = {
            "PATH": f"{folder}:/usr/bin:/bin",
            "NODE_OPTIONS": f"--require=/nowhere/{name}.js",
            "LD_LIBRARY_PATH": f"/nowhere/{name}",
            "SSH_AUTH_SOCK": f"/nowhere/{name}.sock",
            "SECRET": name,
            "TZ": f"Zone/{name}",
        }
    entry = {"command": "teller-tool", "x-sandbox": {"shared": True}}
    (shelf / "mcp.json").write_text(json.dumps({"mcpServers": {"teller": entry}}))
    found = {}
    async with AsyncExitStack() as stack:
        for name, environ in rows.items():
            caller = dataclasses.replace(runner_as, environ={**runner_as.environ, **environ})
            client = await stack.enter_async_context(Host().open(caller, hub, shelf))
            found[name] = await who(client)
    for name, environ in rows.items():
        had = found[name]["env"]
        assert found[name]["token"] == name and had["TZ"] == environ["TZ"]
        assert not {"NODE_OPTIONS", "LD_LIBRARY_PATH", "SSH_AUTH_SOCK", "SECRET", "PYTHONPATH"} & set(had)
        [other] = set(rows) - {name}
        assert not [value for value in had.values() if "nowhere" in value or f"/{other}" in value]


def say(stdin: Any, message: dict[str, Any]) -> None:
    stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    stdin.flush()


def read_answers(stdout: Any, count: int) -> set[int]:
    found: set[int] = set()
    while len(found) < count:
        message = json.loads(stdout.readline())
        if "method" not in message:
            assert "result" in message, message
            found.add(message["id"])
    return found


@pytest.mark.trio
async def test_of_a_client_that_does_not_read_nothing_more_is_taken(
    autojump_clock: trio.testing.MockClock,
) -> None:
    here, there = trio.testing.lockstep_stream_pair()  # what is sent waits until it is read
    writer = HubWriter(here)
    lines = HubLines(here, lambda text: None, writer)
    taken: list[str] = []

    async def take() -> None:
        async for line in lines:
            taken.append(line)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await there.send_all(b"1\n2\n")
        nursery.start_soon(writer.write, "an answer\n")
        await trio.sleep(0.1)  # by the test's clock
        await there.send_all(b"3\n")
        await trio.sleep(10)
        nursery.start_soon(there.send_all, b"4\n5\n")
        await trio.sleep(10)
        assert taken == ["1", "2", "3", "4"]  # it had asked for one more
        assert await there.receive_some(100) == b"an answer\n"
        await trio.sleep(1)
        assert taken == ["1", "2", "3", "4", "5"]
        nursery.cancel_scope.cancel()
