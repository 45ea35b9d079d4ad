"""The host of `exec`, and the operator's secrets in what it says."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.cli.shared import launching
from runner.cli.shared.events_file import EventsFile
from runner.cli.shared.launching import write_at_once
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


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_line_does_not_wait_for_a_reader(kind: str) -> None:
    """The plugin has filled the stream at that moment. Nothing of the line is written, and the stream stays
    blocking for the others who have it. The control: with room it is written as a whole."""
    if kind == "pipe":
        read, write = os.pipe()
    else:
        ours, theirs = socket.socketpair()
        read, write = ours.detach(), theirs.detach()
    try:
        assert write_at_once(write, "runner: first\n")
        assert os.read(read, 100) == b"runner: first\n"
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, b"x" * 512)
        os.set_blocking(write, True)
        assert not write_at_once(write, "runner: second\n")
        assert os.get_blocking(write)
        os.set_blocking(read, False)
        held = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                held += os.read(read, 1 << 16)
        assert set(held) == {ord("x")}
        assert write_at_once(write, "runner: third\n") and os.read(read, 100) == b"runner: third\n"
    finally:
        os.close(read)
        os.close(write)


def test_a_line_in_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "log", "ab") as file:
        assert write_at_once(file.fileno(), "runner: first\n")
    assert (tmp_path / "log").read_bytes() == b"runner: first\n"
