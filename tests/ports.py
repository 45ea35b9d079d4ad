"""Ports for servers that are told where to listen, and that may be started there again.

The kernel gives nobody such a port: they lie below those of clients and of servers that ask for any. Each
xdist worker has its own, and takes none twice until it has taken all.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from pathlib import Path

_EACH = 500  # ports of one worker
_LOWEST = 10_000
_WORKER = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
_turn = itertools.count(os.getpid())  # another run beside this one begins elsewhere


def free_port() -> int:
    """A port of 127.0.0.1 where nobody listens."""
    beyond = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    parts = (beyond - _LOWEST) // _EACH
    for _ in range(_EACH):
        # A machine that gives all ports away has none to choose from.
        own = 0 if parts <= 0 else beyond - _EACH * (_WORKER % parts) - 1 - next(_turn) % _EACH
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also after a server that was killed
            try:
                probe.bind(("127.0.0.1", own))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError(f"{_EACH} ports below {beyond} are in use")
