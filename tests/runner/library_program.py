"""A program on the library, for the type checker only: scripts/check reads it, and nobody runs it.

Each `type: ignore` is on a mistake. If the types were Any, the checker would call it unused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trio

import runner


def show(*values: object) -> None: ...


class Memory:
    async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        return []


async def main() -> None:
    services = runner.Services(memory=Memory())
    async with runner.open_plugin("demo", services=services, limits={"memory": "256M"}) as plugin:
        try:
            value = await plugin.call("demo_echo", {"text": "hello"}, seconds=3.0)
        except runner.PluginError as refused:
            value = refused.code
        async for event in plugin.events():
            if isinstance(event, runner.Notice):
                name: str = event.kind
    identity: runner.Identity = plugin.identity
    try:
        result: runner.Result = await runner.run("demo", "demo_echo")
    except runner.PluginFailure as failure:
        outcome: runner.Outcome = failure.outcome
        show(outcome.code, identity.id, value, name)
    else:
        show(result.value)


class Forgetful:
    async def recall(self, n: int, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        return []


def mistakes(failure: runner.PluginFailure) -> None:
    outcome: runner.Outcome = failure.outcome.code  # type: ignore[assignment]
    runner.Services(memory=Forgetful())  # type: ignore[arg-type]
    runner.call("demo", "demo_echo", {"text": "hello"}, secs=3.0)  # type: ignore[call-arg]
    show(outcome)


if __name__ == "__main__":
    trio.run(main)
    show(runner.call("demo", "demo_echo", {"text": "hello"}, seconds=3.0, limits={"memory": "256M"}))
