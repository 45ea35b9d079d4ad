"""The first line of a toy has to be its hello."""

from runner.contracts.toy.dialect import LINE_LIMIT

from runner.protocol import wire
from runner.protocol.dialect import Violation
from runner.protocol.framing import LineFraming


def make(setting):
    return Inspector(setting)


class Inspector:
    framing = LineFraming(LINE_LIMIT)
    handshake_seconds = 5.0
    awaiting = False

    def __init__(self, setting):
        self._plugin = setting.plugin
        self.handshaken = False
        self.strays = {}

    def host_frame(self, raw):
        pass

    def plugin_frame(self, raw):
        value = wire.message(raw).value
        if not self.handshaken and (not isinstance(value, dict) or value.get("hello") != self._plugin.id):
            return Violation("handshake_failed", "its first line is no hello", "hello")
        self.handshaken = True
        return None
