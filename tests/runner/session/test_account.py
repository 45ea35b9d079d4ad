"""Who is told that a plugin is asked, and who is not."""

from __future__ import annotations

import pytest
import trio

from runner.session import account
from runner.session.account import open_account


@pytest.mark.trio
async def test_only_the_task_that_makes_the_call_asks_for_it() -> None:
    """A call may start a plugin, whose tasks inherit the variable and make calls of their own."""
    told: list[float] = []

    async def note(now: float) -> None:
        told.append(now)

    with open_account(note) as own:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(account.ask)
        assert (told, own.asked) == ([], None)
        with open_account() as same:  # by who makes the call for another
            assert same is own
            await account.ask()
        assert told == [own.asked]
        async with trio.open_nursery() as nursery:

            async def withdraw() -> None:
                await trio.lowlevel.checkpoint()
                account.withdraw()
                account.enter({"another": "call"})

            nursery.start_soon(withdraw)
        assert own.asked is not None and own.invocation is None
        account.withdraw()
    assert [own.asked] == [None]
    await account.ask()  # nobody wants to know
    assert len(told) == 1


@pytest.mark.trio
async def test_a_call_that_is_given_up_or_not_recorded_meanwhile_is_not_asked() -> None:
    scope = trio.CancelScope()

    async def give_up(now: float) -> None:
        scope.cancel()

    async def fail(now: float) -> None:
        raise OSError("no room")

    with open_account(give_up) as own, scope:
        await account.ask()
        raise AssertionError("the request is sent")
    assert scope.cancelled_caught and own.asked is None
    with open_account(fail) as own, pytest.raises(OSError, match="no room"):
        await account.ask()
    assert own.asked is None
