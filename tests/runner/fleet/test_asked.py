"""What the door of a fleet knows about calls that no plugin was asked about: their keys are free."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio

from runner.exceptions import PluginFailure
from runner.fleet.client import FleetPlugin
from runner.fleet.door import FleetDoor
from runner.fleet.library import Fleet, _refusal
from runner.lifecycle.exceptions import Overloaded
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest
from runner.serve.refusal import Refused
from runner.session.account import open_account
from tests.tables import check_rows

# What the fleet answers, the tool (the hook is durable), and whether a plugin may have been asked
ANSWERS: dict[str, tuple[Outcome, str, bool]] = {
    "it ended in the handshake": (Outcome("crashed", "handshake", "it ended", "exit:3"), "tool", False),
    "no handshake in time": (Outcome("timeout", "handshake", "too slow", "deadline"), "tool", False),
    "another protocol": (Outcome("protocol_version_mismatch", "handshake", "9"), "hook", False),
    "no cage": (Outcome("sandbox_unavailable", "launch", "no cage"), "tool", False),
    "no such tool": (Outcome("tool_not_exposed", "call", "there is none", "tool"), "tool", False),
    "given up": (Outcome("quarantined", "call", "it failed too often", "quarantined"), "tool", False),
    "it ended in the call": (Outcome("crashed", "call", "it ended", "exit:3"), "tool", True),
    "no answer in time": (Outcome("timeout", "call", "too slow", "deadline"), "tool", True),
    "its worker is lost": (Outcome("crashed", "call", "lost", "worker_lost"), "hook", True),
    "nobody to send it to": (Outcome("launch_failed", "call", "no fleet", "no_fleet"), "tool", False),
    "perhaps it was stored": (Outcome("launch_failed", "call", "no fleet", "no_fleet"), "hook", True),
}


class _Answers:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    async def make(self, *args: Any, **named: Any) -> Any:
        raise PluginFailure(self._outcome)


def test_which_calls_a_plugin_was_asked_about() -> None:
    async def ask(outcome: Outcome, tool: str) -> bool:
        async with trio.open_nursery() as nursery:
            door = FleetDoor(nursery, cast(Fleet, _Answers(outcome)))
            door.known["it"] = FleetPlugin("it", "d", durable=("hook",))
            with open_account() as account, pytest.raises(PluginFailure):
                await door.make(CallRequest("it", tool))
            door.end_feeds()
        return account.asked is not None

    def check(_: str, row: tuple[Outcome, str, bool]) -> None:
        outcome, tool, asked = row
        assert trio.run(ask, outcome, tool) is asked

    check_rows(ANSWERS, check)


def test_the_clock_of_the_door_is_no_fault_of_the_call() -> None:
    failure = _refusal("it", Refused(503, "clock_behind", "the clock is behind", "set the clock"))
    assert isinstance(failure, PluginFailure) and not isinstance(failure, Overloaded)
    assert (failure.outcome.code, failure.outcome.cause) == ("launch_failed", "clock_behind")
