"""Events of the broker, from the plugin and to it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from runner.contracts.nexo.topics import Topics, is_subject
from runner.protocol.dialect import CallRefused, Refusal
from sandbox.document.diagnostic import quoted
from sandbox.speed.value import NamedTuple

# The source of the host's own events. The SDKs ignore an event without a source.
HOST = "host"


class Stamp(NamedTuple):
    """The fields of an event that only the host may set. With these a plugin could forge another plugin's
    event, or an event of another time."""

    id: str
    timestamp: str


Stamps = Callable[[], Stamp]


def stamp() -> Stamp:
    now = datetime.now(UTC)
    return Stamp(str(uuid.uuid4()), now.isoformat(timespec="microseconds").replace("+00:00", "Z"))


def accept(
    given: Mapping[str, Any], source: str, allowed: Topics, stamps: Stamps
) -> tuple[dict[str, Any] | None, str]:
    """The event a plugin publishes, completed; or None, and the reason it is dropped."""
    topic = given.get("topic")
    if not isinstance(topic, str) or not topic:
        return None, "no_topic"
    if not is_subject(topic):
        return None, "no_subject"
    if not allowed.admits(topic):
        return None, "not_allowed"
    event = complete_event(given.get("event"), topic, source, stamps)
    return event, "" if event is not None else "no_event"


def deliver(method: str, params: Any, topics: Topics, stamps: Stamps, *, ready: bool) -> dict[str, Any]:
    """The event that a notification to the plugin carries. Raises CallRefused."""
    if method != "broker.event":
        message = f"there is no notification {quoted(method)}; nexo has broker.event"
        raise CallRefused(Refusal(0, "-32601", message, "unsupported"))
    topic = params.get("topic") if isinstance(params, Mapping) else None
    if not isinstance(topic, str) or not topics.delivers(topic):
        patterns = ", ".join(topics.subscribed) or "none"
        shown = quoted(topic) if isinstance(topic, str) else "no topic"
        message = f"the plugin is not subscribed to {shown}; its topics: {patterns}"
        raise CallRefused(Refusal(0, "-32602", message, "not_subscribed"))
    if not ready:
        raise CallRefused(Refusal(0, "-32603", "the plugin is not ready for events", "not_ready"))
    return _addressed_event(params, topic, stamps)


def complete_event(given: object, topic: str, source: str, stamps: Stamps) -> dict[str, Any] | None:
    """The event of a plugin, completed. None: it is not an event.

    The scripting SDKs send neither id nor timestamp nor session; the Rust one sends all. Topic and source
    are set by us, whatever the plugin sends.
    """
    if not isinstance(given, dict) or "payload" not in given or not _is_session(given.get("session_id")):
        return None
    event = {
        **stamps()._asdict(),
        "topic": topic,
        "source": source,
        "session_id": given.get("session_id"),
        "payload": given["payload"],
    }
    for extra in ("correlation_id", "metadata"):  # of the scripting SDKs
        if extra in given:
            event[extra] = given[extra]
    return event


def _addressed_event(params: Mapping[str, Any], topic: str, stamps: Stamps) -> dict[str, Any]:
    """An event for a plugin, from an `event` or just a `payload`. Missing fields are filled in."""
    given = params.get("event")
    if not isinstance(given, Mapping):
        given = {name: value for name, value in params.items() if name != "topic"}
    made = {**stamps()._asdict(), "source": HOST, "session_id": None, "payload": None}
    return {**made, **given, "topic": topic}


def _is_session(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, str) or len(value) > 45:  # urn:uuid:… is the longest spelling
        return False
    try:
        uuid.UUID(value)
    except ValueError:
        return False
    return True
