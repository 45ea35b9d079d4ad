"""Checks the frames between a plugin and an ainb host: each header and body, and the answer to plugin/init.

What the host says is not judged. The reference host drops a frame whose body is no message, and so does a
session. Here it is withheld and counted: another reader could find a message in it.
"""

from __future__ import annotations

from typing import Any

from runner.contracts.ainb import handshake
from runner.contracts.ainb.messages import RULES, fault_of, read_json
from runner.contracts.ainb.terms import INIT_SECONDS
from runner.protocol.dialect import Setting
from runner.protocol.framing import HeaderFraming
from runner.protocol.inspector import HandshakeInspector
from runner.protocol.rpc_reader import RpcReader, Withheld


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector(HandshakeInspector):
    framing = HeaderFraming(RULES)
    handshake_seconds = INIT_SECONDS

    def __init__(self, setting: Setting) -> None:
        methods = frozenset((handshake.INIT,))
        super().__init__(RpcReader(methods, read=read_json, judge=_judge, null_results=True), handshake.INIT)
        self._plugin = setting.plugin

    def _check_handshake_answer(self, result: Any) -> None:
        handshake.read_handshake_answer(result, self._plugin)


def _judge(value: Any, cause: str | None, detail: str) -> Withheld | None:
    why = detail if cause is not None else fault_of(value)
    return Withheld("dropped", why) if why else None
