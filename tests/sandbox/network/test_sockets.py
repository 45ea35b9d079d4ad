"""From the cell's init to the gate: sockets with their counts, or an error."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator

import pytest

from sandbox.network.sockets import MOST_SOCKETS, receive_sockets, send_ready

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def _send(end: socket.socket, header: bytes, count: int) -> None:
    read, write = os.pipe()
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read] * count))] if count else []
        end.sendmsg([header], rights)
    finally:
        os.close(read)
        os.close(write)


def _open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


COUNTS = [(0, 0, 0), (4, 0, 1), (0, 2, 0), (MOST_SOCKETS - 5, 2, 1)]


@pytest.mark.parametrize("counts", COUNTS)
def test_sockets_arrive_in_order(pair: Pair, counts: tuple[int, int, int]) -> None:
    _send(pair[0], b"%d %d %d" % counts, 2 + sum(counts))
    found = receive_sockets(pair[1].fileno())
    kinds = found.listeners, found.redirected, found.closed_ports
    held = [found.dns_udp, found.dns_tcp, *(fd for kind in kinds for fd in kind)]
    try:
        assert tuple(map(len, kinds)) == counts
        assert len(set(held)) == 2 + sum(counts)
        assert not any(os.get_inheritable(fd) for fd in held)
    finally:
        for fd in held:
            os.close(fd)


@pytest.mark.parametrize(
    ("header", "count"),
    [
        (b"2 0 0", 3),  # one too few
        (b"2 0 0", 5),
        (b"0 0 0", 0),
    ],
)
def test_a_wrong_number_is_refused_and_closed(pair: Pair, header: bytes, count: int) -> None:
    before = _open_descriptors()
    _send(pair[0], header, count)
    with pytest.raises(ConnectionError, match="arrived"):
        receive_sockets(pair[1].fileno())
    assert _open_descriptors() <= before


def test_an_end_before_the_sockets_is_told(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(ConnectionError, match="ended before"):
        receive_sockets(pair[1].fileno())


def test_the_answer_is_one_byte(pair: Pair) -> None:
    send_ready(pair[1].fileno())
    assert pair[0].recv(16) == b"g"
