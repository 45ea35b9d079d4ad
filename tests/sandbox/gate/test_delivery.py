"""What is on its way when the plugin or the gate ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from sandbox.gate.gate import EXIT_ENDED
from sandbox.network.egress import EgressPlan
from tests.sandbox.gate.netlab import PUBLIC, A, Lab

pytestmark = [pytest.mark.launches, pytest.mark.needs("root")]

NAME = "api.example.com"
LINES = EgressPlan((f"{NAME}:9000",))
JUDGED = EgressPlan((f"{NAME}:80",))
MUCH = b"z" * (3 << 20)
both_callers = pytest.mark.parametrize("user", [False, True], ids=["root", "user"])


class Server:
    """Takes one connection, and reads nothing until it is told to. Then it reads to the end."""

    def __init__(self, lab: Lab, port: int, *, echoes: bool) -> None:
        self.received = b""
        self.trouble = ""
        self.accepted, self.may_read = threading.Event(), threading.Event()
        self._echoes = echoes
        self._listener = lab.internet.make_socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)  # so most waits at the gate
        self._listener.bind((PUBLIC, port))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            with self._listener.accept()[0] as client:
                client.settimeout(60)
                self.accepted.set()
                self.may_read.wait(60)
                while piece := client.recv(65536):
                    self.received += piece
                    if self._echoes:
                        client.sendall(piece)
        except OSError as error:
            self.trouble = type(error).__name__

    def finish(self) -> tuple[int, str]:
        """How many bytes it got, and how that ended: "" in order."""
        self.may_read.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return len(self.received), self.trouble

    def close(self) -> None:
        self.may_read.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@contextlib.contextmanager
def slow_server(lab: Lab, port: int = 9000, *, echoes: bool = False) -> Iterator[Server]:
    lab.names.zone[NAME] = [[(NAME, A, PUBLIC)]]
    server = Server(lab, port, echoes=echoes)
    try:
        yield server
    finally:
        server.close()


def send_and_end(client: socket.socket, data: bytes) -> int:
    """As a plugin that writes and ends. How many bytes its kernel took."""
    client.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while count < len(data):
            count += client.send(data[count : count + 65536])
    client.close()
    return count


@both_callers
def test_what_a_plugin_sent_last_arrives(lab: Lab, user: bool) -> None:
    with slow_server(lab) as server, lab.gate(LINES, user=user) as gate:
        count = send_and_end(gate.connect(NAME, 9000), MUCH)
        assert count > 100_000 and server.accepted.wait(60)
        gate.dismiss()
        assert server.finish() == (count, "")
        assert gate.end(deliver=True) == EXIT_ENDED
        line = gate.wait_line(kind="connect", verdict="allowed")
        assert line["sent"] == count and line["reason"] == "was closed: the plugin has ended"


def test_a_server_that_answers_while_it_reads_gets_everything(lab: Lab) -> None:
    """Nobody reads its answers any more. It must not stop reading because of that."""
    with slow_server(lab, echoes=True) as server, lab.gate(LINES) as gate:
        client = gate.connect(NAME, 9000)
        assert server.accepted.wait(60)
        os.kill(gate.pid, signal.SIGSTOP)  # so all is still to be moved when the plugin has ended
        count = send_and_end(client, MUCH)
        gate.dismiss()
        os.kill(gate.pid, signal.SIGCONT)
        assert server.finish()[0] == count


@pytest.mark.parametrize("plan", [LINES, JUDGED], ids=["line", "http"])
def test_what_was_sent_before_the_name_was_known_arrives(lab: Lab, plan: EgressPlan) -> None:
    port = 80 if plan is JUDGED else 9000
    request = f"GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode()
    with slow_server(lab, port) as server, lab.gate(plan, asks="attempts:5") as gate:
        lab.names.silent = True
        assert send_and_end(gate.connect(NAME, port), request) == len(request)
        while not any(name == NAME for name, _ in list(lab.names.asked)):
            assert not gate.process.poll()
        gate.dismiss()
        lab.names.silent = False  # it is asked again
        assert gate.end(deliver=True) == EXIT_ENDED
        assert server.finish() == (len(request), "") and server.received == request


def test_a_connection_that_was_not_accepted_yet_is_delivered(lab: Lab) -> None:
    with slow_server(lab) as server, lab.gate(LINES) as gate:
        address = gate.resolve(NAME)
        os.kill(gate.pid, signal.SIGSTOP)
        assert send_and_end(gate.plugin.connect(address, 9000), b"last words") == 10
        gate.dismiss()
        os.kill(gate.pid, signal.SIGCONT)
        assert gate.end(deliver=True) == EXIT_ENDED
        assert server.finish() == (10, "")


def test_nothing_to_deliver_is_not_waited_for(lab: Lab) -> None:
    """A name that nobody resolves, and a plugin that has sent nothing: the gate ends, without a clock."""
    with lab.gate(LINES) as gate:
        lab.names.silent = True
        gate.connect(NAME, 9000).close()
        assert gate.end(deliver=True) == EXIT_ENDED
        assert "has ended" in gate.wait_line(kind="connect", verdict="failed")["reason"]


def test_a_second_word_ends_the_delivery_at_once(lab: Lab) -> None:
    with slow_server(lab) as server, lab.gate(LINES) as gate:
        client = gate.connect(NAME, 9000)
        sent = send_and_end(client, MUCH)
        assert server.accepted.wait(60)
        gate.dismiss()
        assert gate.end() == EXIT_ENDED
        count, trouble = server.finish()
        assert count < sent and trouble == "ConnectionResetError"
        assert "was cut" in gate.wait_line(kind="connect", verdict="allowed")["reason"]


@both_callers
def test_the_death_of_the_gate_is_a_reset_at_both_ends(lab: Lab, user: bool) -> None:
    with slow_server(lab) as server, lab.gate(LINES, user=user) as gate, gate.connect(NAME, 9000) as client:
        client.sendall(b"hello")
        server.may_read.set()
        while server.received != b"hello":
            assert not server.trouble
        os.kill(gate.pid, signal.SIGKILL)
        with pytest.raises(ConnectionResetError):
            client.recv(10)
        assert server.finish() == (5, "ConnectionResetError")
