"""A stream that ends inside a frame: who is to blame depends on how the process ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from runner.outcome import Outcome
from runner.protocol.header_frames import HeaderFramer, HeaderRules, header_frame
from runner.session.record import SessionRecord
from runner.session.state import SessionState
from runner.session.tasks import LINGER_SECONDS, SessionTasks
from sandbox.spec import Limits

HALF = b"Content-Length: 9\r\n\r\nhal"
OK = Outcome("ok", "run", "")
OOM = Outcome("crashed", "run", "the plugin ran out of memory", "oom")


class Stdout:
    """One piece, then the end."""

    def __init__(self, data: bytes) -> None:
        self._pieces = [data, b"", b""]

    async def receive_some(self, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._pieces.pop(0)


async def read_all(data: bytes, ended: Outcome | None, *, closing: bool = False) -> list[Outcome]:
    """The faults of a session that reads `data`. None: the process goes on."""
    failed: list[Outcome] = []

    async def end() -> Any:
        if ended is None:
            await trio.sleep_forever()
        return SimpleNamespace(outcome=ended)

    state = SimpleNamespace(
        dialect=SimpleNamespace(framer=lambda: HeaderFramer(HeaderRules(64, 64))),
        cell=SimpleNamespace(stdout=Stdout(data), ended=end),
        record=SessionRecord(),
        terms=SimpleNamespace(limits=Limits()),
        phase="run",
        closing=closing,
        verdict=OK,  # whole frames are not our subject: they are too late
        stdout_eof=trio.Event(),
        fail=failed.append,
        ends_if_talkative=False,
        now=trio.current_time,
    )
    async with trio.open_nursery() as nursery:
        await SessionTasks(cast("SessionState", state), None)._read(nursery)
    assert state.stdout_eof.is_set()
    return failed


@pytest.mark.trio
async def test_a_plugin_that_ends_well_in_mid_frame_is_to_blame(
    autojump_clock: trio.testing.MockClock,
) -> None:
    (fault,) = await read_all(header_frame(b"{}") + HALF, OK)
    assert (fault.code, fault.phase, fault.cause) == ("malformed_response", "run", "cut_short")


@pytest.mark.trio
async def test_a_plugin_that_only_closes_its_stdout_is_to_blame(
    autojump_clock: trio.testing.MockClock,
) -> None:
    began = trio.current_time()
    (fault,) = await read_all(HALF, None)
    assert fault.cause == "cut_short"
    assert trio.current_time() - began == pytest.approx(LINGER_SECONDS)


@pytest.mark.trio
async def test_the_end_of_a_plugin_that_was_killed_in_mid_frame_is_judged_instead(
    autojump_clock: trio.testing.MockClock,
) -> None:
    assert await read_all(HALF, OOM) == []


@pytest.mark.trio
async def test_another_fault_does_not_wait_for_the_end(autojump_clock: trio.testing.MockClock) -> None:
    began = trio.current_time()
    (fault,) = await read_all(b"hello\n", None)
    assert fault.cause == "bad_header" and trio.current_time() == began


@pytest.mark.trio
async def test_a_plugin_that_is_shut_down_may_break_off(autojump_clock: trio.testing.MockClock) -> None:
    began = trio.current_time()
    assert await read_all(HALF, None, closing=True) == []
    assert trio.current_time() == began
