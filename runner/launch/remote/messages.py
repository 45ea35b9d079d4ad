"""What a host and the monitors of its plugins tell each other.

The host's side needs these classes and nothing of a launch, so they have a module of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from runner.launch.command import Command
from runner.launch.stages import Invocation
from runner.manifest.cache import PLUGIN_CLASSES
from runner.outcome import Advice, Outcome
from runner.plugin import Allowance, Plugin
from sandbox.network.egress import AuditLine
from sandbox.spec import Denial, Limits, Note, Overrides
from sandbox.speed.codec import decode, encode
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from runner.launch.advice.scene import Scene


class LaunchOrder(NamedTuple):
    """What a monitor is to do."""

    invocation: Invocation
    environ: Mapping[str, str]  # the operator's
    cwd: str
    began: float  # on the monotonic clock: when the session asked. Its deadline runs from then
    parks: bool = False  # the plugin's program starts when the host releases it


# Every class that can occur in an order.
ORDER_CLASSES = (
    *(LaunchOrder, Invocation, Overrides, Command),
    *PLUGIN_CLASSES,
)


def decode_order(raw: bytes) -> LaunchOrder:
    order = decode(raw, ORDER_CLASSES)
    assert isinstance(order, LaunchOrder)
    return order


# The word of a host that releases its parked plugin. No signal has this number.
RELEASE = b"\xff"


class Born(NamedTuple):
    pid: int  # of the monitor


class Terms(NamedTuple):
    """Nothing runs yet, and everything is decided: what the plugin will run under."""

    plugin: Plugin
    limits: Limits  # as granted
    declare: tuple[str, ...]  # by the policy: patterns of capabilities the plugin may declare
    host: tuple[str, ...]  # by the policy: patterns of methods it may ask of its host
    policy: str
    unsandboxed: bool
    notes: tuple[Note, ...] = ()
    on_hook_failure: Literal["continue", "abort"] = "continue"  # by the policy
    allowance: Allowance = Allowance()
    decided_by: tuple[tuple[str, str], ...] = ()  # who set each limit, as in Grant


class Parkable(NamedTuple):
    """The cell will be parked. Sent before anything of it exists."""

    facts: bytes  # the facts that it rests on: runner/launch/remote/parking.py


class Parked(NamedTuple):
    """The cell waits for its release."""


class Launched(NamedTuple):
    timings: Mapping[str, float]  # seconds by phase
    pid: int = 0  # of the cell's first process


class Audited(NamedTuple):
    """A connection or a DNS question of the plugin, as it ended. Some are left out for a host that is slow to
    read; the report counts them all."""

    line: AuditLine
    advice: Advice | None = None  # the first time that a host was not reached


class MonitorEnd(NamedTuple):
    outcome: Outcome
    status: int  # the exit status that `runner exec` would have
    explanation: tuple[str, ...] = ()  # lines for people
    report_json: str = ""  # empty: there was nobody to write a report
    scene_json: str = ""  # of a plugin that was started: its session has its stderr

    @property
    def report(self) -> dict[str, Any] | None:
        document: dict[str, Any] | None = json.loads(self.report_json) if self.report_json else None
        return document

    @property
    def scene(self) -> Scene | None:
        """Decoded when it is asked for: few plugins fail, and a host need not know the rules of policies."""
        if not self.scene_json:
            return None
        from runner.launch.advice.scene import SCENE_CLASSES, Scene

        scene = decode(self.scene_json.encode(), SCENE_CLASSES)
        assert isinstance(scene, Scene)
        return scene


def write_scene(scene: Scene | None) -> str:
    return "" if scene is None else encode(scene).decode()


Message = Born | Terms | Parkable | Parked | Launched | Audited | MonitorEnd
MESSAGES = (
    *(Born, Terms, Allowance, Parkable, Parked, Launched, Audited, AuditLine, MonitorEnd),
    *(Outcome, Denial, Note, Advice),
    *PLUGIN_CLASSES,
)


class LaunchDescriptors(NamedTuple):
    """The descriptors a monitor is born with, in the order they are sent."""

    order: int
    contents: int  # of the cage's memory files
    stdin: int
    stdout: int
    stderr: int
    control: int
    host: int  # a pidfd: a process that outlives the host may have inherited the control socket
