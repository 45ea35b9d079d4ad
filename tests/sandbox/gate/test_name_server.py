"""What the plugin's name server answers, and that each question has its line."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sandbox.gate import dns
from sandbox.gate.audit import AuditPipe
from sandbox.gate.loop import Loop
from sandbox.gate.name_server import Answerer, NameRules
from sandbox.gate.names import NameTable
from sandbox.network.egress import NOT_LISTED
from sandbox.network.rules import parse_rules
from tests.sandbox.gate.netlab import AAAA, A, encode_name
from tests.sandbox.gate.test_dns import question

NAME = "api.example.com"
RULE = f"{NAME}:443"
TXT, AXFR = 16, 252
Ask = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Asks one question after another, each of a new name server; returns the code and the lines."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    loop = Loop()

    def answer(*messages: bytes, names: int = 10, ipv6: bool = True) -> tuple[int, list[dict[str, Any]]]:
        rules = NameRules(parse_rules([RULE, "*.wild.example:80"]))
        answerer = Answerer(loop, rules, NameTable(names), AuditPipe(loop, write), ipv6=ipv6)
        replies = [answerer.answer(message) for message in messages]
        last = replies[-1]
        assert last is not None
        lines = [json.loads(line) for line in os.read(read, 1 << 16).splitlines()]
        return struct.unpack_from("!H", last, 2)[0] & 0xF, lines

    yield answer
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("kind", [A, AAAA])
@pytest.mark.parametrize("ipv6", [True, False])
def test_a_listed_name(ask: Ask, kind: int, ipv6: bool) -> None:
    code, [line] = ask(question(kind=kind), ipv6=ipv6)
    assert (code, line["name"], line["verdict"], line["rule"]) == (dns.NOERROR, NAME, "allowed", RULE)
    assert line["reason"] == ""


@pytest.mark.parametrize("kind", [TXT, dns.HTTPS, dns.ANY, AXFR])
def test_other_records_of_a_listed_name(ask: Ask, kind: int) -> None:
    code, [line] = ask(question(kind=kind))
    assert (code, line["name"], line["verdict"], line["rule"]) == (dns.NOERROR, NAME, "allowed", RULE)
    assert f"records of type {kind}" in line["reason"]


OLD_EDNS = b"\0" + struct.pack("!HHIH", 41, 4096, 1 << 16, 0)


@pytest.mark.parametrize(
    ("message", "name", "reason"),
    [
        (question(encode_name("other.example")), "other.example", NOT_LISTED),
        (question(encode_name("other.example"), kind=TXT), "other.example", NOT_LISTED),
        (question(family=3), NAME, "was asked for in class 3"),
        (question(flags=0x2800), dns.NO_NAME, "is another operation than a question (opcode 5)"),
        (question(counts=(2, 0, 0, 0)), dns.NO_NAME, "is a DNS message that has more than one question"),
        (question()[:-1], dns.NO_NAME, "is a DNS message that ends within a record"),
        (question(counts=(1, 0, 0, 1), tail=OLD_EDNS), NAME, "was asked for with version 1 of EDNS"),
        (question(b"\x03a.b" + encode_name("example.com")), "a\\.b.example.com", "has a dot"),
        (question(b"\x01\xff" + encode_name("example.com")), "\\xff.example.com", "has a dot, or a byte"),
        (question(encode_name("1.2.3.4")), "1.2.3.4", "is an address and no name"),
    ],
)
def test_each_refusal_has_its_name_and_its_reason(ask: Ask, message: bytes, name: str, reason: str) -> None:
    code, [line] = ask(message)
    assert (line["kind"], line["name"], line["verdict"]) == ("dns", name, "refused")
    assert line["reason"].startswith(reason)
    assert code != dns.NOERROR or "EDNS" in reason


def test_one_name_too_many_has_a_reason_of_its_own(ask: Ask) -> None:
    messages = [question(encode_name(f"x{number}.wild.example")) for number in range(3)]
    code, [*allowed, line] = ask(*messages, names=2)
    assert [each["verdict"] for each in allowed] == ["allowed"] * 2
    assert code == dns.REFUSED and line["name"] == "x2.wild.example"
    assert "names limit" in line["reason"] and line["reason"] != NOT_LISTED
