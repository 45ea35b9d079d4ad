"""Checks the frames between a plugin and an ainb host: each header and body, and the answer to plugin/init.

What the host says is not judged. The reference host drops a frame whose body is no message; so such a frame
is passed on and counted, unless another reader could find a message in it.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.contracts.ainb import INIT_SECONDS, handshake
from runner.contracts.ainb.messages import RULES
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import HeaderFraming
from runner.protocol.observer import Answered, Observer

# The keys of the answer to plugin/init that are read.
_WORDS = frozenset(("name", "version"))


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector:
    # Of two lengths in one header, hosts may take either.
    framing = HeaderFraming(RULES._replace(last_counts=False))
    handshake_seconds = INIT_SECONDS

    def __init__(self, setting: Setting) -> None:
        self._plugin = setting.plugin
        self._observer = Observer(_WORDS, frozenset((handshake.INIT,)))
        self.handshaken = False
        self.awaiting = False

    @property
    def strays(self) -> Mapping[str, int]:
        return self._observer.strays

    def host_frame(self, raw: bytes | None) -> None:
        for asked in self._observer.host(raw):
            if asked.method == handshake.INIT and asked.is_question and not self.handshaken:
                self.awaiting = True

    def plugin_frame(self, raw: bytes) -> Violation | None:
        heard = self._observer.plugin(raw)
        if isinstance(heard, Violation):
            return heard
        welcomes = (one for one in heard if isinstance(one, Answered) and one.method == handshake.INIT)
        for welcome in welcomes:
            if (fault := self._shaken(welcome)) is not None:
                return fault
        return None

    def _shaken(self, answer: Answered) -> Violation | None:
        self.awaiting = False
        if answer.error is not None:
            return None  # the host sees the error itself
        try:
            handshake.read_welcome(answer.result, self._plugin)
        except handshake.HandshakeFault as fault:
            return fault.violation
        self.handshaken = True
        return None
