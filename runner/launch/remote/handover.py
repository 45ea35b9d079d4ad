"""A launch that one monitor has planned, and that another carries out.

A plugin's monitor takes more memory than all else beside the plugin, and most of its life it waits. So one
monitor, the keeper (runner/launch/remote/keeper.py), waits for the plugins of a host. The parent-death
signal of a cell's init follows the process that cloned it, so the process that waits has to start the
plugin too. What comes before the start may take long: manifest and plugin decide how much there is to read,
and other plugins must not wait for that. So each launch has a process of its own up to its plan. That
process offers the plan to the keeper and ends, or carries it out itself:

    monitor -> keeper   one message with the descriptors of Parcel
    keeper -> monitor   by the parcel's socket: TAKEN; TOLD, when it has told the host its pid; and when it
                        is known, STARTED or FAILED. The monitor keeps the plan of a launch that was started,
                        and forgets a kept one that could not be

The keeper begins nothing before it has said TAKEN. A monitor that did not hear it, because the keeper has
ended, or is full, or took too long, has shut that socket: then nobody can say TAKEN any more.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from runner.launch.carry_out import CalledOff
from runner.launch.denylist import make_denylist, writes_outside
from runner.launch.remote.descriptors import receive_descriptors, send_descriptors
from runner.launch.remote.messages import ORDER_CLASSES, Gear, LaunchOrder
from runner.launch.sources import Held, Sources, survey_again
from runner.launch.stages import Planned, decode_planned, encode_planned
from sandbox import facts
from sandbox.codec import decode, encode
from sandbox.files import write_all
from sandbox.limits.assign import assign
from sandbox.limits.cgroup_survey import survey
from sandbox.paths.denylist import Denylist
from sandbox.paths.mounts import read_mounts
from sandbox.plan.plan import OpenPlan
from sandbox.spawn.machine_code import executable
from sandbox.value import NamedTuple

TAKEN, TOLD, STARTED, FAILED = b"t", b"p", b"s", b"f"
PARCEL, KEPT = b"p", b"k"  # the first byte of a message: a parcel; a monitor that carries out its plan itself
# How long a keeper may take to answer. It is at most starting another plugin, or planning its own first one:
# then the launch is carried out by the monitor that has planned it.
_ANSWER_SECONDS = 0.5
_PID_SECONDS = 10.0
_START_SECONDS = 30.0  # then its plan is neither kept nor forgotten
# Of plan and environment. They stay in the keeper's memory, and it must not wait until a host has read them.
_MOST_BYTES = 128 << 10
_LEAST_CPU = 0.1  # processors
_MOST_SOURCES = 128  # the kernel passes 253 descriptors at once


class PlanHandover(NamedTuple):
    order: LaunchOrder
    sources: tuple[str, ...]  # the destinations of the descriptors, in their order
    since: float  # on the monotonic clock: when the plan was made
    where: tuple[bytes, ...]  # the process that made it: `surroundings`


class Parcel(NamedTuple):
    """The descriptors of a launch that is handed over, in the order they are sent. After them come those of
    the plan's sources."""

    handover: int
    answer: int  # a socket
    stdin: int
    stdout: int
    stderr: int
    control: int
    host: int


class PassedOn(CalledOff):
    """Another process carries out the plan."""

    on_start: Callable[[], None] | None = None  # called when the plugin runs
    on_failure: Callable[[], None] | None = None  # called when it could not be started

    def __init__(self, answer: socket.socket) -> None:
        """`answer`: by it the other process says what became of the start. Closed by `conclude`."""
        super().__init__()
        self._answer = answer

    def conclude(self) -> None:
        """Wait for the start. The caller has nothing of the launch open any more: it does not end with us."""
        with self._answer:
            if self.on_start is None and self.on_failure is None:
                return
            word = _next_word(self._answer, _START_SECONDS)
            if not word and _has_ended(self._answer):
                word = FAILED  # the keeper died of it, perhaps: not once more by this plan
        act = {STARTED: self.on_start, FAILED: self.on_failure}.get(word)
        if act is not None:
            act()


def surroundings() -> tuple[bytes, ...]:
    """What this process sees of mounts and cgroups. Equal for two processes: what one has found out about
    them is true for the other."""
    return facts.content("/proc/self/mountinfo"), facts.content("/proc/self/cgroup")


class GivenSources(Sources):
    """Sources that another process of ours has opened and judged just now. Whoever made this closes them."""

    def __init__(self, descriptors: Mapping[str, int], where: tuple[bytes, ...]) -> None:
        """`where`: the surroundings of that process."""
        super().__init__()
        self._descriptors = descriptors
        self._where = where

    def hold_again(self, planned: Planned, environ: Mapping[str, str]) -> Held:
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

        self._held = Held(opened, limits, sites, own, look_again, denylist)
        return self._held


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


# --- in the monitor that has a plan -------------------------------------------------------------------------


def offer(
    keeper: socket.socket, handover: PlanHandover, planned: Planned, sources: Sequence[int], gear: Gear
) -> None:
    """Offer a launch to the keeper. Raises PassedOn: it is the keeper's now, and nothing of it may be touched
    any more.

    A word of the host, or its end, ends the waiting: then the caller has to look for it.
    """
    content = encode(handover) + b"\n" + encode_planned(planned)
    if len(content) > _MOST_BYTES or len(sources) > _MOST_SOURCES:
        return
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(ours)
        stack.enter_context(theirs)
        memory = os.memfd_create("runner-handover", os.MFD_CLOEXEC)
        try:
            write_all(memory, content)
            parcel = Parcel(
                memory, theirs.fileno(), gear.stdin, gear.stdout, gear.stderr, gear.control, gear.host
            )
            send_descriptors(keeper, PARCEL, (*parcel, *sources))
        except OSError:  # it has ended, or has no room for messages
            return
        finally:
            os.close(memory)
        theirs.close()
        if _is_taken(ours, gear.control):
            stack.pop_all()
            raise PassedOn(ours)


def _is_taken(answer: socket.socket, control: int) -> bool:
    wait = select.poll()
    wait.register(answer, select.POLLIN)
    wait.register(control, select.POLLIN)
    wait.poll(_ANSWER_SECONDS * 1000)
    if _next_word(answer) == TAKEN:
        # The host knows our pid, and may kill it, until the keeper has told its own.
        _next_word(answer, _PID_SECONDS)
        return True
    # What has arrived meanwhile can still be read. From now on nothing can arrive.
    answer.shutdown(socket.SHUT_RD)
    if answer.recv(1) != TAKEN:
        return False
    ended = select.poll()
    ended.register(answer, 0)  # poll reports a hang-up without being asked
    ended.poll(_PID_SECONDS * 1000)
    return True


def _has_ended(answer: socket.socket) -> bool:
    """Whether the other side was closed. Nothing is there to be read."""
    wait = select.poll()
    wait.register(answer, 0)
    return bool(wait.poll(0))


def _next_word(answer: socket.socket, seconds: float = 0.0) -> bytes:
    """Empty: there is none in this time, or the keeper has ended."""
    wait = select.poll()
    wait.register(answer, select.POLLIN)
    try:
        return answer.recv(1) if wait.poll(seconds * 1000) else b""
    except OSError:
        return b""


def keep_it(keeper: socket.socket) -> None:
    """Tell the keeper that this launch is none of its."""
    with suppress(OSError):
        keeper.send(KEPT, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


# --- in the keeper ------------------------------------------------------------------------------------------


def receive(door: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """The next message: its word, and its descriptors if all have arrived. Raises OSError. No word: nobody
    can send any more."""
    return receive_descriptors(door, 1, len(Parcel._fields) + _MOST_SOURCES, socket.MSG_DONTWAIT)


class Planner:
    """The monitor that made a plan, as the keeper that carries it out sees it. Nothing here waits."""

    def __init__(self, answer: int) -> None:
        self._answer: socket.socket | None = socket.socket(fileno=answer)

    def take(self) -> bool:
        """Say that this launch is ours now. False: its monitor carries it out itself, or has ended."""
        return self._tell(TAKEN)

    def has_told(self) -> None:
        """The host knows who serves the launch."""
        self._tell(TOLD)

    def conclude(self, word: bytes) -> None:
        """STARTED or FAILED. The monitor ends then."""
        self._tell(word)
        self.close()

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _tell(self, word: bytes) -> bool:
        if self._answer is None:
            return False
        try:
            return self._answer.send(word, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(word)
        except OSError:
            return False


def decode_handover(raw: bytes) -> tuple[PlanHandover, Planned]:
    head, _, body = raw.partition(b"\n")
    handover = decode(head, (PlanHandover, *ORDER_CLASSES))
    assert isinstance(handover, PlanHandover)
    return handover, decode_planned(body)
