"""Descriptors from one process to another. Python's own send_fds and recv_fds ignore their flags."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

_INT_BYTES = array.array("i").itemsize


def send_descriptors(by: socket.socket, word: bytes, fds: Sequence[int]) -> None:
    """Does not wait. Raises OSError."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    by.sendmsg([word], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive_descriptors(
    by: socket.socket, size: int, most: int, flags: int = 0
) -> tuple[bytes, tuple[int, ...]]:
    """A word of at most `size` bytes, and its descriptors; none if not all of them could be received. Raises
    OSError."""
    room = socket.CMSG_LEN(most * _INT_BYTES)
    word, rights, told, _ = by.recvmsg(size, room, flags | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    if told & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        return word, ()
    return word, tuple(fds)
