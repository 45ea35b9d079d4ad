"""Checks the messages between a plugin and a kaged daemon: every line, and the plugin's answer to initialize.

What the daemon says is not judged. A notification that the manifest does not list is counted: the daemon
drops it.
"""

from __future__ import annotations

from typing import Any

from runner.contracts.kaged import handshake
from runner.contracts.kaged.declared import declared_by
from runner.contracts.kaged.dialect import FRAME_LIMIT
from runner.contracts.kaged.terms import HANDSHAKE_SECONDS
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.inspector import HandshakeInspector
from runner.protocol.observer import Observer, Question

# The keys of the answer to initialize that are read.
_WORDS = frozenset(("name", "version", "api_version", "methods", "notifications", "capabilities_used"))
INITIALIZE = "initialize"


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector(HandshakeInspector):
    framing = LineFraming(FRAME_LIMIT)

    def __init__(self, setting: Setting) -> None:
        observer = Observer(_WORDS, frozenset((INITIALIZE,)), messages_only=True)
        super().__init__(observer, INITIALIZE)
        self._plugin = setting.plugin
        self._notifications = frozenset(declared_by(setting.plugin).notifications)

    @property
    def handshake_seconds(self) -> float:
        return dict(self._plugin.timeouts).get("handshake", HANDSHAKE_SECONDS)

    def _check_handshake_answer(self, result: Any) -> None:
        handshake.read_handshake_answer(result, self._plugin)

    def _asked(self, question: Question) -> Violation | None:
        if not question.is_question and question.method not in self._notifications:
            self._observer.stray("undeclared")
        return None
