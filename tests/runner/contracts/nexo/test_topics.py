"""nexo's topics: the matcher, what is a subject, and which patterns a manifest gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.contracts.nexo import manifest, topics
from sandbox.document.read import parse


@pytest.mark.parametrize(
    ("pattern", "subject", "matched"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.B", False),
        ("a.b", "a", False),
        ("a", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("*", "a", True),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        ("a.>", "a.b", True),
        ("a.>", "a.b.c.d", True),
        ("a.>", "a", False),
        (">", "a", True),
        (">", "a.b", True),
        # What follows the first `>` is not looked at.
        ("a.>.z", "a.b", True),
        ("a.>.z", "a", False),
        ("*.>", "a.b", True),
        ("*.>", "a", False),
        # Nothing matches an empty segment, and an empty segment matches nothing.
        ("", "", False),
        ("", "a", False),
        ("a", "", False),
        ("a..b", "a..b", False),
        ("a.*", "a.", False),
        ("a.>", "a.", False),
        ("a.>", "a..b", False),
        (">", "", False),
        (">", ".", False),
        ("a.", "a", False),
        # Part of a segment is no wildcard.
        ("a.b*", "a.bc", False),
    ],
)
def test_matcher(pattern: str, subject: str, matched: bool) -> None:
    assert topics.matches(pattern, subject) is matched


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("plugin.inbound.slack", True),
        ("a", True),
        ("é.ü-1_x", True),
        ("", False),
        (".", False),
        ("a.", False),
        ("a..b", False),
        ("a.*", False),
        ("a.>", False),
        ("a.b*", False),
        ("a>b", False),
        # What a broker with a text protocol would read as the end of the name.
        ("a.b c", False),
        ("a.b\r\nPUB agent.route 0", False),
        ("a.\tb", False),
        ("a.\x00", False),
        ("a.\u2028b", False),
        ("a.\u00a0b", False),
    ],
)
def test_subject(text: str, is_one: bool) -> None:
    assert topics.is_subject(text) is is_one


@given(st.text(alphabet="ab.*> ", max_size=12), st.text(alphabet="ab.*> ", max_size=12))
def test_a_pattern_with_no_wildcard_matches_itself_only(pattern: str, subject: str) -> None:
    if topics.is_subject(pattern):
        assert topics.matches(pattern, subject) is (pattern == subject)
    if topics.is_subject(subject):
        assert topics.matches(">", subject)


HEAD = """\
manifest_version = 2
[plugin]
id = "demo"
version = "1.2.3"
name = "Demo"
description = "A demo."
min_nexo_version = ">=0.1.0"
"""

SLACK = '[[plugin.channels.register]]\nkind = "slack"\n'
OUT, IN = "plugin.outbound.slack", "plugin.inbound.slack"
BOTH = (OUT, f"{OUT}.>"), (IN, f"{IN}.>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ((), ())),
        (SLACK, BOTH),
        ('[plugin.extends]\nchannels = ["slack"]\n', ((), ())),
        ('[plugin.subscriptions]\nbroker_topics = ["news.>"]\n', ((), ())),
        (
            '[plugin.capabilities.broker]\nsubscribe = ["news.*"]\npublish = ["shout"]\n',
            (("news.*",), ("shout",)),
        ),
        (
            SLACK + '[plugin.capabilities.broker]\nsubscribe = ["plugin.outbound.slack", "x"]\n',
            ((*BOTH[0], "x"), BOTH[1]),
        ),
    ],
)
def test_patterns_of_a_manifest(text: str, expected: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    plugin, diagnostics = manifest.read(parse("/p/plugin.toml", (HEAD + text).encode(), "toml"))
    assert plugin is not None, [d.text() for d in diagnostics]
    assert topics.read_topics(plugin) == topics.Topics(*expected)


def test_directions_are_apart() -> None:
    allowed = topics.Topics(*BOTH)
    assert allowed.admits("plugin.inbound.slack.team") and not allowed.delivers("plugin.inbound.slack.team")
    assert allowed.delivers("plugin.outbound.slack") and not allowed.admits("plugin.outbound.slack")
    assert not topics.Topics((">",), (">",)).admits("a.>")
    assert not topics.Topics((">",), (">",)).delivers("a.*")


def test_a_topic_of_a_million_letters_is_not_taken_apart_for_each_pattern() -> None:
    """The same as for short ones, and with no more pieces than the pattern has."""

    class Subject(str):
        pieces = 0

        def split(self, *given: Any, **more: Any) -> list[str]:
            found = super().split(*given, **more)
            Subject.pieces += len(found)
            return found

    long = Subject("a" + ".a" * 500_000)
    allowed = topics.Topics(publishable=("b.>", "a", "a.a", "*.b.>"))
    assert not allowed.admits(long)
    assert topics.Topics(publishable=(*allowed.publishable, "a.*.>")).admits(long)
    assert 0 < Subject.pieces < 100
