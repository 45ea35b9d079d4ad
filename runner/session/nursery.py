"""A nursery that wraps no exception into a group, for tasks that raise nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_plain_nursery() -> AsyncIterator[trio.Nursery]:
    """What the body raises leaves this as it is. So does ^C, or the cancellation of the caller, while the
    nursery waits for its tasks."""
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except BaseException as error:  # noqa: BLE001 -- raised again below: the nursery would wrap it
                failure = error
    except BaseExceptionGroup as group:
        failure = failure or group.exceptions[0]
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # and its traceback, in which we are
