"""A source of tools: a plugin that a supervisor keeps, or a server elsewhere (remote.py)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import trio

from runner.approvals.tools import identity_of
from runner.contracts.registry import find_contract
from runner.exceptions import PluginError
from runner.gateway.calls import Maker
from runner.gateway.translate import LISTS, command_result, content_result, value_result
from runner.lifecycle.spec import Status
from runner.protocol.dialect import Call
from runner.serve.plugins import DoorPlugins
from runner.serve.sources import PluginSource
from sandbox import surroundings
from sandbox.cache import fingerprint

Lists = Mapping[str, Sequence[Mapping[str, Any]]]


class ToolSource(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def mark(self) -> str:
        """Another one: what is known about it does not count any more."""
        ...

    @property
    def identity(self) -> str:
        """Its name in the record of approved tools."""
        ...

    @property
    def held(self) -> bool:
        """It may not start: it is pending, stopped or in quarantine."""
        ...

    def origin(self) -> str:
        """What its lists belong to. Another entry, place or package is another one. May read files."""
        ...

    @property
    def moved(self) -> bool:
        """Its name was another one's before, or it had another name: a person looks at its first list."""
        ...

    @property
    def look(self) -> str:
        """The command with which a person looks at tools that are withheld."""
        ...

    @property
    def passes(self) -> bool:
        """Its entries and the data of its errors are MCP's own."""
        ...

    @property
    def maker(self) -> Maker | None:
        """What makes its calls. None: what makes those of plugins."""
        ...

    def result(self, tool: str, value: Any) -> dict[str, Any]:
        """What a tool answered, as a client of MCP reads it."""
        ...

    async def lists(self) -> Lists:
        """All that it offers, by the names of lists. Raises PluginFailure, or LookupError if it is gone."""
        ...


class SupervisedSource:
    maker: Maker | None = None

    def __init__(self, source: PluginSource, supervisor: DoorPlugins) -> None:
        self.name, self.mark = source.name, source.digest
        self._plugin = source.plugin
        self._contract = find_contract(source.plugin.contract)
        self._supervisor = supervisor
        self.identity, self.moved = identity_of(source.plugin), source.moved
        server = () if source.server is None else ("--server", source.server)
        self.look = shlex.join(("runner", "allow", "--diff", source.path, *server))
        self.passes = self._contract.plain_entries

    @property
    def held(self) -> bool:
        status = self._status()
        return status is not None and status.state in ("pending", "stopped", "quarantined")

    def origin(self) -> str:
        hosts = self._contract.configurations
        plugin = self._plugin if hosts is None else hosts.installed(self._plugin, surroundings.variables())
        return fingerprint(repr(plugin).encode("utf-8", "replace"))

    def result(self, tool: str, value: Any) -> dict[str, Any]:
        if (content := self._contract.content_of(value)) is not None:
            return content_result(self.name, content)
        output = self._contract.command_output(Call("tool", tool), value)
        return value_result(value) if output is None else command_result(value, output)

    async def lists(self) -> Lists:
        """What the manifest declares needs no start."""
        declared = await trio.to_thread.run_sync(self._contract.declared_tools, self._plugin)
        if declared is not None:
            return {"tools": declared}
        found: dict[str, Sequence[Mapping[str, Any]]] = {"tools": ()}
        with suppress(PluginError):  # it has none
            found["tools"] = await self._supervisor.tools(self.name)
        for listing in self._contract.lists:
            if listing.what in found or listing.declared or listing.what not in LISTS:
                continue
            if listing.offered_as in self._offered():
                with suppress(PluginError):
                    found[listing.what] = await self._supervisor.tools(self.name, listing.what)
        return found

    def _offered(self) -> Mapping[str, Any]:
        status = self._status()
        return {} if status is None or status.identity is None else status.identity.details

    def _status(self) -> Status | None:
        return next((each for each in self._supervisor.plugins() if each.name == self.name), None)
