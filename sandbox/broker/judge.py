"""Rules about requests: which one allows a method and a path.

A path is compared after one normalisation. A path that two programs may read as two places is refused,
because the server could read another one than we did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from sandbox.network.hosts import Host, read_address
from sandbox.network.rules import LOCALHOST, HostRule, judge, judge_loopback

_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]\Z", re.ASCII)
_NOT_ENCODED = {
    "%2F": "a slash",
    "%5C": "a backslash",
    "%2E": "a dot",
    "%25": "a percent sign",
    "%3B": "a semicolon",
}
_PLAIN = re.compile(r"[\x21-\x7e]*\Z", re.ASCII)

Item = TypeVar("Item")


def rules_of(rules: Sequence[HostRule], host: str, port: int) -> tuple[HostRule, ...]:
    """The rules about requests that are about this host and port."""
    return tuple(rule for rule in rules if rule.methods is not None and is_for(rule, host, port))


def is_for(rule: HostRule, host: str, port: int) -> bool:
    """Whether a rule is about connections to this host and port."""
    connections = (rule.without_requests(),)
    if host == LOCALHOST:
        return judge_loopback(connections, port) is not None
    address = read_address(host)
    return judge(connections, Host(host, address.version if address else 0), port) is not None


def find_rule(rules: Sequence[HostRule], method: str, host: str, port: int, path: str) -> HostRule | None:
    """The rule that allows a request. `path`: as normal_path() writes it."""
    for rule in rules_of(rules, host, port):
        if rule.methods and method not in rule.methods:
            continue  # HEAD is not implied by GET
        if not rule.path or path_matches(rule.path, path):
            return rule
    return None


def path_matches(pattern: str, path: str) -> bool:
    """`*`: anything within a segment; a whole segment of it is not empty. `**`: any number of segments; at
    the end one at least, which may be empty: it stands for what is below."""
    wanted, given = pattern.split("/"), path.split("/")
    if wanted[-1] == "**":
        wanted = [*wanted[:-1], "*?", "**"]
    return _matches(wanted, given, "**", _segment_matches)


def _segment_matches(pattern: str, segment: str) -> bool:
    if pattern == "*?":
        return True
    if pattern == "*":
        return bool(segment)
    return _matches(pattern, segment, "*", str.__eq__)


def _matches(
    pattern: Sequence[Item], given: Sequence[Item], star: Item, same: Callable[[Item, Item], bool]
) -> bool:
    """Whether items match, where `star` stands for any number of them. Never takes longer than their product:
    only the last star met is tried again."""
    at = place = 0
    last, since = -1, 0
    while place < len(given):
        if at < len(pattern) and pattern[at] == star:
            last, since = at, place
            at += 1
        elif at < len(pattern) and same(pattern[at], given[place]):
            at, place = at + 1, place + 1
        elif last >= 0:
            since += 1
            at, place = last + 1, since
        else:
            return False
    return all(item == star for item in pattern[at:])


def normal_path(target: str) -> str:
    """The path of a request's target, which may have a query. Raises ValueError with the rest of a sentence
    that begins with the path."""
    path = target.partition("?")[0]
    if not path.startswith("/") or not _PLAIN.match(path):
        raise ValueError("is not a path of printable characters that begins with a slash")
    if "\\" in path or "#" in path:
        raise ValueError("has a backslash or a number sign, which programs read in different ways")
    if "%" in _ESCAPE.sub("", path):
        raise ValueError("has a percent sign without two digits behind it")
    _check_bytes(_ESCAPE.sub(lambda found: chr(int(found[1], 16)), path).encode("latin-1"))
    path = _ESCAPE.sub(_normal_escape, path)
    segments = path.split("/")[1:]
    for place, segment in enumerate(segments):
        name = segment.partition(";")[0]
        if _is_dots(name):
            raise ValueError("has a segment of dots, which leads to another place")
        if not name and (segment or place < len(segments) - 1):
            raise ValueError("has an empty segment (//), which some servers leave out")
    return path


def _is_dots(name: str) -> bool:
    """Whether a segment leads to another place, for a server that strips blanks too."""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), name).encode("latin-1").decode("utf-8")
    return "".join(plain.split()) in (".", "..")


def _check_bytes(decoded: bytes) -> None:
    try:
        text = decoded.decode("utf-8")  # refuses what is longer than it has to be
    except UnicodeDecodeError:
        raise ValueError("has escapes that are not UTF-8") from None
    if any(ord(character) < 0x20 or 0x7F <= ord(character) <= 0x9F for character in text):
        raise ValueError("has an escaped control character")


def _normal_escape(found: re.Match[str]) -> str:
    escape = found[0].upper()
    if escape in _NOT_ENCODED:
        raise ValueError(
            f"has {_NOT_ENCODED[escape]} as an escape ({escape}), which servers read in two ways"
        )
    character = chr(int(found[1], 16))
    return character if _UNRESERVED.match(character) else escape
