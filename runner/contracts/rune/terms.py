"""The version of the contract that is spoken, and its time limits."""

from __future__ import annotations

from collections.abc import Mapping

PROTOCOL = "rterm.plugin.v1"
# Seconds, by phase.
TIMEOUTS: Mapping[str, float] = {"invocation": 5.0, "launch": 2.0, "handshake": 2.0, "teardown": 0.5}
