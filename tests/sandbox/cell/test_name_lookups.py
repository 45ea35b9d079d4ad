"""The questions of a plugin without a network: what it sends is hostile."""

from __future__ import annotations

import _socket
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandbox.cell.name_lookups import LOOPBACK_UP, MOST_LOOKUPS, NameLookups
from sandbox.gate import dns
from sandbox.network import recipe
from sandbox.network.egress import NO_NETWORK, OWN_LOOPBACK, AuditLine


@contextmanager
def asking() -> Iterator[tuple[NameLookups, socket.socket]]:
    """AskedFacts with a socket of this namespace, and a client of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        served = _socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        served.bind(("127.0.0.1", 0))
        client.connect(served.getsockname())
        client.setblocking(False)
        questions = NameLookups(ours, theirs)
        questions._socket = served
        try:
            yield questions, client
        finally:
            questions.close()


def answers(questions: NameLookups, client: socket.socket, *messages: bytes) -> list[bytes]:
    for message in messages:
        client.send(message)
    while ready := {fd: select.POLLIN for fd in questions.interest() if select.select([fd], [], [], 0)[0]}:
        questions.look(ready, 0.0)
    found = []
    while select.select([client], [], [], 0)[0]:
        found.append(client.recv(4096))
    return found


def named(*labels: bytes, kind: int = dns.A) -> bytes:
    text = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return b"\0\7\1\0\0\1\0\0\0\0\0\0" + text + kind.to_bytes(2, "big") + b"\0\1"


def test_loopback_is_switched_on_as_for_a_gate() -> None:
    assert recipe._loopback_up() == LOOPBACK_UP


def test_each_name_is_recorded_once_and_does_not_exist() -> None:
    told: list[AuditLine] = []
    with asking() as (questions, client):
        questions.on_line = told.append
        both = named(b"API", b"example"), named(b"api", b"example", kind=dns.AAAA)
        replies = answers(questions, client, *both, named(b"1", b"0", kind=dns.PTR))
        assert [
            dns.read_reply(reply, 7, "api.example", kind).code
            for reply, kind in zip(replies, (dns.A, dns.AAAA), strict=False)
        ] == [dns.NXDOMAIN] * 2
        assert len(replies) == 3
    assert [(line.name, line.verdict, line.reason) for line in told] == [
        ("api.example", "refused", NO_NETWORK)
    ]


@pytest.mark.parametrize(
    "labels",
    [
        (b"*", b"com"),
        (b"10.0.0.0/8",),
        (b"10", b"0", b"0", b"1"),
        (b"a.b",),
        (b"a\x1b[2J", b"example"),
        (b"a:443,b",),
        (b"-x",),
    ],
)
def test_no_entry_of_a_list_is_made_of_what_is_no_name(labels: tuple[bytes, ...]) -> None:
    with asking() as (questions, client):
        assert len(answers(questions, client, named(*labels))) == 1
        assert questions.log is not None
        [line] = questions.log.lines
        assert line.reason != NO_NETWORK and line.name.isprintable() == (b"\x1b" not in b"".join(labels))


def test_nothing_that_is_malformed_ends_it() -> None:
    question = named(b"a", b"example")
    broken = [
        b"",
        b"\0",
        question[:-1],
        question + b"x",
        b"\xff" * 1300,
        bytes(12),
        b"\0\7\x80\0" + question[4:],
    ]
    broken += [question[:at] + b"\xff" + question[at + 1 :] for at in range(len(question))]
    with asking() as (questions, client):
        answers(questions, client, *broken)
        assert answers(questions, client, question)  # the control: it still answers


def test_a_flood_is_answered_up_to_a_number() -> None:
    with asking() as (questions, client):
        for number in range(0, 2 * MOST_LOOKUPS, 64):
            if not questions.interest():
                break
            answers(
                questions, client, *(named(b"n%d" % each, b"example") for each in range(number, number + 64))
            )
        assert not questions.interest() and number < MOST_LOOKUPS + 64
        assert questions.log is not None and sum(questions.log.totals.values()) == MOST_LOOKUPS
        client.send(named(b"late", b"example"))
        with pytest.raises(ConnectionRefusedError):  # by the kernel, at once
            client.recv(1024)


def _packet(
    source: bytes, ports: tuple[int, int], flags: int, target: bytes = b"\x7f\0\0\1", number: int = 0
) -> bytes:
    header = b"\x45" + bytes(11) + source + target
    return header + struct.pack("!HHIIBBHHH", *ports, number, 0, 0x50, flags, 0, 0, 0)


RST_ACK, SYN, OWN = 0x14, 0x02, b"\x7f\0\0\1"


def test_ports_of_its_own_loopback_that_refuse_it() -> None:
    """Each once. What is no refusal, or of another address, counts for nothing. After a number it is deaf."""
    packets = [
        *(_packet(OWN, (6379, 40000), RST_ACK), _packet(OWN, (6379, 40001), RST_ACK)),
        _packet(b"\x7f\0\0\2", (6380, 40000), RST_ACK, b"\x7f\0\0\2"),
        *(_packet(OWN, (6381, 40000), SYN), _packet(OWN, (6382, 40000), 0x10)),
        _packet(OWN, (6383, 40000), RST_ACK, number=7),  # a connection that there was
        *(
            _packet(b"\xc6\x12\x80\1", (40000, 6384), SYN, b"\xc6\x12\x80\2"),
            b"",
            b"\x45",
            b"\x4f" * 20,
            b"\xff" * 60,
        ),
    ]
    with asking() as (questions, _):
        ours, theirs = _socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        questions._raw = ours
        assert questions.interest().keys() >= {ours.fileno()}
        for packet in packets:
            theirs.send(packet)
        questions.look({ours.fileno(): select.POLLIN}, 0.0)
        assert questions.log is not None
        assert [(line.name, line.port, line.reason) for line in questions.log.lines] == [
            ("127.0.0.1", 6379, OWN_LOOPBACK)
        ]
        heard = 0
        while ours.fileno() in questions.interest():
            theirs.send(_packet(OWN, (6379, 40000), SYN))  # kept out by the filter
            theirs.send(_packet(OWN, (6379, 40000), RST_ACK))
            questions.look({ours.fileno(): select.POLLIN}, 0.0)
            heard += 1
        assert heard == MOST_LOOKUPS - len(packets)
        theirs.close()
