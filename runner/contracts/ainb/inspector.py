"""Checks the frames between a plugin and an ainb host: each header and body, and the answer to plugin/init.

What the host says is not judged. The reference host drops a frame whose body is no message; so such a frame
is passed on and counted, unless another reader could find a message in it.
"""

from __future__ import annotations

from typing import Any

from runner.contracts.ainb import handshake
from runner.contracts.ainb.messages import RULES
from runner.contracts.ainb.terms import INIT_SECONDS
from runner.protocol.dialect import Setting
from runner.protocol.framing import HeaderFraming
from runner.protocol.inspector import HandshakeInspector
from runner.protocol.observer import Observer

# The keys of the answer to plugin/init that are read.
_WORDS = frozenset(("name", "version"))


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector(HandshakeInspector):
    # Of two lengths in one header, hosts may take either.
    framing = HeaderFraming(RULES._replace(last_counts=False))
    handshake_seconds = INIT_SECONDS

    def __init__(self, setting: Setting) -> None:
        super().__init__(Observer(_WORDS, frozenset((handshake.INIT,))), handshake.INIT)
        self._plugin = setting.plugin

    def _check_handshake_answer(self, result: Any) -> None:
        handshake.read_handshake_answer(result, self._plugin)
