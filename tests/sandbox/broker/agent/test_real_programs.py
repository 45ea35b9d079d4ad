"""git, ssh and ssh-add in a cage, with a person's real agent outside and real servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox import cages
from tests.sandbox.broker.agent.machine import SshMachine, SshServer, make_repository, ssh_machine

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.both_callers,
    pytest.mark.needs("ssh"),
]
cage = cages.cage


@pytest.fixture
def machine(runner_as: Caller) -> Iterator[SshMachine]:
    with ssh_machine(runner_as) as made:
        yield made


def caged_with_agent(given: dict[str, Any]) -> dict[str, Any]:
    """Launch with an ssh agent. Returns the exit code, the output, and what the agent told."""
    import os
    from contextlib import contextmanager

    said = os.memfd_create("said")
    saved = os.dup(1), os.dup(2)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        with contextmanager(cage)(given) as cell:
            end = cell.wait()
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
    os.lseek(said, 0, os.SEEK_SET)
    with open(said, encoding="utf-8", errors="surrogateescape") as file:
        output = file.read()
    log = cell.agent.log
    return {
        "code": end.code,
        "output": output,
        "lines": [[line.verdict, line.name, line.rule, line.reason, line.times] for line in log.lines],
        "totals": {verdict: count for (_, verdict), count in log.totals.items()},
        "fault": log.fault,
    }


def run(
    machine: SshMachine,
    script: str,
    keys: Sequence[str],
    hosts: Sequence[SshServer],
    also: Sequence[SshServer] = (),
) -> dict[str, Any]:
    """A shell script in a cage with an ssh agent. `also`: servers that it may reach, without logging in."""
    asked = cages.request("/bin/sh", "-c", script)
    names = [f"localhost:{each.port}" for each in hosts]
    order = cages.order(
        asked,
        network="allowlist",
        hosts=[*names, *(f"localhost:{each.port}" for each in also)],
        ssh=[*keys, *names],
    )
    told: dict[str, Any] = elsewhere.run(
        machine.caller, caged_with_agent, order, using=(cage,), env=machine.environ
    )
    return told


def test_git_clones_over_ssh(machine: SshMachine) -> None:
    key, server = machine.add_key("own"), machine.serve("server")
    machine.add_key("other")
    server.authorized.write_text(machine.public("own") + machine.public("other"))
    machine.know(server.line)
    repository = make_repository(machine.folder)
    url = f"ssh://git@localhost:{server.port}{repository}"
    told = run(machine, f"cd /tmp && git clone -q {url} copy && cat copy/file && ssh-add -l", [key], [server])
    assert (told["code"], told["output"]) == (0, f"from the repository\n256 {key} {key} (ED25519)\n"), told
    assert told["lines"] == [["allowed", "localhost", key, "signed a log-in", 1]]
    assert told["totals"] == {"allowed": 1}
