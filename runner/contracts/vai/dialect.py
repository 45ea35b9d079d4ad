"""One conversation in vai.rpc.v1."""

from __future__ import annotations

from runner.protocol.dialect import Dialect, Setting


def make(setting: Setting) -> Dialect:
    raise NotImplementedError
