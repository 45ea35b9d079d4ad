"""The process that serves a cage's ssh agent, between a client and an agent outside that the tests play."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.broker.agent import filter as filters
from sandbox.broker.agent.filter import fingerprint
from sandbox.broker.agent.messages import (
    FAILURE,
    IDENTITIES_ANSWER,
    LENGTH,
    MOST_MESSAGE_BYTES,
    REQUEST_IDENTITIES,
    SIGN_RESPONSE,
    SUCCESS,
    message,
    string,
)
from sandbox.broker.agent.outside import GONE, SIGNED, UNSIGNED
from tests.conftest import ROOT, SYSTEM_PATH
from tests.sandbox.broker.agent.keys import ed25519_key, log_in, session_bind, sign_request
from tests.tables import one_case

HOST, OWN = ed25519_key(), ed25519_key()
SESSION = bytes(range(32))
LIST = message(REQUEST_IDENTITIES)
BIND = string(session_bind(HOST, SESSION))
LOG_IN = string(sign_request(OWN.blob, log_in(SESSION, OWN.blob)))
REFUSED = message(FAILURE)
SECONDS = 60.0  # no test waits so long, unless it fails


def signature(text: bytes) -> bytes:
    return message(SIGN_RESPONSE, string(string(b"ssh-ed25519") + string(text)))


class Client:
    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        made.settimeout(SECONDS)

    def say(self, data: bytes) -> Client:
        self.socket.sendall(data)
        return self

    def hear(self) -> bytes:
        """The next message, with its length; b"" at the end."""
        head = self._take(LENGTH.size)
        return head + self._take(int.from_bytes(head))

    def _take(self, count: int) -> bytes:
        taken = b""
        while len(taken) < count and (piece := self.socket.recv(count - len(taken))):
            taken += piece
        return taken

    def ask(self, data: bytes) -> bytes:
        return self.say(data).hear()

    @property
    def is_silent(self) -> bool:
        return not select.select([self.socket], [], [], 0)[0]


class Service:
    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "socket")
        self._made: list[socket.socket] = []
        outside = socket.socket(socket.AF_UNIX)
        outside.bind(str(folder / "outside"))
        outside.listen()
        self.audit, audit_w = os.pipe()
        alive_r, self._alive = os.pipe()
        order = {
            "keys": {b64encode(OWN.blob).decode(): fingerprint(OWN.blob)},
            "hosts": [b64encode(HOST.blob).decode()],
            "outside": str(folder / "outside"),
            "socket": self._path,
            "audit": audit_w,
            "alive": alive_r,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sandbox.broker.agent.agent_host", json.dumps(order)],
            pass_fds=(audit_w, alive_r),
            stdout=subprocess.PIPE,
            env={
                "PATH": SYSTEM_PATH,
                "PYTHONPATH": str(ROOT),
                "SECRET": "of the launching process",
            },
            cwd=ROOT,
        )
        for fd in (audit_w, alive_r):
            os.close(fd)
        with outside:
            outside.settimeout(SECONDS)
            self.outside = Client(outside.accept()[0])
        self._made.append(self.outside.socket)
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())
        assert self.pid

    def connect(self) -> Client:
        made = socket.socket(socket.AF_UNIX)
        self._made.append(made)
        made.connect(self._path)
        return Client(made)

    def bound(self) -> Client:
        client = self.connect()
        assert client.ask(BIND) == message(SUCCESS)
        return client

    def end(self) -> list[dict[str, Any]]:
        """End it, and return its lines."""
        os.close(self._alive)
        self._alive = -1
        with open(self.audit, "rb", closefd=False) as file:
            lines = [json.loads(line) for line in file]
        assert self.process.wait(SECONDS) == 0
        return lines

    def close(self) -> None:
        for made in self._made:
            made.close()
        for fd in (self._alive, self.audit):
            if fd >= 0:
                os.close(fd)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def told(lines: list[dict[str, Any]]) -> list[tuple[str, str, str, str, int]]:
    names = ("verdict", "name", "rule", "reason", "times")
    return [tuple(line[name] for name in names) for line in lines if line["kind"] == "ssh"]


def test_a_signature_is_asked_for_outside(service: Service) -> None:
    client = service.bound().say(LOG_IN)
    assert service.outside.hear() == LOG_IN
    service.outside.say(signature(b"it"))
    assert client.hear() == signature(b"it")
    lines = service.end()
    assert told(lines) == [("allowed", "git.example.com", fingerprint(OWN.blob), SIGNED, 1)]
    assert lines[-1] == {"kind": "totals", "ssh allowed": 1}


def test_nothing_else_is_asked_outside(service: Service) -> None:
    client = service.bound()
    assert client.ask(LIST)[4] == IDENTITIES_ANSWER
    for kind in (1, 3, 7, 9, 17, 18, 19, 20, 21, 22, 23, 25, 26, 255):
        assert client.ask(message(kind, b"x")) == REFUSED
    assert service.connect().ask(LOG_IN) == REFUSED
    assert service.outside.is_silent


def test_messages_in_pieces_and_together(service: Service) -> None:
    client = service.connect()
    for at in range(len(BIND)):
        assert client.is_silent
        client.say(BIND[at : at + 1])
    assert client.hear() == message(SUCCESS)
    client.say(LIST + LIST + LOG_IN + LIST)
    assert [client.hear()[4] for _ in range(2)] == [IDENTITIES_ANSWER] * 2
    assert service.outside.hear() == LOG_IN and client.is_silent  # in their order
    service.outside.say(signature(b"it"))
    assert [client.hear()[4] for _ in range(2)] == [SIGN_RESPONSE, IDENTITIES_ANSWER]


def test_the_largest_message_and_one_byte_more(service: Service) -> None:
    assert service.connect().ask(string(bytes(MOST_MESSAGE_BYTES))) == REFUSED
    for length in (MOST_MESSAGE_BYTES + 1, 0xFFFFFFFF, 0):
        assert service.connect().say(LENGTH.pack(length)).hear() == b""
    assert [line[3:] for line in told(service.end())][1:] == [
        ("closed a connection with a message that is too long", times) for times in (1, 2)
    ]


def test_more_connections_than_are_served_wait(service: Service) -> None:
    first, *others = (service.connect() for _ in range(32))
    assert all(each.ask(LIST)[4] == IDENTITIES_ANSWER for each in (first, *others))
    late = service.connect().say(LIST)
    assert first.ask(LIST)[4] == IDENTITIES_ANSWER
    assert late.is_silent
    first.socket.close()
    assert late.hear()[4] == IDENTITIES_ANSWER


def test_no_client_gets_the_answer_to_another(service: Service) -> None:
    gone, waiting = service.bound(), service.bound()
    gone.say(LOG_IN)
    assert service.outside.hear() == LOG_IN
    gone.socket.close()
    waiting.say(LOG_IN)
    assert service.connect().ask(LIST)  # it has seen both
    service.outside.say(signature(b"to who has gone"))
    assert service.outside.hear() == LOG_IN
    service.outside.say(signature(b"to who waits"))
    assert waiting.hear() == signature(b"to who waits")


def test_who_has_gone_is_not_asked_for(service: Service) -> None:
    """Or a plugin could fill the memory, and the person's screen, while one question waits for the person."""
    first, other = service.bound().say(LOG_IN), service.connect()
    assert service.outside.hear() == LOG_IN
    for _ in range(40):
        client = service.bound().say(LOG_IN)
        assert other.ask(LIST)  # it has read that
        client.socket.close()
    last = service.bound().say(LOG_IN)
    service.outside.say(signature(b"1"))
    assert first.hear() == signature(b"1") and service.outside.hear() == LOG_IN
    service.outside.say(signature(b"2"))
    assert last.hear() == signature(b"2")
    assert told(service.end())[-1][4] == 2  # signatures in all


@one_case(
    ("answer", "reason"),
    [
        (message(FAILURE), UNSIGNED),
        (message(SUCCESS), UNSIGNED),
        (message(SIGN_RESPONSE), UNSIGNED),
        (message(SIGN_RESPONSE, string(b"")), UNSIGNED),
        (message(SIGN_RESPONSE, string(string(b"ssh-rsa") + string(b"x"))), UNSIGNED),
        (signature(b"x")[:-1] + b"", GONE),
        (LENGTH.pack(0), UNSIGNED),
        (LENGTH.pack(MOST_MESSAGE_BYTES + 1), GONE),
        (signature(b"x") + b"\0", GONE),
    ],
)
def test_an_agent_outside_that_does_not_answer_with_a_signature(
    tmp_path_factory: pytest.TempPathFactory, answer: bytes, reason: str
) -> None:
    service = Service(tmp_path_factory.mktemp("service"))
    try:
        client = service.bound().say(LOG_IN)
        assert service.outside.hear() == LOG_IN
        service.outside.say(answer)
        if answer == signature(b"x")[:-1]:
            service.outside.socket.close()
        assert client.hear() == REFUSED
        assert [(line[0], line[3]) for line in told(service.end())] == [("failed", reason)]
    finally:
        service.close()


def test_an_answer_that_nobody_asked_for(service: Service) -> None:
    """It would be taken for the answer to the next request."""
    service.outside.say(signature(b"early"))
    assert service.outside.hear() == b""
    assert service.bound().ask(LOG_IN) == REFUSED
    assert [(line[0], line[3]) for line in told(service.end())] == [("failed", GONE)]


def test_repeated_refusals_are_counted(service: Service) -> None:
    client = service.connect()
    for _ in range(9):
        assert client.ask(LOG_IN) == REFUSED
    lines = service.end()
    assert told(lines) == [("refused", "", "", filters.UNBOUND, times) for times in (1, 2, 4, 8)]
    assert lines[-1] == {"kind": "totals", "ssh refused": 9}


def test_it_is_confined(service: Service) -> None:
    status = Path(f"/proc/{service.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (fields["Seccomp"], fields["NoNewPrivs"], int(fields["CapEff"], 16)) == ("2", "1", 0)
    if os.geteuid() == 0:  # of a process that is not dumpable nobody else may look at these
        folder = f"/proc/{service.pid}/fd"
        held = {os.readlink(f"{folder}/{fd}").split(":")[0] for fd in os.listdir(folder)}
        assert held == {"/dev/null", "socket", "pipe", "anon_inode"}
        assert b"SECRET" not in Path(f"/proc/{service.pid}/environ").read_bytes()


def test_it_ends_with_the_launching_process(service: Service) -> None:
    pidfd = os.pidfd_open(service.pid)
    try:
        service.process.send_signal(signal.SIGKILL)
        assert select.select([pidfd], [], [], SECONDS)[0]
    finally:
        os.close(pidfd)
