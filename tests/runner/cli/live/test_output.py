"""What is written to stderr while its reader is slow, and what is not."""

from __future__ import annotations

import json
import select

import pytest

from runner.cli.live import output as module
from runner.cli.live.output import Output
from runner.exceptions import PluginError
from runner.protocol.dialect import Refusal

PARTS = 40


class SlowSink:
    """Takes a part each second. The poll of its descriptor never waits: time passes here."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.now = 0.0
        self.taken = b""
        self._full = False

    def write(self, data: bytes) -> int:
        assert type(data) is bytes and len(data) <= select.PIPE_BUF
        self._full = not self._full
        if self._full:
            self.now += 1.0
            raise BlockingIOError
        self.taken += data
        return len(data)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowSink:
    with open("/dev/null", "wb") as file:
        sink = SlowSink(file.fileno())
    monkeypatch.setattr(module, "sink_for", lambda fd: sink)
    monkeypatch.setattr(f"{module.__name__}.time.monotonic", lambda: sink.now)
    return sink


def test_a_long_failure_reaches_a_slow_reader(slow: SlowSink) -> None:
    text = "x" * (PARTS * select.PIPE_BUF)
    Output("call", as_json=True).failure(PluginError(Refusal(0, "no", text)))
    assert json.loads(slow.taken)["message"] == text
    assert slow.now > PARTS


def test_a_long_record_reaches_a_slow_reader(slow: SlowSink) -> None:
    text = "x" * (PARTS * select.PIPE_BUF)
    Output("call", as_json=True).record({"late": text})
    assert json.loads(slow.taken)["value"] == {"late": text}


def test_a_notice_does_not_wait_for_a_slow_reader(slow: SlowSink) -> None:
    """The clocks of a session would wait as well."""
    text = "x" * (PARTS * select.PIPE_BUF)
    Output("call", as_json=False).failure(PluginError(Refusal(0, "no", text)))
    assert 0 < len(slow.taken) < len(text) and slow.now <= 3.0
