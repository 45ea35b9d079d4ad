"""An application of another package at a path of the door. It is loaded when it is first asked for.

Its dependencies may be missing: then every request is told which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import trio

from runner.ledger.ledger import Ledger
from runner.protocol.dialect import Notice, Progress
from runner.serve.desk import Desk
from runner.serve.door import Message, Receive, Send
from runner.serve.pending import PendingConfirmations
from runner.serve.plugins import DoorPlugins
from runner.serve.refusal import Refused
from runner.serve.roster import Roster


class DaemonParts(NamedTuple):
    """What a daemon shares with it."""

    supervisor: DoorPlugins
    desk: Desk
    roster: Roster
    ledger: Ledger
    pending: PendingConfirmations
    policy: str | None = None


class MountedApplication(Protocol):
    def hear(self, plugin: str, event: Notice | Progress) -> None: ...
    def questions(self) -> Iterator[dict[str, Any]]:
        """What a person has to look at: rows of plugin, tool, change and command."""
        ...

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None: ...


class CannotMount(Exception):
    """A dependency is missing. `remedy`: the command that installs it, for those who run the daemon."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


# Imports the application. Raises CannotMount.
LoadApplication = Callable[
    [], Callable[[DaemonParts, trio.Nursery, Callable[[str], None]], MountedApplication]
]


class DoorMount(NamedTuple):
    path: str
    load: LoadApplication


class Mounted:
    def __init__(self, mount: DoorMount, say: Callable[[str], None]) -> None:
        self.path, self._load = mount
        self._say = say
        self._turn = trio.Lock()
        self._application: MountedApplication | None = None
        self.parts: DaemonParts | None = None
        self.nursery: trio.Nursery | None = None

    def hear(self, plugin: str, event: Notice | Progress) -> None:
        if self._application is not None:
            self._application.hear(plugin, event)

    def questions(self) -> Iterator[dict[str, Any]]:
        """None before it was first asked for: nothing is withheld from nobody."""
        return iter(()) if self._application is None else self._application.questions()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Raises Refused."""
        try:
            async with self._turn:
                if self._application is None:
                    make = await trio.to_thread.run_sync(self._load)
                    assert self.parts is not None and self.nursery is not None
                    self._application = make(self.parts, self.nursery, self._say)
        except CannotMount as missing:
            self._say(f"{self.path}: {missing}; install it with {missing.remedy}")
            hint = "the daemon's stderr has the command that installs it"
            raise Refused(501, "not_installed", str(missing), hint) from None
        await self._application(scope, receive, send)
