from __future__ import annotations

import pytest

from sandbox.broker.judge import find_rule, normal_path, path_matches
from sandbox.network.rules import parse_rule
from tests.tables import one_case


@one_case(
    ("pattern", "path", "matches"),
    [
        ("/a/b", "/a/b", True),
        ("/a/b", "/A/b", False),
        ("/a/b", "/a/b/", False),
        ("/a/*", "/a/b", True),
        ("/a/*", "/a/", False),
        ("/a/*", "/a/b/c", False),
        ("/a/*/c", "/a/b/c", True),
        ("/a/v*", "/a/v", True),
        ("/a/v*.json", "/a/v1.json", True),
        ("/a/v*.json", "/a/v1/x.json", False),
        ("/a/*b*d", "/a/xbybzd", True),
        ("/a/*b*d", "/a/xbybz", False),
        ("/a/**", "/a/b/c/d", True),
        ("/a/**", "/a/", True),
        ("/a/**", "/a", False),
        ("/a/**", "/ab/c", False),
        ("/a/**/z", "/a/z", True),
        ("/a/**/z", "/a/b/c/z", True),
        ("/a/**/z", "/a/b/c/y", False),
        ("/**/b/**/d", "/a/b/c/b/d", True),
        ("/**", "/", True),
        ("/", "/", True),
        ("/", "/a", False),
    ],
)
def test_patterns(pattern: str, path: str, matches: bool) -> None:
    assert path_matches(pattern, path) is matches


def test_a_pattern_takes_no_longer_than_the_product_of_both() -> None:
    assert not path_matches("/**/a" * 20 + "/**/b", "/a" * 2000)
    assert not path_matches("/" + "*a" * 100 + "b", "/" + "a" * 8000)


@one_case(
    ("target", "path"),
    [
        ("/a/b?c=%2f..", "/a/b"),
        ("/%61/%7E%c3%a9/b%20c", "/a/~%C3%A9/b%20c"),
        ("/a/", "/a/"),
        ("/a/.b/...", "/a/.b/..."),
        ("/a;b=c/d", "/a;b=c/d"),
        ("/@a:b", "/@a:b"),
    ],
)
def test_one_normal_path(target: str, path: str) -> None:
    assert normal_path(target) == path


@pytest.mark.parametrize(
    "target",
    [
        *("/a/../b", "/a/./b", "/..", "/.", "/a//b", "//a", "/a/..;x/b", "/a/.;/b", "/a/;x/b", "/a/%2e%2e/b"),
        *(
            "/a%2fb",
            "/a%2Fb",
            "/a%5cb",
            "/a\\b",
            "/a%252fb",
            "/a%",
            "/a%4",
            "/a%zz",
            "/a%00",
            "/a%0a",
            "/a%7f",
        ),
        *("/a/..%20/b", "/a/%20../b", "/a/.%20/b", "/a/. ./b", "/a/.%20./b", "/a/..%C2%A0/b"),
        *("/a/..%20;x/b", "/a/..%3B/b", "/a/b%3bc"),
        *(
            "/a%c2%85",
            "/a%c0%af",
            "/a%ff",
            "/a\x00",
            "/a\n",
            "/a b",
            "/é",
            "a",
            "",
            "*",
            "http://x/a",
            "/a#b",
            "?a",
        ),
    ],
)
def test_what_is_read_in_two_ways_is_refused(target: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        normal_path(target)


RULES = [
    parse_rule(text) for text in ("GET,HEAD a.example:443/x/**", "* a.example:443/y", "PUT *.b.example:8000")
]


@one_case(
    ("method", "host", "port", "path", "place"),
    [
        ("GET", "a.example", 443, "/x/z", 0),
        ("HEAD", "a.example", 443, "/x/z", 0),
        ("POST", "a.example", 443, "/x/z", None),
        ("POST", "a.example", 443, "/y", 1),
        ("GET", "a.example", 444, "/x/z", None),
        ("GET", "c.a.example", 443, "/x/z", None),
        ("PUT", "c.b.example", 8000, "/anything", 2),
        ("PUT", "b.example", 8000, "/anything", None),
        ("get", "a.example", 443, "/x/z", None),
    ],
)
def test_the_rule_that_allows(method: str, host: str, port: int, path: str, place: int | None) -> None:
    assert find_rule(RULES, method, host, port, path) == (None if place is None else RULES[place])


def test_head_is_not_implied_by_get() -> None:
    rules = [parse_rule("GET a.example:443")]
    assert find_rule(rules, "GET", "a.example", 443, "/")
    assert not find_rule(rules, "HEAD", "a.example", 443, "/")


def test_rules_about_this_machine() -> None:
    rules = [parse_rule("GET localhost:8000/a")]
    assert find_rule(rules, "GET", "localhost", 8000, "/a")
    assert not find_rule(rules, "GET", "localhost", 8001, "/a")
    assert not find_rule(rules, "GET", "127.0.0.1", 8000, "/a")
