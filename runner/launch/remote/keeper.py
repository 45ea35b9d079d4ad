"""The process of a monitor: it waits for one plugin, and may wait for others of the same host too.

The first monitor that a fork server forks has a door: a socket by which other monitors hand their launches
over when they are planned (runner/launch/remote/handover.py). It is then the keeper of those plugins. One
poll waits for all of them, and each has its turn when something of its own is ready or due. They share
nothing else: what fails for one ends that one. The death of the process ends all of them, and each session
reports it.

A keeper ends with its last plugin. It tells the fork server, by one byte on the door, of each launch that it
has no more to do with, so that the fork server knows when to open another door.
"""

from __future__ import annotations

import math
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from typing import NoReturn

from runner.launch.remote import handover
from runner.launch.remote.handover import Parcel, PassedOn, PlanHandover, Planner, can_be_shared
from runner.launch.remote.messages import Gear, LaunchOrder
from runner.launch.remote.monitor import Errand, serve
from runner.launch.sources import Sources
from runner.launch.stages import Planned
from runner.launch.stored.code import OwnCode
from runner.launch.wait import Need, Ready, Steps, milliseconds_until

# Launches that a fork server sends to one door. More plugins than these should not end with one process.
MOST_LAUNCHES = 64
FREED = b"f"
# Descriptors that have to be free for a launch, beside those it brings: for its pipes, cgroups and lease.
_SPARE_DESCRIPTORS = 96
# What a keeper raises its own limit of descriptors to, if it may: enough for all its launches. Plugins have
# limits of their own.
_MOST_DESCRIPTORS = 16384

_PARCEL_COUNT = len(Parcel._fields)
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def keep(
    gear: Gear,
    *,
    door: socket.socket | None = None,
    keeper: socket.socket | None = None,
    code: OwnCode | None = None,
) -> NoReturn:
    """The whole life of a monitor, in a process that was forked for it and has no other purpose.

    `door`: others come in by it. `keeper`: the other side of such a door. `code`: that this process has
    imported.
    """
    try:
        for number in _IGNORED:
            signal.signal(number, lambda *_: None)  # not SIG_IGN: the plugin would inherit that
        sys.stdout = sys.stderr = None
        entrance = None if door is None else Entrance(door)
        passage = _Passage(gear, entrance, keeper)
        wait_for_all(serve(Errand(gear), passage.offer, code), entrance)
        passage.close()
    finally:
        os._exit(0)


class _Passage:
    """What becomes of a launch of this process that is planned."""

    def __init__(self, gear: Gear, entrance: Entrance | None, keeper: socket.socket | None) -> None:
        self._gear = gear
        self._entrance = entrance
        self._keeper = keeper

    def offer(self, order: LaunchOrder, planned: Planned, sources: Sources, contents: bool) -> None:
        """Raises PassedOn if a keeper has taken it."""
        held, shared = sources.held, not contents and can_be_shared(planned)
        if self._entrance is not None and not shared:
            self._entrance.close()  # before anything of the plugin's is done: nobody else is here yet
        if self._keeper is None:
            return
        if shared and held is not None:
            descriptors = held.opened.descriptors
            where = handover.surroundings()
            told = PlanHandover(order, tuple(descriptors), time.monotonic(), where)
            try:
                handover.offer(self._keeper, told, planned, tuple(descriptors.values()), self._gear)
            except PassedOn:
                self._keeper.close()
                self._keeper = None
                raise
        self.close()

    def close(self) -> None:
        """This process serves the launch itself, to its end."""
        if self._keeper is not None:
            handover.keep_it(self._keeper)
            self._keeper.close()
            self._keeper = None


class Entrance:
    """The door, as its keeper sees it."""

    def __init__(self, door: socket.socket) -> None:
        self._door: socket.socket | None = door

    @property
    def fd(self) -> int | None:
        return None if self._door is None else self._door.fileno()

    def close(self) -> None:
        """Whoever waits for an answer, or comes now, serves the launch itself."""
        if self._door is not None:
            self._door.close()
            self._door = None

    def arrivals(self) -> list[Steps[None]]:
        """The launches that have come since the last look. Their hosts know who serves them."""
        found = []
        while self._door is not None:
            try:
                word, fds = handover.receive(self._door)
            except BlockingIOError:
                break
            except OSError:
                break  # no descriptors, or no memory: the message is lost, and its monitor sees that
            if not word:
                self.close()  # the fork server has ended
            elif word == handover.KEPT:
                self.free()  # only here: every monitor whose launch was not taken says so
            elif len(fds) < _PARCEL_COUNT:
                for fd in fds:
                    os.close(fd)
            else:
                with suppress(OSError):  # it was taken and cannot be served: its host sees the end
                    steps = self._admit(fds)
                    found += [] if steps is None else [steps]
        return found

    def _admit(self, fds: tuple[int, ...]) -> Steps[None] | None:
        parcel, sources = Parcel(*fds[:_PARCEL_COUNT]), fds[_PARCEL_COUNT:]
        planner = Planner(parcel.answer)
        if not _has_room() or not planner.take():
            planner.close()
            for fd in fds:
                if fd != parcel.answer:
                    os.close(fd)
            return None
        streams = parcel.stdin, parcel.stdout, parcel.stderr
        gear = Gear(parcel.handover, -1, *streams, parcel.control, parcel.host)
        steps = serve(Errand(gear, sources, planner))
        next(steps)
        planner.has_told()
        return steps

    def free(self) -> None:
        """One launch less."""
        if self._door is not None:
            with suppress(OSError):
                self._door.send(FREED, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _has_room() -> bool:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft < 0 or soft >= _MOST_DESCRIPTORS:
        return True
    try:
        return len(os.listdir("/proc/self/fd")) + _SPARE_DESCRIPTORS <= soft
    except OSError:
        return False


class _Turn:
    """One launch, and what it waits for."""

    def __init__(self, steps: Steps[None]) -> None:
        self.steps = steps
        self.need = Need({})


class _Crowd:
    """All launches that wait, and one poll for them."""

    def __init__(self) -> None:
        self.turns: dict[_Turn, None] = {}  # in the order they came
        self._poll = select.poll()
        self._by_fd: dict[int, _Turn] = {}

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        self._poll.unregister(fd)

    def wait(self, until: float) -> tuple[dict[_Turn, dict[int, int]], set[int]]:
        """Whose turn it is, with what is ready; and the watched descriptors that are."""
        until = min([until, *(turn.need.until for turn in self.turns)])
        ready: dict[_Turn, dict[int, int]] = {}
        others = set()
        for fd, events in self._poll.poll(milliseconds_until(until)):
            if (turn := self._by_fd.get(fd)) is None:
                others.add(fd)
            else:
                ready.setdefault(turn, {})[fd] = events
        now = time.monotonic()
        for turn in self.turns:
            if turn.need.until <= now:
                ready.setdefault(turn, {})
        return ready, others

    def go_on(self, turn: _Turn, ready: Ready) -> bool:
        """Let one have its turn. False: it has ended."""
        try:
            need = turn.steps.send(ready)
        except BaseException:  # noqa: BLE001 -- it has ended; or it is a bug of ours, which ends no other
            need = None
        fds = {} if need is None else need.fds
        for fd in turn.need.fds:
            if fd not in fds:
                self._poll.unregister(fd)
                del self._by_fd[fd]
        for fd, events in fds.items():
            if turn.need.fds.get(fd) != events:
                self._poll.register(fd, events)
                self._by_fd[fd] = turn
        if need is None:
            self.turns.pop(turn, None)
            return False
        turn.need = need
        self.turns[turn] = None
        return True


def wait_for_all(first: Steps[None], entrance: Entrance | None = None) -> None:
    """Until `first`, and all that came in meanwhile, have ended."""
    crowd = _Crowd()
    next(first)
    starting = deque([_Turn(first)])
    door = None
    while starting or crowd.turns:
        # One start at a time: it takes milliseconds, and then whatever is ready or due comes first.
        if starting and not crowd.go_on(starting.popleft(), {}) and entrance is not None:
            entrance.free()
        if entrance is not None and door is None and entrance.fd is not None:
            door = entrance.fd  # only now: the first launch may have closed it
            crowd.watch(door)
        if not starting and not crowd.turns:
            return
        ready, others = crowd.wait(0.0 if starting else math.inf)
        for turn, events in ready.items():
            if not crowd.go_on(turn, events) and entrance is not None:
                entrance.free()
        if entrance is not None and door is not None and door in others:
            starting.extend(map(_Turn, entrance.arrivals()))
            if entrance.fd is None:
                crowd.forget(door)  # at once: the next file that is opened gets this number
                entrance = door = None
