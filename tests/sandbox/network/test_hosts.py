"""Every spelling of a host has one meaning, or none."""

from __future__ import annotations

import re
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox.network.hosts import Host, parse_address, parse_host, read_address
from tests.tables import one_case


@pytest.mark.parametrize(
    ("written", "text", "version"),
    [
        ("example.com", "example.com", 0),
        ("Example.COM", "example.com", 0),
        ("example.com.", "example.com", 0),
        ("localhost", "localhost", 0),
        ("3com.example", "3com.example", 0),
        ("1.2.3.4.example", "1.2.3.4.example", 0),
        ("0x7f.example", "0x7f.example", 0),
        ("example.0x7g", "example.0x7g", 0),
        ("r3---sn-x.example", "r3---sn-x.example", 0),
        ("bücher.example", "xn--bcher-kva.example", 0),
        ("Bücher.Example", "xn--bcher-kva.example", 0),
        ("xn--bcher-kva.example", "xn--bcher-kva.example", 0),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example", 0),
        ("xn--strae-oqa.example", "xn--strae-oqa.example", 0),
        ("пример.example", "xn--e1afmkfd.example", 0),
        (f"{'a' * 63}.example", f"{'a' * 63}.example", 0),
        (f"{'a.' * 126}b", f"{'a.' * 126}b", 0),
        (f"{'a.' * 126}b.", f"{'a.' * 126}b", 0),
        ("192.0.2.7", "192.0.2.7", 4),
        ("[2001:DB8:0::7]", "2001:db8::7", 6),
        ("[::1]", "::1", 6),
        ("[::ffff:10.0.0.1]", "10.0.0.1", 4),
        ("[::ffff:a00:1]", "10.0.0.1", 4),
    ],
)
def test_one_spelling_for_each_host(written: str, text: str, version: int) -> None:
    host = parse_host(written)
    assert host == Host(text, version)
    assert parse_host(str(host)) == host


@one_case(
    ("written", "reason"),
    [
        ("", "no name"),
        (".", "no name"),
        ("..", "empty label"),
        (".example.com", "empty label"),
        ("example..com", "empty label"),
        ("example.com..", "empty label"),
        ("example.com\0", "NUL"),
        ("example.com\0.evil.org", "NUL"),
        ("exam ple.com", "white space"),
        (" example.com", "white space"),
        ("example.com\n", "white space"),
        ("example.com\t", "white space"),
        ("example.com\r\nX", "white space"),
        ("example\u00a0.com", "white space"),
        ("example\x1b.com", "control character"),
        ("example\x7f.com", "control character"),
        ("example\x9f.com", "control character"),
        ("example%2ecom", "percent"),
        ("a_b.example", "underscore"),
        ("*.example.com", "wildcard"),
        ("ex*mple.com", "wildcard"),
        ("-a.example", "not a host name"),
        ("a-.example", "not a host name"),
        ("user@example.com", "not a host name"),
        ("example.com/x", "not a host name"),
        ("example.com\\x", "not a host name"),
        ("a,b", "not a host name"),
        (f"{'a' * 64}.example", "label of 64"),
        (f"{'a.' * 126}bc", "254 characters"),
        (f"{'a' * 10000}", "10000 characters"),
        (f"{'ü' * 60}.example", "too long"),
        (f"{'ü.' * 40}example", "as it is looked up"),
        # What resolvers read as an address is never a name.
        ("127.1", "plain spelling"),
        ("2130706433", "plain spelling"),
        ("0x7f000001", "plain spelling"),
        ("0X7F000001", "plain spelling"),
        ("0177.0.0.1", "plain spelling"),
        ("127.0.0.01", "plain spelling"),
        ("127.0.0.0x1", "plain spelling"),
        ("127.0x1", "plain spelling"),
        ("example.0x", "plain spelling"),
        ("example.1", "plain spelling"),
        ("1.2.3.256", "plain spelling"),
        ("1.2.3.4.5", "plain spelling"),
        ("127.0.0.1.", "dot at its end"),
        ("0.0.0.0", "one host"),
        ("224.0.0.1", "one host"),
        ("255.255.255.255", "one host"),
        ("[::]", "one host"),
        ("[ff02::1]", "one host"),
        ("[fe80::1%eth0]", "zone"),
        ("[fe80::1%25eth0]", "zone"),
        ("[::1", "bracket"),
        ("::1]", "bracket"),
        ("[127.0.0.1]", "brackets around"),
        ("[example.com]", "plain spelling"),
        ("[]", "plain spelling"),
        ("::1", "colon"),
        ("example.com:443", "colon"),
        # International names: only what needs no mapping.
        ("BÜCHER.example", "international"),
        ("１２７.0.0.1", "international"),
        ("127。0。0。1", "international"),
        ("example。com", "international"),
        ("exam\u00adple.com", "international"),
        ("exam\u200bple.com", "international"),
        ("\u202eexample.com", "international"),
        ("exampl\u0065\u0301.com", "international"),  # not composed
        ("\u212aaren.example", "international"),  # the sign for kelvin, which becomes a k
        ("ⓔxample.com", "international"),
        ("☃.example", "international"),
        ("straße.example", "two ways"),
        ("a\u200db.example", "two ways"),
        ("٣.example", "international"),
        ("\ud800.example", "international"),
    ],
)
def test_a_text_with_no_or_several_meanings_is_refused(written: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_host(written)
    assert type(caught.value) is ValueError  # not a UnicodeError with a message of its own


def test_an_arabic_digit_is_not_taken_for_a_number() -> None:
    with pytest.raises(ValueError, match=r"international|plain"):
        parse_host("1.2.3.٤")


@given(st.text(max_size=40))
@example("1.")
@example("0x.")
def test_any_text_is_read_the_same_way_twice_or_refused(text: str) -> None:
    try:
        host = parse_host(text)
    except ValueError:
        return
    assert parse_host(str(host)) == host
    assert host.text.isascii() and host.text == host.text.lower()
    assert len(host.text) <= 253 and "*" not in host.text


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 255), min_size=1, max_size=4), st.data())
def test_what_the_resolver_takes_for_a_number_is_not_a_name(numbers: list[int], data: st.DataObject) -> None:
    """The C library is asked: whatever inet_aton() accepts is an address of ours with the same meaning, or
    refused."""
    words = [data.draw(st.sampled_from([str(n), hex(n), f"0{n:o}", f"0X{n:x}"])) for n in numbers]
    text = ".".join(words)
    try:
        packed = socket.inet_aton(text)
    except OSError:
        packed = None
    try:
        host = parse_host(text)
    except ValueError:
        return
    assert host.version == 4 and packed == socket.inet_aton(host.text)


@given(st.ip_addresses())
def test_addresses_survive(address: object) -> None:
    found = read_address(str(address))
    assert found is not None and read_address(str(found)) == found
    try:
        host = parse_address(str(address))
    except ValueError:
        assert found.is_unspecified or found.is_multicast or str(found) == "255.255.255.255"
    else:
        assert host == Host(str(found), found.version)


@pytest.mark.parametrize("text", ["", "x", "1", "1.2.3", "1.2.3.4%eth0", "fe80::1%1", "١.2.3.4", "[::1]"])
def test_texts_that_are_no_address(text: str) -> None:
    assert read_address(text) is None


LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z", re.ASCII)
NUMERIC = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z", re.ASCII)
LABELS = st.text(st.sampled_from("0123456789abcfgxyzABZ-"), min_size=1, max_size=8) | st.sampled_from(
    ("a" * 63, "a" * 62 + "-", "0x", "0X1f", "0xg", "-", "--", "08")
)


@given(LABELS)
def test_labels_are_read_as_by_a_pattern(label: str) -> None:
    def told(text: str) -> str:
        try:
            return parse_host(text).text
        except ValueError as error:
            return str(error)

    lower = label.lower()
    assert ("is not a host name" in told(f"{label}.example")) is (LABEL.match(lower) is None)
    if LABEL.match(lower) is not None:
        as_address = "neither a host name nor an address" in told(f"a.{label}")
        assert as_address is (NUMERIC.match(lower) is not None)
