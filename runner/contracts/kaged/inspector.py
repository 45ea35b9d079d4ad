"""Checks the messages between a plugin and a kaged daemon: every line, and the plugin's answer to initialize.

What the daemon says is not judged. A notification that the manifest does not list is counted: the daemon
drops it.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.contracts.kaged import HANDSHAKE_SECONDS, handshake
from runner.contracts.kaged.declared import declared_by
from runner.contracts.kaged.dialect import FRAME_LIMIT
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.observer import Answered, Observer

# The keys of the answer to initialize that are read.
_WORDS = frozenset(("name", "version", "api_version", "methods", "notifications", "capabilities_used"))
INITIALIZE = "initialize"


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector:
    framing = LineFraming(FRAME_LIMIT)

    def __init__(self, setting: Setting) -> None:
        self._plugin = setting.plugin
        self._notifications = frozenset(declared_by(setting.plugin).notifications)
        self._observer = Observer(_WORDS, frozenset((INITIALIZE,)), messages_only=True)
        self.handshaken = False
        self.awaiting = False

    @property
    def handshake_seconds(self) -> float:
        return dict(self._plugin.timeouts).get("handshake", HANDSHAKE_SECONDS)

    @property
    def strays(self) -> Mapping[str, int]:
        return self._observer.strays

    def host_frame(self, raw: bytes | None) -> None:
        for asked in self._observer.host(raw):
            if asked.method == INITIALIZE and asked.is_question and not self.handshaken:
                self.awaiting = True

    def plugin_frame(self, raw: bytes) -> Violation | None:
        heard = self._observer.plugin(raw)
        if isinstance(heard, Violation):
            return heard
        for one in heard:
            if isinstance(one, Answered):
                if one.method == INITIALIZE and (fault := self._shaken(one)) is not None:
                    return fault
            elif not one.is_question and one.method not in self._notifications:
                self._observer.stray("undeclared")
        return None

    def _shaken(self, answer: Answered) -> Violation | None:
        self.awaiting = False
        if answer.error is not None:
            return None  # the host sees the error itself
        try:
            handshake.read_welcome(answer.result, self._plugin)
        except handshake.HandshakeFault as fault:
            return fault.violation
        self.handshaken = True
        return None
