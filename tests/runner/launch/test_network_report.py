"""What people are told about hosts that were refused, or not reached."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.launch.network_report import refused_hosts, unreached_hosts
from runner.launch.stages import Started
from sandbox.network.audit import MOST_FIRST_LINES, MOST_LAST_LINES, AuditLog
from sandbox.network.egress import NOT_LISTED, AuditLine


def ended(log: AuditLog) -> Started:
    nothing: list[Any] = [None] * (len(Started._fields))
    return Started(*nothing)._replace(cell=cast("Any", SimpleNamespace(audit=log)))


def logged(*lines: AuditLine) -> AuditLog:
    log = AuditLog()
    for line in lines:
        log.feed(json.dumps(line._asdict()).encode() + b"\n")
    return log


def told(*lines: AuditLine) -> list[tuple[str, str]]:
    return [(host.message, host.rule) for host in refused_hosts(ended(logged(*lines)))]


def question(name: str, verdict: str = "refused", reason: str = NOT_LISTED) -> AuditLine:
    return AuditLine("dns", name, 0, verdict, reason=reason)


def test_a_name_and_its_remedy() -> None:
    [(message, rule)] = told(question("api.example.com"), question("fine.example", "allowed"))
    assert message == "the plugin asked for the host api.example.com, which is not in its list"
    assert rule == "api.example.com:443"


@pytest.mark.parametrize("reason", ["is one name too many: all places are taken", "was asked for in class 3"])
def test_another_reason_is_told_and_no_list_is_advised(reason: str) -> None:
    found = told(question("x4096.example.com", reason=reason))
    assert found == [(f"the plugin asked for the host x4096.example.com, which was refused: it {reason}", "")]


def test_a_name_that_reads_like_our_own_words_is_quoted() -> None:
    name = "api.example.com, and it has no network; to allow it, add: --net host"
    [(message, rule)] = told(question(name, reason="has a character that no name has"))
    assert message.startswith("the plugin asked for the host 'api.example.com, and it") and rule == ""
    assert "', which was refused: it has a character" in message


def test_a_connection_says_more_than_its_question() -> None:
    refused = AuditLine("connect", "a.example", 25, "refused", reason="is not in its list")
    [(message, rule)] = told(question("a.example"), refused)
    assert message == "the plugin asked for a.example:25, which was refused: it is not in its list"
    assert rule == "a.example:25"


# By its name alone nobody knows which port of this machine it wanted.
@pytest.mark.parametrize("name", ["a\x00b.com", "a b.com", "127.1", "x" * 300, "localhost"])
def test_a_name_that_no_list_can_have_gets_no_remedy(name: str) -> None:
    assert [rule for _, rule in told(question(name))] == [""]


def test_each_once_and_not_too_many() -> None:
    names = [f"n{number}.example" for number in range(9)]
    rules = [rule for _, rule in told(*map(question, names * 2))]
    assert rules == [f"{name}:443" for name in names[:5]]


# --- hosts that were not reached --------------------------------------------------------------------------


def unreached(*lines: AuditLine) -> list[str]:
    return [note.message for note in unreached_hosts(ended(logged(*lines)))]


def dialled(name: str, port: int, verdict: str, reason: str = "", address: str = "") -> AuditLine:
    return AuditLine("connect", name, port, verdict, f"{name}:{port}", reason, address)


def test_a_listed_host_that_was_not_reached() -> None:
    reason = "cannot be reached at 45.33.1.10: Connection refused"
    first = dialled("a.example", 443, "failed", "is not known to the DNS (NXDOMAIN)")
    again = dialled("a.example", 443, "failed", reason)
    assert unreached(question("a.example", "allowed"), first, again) == [
        f"a.example:443 was allowed and not reached: it {reason}"
    ]
    literal = dialled("2606:4700::1", 443, "failed", "broke: no route")
    assert unreached(literal) == ["[2606:4700::1]:443 was allowed and not reached: it broke: no route"]


def test_a_host_that_was_reached_at_another_time_is_not_told() -> None:
    failed = dialled("a.example", 443, "failed", "was not resolved within 10 seconds (the dial limit)")
    reached = dialled("a.example", 443, "allowed", "", "45.33.1.10")
    assert unreached(failed, reached) == [] == unreached(reached)
    # Another port, and a connection that the plugin gave up, tell nothing about this one.
    assert unreached(failed, reached._replace(port=80), reached._replace(address="")) != []


def test_not_too_many_that_were_not_reached() -> None:
    messages = unreached(*(dialled(f"n{number}.example", 1, "failed", "broke") for number in range(9)))
    assert len(messages) == 6 and messages[-1].startswith("4 more hosts were allowed and not reached")
    kept = MOST_FIRST_LINES + MOST_LAST_LINES
    lines = [dialled(f"n{number}.example", 1, "failed", "broke") for number in range(kept + 1)]
    many = f"{kept + 1} connections were allowed and failed in all; the report names some of them"
    assert unreached(*lines)[-1] == many
