"""Topics: which events a plugin gets, and where it may publish. The patterns are in the manifest.

A plugin publishes to a subject, which names one topic. The reference host treats a wildcard in a subject as a
plain word, so a plugin can publish to `plugin.inbound.slack.>` there. Here that is not a subject.
"""

from __future__ import annotations

from runner.plugin import Plugin
from sandbox.speed.value import NamedTuple

# The exports of the Plugin that hold the patterns.
SUBSCRIBE, PUBLISH = "broker.subscribe", "broker.publish"


def channel_topics(kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns of a registered channel: those to subscribe to, those to publish to.

    Two each, because `>` stands for one segment or more and never for none.
    """
    outbound, inbound = f"plugin.outbound.{kind}", f"plugin.inbound.{kind}"
    return (outbound, f"{outbound}.>"), (inbound, f"{inbound}.>")


def matches(pattern: str, subject: str) -> bool:
    """`*` stands for one segment, `>` at the end for one or more, everything else for itself."""
    return is_complete(subject) and _matches(pattern, subject)


def _matches(pattern: str, subject: str) -> bool:
    wanted = pattern.split(".")
    # Split no further than the pattern: a plugin may name a topic of half a million segments.
    given = subject.split(".", len(wanted))
    if "" in wanted:
        return False
    for place, word in enumerate(wanted):
        if place == len(given):
            return False
        if word == ">":
            return True
        if word not in ("*", given[place]):
            return False
    return len(wanted) == len(given)


def is_complete(text: str) -> bool:
    """Whether no segment is empty."""
    return bool(text) and ".." not in text and text[0] != "." and text[-1] != "."


def is_subject(text: str) -> bool:
    """Whether it names one topic: no wildcards, no empty segment, and no character that ends the name in a
    broker's text protocol (a space or a line break would turn the rest into a command there)."""
    if "*" in text or ">" in text or not is_complete(text):
        return False
    return text.isprintable() and not any(character.isspace() for character in text)


class Topics(NamedTuple):
    subscribed: tuple[str, ...] = ()
    publishable: tuple[str, ...] = ()

    def delivers(self, subject: str) -> bool:
        return is_subject(subject) and any(_matches(pattern, subject) for pattern in self.subscribed)

    def admits(self, subject: str) -> bool:
        return is_subject(subject) and any(_matches(pattern, subject) for pattern in self.publishable)


def read_topics(plugin: Plugin) -> Topics:
    exports = dict(plugin.exports)
    return Topics(exports.get(SUBSCRIBE, ()), exports.get(PUBLISH, ()))
