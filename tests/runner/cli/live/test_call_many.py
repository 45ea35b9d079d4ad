"""When many calls are given up: what is refused is refused the same way every time, mostly."""

from __future__ import annotations

import pytest

from runner.cli.live.call_many import CallTally
from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.outcome import Outcome
from runner.protocol.dialect import Refusal


def refused(code: str) -> InvalidCall:
    return InvalidCall(Refusal(0, code, "no"))


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (refused("tool.invalid_input"), 1),
        (PluginFailure(Outcome("tool_not_exposed", "call", "no")), 1),
        (PluginFailure(Outcome("manifest_invalid", "manifest", "no")), 1),
        (refused("binding.inactive"), 1000),  # a rollout decides anew for each call
        (PluginFailure(Outcome("crashed", "call", "no")), 5000),
        (PluginError(Refusal(0, "tool.invalid_input", "no")), 5000),  # of the plugin itself
    ],
)
def test_how_often_it_is_tried(error: PluginError | PluginFailure, calls: int) -> None:
    tally = CallTally(5000)
    while tally.take():
        tally.count(None, error)
    assert tally.done == calls


def test_a_call_that_passes_lets_others_be_refused() -> None:
    tally = CallTally(5000)
    while tally.take():
        tally.count(0.1, refused("binding.inactive") if tally.left % 900 else None)
    assert tally.done == 5000
