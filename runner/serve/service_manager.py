"""What a daemon and its service manager tell each other: readiness, the watchdog, and sockets that it gets.

sd_notify(3) and sd_listen_fds(3) are one datagram and two variables.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping

_FIRST_FD = 3
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)


class Notifier:
    """Sends states to the service manager. Without one it does nothing."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # A name that begins with @ is in the abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, *states: str) -> None:
        """Send states such as "READY=1". A manager that does not listen is ignored, as sd_notify does."""
        if not self._address.startswith(("/", "\0")):
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(states).encode(), self._address)
        except OSError:
            pass


def watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """How often WATCHDOG=1 has to be sent: half of the manager's limit. None: it does not watch."""
    limit, owner = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not limit.isascii() or not limit.isdigit() or not int(limit) or owner not in ("", str(os.getpid())):
        return None
    return int(limit) / 2e6


def take_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The listening sockets that the service manager opened for this process, and only for it: the variables
    are removed, and no plugin inherits the descriptors. Raises ValueError."""
    owner, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if owner != str(os.getpid()) or not count:
        return []
    if not count.isascii() or not count.isdigit() or len(count) > 9:
        raise ValueError(f"LISTEN_FDS={count[:60]}: it has to be a number; unset LISTEN_FDS and LISTEN_PID")
    found = []
    for fd in range(_FIRST_FD, _FIRST_FD + int(count)):
        try:
            os.set_inheritable(fd, False)
            given = socket.socket(fileno=fd)
            found.append(given)
            if given.family not in _FAMILIES or not given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError(0, "it does not listen for streams")
        except OSError as error:
            message = f"LISTEN_FDS={count}: descriptor {fd} is not a socket of the service manager's"
            raise ValueError(f"{message} ({error.strerror}); unset LISTEN_FDS and LISTEN_PID") from None
    return found
