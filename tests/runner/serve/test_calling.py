"""The progress of a call, for a client that does not read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from runner.serve.calling import _stream
from runner.serve.desk import CallAnswer, DoorCall


@pytest.mark.trio
@pytest.mark.parametrize(
    ("value", "sent", "most"),
    [
        ({"step": "x"}, 200, 200),  # the control: all of them wait
        ({"text": "x" * (1 << 20)}, 200, 4),  # a plugin's message may have 16 MiB
        ({"parts": [[]] * 2000}, 200, 2),  # too many parts to measure
    ],
)
async def test_what_waits_is_bounded_in_bytes(value: dict[str, Any], sent: int, most: int) -> None:
    reads = trio.Event()
    emitted: list[tuple[str, Any]] = []

    async def make(row: Any, asked: Any, on_progress: Any) -> CallAnswer:
        for number in range(sent):
            on_progress({**value, "number": number})
        reads.set()
        return CallAnswer(200, {"id": "call_1"})

    async def emit(name: str, data: Any) -> None:
        if name == "progress":
            await reads.wait()
        emitted.append((name, data))

    desk: Any = SimpleNamespace(make=make)
    row: Any = SimpleNamespace(id="call_1")
    await _stream(desk, row, DoorCall("one", "t", None), emit)
    shown = [name for name, _ in emitted].count("progress")
    assert 1 <= shown <= most and emitted[-1][0] == "result"
    assert emitted[-1][1]["dropped_progress"] == sent - shown
