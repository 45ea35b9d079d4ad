"""How the gate receives the sockets of a plugin's network namespace.

sandbox/spawn/network.py sends one message: a header with three counts, and the descriptors in the order of
GateSockets. Nothing in it comes from the plugin, which does not run yet.
"""

from __future__ import annotations

import os
from array import array

from sandbox.network.egress import GateSockets
from sandbox.spawn.network import READY

MOST_SOCKETS = 253  # in one message; the kernel's limit (SCM_MAX_FD)
_HEADER_BYTES = 256
_MSG_CMSG_CLOEXEC = 0x40000000


def receive_sockets(channel: int) -> GateSockets:
    """Wait for the sockets, which are non-blocking. Raises ConnectionError if the cell's init has ended.

    If none of the listeners is of IPv6, the plugin's namespace has no IPv6.
    """
    import _socket as socket

    source = socket.socket(fileno=os.dup(channel))
    try:
        room = socket.CMSG_SPACE(MOST_SOCKETS * 4)
        header, rights, flags, _ = source.recvmsg(_HEADER_BYTES, room, _MSG_CMSG_CLOEXEC)
    finally:
        source.close()
    received = array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    try:
        if not header:
            raise ConnectionError("the cell's init ended before it had made the sockets")
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ConnectionError("not all sockets of the plugin's network namespace arrived")
        counts = [int(word) for word in header.split()]
        if len(counts) != 3 or len(received) != 2 + sum(counts):
            raise ConnectionError(f"{2 + sum(counts)} sockets were announced, {len(received)} arrived")
    except BaseException:
        for fd in received:
            os.close(fd)
        raise
    dns_udp, dns_tcp, *others = received
    listeners, redirected = counts[0], counts[0] + counts[1]
    return GateSockets(
        dns_udp,
        dns_tcp,
        tuple(others[:listeners]),
        tuple(others[listeners:redirected]),
        tuple(others[redirected:]),
    )


def send_ready(channel: int) -> None:
    """Let the plugin start: the gate is confined and serves. Raises OSError if the cell's init has ended."""
    os.write(channel, READY)
