"""The stub resolver, against name servers on this machine's loopback that do as the test says."""

from __future__ import annotations

import _socket
import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sandbox.gate.loop import Loop
from sandbox.gate.resolver import MOST_QUERIES, Addresses, Resolver, interleave
from sandbox.gate.upstream import NameServer, Upstream
from tests.sandbox.gate.netlab import AAAA, CNAME, A, Record, encode_record

NAME = "api.example.com"
Answer = Callable[[bytes], bytes | None]


def _with_one_port() -> tuple[socket.socket, socket.socket]:
    """A UDP and a TCP socket with the same port. A port that is free for one may be taken for the other."""
    while True:
        udp, tcp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket()
        udp.bind(("127.0.0.1", 0))
        try:
            tcp.bind(udp.getsockname())
        except OSError:
            udp.close()
            tcp.close()
        else:
            return udp, tcp


class Server:
    """UDP is served by the same loop that resolves, TCP by a thread."""

    def __init__(self, loop: Loop, answer: Answer, over_tcp: Answer | None = None) -> None:
        self.asked: list[bytes] = []
        self.ports: list[int] = []
        self.answer, self.over_tcp = answer, over_tcp
        self.loop = loop
        self.udp, self.tcp = _with_one_port()
        self.tcp.listen()
        self.name = NameServer(socket.AF_INET, self.udp.getsockname())
        loop.watch(self.udp.fileno(), 1, self._on_udp)
        self.thread = threading.Thread(target=self._serve_tcp)
        self.thread.start()

    def _on_udp(self, _: int) -> None:
        message, sender = self.udp.recvfrom(4096)
        self.asked.append(message)
        self.ports.append(sender[1])
        reply = self.answer(message)
        for part in (reply or b"").split(b"SPLIT"):
            if part:
                self.udp.sendto(part, sender)

    def _serve_tcp(self) -> None:
        while True:
            try:
                client = self.tcp.accept()[0]
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                message = client.recv(4096)
                reply = self.over_tcp(message[2:]) if self.over_tcp else None
                if reply is not None:
                    client.sendall(len(reply).to_bytes(2, "big") + reply)

    def close(self) -> None:
        if self.udp.fileno() >= 0:
            self.loop.forget(self.udp.fileno())
        self.udp.close()
        with contextlib.suppress(OSError):
            self.tcp.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.tcp.close()


def reply(question: bytes, *records: Record, code: int = 0, flags: int = 0x8180, ttl: int = 0) -> bytes:
    kind = struct.unpack_from("!H", question, len(question) - 4)[0]
    chosen = [record for record in records if record[1] in (kind, CNAME)]
    body = b"".join(encode_record(record, ttl) for record in chosen)
    return question[:2] + struct.pack("!5H", flags | code, 1, len(chosen), 0, 0) + question[12:] + body


def answering(*records: Record, ttl: int = 0) -> Answer:
    return lambda question: reply(question, *records, ttl=ttl)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr("sandbox.gate.resolver._OTHER_KIND_SECONDS", 1000.0)  # as in `servers`
    return Loop()


@contextlib.contextmanager
def servers(
    loop: Loop, *each: Server, seconds: float = 1000.0, last_seconds: float = 1000.0, attempts: int = 2
) -> Iterator[Resolver]:
    """They have all the time, unless a test is about their silence: a busy machine is no silent server."""
    try:
        names = tuple(server.name for server in each)
        yield Resolver(loop, Upstream(names, attempts, seconds, last_seconds))
    finally:
        for server in each:
            server.close()


def look_up(loop: Loop, resolver: Resolver, name: str = NAME) -> Addresses:
    found: list[Addresses] = []
    resolver.look_up(name, found.append)
    while not found:
        loop.run_once(5)
    return found[0]


BOTH: tuple[Record, ...] = (
    (NAME, A, "93.184.216.34"),
    (NAME, A, "93.184.216.35"),
    (NAME, AAAA, "2606:2800::1"),
)


def test_both_kinds_are_found(loop: Loop) -> None:
    server = Server(loop, answering(*BOTH))
    with servers(loop, server) as resolver:
        assert look_up(loop, resolver).found == ("2606:2800::1", "93.184.216.34", "93.184.216.35")
    assert len(server.asked) == 2


def test_questions_have_ids_and_ports_that_cannot_be_guessed(loop: Loop) -> None:
    server = Server(loop, answering(*BOTH))
    with servers(loop, server) as resolver:
        for _ in range(20):
            look_up(loop, resolver)
    assert len({message[:2] for message in server.asked}) > 30
    assert len(set(server.ports)) > 30


@pytest.mark.parametrize(
    "forge",
    [
        lambda good: b"",
        lambda good: good[:11],
        lambda good: bytes([good[0] ^ 1]) + good[1:],  # another id
        lambda good: good[:2] + b"\x01\x00" + good[4:],  # a question
        lambda good: good.replace(b"\x07example", b"\x07exbmple"),
        lambda good: good[:-1],
    ],
)
def test_a_forged_answer_is_not_heard(loop: Loop, forge: Callable[[bytes], bytes]) -> None:
    """And the true one after it is."""

    def answer(question: bytes) -> bytes:
        bad = reply(question, (NAME, A, "6.6.6.6"), (NAME, AAAA, "2606:2800::6"))
        return forge(bad) + b"SPLIT" + reply(question, *BOTH)

    with servers(loop, Server(loop, answer)) as resolver:
        assert "6.6.6.6" not in look_up(loop, resolver).found
        assert "93.184.216.34" in look_up(loop, resolver).found


def test_a_flood_of_forged_answers_ends_the_question(loop: Loop) -> None:
    flood = Server(loop, lambda question: b"SPLIT".join([bytes(12)] * 40))
    good = Server(loop, answering(*BOTH))
    with servers(loop, flood, good) as resolver:
        assert "93.184.216.34" in look_up(loop, resolver).found


def test_a_silent_or_failing_server_is_followed_by_the_next(loop: Loop) -> None:
    for bad in (
        lambda _: None,
        lambda question: reply(question, code=2),
        lambda question: reply(question, code=5),
    ):
        first, second = Server(loop, bad), Server(loop, answering(*BOTH))
        with servers(loop, first, second, seconds=0.05, attempts=1) as resolver:
            assert len(look_up(loop, resolver).found) == 3
        assert len(first.asked) == 2


def test_a_server_that_is_not_there_is_followed_at_once(loop: Loop) -> None:
    first, second = Server(loop, answering()), Server(loop, answering(*BOTH))
    first.udp.connect(("127.0.0.1", 9))  # it keeps its port, and the kernel refuses who is not its peer
    with servers(loop, first, second) as resolver:
        assert len(look_up(loop, resolver).found) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda question: reply(question, code=3), "NXDOMAIN"),
        (lambda question: reply(question, code=2), "SERVFAIL"),
        (lambda question: reply(question, code=5), "REFUSED"),
        (lambda question: None, "no name server answers"),
        (lambda question: reply(question), "has no address"),
        (lambda question: reply(question, (NAME, CNAME, "cdn.net")), "has no address"),
    ],
)
def test_nothing_found_has_a_reason(loop: Loop, answer: Answer, reason: str) -> None:
    seconds = 0.05 if "no name server" in reason else 1000.0
    with servers(loop, Server(loop, answer), seconds=seconds, last_seconds=seconds) as resolver:
        found = look_up(loop, resolver)
    assert found.found == () and reason in found.reason


class LateServer(Server):
    """Answers each question when the next one for the same kind comes, and then that one alone."""

    def _on_udp(self, _: int) -> None:
        message, sender = self.udp.recvfrom(4096)
        for earlier, asker in self.held:
            if earlier[12:] == message[12:]:
                self.udp.sendto(self.answer(earlier) or b"", asker)
        self.held.append((message, sender))

    held: list[tuple[bytes, tuple[str, int]]]


def test_an_answer_that_comes_after_the_next_question_is_heard(loop: Loop) -> None:
    server = LateServer(loop, answering(*BOTH))
    server.held = []
    with servers(loop, server, seconds=0.05) as resolver:
        assert len(look_up(loop, resolver).found) == 3
    assert len({message[:2] for message, _ in server.held}) == 4  # still another question each time


def test_a_slow_server_has_its_time_when_the_next_is_not_there(loop: Loop) -> None:
    slow, absent = Server(loop, lambda _: None), Server(loop, lambda _: None)
    absent.close()
    held = []

    def hold(message: bytes) -> None:
        held.append(message)
        asker = ("127.0.0.1", slow.ports[-1])

        def answer() -> None:
            slow.udp.sendto(reply(message, *BOTH), asker)

        loop.call_later(0.3, answer)

    slow.answer = hold
    with servers(loop, slow):
        upstream = Upstream((slow.name, absent.name), attempts=1, seconds=0.05, last_seconds=60.0)
        assert len(look_up(loop, Resolver(loop, upstream)).found) == 3
    assert len(held) == 2


def test_only_some_questions_are_open_at_once(loop: Loop) -> None:
    server = Server(loop, lambda _: None)
    before = len(os.listdir("/proc/self/fd"))
    most = 0

    def count(_: bytes) -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")) - before)

    server.answer = count
    with servers(loop, server, seconds=0.05, last_seconds=0.05, attempts=10) as resolver:
        assert "no name server answers" in look_up(loop, resolver).reason
        while len(server.asked) < 20:  # the last may still be on their way
            loop.run_once(5)
    assert len(server.asked) == 20 and most == 2 * MOST_QUERIES


def test_missing_descriptors_are_told(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(_socket, name)

        def socket(self, *_: Any) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    with servers(loop, Server(loop, answering(*BOTH))) as resolver:
        monkeypatch.setattr("sandbox.gate.resolver.socket", Full())
        assert "ulimit -Hn" in look_up(loop, resolver).reason


def test_a_truncated_answer_is_asked_for_over_tcp(loop: Loop) -> None:
    server = Server(loop, lambda question: reply(question, flags=0x8380), answering(*BOTH))
    with servers(loop, server) as resolver:
        assert len(look_up(loop, resolver).found) == 3


@pytest.mark.parametrize("over_tcp", [None, lambda _: b"", lambda _: bytes(65535), lambda _: bytes(12)])
def test_nonsense_over_tcp_is_a_failure(loop: Loop, over_tcp: Answer | None) -> None:
    server = Server(loop, lambda question: reply(question, flags=0x8380), over_tcp)
    with servers(loop, server) as resolver:
        assert look_up(loop, resolver).found == ()


def test_one_kind_does_not_wait_long_for_the_other(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.gate.resolver._OTHER_KIND_SECONDS", 0.05)

    def answer(question: bytes) -> bytes | None:
        return None if question[-3] == AAAA else reply(question, *BOTH)

    server = Server(loop, answer)
    with servers(loop, server) as resolver:
        assert look_up(loop, resolver).found == ("93.184.216.34", "93.184.216.35")


def test_an_answer_holds_as_long_as_it_says(loop: Loop) -> None:
    """Without a TTL it is asked for again: the next connection may be led elsewhere, and is vetted again."""
    for ttl, looks in ((0, 4), (60, 2)):
        server = Server(loop, answering(*BOTH, ttl=ttl))
        with servers(loop, server) as resolver:
            assert look_up(loop, resolver).found == look_up(loop, resolver).found
            assert len(server.asked) == looks
            if ttl:
                resolver.drop(NAME)
                look_up(loop, resolver)
                assert len(server.asked) == 2 * looks
                loop.now += 31  # it is kept 30 seconds at most
                assert resolver._cache[NAME][0] < loop.now


def test_hosts_come_first(loop: Loop) -> None:
    server = Server(loop, answering(*BOTH))
    with servers(loop, server):
        resolver = Resolver(loop, Upstream((server.name,), hosts=((NAME, ("10.0.0.1",)),)))
        assert look_up(loop, resolver).found == ("10.0.0.1",)
    assert server.asked == []


def test_a_cancelled_search_says_nothing(loop: Loop) -> None:
    server = Server(loop, answering(*BOTH))
    with servers(loop, server) as resolver:
        found: list[Addresses] = []
        search = resolver.look_up(NAME, found.append)
        assert search is not None
        search.cancel()
        for _ in range(5):
            loop.run_once(0)
        assert found == [] and server.asked == []


def test_kinds_take_turns() -> None:
    four = tuple(socket.inet_aton(f"1.1.1.{number}") for number in range(3))
    six = (socket.inet_pton(socket.AF_INET6, "2606::1"),)
    assert interleave(six, four) == ("2606::1", "1.1.1.0", "1.1.1.1", "1.1.1.2")
    assert interleave() == ()
