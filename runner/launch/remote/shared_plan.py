"""A plan that the process of one launch has made, and that the shared monitor of a host carries out.

A monitor takes 5 MB, more than all else beside the plugin, and most of its life it waits. So one monitor
(runner/launch/remote/shared_monitor.py) starts the plugins of a host and waits for all of them. What comes
before the start may take long: manifest and plugin decide how much there is to read, and other plugins must
not wait for that. So each launch has a process of its own up to its plan. That process sends the plan, the
sources that it has opened and the host's descriptors to the shared monitor, with one end of a socket as a
receipt. The monitor writes a byte there when it takes the launch, and closes it when it begins with it. The
process of the launch ends then. It carries out the plan itself if the plan cannot be shared, or if the
monitor does not take it in time: the monitor cannot write the byte once reading is shut down.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from runner.launch.carry_out import CalledOff
from runner.launch.denylist import make_denylist, writes_outside
from runner.launch.remote.descriptors import send_descriptors
from runner.launch.remote.messages import ORDER_CLASSES, LaunchDescriptors, LaunchOrder
from runner.launch.sources import HeldSources, Sources, survey_again
from runner.launch.stages import Planned, decode_planned, encode_planned
from sandbox import facts
from sandbox.files import write_all
from sandbox.limits.assign import assign
from sandbox.limits.cgroup_survey import survey
from sandbox.paths.denylist import Denylist
from sandbox.paths.mounts import read_mounts
from sandbox.plan.plan import OpenPlan
from sandbox.spawn.machine_code import executable
from sandbox.speed.codec import decode, encode
from sandbox.speed.value import NamedTuple

# Of plan and environment. They stay in the shared monitor's memory, and it must not wait until a host has
# read them.
_MOST_BYTES = 128 << 10
_SHARED, _NOT_SHARED = b"s", b"n"  # the whole message, but for descriptors
_LEAST_CPU = 0.1  # processors
MOST_SOURCES = 128  # the kernel passes 253 descriptors at once
_TAKE_SECONDS = 0.5
_TAKEN = b"t"


class SharedPlan(NamedTuple):
    """What the shared monitor has to know beside the plan."""

    order: LaunchOrder
    sources: tuple[str, ...]  # the destinations of the descriptors, in their order
    since: float  # on the monotonic clock: when the plan was made
    where: tuple[bytes, ...]  # the process that made it: `surroundings`


class SharedMonitor(NamedTuple):
    """The shared monitor, as the fork server and the processes that plan see it."""

    plans: socket.socket  # SOCK_SEQPACKET: each message is one launch

    def pass_by(self) -> None:
        """Tell it that the launch of this process is not for it, unless it has the launch."""
        with self.plans, suppress(OSError):  # also if it is closed
            self.plans.send(_NOT_SHARED, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def is_open(self) -> bool:
        """Whether it lives, and takes more plugins."""
        closed = select.poll()
        closed.register(self.plans, 0)  # poll reports a hang-up without being asked
        return not closed.poll(0)


class HandedOver(CalledOff):
    """The shared monitor has the launch. Nothing of it may be touched any more."""


def can_be_shared(planned: Planned) -> bool:
    """Whether a process may carry out this plan beside others: it never waits for long for this plugin, has
    no secret of it, and changes nothing about itself.

    A plugin with very little of a processor, or of a disk, starts slowly, and the others wait for that.
    Folders that a plugin writes are measured for a disk limit, and searched for files that it has left:
    that takes as long as the plugin likes. A gate is forked, and would have the memory of other sessions.
    Without a cage the process inherits the plugin's orphans. Where no nameless file can be executed, the
    cell's init stays a copy of the process.
    """
    decided, plan = planned.decided, planned.plan
    return (
        not planned.grant.unsandboxed
        and decided.signed is None
        and not planned.provision.observed
        and plan.egress is None
        and plan.limits.disk is None
        and plan.limits.io is None
        and (plan.limits.cpu is None or plan.limits.cpu >= _LEAST_CPU)
        and not plan.memory_files
        and not plan.guards
        and not writes_outside(decided)
        and _executes_nameless_files()
    )


def _executes_nameless_files() -> bool:
    try:
        os.close(executable("runner-probe"))
    except OSError:
        return False
    return True


def hand_over(
    monitor: SharedMonitor,
    order: LaunchOrder,
    planned: Planned,
    sources: Mapping[str, int],
    descriptors: LaunchDescriptors,
) -> bool:
    """Give the launch of this process to the shared monitor. Returns when that has begun with it, so that the
    host knows by then whose pid to use. False: the monitor did not take the launch, and never will."""
    told = SharedPlan(order, tuple(sources), time.monotonic(), surroundings())
    content = encode(told) + b"\n" + encode_planned(planned)
    if len(content) > _MOST_BYTES or len(sources) > MOST_SOURCES:
        return False
    with ExitStack() as stack:
        try:
            memory = os.memfd_create("runner-plan", os.MFD_CLOEXEC)
            stack.callback(os.close, memory)
            write_all(memory, content)
            receipt, theirs = map(stack.enter_context, socket.socketpair())
            # Contents of memory files are not passed on: a plan with some is not shared.
            sent = descriptors._replace(order=memory, contents=memory)
            send_descriptors(monitor.plans, _SHARED, (*sent, theirs.fileno(), *sources.values()))
            theirs.close()
            if not _was_taken(receipt):
                return False
        except OSError:  # it has ended, takes no more, or has no room for messages
            return False
        monitor.plans.close()
        ended = select.poll()
        ended.register(receipt, 0)  # poll reports a hang-up without being asked
        ended.poll()
    return True


def _was_taken(receipt: socket.socket) -> bool:
    receipt.settimeout(_TAKE_SECONDS)
    try:
        return receipt.recv(1) == _TAKEN
    except TimeoutError:
        receipt.shutdown(socket.SHUT_RD)  # the kernel orders this and the monitor's byte
        return receipt.recv(1) == _TAKEN


def take(receipt: int) -> bool:
    """In the shared monitor: take a launch. False: its process carries it out itself."""
    with socket.socket(fileno=os.dup(receipt)) as sender:
        try:
            return sender.send(_TAKEN, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == 1
        except OSError:
            return False


def decode_shared(raw: bytes) -> tuple[SharedPlan, Planned]:
    head, _, body = raw.partition(b"\n")
    told = decode(head, (SharedPlan, *ORDER_CLASSES))
    assert isinstance(told, SharedPlan)
    return told, decode_planned(body)


def surroundings() -> tuple[bytes, ...]:
    """What this process sees of mounts and cgroups. Equal for two processes: what one has found out about
    them is true for the other."""
    return facts.content("/proc/self/mountinfo"), facts.content("/proc/self/cgroup")


class GivenSources(Sources):
    """Sources that another process of ours has opened and judged just now. The caller closes them."""

    def __init__(self, descriptors: Mapping[str, int], where: tuple[bytes, ...]) -> None:
        """`where`: the surroundings of that process."""
        super().__init__()
        self._descriptors = descriptors
        self._where = where

    def held_for(self, planned: Planned, environ: Mapping[str, str]) -> HeldSources:
        """The cgroups are looked at again only if they may be others than the plan was made with: if this
        process is in another one, or if the plan relies on who else is in it."""
        opened, limits = OpenPlan(planned.plan, self._descriptors), planned.limits
        sites, own = planned.provision.sites, planned.provision.own_groups
        look_again = survey_again(planned)
        if self._where != surroundings() or any(site.enable for site in sites):
            found = survey(read_mounts(), move_host=planned.policy.move_host)
            limits, sites, own = assign(planned.grant, planned.policy, found), found.sites, found.own
            look_again = lambda: found  # noqa: E731 -- the same function with an answer that is known

        def denylist() -> Denylist:
            # Of what this process opens itself: the state directory.
            return make_denylist(planned.decided, planned.bwrap, read_mounts(), environ)

        self._held = HeldSources(opened, limits, sites, own, look_again, denylist)
        return self._held
