"""A call on its way to a plugin, and its result on the way back: the same two values from the door, the
gateway or a fleet down to the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runner.protocol.dialect import Identity, Kind
from sandbox.speed.value import NamedTuple

OnProgress = Callable[[Mapping[str, Any]], None]


class CallRequest(NamedTuple):
    """What somebody asks of a plugin. The session makes a `Call` of it, which is what its dialect sends."""

    plugin: str  # its name, where several are served
    tool: str  # the plugin's own word
    input: Any = None
    kind: Kind | None = None  # None: the first that its contract has
    seconds: float | None = None  # from when it is made; None: the limit of its contract
    context: Mapping[str, Any] | None = None
    on_progress: OnProgress | None = None
    caller: str = ""  # for the ledger, and for calls that take turns
    key: str | None = None  # the caller's: the same call with the same key is made once
    trace: Mapping[str, str] = {}  # the caller's: as `read_trace` returns it


class CallConfirmation(NamedTuple):
    """A call that a person wants to be asked about."""

    plugin: str
    tool: str
    lines: tuple[str, ...]  # the arguments for people, escaped and cut
    input: Any


# Whether the call may be made. It runs in a thread, and may wait for a person.
Confirm = Callable[[CallConfirmation], bool]


class CallResult(NamedTuple):
    """The result of one call. A call that fails raises PluginError or PluginFailure."""

    value: Any
    identity: Identity
    report: dict[str, Any]  # empty: the process lives on
    stderr: str  # the end of what the plugin wrote there
    invocation: dict[str, Any] | None = None  # the contract's own record of the call, if it has one
