"""The version of the contract that is spoken, and its time limits."""

from __future__ import annotations

ABI_VERSION = 2

# Seconds. The contract gives the render's, the shutdown's and the write's; the others are its plan, or ours.
INIT_SECONDS = 10.0
RENDER_SECONDS = 2.0
CLI_SECONDS = 60.0
ACTION_SECONDS = 60.0
SHUTDOWN_SECONDS = 5.0
WRITE_SECONDS = 2.0  # without the plugin reading a byte of what is written
