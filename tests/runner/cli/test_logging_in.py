"""--ssh-key and --ssh-host: what people write, and what they are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from runner.outcome import schema
from sandbox.broker.agent import filter as filters
from sandbox.broker.agent.outside import SIGNED
from tests.conftest import ROOT, Caller
from tests.sandbox.broker.agent.machine import SshMachine, SshServer, command, ssh_machine

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.needs("ssh")]

ABSENT = f"SHA256:{'a' * 43}"
Write = Callable[..., Path]


@pytest.fixture
def machine(runner_as: Caller) -> Iterator[SshMachine]:
    with ssh_machine(runner_as) as made:
        yield made


@pytest.fixture
def server(machine: SshMachine) -> SshServer:
    made = machine.serve("server")
    machine.know(made.line)
    return made


def policy(machine: SshMachine, server: SshServer) -> tuple[str, ...]:
    """Servers of tests are on this machine, which a policy has to allow."""
    text = (ROOT / "policies/default.toml").read_text()
    path = machine.folder / "policy.toml"
    path.write_text(text.replace("\nloopback = []", f"\nloopback = [{server.port}]"))
    return "--policy", str(path)


def options(key: str, server: SshServer) -> tuple[str, ...]:
    return "--ssh-key", key, "--ssh-host", f"localhost:{server.port}"


def run(machine: SshMachine, server: SshServer, *words: str, **more: Any) -> CompletedProcess[str]:
    own = {**machine.caller.environ, **machine.environ}
    return machine.caller("run", *policy(machine, server), *words, env=own, **more)


def test_a_command_logs_in(machine: SshMachine, server: SshServer) -> None:
    key = machine.add_key("own")
    server.authorized.write_text(machine.public("own"))
    report = machine.caller.home / "report.json"
    script = f"ssh -o BatchMode=yes -p {server.port} git@localhost echo in; ssh-add -D"
    words = (*options(key, server), "--report", str(report), "--events", "2", "--", "/bin/sh", "-c", script)
    done = run(machine, server, *words)
    assert done.stdout == "in\n", (done, server.log.read_text())
    told = json.loads(report.read_text())
    assert [*Draft202012Validator(schema()).iter_errors(told)] == []
    signed = {"name": "localhost", "verdict": "allowed", "rule": key, "reason": SIGNED, "times": 1}
    refused = {"name": "", "verdict": "refused", "rule": "", "reason": filters.UNKNOWN, "times": 1}
    # For each version of the protocol ssh-add makes one request.
    assert told["network"]["ssh"] == [signed, refused, {**refused, "times": 2}]
    assert told["network"]["totals"]["ssh"] == {"allowed": 1, "refused": 2}
    assert done.stderr.count('"kind":"ssh"') + done.stderr.count('"kind": "ssh"') == 3


def test_a_refusal_is_told(machine: SshMachine, server: SshServer) -> None:
    key = machine.add_key("own")
    done = run(machine, server, *options(key, server), "--", "/bin/sh", "-c", "ssh-add -D; ssh-add -D")
    assert done.stderr.count(f"the plugin's ssh agent {filters.UNKNOWN}") == 1


def test_the_key_is_nowhere(machine: SshMachine, server: SshServer) -> None:
    """Not the private key, nor the path of the person's agent."""
    key = machine.add_key("own")
    script = "cat /proc/*/environ /proc/*/cmdline /proc/*/mountinfo 2>/dev/null; find / -type s 2>/dev/null"
    done = run(machine, server, *options(key, server), "--", "/bin/sh", "-c", script)
    assert "/.ssh-agent/socket" in done.stdout
    assert str(machine.socket) not in done.stdout and "PRIVATE KEY" not in done.stdout


def test_without_the_options_there_is_no_agent(machine: SshMachine, server: SshServer) -> None:
    machine.add_key("own")
    done = run(machine, server, "--", "/bin/sh", "-c", "echo agent=$SSH_AUTH_SOCK; ls -d /.ssh-agent")
    assert done.stdout == "agent=\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ssh-key", ABSENT), "--ssh-host: it is missing"),
        (("--ssh-host", "git.example.com"), "--ssh-key: it is missing"),
        (("--ssh-key", "MD5:00", "--ssh-host", "git.example.com"), "is no fingerprint of a key"),
        (("--ssh-key", ABSENT[:-1], "--ssh-host", "git.example.com"), "is no fingerprint of a key"),
        (("--ssh-key", ABSENT, "--ssh-host", "*.example.com"), "stands for several hosts"),
        (("--ssh-key", ABSENT, "--ssh-host", "*"), "stands for several hosts"),
        (("--ssh-key", ABSENT, "--ssh-host", "a.example.com:22,23"), "has several ports"),
        (("--ssh-key", ABSENT, "--ssh-host", "git@a.example.com"), "has an account in front"),
        (("--ssh-key", ABSENT, "--ssh-host", "GET a.example.com/x"), "stands for several hosts"),
    ],
)
def test_wrong_words(runner_as: Caller, words: tuple[str, ...], said: str) -> None:
    done = runner_as("run", *words, "--", "/bin/true")
    assert done.returncode == 2 and said in done.stderr


def test_what_is_missing_is_said(machine: SshMachine, server: SshServer) -> None:
    words = (*options(ABSENT, server), "--", "/bin/true")
    absent = run(machine, server, *words)
    assert absent.returncode and f"your ssh agent has no key {ABSENT}" in absent.stderr
    machine.agent.kill()
    machine.agent.wait()
    dead = run(machine, server, *words)
    assert dead.returncode and "your ssh agent does not answer" in dead.stderr
    machine.know("")
    unknown = run(machine, server, *words)
    assert unknown.returncode and "known_hosts has no key of [localhost]" in unknown.stderr


def test_explain_says_by_whose_word(machine: SshMachine, server: SshServer) -> None:
    key = machine.add_key("own")
    words = ("--network", *policy(machine, server), *options(key, server), "--", "/bin/true")
    said = machine.caller("explain", *words, env={**machine.caller.environ, **machine.environ}).stdout
    lines = [line.strip() for line in said.splitlines()]
    assert f"it logs in at localhost:{server.port}, by the command line," in lines, said
    assert f"with {key} of your ssh agent" in lines


def test_an_entry_of_a_configuration(machine: SshMachine, server: SshServer, write_file: Write) -> None:
    """x-sandbox asks, and a person allows it; without that nothing starts."""
    key = machine.add_key("own")
    server.authorized.write_text(machine.public("own"))
    host = f"localhost:{server.port}"
    asks = {"network": [host], "ssh-keys": [key], "ssh-hosts": [host]}
    words = ["-c", f"ssh -o BatchMode=yes -p {server.port} git@localhost echo in"]
    entry = {"command": "/bin/sh", "args": words, "x-sandbox": asks}
    file = write_file(machine.folder / "mcp.json", json.dumps({"mcpServers": {"git": entry}}))
    own = {**machine.caller.environ, **machine.environ}
    rules = policy(machine, server)
    first = machine.caller("exec", *rules, file, env=own)
    assert first.returncode == 126 and "log in with your keys only if you allow it" in first.stderr
    allowed = machine.caller("allow", *rules, "--yes", file, env=own)
    assert allowed.returncode == 0, allowed
    assert machine.caller("exec", *rules, file, env=own).stdout == "in\n"
    command("ssh-add", "-D", SSH_AUTH_SOCK=str(machine.socket))
    assert "your ssh agent has no key" in machine.caller("exec", *rules, file, env=own).stderr
    machine.know("")  # also for a launch whose plan is stored
    assert "known_hosts has no key" in machine.caller("exec", *rules, file, env=own).stderr


@pytest.mark.needs("root")
def test_an_entry_that_a_host_starts(machine: SshMachine, server: SshServer, write_file: Write) -> None:
    """The runner has dropped the host's variables by then, but for the place of the agent."""
    key = machine.add_key("own")
    machine.know(server.line.replace(f"[localhost]:{server.port}", "git.example.com"))
    words = ["-c", 'echo "$SSH_AUTH_SOCK"; ssh-add -l']
    file = write_file(
        machine.folder / "mcp.json",
        json.dumps({"mcpServers": {"git": {"command": "/bin/sh", "args": words}}}),
    )
    # known_hosts is that of the account's home, which no variable names.
    account = f"tester:x:{machine.caller.uid}:{machine.caller.uid}::{machine.caller.home}:/bin/sh\n"
    passwd = write_file(machine.folder / "passwd", account)
    script = 'mount --bind "$0" /etc/passwd && exec "$@"'
    alone = ("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script, str(passwd))
    caller = replace(machine.caller, prefix=(*alone, *machine.caller.prefix))
    own = {**caller.environ, **machine.environ}
    machine.caller.give(machine.folder)
    allowing = ("allow", "--yes", "--server", "git", "--ssh-key", key, "--ssh-host", "git.example.com", file)
    for done in (caller("wrap", "--yes", file, env=own), caller(*allowing, env=own)):
        assert done.returncode == 0, done
    args = json.loads(file.read_text())["mcpServers"]["git"]["args"]
    for _ in range(2):  # also from a stored plan
        started = caller(*args, env=own)
        assert started.stdout.startswith("/.ssh-agent/socket\n") and key in started.stdout, started
    none = caller(*args, env={**own, "SSH_AUTH_SOCK": ""})
    assert "you have no ssh agent" in none.stderr
