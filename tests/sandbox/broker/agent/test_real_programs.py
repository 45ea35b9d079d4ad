"""git, ssh and ssh-add in a cage, with a person's real agent outside and real servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sandbox.broker.agent import filter as filters
from sandbox.broker.agent import outside
from sandbox.plan.plan import PlanRefused
from sandbox.spec import Access
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox import cages
from tests.sandbox.broker.agent.machine import SshMachine, SshServer, command, make_repository, ssh_machine
from tests.tables import one_case

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
    import signal
    from contextlib import contextmanager

    said = os.memfd_create("said")
    saved = os.dup(1), os.dup(2)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        with contextmanager(cage)(given) as cell:
            if given.get("kills"):
                os.kill(cell.agent.pid, signal.SIGKILL)
            end = cell.wait()
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
    os.lseek(said, 0, os.SEEK_SET)
    with open(said, encoding="utf-8", errors="surrogateescape") as file:
        output = file.read()
    log = cell.audit
    return {
        "code": end.code,
        "output": output,
        "lines": [
            [line.verdict, line.name, line.rule, line.reason, line.times]
            for line in log.lines
            if line.kind == "ssh"
        ],
        "totals": {verdict: count for (kind, verdict), count in log.totals.items() if kind == "ssh"},
        "fault": log.fault,
    }


def run(
    machine: SshMachine,
    script: str,
    keys: Sequence[str],
    hosts: Sequence[SshServer],
    also: Sequence[SshServer] = (),
    paths: Sequence[tuple[str, Access]] = (),
    *,
    kills: bool = False,
) -> dict[str, Any]:
    """A shell script in a cage with an ssh agent. `also`: servers that it may reach, without logging in."""
    asked = cages.request("/bin/sh", "-c", script)
    names = [f"localhost:{each.port}" for each in hosts]
    order = cages.order(
        asked,
        paths=paths,
        kills=kills,
        network="allowlist",
        hosts=[*names, *(f"localhost:{each.port}" for each in also)],
        ssh=[*keys, *names],
    )
    told: dict[str, Any] = elsewhere.run(
        machine.caller, caged_with_agent, order, using=(cage,), env=machine.environ
    )
    return told


LOG_IN = "ssh -o BatchMode=yes -o StrictHostKeyChecking={strict} {options} -p {port} git@localhost {command}"


def ssh(server: SshServer, command: str, *options: str, strict: str = "yes") -> str:
    return LOG_IN.format(port=server.port, command=command, options=" ".join(options), strict=strict)


def refused(*reasons: str, host: str = "") -> list[list[object]]:
    return [["refused", host, "", reason, 1] for reason in reasons]


def test_git_clones_over_ssh(machine: SshMachine) -> None:
    key, server = machine.add_key("own"), machine.serve("server")
    machine.add_key("other")
    server.authorized.write_text(machine.public("own") + machine.public("other"))
    machine.know(server.line)
    repository = make_repository(machine.folder)
    url = f"ssh://git@localhost:{server.port}{repository}"
    told = run(machine, f"cd /tmp && git clone -q {url} copy && cat copy/file && ssh-add -l", [key], [server])
    assert (told["code"], told["output"]) == (0, f"from the repository\n256 {key} {key} (ED25519)\n"), told
    assert told["lines"] == [["allowed", "localhost", key, outside.SIGNED, 1]]
    assert told["totals"] == {"allowed": 1}


@one_case("kind", ["ed25519", "ecdsa", "rsa"])
def test_keys_of_every_kind(machine: SshMachine, kind: str) -> None:
    key, server = machine.add_key(kind, kind), machine.serve(f"server-{kind}", kind=kind)
    server.authorized.write_text(machine.public(kind))
    machine.know(server.line)
    told = run(machine, ssh(server, "echo in"), [key], [server])
    assert told["output"] == "in\n", (told, server.log.read_text())


@one_case("method", ["host-bound", "unbound"])
def test_a_log_in_with_and_without_the_hosts_key_in_it(machine: SshMachine, method: str) -> None:
    """Servers that are not OpenSSH's have only the second."""
    key, server = machine.add_key(method), machine.serve(f"server-{method}")
    server.authorized.write_text(machine.public(method))
    machine.know(server.line)
    script = ssh(server, "echo in", f"-v -o PubkeyAuthentication={method}")
    told = run(machine, script, [key], [server])
    assert "in" in told["output"].splitlines(), told


def test_a_key_that_the_agent_outside_restricts(machine: SshMachine) -> None:
    """It would have to know the session, and its one connection is for all of them."""
    server = machine.serve("server")
    machine.know(server.line)
    only_there = ("-H", str(machine.known_hosts), "-h", f"[localhost]:{server.port}")
    key = machine.add_key("own", "ed25519", *only_there)
    server.authorized.write_text(machine.public("own"))
    told = run(machine, ssh(server, "echo in"), [key], [server])
    assert "Permission denied (publickey" in told["output"]
    assert told["lines"] == [["failed", "localhost", key, outside.UNSIGNED, 1]]


def test_a_second_host(machine: SshMachine) -> None:
    """It is reached, known and would accept the key: only the agent refuses."""
    key, first, second = machine.add_key("own"), machine.serve("first"), machine.serve("second")
    for server in (first, second):
        server.authorized.write_text(machine.public("own"))
    machine.know(first.line, second.line)
    script = f"{ssh(first, 'echo first')}; {ssh(second, 'echo second', strict='no')}"
    told = run(machine, script, [key], [first], [second])
    assert told["output"].startswith("first\n") and "second" not in told["output"].splitlines()
    assert "Permission denied (publickey" in told["output"]
    assert told["lines"][1:] == refused(filters.UNKNOWN_HOST, filters.REFUSED_BEFORE)
    # Control: with both hosts given, the same logs in.
    assert run(machine, script, [key], [first, second])["output"] == "first\nsecond\n"


def test_a_forwarded_agent(machine: SshMachine) -> None:
    """A given host gets nothing from the agent of whoever logs in."""
    key, server = machine.add_key("own"), machine.serve("server")
    server.authorized.write_text(machine.public("own"))
    machine.know(server.line)
    # Its own known_hosts has itself: the connection that it makes would be to a given host.
    (server.folder / "known").write_text(server.line)
    known = f"-o UserKnownHostsFile={server.folder}/known"
    script = ssh(server, f"'ssh-add -L; {ssh(server, 'echo again', known)}'", "-A")
    told = run(machine, script, [key], [server])
    blob = machine.public("own").split()[1]
    assert "again" not in told["output"].splitlines() and blob not in told["output"]
    assert told["lines"][0] == ["allowed", "localhost", key, outside.SIGNED, 1]
    reasons = {line[3] for line in told["lines"][1:]}
    assert reasons == {filters.FORWARDED, filters.REFUSED_BEFORE}, told
    # Control: the person's own agent is of use there.
    control = command("sh", "-c", script.replace("-A", f"-A {known}", 1), **machine.environ)
    assert "again" in control.splitlines() and blob in control


def test_another_key(machine: SshMachine) -> None:
    """ssh is told to use the public part of another key that the person's agent has."""
    key, server = machine.add_key("own"), machine.serve("server")
    machine.add_key("other")
    server.authorized.write_text(machine.public("other"))
    machine.know(server.line)
    script = f"echo '{machine.public('other').strip()}' >/tmp/k.pub; cp /tmp/k.pub /tmp/k; " + ssh(
        server, "echo in", "-o IdentitiesOnly=yes -i /tmp/k.pub"
    )
    told = run(machine, script, [key], [server])
    assert "Permission denied (publickey" in told["output"]
    server.authorized.write_text(machine.public("own"))
    assert run(machine, ssh(server, "echo in"), [key], [server])["output"] == "in\n"


def test_what_changes_an_agent(machine: SshMachine) -> None:
    key, server = machine.add_key("own"), machine.serve("server")
    machine.know(server.line)
    acts = [
        "ssh-add -D",
        "ssh-add -d /tmp/k.pub",
        "ssh-add /tmp/new",
        "ssh-add -s /tmp/card.so",
        "ssh-add -e /tmp/card.so",
    ]
    script = "ssh-keygen -q -t ed25519 -N '' -f /tmp/new; cp /tmp/new.pub /tmp/k.pub; "
    script += "; ".join(f"{act} </dev/null && echo DONE" for act in acts)
    # As git signs a commit.
    script += (
        "; ssh-add -L >/tmp/own.pub; ssh-keygen -Y sign -n git -f /tmp/own.pub /tmp/new.pub && echo DONE"
    )
    told = run(machine, script, [key], [server])
    assert "DONE" not in told["output"]
    assert {line[3] for line in told["lines"]} == {filters.UNKNOWN, filters.UNBOUND}
    assert key in command("ssh-add", "-l", **machine.environ)


def test_no_other_way_to_the_agent(machine: SshMachine) -> None:
    """Of the folder of the socket nothing can be changed, and nothing else of it is there."""
    key, server = machine.add_key("own"), machine.serve("server")
    machine.know(server.line)
    script = (
        "cd $(dirname $SSH_AUTH_SOCK) && ls -A; for act in 'rm socket' 'mv socket s' 'touch x' 'chmod 777 .'"
        "; do $act 2>/dev/null && echo DID $act; done; ls -A; ssh-add -l"
    )
    assert run(machine, script, [key], [server])["output"] == f"socket\nsocket\n256 {key} {key} (ED25519)\n"


def test_a_cage_that_shows_the_hosts_own_files(machine: SshMachine) -> None:
    key, server = machine.add_key("own"), machine.serve("server")
    server.authorized.write_text(machine.public("own"))
    machine.know(server.line)
    shows: list[tuple[str, Access]] = [("/etc/ssh", "read")]
    told = run(machine, ssh(server, "echo in", strict="no"), [key], [server], paths=shows)
    assert "in" in told["output"].splitlines()


def test_the_cages_agent_is_killed(machine: SshMachine) -> None:
    """Nobody else serves its socket, and the report says so."""
    key, server = machine.add_key("own"), machine.serve("server")
    server.authorized.write_text(machine.public("own"))
    machine.know(server.line)
    script = f"while ssh-add -l >/dev/null 2>&1; do :; done; {ssh(server, 'echo in')}"
    told = run(machine, script, [key], [server], kills=True)
    assert "Permission denied (publickey" in told["output"]
    early = "ended too early: open connections were reset, and new ones refused"
    assert told["lines"] == [["failed", "", "", early, 1]]


def test_an_agent_that_ends_meanwhile(machine: SshMachine) -> None:
    key, server = machine.add_key("own"), machine.serve("server")
    machine.know(server.line)
    pipe = server.folder / "pipe"
    os.mkfifo(pipe)
    server.authorized.write_text(f'command="cat {pipe}" {machine.public("own")}')

    def end_agent() -> None:
        with pipe.open("w"):  # the first log-in reads it
            machine.agent.kill()
            machine.agent.wait()

    thread = threading.Thread(target=end_agent, daemon=True)
    thread.start()
    told = run(machine, f"{ssh(server, 'x')}; {ssh(server, 'x')}", [key], [server])
    thread.join()
    assert "Permission denied (publickey" in told["output"]
    lines = [(verdict, reason) for verdict, _, _, reason, _ in told["lines"]]
    assert lines == [("allowed", outside.SIGNED), ("failed", outside.GONE)]


@one_case(
    ("known", "rule", "word"),
    [
        ("", "ssh_host", "has no key"),
        ("@revoked {line}{line}", "ssh_host", "has no key"),
        ("@cert-authority {line}", "ssh_host", "only an authority"),
    ],
)
def test_a_host_that_is_not_known(machine: SshMachine, known: str, rule: str, word: str) -> None:
    line = (
        "[localhost]:2222 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl\n"
    )
    machine.know(known.format(line=line))
    asked = cages.request("/bin/true")
    given = cages.grant(network="allowlist")._replace(ssh=(FINGERPRINT, "localhost:2222"))
    with (
        pytest.raises(PlanRefused, match=word) as refused,
        cages.opened(asked, given, environ=machine.environ),
    ):
        pass
    assert [denial.rule for denial in refused.value.denials] == [rule]


FINGERPRINT = f"SHA256:{'a' * 43}"
