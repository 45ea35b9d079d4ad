"""Make the socket of the ssh agent in a cage, and hand it to the process that serves it.

Runs between the clone and the exec, after the temporary folders were mounted. The socket is a file of the
tmpfs that they are in, which only the cell has: nothing of it is left on the host, however the cell ends.
bwrap binds its folder read-only, so the plugin can connect and can put nothing else there.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import struct
import time

from sandbox.spawn.order import AGENT_FOLDER, AGENT_READY, AgentOrder

_BACKLOG_CONNECTIONS = 64
_READY_SECONDS = 10.0  # how long the agent may take to get ready, if the launch has no limit


def make_agent_socket(order: AgentOrder) -> None:
    """Returns when the agent is confined and serves. Raises OSError if it ends or takes too long."""
    path = f"{AGENT_FOLDER}/{order.name}"
    os.mkdir(AGENT_FOLDER, 0o755)
    kind = _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
    listener = _socket.socket(_socket.AF_UNIX, kind, 0)
    channel = _socket.socket(fileno=order.channel)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG_CONNECTIONS)
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("=i", listener.fileno()))
        channel.sendmsg([b"l"], [rights])
        listener.close()
        left = _READY_SECONDS if order.until is None else order.until - time.monotonic()
        watch = select.poll()
        watch.register(order.channel, select.POLLIN)
        if not watch.poll(max(0.0, left) * 1000):
            raise OSError(errno.ETIMEDOUT, "")
        if channel.recv(1) != AGENT_READY:
            raise OSError(errno.ECONNREFUSED, "")  # it has ended
    finally:
        listener.close()
        channel.close()
