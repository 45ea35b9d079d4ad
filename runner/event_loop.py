"""Checks which event loop runs in this thread. The library needs trio's; a blocking call must have none."""

from __future__ import annotations

import sys

import trio

from runner.exceptions import NotOnTrio, WouldBlock


def is_on_trio() -> bool:
    """Whether this is a task of trio."""
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True


def require_trio() -> None:
    """Raises NotOnTrio outside of a task of trio."""
    if not is_on_trio():
        raise NotOnTrio


def require_no_loop() -> None:
    """Raises WouldBlock in a thread that runs trio's or asyncio's event loop. A thread that was started for
    a call, by `trio.to_thread` or `asyncio.to_thread`, runs none."""
    if _runs_trio():
        raise WouldBlock("trio", "await runner.run(...)")
    if _runs_asyncio():
        raise WouldBlock("asyncio", "await runner.aio.call(...)")


def _runs_trio() -> bool:
    try:
        trio.lowlevel.current_trio_token()
    except RuntimeError:
        return False
    return True


def _runs_asyncio() -> bool:
    asyncio = sys.modules.get("asyncio")  # a thread that runs its loop has imported it
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
