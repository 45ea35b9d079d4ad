"""The two eras of MCP, and the fields each adds to a request.

Modern (2026-07-28): the server remembers no handshake, so each request names the client and its capabilities.
Legacy (2025-11-25 and before): the client names them once, in `initialize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runner import __version__
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import Identity
from sandbox.speed.value import NamedTuple

# Newest first.
MODERN: Final = ("2026-07-28",)
LEGACY: Final = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
# The only revision in which a server may send several messages as one array.
WITH_BATCHES: Final = "2025-03-26"

PREFIX: Final = "io.modelcontextprotocol/"
SERVICES: Final = ("roots", "sampling", "elicitation")

# Modern servers log only for requests that name a level.
LOG_LEVEL: Final = "info"

# Characters of a name or a version that are kept for display. A server may send any length.
NAME_LIMIT: Final = 256

_WORDS: Final = frozenset(("protocolVersion", "capabilities", "serverInfo"))  # of the answer to initialize


class Era(NamedTuple):
    """The version that client and server have agreed on."""

    protocol: str
    modern: bool

    @property
    def batches(self) -> bool:
        return self.protocol == WITH_BATCHES


def client_info() -> dict[str, str]:
    return {"name": "runner", "version": __version__}


def capabilities(services: frozenset[str]) -> dict[str, Any]:
    """The requests that a server may send to us: only for services that the host offers."""
    return {name: {} for name in SERVICES if name in services}


def envelope(version: str, services: frozenset[str]) -> dict[str, Any]:
    """`_meta` of a modern request."""
    return {
        f"{PREFIX}protocolVersion": version,
        f"{PREFIX}clientCapabilities": capabilities(services),
        f"{PREFIX}clientInfo": client_info(),
    }


def initialize(version: str, services: frozenset[str]) -> dict[str, Any]:
    return {
        "protocolVersion": version,
        "capabilities": capabilities(services),
        "clientInfo": client_info(),
    }


def common(ours: tuple[str, ...], theirs: Any) -> str | None:
    """The newest version that both know."""
    return next((version for version in ours if isinstance(theirs, list) and version in theirs), None)


def discovered(plugin_id: str, result: Any) -> Identity | None:
    """The server's identity, from a DiscoverResult with a version we speak. None: it is no such result, or it
    offers only the legacy era."""
    if not isinstance(result, dict) or result.get("resultType", "complete") != "complete":
        return None
    version = common(MODERN, result.get("supportedVersions"))
    said = result.get("capabilities")
    if version is None or not isinstance(said, dict):
        return None
    meta = result.get("_meta")
    info = meta.get(f"{PREFIX}serverInfo") if isinstance(meta, dict) else None
    return _identity(plugin_id, version, info, said, result)


def initialized(plugin_id: str, result: Any) -> Identity | str:
    """The server's identity, from the answer to `initialize`; or the fault of that answer."""
    if not isinstance(result, dict):
        return "it is not an object"
    if odd := odd_key(result, _WORDS):
        return odd
    info, said, version = result.get("serverInfo"), result.get("capabilities"), result.get("protocolVersion")
    if not isinstance(version, str):
        return "it has no protocolVersion"
    if not isinstance(said, dict):
        return "capabilities is not an object"
    if not isinstance(info, dict) or not isinstance(info.get("name"), str):
        return "serverInfo has no name"
    if not isinstance(info.get("version"), str):
        return "serverInfo has no version"
    return _identity(plugin_id, version, info, said, result)


def _identity(
    plugin_id: str, version: str, info: Any, said: Mapping[str, Any], result: Mapping[str, Any]
) -> Identity:
    shown = info if isinstance(info, dict) else {}
    return Identity(
        id=plugin_id,
        version=_text(shown.get("version"))[:NAME_LIMIT],
        protocol=version,
        title=(_text(shown.get("title")) or _text(shown.get("name")))[:NAME_LIMIT],
        instructions=_text(result.get("instructions")),
        details=said,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
