"""The host of `exec`, and the operator's secrets in what it says."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from runner.cli.shared import launching
from runner.cli.shared.events_file import EventsFile
from runner.protocol.disguise import finder
from runner.protocol.disguise.forms import Forms
from sandbox.network.egress import AuditLine

SECRET = b"hunter2-hunter2"


def test_what_is_looked_for_is_made_once_for_all_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A plugin decides how many names it asks for."""
    made: list[Any] = []

    class Counted(Forms):
        def __init__(self, values: Any) -> None:
            made.append(values)
            super().__init__(values)

    monkeypatch.setattr(finder, "Forms", Counted)
    host = launching.CommandLineHost(events=EventsFile("2"), secrets={"token": SECRET})
    watching: list[Any] = []
    cell = SimpleNamespace(watch_network=watching.append)
    started: Any = SimpleNamespace(cell=cell, plumbing=SimpleNamespace(stderr=None))
    host.see_started(started)
    for number in range(20):
        watching[0](AuditLine("dns", f"{number}.{SECRET.decode()}.example", 0, "allowed"))
    told = [json.loads(line)["value"]["name"] for line in capfd.readouterr().err.splitlines()]
    assert told == [f"{number}.[secret].example" for number in range(20)]
    assert launching._without(host.secrets, {"name": SECRET.decode()}) == {"name": "[secret]"}
    assert len(made) == 1
