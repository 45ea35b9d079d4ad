"""Which servers keep nothing for one client, so that several clients may have one process.

An entry says so with `shared` in `x-sandbox`, or says no. Of published servers whose sources were read, it is
known: each call has all that it needs, and what they keep is in files that every process of them reads anew.
"""

from __future__ import annotations

from runner.contracts.mcp.launchers import launch_of
from runner.install.request import UnusableSpec
from runner.plugin import Plugin

# Names of programs and of packages. Not: server-everything (levels and subscriptions of a client),
# server-sequential-thinking (a train of thought), browsers (pages).
_KNOWN = frozenset(
    (
        "mcp-server-fetch mcp-server-git mcp-server-time mcp-server-filesystem"
        " @modelcontextprotocol/server-filesystem mcp-server-memory @modelcontextprotocol/server-memory"
    ).split()
)


def keeps_nothing(plugin: Plugin) -> bool:
    said = plugin.details.get("shared")
    if said is not None or plugin.entrypoint is None:
        return said is True
    words = plugin.entrypoint.words
    try:
        launch = launch_of(words)
    except UnusableSpec:
        return False
    return (words[0].rpartition("/")[2] if launch is None else launch.request.name) in _KNOWN
