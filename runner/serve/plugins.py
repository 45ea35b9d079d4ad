"""The plugins behind a door: a supervisor has them in this process, and a fleet elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from runner.lifecycle.feed import BoundedFeed
from runner.lifecycle.spec import LifecycleNews, Status
from runner.protocol.calls import CallRequest, CallResult


class DoorPlugins(Protocol):
    """What `Supervisor` does for a door. Who may start, stop and read plugins, too, the roster knows."""

    def plugins(self) -> list[Status]: ...
    async def make(self, request: CallRequest) -> CallResult: ...
    async def tools(self, name: str, what: str = "tools") -> Sequence[Mapping[str, Any]]: ...
    def subscribe(self) -> BoundedFeed[LifecycleNews]: ...
    async def drain(self, seconds: float) -> None: ...
    def end_feeds(self) -> None: ...
