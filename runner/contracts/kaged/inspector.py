"""Checks the messages between a plugin and a kaged daemon: every line, and the plugin's answer to initialize.

What the daemon says is not judged. A notification that the manifest does not list is counted: the daemon
drops it. More than 100 notifications in a second are withheld, as a session drops them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from runner.contracts.kaged import handshake
from runner.contracts.kaged.declared import declared_by
from runner.contracts.kaged.dialect import FRAME_LIMIT, judge_message, judge_unreadable
from runner.contracts.kaged.notifications import PER_SECOND, Notifications
from runner.contracts.kaged.terms import HANDSHAKE_SECONDS
from runner.protocol.ambiguity import odd_key, two_kinds
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.inspector import HandshakeInspector
from runner.protocol.jsonrpc import IDENTITY
from runner.protocol.observer import Observer, Question, Verdict, Withheld

INITIALIZE = "initialize"


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector(HandshakeInspector):
    framing = LineFraming(FRAME_LIMIT)

    def __init__(self, setting: Setting, clock: Callable[[], float] = time.monotonic) -> None:
        observer = Observer(frozenset((INITIALIZE,)), judge=_judge_line, one_kind=True, null_results=True)
        super().__init__(observer, INITIALIZE)
        self._plugin = setting.plugin
        self._clock = clock
        self._declared = declared_by(setting.plugin).notifications
        self._rate = Notifications(self._declared)

    @property
    def handshake_seconds(self) -> float:
        return dict(self._plugin.timeouts).get("handshake", HANDSHAKE_SECONDS)

    def _check_handshake_answer(self, result: Any) -> None:
        handshake.read_handshake_answer(result, self._plugin)

    def _asked(self, question: Question) -> Verdict:
        if question.is_question:
            return None
        if not self._rate.admits(self._clock()):
            return Withheld("rate", f"a plugin may send {PER_SECOND} notifications a second")
        if question.method not in self._declared:
            self._observer.stray("undeclared")
        return None


def _judge_line(value: Any, cause: str | None, detail: str) -> Violation | Withheld | None:
    if cause is not None:
        return judge_unreadable(cause, detail)
    if (fault := judge_message(value)) is not None:
        return fault
    if odd_key(value, IDENTITY) or two_kinds(value):
        return None  # the observer knows these for a breach, which counts for more
    if not value.get("method") and type(value["id"]) in (bool, list, dict):
        # A session takes it for an unknown id. JavaScript finds the same entry of a table for 1 and for [1].
        return Withheld("unasked", "an answer whose id is neither a number nor a string")
    return None
