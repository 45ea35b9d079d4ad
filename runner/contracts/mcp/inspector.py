"""Checks MCP between a server and a host of its own.

The host may speak a revision that we do not know, so the shape of the handshake's answer is checked and not
its version. A server may leave `server/discover` unanswered, so only `initialize` has a time limit. A
modern host may send neither.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.contracts.mcp import versions as era
from runner.contracts.mcp.dialect import FRAME_LIMIT, MOST_IN_BATCH, fault_of_id, repeated_id
from runner.contracts.mcp.handshake import bad_initialize_result, handshake_seconds
from runner.contracts.mcp.pending_call import INPUTS
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.rpc_reader import Answered, Heard, RpcReader, Statement, Verdict

DISCOVER, INITIALIZE = "server/discover", "initialize"


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector:
    framing = LineFraming(FRAME_LIMIT)
    handshake_is_raisable = True

    def __init__(self, setting: Setting) -> None:
        self._plugin = setting.plugin
        self.handshake_seconds = handshake_seconds(setting)
        # After server/discover a host may still send initialize.
        self._reader = RpcReader(
            frozenset((DISCOVER, INITIALIZE)),
            handshakes=frozenset((INITIALIZE,)),
            versioned=True,
            one_kind=True,
        )
        self._batches = self._legacy = False
        self.handshaken = False
        self.awaiting = False

    @property
    def strays(self) -> Mapping[str, int]:
        return self._reader.strays

    def host_frame(self, raw: bytes | None) -> None:
        for asked in self._reader.host(raw):
            if asked.method == INITIALIZE:
                self.awaiting = asked.is_request and not self.handshaken
            elif asked.is_request and not self.awaiting and asked.method not in (DISCOVER, "ping"):
                self.handshaken = self._reader.settled = True  # the host uses no handshake

    def plugin_frame(self, raw: bytes) -> Verdict:
        return self._reader.plugin(raw, self._fault_of, batch=MOST_IN_BATCH if self._batches else 0)

    def _fault_of(self, heard: Heard) -> Violation | None:
        if isinstance(heard, Statement):
            return self._asked(heard)
        return self._handshake_answered(heard) if heard.method in (DISCOVER, INITIALIZE) else None

    def _asked(self, question: Statement) -> Violation | None:
        if not question.is_request:
            if question.method == "notifications/cancelled" and isinstance(question.params, dict):
                self._reader.forget_question(question.params.get("requestId"))
            return None
        if fault := fault_of_id(question.method, question.number):
            return fault
        if question.again and self._legacy and question.method in INPUTS:
            return repeated_id(question.number)
        return None

    def _handshake_answered(self, answer: Answered) -> Violation | None:
        if answer.method == INITIALIZE:
            self.awaiting = False
        if answer.error is not None:
            return None  # an error is a valid answer, and the host decides what to do about it
        if answer.method == DISCOVER:
            # Another answer means that the server is not modern: then a host sends initialize.
            self.handshaken = self.handshaken or era.discovered(self._plugin.id, answer.result) is not None
            return None
        read = era.initialized(self._plugin.id, answer.result)
        if isinstance(read, str):
            return bad_initialize_result(read)
        self._batches = read.protocol == era.WITH_BATCHES
        self._legacy = self.handshaken = True
        return None
