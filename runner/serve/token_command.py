"""A command of the operator's that prints a token. No message has anything that it wrote."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Literal

import trio

from sandbox.document.diagnostic import quoted

_SECONDS = 30.0
_MOST_BYTES = 64 << 10


class TokenCommandFailed(Exception):
    def __init__(self, why: Literal["failed", "timeout"], message: str) -> None:
        super().__init__(message)
        self.why = why


async def run_token_command(command: Sequence[str], given: bytes = b"") -> bytes:
    """What the command wrote to stdout, without blanks around it. `given`: its stdin. Raises
    TokenCommandFailed."""
    program = quoted(command[0])
    ended: subprocess.CompletedProcess[bytes] | None = None
    with trio.move_on_after(_SECONDS):
        try:
            ended = await trio.run_process(
                command, stdin=given, stderr=subprocess.DEVNULL, capture_stdout=True, check=False
            )
        except OSError as error:
            message = f"its token_command {program} cannot be started: {error.strerror}"
            raise TokenCommandFailed("failed", message) from None
    if ended is None:
        raise TokenCommandFailed("timeout", f"its token_command {program} took more than {_SECONDS:g} s")
    told: bytes = ended.stdout.strip()
    if ended.returncode or not told or len(told) > _MOST_BYTES:
        message = f"its token_command {program} gave no token (status {ended.returncode})"
        raise TokenCommandFailed("failed", message)
    return told
