"""Checks rterm.plugin.v1 between a plugin and a host of its own, as the dialect does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.rune.dialect import RuneDialect
from runner.contracts.rune.exchange import LINE_LIMIT
from runner.protocol import wire
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.observer import hides_message, odd_key

# The keys of a handshake and of a response that are read.
_WORDS = frozenset(
    (
        *("type", "manifest", "plugin_id", "plugin_version", "protocol_version", "exposed_tools"),
        *("capabilities", "request_id", "status", "output", "error", "code", "message", "metadata"),
    )
)


def make(setting: Setting) -> Inspector:
    return Inspector(setting._replace(call=None))


class Inspector(RuneDialect):
    """Reads the plugin's lines as the dialect does, and the host's requests for their ids."""

    framing = LineFraming(LINE_LIMIT, spare=1)  # for a carriage return

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._addressed = False
        self._asked = False  # the host has sent a request, even one we could not read
        self._blanks = 0

    @property
    def handshaken(self) -> bool:
        return self._stage != "silent"

    @property
    def awaiting(self) -> bool:
        return self._addressed and self._stage == "silent"

    @property
    def strays(self) -> Mapping[str, int]:
        return {"blank": self._blanks} if self._blanks else {}

    def host_frame(self, raw: bytes | None) -> None:
        self._addressed = True
        value = None if raw is None else wire.message(raw).value
        if raw is None or (isinstance(value, dict) and value.get("type") == "request"):
            said = value.get("request_id") if isinstance(value, dict) else None
            if not self._asked:
                self._request_id = said if isinstance(said, str) else None
            self._asked = True

    def plugin_frame(self, raw: bytes) -> Violation | None:
        if hides_message(raw, is_json=True, is_message=lambda value: isinstance(value, dict)):
            text = "some hosts would read this line as more than one"
            return Violation("malformed_response", text, "ambiguous")
        message = self.read(raw)
        if fault := _double_meaning(raw, message.value):
            return fault
        if self._stage in ("answered", "over"):
            # A session ignores further output. Another host might take it for an answer.
            if message.fault == "blank_line":
                self._blanks += 1
                return None
            text = "it writes more after its response, which has to be its last line"
            return Violation("malformed_response", text, "after_response")
        if (
            self._stage == "ready"
            and self._asked
            and self._request_id is None
            and isinstance(message.value, dict)
        ):
            # The request was too long for us to read, so the host has to compare the id.
            said = message.value.get("request_id")
            self._request_id = said if isinstance(said, str) else None
        return next((event for event in self.feed(message) if isinstance(event, Violation)), None)


def _double_meaning(raw: bytes, value: Any) -> Violation | None:
    """A line that two hosts could read differently: a key twice, or in capital letters."""
    if not isinstance(value, dict):
        return None
    _, cause, detail, _ = wire.message(raw, unique=True)
    if cause == "duplicate_key":
        return Violation("malformed_response", f"a line that breaks the protocol: {detail}", cause)
    parts = (value, value.get("manifest"), value.get("error"), value.get("metadata"))
    odd = next(filter(None, (odd_key(part, _WORDS) for part in parts)), "")
    return Violation("malformed_response", odd, "ambiguous") if odd else None
