"""What `runner exec --inspect` needs from a contract to check the messages of a plugin and its own host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from runner.protocol.dialect import HandshakeFault
from runner.protocol.framing import Framing
from runner.protocol.rpc_reader import Heard, RpcReader, Statement, Verdict


class Inspector(Protocol):
    """Reads both sides of one conversation, and judges the plugin's as the contract's dialect does. It sends
    nothing."""

    @property
    def framing(self) -> Framing:
        """How plugin and host frame their messages."""
        ...

    @property
    def handshake_seconds(self) -> float:
        """How long the contract gives the plugin to answer the handshake."""
        ...

    @property
    def handshake_is_raisable(self) -> bool:
        """Whether the grant may give it more time than that."""
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
        """The number of frames that a session drops, by kind."""
        ...

    def host_frame(self, raw: bytes | None) -> None:
        """A frame from the host. None: it was too long to read."""
        ...

    def plugin_frame(self, raw: bytes) -> Verdict:
        """Check a frame from the plugin. None: it is passed on."""
        ...


class HandshakeInspector:
    """The inspector of a JSON-RPC contract whose host sends one handshake, which the plugin answers."""

    handshake_is_raisable = False

    def __init__(self, reader: RpcReader, handshake: str) -> None:
        self._reader = reader
        self._handshake = handshake
        self.handshaken = False
        self.awaiting = False

    @property
    def strays(self) -> Mapping[str, int]:
        return self._reader.strays

    def host_frame(self, raw: bytes | None) -> None:
        for asked in self._reader.host(raw):
            if asked.method == self._handshake and asked.is_request and not self.handshaken:
                self.awaiting = True

    def plugin_frame(self, raw: bytes) -> Verdict:
        return self._reader.plugin(raw, self._fault_of)

    def _fault_of(self, heard: Heard) -> Verdict:
        if isinstance(heard, Statement):
            return self._asked(heard)
        if heard.method != self._handshake:
            return None
        self.awaiting = False
        if heard.error is not None:
            return None  # the host sees the error itself
        try:
            self._check_handshake_answer(heard.result)
        except HandshakeFault as fault:
            return fault.violation
        self.handshaken = True
        return None

    def _check_handshake_answer(self, result: Any) -> None:
        """The plugin's answer to the handshake. Raises HandshakeFault."""
        raise NotImplementedError

    def _asked(self, question: Statement) -> Verdict:
        """The verdict about a request or a notification of the plugin."""
        return None
