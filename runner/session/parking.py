"""Parked cells of one plugin, for contracts of one process per call: a call then needs no launch.

A parked cell is a whole launch but for the plugin's own program, which starts when a call takes the cell. It
has nothing of any call in it. A Parking is for one plugin as one caller opened it: for one invocation and one
environment. So a cell never serves another plugin, and never another caller.

Cells are parked when the parking is opened and after each call. One that no call takes is ended after a
while, and no other takes its place until the next call: a plugin that nobody calls costs nothing. Before a
call takes a cell, every fact is asked again that the launch rested on: manifest, policy, approvals, programs,
paths. If one has changed, all cells are thrown away. A call that gets no cell is launched as any other. So it
is if its cell turns out to be dead: no plugin was started then, or it was not asked anything yet.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio

from runner.launch.remote.parking import changed_fact
from runner.launch.remote.remote_cell import RemoteCell, open_cage
from runner.launch.stages import Invocation
from runner.outcome import Failure
from runner.session.pending import first_of

# After which a parked cell is ended that no call has taken.
AGE_SECONDS = 60.0
# How long a call waits for a cell that is almost parked, and for a released one to start. Then the call is
# launched as any other.
_TAKE_SECONDS = 2.0


class ParkedCell:
    """One cell, from its launch to its end. Its task is the only one that opens and closes it."""

    def __init__(self) -> None:
        self.cell: RemoteCell | None = None  # None: it has not been ordered yet
        self.place = _place()
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
        self,
        nursery: trio.Nursery,
        invocation: Invocation,
        environ: Mapping[str, str],
        most: int,
        seconds: float,
    ) -> None:
        self._nursery = nursery
        self._invocation = invocation
        self._environ = dict(environ)
        self._most = most
        self._seconds = seconds
        self._cells: list[ParkedCell] = []  # that no call has taken, oldest first
        self._not_before = -math.inf  # when to park again, after a cell could not be parked
        self.fault = ""  # why the last one could not
        self.taken = 0  # calls that had a parked cell

    @property
    def waiting(self) -> int:
        """Cells that a call can take at once."""
        return sum(parked.ready.is_set() for parked in self._cells)

    def fill(self) -> None:
        """Park cells up to the bound, in the background."""
        if trio.current_time() < self._not_before:
            return
        while len(self._cells) < self._most:
            parked = ParkedCell()
            self._cells.append(parked)
            self._nursery.start_soon(self._run, parked)

    def close(self) -> None:
        """End all parked cells. Those that calls have taken end with their calls."""
        self._most = 0
        self.throw_away()

    def throw_away(self) -> None:
        for parked in self._cells:
            parked.end()
        self._cells.clear()

    @asynccontextmanager
    async def take(
        self, invocation: Invocation, environ: Mapping[str, str], until: float = math.inf
    ) -> AsyncIterator[RemoteCell | None]:
        """A cell whose program has just been started. None: the caller has to launch one. The cell ends with
        the context. `until`: on trio's clock, how long to try."""
        parked: ParkedCell | None = None
        try:
            if (invocation, environ) == (self._invocation, self._environ):
                parked = await self._find(until)
            self.fill()
            yield None if parked is None else parked.cell
        finally:
            if parked is not None:
                parked.end()
                with trio.CancelScope(shield=True):  # bounded: open_cage kills what does not end
                    await parked.ended.wait()

    async def _find(self, until: float) -> ParkedCell | None:
        until = min(until, trio.current_time() + _TAKE_SECONDS)
        while self._cells:
            parked = next((each for each in self._cells if each.ready.is_set()), self._cells[0])
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
            changed_fact, cell.facts, self._environ, abandon_on_cancel=True
        )
        if changed:
            self.throw_away()  # they rest on the same
            return False
        if not cell.release():
            return False
        try:
            await cell.launched()
        except Failure:  # it ended before; its program was never started
            return False
        return True

    async def _run(self, parked: ParkedCell) -> None:
        """The whole life of one cell."""
        try:
            with parked.scope:
                async with open_cage(self._invocation, environ=self._environ, parks=True) as cell:
                    parked.cell = cell
                    await cell.parked()
                    parked.ready.set()
                    with trio.move_on_after(self._seconds):
                        await first_of(parked.taken, parked.leave, cell.over)
                    if parked.taken.is_set():
                        await parked.leave.wait()
                    self._forget(parked)
        except Exception as error:  # noqa: BLE001 -- a call that is launched as any other raises it again
            self.fault = error.outcome.message if isinstance(error, Failure) else str(error)
            self._not_before = trio.current_time() + self._seconds
        finally:
            self._forget(parked)
            parked.ready.set()
            parked.ended.set()

    def _forget(self, parked: ParkedCell) -> None:
        if parked in self._cells:
            self._cells.remove(parked)


def _place() -> tuple[object, ...]:
    """What a launch takes over from this process beside its arguments."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = ""
    return folder, os.getresuid(), os.getresgid()


@asynccontextmanager
async def open_parking(
    invocation: Invocation, *, environ: Mapping[str, str], most: int, seconds: float = AGE_SECONDS
) -> AsyncIterator[Parking]:
    """Hold up to `most` parked cells, each for at most `seconds`."""
    failure: BaseException | None = None
    # What the body raises is kept until after the nursery, which would put it into a group.
    try:
        async with trio.open_nursery() as nursery:
            parking = Parking(nursery, invocation, environ, most, seconds)
            parking.fill()
            try:
                yield parking
            except BaseException as error:  # noqa: BLE001 -- raised again below
                failure = error
            parking.close()
    except BaseExceptionGroup as group:
        # The tasks raise nothing. It is ^C, or our caller's cancellation.
        failure = failure or group.exceptions[0]
    if failure is not None:
        try:
            raise failure
        finally:
            del failure
