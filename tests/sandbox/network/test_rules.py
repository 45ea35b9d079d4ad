"""Rules for hosts and ports: what each allows, and one byte beside it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.network.hosts import parse_host
from sandbox.network.rules import (
    EVERY_PORT,
    MOST_PORTS,
    HostRule,
    count_ports,
    covers,
    judge,
    listed_ports,
    merge_ports,
    parse_authority,
    parse_ports,
    parse_rule,
    parse_rules,
)
from tests.tables import one_case


@pytest.mark.parametrize(
    ("written", "rule", "normal"),
    [
        ("example.com:443", HostRule("name", "example.com", ((443, 443),)), "example.com:443"),
        ("Example.COM.:443", HostRule("name", "example.com", ((443, 443),)), "example.com:443"),
        ("bücher.de:80", HostRule("name", "xn--bcher-kva.de", ((80, 80),)), "xn--bcher-kva.de:80"),
        ("*.Example.com:443", HostRule("below", "example.com", ((443, 443),)), "*.example.com:443"),
        ("*.com:443", HostRule("below", "com", ((443, 443),)), "*.com:443"),
        ("*:443", HostRule("any", "", ((443, 443),)), "*:443"),
        ("*:*", HostRule("any", "", EVERY_PORT), "*:*"),
        ("example.com:*", HostRule("name", "example.com", EVERY_PORT), "example.com:*"),
        ("a.b:443,80", HostRule("name", "a.b", ((80, 80), (443, 443))), "a.b:80,443"),
        ("a.b:80,81,82", HostRule("name", "a.b", ((80, 82),)), "a.b:80-82"),
        ("a.b:1-64", HostRule("name", "a.b", ((1, 64),)), "a.b:1-64"),
        ("a.b:1-64,3-9,64", HostRule("name", "a.b", ((1, 64),)), "a.b:1-64"),
        ("192.0.2.7:22", HostRule("address", "192.0.2.7", ((22, 22),)), "192.0.2.7:22"),
        ("[2001:DB8::7]:22", HostRule("address", "2001:db8::7", ((22, 22),)), "[2001:db8::7]:22"),
        ("[::ffff:10.0.0.1]:22", HostRule("address", "10.0.0.1", ((22, 22),)), "10.0.0.1:22"),
        ("10.0.0.0/8:5432", HostRule("range", "10.0.0.0/8", ((5432, 5432),)), "10.0.0.0/8:5432"),
        ("0.0.0.0/0:*", HostRule("range", "0.0.0.0/0", EVERY_PORT), "0.0.0.0/0:*"),
        ("[FD00::]/8:1", HostRule("range", "fd00::/8", ((1, 1),)), "[fd00::]/8:1"),
        ("localhost:6379", HostRule("loopback", "localhost", ((6379, 6379),)), "localhost:6379"),
        ("LocalHost.:6379", HostRule("loopback", "localhost", ((6379, 6379),)), "localhost:6379"),
        ("*.localhost:1", HostRule("below", "localhost", ((1, 1),)), "*.localhost:1"),
        ("db.localhost:1", HostRule("name", "db.localhost", ((1, 1),)), "db.localhost:1"),
        ("127.0.0.1:1", HostRule("address", "127.0.0.1", ((1, 1),)), "127.0.0.1:1"),
        ("10.0.0.7/32:1", HostRule("address", "10.0.0.7", ((1, 1),)), "10.0.0.7:1"),
        ("[fd00::7]/128:1", HostRule("address", "fd00::7", ((1, 1),)), "[fd00::7]:1"),
        ("* A.b:1", HostRule("name", "a.b", ((1, 1),), ()), "* a.b:1"),
        (
            "GET,HEAD a.b:1/c/**",
            HostRule("name", "a.b", ((1, 1),), ("GET", "HEAD"), "/c/**"),
            "GET,HEAD a.b:1/c/**",
        ),
        ("GET *.a.b:1/", HostRule("below", "a.b", ((1, 1),), ("GET",), "/"), "GET *.a.b:1/"),
        (
            "GET [fd00::7]:1/*/d",
            HostRule("address", "fd00::7", ((1, 1),), ("GET",), "/*/d"),
            "GET [fd00::7]:1/*/d",
        ),
        ("POST localhost:1", HostRule("loopback", "localhost", ((1, 1),), ("POST",)), "POST localhost:1"),
    ],
)
def test_rules(written: str, rule: HostRule, normal: str) -> None:
    assert parse_rule(written, ranges=True) == rule
    assert str(rule) == normal
    assert parse_rule(normal, ranges=True) == rule


@pytest.mark.parametrize("written", ["example.com", "*.example.com", "*", "192.0.2.7", "[2001:db8::7]"])
def test_a_rule_without_a_port_has_the_callers(written: str) -> None:
    assert parse_rule(written, default_ports=(443, 80)) == parse_rule(f"{written}:80,443")
    with pytest.raises(ValueError, match="has no port"):
        parse_rule(written)


@one_case(
    ("written", "reason"),
    [
        ("", "port"),
        (":443", "no name"),
        (":", "port"),
        ("example.com:", "no port between"),
        ("example.com:0", "no port between"),
        ("example.com:65536", "no port between"),
        ("example.com:99999999999999999999", "no port between"),
        ("example.com:0443", "no port between"),
        ("example.com:+443", "no port between"),
        ("example.com:-443", "no port between"),
        ("example.com:4_3", "no port between"),
        ("example.com: 443", "no port between"),
        ("example.com:443 ", "no port between"),
        ("example.com:443\n", "no port between"),
        ("example.com:٤٤٣", "no port between"),
        ("example.com:443,", "no port between"),
        ("example.com:,443", "no port between"),
        ("example.com:443-", "no port between"),
        ("example.com:1-2-3", "no port between"),
        ("example.com:443,*", "no port between"),
        ("example.com:9-8", "ends before it begins"),
        ("example.com:1-65", "65 ports"),
        ("example.com:1-65535", "65535 ports"),
        ("example.com:1-32,101-133", "65 ports"),
        ("example.com:" + "443," * 1000 + "443", "too many ports"),
        ("example.com:443:443", "two colons"),
        ("https://example.com:443", "is a URL; write the host only, as in example.com:443$"),
        ("http://example.com/x?y", "is a URL; write the host only, as in example.com$"),
        ("https://me:secret@example.com", "as in example.com$"),
        ("https://", "as in example.com:443$"),
        ("::1:443", "two colons"),
        ("[::1]:443:443", "two colons"),
        ("[::1]443:443", "bracket"),
        ("[::1", "two colons"),
        ("**:443", "wildcard"),
        ("*.*.com:443", "wildcard"),
        ("a.*.com:443", "wildcard"),
        ("*example.com:443", "wildcard"),
        ("example.*:443", "wildcard"),
        ("*.:443", "no name"),
        ("*.0.0.1:443", "plain spelling"),
        ("*.10.0.0.1:443", "in front of an address"),
        ("*.[::1]:443", "in front of an address"),
        ("a_b.com:443", "underscore"),
        ("127.1:443", "plain spelling"),
        ("2130706433:443", "plain spelling"),
        ("10.0.0.1/8:443", "the range is 10.0.0.0/8"),
        ("[fd00::1]/8:443", "the range is fd00::/8"),
        ("10.0.0.0/33:443", "33 bits"),
        ("[fd00::]/129:443", "129 bits"),
        ("10.0.0.0/08:443", "not a range"),
        ("10.0.0.0/:443", "not a range"),
        ("10.0.0.0/255.0.0.0:443", "not a range"),
        ("10/8:443", "plain spelling"),
        ("10.0.0.0/8/8:443", "plain spelling"),
        ("example.com/8:443", "plain spelling"),
        ("example.com/x:443", "not a range"),
        ("fd00::/8", "two colons"),
        ("[10.0.0.0]/8:443", "plain spelling"),
        ("[::ffff:10.0.0.0]/104:443", "plain spelling"),
        ("[::ffff:10.0.0.0]/8:443", "plain spelling"),
        ("*.10.0.0.0/8:443", "plain spelling"),
        ("get a.b:1", "'get' where a method"),
        (" a.b:1", "'' where a method"),
        ("GET, a.b:1", "'' where a method"),
        ("GET a.b", "no port"),
        ("GET *:1", "name the host"),
        ("GET a.b:*", "name the port"),
        ("GET,TRACE a.b:1", "allows TRACE"),
        ("CONNECT a.b:1", "allows CONNECT"),
        ("GET a.b:1/a b", "no path"),
        ("GET a.b:1/../c", "no path"),
        ("GET a.b:1//c", "no path"),
        ("GET a.b:1/c?d", "no path"),
        ("GET a.b:1/%2e", "no path"),
        ("GET a.b:1/c**", r"'c\*\*' in its path"),
        ("GET 10.0.0.0/8:1", "name the address"),
        ("GET [fd00::]/8:1", "name the address"),
    ],
)
def test_wrong_rules_are_refused(written: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_rule(written, default_ports=(443,) if written == "[::1" else (), ranges=True)


def test_a_range_of_addresses_is_for_operators() -> None:
    assert parse_rule("10.0.0.0/8:443", ranges=True).kind == "range"
    with pytest.raises(ValueError, match="for operators"):
        parse_rule("10.0.0.0/8:443")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("example.com", "example.com", 443),
        ("Example.com.:8443", "example.com", 8443),
        ("192.0.2.7:1", "192.0.2.7", 1),
        ("[2001:db8::7]", "[2001:db8::7]", 443),
        ("[2001:db8::7]:65535", "[2001:db8::7]", 65535),
    ],
)
def test_a_host_and_its_port(text: str, host: str, port: int) -> None:
    assert parse_authority(text, 443) == (parse_host(host), port)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":443", "a.example:", "a.example:0", "a.example:0443", "a.example:*", "a.example:1,2"),
        *("a.example:1-2", "*", "*.example", "u@a.example", "u:p@a.example:1", "[::1", "::1", "127.1:80"),
        *("a.example:1:2", "10.0.0.0/8"),
    ],
)
def test_what_is_not_one_host_and_one_port(text: str) -> None:
    with pytest.raises(ValueError, match=r"has|is|contains"):
        parse_authority(text, 443)


LIST = (
    "example.com:443",
    "*.sub.example.com:443,8443",
    "every.example:*",
    "10.1.0.0/16:5432",
    "[2001:db8::7]:22",
    "[fd00:1::]/32:*",
)


@pytest.mark.parametrize(
    ("host", "port", "by"),
    [
        ("example.com", 443, "example.com:443"),
        ("EXAMPLE.com.", 443, "example.com:443"),
        ("example.com", 444, None),
        ("example.com", 80, None),
        ("www.example.com", 443, None),
        ("com", 443, None),
        ("evilexample.com", 443, None),
        ("example.com.evil.org", 443, None),
        ("sub.example.com", 443, None),
        ("a.sub.example.com", 443, "*.sub.example.com:443,8443"),
        ("a.b.sub.example.com", 8443, "*.sub.example.com:443,8443"),
        ("evilsub.example.com", 443, None),
        ("every.example", 1, "every.example:*"),
        ("every.example", 65535, "every.example:*"),
        ("every.example", 0, None),
        ("every.example", 65536, None),
        ("every.example", -1, None),
        ("10.1.2.3", 5432, "10.1.0.0/16:5432"),
        ("10.2.0.0", 5432, None),
        ("10.1.2.3", 5433, None),
        ("[::ffff:10.1.2.3]", 5432, "10.1.0.0/16:5432"),
        ("[2001:db8:0::7]", 22, "[2001:db8::7]:22"),
        ("[2001:db8::8]", 22, None),
        ("[fd00:1::9]", 22, "[fd00:1::]/32:*"),
        ("[fd00:2::9]", 22, None),
    ],
)
def test_the_judge(host: str, port: int, by: str | None) -> None:
    rule = judge(parse_rules(LIST, ranges=True), parse_host(host), port)
    assert (None if rule is None else str(rule)) == by


def test_no_rules_allow_nothing() -> None:
    assert judge((), parse_host("example.com"), 443) is None
    assert judge(parse_rules(["*:*"]), parse_host("example.com"), 443) is not None


@pytest.mark.parametrize("address", ["8.8.8.8", "127.0.0.1", "[::1]", "[2600::1]"])
def test_a_wildcard_allows_names_and_no_address(address: str) -> None:
    rules = parse_rules(["*:*", "*.com:*"])
    assert judge(rules, parse_host(address), 443) is None
    assert judge((*rules, parse_rule(f"{address}:443")), parse_host(address), 443) is not None


@pytest.mark.parametrize(
    ("wide", "narrow", "answer"),
    [
        ("*:443", "*.example.com:443", True),
        ("*:443", "*:443", True),
        ("*:443", "*:*", False),
        ("*:*", "*:443", True),
        ("*:443", "192.0.2.1:443", False),
        ("*:443", "10.0.0.0/8:443", False),
        ("*.example.com:443", "*.example.com:443", True),
        ("*.example.com:443", "*.a.example.com:443", True),
        ("*.a.example.com:443", "*.example.com:443", False),
        ("*.example.com:443", "*:443", False),
        ("*.example.com:443", "example.com:443", False),
        ("example.com:443", "*.example.com:443", False),
        ("example.com:80-90", "example.com:82,85-90", True),
        ("example.com:80-90", "example.com:82,85-91", False),
        ("example.com:80,82", "example.com:80-82", False),
        ("example.com:443", "example.com:*", False),
        ("10.0.0.0/8:1", "10.1.0.0/16:1", True),
        ("10.1.0.0/16:1", "10.0.0.0/8:1", False),
        ("10.0.0.0/8:1", "10.0.0.0/8:1", True),
        ("10.0.0.0/8:1", "10.9.9.9:1", True),
        ("10.0.0.0/8:1", "[fd00::1]:1", False),
        ("[fd00::]/8:1", "10.0.0.1:1", False),
        ("[fd00::]/8:1", "[fd12::]/16:1", True),
        ("0.0.0.0/0:1", "example.com:1", False),
        ("10.0.0.1:1", "10.0.0.1/32:1", True),
        ("a.b:1", "GET a.b:1/c", True),
        ("a.b:1", "GET a.b:2/c", False),
        ("*:1", "GET a.b:1", True),
        ("* a.b:1", "a.b:1", False),
        ("* a.b:1", "GET a.b:1/c", True),
        ("GET a.b:1", "* a.b:1", False),
        ("GET a.b:1", "GET,POST a.b:1", False),
        ("GET,POST a.b:1", "GET a.b:1/c", True),
        ("GET a.b:1/c", "GET a.b:1", False),
        ("GET a.b:1/c", "GET a.b:1/d", False),
        ("GET a.b:1/c/**", "GET a.b:1/c/d/*", True),
        ("GET a.b:1/c/**", "GET a.b:1/cd", False),
        ("GET a.b:1/*/**", "GET a.b:1/c/d", False),
        ("GET a.b:1/*/**", "GET a.b:1/*/**", True),
    ],
)
def test_one_rule_inside_another(wide: str, narrow: str, answer: bool) -> None:
    assert covers(parse_rule(wide, ranges=True), parse_rule(narrow, ranges=True)) is answer


def test_a_list_names_at_most_64_ports() -> None:
    most = [f"a.example:{port}" for port in range(1, MOST_PORTS + 1)]
    assert count_ports(listed_ports(parse_rules(most))) == MOST_PORTS
    assert len(parse_rules([*most, "b.example:1-64", "c.example:*"])) == MOST_PORTS + 2
    with pytest.raises(ValueError, match="names 65 ports; 64 are the most"):
        parse_rules([*most, "b.example:65"])


def test_a_list_names_its_wrong_rule() -> None:
    with pytest.raises(ValueError, match=r"^'b\\x00d' contains NUL$"):
        parse_rules(["good.example", "b\0d"], default_ports=(443,))


def test_a_list_has_each_rule_once() -> None:
    assert parse_rules(["A.example", "a.example.:443"], default_ports=iter([443])) == (
        HostRule("name", "a.example", ((443, 443),)),
    )


def test_default_ports_are_checked_too() -> None:
    with pytest.raises(ValueError, match="no port between"):
        parse_rule("a.example", default_ports=(0,))


# --- round trips -----------------------------------------------------------------------------------

LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PORTS = st.one_of(
    st.just(EVERY_PORT),
    st.lists(st.integers(1, 65535), min_size=1, max_size=20).map(
        lambda ports: merge_ports((p, p) for p in ports)
    ),
    st.tuples(st.integers(1, 65000), st.integers(0, 40)).map(lambda pair: ((pair[0], pair[0] + pair[1]),)),
)
NAMED = st.builds(HostRule, st.sampled_from(["name", "below"]), NAMES, PORTS)
ANY = st.builds(HostRule, st.just("any"), st.just(""), PORTS)


@given(NAMED | ANY)
def test_a_written_rule_is_read_back(rule: HostRule) -> None:
    assert parse_rule(str(rule)) == rule
    assert parse_rule(str(rule).upper()) == rule
    assert covers(rule, rule)


@given(NAMED | ANY, NAMED | ANY, NAMES, st.integers(1, 65535))
def test_covering_agrees_with_the_judge(wide: HostRule, narrow: HostRule, name: str, port: int) -> None:
    host = parse_host(name)
    if covers(wide, narrow) and judge([narrow], host, port):
        assert judge([wide], host, port)


@given(NAMES, NAMES)
def test_a_wildcard_means_below(parent: str, child: str) -> None:
    rule = parse_rule(f"*.{parent}:443")
    assert judge([rule], parse_host(f"{child}.{parent}"), 443) == rule
    assert judge([rule], parse_host(parent), 443) is None
    assert judge([rule], parse_host(f"{child}{parent}"), 443) is None or f"{child}{parent}".endswith(
        f".{parent}"
    )


@given(st.text(max_size=40))
def test_any_text_is_a_rule_that_is_read_back_or_refused(text: str) -> None:
    try:
        rule = parse_rule(text, default_ports=(443,), ranges=True)
    except ValueError:
        return
    assert parse_rule(str(rule), ranges=True) == rule


@given(st.lists(st.tuples(st.integers(1, 65535), st.integers(0, 5)), max_size=30))
def test_merged_ports_are_the_same_ports(pairs: list[tuple[int, int]]) -> None:
    ranges = [(first, min(first + more, 65535)) for first, more in pairs]
    merged = merge_ports(ranges)
    flat = {port for first, last in ranges for port in range(first, last + 1)}
    assert count_ports(merged) == len(flat)
    assert {port for first, last in merged for port in range(first, last + 1)} == flat
    if 0 < len(flat) <= MOST_PORTS:
        assert parse_ports(",".join(map(str, flat))) == merged


NUMBER = re.compile(r"[1-9][0-9]{0,4}\Z", re.ASCII)
RANGE = re.compile(r"(?P<first>\S+?|\[\S+?\])/(?P<bits>0|[1-9][0-9]{0,2})\Z", re.ASCII)
RANGES = st.lists(
    st.sampled_from(
        ("10.0.0.0", "[fd00::]", "1", "/", "/8", "/0", "/08", "/128", "/1280", " ", "\t", "\u3000", "x")
    ),
    max_size=5,
).map("".join)


@given(st.text(st.sampled_from("0123456789 -+_\u0661a"), max_size=7))
def test_ports_are_read_as_by_a_pattern(text: str) -> None:
    told = (1, 1)
    try:
        told = parse_ports(text)[0] if "-" not in text else told
    except ValueError:
        told = (0, 0)
    if "-" not in text:
        assert (told != (0, 0)) is (NUMBER.match(text) is not None and int(text) <= 65535)


@given(RANGES)
def test_ranges_are_read_as_by_a_pattern(text: str) -> None:
    if "/" not in text:
        return
    told = ""
    try:
        parse_rule(f"{text}:80", ranges=True)
    except ValueError as error:
        told = str(error)
    if "two colons" not in told and "where a method" not in told and "requests to" not in told:
        assert ("is not a range of addresses, as in" in told) is (RANGE.match(text) is None)
