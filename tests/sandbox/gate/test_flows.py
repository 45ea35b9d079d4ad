"""Connections and questions that the kernel refuses to watch (epoll/max_user_watches, no memory)."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox.gate.audit import AuditPipe
from sandbox.gate.dial import Dial
from sandbox.gate.flows import Flows
from sandbox.gate.loop import Handler, Loop
from sandbox.gate.name_server import NameService
from sandbox.gate.names import NameTable
from sandbox.network.egress import EgressPlan
from sandbox.network.rules import parse_rules

NAME = "api.example.com"


class FullLoop(Loop):
    """The kernel watches nothing more while `full`."""

    full = False

    def watch(self, fd: int, mask: int, handler: Handler) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().watch(fd, mask, handler)


class SilentResolver:
    """Never answers."""

    def look_up(self, name: str, done: Any) -> SilentResolver:
        return self

    def cancel(self) -> None:
        pass


class Bench:
    def __init__(self) -> None:
        self.loop = FullLoop()
        self.read, self._write = os.pipe()
        os.set_blocking(self.read, False)
        table = NameTable(16)
        plan = EgressPlan((f"{NAME}:*",))
        resolver: Any = SilentResolver()
        audit = AuditPipe(self.loop, self._write)
        self.flows = Flows(self.loop, plan, parse_rules(plan.rules, ranges=True), table, resolver, audit)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.flows.listen([self.listener], [])
        self.port = self.listener.getsockname()[1]

    def lines(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in os.read(self.read, 65536).splitlines()]
        except BlockingIOError:
            return []

    def close(self) -> None:
        self.listener.close()
        for fd in (self.read, self._write):
            os.close(fd)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench()
    # The listener is on loopback here, as if the name's address had been dialled.
    monkeypatch.setattr("sandbox.gate.flows.is_synthetic", lambda address: True)
    monkeypatch.setattr(NameTable, "find", lambda *_: NAME)
    yield made
    made.flows.end_all("the test has ended")
    made.loop.run_once(0)
    made.close()


def test_a_client_that_cannot_be_watched_is_reset_and_others_are_served(bench: Bench) -> None:
    with socket.create_connection(("127.0.0.1", bench.port), 20) as client:
        bench.loop.full = True
        bench.loop.run_once(20)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    [line] = bench.lines()
    assert (line["verdict"], line["name"]) == ("refused", NAME)
    assert os.strerror(errno.ENOSPC) in line["reason"]
    assert not bench.flows._open and not bench.loop._heap  # nothing is left of it
    bench.loop.full = False
    with socket.create_connection(("127.0.0.1", bench.port), 20):
        bench.loop.run_once(20)
        assert len(bench.flows._open) == 1


@pytest.mark.parametrize("full", [False, True])
def test_an_attempt_that_cannot_be_watched_has_failed(full: bool) -> None:
    loop, told = FullLoop(), list[tuple[bool, str]]()
    loop.full = full
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, socket.socket() as first:
        if full:
            first.connect(listener.getsockname())  # it has no room for a second one, which then waits

        def done(connection: Any, text: str) -> None:
            told.append((connection is not None, text))
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        Dial(loop, ["127.0.0.1"], listener.getsockname()[1], done, lambda: None)
        while not told:
            loop.run_once(20)
    assert told[0][0] is not full
    assert (os.strerror(errno.ENOSPC) in told[0][1]) is full


def test_every_attempt_to_dial_counts_against_the_rate(bench: Bench) -> None:
    """A connection counts when it is accepted, with its first attempt. A host with dead addresses takes
    more."""
    limiter, told = bench.flows._rate_limiter, list[str]()
    assert limiter is not None
    limiter._per_second = 0  # nothing is added while it dials
    before = limiter._room
    addresses = [f"127.0.0.{number}" for number in range(1, 5)]
    bench.loop.full = False
    with socket.socket() as closed:  # it does not listen, and nobody else does on its port
        closed.bind(("", 0))
        port = closed.getsockname()[1]
        Dial(bench.loop, addresses, port, lambda _, text: told.append(text), bench.flows.count_attempt)
        while not told:
            bench.loop.run_once(20)
    assert before - limiter._room == len(addresses) - 1


def test_a_client_of_the_name_service_that_cannot_be_watched_is_closed() -> None:
    loop = FullLoop()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        service = NameService(loop, Any, udp, listener)  # type: ignore[arg-type]  # nothing is asked
        for full in (True, False):
            loop.full = full
            with socket.create_connection(listener.getsockname(), 20) as client:
                loop.run_once(20)
                assert len(service._clients) == (not full)
                if full:
                    assert client.recv(1) == b""
        service._clients.popitem()[1]._client.close()
