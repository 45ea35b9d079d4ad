"""Checks MCP between a server and a host of its own.

The host may speak a revision that we do not know, so the shape of the handshake's answer is checked and not
its version. A server may leave `server/discover` unanswered, so only `initialize` has a time limit. A
modern host may send neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.mcp import versions as era
from runner.contracts.mcp.dialect import FRAME_LIMIT, MOST_IN_BATCH
from runner.contracts.mcp.handshake import handshake_seconds
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.observer import Answered, Observer

# The keys of a handshake's answer that are read.
_WORDS = frozenset(("protocolVersion", "capabilities", "serverInfo", "supportedVersions"))
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
        self._observer = Observer(
            _WORDS, frozenset((DISCOVER, INITIALIZE)), handshakes=frozenset((INITIALIZE,))
        )
        self._batches = False
        self.handshaken = False
        self.awaiting = False

    @property
    def strays(self) -> Mapping[str, int]:
        return self._observer.strays

    def host_frame(self, raw: bytes | None) -> None:
        for asked in self._observer.host(raw):
            if asked.method == INITIALIZE:
                self.awaiting = asked.is_question and not self.handshaken
            elif asked.is_question and not self.awaiting and asked.method not in (DISCOVER, "ping"):
                self.handshaken = self._observer.settled = True  # the host uses no handshake

    def plugin_frame(self, raw: bytes) -> Violation | None:
        heard = self._observer.plugin(raw, batch=MOST_IN_BATCH if self._batches else 0)
        if isinstance(heard, Violation):
            return heard
        for one in heard:
            if isinstance(one, Answered) and one.method in (DISCOVER, INITIALIZE):
                fault = self._handshake_answered(one)
                if fault is not None:
                    return fault
        return None

    def _handshake_answered(self, answer: Answered) -> Violation | None:
        if answer.method == INITIALIZE:
            self.awaiting = False
        if answer.error is not None:
            return None  # an error is a valid answer, and the host decides what to do about it
        if answer.method == DISCOVER:
            fault = _not_discovered(answer.result)
        else:
            read = (
                era.initialized(self._plugin.id, answer.result)
                if isinstance(answer.result, dict)
                else "no object"
            )
            fault = read if isinstance(read, str) else ""
            self._batches = not isinstance(read, str) and read.protocol == era.WITH_BATCHES
        if fault:
            message = f"the answer to {answer.method} breaks the protocol: {fault}"
            return Violation("handshake_failed", message, f"bad_{answer.method.rpartition('/')[2]}_result")
        self.handshaken = True
        return None


def _not_discovered(result: Any) -> str:
    """The fault of the answer to server/discover; empty if it has none."""
    if not isinstance(result, dict):
        return "no object"
    versions = result.get("supportedVersions")
    if (
        not isinstance(versions, list)
        or not all(isinstance(version, str) for version in versions)
        or not versions
    ):
        return "supportedVersions is not a list of versions"
    return "" if isinstance(result.get("capabilities"), dict) else "capabilities is not an object"
