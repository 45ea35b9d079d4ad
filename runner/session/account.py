"""What the caller of a call knows about it afterwards, and what the plugin is told if it gives up.

A call that is cancelled raises trio's Cancelled, which carries nothing. A caller that needs the record of
such a call, or has to know whether the plugin was asked, opens an account in the task that makes it:

    with open_account() as account:
        result = await plugin.call(…)
    account.invocation  # also if the task was cancelled meanwhile
    account.asked
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import trio

USER_CANCELLED = "user_cancelled"


class CallAccount:
    def __init__(self, on_ask: Callable[[float], Awaitable[None]] | None = None) -> None:
        self.on_ask = on_ask  # awaited before the first byte of the request goes to the plugin
        self.asked: float | None = None  # when that was, in seconds since 1970; None: it was not asked
        self.task: trio.lowlevel.Task | None = None  # that makes the call
        self.reason = USER_CANCELLED  # what the plugin is told if the caller gives the call up
        self.invocation: dict[str, Any] | None = None  # the contract's record; None: it was not prepared
        self.report: dict[str, Any] | None = None  # None: nothing was started, or the process lives on
        self.stderr = ""  # the end of it


_account: ContextVar[CallAccount | None] = ContextVar("account", default=None)


@contextmanager
def open_account(on_ask: Callable[[float], Awaitable[None]] | None = None) -> Iterator[CallAccount]:
    """For one call, which this task makes: if its caller has opened one already, that one. `on_ask`: gets the
    time, right before the plugin is asked. If it raises, the plugin is not asked."""
    if (known := _own()) is not None:
        yield known
        return
    account = CallAccount(on_ask)
    account.task = trio.lowlevel.current_task()
    token = _account.set(account)
    try:
        yield account
    finally:
        _account.reset(token)


def _own() -> CallAccount | None:
    """That of the call that this task makes. Tasks inherit the variable: the call may have started a plugin,
    whose tasks make other calls."""
    account = _account.get()
    return account if account is not None and account.task is trio.lowlevel.current_task() else None


async def ask() -> None:
    """Called before the request of this task's call goes to the plugin. Raises what `on_ask` does."""
    if (account := _own()) is not None:
        now = time.time()
        if account.on_ask is not None:
            await account.on_ask(now)
            await trio.lowlevel.checkpoint_if_cancelled()  # then nothing is sent
        account.asked = now


def withdraw() -> None:
    """The plugin was not asked after all."""
    if (account := _own()) is not None:
        account.asked = None


def reason() -> str:
    """What a plugin is told about a call that this task gives up."""
    account = _own()
    return USER_CANCELLED if account is None else account.reason


def enter(invocation: dict[str, Any] | None, report: dict[str, Any] | None = None, stderr: str = "") -> None:
    """Note how the call of this task ended."""
    if (account := _own()) is not None:
        account.invocation, account.report, account.stderr = invocation, report, stderr
