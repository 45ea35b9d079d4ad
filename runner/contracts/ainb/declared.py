"""What a manifest declares beside its cage: the details of the Plugin."""

from __future__ import annotations

from runner.plugin import Plugin
from sandbox.speed.typed import TYPE_CHECKING
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


# In the order in which plugin/init tells the granted ones.
CAPABILITIES = tuple(
    (
        "read_sessions write_plugin_data event_bus network spawn_subprocess read_claude_logs read_codex_logs"
        " read_paths event_stream_subscribe spawn_managed_subprocess unix_socket_dial secrets:read"
        " workspace:write"
    ).split()
)

# The flags that let a plugin read a folder, and the folders: below the caller's home.
READ_ROOTS: Mapping[str, str] = {
    "read_sessions": ".agents-in-a-box/sessions",
    "read_claude_logs": ".claude/projects",
    "read_codex_logs": ".codex/sessions",
}


class Declared(NamedTuple):
    granted: tuple[str, ...] = ()  # names of capabilities, in the order of CAPABILITIES
    lists: Mapping[str, tuple[str, ...]] = {}  # of those that are lists. One that is not here is `true`
    screens: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    cli_namespaces: tuple[str, ...] = ()
    snapshots: tuple[str, ...] = ()  # topics that it publishes
    subscribes: tuple[str, ...] = ()  # topics that it is subscribed to from its start
    latest_state: tuple[str, ...] = ()  # those of them that need no delivery while it is away
    fs_roots: tuple[str, ...] = ()  # absolute folders that host/fs/* may read
    flag_roots: tuple[str, ...] = ()  # the folders of READ_ROOTS, asked for or not; none without a home

    def allows(self, capability: str) -> bool:
        return capability in self.granted

    @property
    def folders(self) -> tuple[tuple[str, str], ...]:
        """Each flag of READ_ROOTS and its folder."""
        return tuple(zip(READ_ROOTS, self.flag_roots, strict=False))


def exports_of(declared: Declared) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What `runner tools` lists."""
    return (
        ("tools", declared.cli_namespaces),
        ("screens", declared.screens),
        ("commands", declared.commands),
        ("snapshots", declared.snapshots),
    )


def declared_by(plugin: Plugin) -> Declared:
    return Declared(**plugin.details)
