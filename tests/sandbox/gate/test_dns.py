"""Messages of the plugin and of name servers, both hostile."""

from __future__ import annotations

import itertools
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.gate import dns
from tests.sandbox.gate.netlab import AAAA, CNAME, A, Record, encode_name, encode_record


def question(
    name: bytes = encode_name("api.example.com"),
    kind: int = A,
    family: int = 1,
    flags: int = 0x0100,
    counts: tuple[int, int, int, int] = (1, 0, 0, 0),
    tail: bytes = b"",
) -> bytes:
    return struct.pack("!6H", 7, flags, *counts) + name + struct.pack("!HH", kind, family) + tail


OPT = b"\0" + struct.pack("!HHIH", 41, 4096, 0, 0)
LONGEST = b"".join(b"\x3f" + b"a" * 63 for _ in range(3)) + b"\x3d" + b"a" * 61 + b"\0"  # 255 bytes


def test_a_question_is_read() -> None:
    asked = dns.read_question(question())
    assert isinstance(asked, dns.NameQuestion)
    assert (asked.id, asked.name, asked.kind, asked.recursion) == (7, "api.example.com", A, True)


def test_an_answer_repeats_the_question_in_its_own_spelling() -> None:
    message = question(encode_name("aPi.ExaMPLE.com"))
    asked = dns.read_question(message)
    assert isinstance(asked, dns.NameQuestion)
    reply = dns.write_reply(asked, dns.NOERROR, bytes([198, 18, 128, 1]), 60)
    assert reply[12:].startswith(message[12:])
    assert dns.read_reply(reply, 7, "api.example.com", A).addresses == (bytes([198, 18, 128, 1]),)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (question(flags=0x2800), dns.NOTIMP),  # an update
        (question(counts=(0, 0, 0, 0)), dns.FORMERR),
        (question(counts=(2, 0, 0, 0)), dns.FORMERR),
        (question(counts=(65535, 0, 0, 0)), dns.FORMERR),
        (question(counts=(1, 1, 0, 0)), dns.FORMERR),
        (question(counts=(1, 0, 0, 65535)), dns.FORMERR),
        (question(counts=(1, 0, 0, 1)), dns.FORMERR),  # the record is missing
        (question(counts=(1, 0, 0, 1), tail=OPT[:-1]), dns.FORMERR),
        (question(counts=(1, 0, 0, 1), tail=OPT + b"x"), dns.FORMERR),
        (question(counts=(1, 0, 0, 1), tail=OPT[:-2] + b"\xff\xff"), dns.FORMERR),
        (question(counts=(1, 0, 0, 1), tail=OPT.replace(b"\x29", b"\xfa")), dns.FORMERR),  # TSIG
        (question(tail=b"x"), dns.FORMERR),
        (question()[:-1], dns.FORMERR),
        (question(b"\xc0\x0c"), dns.FORMERR),  # a pointer to itself
        (question(b"\x40abc\0"), dns.FORMERR),
        (question(b"\x3fabc"), dns.FORMERR),
        (question(b"\x3d" + b"a" * 61 + LONGEST), dns.FORMERR),
        (question(b"\x01a" + LONGEST), dns.FORMERR),  # two bytes over the longest name
        (question(tail=bytes(2000)), dns.FORMERR),
        (question(family=3), dns.REFUSED),  # CHAOS
        (question(family=4), dns.REFUSED),
    ],
)
def test_what_is_no_question_gets_a_code(message: bytes, code: int) -> None:
    found = dns.read_question(message)
    assert isinstance(found, dns.RefusedQuestion) and found.reason
    number, flags = struct.unpack_from("!HH", found.reply)
    assert (number, flags & 0x8000, flags & 0xF) == (7, 0x8000, code)


def test_the_longest_name_is_taken() -> None:
    assert isinstance(dns.read_question(question(LONGEST)), dns.NameQuestion)


def test_an_unknown_version_of_edns_is_told_so() -> None:
    found = dns.read_question(
        question(counts=(1, 0, 0, 1), tail=b"\0" + struct.pack("!HHIH", 41, 4096, 1 << 16, 0))
    )
    assert isinstance(found, dns.RefusedQuestion)
    reply = found.reply
    assert reply[3] & 0xF == 0 and reply.endswith(struct.pack("!HHIH", 41, 1232, 1 << 24, 0))


def test_an_opt_record_is_answered_with_one() -> None:
    asked = dns.read_question(question(counts=(1, 0, 0, 1), tail=OPT))
    assert isinstance(asked, dns.NameQuestion) and asked.extended
    assert dns.write_reply(asked, dns.REFUSED)[-11:-8] == b"\0\0\x29"


@pytest.mark.parametrize("message", [b"", bytes(11), question(flags=0x8180)])
def test_what_might_be_anothers_answer_is_dropped(message: bytes) -> None:
    with pytest.raises(dns.UnansweredMessage):
        dns.read_question(message)


@pytest.mark.parametrize("label", [b"a.b", b"\xff", "ä".encode()])
def test_a_label_that_reads_as_something_else_is_no_name(label: bytes) -> None:
    asked = dns.read_question(question(bytes([len(label)]) + label + encode_name("example.com")))
    assert isinstance(asked, dns.NameQuestion)
    assert asked.name is None
    assert asked.shown.isascii() and asked.shown != "a.b.example.com"


def test_no_two_names_are_shown_alike() -> None:
    names = ([b"a.b", b"c"], [b"a", b"b", b"c"], [b"a\\", b"b", b"c"], [b"a\\.b", b"c"])
    shown = set()
    for labels in names:
        asked = dns.read_question(question(b"".join(bytes([len(each)]) + each for each in labels) + b"\0"))
        assert isinstance(asked, dns.NameQuestion)
        shown.add(asked.shown)
    assert len(shown) == len(names) and "a\\.b.c" in shown


@given(st.binary(max_size=1400))
def test_no_bytes_of_a_plugin_are_too_much(message: bytes) -> None:
    try:
        found = dns.read_question(message)
    except dns.UnansweredMessage:
        return
    if isinstance(found, dns.NameQuestion):
        assert len(dns.write_reply(found, dns.NOERROR, bytes(16), 60)) <= 512
        assert found.shown.isascii()


@given(st.data())
def test_no_change_of_a_question_is_too_much(data: st.DataObject) -> None:
    message = bytearray(question(counts=(1, 0, 0, 1), tail=OPT))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    test_no_bytes_of_a_plugin_are_too_much.hypothesis.inner_test(bytes(message))  # type: ignore[attr-defined]


# --- answers of name servers -----------------------------------------------------------------------

NAME = "api.example.com"


def reply(
    *records: Record,
    asked: str = NAME,
    kind: int = A,
    number: int = 7,
    flags: int = 0x8180,
    count: int | None = None,
    ttl: int = 60,
) -> bytes:
    body = b"".join(encode_record(record, ttl) for record in records)
    header = struct.pack("!6H", number, flags, 1, len(records) if count is None else count, 0, 0)
    return header + encode_name(asked) + struct.pack("!HH", kind, 1) + body


def shown(found: dns.NameReply) -> list[str]:
    return [socket.inet_ntop(socket.AF_INET if len(a) == 4 else socket.AF_INET6, a) for a in found.addresses]


@pytest.mark.parametrize(
    ("records", "kind", "expected"),
    [
        ([(NAME, A, "93.184.216.34")], A, ["93.184.216.34"]),
        ([(NAME, A, "1.1.1.1"), (NAME, A, "1.1.1.2"), (NAME, A, "1.1.1.1")], A, ["1.1.1.1", "1.1.1.2"]),
        ([("API.example.COM", A, "93.184.216.34")], A, ["93.184.216.34"]),
        ([(NAME, AAAA, "2606:2800::1")], AAAA, ["2606:2800::1"]),
        ([(NAME, AAAA, "2606:2800::1")], A, []),
        ([(NAME, CNAME, "cdn.net"), ("cdn.net", A, "1.1.1.1")], A, ["1.1.1.1"]),
        ([("cdn.net", A, "1.1.1.1"), (NAME, CNAME, "cdn.net")], A, ["1.1.1.1"]),
        ([("other.com", A, "1.1.1.1")], A, []),  # nobody asked
        ([(NAME, CNAME, "cdn.net"), ("other.com", A, "1.1.1.1")], A, []),
        ([(NAME, CNAME, NAME)], A, []),
        ([(NAME, CNAME, "b.c"), ("b.c", CNAME, NAME)], A, []),
        ([], A, []),
    ],
)
def test_an_answer_is_read(records: list[Record], kind: int, expected: list[str]) -> None:
    assert shown(dns.read_reply(reply(*records, kind=kind), 7, NAME, kind)) == expected


def test_a_chain_of_aliases_has_an_end() -> None:
    def chain(length: int) -> list[str]:
        names = [NAME, *(f"n{number}.net" for number in range(length))]
        records: list[Record] = [(a, CNAME, b) for a, b in itertools.pairwise(names)]
        return shown(dns.read_reply(reply(*records, (names[-1], A, "1.1.1.1")), 7, NAME, A))

    assert chain(8) == ["1.1.1.1"]
    assert chain(9) == []


def test_of_many_addresses_some_are_kept() -> None:
    records: list[Record] = [(NAME, A, f"1.1.1.{number}") for number in range(100)]
    assert len(dns.read_reply(reply(*records), 7, NAME, A).addresses) == dns.MOST_ADDRESSES


@pytest.mark.parametrize(
    "message",
    [
        b"",
        bytes(11),
        reply(number=8),
        reply(flags=0x0100),  # a question
        reply(flags=0xA980),  # another kind of message
        reply(asked="example.com"),
        reply(kind=AAAA),
        reply((NAME, A, "1.1.1.1"), count=2),
        reply((NAME, A, "1.1.1.1"))[:-1],
        reply(count=65535),
        reply() + b"\xc0\xff",
        reply(count=1) + b"\xc0\x21" + bytes(20),  # a pointer to itself
        reply(count=1) + b"\xc0\x0c" + struct.pack("!HHIH", A, 1, 1, 5) + bytes(5),
        reply(count=1) + b"\xc0\x0c" + struct.pack("!HHIH", CNAME, 1, 1, 1) + b"\xc0\x0c",
    ],
)
def test_what_is_no_answer_to_this_question_is_not_heard(message: bytes) -> None:
    if message == reply() + b"\xc0\xff":  # what comes after the last record is not read
        assert dns.read_reply(message, 7, NAME, A).addresses == ()
        return
    with pytest.raises(dns.MalformedMessage):
        dns.read_reply(message, 7, NAME, A)


def test_codes_and_truncation_are_told() -> None:
    assert dns.read_reply(reply(flags=0x8183), 7, NAME, A).code == dns.NXDOMAIN
    assert dns.read_reply(reply(flags=0x8380), 7, NAME, A).truncated


def test_a_negative_ttl_is_none() -> None:
    assert dns.read_reply(reply((NAME, A, "1.1.1.1"), ttl=1 << 31), 7, NAME, A).seconds == 0
    assert dns.read_reply(reply((NAME, A, "1.1.1.1"), ttl=99), 7, NAME, A).seconds == 99


def test_pointers_lead_back_only() -> None:
    assert dns.read_name(b"\1a\1b\0\1c\xc0\x02", 5) == (b"c.b", 9)
    for message, at in ((b"\xc0\x00", 0), (b"\xc0\x02\xc0\x00", 2), (b"\xc0\x02\0", 0), (b"\xc0", 0)):
        with pytest.raises(dns.MalformedMessage):
            dns.read_name(message, at)


def test_a_ladder_of_pointers_has_an_end() -> None:
    ladder = b"\0\0" + b"".join(struct.pack("!H", 0xC000 | 2 * rung) for rung in range(100))
    assert dns.read_name(ladder, 2 * 30) == (b"", 2 * 30 + 2)
    with pytest.raises(dns.MalformedMessage):
        dns.read_name(ladder, 2 * 90)


@given(st.data())
def test_no_change_of_an_answer_is_too_much(data: st.DataObject) -> None:
    message = bytearray(reply((NAME, CNAME, "cdn.net"), ("cdn.net", A, "1.1.1.1"), ("cdn.net", A, "1.1.1.2")))
    for _ in range(data.draw(st.integers(1, 6))):
        message[data.draw(st.integers(2, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = dns.read_reply(bytes(message[: data.draw(st.integers(0, len(message)))]), 7, NAME, A)
    except dns.MalformedMessage:
        return
    assert all(len(address) == 4 for address in found.addresses)


@given(st.binary(max_size=600))
def test_no_bytes_of_a_server_are_too_much(tail: bytes) -> None:
    try:
        dns.read_reply(reply(count=65535) + tail, 7, NAME, A)
    except dns.MalformedMessage:
        pass


def test_our_questions_are_what_servers_expect() -> None:
    asked = dns.read_question(dns.write_question(7, NAME, AAAA))
    assert isinstance(asked, dns.NameQuestion) and (asked.name, asked.kind) == (NAME, AAAA)
