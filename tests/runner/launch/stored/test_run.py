"""What becomes of a launch whose stored plan fails."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from runner.cli.shared.launching import CommandLineHost
from runner.launch.stored import run
from runner.launch.stored.entry import LaunchRequest, PlanEntry, request_of
from runner.outcome import EXEC_NO_CAGE, Failure, Outcome
from sandbox.limits.assigned import AssignedLimits

ENTRY = PlanEntry(1, (), (), False, (), b"")
LATE = Failure(Outcome("launch_failed", "launch", "too late", "resources"), EXEC_NO_CAGE)


@pytest.mark.parametrize(
    "error", [LATE, OSError("no files"), ValueError("odd")], ids=["failure", "os", "value"]
)
@pytest.mark.parametrize("ready", [False, True], ids=["before", "after"])
def test_nothing_is_tried_again_once_the_start_was_next(
    monkeypatch: pytest.MonkeyPatch, error: Exception, ready: bool
) -> None:
    """A process may run by then, and have the caller's streams."""
    forgotten: list[LaunchRequest] = []
    monkeypatch.setattr(run, "forget", forgotten.append)
    host = CommandLineHost(is_new=False, tells=False)
    request = request_of(["exec", "manifest"], (), os.environ)

    def fails(*_: Any) -> Any:
        host.is_ready = ready
        raise error

    monkeypatch.setattr(run, "_carry_out", fails)
    with pytest.raises(type(error) if ready else run.DecideAnew):
        run.run_stored(ENTRY, request, 0.0, host)
    assert forgotten == [request]  # the next launch is decided anew in any case


def test_a_host_is_ready_when_everything_is_acquired() -> None:
    host = CommandLineHost(is_new=False, tells=False)
    assert not host.is_ready
    planned: Any = SimpleNamespace(limits=AssignedLimits(), plan=SimpleNamespace(notes=()))
    host.see_ready(planned)
    assert host.is_ready
