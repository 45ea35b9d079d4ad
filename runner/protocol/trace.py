"""Where a call belongs in somebody's trace: `traceparent` and `tracestate`, as the W3C writes them.

They come from clients and go on to plugins, to servers elsewhere and into records. What is not well-formed is
left out, as the W3C asks: no call fails for it, and nothing else passes by this way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

PARENT, STATE = "traceparent", "tracestate"
_MOST_STATE = 512  # characters
_MOST_MEMBERS = 32
# Of a later version too, as far as this one goes. An id of zeros is none.
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_MEMBER = re.compile(
    r"[ \t]*(?:(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~])?[ \t]*",
    re.ASCII,
)


def read_trace(given: Mapping[str, Any]) -> dict[str, str]:
    """What is well-formed of the `_meta` of a message, of the context of a call, or of headers."""
    parent, state = given.get(PARENT), given.get(STATE)
    if not isinstance(parent, str) or not _PARENT.fullmatch(parent):
        return {}
    return {PARENT: parent, STATE: state} if _is_state(state) else {PARENT: parent}


def _is_state(state: object) -> TypeGuard[str]:
    if not isinstance(state, str) or not state.strip() or len(state) > _MOST_STATE:
        return False
    members = state.split(",")
    if len(members) > _MOST_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return False
    keys = [member.partition("=")[0].strip() for member in members if member.strip()]
    return len(keys) == len(set(keys))
