"""host/log: what a plugin logs becomes an event of its session, from the host's lowest level on."""

from __future__ import annotations

from typing import Any

from runner.contracts.ainb.host.params import invalid
from runner.protocol.dialect import Notice
from runner.protocol.memory import size_of
from sandbox.document.diagnostic import quoted

LEVELS = ("trace", "debug", "info", "warn", "error")
DEFAULT_LEVEL = "warn"

MESSAGE_MOST = 4096  # characters; the rest is cut off
_SHOWN_CHARACTERS = 40  # of an unknown level
FIELDS_MOST_BYTES = 8 << 10  # in memory; larger fields are left out


def check_level(level: str) -> str:
    """For Services.log_level. Raises ValueError."""
    if level not in (*LEVELS, "off"):
        raise ValueError(f"the log level {level!r} is none of {', '.join(LEVELS)}, off")
    return level


def log_notice(plugin_id: str, lowest: str, level: str, message: str, fields: Any) -> Notice | None:
    """None: the host does not want it. Raises HostError if there is no such level."""
    if level not in LEVELS:
        raise invalid(f"there is no log level {quoted(level[:_SHOWN_CHARACTERS])}")
    if lowest == "off" or LEVELS.index(level) < LEVELS.index(lowest):
        return None
    value: dict[str, Any] = {"plugin": plugin_id, "level": level, "message": message[:MESSAGE_MOST]}
    if len(message) > MESSAGE_MOST:
        value["cut"] = len(message) - MESSAGE_MOST
    if fields is not None:
        size = size_of(fields)
        if size is not None and size <= FIELDS_MOST_BYTES:
            value["fields"] = fields
        else:
            value["fields_left_out"] = True
    return Notice("log", value)
