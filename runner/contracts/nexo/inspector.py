"""Checks nexo between a plugin and a host of its own: its identity, its tools, and its topics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.contracts.nexo import handshake, timeouts, topics
from runner.contracts.nexo.dialect import FRAME_LIMIT
from runner.protocol.dialect import HandshakeFault, Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.inspector import HandshakeInspector
from runner.protocol.observer import Observer, Question, odd_key
from sandbox.document.diagnostic import quoted

# The keys of the plugin's messages that are read, here and in handshake.py.
_OUTER_WORDS = frozenset(("topic", "event", "manifest", "tools"))
_WORDS = frozenset(("topic", "plugin", "id", "name"))
INITIALIZE, PUBLISH = "initialize", "broker.publish"


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector(HandshakeInspector):
    framing = LineFraming(FRAME_LIMIT)

    def __init__(self, setting: Setting) -> None:
        super().__init__(Observer(_OUTER_WORDS, frozenset((INITIALIZE, PUBLISH))), INITIALIZE)
        self._plugin = setting.plugin
        self._topics = topics.read_topics(setting.plugin)
        # The host started the runner, so the host's variables are in the runner's environment.
        self.handshake_seconds = timeouts.read_timeouts(setting.environ).seconds("initialize")

    def _check_handshake_answer(self, result: Any) -> None:
        if odd := next(filter(None, (odd_key(table, _WORDS) for table in _described(result))), ""):
            raise HandshakeFault(Violation("malformed_response", odd, "ambiguous"))
        handshake.read_handshake_answer(result, self._plugin)

    def _asked(self, question: Question) -> Violation | None:
        return self._published(question.params) if question.method == PUBLISH else None

    def _published(self, params: Any) -> Violation | None:
        given = params if isinstance(params, dict) else {}
        topic, event = given.get("topic"), given.get("event")
        for name, part in (("params", params), ("event", event)):
            if part is not None and not isinstance(part, dict):
                # Rust's serde, for one, reads an array as the fields of a struct in order.
                message = f"{PUBLISH} whose {name} is not an object: some hosts find a topic there"
                return Violation("malformed_response", message, "ambiguous")
        if odd := odd_key(event, _WORDS):
            return Violation("malformed_response", odd, "ambiguous")
        if not isinstance(topic, str) or not topic:
            self._observer.stray("no_topic")  # no host can publish it
            return None
        # Some hosts take the topic from the event itself.
        inner = event.get("topic", topic) if isinstance(event, dict) else topic
        for name in (topic, inner):
            if not isinstance(name, str) or not self._topics.admits(name):
                shown = quoted(name[:200]) if isinstance(name, str) else "what is not a topic"
                message = f"it publishes to {shown}, which its manifest does not ask for"
                hint = "name the topic in [plugin.capabilities.broker] publish, or the channel it belongs to"
                return Violation("capability_not_allowed", message, "topic", hint)
        return None


def _described(result: Any) -> Iterator[Any]:
    """The parts of the answer to initialize that name the plugin and its tools."""
    if isinstance(result, dict):
        manifest = result.get("manifest")
        yield manifest
        yield manifest.get("plugin") if isinstance(manifest, dict) else None
        tools = result.get("tools")
        yield from tools if isinstance(tools, list) else ()
