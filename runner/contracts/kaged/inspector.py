"""Checks the messages between a plugin and a kaged daemon: every line, and the plugin's answer to initialize.

What the daemon says is not judged. A session drops notifications that the manifest does not list, and more
than 100 in a second. They are withheld here.
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
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.inspector import HandshakeInspector
from runner.protocol.rpc_reader import RpcReader, Statement, Verdict, Withheld

INITIALIZE = "initialize"


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector(HandshakeInspector):
    framing = LineFraming(FRAME_LIMIT)

    def __init__(self, setting: Setting, clock: Callable[[], float] = time.monotonic) -> None:
        reader = RpcReader(frozenset((INITIALIZE,)), judge=_judge_line, one_kind=True, null_results=True)
        super().__init__(reader, INITIALIZE)
        self._plugin = setting.plugin
        self._clock = clock
        self._declared = declared_by(setting.plugin).notifications
        self._rate = Notifications(self._declared)

    @property
    def handshake_seconds(self) -> float:
        return dict(self._plugin.timeouts).get("handshake", HANDSHAKE_SECONDS)

    def _check_handshake_answer(self, result: Any) -> None:
        handshake.read_handshake_answer(result, self._plugin)

    def _asked(self, question: Statement) -> Verdict:
        if question.is_request:
            return None
        if not self._rate.admits(self._clock()):
            return Withheld("rate", f"a plugin may send {PER_SECOND} notifications a second")
        if question.method not in self._declared:
            return Withheld("undeclared", "a notification that its manifest does not list")
        return None


def _judge_line(value: Any, cause: str | None, detail: str) -> Violation | None:
    return judge_unreadable(cause, detail) if cause is not None else judge_message(value)
