"""The gate's end of the socket to a broker."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterator

import pytest

from sandbox.gate.audit import AuditPipe, encode_line
from sandbox.gate.broker_channel import BrokerChannel, Ungiven
from sandbox.gate.loop import Loop
from sandbox.network.hosts import parse_host
from sandbox.network.rules import parse_rules
from tests.tables import one_case

RULES = ("GET a.example:443/x", "*.b.example:443", "localhost:8000")


class Desk:
    def __init__(self) -> None:
        self.loop = Loop()
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.broker, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.broker.settimeout(60)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        audit = AuditPipe(self.loop, self.write_end)
        self.channel = BrokerChannel(self.loop, ours.detach(), parse_rules(RULES), audit)

    def lines(self) -> list[dict[str, object]]:
        try:
            return [json.loads(line) for line in os.read(self.read_end, 1 << 16).splitlines()]
        except BlockingIOError:
            return []


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.broker.close()
    made.channel.read()
    made.loop.run_once(0)
    for fd in (made.read_end, made.write_end):
        os.close(fd)


@one_case(
    ("host", "port", "loopback", "reads"),
    [
        ("a.example", 443, False, True),
        ("a.example", 80, False, False),
        ("x.b.example", 443, False, True),
        ("b.example", 443, False, False),
        ("other.example", 443, False, False),
        ("localhost", 8000, True, True),
        ("localhost", 8001, True, False),
    ],
)
def test_which_connections_it_reads(host: str, port: int, loopback: bool, reads: bool) -> None:
    desk = Desk()
    assert desk.channel.reads(parse_host(host), port, loopback=loopback) is reads
    desk.broker.close()
    desk.loop.run_once(0)
    for fd in (desk.read_end, desk.write_end):
        os.close(fd)


def test_a_connection_is_given(desk: Desk) -> None:
    server, outside = socket.socketpair()
    ours = desk.channel.give(server, parse_host("a.example"), 443)
    desk.loop.run_once(0)  # closes the gate's own copy of the server's socket
    message, rights, _, _ = desk.broker.recvmsg(4096, socket.CMSG_SPACE(2 * 4))
    assert message == b"443 a.example"
    [(_, _, data)] = rights
    plugin, given = (socket.socket(fileno=fd) for fd in array.array("i", data))
    given.sendall(b"to the server")
    ours.send(b"of the plugin")
    assert outside.recv(99) == b"to the server" and plugin.recv(99) == b"of the plugin"
    given.close()
    assert outside.recv(99) == b""  # nobody else has it
    for each in (ours, plugin, outside):
        each.close()


def line(verdict: str = "allowed", **fields: str) -> bytes:
    return verdict.encode() + b" " + encode_line({"kind": "request", "verdict": verdict, **fields})


@one_case(
    ("message", "passes"),
    [
        (line(), True),
        (line("refused", name="x"), True),
        (line("nonsense"), False),
        (line()[:-1], False),
        (line() + b"\n", False),
        (line() + line(), False),
        (b"allowed", False),
        (b"\xff {}\n", False),
        (b"dropped -1", False),
        (b"dropped 9999999999", False),
        (b"dropped {}\n", False),
    ],
)
def test_only_single_lines_about_requests_pass(message: bytes, passes: bool) -> None:
    desk = Desk()
    desk.broker.send(message)
    desk.loop.run_once(20)
    assert bool(desk.lines()) is passes
    desk.broker.close()
    desk.loop.run_once(20)
    for fd in (desk.read_end, desk.write_end):
        os.close(fd)


def test_lines_that_the_broker_dropped_are_counted(desk: Desk) -> None:
    for message in (b"dropped 3", line()):
        desk.broker.send(message)
        desk.loop.run_once(20)
    desk.loop.run_once(0)
    assert [(each["kind"], each.get("count")) for each in desk.lines()] == [("dropped", 3), ("request", None)]


def test_without_the_broker_nothing_is_given(desk: Desk) -> None:
    desk.broker.close()
    desk.loop.run_once(20)
    server, outside = socket.socketpair()
    with server, outside, pytest.raises(Ungiven, match="has ended"):
        desk.channel.give(server, parse_host("a.example"), 443)


def test_a_broker_that_takes_nothing(desk: Desk) -> None:
    server, outside = socket.socketpair()
    given, copies = [], []

    def fill() -> None:
        for _ in range(300):
            copies.append(server.dup())
            given.append(desk.channel.give(copies[-1], parse_host("a.example"), 443))
            desk.loop.run_once(0)

    with server, outside:
        with pytest.raises(Ungiven, match="does not take it"):
            fill()
        assert given  # the control
    for each in (*given, *copies):
        each.close()
