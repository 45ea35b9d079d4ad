from __future__ import annotations

import mmap
import socket

import pytest

from sandbox.broker.calls import BROKER_CALLS, FIONBIO, RECEIVING, SIOCOUTQ, broker_filter
from sandbox.seccomp import syscalls
from sandbox.seccomp.bpf import ALLOW, KILL_PROCESS
from sandbox.seccomp.filter import AUDIT_ARCH
from tests.sandbox.seccomp.bpf_machine import Machine
from tests.tables import one_case

ARCHES = ("x86_64", "aarch64")
BY_ARGUMENT = {"setsockopt", "ioctl", "mmap", "mprotect"}
NEVER = {
    *(
        "socket",
        "connect",
        "bind",
        "listen",
        "accept",
        "accept4",
        "open",
        "openat",
        "openat2",
        "execve",
        "execveat",
    ),
    *(
        "fork",
        "vfork",
        "clone",
        "clone3",
        "kill",
        "ptrace",
        "process_vm_readv",
        "sendmsg",
        "splice",
        "memfd_create",
    ),
    *("socketpair", "pipe2", "dup3", "prctl", "seccomp", "io_uring_setup", "unlinkat", "stat", "newfstatat"),
}


@pytest.mark.parametrize("arch", ARCHES)
def test_numbers_are_those_of_the_tables(arch: str) -> None:
    table = syscalls.load(arch)
    for name, numbers in RECEIVING.items():
        assert numbers[ARCHES.index(arch)] == table[name]


@pytest.mark.parametrize("arch", ARCHES)
def test_every_other_call_ends_the_broker(arch: str) -> None:
    machine, audit, table = Machine(broker_filter(arch)), AUDIT_ARCH[arch], syscalls.load(arch)
    verdicts = {name: machine.run(audit, number)[0] for name, number in table.items()}
    allowed = {name for name, verdict in verdicts.items() if verdict == ALLOW}
    assert allowed - BY_ARGUMENT == {name for name in BROKER_CALLS if name in table} - BY_ARGUMENT
    assert not allowed & NEVER
    assert set(verdicts.values()) == {ALLOW, KILL_PROCESS}
    for number in (1000, 0x40000000, 0x40000001, 0xFFFFFFFF):
        assert machine.run(audit, number)[0] == KILL_PROCESS
    for other in (0x40000003, 0x40000028, 0):
        assert machine.run(other, table["read"])[0] == KILL_PROCESS
    assert not machine.unreachable()


@one_case("arch", ARCHES)
@one_case(
    ("call", "arguments", "verdict"),
    [
        ("setsockopt", (3, socket.SOL_SOCKET, socket.SO_LINGER), ALLOW),
        ("setsockopt", (3, socket.IPPROTO_TCP, socket.TCP_NODELAY), ALLOW),
        ("setsockopt", (3, socket.SOL_SOCKET, 26), KILL_PROCESS),  # SO_ATTACH_FILTER
        ("setsockopt", (3, socket.IPPROTO_TCP, 31), KILL_PROCESS),  # TCP_ULP
        ("ioctl", (3, FIONBIO), ALLOW),
        ("ioctl", (3, SIOCOUTQ), ALLOW),
        ("ioctl", (3, 0x5412), KILL_PROCESS),  # TIOCSTI
        ("mmap", (0, 4096, mmap.PROT_READ | mmap.PROT_WRITE), ALLOW),
        ("mmap", (0, 4096, mmap.PROT_READ | mmap.PROT_EXEC), KILL_PROCESS),
        ("mmap", (0, 4096, mmap.PROT_READ, 0x40022), KILL_PROCESS),  # MAP_HUGETLB
        ("mprotect", (0, 4096, mmap.PROT_EXEC), KILL_PROCESS),
        ("mprotect", (0, 4096, mmap.PROT_READ), ALLOW),
    ],
)
def test_arguments_are_looked_at(arch: str, call: str, arguments: tuple[int, ...], verdict: int) -> None:
    number = BROKER_CALLS[call][ARCHES.index(arch)]
    assert number is not None
    assert Machine(broker_filter(arch)).run(AUDIT_ARCH[arch], number, *arguments)[0] == verdict
