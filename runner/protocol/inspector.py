"""What `runner exec --inspect` needs from a contract to check what a plugin and its own host say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from runner.protocol.dialect import Violation


class Inspector(Protocol):
    """Reads both sides of one conversation. It sends nothing and has no clock."""

    @property
    def limit(self) -> int:
        """The longest line the plugin may write, in bytes."""
        ...

    @property
    def spare(self) -> int:
        """Bytes beyond `limit` that a line may have without being counted: a carriage return."""
        ...

    @property
    def handshake_seconds(self) -> float:
        """How long the contract gives the plugin to answer the handshake."""
        ...

    @property
    def handshaken(self) -> bool:
        """The plugin has answered the handshake."""
        ...

    @property
    def awaiting(self) -> bool:
        """The host has asked for the handshake and has no answer yet."""
        ...

    @property
    def strays(self) -> Mapping[str, int]:
        """Frames that were passed on and mean nothing in this contract: how many, by kind."""
        ...

    def host_frame(self, raw: bytes | None) -> None:
        """A frame from the host. None: it was too long to be read."""
        ...

    def plugin_frame(self, raw: bytes) -> Violation | None:
        """A frame from the plugin, and what is wrong with it."""
        ...
