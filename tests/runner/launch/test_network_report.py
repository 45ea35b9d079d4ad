"""What people are told about hosts that were refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.launch.network_report import refused_hosts
from runner.launch.stages import Started
from sandbox.network.audit import AuditLog
from sandbox.network.egress import NOT_LISTED, AuditLine


def told(*lines: AuditLine) -> list[tuple[str, str]]:
    log = AuditLog()
    for line in lines:
        log.feed(json.dumps(line._asdict()).encode() + b"\n")
    nothing: list[Any] = [None] * (len(Started._fields))
    started = Started(*nothing)._replace(audit=log)
    return [(note.message, note.hint) for note in refused_hosts(started)]


def question(name: str, verdict: str = "refused", reason: str = NOT_LISTED) -> AuditLine:
    return AuditLine("dns", name, 0, verdict, reason=reason)


def test_a_name_and_its_remedy() -> None:
    [(message, hint)] = told(question("api.example.com"), question("fine.example", "allowed"))
    assert message == "it asked for api.example.com, which is not in its list"
    assert hint.startswith('if it needs it, add "api.example.com:443"')


@pytest.mark.parametrize("reason", ["is one name too many: all places are taken", "was asked for in class 3"])
def test_another_reason_is_told_and_no_list_is_advised(reason: str) -> None:
    found = told(question("x4096.example.com", reason=reason))
    assert found == [(f"it asked for x4096.example.com, which was refused: it {reason}", "")]


def test_a_connection_says_more_than_its_question() -> None:
    refused = AuditLine("connect", "a.example", 25, "refused", reason="is not in its list")
    [(message, hint)] = told(question("a.example"), refused)
    assert message == "it asked for a.example:25, which was refused: it is not in its list" and hint == ""


@pytest.mark.parametrize("name", ["a\x00b.com", "a b.com", "127.1", "x" * 300])
def test_a_name_that_no_list_can_have_gets_no_remedy(name: str) -> None:
    assert [hint for _, hint in told(question(name))] == [""]


def test_each_once_and_not_too_many() -> None:
    names = [f"n{number}.example" for number in range(9)]
    messages = [message for message, _ in told(*map(question, names * 2))]
    assert len(messages) == 6 and messages[-1].startswith("4 more hosts")
