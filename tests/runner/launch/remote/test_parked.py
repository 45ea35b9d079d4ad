"""Parked cells: what starts them, what does not, and which clocks run."""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.limits.cage import Box
from tests.runner.launch import monitored_plugins
from tests.runner.launch.monitored_plugins import (
    in_a_child,
    invocation,
    is_sound,
    line,
    read,
    settled,
    summed,
)
from tests.tables import wait_for

ECHOES = "#!/bin/sh\necho runs\nexec cat\n"
OBEYS = '#!/bin/sh\necho runs\nwhile read line; do eval "$line"; done\n'


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Box:
    runner_as.give(plugin_dir)
    return Box(runner_as, plugin_dir)


def run(box: Box, act: Any, told: Any) -> Any:
    using = (*monitored_plugins.TRAVEL, in_parked, waiting_launcher, is_alive, holders)
    return elsewhere.run(box.caller, act, told, using=using, timeout=240)


# --- in the host -------------------------------------------------------------------------------------------


def in_parked(given: dict[str, Any], *acts: Any) -> list[Any]:
    """What each `await act(cell)` returns, with a parked cell for each."""
    import os

    import trio

    from runner.launch.remote import forkserver
    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

    # The plugin was written a moment ago: its facts would not be relied on.
    before, _, after = forkserver._START.partition("main(")
    settled = "import sandbox.look; sandbox.look.SETTLED_SECONDS = -3600.0; "
    forkserver._START = f"{before}{settled}main({after}"

    async def main() -> list[Any]:
        found = []
        try:
            with trio.fail_after(200):
                for act in acts:
                    async with open_cage(invocation(given), environ=dict(os.environ), parks=True) as cell:
                        await cell.parked()
                        found.append(await act(cell))
        finally:
            with trio.CancelScope(shield=True):
                await aclose_forkserver()
        return found

    return trio.run(main)


def waiting_launcher(cell: Any) -> int:
    """The pid of the launcher, when it has become one: then it waits, or is about to."""
    from sandbox.cell.cell import children

    def find() -> int:
        try:
            pid = children(cell._pid)[0]
            for _ in range(3):
                [pid] = children(pid)
            with open(f"/proc/{pid}/comm") as file:
                return 0 if file.read() == "bwrap\n" else pid
        except (ValueError, IndexError, OSError):
            return 0

    found = [0]

    def is_there() -> bool:
        found.append(find())
        return found[-1] > 0

    assert wait_for(is_there)  # its number is for kill(2): 0 would be all of us
    return found[-1]


def holders(cell: Any, launcher: int) -> list[list[str]] | None:
    """Who else has a pipe that the launcher has beside the plugin's streams. None: only root can see it."""
    import os
    from contextlib import suppress

    from sandbox.cell.cell import descendants

    names = {launcher: "launcher", cell._pid: "monitor", os.getpid(): "host"}
    if os.getuid():
        return None
    own = {
        os.readlink(f"/proc/{launcher}/fd/{fd}") for fd in os.listdir(f"/proc/{launcher}/fd") if int(fd) > 2
    }
    found: dict[str, set[str]] = {}

    def has_others() -> bool:
        """The process that planned the launch ends soon."""
        found.clear()
        for pid in {*names, *descendants(os.getpid())}:
            with suppress(OSError):  # it ends at this moment
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        target = os.readlink(f"/proc/{pid}/fd/{fd}")
                        found.setdefault(target, set()).add(names.get(pid, str(pid)))
        return any(found[target] - {*names.values()} for target in own)

    settled(has_others)
    return [sorted(found[target]) for target in sorted(own)]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- its release -------------------------------------------------------------------------------------------


def releases(given: dict[str, Any]) -> list[Any]:
    """Released twice and more, half-way, beside another one, after it died, not released, and given up."""
    import os
    import signal

    from runner.launch.remote.messages import RELEASE
    from runner.launch.remote.remote_cell import open_cage
    from runner.outcome import Failure

    async def twice(cell: Any) -> list[Any]:
        waiting_launcher(cell)
        silent = cell._launched is None
        first, second = cell.release(), cell.release()
        cell._control.send(RELEASE * 3)
        timings = await cell.launched()
        said = await line(cell.stdout)
        cell._control.send(RELEASE)
        await cell.stdin.send_all(b"echo word\n")
        echo = await line(cell.stdout)
        await cell.stdin.aclose()
        ended, rest = await cell.ended(), await read(cell.stdout)
        return [silent, first, second, list(timings), said, echo, rest, summed(ended), ended.report]

    async def half_way(cell: Any) -> list[Any]:
        # bubblewrap has been started just now, and is still at its mounts, or not.
        return [cell.release(), await line(cell.stdout)]

    async def beside(cell: Any) -> list[Any]:
        # A running plugin of the same uid sees nothing of a parked one, and reaches nothing of it.
        async with open_cage(invocation(given), environ=dict(os.environ), parks=True) as other:
            await other.parked()
            pid = waiting_launcher(other)
            cell.release()
            await line(cell.stdout)
            await cell.stdin.send_all(b"set -- /proc/[0-9]*; kill -KILL -1 2>/dev/null; echo $# seen\n")
            said = await line(cell.stdout)
            return [said, is_alive(pid), other.release(), await line(other.stdout)]

    async def dead(cell: Any) -> list[Any]:  # also the control of `beside`: who sees it can kill it
        os.kill(waiting_launcher(cell), 9)
        cell.release()  # whether the monitor has seen the end or not
        try:
            await cell.launched()
            launched = True
        except Failure:
            launched = False
        return [launched, await read(cell.stdout), cell.release()]

    async def never(cell: Any) -> list[Any]:
        pid = waiting_launcher(cell)
        held = holders(cell, pid)
        cell.kill()
        ended = await cell.ended()
        executed = ended.report["exit"]["reached_exec"]
        return [await read(cell.stdout), summed(ended), is_alive(pid), executed, held]

    async def given_up(cell: Any) -> list[Any]:
        # By the time the monitor hears the release, its host does not want the plugin any more.
        os.kill(cell._pid, signal.SIGSTOP)
        released = cell.release()
        cell.kill()
        os.kill(cell._pid, signal.SIGCONT)
        ended = await cell.ended()
        executed = ended.report["exit"]["reached_exec"]
        return [released, await read(cell.stdout), summed(ended), executed, cell._launched]

    return in_parked(given, twice, half_way, beside, dead, never, given_up)


@pytest.mark.both_callers
def test_a_release_starts_the_program_once(box: Box) -> None:
    twice, half_way, beside, dead, never, given_up = run(box, releases, monitored_plugins.given(box, OBEYS))
    report = twice.pop()
    phases = ["manifest", "policy", "plan", "launch", "parked"]
    assert twice == [True, True, False, phases, "runs", "word", "", ["ok", "run", "", 0]]
    is_sound(report)
    # What the plugin used, and how long it took, is counted from its release.
    assert list(report["timings"]) == [*phases, "run", "teardown"]
    assert report["usage"]["wall"] <= report["timings"]["run"] + report["timings"]["teardown"]
    assert half_way == [True, "runs"]
    assert beside == ["2 seen", True, True, "runs"]  # bubblewrap's init and itself
    assert dead == [False, "", False]
    # Its own pipes are that of its report and that of its release.
    held = [["launcher", "monitor"]] * 2 if box.caller.uid == 0 else None
    killed = ["cancelled", "teardown", "signal:9", 137]
    assert never == ["", killed, False, False, held]
    assert given_up == [True, "", killed, False, None]


# --- its clocks --------------------------------------------------------------------------------------------


def clocks(given: dict[str, Any]) -> list[Any]:
    """A deadline that has passed long before the cell is parked, and one that passes while the monitor is
    stopped."""
    import os
    import select
    import signal

    from sandbox.cell.cell import children

    async def short(cell: Any) -> list[Any]:
        waits = waiting_launcher(cell) > 0
        cell.release()
        ended = await cell.ended()
        deadline = next(each for each in ended.report["limits"] if each["name"] == "deadline")
        run = ended.report["timings"]["run"]
        return [waits, summed(ended)[0], summed(ended)[2], deadline["peak"] == run]

    async def stopped(cell: Any) -> list[Any]:
        [init] = children(cell._pid)
        cell.release()
        said = await line(cell.stdout)
        ends = select.poll()
        ends.register(os.pidfd_open(init), select.POLLIN)
        os.kill(cell._pid, signal.SIGSTOP)
        try:
            has_ended = bool(ends.poll(60_000))
        finally:
            os.kill(cell._pid, signal.SIGCONT)
        ended = await cell.ended()
        return [said, has_ended, summed(ended)[0], summed(ended)[2]]

    longer = {**given, "limits": {"deadline": 3.0}}  # it has to come to its first word
    return [*in_parked(given, short), *in_parked(longer, stopped)]


def test_its_clocks_run_from_the_release(box: Box) -> None:
    given = monitored_plugins.given(box, ECHOES, limits={"deadline": 0.001})
    short, stopped = run(box, clocks, given)
    assert short == [True, "timeout", "deadline", True]
    assert stopped == ["runs", True, "timeout", "deadline"]


# --- who dies with whom ------------------------------------------------------------------------------------


def monitor_killed(given: dict[str, Any]) -> list[Any]:
    import os
    import signal

    async def parked(cell: Any) -> list[Any]:
        pid = waiting_launcher(cell)
        os.kill(cell._pid, signal.SIGKILL)
        ended = await cell.ended()
        said = await read(cell.stdout)  # its end: no process has the other one
        return [said, summed(ended)[0], settled(lambda: is_alive(pid))]

    async def control(cell: Any) -> list[Any]:
        pid = waiting_launcher(cell)
        cell.release()
        await cell.launched()
        said = await line(cell.stdout)
        os.kill(cell._pid, signal.SIGKILL)
        ended = await cell.ended()
        return [said, summed(ended)[0], settled(lambda: is_alive(pid))]

    return in_parked(given, parked, control)


def test_the_death_of_the_monitor_starts_nothing(box: Box) -> None:
    parked, control = run(box, monitor_killed, monitored_plugins.given(box, ECHOES))
    assert parked == ["", "launch_failed", False]
    assert control == ["runs", "internal", False]


def held(given: dict[str, Any]) -> None:
    """Tell the launcher's pid, and wait to be killed. A child that has copies of everything outlives us, and
    tells what the plugin has said."""
    import json
    import os
    import signal

    import trio

    report = os.dup(1)

    async def act(cell: Any) -> None:
        pid = waiting_launcher(cell)
        if given["released"]:
            cell.release()
            await cell.launched()
        stdout = os.dup(cell._ticket.stdout)
        os.set_blocking(stdout, True)

        def outlive() -> None:
            said = b""
            while part := os.read(stdout, 100):
                said += part
            os.write(report, json.dumps(said.decode()).encode() + b"\n")

        if given["released"]:
            await line(cell.stdout)  # for "runs"
            await cell.stdin.send_all(b"word\n")
            await trio.lowlevel.wait_readable(stdout)  # until it has said so: we are killed next
        in_a_child(outlive)
        os.write(report, json.dumps(pid).encode() + b"\n")
        signal.pause()

    in_parked(given, act)


@pytest.mark.parametrize("released", [False, True], ids=["parked", "control"])
def test_the_death_of_the_host_starts_nothing(box: Box, released: bool) -> None:
    told = {**monitored_plugins.given(box, ECHOES), "released": released}
    using = (*monitored_plugins.TRAVEL, in_parked, waiting_launcher, is_alive)
    with elsewhere.start(box.caller, held, told, using=using) as process:
        pid = json.loads(elsewhere.line(process, 120))
        pidfd = os.pidfd_open(pid)
        ends = select.poll()
        ends.register(pidfd, select.POLLIN)
        assert not ends.poll(0)
        process.kill()  # by SIGKILL
        said = json.loads(elsewhere.line(process, 60))
        assert ends.poll(60_000)  # nothing is left of it
        os.close(pidfd)
    assert said == ("word\n" if released else "")
    assert process.returncode == -signal.SIGKILL
