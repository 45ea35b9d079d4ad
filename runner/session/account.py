"""What the caller of a prepared call knows about it afterwards, and what the plugin is told if it gives up.

A call that is cancelled raises trio's Cancelled, which carries nothing. A caller that needs the record of
such a call opens an account in the task that makes it:

    with open_account() as account:
        result = await plugin.call(…)
    account.invocation  # also if the task was cancelled meanwhile
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

USER_CANCELLED = "user_cancelled"


class CallAccount:
    def __init__(self) -> None:
        self.reason = USER_CANCELLED  # what the plugin is told if the caller gives the call up
        self.invocation: dict[str, Any] | None = None  # the contract's record; None: it was not prepared
        self.report: dict[str, Any] | None = None  # None: nothing was started, or the process lives on
        self.stderr = ""  # the end of it


_account: ContextVar[CallAccount | None] = ContextVar("account", default=None)


@contextmanager
def open_account() -> Iterator[CallAccount]:
    """For one call, which this task makes."""
    account = CallAccount()
    token = _account.set(account)
    try:
        yield account
    finally:
        _account.reset(token)


def reason() -> str:
    """What a plugin is told about a call that this task gives up."""
    account = _account.get()
    return USER_CANCELLED if account is None else account.reason


def enter(invocation: dict[str, Any] | None, report: dict[str, Any] | None = None, stderr: str = "") -> None:
    """Note how the call of this task ended."""
    if (account := _account.get()) is not None:
        account.invocation, account.report, account.stderr = invocation, report, stderr
