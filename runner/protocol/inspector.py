"""What `runner exec --inspect` needs from a contract to check the messages of a plugin and its own host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from runner.protocol.dialect import Violation
from runner.protocol.framing import Framing


class Inspector(Protocol):
    """Reads both sides of one conversation. It sends nothing and has no clock."""

    @property
    def framing(self) -> Framing:
        """How plugin and host frame their messages."""
        ...

    @property
    def handshake_seconds(self) -> float:
        """How long the contract gives the plugin to answer the handshake."""
        ...

    @property
    def handshaken(self) -> bool:
        """Whether the plugin has answered the handshake."""
        ...

    @property
    def awaiting(self) -> bool:
        """Whether the host has asked for the handshake and has no answer yet."""
        ...

    @property
    def strays(self) -> Mapping[str, int]:
        """The number of frames that were passed on without a meaning in this contract, by kind."""
        ...

    def host_frame(self, raw: bytes | None) -> None:
        """A frame from the host. None: it was too long to read."""
        ...

    def plugin_frame(self, raw: bytes) -> Violation | None:
        """Check a frame from the plugin; returns its fault, or None."""
        ...
