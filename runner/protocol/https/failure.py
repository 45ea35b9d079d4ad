"""The failure of a request to a server."""

from __future__ import annotations

from typing import Literal

# invalid      the request itself cannot be sent: a wrong URL, method or header
# denied       no rule allows the host, or its address must not be dialled; also for a redirect
# unreachable  no address, no connection, or no certificate for the name
# timeout      the time for the whole request is over
# too_large    the answer, or the request, has more bytes than are allowed
# protocol     the server sent something that is not an HTTP/1.1 answer, or not all of it
Kind = Literal["invalid", "denied", "unreachable", "timeout", "too_large", "protocol"]


class FetchFailed(Exception):
    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind
