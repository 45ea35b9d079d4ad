"""The thin client of a hub. The hub is the test: it says what a hub that lives, or dies, would say."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.gateway import via
from runner.gateway.via import (
    MOST_LINE,
    HubUnusable,
    ThinClient,
    default_hub,
    folder_fault,
    manager_words,
)
from tests.conftest import ROOT, Caller
from tests.runner.gateway.test_shared import hub_of, put_teller

pytestmark = [pytest.mark.fresh, pytest.mark.usefixtures("nothing_left")]
HELLO = {"id": 1, "method": "initialize", "params": {"capabilities": {}}}
READY = {"method": "notifications/initialized"}
LEVEL = {"id": 2, "method": "logging/setLevel", "params": {"level": "error"}}


class Served:
    """A connection of a client, as its hub has it."""

    def __init__(self, connection: socket.socket, at_once: bytes) -> None:
        """`at_once`: what it says with its first line."""
        self.connection = connection
        self._file = connection.makefile("rb")
        self.hello = self.read()
        connection.sendall(b'{"ready": true}\n' + at_once)

    def read(self) -> Any:
        return json.loads(self._file.readline())

    def say(self, *messages: dict[str, Any]) -> None:
        self.connection.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in messages))

    def answer(self, number: Any) -> None:
        # As the SDK writes it.
        raw = json.dumps({"jsonrpc": "2.0", "id": number, "result": {}}, separators=(",", ":"))
        self.connection.sendall(raw.encode() + b"\n")

    def die(self) -> None:
        self._file.close()
        self.connection.close()


class Desk:
    """A client with a host, which is the test too, and the place of its hub."""

    def __init__(self, listener: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.listener, self.process = listener, process

    def accept(self, at_once: bytes = b"") -> Served:
        return Served(self.listener.accept()[0], at_once)

    def say(self, *messages: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        for each in messages:
            self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **each}).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@contextmanager
def client_at(path: Path, *words: str, **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "runner", "gateway", "--via", str(path), "--config", "plugins", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "SECRET": "of this client"}
    popen = {"cwd": path.parent, "env": environ, **popen}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, **popen) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "hub.sock"))
        listener.listen()
        with client_at(tmp_path / "hub.sock") as process:
            yield Desk(listener, process)


def test_what_a_dead_hub_answered_arrives_and_the_rest_is_told(desk: Desk, tmp_path: Path) -> None:
    hub = desk.accept(b"#runner gateway: a word at once\n")
    assert hub.hello["words"] == ["--config", "plugins"] and hub.hello["folder"] == str(tmp_path)
    assert hub.hello["environ"]["SECRET"] == "of this client"
    desk.say(HELLO)
    assert hub.read()["id"] == 1
    hub.answer(1)
    assert desk.hear()["result"] == {}
    desk.say(READY, LEVEL)
    assert [hub.read()["method"] for _ in range(2)] == [READY["method"], LEVEL["method"]]
    hub.answer(2)
    assert desk.hear()["id"] == 2
    desk.say(*({"id": number, "method": "tools/call", "params": {}} for number in ("a", 7, 8, 9)))
    assert [hub.read()["id"] for _ in range(3)] == ["a", 7, 8]
    # A question, whose number the next hub will use too.
    hub.say({"jsonrpc": "2.0", "id": 0, "method": "elicitation/create", "params": {"message": "old?"}})
    asked = desk.hear()
    assert asked["params"] == {"message": "old?"} and asked["id"] != 0
    desk.process.send_signal(signal.SIGSTOP)
    hub.answer("a")
    hub.answer(8)
    hub.die()  # with a request that it has not read
    desk.process.send_signal(signal.SIGCONT)
    told = [desk.hear() for _ in range(5)]
    assert [(each["id"], each["result"]) for each in told[:2]] == [("a", {}), (8, {})]
    assert told[2]["method"] == "notifications/cancelled" and told[2]["params"]["requestId"] == asked["id"]
    assert [each["id"] for each in told[3:]] == [7, 9]
    assert all("nobody knows whether this was done" in each["error"]["message"] for each in told[3:])

    desk.say({"id": asked["id"], "result": {"action": "accept"}}, {"id": 10, "method": "tools/list"})
    hub = desk.accept()
    again = hub.read()
    assert (again["method"], again["params"]) == (HELLO["method"], HELLO["params"]) and again["id"] != 1
    hub.say({"jsonrpc": "2.0", "id": 0, "method": "elicitation/create", "params": {"message": "new?"}})
    fresh = desk.hear()
    assert fresh["id"] not in (0, asked["id"])
    desk.say({"id": asked["id"], "result": {"action": "accept"}})  # the late answer is for nobody
    hub.answer(again["id"])
    said = [hub.read() for _ in range(3)]
    assert [each["method"] for each in said] == [READY["method"], LEVEL["method"], "tools/list"]
    hub.answer(said[1]["id"])  # the host has had that answer
    hub.answer(10)
    changes = [desk.hear()["method"] for _ in range(3)]
    assert changes == [f"notifications/{what}/list_changed" for what in ("tools", "prompts", "resources")]
    assert desk.hear()["id"] == 10
    desk.say({"id": fresh["id"], "result": {"action": "decline"}})
    answered = hub.read()
    assert (answered["id"], answered["result"]) == (0, {"action": "decline"})
    hub.connection.sendall(b"#runner gateway: a word for people\n")
    assert desk.process.stderr is not None
    assert desk.process.stderr.readline().endswith(b"a word at once\n")
    assert desk.process.stderr.readline().endswith(b"for people\n")
    hub.die()


def test_large_messages_pass_and_one_that_is_too_large_ends_it(desk: Desk) -> None:
    hub = desk.accept()
    large = "x" * (3 << 20)
    desk.say({"id": 1, "method": "tools/call", "params": {"text": large}})
    assert hub.read()["params"]["text"] == large
    hub.say({"jsonrpc": "2.0", "id": 1, "result": {"text": large}})
    assert desk.hear()["result"]["text"] == large
    assert desk.process.stdin is not None and desk.process.stderr is not None
    with pytest.raises(BrokenPipeError):
        desk.process.stdin.writelines(itertools.repeat(b"x" * MOST_LINE))
    assert b"a line of more than" in desk.process.stderr.readline()
    assert not hub.connection.recv(1)
    hub.die()


def test_a_host_that_closes_gets_the_answers_that_wait(desk: Desk) -> None:
    hub = desk.accept()
    desk.say({"id": 1, "method": "tools/call"})
    assert desk.process.stdin is not None
    desk.process.stdin.close()
    assert hub.read()["id"] == 1 and not hub.connection.recv(1)
    hub.answer(1)
    hub.die()
    assert desk.hear()["id"] == 1 and desk.process.wait(60) == 0


@pytest.mark.needs("root")
def test_a_socket_of_somebody_else_is_refused(
    runner_as_user: Caller, plugin_dir: Path, desk: Desk, tmp_path: Path
) -> None:
    """And a client that is somebody else, or in a cage."""
    hub = desk.accept()
    assert hub.hello["environ"]
    hub.die()
    words = ("gateway", "--via", plugin_dir / "hub.sock", "--config", "/etc")
    os.chown(plugin_dir, runner_as_user.uid, runner_as_user.uid)
    plugin_dir.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(plugin_dir / "hub.sock"))
        (plugin_dir / "hub.sock").chmod(0o777)
        listener.listen()
        refused = runner_as_user(
            "gateway", "--via", plugin_dir / "hub.sock", "--config", "/etc", cwd=plugin_dir
        )
        assert refused.returncode == 1 and "the user 0 listens there, and not you" in refused.stderr
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1) == b""  # it has heard no variable
    plugin_dir.chmod(0o755)
    refused = runner_as_user(*words)
    assert refused.returncode == 1 and "has to be a folder that only you can use" in refused.stderr


@pytest.mark.launches
@pytest.mark.needs("root")
def test_a_hub_that_refuses_before_it_reads_is_heard(tmp_path: Path) -> None:
    """Taken for one that is not there, it would get a second hub beside it."""
    path, started = tmp_path / "hub.sock", tmp_path / "started"
    path.parent.chmod(0o700)
    # More than the socket holds: the client still writes its first line when the hub closes.
    client = ThinClient(str(path), (), ("/bin/touch", str(started)), {"MUCH": "x" * (8 << 20)})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def refuse() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1)
                connection.sendall(b'{"refused": "not you"}\n')

        with ThreadPoolExecutor(1) as pool:
            refusing = pool.submit(refuse)
            with pytest.raises(HubUnusable, match="not you"):
                client.connect()
            refusing.result()
    assert not started.exists()


def test_a_hub_serves_nobody_else_and_no_cage(runner_as_user: Caller, plugin_dir: Path) -> None:
    shelf = put_teller(plugin_dir / "shelf")
    with hub_of(runner_as_user, plugin_dir) as hub:
        started = runner_as_user("gateway", "--via", hub.path, "--config", shelf, input="")
        assert started.returncode == 0, started.stderr
        with socket.socket(socket.AF_UNIX) as stranger:  # root
            stranger.connect(str(hub.path))
            assert "this hub serves the user" in json.loads(stranger.makefile("rb").readline())["refused"]
        gateway = ("gateway", "--via", hub.path, "--config", shelf)
        become, words = runner_as_user.prefix, runner_as_user.command(*gateway)
        environ = dict(runner_as_user.environ)
        for caged in (
            [*become, "bwrap", "--dev-bind", "/", "/", *words[len(become) :]],
            ["unshare", "--net", *words],  # without a network, it would have the hub's
        ):
            done = subprocess.run(caged, env=environ, cwd="/", capture_output=True, input=b"")
            assert done.returncode == 1 and b"outside of any cage" in done.stderr, done.stderr
        other = runner_as_user(*gateway, env={"XDG_STATE_HOME": "/tmp"})
        assert other.returncode == 1 and "was started with another XDG_STATE_HOME" in other.stderr
        for path, told in (("/nowhere", "/nowhere"), ("/no\x1b\udcff", "/no\\x1b\\udcff")):
            wrong = runner_as_user("gateway", "--via", hub.path, "--config", path)
            assert wrong.returncode == 1 and f"--config {told}: there is no such file" in wrong.stderr
        lost = plugin_dir / "no\udcff/hub.sock"
        wrong = runner_as_user("gateway", "--via", lost, "--config", shelf)
        assert wrong.returncode == 1 and "no\\udcff" in wrong.stderr and "Traceback" not in wrong.stderr


def test_it_loads_next_to_nothing() -> None:
    """There is one of it for each session of a host."""
    code = "import sys; sys.path.append(sys.argv[1]); import runner.cli, runner.cli.serving.hub_entry"
    code += ", runner.gateway.via; print(*sys.modules)"
    words = [sys.executable, "-I", "-S", "-c", code, str(ROOT)]
    loaded = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    slow = {"trio", "pydantic", "mcp", "mcp_types", "anyio", "asyncio", "socket", "subprocess", "argparse"}
    assert (slow | {"runner.library", "runner.launch"}) & set(loaded) == set()
    assert "runner.gateway.via" in loaded


def test_each_set_of_places_has_a_hub_of_its_own(tmp_path: Path) -> None:
    environ = {"HOME": "/home/a", "XDG_RUNTIME_DIR": str(tmp_path)}
    first = default_hub(environ)
    assert first == default_hub({**environ, "PATH": "/bin", "TERM": "x", "XDG_SESSION_ID": "7"})
    others = [{"HOME": "/home/b"}, {"XDG_CONFIG_HOME": "/c"}, {"RUNNER_POLICY": "strict"}, {"TMPDIR": "/t"}]
    assert len({first, *(default_hub({**environ, **each}) for each in others)}) == 5
    tmp_path.chmod(0o700)
    assert not folder_fault(str(tmp_path / "hub.sock"))
    tmp_path.chmod(0o710)
    assert "chmod 700" in folder_fault(str(tmp_path / "hub.sock"))
    tmp_path.chmod(0o1777)  # as /tmp, which is root's
    assert folder_fault(str(tmp_path / "hub.sock")).endswith("name a place in one that only you can use")
    assert manager_words("/x", ("runner",), environ) == []  # no manager listens there


def test_a_manager_ends_when_it_has_started_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status in (0, 3):
        words = ["/bin/sh", "-c", f"exit {status}"]
        monkeypatch.setattr(via, "manager_words", lambda *_, words=words: words)
        starter = via._Starter(str(tmp_path / "hub.sock"), ["/bin/true"], {}, None)
        os.waitid(os.P_PID, starter._pid, os.WEXITED | os.WNOWAIT)
        # It is asked again and again, until the hub answers.
        assert starter.by_manager and [starter.has_failed() for _ in range(3)] == [status != 0] * 3
