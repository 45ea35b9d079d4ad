"""What plugin and host say to each other, checked for `runner exec --inspect`."""

from __future__ import annotations

from runner.protocol.dialect import Setting
from runner.protocol.inspector import Inspector


def make(setting: Setting) -> Inspector:
    raise NotImplementedError
