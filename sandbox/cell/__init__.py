"""A live confined process tree."""

from __future__ import annotations

# How long a process tree may take to die of SIGKILL. A fork bomb of some hundreds takes one to three seconds.
# A process that takes longer hangs in the kernel, on a dead disk or server, and cannot be killed.
KILL_SECONDS = 10.0
