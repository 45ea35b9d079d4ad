from __future__ import annotations

import pytest

from sandbox.broker.agent.calls import AGENT_CALLS, agent_filter
from sandbox.seccomp import syscalls
from sandbox.seccomp.bpf import ALLOW, KILL_PROCESS
from sandbox.seccomp.filter import AUDIT_ARCH
from tests.sandbox.seccomp.bpf_machine import Machine


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_every_other_call_ends_the_agent(arch: str) -> None:
    machine, table = Machine(agent_filter(arch)), syscalls.load(arch)
    verdicts = {name: machine.run(AUDIT_ARCH[arch], number)[0] for name, number in table.items()}
    allowed = {name for name, verdict in verdicts.items() if verdict == ALLOW}
    by_argument = {"ioctl", "mmap", "mprotect"}
    assert allowed - by_argument == {name for name in AGENT_CALLS if name in table} - by_argument
    assert set(verdicts.values()) == {ALLOW, KILL_PROCESS}
    never = {"socket", "socketpair", "connect", "bind", "listen", "sendmsg", "recvmsg", "openat", "execve"}
    assert not allowed & never
