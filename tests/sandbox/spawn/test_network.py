"""The network namespace between clone and exec: messages that are answered, and steps that are named."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from sandbox.spawn import network
from sandbox.spawn.network import HEADER, READY, send_request, wait_for_gate
from sandbox.spawn.order import NetworkOrder, NetworkRecipe
from tests.conftest import ROOT
from tests.tables import one_case

EMPTY = NetworkRecipe((), ())


def _message(number: int, flags: int = 5) -> bytes:
    return HEADER.pack(HEADER.size, 16, flags, number, 0)


def _answer(number: int, code: int) -> bytes:
    body = struct.pack("=i", code) + _message(number)
    return HEADER.pack(HEADER.size + len(body), 2, 0, number, 0) + body


class _Kernel:
    """Answers with what it was given."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.answers = list(answers)
        self.sent = b""

    def send(self, data: bytes) -> int:
        self.sent += data
        return len(data)

    def recv(self, _size: int, _flags: int) -> bytes:
        if not self.answers:
            raise BlockingIOError
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([_answer(1, 0), _answer(2, 0)], 0),
        ([_answer(2, 0) + _answer(1, 0)], 0),  # in one datagram, in any order
        ([_answer(1, 0)], errno.EPROTO),  # one is missing
        ([], errno.EPROTO),
        ([_answer(1, 0), _answer(2, -errno.EPERM)], errno.EPERM),
        ([_answer(7, -errno.EOPNOTSUPP)], errno.EOPNOTSUPP),  # about the batch, not about a message
        ([b"\0" * 16, _answer(1, 0), _answer(2, 0)], 0),  # a length of zero does not go round for ever
        ([_answer(1, 0)[:18]], errno.EPROTO),  # cut short
    ],
)
def test_each_message_has_to_be_answered(answers: list[bytes], error: int) -> None:
    kernel: Any = _Kernel(answers)
    messages = _message(1) + _message(9, flags=1) + _message(2)
    if error:
        with pytest.raises(OSError, match=rf"Errno {error}\]"):
            send_request(kernel, messages)
    else:
        send_request(kernel, messages)
    assert kernel.sent == messages


@pytest.mark.parametrize(
    ("said", "error"),
    [(READY, 0), (b"x", errno.ECONNREFUSED), (b"", errno.ECONNREFUSED), (None, errno.ETIMEDOUT)],
)
def test_the_gate_says_that_it_serves(said: bytes | None, error: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if said:
            theirs.send(said)
        elif said is not None:
            theirs.close()
        order = NetworkOrder(EMPTY, os.dup(ours.fileno()), "net:[1]", 0.0)
        if not error:
            wait_for_gate(order)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(order.channel)  # closed: nobody after us gets it
            return
        with pytest.raises(OSError, match=rf"Errno {error}\]"):
            wait_for_gate(order)
        os.close(order.channel)


def test_a_process_in_the_hosts_network_is_found_out() -> None:
    with pytest.raises(PermissionError):
        network.require_own_network(NetworkOrder(EMPTY, -1, network.outside_network()))
    network.require_own_network(NetworkOrder(EMPTY, -1, "net:[1]"))


# Made by a process of its own: the namespace stays for as long as the process does.
MAKER = """
import ctypes, json, os, socket, sys
from sandbox.network.egress import EgressPlan
from sandbox.network.recipe import make_recipe
from sandbox.network.sockets import receive_sockets
from sandbox.spawn import network
from sandbox.spawn.order import NetworkOrder
change = sys.argv[1]
recipe = make_recipe(EgressPlan(("example.com:53,443",)))
requests, sockets = recipe
if change == "broken":
    up, route, *_ = requests
    garbled = route.messages[:20] + b"\\xff" * 8 + route.messages[28:]
    requests = (up, route._replace(messages=garbled))
if change == "twice":
    sockets = (*sockets, [each for each in sockets if each.use == "listener"][-1])
ipv6 = change != "no ipv6"
if not ipv6:
    network._knows_ipv6 = lambda: False
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
told = {"before": len(os.listdir("/proc/self/fd"))}
libc = ctypes.PyDLL(None, use_errno=True)
if change == "unprivileged":
    os.setresuid(54321, 54321, 54321)
if change == "no raw sockets":  # all capabilities but CAP_NET_RAW
    held = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert libc.capget(header, held) == 0
    for number in (0, 1):  # effective, permitted
        held[number] &= ~(1 << 13) & 0xFFFFFFFF
    assert libc.capset(header, held) == 0
order = NetworkOrder(recipe._replace(requests=requests, sockets=sockets), ours.fileno(), "")
try:
    network.make_network(order, libc)
    told["after"] = len(os.listdir("/proc/self/fd"))
    found = receive_sockets(theirs.fileno())
    told["listeners"] = [list(socket.socket(fileno=fd).getsockname()[:2]) for fd in found.listeners]
    told["closed_ports"] = len(found.closed_ports)
    told["pingers"] = open("/proc/sys/net/ipv4/ping_group_range").read().split()
    told["ports"] = int(open("/proc/sys/net/ipv4/ip_unprivileged_port_start").read())
except network.NetworkFault as fault:
    told["fault"] = [fault.step, os.strerror(fault.errno)]
print(json.dumps(told))
"""


def _make(change: str) -> dict[str, Any]:
    argv = [sys.executable, "-c", MAKER, change]
    done = subprocess.run(argv, capture_output=True, timeout=120, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr.decode()
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.needs("root")
@pytest.mark.launches
def test_only_the_gate_keeps_the_sockets() -> None:
    told = _make("")
    assert told["listeners"] == [["0.0.0.0", 53], ["::", 53], ["0.0.0.0", 443], ["::", 443]]
    assert told["before"] == told["after"] and told["closed_ports"] == 1
    # No group may send echo requests, and low ports need a capability.
    assert (told["pingers"], told["ports"]) == (["1", "0"], 1024)


@pytest.mark.needs("root")
@pytest.mark.launches
def test_without_ipv6_there_is_ipv4_only() -> None:
    assert _make("no ipv6")["listeners"] == [["0.0.0.0", 53], ["0.0.0.0", 443]]


@pytest.mark.needs("root")
@pytest.mark.launches
def test_nothing_depends_on_the_raw_socket() -> None:
    """In some containers there is no CAP_NET_RAW."""
    told = _make("no raw sockets")
    assert told["closed_ports"] == 0 and len(told["listeners"]) == 4 and told["before"] == told["after"]


@pytest.mark.needs("root")
@pytest.mark.launches
@one_case(
    ("change", "step", "reason"),
    [
        ("broken", "lead IPv4 addresses to the gate", "Invalid argument"),
        ("twice", "listen for the plugin's connections", "Address already in use"),
        ("unprivileged", "make a network namespace", "Operation not permitted"),
    ],
)
def test_a_refused_step_is_named(change: str, step: str, reason: str) -> None:
    assert _make(change)["fault"] == [step, reason]
