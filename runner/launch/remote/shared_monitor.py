"""The monitor that the plugins of a host share: it starts each by a plan that it is sent, and waits for all.

Plans come by a socket (runner/launch/remote/shared_plan.py). One poll waits for all plugins, and each has its
turn when something of its own is ready or due. They share nothing else: what fails for one ends that one. The
death of the process ends all of them, and each session reports it.

A fork server forks it for a launch. It shuts its socket when it has enough plugins, and when it has none
any more, and the fork server forks the next one at the next launch. It ends with its last plugin.
"""

from __future__ import annotations

import math
import os
import resource
import select
import socket
import time
from collections import deque
from contextlib import suppress
from typing import NoReturn

from runner.launch.remote.descriptors import receive_descriptors
from runner.launch.remote.messages import LaunchDescriptors
from runner.launch.remote.monitor import obey_host_only, serve
from runner.launch.remote.shared_plan import MOST_SOURCES, take
from runner.launch.wait import Need, Ready, Steps, milliseconds_until

# More plugins than these should not end with one process.
MOST_PLUGINS = 64
# Descriptors that have to be free for a launch beside those it brings: of its pipes, cgroups and lease, and
# of the meters of all others.
_SPARE_DESCRIPTORS = 96
# What a shared monitor raises its own limit of descriptors to, if it may: enough for all its plugins. Plugins
# have limits of their own.
_MOST_DESCRIPTORS = 16384

_COUNT = len(LaunchDescriptors._fields)
_MOST_AT_ONCE = _COUNT + 1 + MOST_SOURCES  # and the receipt


def monitor_plans(plans: socket.socket) -> NoReturn:
    """The whole life of a shared monitor, in a process that was forked for it and has no other purpose."""
    try:
        obey_host_only()
        wait_for_all(Inbox(plans))
    finally:
        os._exit(0)


class Inbox:
    """The socket by which plans come."""

    def __init__(self, plans: socket.socket) -> None:
        self._plans = plans
        self.fd = plans.fileno()
        self.was_used = False  # the launch that the fork server has forked this process for was heard of
        self.is_over = False  # nobody can send any more
        self._is_shut = False

    def arrivals(self, most: int) -> list[Steps[None]]:
        """Take launches that have come since the last look, `most` at most. The processes of the others carry
        them out themselves."""
        found: list[Steps[None]] = []
        while not self.is_over:
            try:
                word, fds = receive_descriptors(self._plans, 1, _MOST_AT_ONCE, socket.MSG_DONTWAIT)
            except OSError:  # nothing is there; or no memory: the message is lost, and its host sees that
                break
            self.was_used = True
            if not word:
                self.is_over = True
                self._plans.close()
            elif len(fds) <= _COUNT or len(found) >= most or not _has_room() or not take(fds[_COUNT]):
                for fd in fds:
                    os.close(fd)
            else:
                sources = fds[_COUNT + 1 :]
                found.append(serve(LaunchDescriptors(*fds[:_COUNT]), sources, receipt=fds[_COUNT]))
        return found

    def shut(self) -> None:
        """Let nobody send any more. The fork server sees it, as do processes that plan."""
        if not self._is_shut and not self.is_over:
            self._is_shut = True
            self._plans.shutdown(socket.SHUT_RDWR)


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


class _Launch:
    """One launch, and what it waits for."""

    def __init__(self, steps: Steps[None]) -> None:
        self.steps = steps
        self.need = Need({})


class _LaunchPoll:
    """All launches that wait, and one poll for them."""

    def __init__(self) -> None:
        self.launches: dict[_Launch, None] = {}  # in the order they came
        self._poll = select.poll()
        self._by_fd: dict[int, _Launch] = {}

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        self._poll.unregister(fd)

    def wait(self, until: float) -> tuple[dict[_Launch, dict[int, int]], bool]:
        """Whose turn it is, with what is ready; and whether the watched descriptor is."""
        until = min([until, *(launch.need.until for launch in self.launches)])
        ready: dict[_Launch, dict[int, int]] = {}
        other = False
        for fd, events in self._poll.poll(milliseconds_until(until)):
            if (launch := self._by_fd.get(fd)) is None:
                other = True
            else:
                ready.setdefault(launch, {})[fd] = events
        now = time.monotonic()
        for launch in self.launches:
            if launch.need.until <= now:
                ready.setdefault(launch, {})
        return ready, other

    def go_on(self, launch: _Launch, ready: Ready | None) -> None:
        """Let one have its turn. None: its first one, at which the plugin is started."""
        try:
            need = next(launch.steps) if ready is None else launch.steps.send(ready)
        except BaseException:  # noqa: BLE001 -- it has ended; or it is a bug of ours, which ends no other
            need = None
        fds = {} if need is None else need.fds
        for fd in launch.need.fds:
            if fd not in fds:
                self._poll.unregister(fd)
                del self._by_fd[fd]
        for fd, events in fds.items():
            if launch.need.fds.get(fd) != events:
                self._poll.register(fd, events)
                self._by_fd[fd] = launch
        if need is None:
            self.launches.pop(launch, None)
        else:
            launch.need = need
            self.launches[launch] = None


def wait_for_all(inbox: Inbox) -> None:
    """Until nobody can send a plan any more, and all plugins have ended."""
    poll = _LaunchPoll()
    poll.watch(inbox.fd)
    starting: deque[_Launch] = deque()
    while starting or poll.launches or not inbox.is_over:
        ready, has_arrivals = poll.wait(0.0 if starting else math.inf)
        for launch, events in ready.items():
            poll.go_on(launch, events)
        if has_arrivals:
            room = MOST_PLUGINS - len(poll.launches) - len(starting)
            starting.extend(map(_Launch, inbox.arrivals(room)))
            if inbox.is_over:
                poll.forget(inbox.fd)  # at once: the next file that is opened gets this number
        if starting:
            # One start at a time: it takes milliseconds, and then whatever is ready or due comes first.
            if len(poll.launches) + len(starting) >= MOST_PLUGINS or not _has_room():
                inbox.shut()
            poll.go_on(starting.popleft(), None)
        if inbox.was_used and not starting and not poll.launches:
            inbox.shut()
