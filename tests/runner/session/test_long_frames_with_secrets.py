"""What a plugin says in a long frame is searched for secrets once, and in a thread: other sessions go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio
import trio.testing

from runner.exceptions import PluginFailure
from runner.protocol.dialect import Call, Notice
from runner.protocol.disguise.finder import SecretFinder
from runner.protocol.secrets import Secrets
from tests.runner.contracts.kaged.conversation import tell
from tests.runner.session.piped_session import Rig, like_the_reference, live

TOKEN = "a-token-of-mine"
ADD = Call("tool", "add", {"text": "x"})


async def with_a_notice(message: dict[str, Any]) -> dict[str, Any] | None:
    """Says as much as it is asked for, and no answer."""
    if message.get("method") != "notes.add":
        return await like_the_reference(message)
    length = int(message["params"]["text"])
    return tell("notes.changed", [TOKEN, "x" * length])


class Searches:
    """In which threads a text was searched that has the token. They go on when `free` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        self.ended = 0
        self.free = threading.Event()
        self.began = trio.Event()
        token, real = trio.lowlevel.current_trio_token(), SecretFinder.find

        def find(finder: SecretFinder, data: bytes, *, at_end: bool = False) -> Any:
            if TOKEN.encode() in data:
                self.threads.append(threading.get_ident())
                token.run_sync_soon(self.began.set)
                if threading.get_ident() != main:  # nobody could free the loop itself
                    self.free.wait(20)
                self.ended += 1
            return real(finder, data, at_end=at_end)

        main = threading.get_ident()
        monkeypatch.setattr(SecretFinder, "find", find)


async def said(rig: Rig) -> list[Any]:
    async for event in rig.session.events():
        if isinstance(event, Notice) and event.kind == "notification":
            return list(event.value["params"])
    raise AssertionError("it says nothing")


@pytest.mark.trio
async def test_a_long_frame_is_searched_once_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches(monkeypatch)
    async with live(with_a_notice) as rig, trio.open_nursery() as nursery:
        rig.session.state.record.secrets = Secrets({"token": TOKEN})
        for length, in_loop in ((100, True), (20_000, False), (300_000, False)):
            searches.threads.clear()
            searches.began = trio.Event()
            searches.free.clear()
            nursery.start_soon(rig.session.call, ADD._replace(input={"text": str(length)}))
            await searches.began.wait()  # here the loop runs, while a long frame is searched
            searches.free.set()
            assert await said(rig) == ["[secret]", "x" * length]
            assert len(searches.threads) == 1
            assert (searches.threads[0] == threading.get_ident()) == in_loop
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_no_clock_waits_for_a_search(
    monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    searches = Searches(monkeypatch)

    async def pass_the_time() -> None:
        await searches.began.wait()  # before that no clock of the session runs
        mock_clock.autojump_threshold = 0

    async with trio.open_nursery() as nursery, live(with_a_notice) as rig:
        nursery.start_soon(pass_the_time)
        rig.session.state.record.secrets = Secrets({"token": TOKEN})
        with pytest.raises(PluginFailure, match="no answer within"):
            await rig.session.call(ADD._replace(input={"text": "100000"}))
    # The session has ended too.
    assert (len(searches.threads), searches.ended) == (1, 0)
    searches.free.set()
