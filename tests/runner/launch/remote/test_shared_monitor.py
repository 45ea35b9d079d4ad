"""One process that waits for all plugins of a host: who comes in, and what one of them does to the others."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.launch.carry_out import CalledOff
from runner.launch.remote import shared_monitor
from runner.launch.remote.descriptors import send_descriptors
from runner.launch.remote.messages import LaunchDescriptors
from runner.launch.remote.shared_plan import SharedMonitor
from runner.launch.wait import Need, Steps
from tests import elsewhere
from tests.conftest import Caller
from tests.limits.cage import Box
from tests.runner.launch import monitored_plugins
from tests.runner.launch.monitored_plugins import forkserver_pid, invocation, line, settled, summed

ECHOES = "#!/bin/sh\necho runs\nexec cat\n"
KILLED = ["internal", "run", "monitor", 125]


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Box:
    runner_as.give(plugin_dir)
    return Box(runner_as, plugin_dir)


def run(box: Box, act: Any, told: Any, *args: object) -> Any:
    using = (*monitored_plugins.TRAVEL, in_crowd, echo, patched)
    return elsewhere.run(box.caller, act, told, *args, using=using, timeout=240)


# --- in the host -------------------------------------------------------------------------------------------


def in_crowd(orders: list[dict[str, Any]], act: Any, said: list[str]) -> Any:
    """What `await act(cages)` returns: for each order a plugin that has said its first line, one after the
    other."""
    import os
    from contextlib import AsyncExitStack

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

    async def main() -> Any:
        try:
            with trio.fail_after(200):
                async with AsyncExitStack() as stack:
                    cages: list[Any] = []
                    for given in orders:
                        environ = {**os.environ, **given.get("environ", {})}
                        cage = await stack.enter_async_context(open_cage(invocation(given), environ=environ))
                        said.append(await line(cage.stdout))
                        cages.append(cage)
                    return await act(cages)
        finally:
            with trio.CancelScope(shield=True):
                await aclose_forkserver()

    return trio.run(main)


async def echo(cage: Any) -> bool:
    await cage.stdin.send_all(b"word\n")
    return bool(await line(cage.stdout) == "word")


def patched(**changed: Any) -> None:
    """A fork server whose shared monitors have these constants."""
    from runner.launch.remote import forkserver

    lines = "".join(f"shared_monitor.{name} = {value!r}; " for name, value in changed.items())
    before, _, after = forkserver._START.partition("main(")
    imported = "from runner.launch.remote import shared_monitor; "
    forkserver._START = f"{before}{imported}{lines}main({after}"


# --- who comes in ------------------------------------------------------------------------------------------


def together(given: dict[str, Any]) -> list[Any]:
    """Three, of which one ends by itself, one is asked to, and one goes on."""
    from sandbox.cell.cell import children

    async def act(cages: list[Any]) -> list[Any]:
        one, two, three = cages
        settled(lambda: children(forkserver_pid(one))[1:])  # the processes that planned them end soon after
        monitors = children(forkserver_pid(one))
        same = {cage._pid for cage in cages} == set(monitors)
        inits = len(children(one._pid))
        await one.stdin.aclose()
        first = await one.ended()
        two.signal(15)
        second = await two.ended()
        return [
            len(monitors),
            same,
            inits,
            summed(first),
            first.report["plugin"]["id"],
            summed(second),
            await echo(three),
            settled(lambda: len(children(three._pid)) - 1),
        ]

    return list(in_crowd([given] * 3, act, []))


def test_each_ends_alone(box: Box) -> None:
    told = run(box, together, monitored_plugins.given(box, ECHOES))
    ok, asked = ["ok", "run", "", 0], ["cancelled", "run", "signal:15", 143]
    assert told == [1, True, 3, ok, "plugin", asked, True, 0]


def killed(given: dict[str, Any]) -> list[Any]:
    import os
    import signal

    from runner.launch.remote.remote_cell import open_cage
    from sandbox.cell.cell import descendants
    from sandbox.cell.unsandboxed import _is_zombie

    async def act(cages: list[Any]) -> list[Any]:
        below = descendants(cages[0]._pid)
        os.kill(cages[0]._pid, signal.SIGKILL)
        ended = [summed(await cage.ended()) for cage in cages]
        left = settled(lambda: [pid for pid in below if not _is_zombie(pid)])  # who reaps them is not ours
        async with open_cage(invocation(given), environ=dict(os.environ)) as next_one:
            await line(next_one.stdout)
            return [ended, len(below) >= 3 * 4, left, await echo(next_one)]

    return list(in_crowd([given] * 3, act, []))


def test_its_death_ends_all_and_each_session_reports_it(box: Box) -> None:
    assert run(box, killed, monitored_plugins.given(box, ECHOES)) == [[KILLED] * 3, True, [], True]


def apart(orders: list[dict[str, Any]]) -> list[Any]:
    async def act(cages: list[Any]) -> list[Any]:
        monitors = [cage._pid for cage in cages]
        return [monitors.index(pid) for pid in monitors]

    return list(in_crowd(orders, act, []))


def test_who_has_a_monitor_of_its_own(box: Box) -> None:
    """A plugin that could keep its monitor busy, and one for which a monitor changes itself."""
    plain = monitored_plugins.given(box, ECHOES)
    measured = monitored_plugins.given(box, ECHOES, name="measured", limits={"disk": 1 << 30})
    bare = monitored_plugins.given(box, ECHOES, name="bare", policy='version = 1\nunsandboxed = "allow"\n')
    manifest = Path(bare["manifest"]) / "nexo-plugin.toml"
    manifest.write_text(manifest.read_text().replace("enabled = true", "enabled = false"))
    assert run(box, apart, [measured, bare, plain, plain, measured, plain]) == [0, 1, 2, 2, 4, 2]


def full(given: dict[str, Any]) -> list[Any]:
    patched(MOST_PLUGINS=3)

    async def act(cages: list[Any]) -> list[Any]:
        monitors = [cage._pid for cage in cages]
        return [[monitors.index(pid) for pid in monitors], [await echo(cage) for cage in cages]]

    return list(in_crowd([given] * 7, act, []))


def test_a_full_one_is_followed_by_another(box: Box) -> None:
    told = run(box, full, monitored_plugins.given(box, ECHOES))
    assert told == [[0, 0, 0, 3, 3, 3, 6], [True] * 7]


def at_once(given: dict[str, Any], count: int) -> list[Any]:
    patched(MOST_PLUGINS=3)
    import os
    from collections import Counter

    import trio

    from runner.launch.remote.remote_cell import open_cage

    monitors: list[int | None] = []
    all_open = trio.Event()

    async def open_one() -> None:
        async with open_cage(invocation(given), environ=dict(os.environ)) as cage:
            await line(cage.stdout)
            monitors.append(cage._pid)
            if len(monitors) == count:
                all_open.set()
            await all_open.wait()

    async def act(cages: list[Any]) -> list[Any]:
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(open_one)
        return [max(Counter((cages[0]._pid, *monitors)).values()), len(monitors)]

    return list(in_crowd([given], act, []))


def test_no_more_than_it_may_have_also_if_they_come_at_once(box: Box) -> None:
    most, count = run(box, at_once, monitored_plugins.given(box, ECHOES), 8)
    assert 2 <= most <= 3 and count == 8


def one_after_the_other(given: dict[str, Any], count: int) -> list[Any]:
    """Many launches beside one that stays."""
    patched(MOST_PLUGINS=3)
    import os

    from runner.launch.remote.remote_cell import open_cage

    async def act(cages: list[Any]) -> list[Any]:
        pid = cages[0]._pid
        before, told = len(os.listdir(f"/proc/{pid}/fd")), set()
        for _ in range(count):
            async with open_cage(invocation(given), environ=dict(os.environ)) as cage:
                await line(cage.stdout)
                await cage.stdin.aclose()
                told.add((cage._pid == pid, tuple(summed(await cage.ended()))))
        after = settled(lambda: len(os.listdir(f"/proc/{pid}/fd")) - before)
        return [sorted(told), after, await echo(cages[0])]

    return list(in_crowd([given], act, []))


def test_many_launches_in_one(box: Box) -> None:
    """More than there may be at a time, and nothing of any is left in the process."""
    told = run(box, one_after_the_other, monitored_plugins.given(box, ECHOES), 120)
    assert told == [[[True, ["ok", "run", "", 0]]], 0, True]


# --- what is each one's own --------------------------------------------------------------------------------

SHOWS = "#!/bin/sh\necho $TZ $(ulimit -Sn) $(ulimit -Hn) $(umask) $(pwd)\nexec cat\n"


def shown(orders: list[dict[str, Any]]) -> list[Any]:
    said: list[str] = []

    async def act(cages: list[Any]) -> list[Any]:
        return [said, len({cage._pid for cage in cages})]

    return list(in_crowd(orders, act, said))


def test_nothing_leaks_from_one_to_the_next(box: Box) -> None:
    policy = 'version = 1\n[env]\npass = ["TZ"]\nceiling = ["TZ"]\n'
    given = monitored_plugins.given(box, SHOWS, policy=policy)
    orders = [{**given, "environ": {"TZ": name}} for name in ("en", "fr", "de")]
    said, monitors = run(box, shown, orders)
    assert monitors == 1
    assert [words.split()[0] for words in said] == ["en", "fr", "de"]
    # Also the limit of descriptors, which the shared monitor has raised.
    assert len({tuple(words.split()[1:]) for words in said}) == 1


# --- clocks and shortages ----------------------------------------------------------------------------------


def failed(orders: list[dict[str, Any]]) -> list[Any]:
    """The same launch fails alone, and beside another."""
    import os

    from runner.launch.remote.remote_cell import open_cage

    good, bad = orders

    async def fail() -> list[Any]:
        async with open_cage(invocation(bad), environ=dict(os.environ)) as cage:
            ended = await cage.ended()
            return [cage._pid, ended.outcome, ended.explanation, ended.status]

    async def alone(_: list[Any]) -> list[Any]:
        return await fail()

    async def beside(cages: list[Any]) -> list[Any]:
        pid, *told = await fail()
        return [pid == cages[0]._pid, told, await echo(cages[0])]

    _, *expected = in_crowd([], alone, [])
    shared, told, lives = in_crowd([good], beside, [])
    return [shared, told == expected, told[0][0], lives]


def test_a_launch_that_fails_beside_others_tells_the_same(box: Box) -> None:
    good = monitored_plugins.given(box, ECHOES)
    bad = {**good, "limits": {"open_files": 3}}  # fewer than bubblewrap itself needs
    assert run(box, failed, [good, bad]) == [True, True, "launch_failed", True]


def timed(orders: list[dict[str, Any]]) -> list[Any]:
    async def act(cages: list[Any]) -> list[Any]:
        far, near, other = cages
        return [summed(await near.ended()), await echo(far), await echo(other), far._pid == near._pid]

    return list(in_crowd(orders, act, []))


def test_deadlines_near_and_far(box: Box) -> None:
    """30 days are more milliseconds than poll(2) can count."""
    given = monitored_plugins.given(box, ECHOES)
    far, near = ({**given, "limits": {"deadline": seconds}} for seconds in (30 * 86400.0, 3.0))
    assert run(box, timed, [far, near, given]) == [
        ["timeout", "invocation", "deadline", 124],
        True,
        True,
        True,
    ]


def starved(given: dict[str, Any], spare: int) -> list[Any]:
    """A shared monitor that has almost no free descriptors. For each launch: whether it is there, and what
    became of it."""
    patched(_SPARE_DESCRIPTORS=spare)
    import os
    import resource
    from contextlib import AsyncExitStack

    from runner.launch.remote.remote_cell import open_cage

    async def act(cages: list[Any]) -> list[Any]:
        pid = cages[0]._pid
        most = len(os.listdir(f"/proc/{pid}/fd")) + (40 if spare else 20)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        told: list[Any] = []
        async with AsyncExitStack() as stack:
            for _ in range(2 if spare else 1):
                opened = open_cage(invocation(given), environ=dict(os.environ))
                cage = await stack.enter_async_context(opened)
                if spare:
                    await line(cage.stdout)
                told.append([cage._pid == pid, await echo(cage)] if spare else summed(await cage.ended()))
        return [told, [await echo(each) for each in cages]]

    return list(in_crowd([given] * 2, act, []))


def test_without_descriptors_it_takes_no_more(box: Box) -> None:
    given = monitored_plugins.given(box, ECHOES)
    assert run(box, starved, given, 96) == [[[False, True], [False, True]], [True, True]]


def test_a_launch_that_finds_no_descriptors_fails_alone(box: Box) -> None:
    given = monitored_plugins.given(box, ECHOES)
    (ended,), others = run(box, starved, given, 0)
    assert others == [True, True]
    assert ended[0] == "launch_failed" and ended[3] == 125


def idle(given: dict[str, Any], count: int) -> list[Any]:
    """How often it is woken while nothing happens."""
    import trio

    async def act(cages: list[Any]) -> list[Any]:
        pid = cages[0]._pid

        def switches() -> int:
            with open(f"/proc/{pid}/status") as file:
                return sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)

        # On a busy machine it may have words left to say about the last launch. Who is woken by a clock is
        # never still.
        for _ in range(20):
            before = switches()
            await trio.sleep(1)
            woken = switches() - before
            if not woken:
                break
        return [woken, len({cage._pid for cage in cages})]

    return list(in_crowd([given] * count, act, []))


def test_it_sleeps_while_nothing_happens(box: Box) -> None:
    """It is not woken once: no clock and no meter of these plugins has anything to look at."""
    policy = 'version = 1\nmachine_share = "100%"\n[seccomp]\ndefault = "strict"\nceiling = "strict"\n'
    assert run(box, idle, monitored_plugins.given(box, ECHOES, policy=policy), 8) == [0, 1]


# --- one that does not answer ------------------------------------------------------------------------------


def stopped(given: dict[str, Any], then: str) -> list[Any]:
    """The shared monitor is stopped while a launch is sent to it."""
    import os
    import signal

    from runner.launch.remote.remote_cell import open_cage
    from sandbox.cell.cell import children

    async def act(cages: list[Any]) -> list[Any]:
        pid: int = cages[0]._pid
        os.kill(pid, signal.SIGSTOP)
        async with open_cage(invocation(given), environ=dict(os.environ)) as cage:
            await line(cage.stdout)
            alone = cage._pid != pid and await echo(cage)
            os.kill(pid, signal.SIGKILL if then == "killed" else signal.SIGCONT)
            if then == "killed":
                return [alone, [summed(await each.ended()) for each in cages], await echo(cage)]
            async with open_cage(invocation(given), environ=dict(os.environ)) as late:
                await line(late.stdout)  # so it has read what was sent before
                together = [await echo(each) for each in (cage, late, *cages)]
                return [alone, late._pid == pid, together, len(children(pid))]

    return list(in_crowd([given] * 2, act, []))


def test_a_launch_does_not_wait_for_one_that_is_stopped(box: Box) -> None:
    """Its own process starts it, and nothing starts twice when the monitor goes on."""
    told = run(box, stopped, monitored_plugins.given(box, ECHOES), "continued")
    assert told == [True, True, [True] * 4, 3]


def test_a_launch_outlives_one_that_did_not_take_it(box: Box) -> None:
    told = run(box, stopped, monitored_plugins.given(box, ECHOES), "killed")
    assert told == [True, [KILLED, KILLED], True]


# --- the loop ----------------------------------------------------------------------------------------------


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    made = [os.pipe() for _ in range(2)]
    yield made
    for ends in made:
        for fd in ends:
            os.close(fd)


@pytest.mark.parametrize("fault", [KeyError("ours"), CalledOff()], ids=["bug", "called off"])
def test_a_fault_of_one_does_not_end_the_others(pipes: list[tuple[int, int]], fault: BaseException) -> None:
    done = []

    def faulty(fd: int) -> Steps[None]:
        yield Need({}, 0.0)
        yield Need({fd: 1})
        raise fault

    def sound(fd: int) -> Steps[None]:
        yield Need({fd: 1})
        os.write(pipes[0][1], b"x")  # now the other may go on
        yield Need({}, 0.0)
        ready = yield Need({fd: 1}, 0.0)
        done.append(dict(ready))

    class Arrived(shared_monitor.Inbox):
        def __init__(self) -> None:
            self.fd, self._sender = os.pipe()
            os.write(self._sender, b"x")
            self.is_over = self.was_used = False
            self.shuts = 0

        def arrivals(self, most: int) -> list[Steps[None]]:
            if os.read(self.fd, 1) == b"s":
                self.is_over = True
                return []
            self.was_used = True
            os.write(pipes[1][1], b"y")
            return [faulty(pipes[0][0]), sound(pipes[1][0])]

        def shut(self) -> None:
            self.shuts += 1
            os.write(self._sender, b"s")

    inbox = Arrived()
    shared_monitor.wait_for_all(inbox)
    assert done == [{pipes[1][0]: 1}]
    assert inbox.shuts
    for fd in (inbox.fd, inbox._sender):
        os.close(fd)


def test_what_has_arrived_is_taken_also_when_it_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(shared_monitor, "serve", lambda *given, receipt: served.append((*given, receipt)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inbox, shared = shared_monitor.Inbox(theirs), SharedMonitor(ours)
    with ours, open("/dev/null") as file, contextlib.ExitStack() as stack:
        fds = [file.fileno()] * len(LaunchDescriptors._fields)
        pairs = [socket.socketpair() for _ in range(3)]
        for pair in pairs:
            stack.enter_context(pair[0])
        send_descriptors(ours, b"s", fds)  # too few: there is no receipt
        for _, receipt in pairs:
            send_descriptors(ours, b"s", [*fds, receipt.fileno(), file.fileno()])
            receipt.close()
        pairs[0][0].shutdown(socket.SHUT_RD)  # its process carries it out itself
        assert shared.is_open() and not inbox.was_used
        inbox.shut()
        with pytest.raises(BrokenPipeError):
            send_descriptors(ours, b"s", fds)
        assert not shared.is_open() and len(inbox.arrivals(1)) == 1
        # Taken; not taken, and everything closed.
        assert pairs[1][0].recv(1) == b"t" and pairs[2][0].recv(1) == b""
    ((descriptors, sources, taken),) = served
    for fd in (*descriptors, *sources, taken):
        os.close(fd)
    assert len(sources) == 1
