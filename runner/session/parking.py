"""Parked cells, for contracts with a process for each call: such a call needs no launch.

A parked cell is a whole launch but for the plugin's own program, which starts when a call takes the cell. It
has nothing of any call in it: no input, no secret and no file. It serves only the plugin that it was parked
for, as it was opened (the same invocation and environment), and only the same caller.

Cells are parked after calls, for the next ones. One that no call takes is ended after a while, and none takes
its place until the next call: a plugin that nobody calls costs nothing. Before a call takes a cell, every
fact is asked again that the launch rested on: manifest, policy, approvals, programs, paths. If one has
changed, all cells of that plugin are thrown away. A call that gets no cell is launched as any other. So is
one whose cell turns out to be dead: its plugin was not started, or was not asked anything yet.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import trio

from runner.launch.remote.parking import changed_fact
from runner.launch.remote.remote_cell import RemoteCell, open_cage
from runner.launch.stages import Invocation
from runner.outcome import Failure
from runner.session.nursery import open_plain_nursery
from runner.session.pending import first_of
from sandbox import surroundings

# After which a parked cell is ended that no call has taken.
AGE_SECONDS = 60.0
# How long a call waits for a cell that is almost parked, and for a released one to start. Then the call is
# launched as any other.
_TAKE_SECONDS = 2.0
# After which the first cell that could not be parked is tried once more: its plugin may have been changed a
# moment ago (SETTLED_SECONDS in sandbox/look.py).
_AGAIN_SECONDS = 3.0


class ParkedFor(NamedTuple):
    """The calls that a cell can serve."""

    invocation: Invocation  # without the options of one call
    environ: Mapping[str, str]
    caller: tuple[Any, ...] = ()

    def rests_on_same(self, other: ParkedFor) -> bool:
        return self[:2] == other[:2]


class ParkedCell:
    """One cell, from its launch to its end. Its task is the only one that opens and closes it."""

    def __init__(self, serves: ParkedFor) -> None:
        self.serves = serves
        self.place: tuple[object, ...] = ()  # of its launch
        self.cell: RemoteCell | None = None  # None: it has not been ordered yet
        self.ready = trio.Event()  # it waits for its release, or has ended
        self.taken = trio.Event()  # a call has it
        self.leave = trio.Event()  # it is to end
        self.ended = trio.Event()  # nothing is left of it
        self.scope = trio.CancelScope()  # of its launch

    def end(self) -> None:
        self.leave.set()
        if not self.ready.is_set():
            self.scope.cancel()


class Parking:
    """Made by `open_parking`."""

    def __init__(
        self, nursery: trio.Nursery, most: int, seconds: float, options_of_one_call: Collection[str]
    ) -> None:
        self._nursery = nursery
        self._most = most
        self._seconds = seconds
        self._own_options = frozenset(options_of_one_call)
        self._cells: list[ParkedCell] = []  # that no call has taken, oldest first
        self._latest: ParkedCell | None = None  # a call may have taken it before it was ready
        self._faults: list[tuple[ParkedFor, float]] = []  # what could not be parked, and when to try again
        self.fault = ""  # why the last one could not
        self._is_first_fault = True
        self._closed = trio.Event()
        self.taken = 0  # calls that had a parked cell

    @property
    def waiting(self) -> int:
        """Cells that calls can take at once."""
        return sum(parked.ready.is_set() for parked in self._cells)

    def fill(self, invocation: Invocation, environ: Mapping[str, str], caller: tuple[Any, ...] = ()) -> None:
        """Park cells for such calls in the background, as many as there is room for."""
        self._fill(self._serving(invocation, environ, caller))

    def _serving(
        self, invocation: Invocation, environ: Mapping[str, str], caller: tuple[Any, ...]
    ) -> ParkedFor:
        options = tuple(each for each in invocation.options if each[0] not in self._own_options)
        return ParkedFor(invocation._replace(options=options), environ, caller)

    def _fill(self, serves: ParkedFor) -> None:
        now = trio.current_time()
        self._faults = [each for each in self._faults if each[1] > now]
        if any(fault.rests_on_same(serves) for fault, _ in self._faults):
            return
        # One at a time, also if calls wait for it: else each call of a crowd would cost two launches.
        is_free = self._latest is None or self._latest.ready.is_set()
        if len(self._cells) < self._most and is_free:
            self._latest = parked = ParkedCell(serves)
            self._cells.append(parked)
            self._nursery.start_soon(self._run, parked)

    def close(self) -> None:
        """End all parked cells. Those that calls have taken end with their calls."""
        self._most = 0
        self._closed.set()
        for parked in (*self._cells,):
            self._throw_away(parked)

    def _throw_away(self, parked: ParkedCell) -> None:
        if parked in self._cells:
            self._cells.remove(parked)
        parked.end()

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection  # not for what is done inside: a cell that was taken is given back
    async def take(
        self,
        invocation: Invocation,
        environ: Mapping[str, str],
        caller: tuple[Any, ...] = (),
        until: float = math.inf,
    ) -> AsyncIterator[RemoteCell | None]:
        """A cell whose program has just been started. None: the caller has to launch one. The cell ends with
        the context. `until`: on trio's clock, how long to try."""
        serves = self._serving(invocation, environ, caller)
        parked: ParkedCell | None = None
        try:
            parked = await self._find(serves, until)
            self._fill(serves)
            yield None if parked is None else parked.cell
        finally:
            if parked is not None:
                parked.end()
                with trio.CancelScope(shield=True):  # bounded: open_cage kills what does not end
                    await parked.ended.wait()

    async def _find(self, serves: ParkedFor, until: float) -> ParkedCell | None:
        until = min(until, trio.current_time() + _TAKE_SECONDS)
        while fitting := [each for each in self._cells if each.serves == serves]:
            if trio.current_time() >= until:
                break  # the others are left for calls that have time
            parked = next((each for each in fitting if each.ready.is_set()), fitting[0])
            self._cells.remove(parked)
            parked.taken.set()
            is_released = False
            try:
                with trio.move_on_at(until):
                    is_released = await self._release(parked)
            finally:
                if not is_released:
                    parked.end()
            if is_released:
                self.taken += 1
                return parked
        return None

    async def _release(self, parked: ParkedCell) -> bool:
        """Start the program of a cell that this task alone has. False: it was not started, or did not say
        so."""
        await parked.ready.wait()
        cell = parked.cell
        if cell is None or cell.has_ended is not None or parked.place != _place():
            return False
        changed = await trio.to_thread.run_sync(
            changed_fact, cell.facts, parked.serves.environ, abandon_on_cancel=True
        )
        if changed:
            for other in (*self._cells,):
                if other.serves.rests_on_same(parked.serves):
                    self._throw_away(other)
            return False
        if not cell.release():
            return False
        try:
            await cell.launched()
        except Failure:  # the cell ended before, and its program was never started
            return False
        return True

    async def _run(self, parked: ParkedCell) -> None:
        """The whole life of one cell."""
        invocation, environ = parked.serves.invocation, parked.serves.environ
        try:
            with parked.scope:
                parked.scope.deadline = trio.current_time() + AGE_SECONDS  # a plan may hang
                parked.place = _place()  # now: the launch takes it over here, without a checkpoint between
                async with open_cage(invocation, environ=environ, parks=True) as cell:
                    parked.cell = cell
                    await cell.parked()
                    parked.scope.deadline = math.inf
                    parked.ready.set()
                    self._fill(parked.serves)
                    with trio.move_on_after(self._seconds):
                        await first_of(parked.taken, parked.leave, cell.over)
                    if parked.taken.is_set():
                        # Not cancelled with our nursery: the call may still have its grace. It always ends.
                        with trio.CancelScope(shield=True):
                            await parked.leave.wait()
                    self._throw_away(parked)
        except Exception as error:  # noqa: BLE001 -- a call that is launched as any other raises it again
            if self._is_first_fault and not self._closed.is_set():
                self._is_first_fault = False
                self._nursery.start_soon(self._fill_later, parked.serves)
            self.fault = error.outcome.message if isinstance(error, Failure) else str(error)
            self._faults.append((parked.serves, trio.current_time() + self._seconds))
        finally:
            parked.ready.set()
            self._throw_away(parked)
            parked.ended.set()

    async def _fill_later(self, serves: ParkedFor) -> None:
        with trio.move_on_after(_AGAIN_SECONDS):
            await self._closed.wait()
        self._faults.clear()
        self._fill(serves)


def _place() -> tuple[object, ...]:
    """What a launch takes over from this process beside its arguments."""
    try:
        folder = surroundings.working_folder()
    except OSError:
        folder = ""
    return folder, os.getresuid(), os.getresgid()


@asynccontextmanager
async def open_parking(
    most: int, seconds: float = AGE_SECONDS, options_of_one_call: Collection[str] = ()
) -> AsyncIterator[Parking]:
    """Hold up to `most` parked cells, each for at most `seconds`.

    `options_of_one_call`: names of options that differ from call to call and do not affect the cage.
    """
    async with open_plain_nursery() as nursery:
        parking = Parking(nursery, most, seconds, options_of_one_call)
        try:
            yield parking
        finally:
            parking.close()
