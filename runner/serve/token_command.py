"""A command of the operator's that prints a token. No message has anything that it wrote."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import trio

from sandbox import surroundings
from sandbox.document.diagnostic import quoted

_SECONDS = 30.0
_MOST_BYTES = 64 << 10
_END_SECONDS = 5.0  # that one which was killed may take to end


class TokenCommandFailed(Exception):
    def __init__(self, why: Literal["failed", "timeout"], message: str) -> None:
        super().__init__(message)
        self.why = why


async def run_token_command(command: Sequence[str], given: bytes = b"") -> bytes:
    """What the command wrote to stdout, without blanks around it. `given`: its stdin. Raises
    TokenCommandFailed."""
    program = quoted(command[0])
    told: bytes | None = None
    status: int | None = None
    with trio.move_on_after(_SECONDS):
        try:
            told, status = await _run(command, given)
        except OSError as error:
            message = f"its token_command {program} cannot be started: {error.strerror}"
            raise TokenCommandFailed("failed", message) from None
    if told is None:
        raise TokenCommandFailed("timeout", f"its token_command {program} took more than {_SECONDS:g} s")
    if len(told) > _MOST_BYTES:
        message = f"its token_command {program} wrote more than {_MOST_BYTES} bytes"
        raise TokenCommandFailed("failed", message)
    if status or not told.strip():
        message = f"its token_command {program} gave no token (status {status})"
        raise TokenCommandFailed("failed", message)
    return told.strip()


async def _run(command: Sequence[str], given: bytes) -> tuple[bytes, int | None]:
    """What it wrote, and its status; None if it was ended, because it wrote too much. Raises OSError.

    What it writes is held in memory, so no more than the limit is read. It has a session of its own, so that
    what it has started can be ended with it."""
    process = await trio.lowlevel.open_process(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=dict(surroundings.variables()),
        cwd=surroundings.working_folder(),
    )
    assert process.stdin is not None and process.stdout is not None
    told, status = b"", None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_write, process.stdin, given)
            async for piece in process.stdout:
                told += piece
                if len(told) > _MOST_BYTES:
                    break
            else:
                status = await process.wait()
            nursery.cancel_scope.cancel()
    finally:
        if status is None:  # nobody has waited for it: its number is still its own
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        # Bounded, because a program that has changed its user may not be ours to end.
        with trio.move_on_after(_END_SECONDS, shield=True):
            await process.wait()
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            await process.stdout.aclose()
    return told, status


async def _write(stream: trio.abc.SendStream, given: bytes) -> None:
    with suppress(trio.BrokenResourceError):  # it need not read
        await stream.send_all(given)
    await stream.aclose()
