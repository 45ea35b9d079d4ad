"""Which topics a plugin may read and publish: by the list form of its grant, and by the names themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# What agents of the user do. Only an exact entry of a grant covers such a topic: neither `true` nor a
# wildcard does. Plugins never publish there.
FLEET = "fleet."
# Each plugin has its own, under its id: two plugins would overwrite each other's state.
UI_STATE = "ui.state"
# Asks the host to close the screen in front. Only the owner of that screen may ask.
UI_CLOSE = "ui.close_request"

_CLOSE_MOST_BYTES = 64 << 10  # of such a request's payload


def covers(entries: Sequence[str] | None, topic: str) -> bool:
    """Whether a grant covers the topic. None: the grant is `true`. An entry `x*` is a prefix."""
    if topic.startswith(FLEET):
        return entries is not None and topic in entries and not topic.endswith("*")
    if entries is None:
        return True
    return any(topic.startswith(entry[:-1]) if entry.endswith("*") else topic == entry for entry in entries)


def stored_topic(topic: str, plugin_id: str) -> str | None:
    """Under which topic a plugin's publication is stored. None: it may not publish there."""
    own = f"{UI_STATE}/{plugin_id}"
    if topic == UI_STATE:
        return own
    if topic.startswith((FLEET, UI_STATE + "/")) and topic != own:
        return None
    return topic


def asks_to_close(payload: bytes) -> str | None:
    """The screen that a payload on UI_CLOSE names. None: it names none."""
    if len(payload) > _CLOSE_MOST_BYTES:
        return None
    try:
        value: Any = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    screen = value.get("screen_id") if isinstance(value, dict) else None
    return screen if isinstance(screen, str) else None
