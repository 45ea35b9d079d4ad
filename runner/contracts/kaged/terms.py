"""The version of the contract that is spoken, and its time limits."""

from __future__ import annotations

API_VERSION = 1

# Seconds. The manifest gives the hooks' and the shutdown's own.
HANDSHAKE_SECONDS = 10.0
CALL_SECONDS = 60.0
HEALTH_ANSWER_SECONDS = 5.0
