"""A long answer is read in larger pieces, from a larger pipe. Nothing else changes."""

from __future__ import annotations

import fcntl
from typing import Any

import pytest

from runner.protocol.dialect import Call
from tests.runner.contracts.kaged.conversation import answer
from tests.runner.session.piped_session import Rig, like_the_reference, live

ADD = Call("tool", "add", {"text": "x"})


async def with_its_text(message: dict[str, Any]) -> dict[str, Any] | None:
    if message.get("method") == "notes.add":
        return answer(message["id"], {"said": "x" * int(message["params"]["text"])})
    return await like_the_reference(message)


def held_by_pipe(rig: Rig) -> int:
    return fcntl.fcntl(rig.cell.its_stdout.fileno(), fcntl.F_GETPIPE_SZ)


@pytest.mark.trio
async def test_only_a_long_answer_makes_the_pipe_larger() -> None:
    async with live(with_its_text) as rig:
        usual, larger = held_by_pipe(rig), 256 << 10
        for length, holds in ((5, usual), (50_000, usual), (100_000, usual), (700_000, larger), (5, larger)):
            value = await rig.session.call(ADD._replace(input={"text": str(length)}))
            assert len(value["said"]) == length
            assert held_by_pipe(rig) == holds, length
