"""Checks rterm.plugin.v1 between a plugin and a host of its own, as the dialect does."""

from __future__ import annotations

from collections.abc import Mapping

from runner.contracts.rune.dialect import RuneDialect
from runner.contracts.rune.exchange import LINE_LIMIT
from runner.protocol import wire
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.rpc_reader import Rewritten, Verdict, Withheld


def make(setting: Setting) -> Inspector:
    return Inspector(setting._replace(call=None))


class Inspector(RuneDialect):
    """Reads the plugin's lines as the dialect does, and the host's requests for their ids."""

    framing = LineFraming(LINE_LIMIT, spare=1)  # for a carriage return

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._addressed = False
        self._asked = False  # the host has sent a request, even one we could not read
        self._strays: dict[str, int] = {}

    @property
    def handshaken(self) -> bool:
        return self._stage != "silent"

    @property
    def awaiting(self) -> bool:
        return self._addressed and self._stage == "silent"

    @property
    def strays(self) -> Mapping[str, int]:
        return self._strays

    def _count(self, kind: str) -> None:
        self._strays[kind] = self._strays.get(kind, 0) + 1

    def host_frame(self, raw: bytes | None) -> None:
        self._addressed = True
        value = None if raw is None else wire.message(raw).value
        if raw is None or (isinstance(value, dict) and value.get("type") == "request"):
            said = value.get("request_id") if isinstance(value, dict) else None
            if not self._asked:
                self._request_id = said if isinstance(said, str) else None
            self._asked = True

    def plugin_frame(self, raw: bytes) -> Verdict:
        message = self.read(raw)
        if self._stage in ("answered", "over"):
            # A session ignores further output. Another host might take it for an answer.
            if message.fault == "blank_line":
                self._count("blank")
                return None
            self._count("after_response")
            return Withheld("after_response", "it writes more after its response, which is its last line")
        if (
            self._stage == "ready"
            and self._asked
            and self._request_id is None
            and isinstance(message.value, dict)
        ):
            # The request was too long for us to read, so the host has to compare the id.
            said = message.value.get("request_id")
            self._request_id = said if isinstance(said, str) else None
        fault = next((event for event in self.feed(message) if isinstance(event, Violation)), None)
        if fault is None and wire.message(raw, unique=True).cause == "duplicate_key":
            return Rewritten(wire.encode(message.value))  # of two equal keys, the last one counts
        return fault
