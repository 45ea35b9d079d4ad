"""A port of this machine's own loopback: reached by its one word, under a policy that opens it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Caller

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

Write = Callable[..., Path]

# Tries each address in argv, and prints what came of it: the server's line, or the error's name.
TRY = """
import errno, json, socket, sys
def tried(host, port):
    try:
        with socket.create_connection((host, port), 20) as line:
            return line.makefile().readline().strip() or "closed"
    except socket.gaierror:
        return "unknown"
    except OSError as error:
        return errno.errorcode.get(error.errno, "timeout")
print(json.dumps([tried(host, port) for host, port in json.loads(sys.argv[1])]))
"""
NOT_REACHED = {
    "ECONNREFUSED",
    "ECONNRESET",
    "ENETUNREACH",
    "EHOSTUNREACH",
    "EADDRNOTAVAIL",
    "unknown",
    "closed",
}


@contextlib.contextmanager
def standing_in(word: str, address: str = "127.0.0.1") -> Iterator[int]:
    """A database of this machine, which sends its word to each client that connects. Yields its port."""

    class Line(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(f"{word}\n".encode())

    with socketserver.ThreadingTCPServer((address, 0), Line) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()


class Machine:
    def __init__(self, caller: Caller, folder: Path, write_file: Write) -> None:
        self.caller, self._folder, self._write = caller, folder, write_file
        self.file = folder / "mcp.json"

    def policy(self, opened: str) -> Path:
        text = (ROOT / "policies/default.toml").read_text()
        changed = text.replace("loopback = []", opened)
        assert text != changed or opened == "loopback = []"
        return self._write(self._folder / "operator" / "policy.toml", changed)

    def configure(self, targets: list[tuple[str, int]], **entry: Any) -> None:
        words = ["-I", "-c", TRY, json.dumps(targets)]
        server = {"command": "/usr/bin/python3", "args": words, **entry}
        self._write(self.file, json.dumps({"mcpServers": {"redis": server}}))

    def tried(self, policy: Path) -> list[str]:
        done = self.caller("exec", "--policy", policy, self.file)
        assert done.returncode == 0, done.stderr
        found: list[str] = json.loads(done.stdout)
        return found


@pytest.fixture
def machine(account_as: Caller, plugin_dir: Path, write_file: Write) -> Machine:
    return Machine(account_as, plugin_dir, write_file)


def test_a_port_of_this_machine_needs_its_word_and_the_policy(machine: Machine) -> None:
    with (
        standing_in("opened") as port,
        standing_in("other") as other,
        standing_in("ours", "127.0.0.2") as own,
        socket.socket() as idle,
    ):
        idle.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets the port
        stopped = idle.getsockname()[1]
        for at in (port, other):  # the control: without a cage both are reached
            with socket.create_connection(("127.0.0.1", at), 20) as line:
                assert line.recv(6) in (b"opened", b"other\n")
        opened = [("localhost", port), ("127.0.0.1", port), ("::1", port)]
        host_name = socket.gethostname()
        closed = [
            *(("localhost", other), ("127.0.0.1", other), ("127.0.0.2", own), ("127.0.0.2", port)),
            *(
                (host_name, port),
                ("localhost.localdomain", port),
                ("db.localhost", port),
                (_own_address(), port),
            ),
        ]
        targets = [*opened, ("localhost", stopped), *closed]
        machine.configure(targets)
        yes = ("allow", "--yes", machine.file, "--net")

        # Without the policy's word nothing is recorded, and the line to write is named.
        without, with_it = machine.policy("loopback = []"), None
        refused = machine.caller(*yes, f"localhost:{port}", "--policy", without)
        assert refused.returncode == 21 and "nothing is recorded" in refused.stderr
        assert f"write loopback = [{port}] under [network] in {without}" in refused.stderr
        assert set(machine.tried(without)) <= NOT_REACHED

        # People are told of the port that this machine serves, once, and of none besides.
        told = machine.caller("exec", "--policy", without, machine.file).stderr.splitlines()
        lines = [line for line in told if "asked for localhost:" in line]
        assert len(lines) == 2 and f"the plugin asked for localhost:{port}, which is its own" in lines[0], (
            told
        )
        assert lines[0].endswith(f"and then: runner allow {machine.file} --net localhost:{port}")
        assert f"localhost:{other}" in lines[1]

        # With it, and without a person's: nothing. A manifest that asks has no say.
        with_it = machine.policy(f"loopback = [{port}, {stopped}]")
        assert set(machine.tried(with_it)) <= NOT_REACHED
        for word in (f"127.0.0.1:{port}", f"[::1]:{port}", f"db.localhost:{port}"):
            refused = machine.caller(*yes, word, "--policy", with_it)
            assert refused.returncode == 21 and f"--net localhost:{port}" in refused.stderr, word
        machine.configure(targets, **{"x-sandbox": {"network": [f"localhost:{port}"]}})
        asked = machine.caller("exec", "--policy", with_it, machine.file)
        assert asked.returncode == 126 and "to allow it: runner allow" in asked.stderr, asked.stderr
        machine.configure(targets)

        # With both: this port, and nothing beside it.
        both = (f"localhost:{port}", "--net", f"localhost:{stopped}")
        assert machine.caller(*yes, *both, "--policy", with_it).returncode == 0
        done = machine.caller("exec", "--policy", with_it, machine.file)
        found, rest = json.loads(done.stdout)[: len(opened)], json.loads(done.stdout)[len(opened) :]
        assert found == ["opened"] * len(opened), done.stderr
        assert rest[0] == "ECONNRESET" and set(rest) <= NOT_REACHED, rest
        assert f"localhost:{stopped} was allowed and not reached" in done.stderr
        shown = machine.caller("explain", "--network", "--policy", with_it, machine.file).stdout
        assert f"allowed by your approval, within loopback = [{port}, {stopped}]" in shown

        # The policy takes its word back: the launch says so, and reaches nothing.
        back = machine.caller("exec", "--policy", machine.policy("loopback = []"), machine.file)
        assert back.returncode == 126 and "network_loopback" in back.stderr


def test_a_wildcard_is_not_its_word(machine: Machine) -> None:
    with standing_in("opened") as port:
        policy = machine.policy(f"loopback = [{port}]")
        text = policy.read_text().replace('ceiling = "none"\nhosts = []', 'ceiling = "open"\nhosts = ["*:*"]')
        policy.write_text(text)
        machine.configure(
            [("localhost", port), ("127.0.0.1", port)], **{"x-sandbox": {"network": [f"*.localhost:{port}"]}}
        )
        assert set(machine.tried(policy)) <= NOT_REACHED
        machine.configure([("localhost", port), ("127.0.0.1", port)])
        done = machine.caller(
            *(
                "run",
                "--policy",
                policy,
                "--net",
                f"localhost:{port}",
                "--",
                "/usr/bin/python3",
                "-I",
                "-c",
                TRY,
            ),
            json.dumps([("localhost", port)]),
        )
        assert done.stdout == '["opened"]\n', done.stderr


# The server of an entry: connects to the database of its URL, and prints what that says.
SERVER = """#!/usr/bin/python3 -I
import socket, sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[-1])
print(socket.create_connection((url.hostname, url.port), 20).makefile().readline().strip())
"""


@pytest.mark.needs("root")
def test_the_page_about_databases(account_user: Caller, plugin_dir: Path, write_file: Write) -> None:
    """The entries, the policy's line and the commands of docs/mcp.md, with fakes of both.
    /etc/runner/policy.toml is in a mount namespace of the test's own."""
    page = (ROOT / "docs/mcp.md").read_text().partition("\n## Databases on this machine\n")[2]
    blocks = dict(re.findall(r"^```(json|toml|sh)\n(.*?)^```$", page.partition("\n## ")[0], re.M | re.S))
    with standing_in("redis") as redis, standing_in("postgres") as postgres:
        ports = {"6379": str(redis), "5432": str(postgres)}
        json_block, line, commands = (
            re.sub("6379|5432", lambda port: ports[port[0]], blocks[kind]) for kind in ("json", "toml", "sh")
        )
        program = write_file(account_user.home / "bin/server", SERVER, 0o755)
        entries = json.loads(json_block)
        for entry in entries.values():
            entry |= {"command": str(program), "args": entry["args"][2:]}
        file = write_file(account_user.home / ".cursor/mcp.json", json.dumps({"mcpServers": entries}))
        account_user.give(account_user.home)
        over = write_file(plugin_dir / "etc/runner/policy.toml", (ROOT / "policies/default.toml").read_text())
        show = 'mount -t overlay -o "lowerdir=$0:/etc" overlay /etc && exec "$@"'
        alone = ("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", show)
        caller = dataclasses.replace(
            account_user, prefix=(*alone, str(plugin_dir / "etc"), *account_user.prefix)
        )
        wrapped = caller("wrap", file, "--yes")
        assert wrapped.returncode == 0, wrapped.stdout + wrapped.stderr

        def allow() -> subprocess.CompletedProcess[str]:
            words = " ".join(f"'{word}'" for word in account_user.command()[len(account_user.prefix) :])
            script = f'runner() {{ {words} "$@" --yes; }}\n{commands}'
            argv = [*caller.prefix, "/bin/bash", "-ec", script]
            return subprocess.run(argv, env=caller.environ, capture_output=True, text=True, timeout=120)

        def started() -> list[str]:
            found = []
            for entry in json.loads(file.read_text())["mcpServers"].values():
                argv = [*caller.prefix, entry["command"], *entry["args"]]
                environ = {**caller.environ, **entry.get("env", {})}
                done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120)
                found.append(done.stdout.strip() or done.stderr)
            return found

        refused = allow()
        assert refused.returncode == 21, refused.stdout + refused.stderr
        assert f"write loopback = [{redis}] under [network] in /etc/runner/policy.toml" in refused.stderr
        assert not {"redis", "postgres"}.intersection(started())
        over.write_text(over.read_text().replace("loopback = []\n", line))
        allowed = allow()
        assert allowed.returncode == 0, allowed.stdout + allowed.stderr
        assert started() == ["redis", "postgres"]


def _own_address() -> str:
    """An address of this machine that is not loopback, or one of nobody's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "192.0.2.1"
