"""The process monitors are forked from: how it is started, what it has of its host, what becomes of it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from runner.launch.remote.forkserver import LaunchTicket
from runner.launch.stages import Invocation
from sandbox.spec import Overrides
from tests.conftest import Caller, vanished
from tests.limits.cage import Box
from tests.runner.launch import monitored_plugins
from tests.runner.launch.monitored_plugins import (
    CAT,
    forkserver_pid,
    in_cage,
    invocation,
    line,
    settled,
    summed,
)
from tests.tables import one_case, wait_for


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Box:
    runner_as.give(plugin_dir)
    return Box(runner_as, plugin_dir)


WAITS = "#!/bin/sh\necho runs\nread word\nexit 6\n"


def replaced(given: dict[str, Any]) -> list[Any]:
    """The fork server is killed while a plugin runs, and found dead by the next launch."""
    import os
    import signal

    import trio

    from runner.launch.remote.remote_cell import open_cage

    async def act(cage: Any) -> list[Any]:
        await line(cage.stdout)
        first = forkserver_pid(cage)
        os.kill(first, signal.SIGKILL)
        await trio.lowlevel.wait_readable(cage._ticket.forkserver.pidfd)  # what is sent before is lost
        async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as other:
            await line(other.stdout)
            second = forkserver_pid(other)
            await other.stdin.send_all(b"go\n")
            ended = summed(await other.ended())
        lives = cage.has_ended is None
        await cage.stdin.send_all(b"go\n")
        return [first, lives, first != second, ended, summed(await cage.ended())]

    first, *told = in_cage(given, act)
    return [*told, os.path.exists(f"/proc/{first}")]


def test_a_plugin_outlives_the_forkserver_it_came_from(box: Box) -> None:
    six = ["crashed", "run", "exit:6", 6]
    assert monitored_plugins.run(box, replaced, monitored_plugins.given(box, WAITS)) == [
        True,
        True,
        six,
        six,
        False,
    ]


def halted(given: dict[str, Any]) -> list[Any]:
    """The fork server is stopped for good: what becomes of a launch, and of the next one."""
    import os
    import signal

    from runner.launch.remote import remote_cell as module
    from runner.outcome import Failure

    async def act(cage: Any) -> list[Any]:
        await line(cage.stdout)
        os.kill(forkserver_pid(cage), signal.SIGSTOP)
        told: list[Any] = []
        usual, module._BIRTH_SECONDS = module._BIRTH_SECONDS, 2.0
        async with module.open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as other:
            try:
                await other.prepared()
            except Failure as failure:
                told.append([failure.outcome.code, failure.outcome.cause, "begin in 2 s" in str(failure)])
        module._BIRTH_SECONDS = usual
        async with module.open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as other:
            told.append(await line(other.stdout))
        await cage.stdin.send_all(b"go\n")
        return [*told, summed(await cage.ended())]

    return list(in_cage(given, act))


def test_a_forkserver_that_does_not_get_on_is_replaced(box: Box) -> None:
    told = monitored_plugins.run(box, halted, monitored_plugins.given(box, WAITS))
    assert told == [["launch_failed", "spawn", True], "runs", ["crashed", "run", "exit:6", 6]]


def crowded(given: dict[str, Any]) -> list[Any]:
    """More orders than a fork server's socket holds, closed while some wait for room. How many were taken by
    the first, and what became of the last."""
    import signal

    import trio.testing

    from runner.launch.remote import forkserver
    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

    async def main() -> list[Any]:
        first = forkserver.current()
        signal.pidfd_send_signal(first.pidfd, signal.SIGSTOP)
        taken = 0
        while True:
            ticket = forkserver.LaunchTicket(invocation(given), environ={})
            try:
                ticket.send(first)
            except BlockingIOError:
                break
            finally:
                ticket.close()
            taken += 1
        async with trio.open_nursery() as nursery:
            said: list[str] = []

            async def last() -> None:
                async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
                    said.append(await line(cage.stdout))

            nursery.start_soon(last)
            await trio.testing.wait_all_tasks_blocked()
            before = list(said)
            await aclose_forkserver()
        await aclose_forkserver()
        return [taken > 50, before, said]

    async def bounded() -> list[Any]:
        with trio.fail_after(90):
            return await main()

    return trio.run(bounded)


def test_who_waits_for_a_forkserver_that_is_closed(box: Box) -> None:
    assert monitored_plugins.run(box, crowded, monitored_plugins.given(box, WAITS)) == [True, [], ["runs"]]


WORDS = {
    "a NUL": "a\0b",
    "half a pair": "\ud800",
    "a number": 3,
}


@pytest.mark.parametrize("place", ["environ", "env", "args"])
@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_what_no_process_can_be_given_is_said_at_once(place: str, word: Any) -> None:
    def order(word: Any) -> None:
        environ = {"A": word} if place == "environ" else {}
        overrides = Overrides(env=(("A", word),) if place == "env" else ())
        asked = Invocation("/p", args=(word,) if place == "args" else (), overrides=overrides)
        LaunchTicket(asked, environ=environ).close()

    order("fine \udcff")  # a byte that is no UTF-8
    with pytest.raises(ValueError, match=r"cannot be an environment variable|cannot be an argument"):
        order(word)


@pytest.mark.parametrize("name", ["", "A=B", "A\0", 3])
def test_what_is_no_name_of_a_variable(name: Any) -> None:
    with pytest.raises(ValueError, match="cannot be an environment variable"):
        LaunchTicket(Invocation("/p"), environ={name: "x"})


def adopted(given: dict[str, Any]) -> list[Any]:
    """A host that inherits orphans, as pid 1 of a container does: its fork server's monitors come to it."""
    import ctypes
    import os
    import signal

    import trio

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)

    async def act(cage: Any) -> None:
        await line(cage.stdout)
        os.kill(forkserver_pid(cage), signal.SIGKILL)
        await trio.lowlevel.wait_readable(cage._ticket.forkserver.pidfd)  # its monitors are the host's now

    in_cage(given, act)
    try:
        return list(os.waitpid(-1, os.WNOHANG))
    except ChildProcessError:
        return []


def test_no_zombie_is_left_to_a_host_that_inherits_orphans(box: Box) -> None:
    assert monitored_plugins.run(box, adopted, monitored_plugins.given(box, WAITS)) == []


def in_vain(given: dict[str, Any]) -> list[Any]:
    """Whatever is started dies."""
    import os
    import signal

    import trio

    from runner.launch.remote import forkserver
    from runner.launch.remote.remote_cell import open_cage
    from runner.outcome import Failure

    real = forkserver.start_by_exec

    def doomed() -> Any:
        made = real()
        signal.pidfd_send_signal(made.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, made.pidfd, os.WEXITED)
        return made

    forkserver.start_by_exec = doomed

    async def main() -> list[Any]:
        before = len(os.listdir("/proc/self/fd"))
        try:
            async with open_cage(invocation(given), environ={}):
                return []
        except Failure as failure:
            open_now = len(os.listdir("/proc/self/fd")) - before
            return [failure.outcome.code, failure.outcome.cause, failure.exec_status, open_now]

    return trio.run(main)


def test_a_forkserver_that_cannot_live(box: Box) -> None:
    assert monitored_plugins.run(box, in_vain, monitored_plugins.given(box, CAT)) == [
        "launch_failed",
        "spawn",
        125,
        0,
    ]


def starved(given: dict[str, Any], what: str) -> list[Any]:
    """Of processes or of descriptors, and then no more."""
    import os
    import resource

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage
    from runner.outcome import Failure
    from sandbox.cell.cell import children

    async def once() -> list[Any]:
        try:
            async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
                ended = await cage.ended()
                return [summed(ended), len(ended.explanation)]
        except Failure as failure:
            return [failure.outcome.code, failure.outcome.cause]

    async def main() -> list[Any]:
        assert (await once())[0][0] == "ok"  # the fork server is there
        (pid,) = children(os.getpid())
        before = len(os.listdir("/proc/self/fd"))
        kind = resource.RLIMIT_NPROC if what == "processes" else resource.RLIMIT_NOFILE
        pid = 0 if what == "the host's descriptors" else pid
        old = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (before + 3 if not pid else 6 if what == "descriptors" else 0, old[1]))
        failed = await once()
        resource.prlimit(pid, kind, old)
        again = await once()
        held = len(os.listdir("/proc/self/fd")) - before
        await aclose_forkserver()
        return [failed, again[0][0], held]

    return trio.run(main)


@one_case(
    ("what", "expected"),
    [
        ("processes", [["launch_failed", "launch", "resources", 125], 1]),
        ("descriptors", [["launch_failed", "launch", "spawn", 125], 2]),
        ("the host's descriptors", ["launch_failed", "resources"]),
    ],
)
def test_what_is_short_fails_one_launch_and_no_more(box: Box, what: str, expected: list[Any]) -> None:
    if what == "processes" and box.caller.uid == 0:
        pytest.skip("root's processes are not counted")
    told = monitored_plugins.run(box, starved, monitored_plugins.given(box, "#!/bin/sh\n"), what)
    assert told == [expected, "ok", 0]


# --- what it has imported ----------------------------------------------------------------------------------


def imported(given: dict[str, Any], told: str) -> list[Any]:
    """The modules that each launch and each shared monitor has imported itself."""
    import os

    import trio

    from runner.launch.remote import forkserver
    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

    forkserver._START = f"""
import functools, os, sys
sys.path[:] = sys.argv[3:]
from runner.launch.remote import forkserver, monitor, shared_monitor
leave = os._exit
def watched(live, *args):
    me, before = os.getpid(), set(sys.modules)
    def tell(code):
        if os.getpid() == me:
            with open({told!r}, "a") as file:
                print(*sorted(set(sys.modules) - before), file=file)
        leave(code)
    os._exit = tell
    live(*args)
monitor.monitor_launch = functools.partial(watched, monitor.monitor_launch)
shared_monitor.monitor_plans = functools.partial(watched, shared_monitor.monitor_plans)
forkserver.main(int(sys.argv[1]), int(sys.argv[2]))
"""

    async def main() -> None:
        for _ in range(2):
            async with open_cage(invocation(given), environ=dict(os.environ)) as cage:
                await line(cage.stdout)
                async with open_cage(invocation(given), environ=dict(os.environ)) as second:
                    await line(second.stdout)
        await aclose_forkserver()

    trio.run(main)

    def lines() -> list[str]:
        with open(told) as file:
            return file.read().splitlines()

    assert wait_for(lambda: len(lines()) == 6)  # of four launches, and twice a monitor of two
    return lines()


def test_a_launch_imports_nothing_in_the_fork_server(box: Box) -> None:
    """Only the first reads the manifest, which is then in the cache."""
    asked, told = monitored_plugins.given(box, monitored_plugins.SLEEPS), box.folder / "told"
    found = monitored_plugins.run(box, imported, asked, str(told))
    assert sorted(found)[:-1] == [""] * 5


# --- what it has of its host -------------------------------------------------------------------------------


def looked_at(given: dict[str, Any], how: str) -> dict[str, Any]:
    """A fork server, started by a host with things that are nobody else's."""
    import os
    import signal
    from contextlib import suppress

    from runner.launch.remote import forkserver

    os.chdir(given["folder"])
    secret = os.open("secret", os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(secret, True)
    os.dup2(secret, 77, inheritable=True)
    os.environ["SECRET"] = "in the environment"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    made = forkserver.start_by_fork() if how == "fork" else forkserver.current()
    assert made is not None and forkserver.current() is made

    with open(f"/proc/self/fdinfo/{made.pidfd}") as file:
        pid = next(int(text.split()[1]) for text in file if text.startswith("Pid:"))

    def is_made() -> bool:
        with open(f"/proc/{pid}/comm") as file:
            return file.read() != "runner-forksrv\n"

    held: dict[str, str] = {}

    def holds_more() -> bool:
        """More than its streams and its socket. It opens modules for a moment, while it imports them."""
        held.clear()
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                held[name] = os.readlink(f"/proc/{pid}/fd/{name}")
        return len(held) > 4

    assert not settled(is_made)
    settled(holds_more)
    status = {}
    with open(f"/proc/{pid}/status") as file:
        for text in file:
            name, _, value = text.partition(":")
            status[name] = value.strip()
    with open(f"/proc/{pid}/environ", "rb") as raw:
        environ = raw.read().decode()
    told = {
        "held": held,
        "cwd": os.readlink(f"/proc/{pid}/cwd"),
        "session": os.getsid(pid) == pid,
        "threads": status["Threads"],
        "blocked": int(status["SigBlk"], 16),
        "ignored": [n for n in range(1, 32) if int(status["SigIgn"], 16) >> (n - 1) & 1],
        "caught": int(status["SigCgt"], 16),
        "environ": environ,
    }
    forkserver.close()
    os.unlink("secret")
    return {**told, "gone": not os.path.exists(f"/proc/{pid}")}


@one_case("how", ["exec", "fork"])
def test_it_has_nothing_of_its_host(box: Box, how: str) -> None:
    told = monitored_plugins.run(box, looked_at, {"folder": str(box.caller.home)}, how)
    held = told.pop("held")
    assert [held.pop(number) for number in "012"] == ["/dev/null"] * 3
    ((_, only),) = held.items()
    assert only.startswith("socket:")
    environ = told.pop("environ")
    if how == "exec":
        assert "SECRET" not in environ
    assert told == {
        "cwd": "/",
        "session": True,
        "threads": "1",
        "blocked": 0,
        "ignored": [signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ],
        "caught": 0,
        "gone": True,
    }


def related(given: dict[str, Any], how: str) -> bool:
    """Whether a monitor takes its host for a stranger, and its fork server not."""
    import os

    from runner.launch.remote import forkserver

    told: str = given["told"]
    tells = f"""
import os
from runner.launch.remote import forkserver
from sandbox import facts
def tell(*_):
    server = os.getpid()
    if os.fork() == 0:  # as a monitor
        with open({told!r} + ".part", "w") as file:
            file.write(str(facts.strangers([{os.getpid()}, server, os.getpid()]) == [{os.getpid()}]))
        os.rename({told!r} + ".part", {told!r})
        os._exit(0)
    os.wait()
forkserver.serve = tell
"""
    if how == "fork":
        exec(tells, {})  # noqa: S102 -- the same words as for the other ways
        assert forkserver.start_by_fork() is not None
    else:
        start = "\nforkserver.main(int(sys.argv[1]), int(sys.argv[2]))"
        forkserver._START = f"import sys; sys.path[:] = sys.argv[3:]{tells}{start}"
        forkserver.is_command = how == "command"
        forkserver.start_by_exec()
    assert wait_for(lambda: os.path.exists(told))
    with open(told) as file:
        return file.read() == "True"


@pytest.mark.parametrize(("how", "stranger"), [("fork", False), ("command", False), ("library", True)])
def test_a_host_is_ours_only_if_it_is_a_command_of_ours(box: Box, how: str, stranger: bool) -> None:
    """What is ours may be moved to another group. A program that uses the library is not."""
    given = {"told": str(box.caller.home / "told")}
    assert monitored_plugins.run(box, related, given, how) is stranger


def misled(given: dict[str, Any]) -> list[Any]:
    """A host that would import from where it happens to be."""
    import os
    import sys

    import runner.launch.remote.remote_cell

    assert runner.launch.remote.remote_cell.__file__
    os.chdir(given["folder"])
    sys.path.insert(0, "")
    try:
        import trap  # type: ignore[import-not-found]

        trap.spring()
    except SystemExit:
        os.unlink("imported")  # so it would

    async def act(cage: Any) -> list[Any]:
        return summed(await cage.ended())

    ended: list[Any] = in_cage(given, act)
    return [ended, os.listdir()]


def test_it_imports_nothing_from_the_hosts_folder(box: Box) -> None:
    given = monitored_plugins.given(box, "#!/bin/sh\n", folder=str(box.folder / "trap"))
    trap = box.folder / "trap"
    trap.mkdir()
    names = ["fcntl.py", "hashlib.py", "runner.py", "sandbox.py", "trap.py"]
    for name in names:
        (trap / name).write_text(f"open({str(trap / 'imported')!r}, 'w')\nraise SystemExit(3)\n")
    box.caller.give(trap)
    ended, found = monitored_plugins.run(box, misled, given)
    assert ended == ["ok", "run", "", 0]
    assert sorted(set(found) - {"__pycache__"}) == names


def forked(given: dict[str, Any]) -> list[Any]:
    """As the command line does it: the launch is ordered before trio is there."""
    import os
    import sys

    from runner.launch.remote import forkserver

    assert "trio" not in sys.modules
    made = forkserver.start_by_fork()
    assert made is not None
    ticket = forkserver.LaunchTicket(invocation(given), environ={"PATH": "/usr/bin:/bin"})
    ticket.send(made)
    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

    refused = forkserver.start_by_fork() is None  # from now on

    async def main() -> list[Any]:
        async with open_cage(invocation(given), environ={}, sent=ticket) as cage:
            await cage.stdin.send_all(b"hello\n")
            said = await line(cage.stdout)
        again = []
        async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
            await cage.stdin.send_all(b"again\n")
            again.append(await line(cage.stdout))
            same = cage._ticket.forkserver is made
        await aclose_forkserver()
        return [said, *again, same]

    before = len(os.listdir("/proc/self/fd"))
    told = trio.run(main)
    # Four ends of that launch, and the fork server's socket and pidfd.
    return [*told, refused, before - len(os.listdir("/proc/self/fd"))]


def test_a_launch_ordered_before_trio_is_there(box: Box) -> None:
    assert monitored_plugins.run(box, forked, monitored_plugins.given(box, CAT)) == [
        "hello",
        "again",
        True,
        True,
        6,
    ]


def test_no_fork_beside_threads() -> None:
    import threading

    from runner.launch.remote import forkserver

    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert forkserver.start_by_fork() is None
    finally:
        over.set()
        thread.join()


# --- its host ----------------------------------------------------------------------------------------------


def test_it_ends_with_its_host(box: Box) -> None:
    with monitored_plugins.host(box, monitored_plugins.given(box, WAITS)) as host:
        host.process.kill()
        assert vanished({host.forkserver, host.monitor}, 30)


def test_it_does_not_outlive_a_host_that_just_ends(box: Box) -> None:
    def careless(given: dict[str, Any]) -> list[int]:
        import trio

        from runner.launch.remote.remote_cell import open_cage

        async def main() -> list[int]:
            async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
                await line(cage.stdout)
                return [forkserver_pid(cage)]

        return trio.run(main)

    (pid,) = monitored_plugins.run(box, careless, monitored_plugins.given(box, WAITS))
    assert vanished({pid}, 30)


@pytest.mark.needs("root")
def test_a_host_that_gave_up_its_rights_launches_without_them(
    runner_as_root: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    box = Box(runner_as_root, plugin_dir)

    def dropped(given: dict[str, Any]) -> list[Any]:
        import os

        import trio

        from runner.launch.remote import forkserver
        from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

        async def owner() -> Any:
            async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
                await cage.launched()
                return os.stat(f"/proc/{cage._pid}").st_uid

        first = trio.run(owner)
        old = forkserver.current()
        os.setgroups([])
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)
        second = trio.run(owner)
        fresh = forkserver.current() is not old
        trio.run(aclose_forkserver)
        return [first, fresh, second]

    given = monitored_plugins.given(box, CAT)
    given["policy"] = "dev"  # a file of root's is no policy of others
    assert monitored_plugins.run(box, dropped, given) == [0, True, 54321]
