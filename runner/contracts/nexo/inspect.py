"""nexo between a plugin and a host of its own: who answers, with which tools, and where it publishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.nexo import clocks, handshake, topics
from runner.contracts.nexo.dialect import FRAME_LIMIT
from runner.dialect import Setting, Violation
from runner.overheard import Answered, Overheard
from sandbox.diagnostic import quoted


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector:
    limit = FRAME_LIMIT

    def __init__(self, setting: Setting) -> None:
        self._overheard = Overheard()
        self._plugin = setting.plugin
        self._topics = topics.of(setting.plugin)
        # The host's variables are the runner's: it was started by it.
        self.handshake_seconds = clocks.of(setting.environ).seconds("initialize")
        self.handshaken = False
        self.awaiting = False

    @property
    def strays(self) -> Mapping[str, int]:
        return self._overheard.strays

    def host_frame(self, raw: bytes | None) -> None:
        for asked in self._overheard.host(raw):
            if asked.method == "initialize" and asked.is_question and not self.handshaken:
                self.awaiting = True

    def plugin_frame(self, raw: bytes) -> Violation | None:
        heard = self._overheard.plugin(raw)
        if isinstance(heard, Violation):
            return heard
        for one in heard:
            fault = None
            if isinstance(one, Answered):
                if one.method == "initialize":
                    fault = self._shaken(one)
            elif one.method == "broker.publish":
                fault = self._published(one.params)
            if fault is not None:
                return fault
        return None

    def _shaken(self, answer: Answered) -> Violation | None:
        self.awaiting = False
        if answer.error is not None:
            return None  # the host sees that it refuses, and knows what to do
        try:
            handshake.welcome(answer.result, self._plugin)
        except handshake.HandshakeFault as fault:
            return Violation("handshake_failed", str(fault), fault.cause, fault.hint)
        self.handshaken = True
        return None

    def _published(self, params: Any) -> Violation | None:
        given = params if isinstance(params, dict) else {}
        topic, event = given.get("topic"), given.get("event")
        if not isinstance(topic, str) or not topic:
            self._overheard.stray("no_topic")  # which no host can publish
            return None
        # A host that goes by the event's own word would publish there.
        inner = event.get("topic", topic) if isinstance(event, dict) else topic
        for name in (topic, inner):
            if not isinstance(name, str) or not self._topics.admits(name):
                shown = quoted(name[:200]) if isinstance(name, str) else "what is no topic"
                message = f"it publishes to {shown}, which its manifest does not ask for"
                hint = "name the topic in [plugin.capabilities.broker] publish, or the channel it belongs to"
                return Violation("capability_not_allowed", message, "topic", hint)
        return None
