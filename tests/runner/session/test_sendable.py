"""Which answers of the host's services are known to be JSON without writing them once as a trial."""

from __future__ import annotations

from typing import Any

import pytest

from runner.protocol import wire
from runner.protocol.dialect import Answer
from runner.session.tasks import _is_plain, _sendable


class Word(str):
    """A string that the encoder may take for something else."""


@pytest.mark.parametrize(
    ("result", "plain"),
    [
        ({}, True),
        ({"payload": "aGk=", "version": 2, "more": None}, True),
        ({"payload": "é"}, False),
        ({"payload": "\ud800"}, False),
        ({"a": Word("b")}, False),
        ({1: "a"}, False),
        ({"a": [1]}, False),
        ({"a": 1.5}, False),
        ({"a": b"bytes"}, False),
        ("text", False),
        (None, False),
    ],
)
def test_which_answers_need_no_trial(result: Any, plain: bool) -> None:
    assert _is_plain(result) is plain
    if plain:
        wire.encode(result)


@pytest.mark.parametrize("result", [{"a": b"bytes"}, {"a": float("nan")}, {"a": "\ud800"}, object()])
def test_what_is_not_json_becomes_an_error(result: Any) -> None:
    error = _sendable(Answer(result)).error
    assert error is not None and error[0] == -32603
    assert _sendable(Answer({"a": "b"})) == Answer({"a": "b"})
