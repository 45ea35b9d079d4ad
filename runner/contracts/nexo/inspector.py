"""Checks nexo between a plugin and a host of its own: its identity, its tools, and its topics."""

from __future__ import annotations

from typing import Any

from runner.contracts.nexo import events, handshake, timeouts, topics
from runner.contracts.nexo.dialect import FRAME_LIMIT
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import Setting
from runner.protocol.framing import LineFraming
from runner.protocol.inspector import HandshakeInspector
from runner.protocol.rpc_reader import RpcReader, Statement, Verdict, Withheld

# The keys of a publication that are read, and those of the event in it.
_OUTER_WORDS, _WORDS = frozenset(("topic", "event")), frozenset(("topic",))
INITIALIZE, PUBLISH = "initialize", "broker.publish"
_NO_STAMP = events.Stamp("", "")


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector(HandshakeInspector):
    framing = LineFraming(FRAME_LIMIT)

    def __init__(self, setting: Setting) -> None:
        super().__init__(RpcReader(frozenset((INITIALIZE, PUBLISH)), null_results=True), INITIALIZE)
        self._plugin = setting.plugin
        self._topics = topics.read_topics(setting.plugin)
        # The host started the runner, so the host's variables are in the runner's environment.
        self.handshake_seconds = timeouts.read_timeouts(setting.environ).seconds("initialize")

    def _check_handshake_answer(self, result: Any) -> None:
        handshake.read_handshake_answer(result, self._plugin)

    def _asked(self, question: Statement) -> Verdict:
        return self._published(question.params) if question.method == PUBLISH else None

    def _published(self, params: Any) -> Withheld | None:
        """A session drops a publication that the manifest does not ask for, and goes on."""
        if not self.handshaken:
            return Withheld("not_yet_wired", f"{PUBLISH} before the answer to {INITIALIZE}")
        given = params if isinstance(params, dict) else {}
        event: Any = given.get("event")
        if odd := odd_key(given, _OUTER_WORDS) or odd_key(event, _WORDS):
            return Withheld("ambiguous", odd)
        _, reason = events.accept(given, self._plugin.id, self._topics, lambda: _NO_STAMP)
        if reason:
            return Withheld(reason, f"{PUBLISH} that a session drops: {reason}")
        # Some hosts take the topic from the event itself.
        inner = event.get("topic", given["topic"])
        if not isinstance(inner, str) or not self._topics.admits(inner):
            return Withheld("not_allowed", "the event itself has a topic that its manifest does not ask for")
        return None
