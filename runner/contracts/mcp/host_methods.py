"""The requests of an MCP server to its host, and the service that answers each."""

from __future__ import annotations

from sandbox.speed.typed import Final, Mapping

METHODS: Final[Mapping[str, str]] = {
    "roots/list": "roots",
    "sampling/createMessage": "sampling",
    "elicitation/create": "elicitation",
}
