"""Checks nexo between a plugin and a host of its own: its identity, its tools, and its topics."""

from __future__ import annotations

from typing import Any

from runner.contracts.nexo import handshake, timeouts, topics
from runner.contracts.nexo.dialect import FRAME_LIMIT
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import Setting
from runner.protocol.framing import LineFraming
from runner.protocol.inspector import HandshakeInspector
from runner.protocol.observer import Observer, Question, Verdict, Withheld
from sandbox.document.diagnostic import quoted

# The keys of a publication that are read, and those of the event in it.
_OUTER_WORDS, _WORDS = frozenset(("topic", "event")), frozenset(("topic",))
INITIALIZE, PUBLISH = "initialize", "broker.publish"


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector(HandshakeInspector):
    framing = LineFraming(FRAME_LIMIT)

    def __init__(self, setting: Setting) -> None:
        super().__init__(Observer(frozenset((INITIALIZE, PUBLISH)), null_results=True), INITIALIZE)
        self._plugin = setting.plugin
        self._topics = topics.read_topics(setting.plugin)
        # The host started the runner, so the host's variables are in the runner's environment.
        self.handshake_seconds = timeouts.read_timeouts(setting.environ).seconds("initialize")

    def _check_handshake_answer(self, result: Any) -> None:
        handshake.read_handshake_answer(result, self._plugin)

    def _asked(self, question: Question) -> Verdict:
        return self._published(question.params) if question.method == PUBLISH else None

    def _published(self, params: Any) -> Withheld | None:
        """A session drops a publication that the manifest does not ask for, and goes on."""
        if not self.handshaken:
            return Withheld("not_yet_wired", f"{PUBLISH} before the answer to {INITIALIZE}")
        given = params if isinstance(params, dict) else {}
        topic, event = given.get("topic"), given.get("event")
        for name, part in (("params", params), ("event", event)):
            if part is not None and not isinstance(part, dict):
                # Rust's serde, for one, reads an array as the fields of a struct in order.
                why = f"{PUBLISH} whose {name} is not an object: some hosts find a topic there"
                return Withheld("ambiguous", why)
        if odd := odd_key(params, _OUTER_WORDS) or odd_key(event, _WORDS):
            return Withheld("ambiguous", odd)
        if not isinstance(topic, str) or not topic:
            self._observer.stray("no_topic")  # no host can publish it
            return None
        # Some hosts take the topic from the event itself.
        inner = event.get("topic", topic) if isinstance(event, dict) else topic
        for name in (topic, inner):
            if not isinstance(name, str) or not self._topics.admits(name):
                shown = quoted(name[:200]) if isinstance(name, str) else "what is not a topic"
                return Withheld("topic", f"it publishes to {shown}, which its manifest does not ask for")
        return None
