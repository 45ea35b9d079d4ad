from __future__ import annotations

import mmap
import socket

import pytest

from sandbox.gate.calls import CALLS, WITH_BROKER, gate_filter
from sandbox.seccomp import syscalls
from sandbox.seccomp.bpf import ALLOW, KILL_PROCESS
from sandbox.seccomp.filter import AUDIT_ARCH
from tests.sandbox.seccomp.bpf_machine import Machine
from tests.tables import one_case

ARCHES = ("x86_64", "aarch64")
BY_ARGUMENT = {"socket", "socketpair", "setsockopt", "fcntl", "ioctl", "mmap", "mprotect"}


@pytest.mark.parametrize("arch", ARCHES)
def test_numbers_are_those_of_the_tables(arch: str) -> None:
    table = syscalls.load(arch)
    every = {**CALLS, **WITH_BROKER}
    assert {name: numbers[ARCHES.index(arch)] for name, numbers in every.items()} == {
        name: table.get(name) for name in every
    }


@pytest.mark.parametrize("broker", [False, True])
@pytest.mark.parametrize("arch", ARCHES)
def test_every_other_call_ends_the_gate(arch: str, broker: bool) -> None:
    machine, audit = Machine(gate_filter(arch, broker=broker)), AUDIT_ARCH[arch]
    table, known = syscalls.load(arch), {**CALLS, **(WITH_BROKER if broker else {})}
    verdicts = {name: machine.run(audit, number)[0] for name, number in table.items()}
    allowed = {name for name, verdict in verdicts.items() if verdict == ALLOW}
    assert allowed - BY_ARGUMENT == {name for name in known if name in table} - BY_ARGUMENT
    assert set(verdicts.values()) == {ALLOW, KILL_PROCESS}
    for number in (1000, 0x40000000, 0x40000001, 0xFFFFFFFF):
        assert machine.run(audit, number)[0] == KILL_PROCESS
    assert not machine.unreachable()


@pytest.mark.parametrize("arch", ARCHES)
def test_another_architecture_ends_the_gate(arch: str) -> None:
    machine = Machine(gate_filter(arch))
    for other in (0x40000003, 0x40000028, 0):
        assert machine.run(other, CALLS["read"][ARCHES.index(arch)] or 0)[0] == KILL_PROCESS


@one_case("arch", ARCHES)
@one_case(
    ("call", "arguments", "verdict"),
    [
        ("socket", (socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0), ALLOW),
        ("socket", (socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0), ALLOW),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 0), ALLOW),
        ("socket", (socket.AF_NETLINK, socket.SOCK_RAW, 12), KILL_PROCESS),
        ("socket", (socket.AF_INET, socket.SOCK_RAW, 1), KILL_PROCESS),
        ("socket", (socket.AF_UNIX, socket.SOCK_STREAM, 0), KILL_PROCESS),
        ("socket", (socket.AF_PACKET, socket.SOCK_RAW, 0), KILL_PROCESS),
        ("socket", (40, socket.SOCK_STREAM, 0), KILL_PROCESS),
        ("socket", (socket.AF_INET, socket.SOCK_STREAM, 262), KILL_PROCESS),  # MPTCP
        ("socket", (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_SCTP), KILL_PROCESS),
        ("socket", (socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDPLITE), KILL_PROCESS),
        ("socket", (socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP), KILL_PROCESS),
        ("setsockopt", (3, socket.SOL_SOCKET, socket.SO_LINGER), ALLOW),
        ("setsockopt", (3, socket.IPPROTO_TCP, socket.TCP_NODELAY), ALLOW),
        ("setsockopt", (3, socket.SOL_SOCKET, 26), KILL_PROCESS),  # SO_ATTACH_FILTER
        ("setsockopt", (3, socket.SOL_SOCKET, 50), KILL_PROCESS),  # SO_ATTACH_BPF
        ("setsockopt", (3, socket.SOL_SOCKET, socket.TCP_NODELAY), KILL_PROCESS),
        ("setsockopt", (3, socket.IPPROTO_TCP, socket.SO_LINGER), KILL_PROCESS),
        ("setsockopt", (3, socket.IPPROTO_TCP, 31), KILL_PROCESS),  # TCP_ULP
        ("setsockopt", (3, socket.IPPROTO_IP, socket.SO_LINGER), KILL_PROCESS),
        ("ioctl", (3, 0x5421), ALLOW),
        ("fcntl", (3, 1031), ALLOW),
        ("fcntl", (3, 0), KILL_PROCESS),  # F_DUPFD
        ("fcntl", (3, 8), KILL_PROCESS),  # F_SETOWN
        ("ioctl", (3, 0x5412), KILL_PROCESS),
        ("mmap", (0, 4096, mmap.PROT_READ | mmap.PROT_WRITE), ALLOW),
        ("mmap", (0, 4096, mmap.PROT_READ | mmap.PROT_EXEC), KILL_PROCESS),
        ("mmap", (0, 4096, mmap.PROT_READ, 0x40022), KILL_PROCESS),  # MAP_HUGETLB
        ("mmap", (0, 4096, mmap.PROT_READ, 0x20022), ALLOW),
        ("mprotect", (0, 4096, mmap.PROT_EXEC), KILL_PROCESS),
        ("mprotect", (0, 4096, mmap.PROT_READ), ALLOW),
    ],
)
def test_arguments_are_looked_at(arch: str, call: str, arguments: tuple[int, ...], verdict: int) -> None:
    number = CALLS[call][ARCHES.index(arch)]
    assert number is not None
    assert Machine(gate_filter(arch)).run(AUDIT_ARCH[arch], number, *arguments)[0] == verdict
