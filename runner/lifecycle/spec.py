"""What a supervisor is given about a plugin, and what it tells about it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runner.launch.stages import Invocation
from runner.library import OpenArguments, Path, hide_secrets, make_invocation
from runner.lifecycle.machine import Hold, StateName
from runner.protocol.dialect import Identity
from runner.protocol.host_services import Services
from runner.supervision import Supervision, fault_of


class Spec(NamedTuple):
    """A plugin to supervise. The fields from `server` to `ssh` are those of `runner.open_plugin`."""

    name: str  # unique in its supervisor
    path: Path
    server: str | None = None
    contract: str | None = None
    policy: Path | None = None
    config: Any = None
    limits: Mapping[str, str | float] | None = None
    services: Any = None  # a runner.Services; for a supervisor on asyncio, a runner.aio.Services
    environ: Mapping[str, str] | None = None
    secrets: Mapping[str, Any] | None = None
    options: Mapping[str, str] | None = None
    env: Mapping[str, str] | None = None
    args: Sequence[str] = ()
    state_dir: Path | None = None
    staged: bool = False
    hide: Sequence[str] = ()
    ssh: Sequence[str] = ()
    parked: int | None = None  # as of `runner.open_plugin`; None: 1 for a plugin that is eager, else 0
    pending: str = ""  # why it may not start, such as an approval that is missing
    # "stopped" or "quarantined", and why: how it begins, because it was so before. `start` or `reset` ends
    # it.
    held: tuple[Hold, str] = ("", "")
    numbers: Mapping[str, Any] = {}  # in place of the contract's: fields of runner.supervision.Supervision

    def checked(self) -> Spec:
        """The same with its secrets hidden. Raises ValueError."""
        if not self.name or not self.name.isprintable():
            raise ValueError(f"name: {self.name!r} is not a name: a text that can be printed")
        if not os.fspath(self.path):
            raise ValueError("path: its value is empty")
        if self.held[0] not in ("", "stopped", "quarantined"):
            raise ValueError(f"held: {self.held[0]!r} is not 'stopped' or 'quarantined'")
        if self.parked is not None and self.parked < 0:
            raise ValueError(f"parked: {self.parked} is not a number of cages: 0 or more")
        if not isinstance(self.services, Services | None):
            raise ValueError("services: it has to be a runner.Services")
        self.adjust(Supervision())
        return self._replace(secrets=hide_secrets(self.secrets))

    def adjust(self, given: Supervision) -> Supervision:
        """The contract's numbers, with the operator's in their place. Raises ValueError."""
        unknown = [name for name in self.numbers if name not in Supervision._fields]
        if unknown:
            raise ValueError(f"numbers: there is no {unknown[0]!r}; there are {', '.join(given._fields)}")
        adjusted = given._replace(**self.numbers)
        if fault := fault_of(adjusted):
            raise ValueError(f"numbers: {fault}")
        return adjusted

    def invocation(self) -> Invocation:
        """What is launched. May read the manifest. Raises ValueError."""
        return make_invocation(self.path, self.opening())

    def opening(self) -> OpenArguments:
        return OpenArguments(
            server=self.server,
            contract=self.contract,
            policy=self.policy,
            config=self.config,
            limits=self.limits,
            services=self.services,
            environ=self.environ,
            secrets=self.secrets,
            options=self.options,
            env=self.env,
            args=self.args,
            state_dir=self.state_dir,
            staged=self.staged,
            hide=self.hide,
            ssh=self.ssh,
        )


class Status(NamedTuple):
    name: str
    contract: str  # empty: its manifest could not be read
    state: StateName
    reason: str  # why it is held, or why it failed last
    since: float  # seconds since 1970
    attempts: int  # failures in a row
    restarts: int  # since it was added
    sessions: int  # cells that live
    parked: int  # cages that wait for calls, where each call has a process of its own
    in_flight: int  # calls
    queued: int  # calls
    pids: tuple[int, ...]  # the first process of each cell; none where each call has a process of its own
    identity: Identity | None  # None: it has not come up yet
    most_in_flight: int = 0  # calls; 0: any number
    most_queued: int = 0  # calls


class LifecycleNews(NamedTuple):
    """A change in the life of a plugin."""

    name: str
    state: StateName
    reason: str
    time: float  # seconds since 1970
    # "state": it got another one. Otherwise what happened: "crashed", "respawning", "respawned", "gave_up",
    # "restarted".
    what: str = "state"
    # attempt, seconds (of the pause), exit_code (-1: a signal, or it never ran), stderr (its end),
    # total_uptime, uptime (of the cell that ended), pid and time.
    facts: Mapping[str, Any] = {}
