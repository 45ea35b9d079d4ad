"""The child between clone and exec, seen from inside and from outside."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox.spawn import init
from sandbox.spawn.order import SpawnOrder
from sandbox.speed.libc import open_libc
from tests import elsewhere
from tests.conftest import ROOT, SPARE_UID, Caller
from tests.sandbox.limits.own_cgroups import make_own_cgroups
from tests.tables import one_case

LEASED = SPARE_UID + 24

pytestmark = pytest.mark.usefixtures("nothing_left")


def order(caller: Caller, *argv: str, **changes: Any) -> dict[str, Any]:
    """The order of a launch: with a uid of its own if the caller is root."""
    own = LEASED if caller.uid == 0 else caller.uid
    return {
        "program": argv[0],
        "argv": list(argv),
        "uid": own,
        "gid": own,
        "drop": caller.uid == 0,
        "keep": [],
        "rlimits": [],
        "keyring": False,
        **changes,
    }


def output_of(given: dict[str, Any]) -> str:
    """Carry out an order with a pipe as its stdout. Returns its output, with the exit code as the last
    line."""
    import os

    from sandbox.spawn import spawner
    from sandbox.spawn.order import SpawnOrder

    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    try:
        pid = spawner.spawn(SpawnOrder(**given))
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    with open(read, encoding="utf-8", errors="surrogateescape") as file:
        printed = file.read()
    return f"{printed}\n{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"


def outputs_of(given: list[dict[str, Any]]) -> list[str]:
    return [output_of(each) for each in given]


def status_of(text: str) -> dict[str, str]:
    """A /proc/PID/status as a dictionary."""
    fields = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, value in fields}


# --- what it becomes ---------------------------------------------------------------------------------------


def test_the_child_becomes_the_program(runner_as: Caller) -> None:
    """With its exit code, an empty environment, and a score that the OOM killer prefers."""
    shown = {
        "one --two three  \n\n0": order(runner_as, "/bin/echo", "one", "--two", "three  "),
        "\n7": order(runner_as, "/bin/sh", "-c", "exit 7"),
        "\n0": order(runner_as, "/bin/cat", "/proc/self/environ"),
        "500\n\n0": order(runner_as, "/bin/cat", "/proc/self/oom_score_adj"),
    }
    found = elsewhere.run(
        runner_as, outputs_of, [*shown.values()], using=(output_of,), env={"CANARY": "sings"}
    )
    assert found == [*shown]


@pytest.mark.both_callers
def test_ids_are_really_changed(runner_as: Caller) -> None:
    # Read from outside of its user namespace, by a process of ours: what the kernel says, not what it sees.
    def look(given: dict[str, Any]) -> str:
        import os
        import signal

        from sandbox.spawn import spawner
        from sandbox.spawn.order import SpawnOrder

        os.setgroups([4, 24]) if os.geteuid() == 0 else None
        pid = spawner.spawn(SpawnOrder(**given))
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            text = file.read()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return text

    status = status_of(elsewhere.run(runner_as, look, order(runner_as, "/bin/sleep", "1000")))
    own = str(LEASED if runner_as.uid == 0 else runner_as.uid)
    assert status["Uid"].split() == [own] * 4
    assert status["Gid"].split() == [own] * 4
    assert status["Groups"] == ""
    assert status["NoNewPrivs"] == "1"
    assert status["CapEff"] == status["CapPrm"] == status["CapInh"] == status["CapAmb"] == "0" * 16
    # A pid namespace of its own with it as init, and a session of its own.
    assert status["NSpid"].split()[-1] == "1"
    assert status["NSsid"].split()[-1] == "1"


@pytest.mark.needs("root")
def test_a_file_of_root_is_out_of_reach(runner_as_root: Caller, plugin_dir: Path) -> None:
    secret = plugin_dir / "secret"
    secret.write_text("s")
    secret.chmod(0o600)
    given = order(runner_as_root, "/bin/sh", "-c", f"cat {secret} 2>&1")
    assert "Permission denied" in elsewhere.run(runner_as_root, output_of, given)
    # The control: as root and without the drop the same command reads it.
    given |= {"uid": 0, "gid": 0, "drop": False}
    assert elsewhere.run(runner_as_root, output_of, given) == "s\n0"


def blocked(given: dict[str, Any]) -> str:
    """Carry out an order with signals blocked and ignored, as some callers leave them."""
    import os
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    for number in (signal.SIGPIPE, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o020)
    text = output_of(given)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGUSR1, signal.SIGTERM}
    return text


def test_signals_are_reset_and_the_umask_is_the_callers(runner_as: Caller) -> None:
    given = order(runner_as, "/bin/cat", "/proc/self/status")
    status = status_of(elsewhere.run(runner_as, blocked, given, using=(output_of,)))
    assert int(status["SigBlk"], 16) == 0
    # But for 32 and 33, the C library's own, which its posix_spawn leaves ignored until they are used.
    assert int(status["SigIgn"], 16) & ~(0b11 << 31) == 0
    assert int(status["Umask"], 8) == 0o022  # never without 0o002: others could change the files


# --- limits ------------------------------------------------------------------------------------------------


def limited(hard: int, given: dict[str, Any]) -> str:
    """Carry out an order as a caller with a low hard limit of its own."""
    import resource

    if hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return output_of(given)


@one_case(
    ("callers", "soft", "hard", "expected"),
    [
        pytest.param(0, 100, 200, ["100", "200"], id="lowered"),
        pytest.param(300, 100, 200, ["100", "200"], id="below the caller's"),
        pytest.param(300, 100, 1024, ["100", "300"], id="hard above the caller's"),
        pytest.param(300, 1024, 4096, ["300", "300"], id="both above the caller's"),
        pytest.param(300, resource.RLIM_INFINITY, resource.RLIM_INFINITY, ["300", "300"], id="infinite"),
    ],
)
def test_limits_are_lowered_and_never_raised(
    runner_as: Caller, callers: int, soft: int, hard: int, expected: list[str]
) -> None:
    given = order(runner_as, "/bin/cat", "/proc/self/limits", rlimits=[[resource.RLIMIT_NOFILE, soft, hard]])
    text = elsewhere.run(runner_as, limited, callers, given, using=(output_of,))
    (line,) = (line for line in text.splitlines() if line.startswith("Max open files"))
    assert line.split()[3:5] == expected


@pytest.mark.needs("root")
def test_a_higher_oom_score_is_kept(runner_as_root: Caller) -> None:
    # Containers of low priority get one from their engine, and nobody inside may lower it.
    def preferred(given: dict[str, Any]) -> str:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("900")
        return output_of(given)

    given = order(runner_as_root, "/bin/cat", "/proc/self/oom_score_adj")
    assert elsewhere.run(runner_as_root, preferred, given, using=(output_of,)) == "900\n\n0"


@pytest.mark.needs("root")
def test_a_score_raised_by_root_stays(runner_as_root: Caller) -> None:
    if not int(status_of(Path("/proc/self/status").read_text())["CapEff"], 16) & 1 << 24:
        pytest.skip("needs CAP_SYS_RESOURCE, without which nobody can pin the score")
    script = "echo 0 >/proc/self/oom_score_adj; cat /proc/self/oom_score_adj"
    printed = elsewhere.run(runner_as_root, output_of, order(runner_as_root, "/bin/sh", "-c", script))
    assert printed == "500\n\n0"


@pytest.mark.needs("root")
def test_its_usage_is_not_charged_to_root(runner_as_root: Caller) -> None:
    """The kernel charges a user namespace's use to the uid that made it, which NS_GET_OWNER_UID shows."""

    def owner(given: dict[str, Any]) -> int:
        import fcntl
        import os
        import signal
        import struct

        from sandbox.spawn import spawner
        from sandbox.spawn.order import SpawnOrder

        pid = spawner.spawn(SpawnOrder(**given))
        with open(f"/proc/{pid}/ns/user", "rb") as namespace:
            held = fcntl.ioctl(namespace, 0xB704, struct.pack("I", 0))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return int(struct.unpack("I", held)[0])

    assert elsewhere.run(runner_as_root, owner, order(runner_as_root, "/bin/sleep", "1000")) == LEASED


# --- descriptors -------------------------------------------------------------------------------------------


def with_open_files(given: dict[str, Any], numbers: list[int]) -> str:
    """Carry out an order while inheritable descriptors with these numbers are open."""
    import os

    for number in numbers:
        os.dup2(os.open("/", os.O_RDONLY), number, inheritable=True)
    return output_of(given)


@one_case(
    ("keep", "expected"),
    [
        pytest.param([], {"0", "1", "2", "3"}, id="none"),
        pytest.param([40], {"0", "1", "2", "3", "40"}, id="one in the middle"),
        pytest.param([50, 20], {"0", "1", "2", "3", "20", "50"}, id="out of order"),
        pytest.param([20, 21, 20], {"0", "1", "2", "3", "20", "21"}, id="neighbours, one twice"),
        pytest.param([0, 1, 40], {"0", "1", "2", "3", "40"}, id="standard streams named again"),
    ],
)
def test_only_kept_descriptors_are_inherited(runner_as: Caller, keep: list[int], expected: set[str]) -> None:
    given = order(runner_as, "/bin/ls", "/proc/self/fd", keep=keep)
    text = elsewhere.run(runner_as, with_open_files, given, [20, 21, 30, 40, 50, 4000], using=(output_of,))
    assert set(text.split()[:-1]) == expected  # 3 is ls looking


def test_many_launches_leak_no_descriptor(runner_as: Caller) -> None:
    def launch(given: dict[str, Any], missing: dict[str, Any]) -> list[int]:
        import os

        from sandbox.spawn import spawner
        from sandbox.spawn.order import SpawnError, SpawnOrder

        before = len(os.listdir("/proc/self/fd"))
        for number in range(24):  # what leaks, leaks at each
            try:
                os.waitpid(spawner.spawn(SpawnOrder(**(missing if number % 4 == 0 else given))), 0)
            except SpawnError:
                assert number % 4 == 0
        return [before, len(os.listdir("/proc/self/fd"))]

    before, after = elsewhere.run(
        runner_as, launch, order(runner_as, "/bin/true"), order(runner_as, "/bin/no-such-program")
    )
    assert before == after


# --- what goes wrong ---------------------------------------------------------------------------------------


def failing(given: dict[str, Any], preparation: str = "") -> list[Any]:
    """The stage and errno of an order that fails, and whether it left a child or a descriptor."""
    import os
    import resource
    import signal

    from sandbox.spawn import spawner
    from sandbox.spawn.order import SpawnError, SpawnOrder

    if preparation == "no stdin":
        os.set_inheritable(0, False)
    before = len(os.listdir("/proc/self/fd"))
    if preparation == "no processes":
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    proc = os.open("/proc/self/fd", os.O_RDONLY)
    if preparation.startswith("/"):
        os.chroot(preparation)
    try:
        spawner.spawn(SpawnOrder(**given))
    except SpawnError as error:
        stage, code, said = error.stage, error.errno, str(error)
    else:
        raise AssertionError("it was started")
    assert said == f"could not {stage}: {os.strerror(code)}"
    after = len(os.listdir(proc)) - 1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    try:
        os.waitpid(-1, os.WNOHANG)
        left = True
    except ChildProcessError:
        left = False
    return [stage, code, left, after - before]


@one_case(
    ("argv", "changes", "preparation", "expected"),
    [
        (["/bin/no-such-program"], {}, "", ["start bubblewrap", errno.ENOENT]),
        (["/etc/passwd"], {}, "", ["start bubblewrap", errno.EACCES]),
        (["{folder}/text"], {}, "", ["start bubblewrap", errno.ENOEXEC]),
        (["/bin/true"], {"rlimits": [[9999, 1, 1]]}, "", ["set resource limits", errno.EINVAL]),
        (["/bin/true"], {"keep": [77]}, "", ["close other files", errno.EBADF]),
        # bwrap's own descriptors would take its place, and the plugin finds them in /proc/1/fd.
        (["/bin/true"], {}, "no stdin", ["close other files", errno.EBADF]),
    ],
    ids=[
        *("a missing program", "a program nobody may execute", "a file that is not a program"),
        *("a limit the kernel does not know", "a kept descriptor that is not open"),
        "a standard stream that would not survive",
    ],
)
def test_an_order_that_fails(
    runner_as: Caller,
    plugin_dir: Path,
    argv: list[str],
    changes: dict[str, Any],
    preparation: str,
    expected: list[Any],
) -> None:
    (plugin_dir / "text").write_text("just words")
    (plugin_dir / "text").chmod(0o755)
    given = order(runner_as, *(word.format(folder=plugin_dir) for word in argv), **changes)
    assert elsewhere.run(runner_as, failing, given, preparation) == [*expected, False, 0]


@pytest.mark.both_callers
def test_a_uid_that_cannot_be_mapped(runner_as: Caller) -> None:
    # For root there is none but the invalid one; for others every uid that is not theirs.
    strange = {"uid": 2**32 - 1} if runner_as.uid == 0 else {"uid": LEASED, "gid": LEASED}
    code = errno.EINVAL if runner_as.uid == 0 else errno.EPERM
    given = order(runner_as, "/bin/true", **strange)
    assert elsewhere.run(runner_as, failing, given) == ["map the plugin's ids", code, False, 0]


@pytest.mark.needs("user")
def test_dropping_is_for_root(runner_as_user: Caller) -> None:
    given = order(runner_as_user, "/bin/true", drop=True)
    if os.geteuid() == 0:
        given |= {"uid": LEASED, "gid": LEASED}
    stage = "end a process of another uid: CAP_KILL is missing"
    assert elsewhere.run(runner_as_user, failing, given) == [stage, errno.EPERM, False, 0]


@pytest.mark.needs("root")
@one_case(
    ("ids", "stage"),
    [
        ({"uid": LEASED, "gid": LEASED}, "drop the group id"),
        ({"uid": LEASED, "gid": 0}, "drop the user id"),
    ],
)
def test_an_id_that_was_not_dropped_is_noticed(
    runner_as_root: Caller, ids: dict[str, int], stage: str
) -> None:
    given = order(runner_as_root, "/bin/true", drop=False, **ids)
    assert elsewhere.run(runner_as_root, failing, given) == [stage, errno.EPERM, False, 0]


@pytest.mark.needs("user")
def test_no_room_for_another_process(runner_as_user: Caller) -> None:
    outcome = elsewhere.run(runner_as_user, failing, order(runner_as_user, "/bin/true"), "no processes")
    assert outcome == ["create a user and pid namespace", errno.EAGAIN, False, 0]


@pytest.mark.needs("root")
def test_a_machine_without_user_namespaces(runner_as_root: Caller, plugin_dir: Path) -> None:
    # The kernel refuses them in a chroot, as some containers do everywhere.
    outcome = elsewhere.run(runner_as_root, failing, order(runner_as_root, "/bin/true"), str(plugin_dir))
    assert outcome == ["create a user and pid namespace", errno.EPERM, False, 0]


# --- the runner dies ---------------------------------------------------------------------------------------


_NOTHING = SpawnOrder("", (), 0, 0, drop=False, keep=(), rlimits=(), keyring=False)
_INIT_STAGES = init._init_stages(_NOTHING, open_libc(), init.SYSCALLS["x86_64"], -1, -1, ())
_PROGRAM_STAGES = init._program_stages(_NOTHING, open_libc(), False)
STAGES = (*(name for name, _ in _INIT_STAGES), "start a process", *(name for name, _ in _PROGRAM_STAGES))


def paused_at(given: dict[str, Any], stage: int, forks_at: int) -> None:
    """Spawn, with a child that stops before its step `stage`, reports that, and goes on when we are
    dead."""
    import os
    import select

    from sandbox.spawn import init, spawner
    from sandbox.spawn.order import SpawnOrder

    # Readable only after the kernel has told our children of our death; the pipes close before that.
    us = os.pidfd_open(os.getpid())

    def paused(step: Any, go_r: int | None = None) -> Any:
        def pause() -> Any:
            if (
                go_r is not None
            ):  # The mapping is written and the word to go on is given: nothing else stops it.
                select.select([go_r], [], [])
            os.write(1, b".\n")
            select.select([us], [], [])
            return step()

        return pause

    real, real_program, real_fork = init._init_stages, init._program_stages, os.fork

    def stages(*words: Any) -> Any:
        found = list(real(*words))
        if stage < forks_at:
            name, step = found[stage]
            found[stage] = name, paused(step, words[4] if stage < 2 else None)
        elif stage == forks_at:
            os.fork = paused(real_fork)
        return found

    def program_stages(*words: Any) -> Any:
        found = list(real_program(*words))
        if stage > forks_at:
            name, step = found[stage - forks_at - 1]
            found[stage - forks_at - 1] = name, paused(step)
        return found

    init._init_stages, init._program_stages = stages, program_stages  # type: ignore[assignment]
    spawner.spawn(SpawnOrder(**{**given, "keep": [us]}))


@pytest.mark.both_callers
@one_case("stage", range(len(STAGES)), ids=STAGES)
def test_the_runners_death_at_any_stage(runner_as: Caller, stage: int) -> None:
    given = order(runner_as, "/bin/sleep", "1000")
    with elsewhere.start(runner_as, paused_at, given, stage, STAGES.index("start a process")) as runner:
        assert elsewhere.line(runner) == b".\n"
        runner.kill()
        # The tree has our pipe as its stdout: its end is the tree's end.
        assert end_of_output(runner) == b""


def before_the_mapping(given: dict[str, Any]) -> None:
    import os
    import select

    from sandbox.spawn import spawner
    from sandbox.spawn.order import SpawnOrder

    us = os.pidfd_open(os.getpid())  # not always the process that maps

    def wait(*_: object) -> None:
        os.write(1, b".\n")
        select.select([us], [], [])

    spawner._map_ids = wait  # type: ignore[assignment]
    spawner.spawn(SpawnOrder(**given))


@pytest.mark.both_callers
def test_the_runners_death_before_the_mapping(runner_as: Caller) -> None:
    with elsewhere.start(runner_as, before_the_mapping, order(runner_as, "/bin/echo", "started")) as runner:
        assert elsewhere.line(runner) == b".\n"
        runner.kill()
        assert end_of_output(runner) == b""


LATE = ("make the namespaces before the launch limit", errno.ETIME)


@pytest.mark.needs("root")
@one_case(
    ("function", "number", "told"),
    [
        ("_map_ids", signal.SIGKILL, ("map the plugin's ids", errno.EIO)),
        (
            "_keep_root_file_access",
            signal.SIGKILL,
            ("go on: the process that makes the namespaces was killed", errno.EIO),
        ),
        ("_map_ids", signal.SIGSTOP, LATE),
        ("_keep_root_file_access", signal.SIGSTOP, LATE),
    ],
)
def test_a_maker_that_is_killed_or_stopped(
    runner_as_root: Caller, function: str, number: int, told: tuple[str, int]
) -> None:
    """For example by the OOM killer: its child is dead, and nothing starts."""

    def hit(given: dict[str, Any], name: str, number: int) -> list[Any]:
        import os

        from sandbox.spawn import spawner

        setattr(spawner, name, lambda *_: os.kill(os.getpid(), number))
        spawner._LEAST_SECONDS = 0.5
        return failing(given)

    until = time.monotonic() + 1.0 if number == signal.SIGSTOP else None
    given = order(runner_as_root, "/bin/echo", "started", until=until)
    found = elsewhere.run(runner_as_root, hit, given, function, int(number), using=(failing,))
    assert found == [*told, False, 0]


@pytest.mark.needs("root")
def test_a_maker_that_cannot_be_waited_for(runner_as_root: Caller) -> None:
    """There is no descriptor for that. What it has made so far is ended, and nothing stays."""

    def without(given: dict[str, Any]) -> list[Any]:
        import errno
        import os
        import select

        from sandbox.spawn import spawner

        setattr(spawner, "_map_ids", lambda *_: select.select([], [], []))  # noqa: B010
        born: list[int] = []
        real = os.pipe2

        def pipe2(flags: int) -> tuple[int, int]:
            pair = real(flags)
            born.append(pair[0])
            return pair

        def pidfd_open(pid: int) -> int:
            select.select([born[-1]], [], [])  # the maker has told the pid of its child
            raise OSError(errno.EMFILE, "")

        os.pipe2, os.pidfd_open = pipe2, pidfd_open  # type: ignore[assignment]
        return failing(given)

    found = elsewhere.run(
        runner_as_root, without, order(runner_as_root, "/bin/echo", "started"), using=(failing,)
    )
    assert found == ["wait for the process that makes the namespaces", errno.EMFILE, False, 0]


@one_case("stages", ["_init_stages", "_program_stages"])
def test_a_process_that_is_stopped_is_left_to_the_callers_clocks(runner_as: Caller, stages: str) -> None:
    """Nobody is waited for: the pid is the caller's, who ends all with it."""

    def stopped(given: dict[str, Any], stages: str) -> list[Any]:
        import os
        import select
        import signal

        from sandbox.spawn import init, spawner
        from sandbox.spawn.order import SpawnOrder

        real, reap_by = getattr(init, stages), spawner._reap_by
        # The machine may be busy: the process that makes the namespaces has all the time.
        setattr(spawner, "_reap_by", lambda pid, _: reap_by(pid, None))  # noqa: B010
        # The init of a pid namespace gets no SIGSTOP of its own.
        stop = ("stop", lambda: select.select([], [], []))
        setattr(init, stages, lambda *words: [stop, *real(*words)])
        spawner._LEAST_SECONDS = 0.5
        before = len(os.listdir("/proc/self/fd"))
        pid = spawner.spawn(SpawnOrder(**given))
        lives = os.waitpid(pid, os.WNOHANG)[0] == 0
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        return [lives, status, len(os.listdir("/proc/self/fd")) - before]

    given = order(runner_as, "/bin/echo", "started", until=time.monotonic() + 0.5)
    assert elsewhere.run(runner_as, stopped, given, stages) == [True, signal.SIGKILL, 0]


def test_a_spawn_takes_any_clock(runner_as: Caller) -> None:
    """poll(2) counts milliseconds in an int, which ends at 24 days."""
    for until in (time.monotonic() + 86400 * 365 * 100, 0.0):  # in a hundred years, and long past
        given = order(runner_as, "/bin/echo", "started", until=until)
        assert elsewhere.run(runner_as, output_of, given) == "started\n\n0"


def test_a_filter_that_was_not_tried_in_time(runner_as: Caller) -> None:
    """The runner does not do what may kill it: it says that the time is over."""

    def stopped(given: dict[str, Any]) -> list[Any]:
        import os
        import signal

        from sandbox.spawn import spawner
        from sandbox.speed.libc import open_libc

        class Libc:
            def prctl(self, option: int, *words: int) -> int:
                if option == spawner._PR_SET_DUMPABLE:
                    os.kill(os.getpid(), signal.SIGSTOP)
                return int(spawner._SECCOMP_MODE_FILTER)

            def __getattr__(self, name: str) -> Any:
                return getattr(open_libc(), name)

        setattr(spawner, "open_libc", Libc)  # noqa: B010 -- not exported there
        spawner._TRIAL_SECONDS = spawner._LEAST_SECONDS = 0.2
        return [spawner.can_join_keyring(), *failing(given)]

    given = order(runner_as, "/bin/echo", "started", until=time.monotonic() + 0.2)
    assert elsewhere.run(runner_as, stopped, given, using=(failing,)) == [False, *LATE, False, 0]


def spawned(given: dict[str, Any]) -> None:
    import os

    from sandbox.spawn import spawner
    from sandbox.spawn.order import SpawnOrder

    os.waitpid(spawner.spawn(SpawnOrder(**given)), 0)


def test_the_runners_death_takes_daemons_along(runner_as: Caller) -> None:
    daemon = "setsid sh -c 'setsid sleep 1000 & echo ready; wait' & wait"
    with elsewhere.start(runner_as, spawned, order(runner_as, "/bin/sh", "-c", daemon)) as runner:
        assert elsewhere.line(runner) == b"ready\n"
        runner.kill()
        assert end_of_output(runner) == b""


def end_of_output(process: subprocess.Popen[bytes]) -> bytes:
    try:
        return process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("something of the tree outlived the runner")


def test_a_machine_without_system_call_numbers(
    runner_as_user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sandbox.spawn import spawner
    from sandbox.spawn.order import SpawnError, SpawnOrder

    monkeypatch.setattr(spawner, "SYSCALLS", {})
    assert spawner.can_join_keyring() is False
    with pytest.raises(SpawnError, match="make system calls on"):
        spawner.spawn(SpawnOrder(**order(runner_as_user, "/bin/true")))


def keyrings(given: dict[str, Any]) -> list[str]:
    """The session keyring of two programs in turn, and our own."""
    import ctypes
    import os

    numbers = {"x86_64": 250, "aarch64": 219}
    libc = ctypes.CDLL(None)
    libc.syscall(numbers[os.uname().machine], 1, 0, 0, 0, 0)  # one of our own, which a child would inherit
    own = libc.syscall(numbers[os.uname().machine], 0, -3, 0, 0, 0)
    return [str(own), *(output_of(given).split()[0] for _ in range(2))]


def kept_keyring() -> list[object]:
    """Whether a keyring can be joined, and our own before and after we asked."""
    import ctypes
    import os

    from sandbox.spawn import spawner

    number = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
    libc = ctypes.CDLL(None)
    libc.syscall(number, 1, 0, 0, 0, 0)
    own = libc.syscall(number, 0, -3, 0, 0, 0)
    return [spawner.can_join_keyring(), own > 0, libc.syscall(number, 0, -3, 0, 0, 0) == own]


def test_to_ask_for_a_keyring_takes_none(runner_as: Caller) -> None:
    """A user may have few. Each plugin takes one, and the process that plans it none."""
    assert elsewhere.run(runner_as, kept_keyring) == [True, True, True]


@pytest.mark.both_callers
def test_each_program_has_a_session_keyring_of_its_own(runner_as: Caller) -> None:
    """Otherwise keys of one plugin would be keys of the next, and of the runner."""
    tell = (
        "import ctypes, os; n = {'x86_64': 250, 'aarch64': 219}[os.uname().machine]; "
        "print(ctypes.CDLL(None).syscall(n, 0, -3, 0, 0, 0))"
    )
    given = order(runner_as, "/usr/bin/python3", "-c", tell, keyring=True)
    assert len(set(elsewhere.run(runner_as, keyrings, given, using=(output_of,)))) == 3
    shared = elsewhere.run(runner_as, keyrings, given | {"keyring": False}, using=(output_of,))
    assert len(set(shared)) == 1  # the control


def test_processes_the_program_leaves_end_with_it(runner_as: Caller) -> None:
    """Also if the program is not bwrap and has set up nothing: the cell's init ends them."""
    given = order(runner_as, "/bin/sh", "-c", "setsid sleep 1000 >/dev/null & exit 7")
    assert elsewhere.run(runner_as, output_of, given, timeout=60.0) == "\n7"


# --- cgroups -----------------------------------------------------------------------------------------------


def grouped(given: dict[str, Any], fault: str = "") -> Any:
    """Carry out an order in cgroups of its own, one of which is wrong if there is a `fault`."""
    import os
    import signal

    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spawn import spawner
    from sandbox.spawn.order import CgroupHandles, SpawnError, SpawnOrder
    from sandbox.spec import Limits

    def lines(pid: int) -> set[str]:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            return set(file.read().splitlines())

    before = len(os.listdir("/proc/self/fd"))
    with make_cgroup(survey(read_mounts()).sites, Limits()) as cgroup:
        with cgroup.open_handles() as opened:
            handles, membership = opened, [os.fsencode(line) for line in cgroup.lines]
            wrong = -1
            if fault == "a file to nowhere":
                wrong = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            elif fault == "a file that is shut":
                wrong = os.open(f"{cgroup.groups[-1].path}/cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)
            if "file" in fault:  # of v1 where there is one, else of v2
                gone = () if wrong < 0 else (wrong,)
                handles = CgroupHandles((*opened.tasks[1:], *gone), *opened[1:])
                if not opened.tasks:
                    handles = CgroupHandles(unified_procs=wrong)
            elif fault == "a line too many":
                membership.append(membership[0] + b"x")
            elif fault == "half a line":
                membership[0] = membership[0][:-1]
            given |= {"cgroups": handles, "membership": membership, "hold": cgroup.lock_fds}
            try:
                pid = spawner.spawn(SpawnOrder(**given))
            except SpawnError as error:
                return [error.stage, error.errno, list(cgroup.left())]
            finally:
                if wrong >= 0:
                    os.close(wrong)
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            (program,) = map(int, file.read().split())
        result = [
            set(cgroup.lines) <= lines(program),
            lines(pid) == lines(os.getpid()),
            list(cgroup.left()) == [program],
        ]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [*result, len(os.listdir("/proc/self/fd")) - before]


@pytest.mark.both_callers
def test_the_program_joins_its_groups_and_the_init_does_not(runner_as: Caller) -> None:
    with make_own_cgroups(runner_as) as own:
        told = elsewhere.run(own.caller, grouped, order(runner_as, "/bin/sleep", "1000"))
        assert told == [True, True, True, 0]
        assert own.groups() == []


@pytest.mark.both_callers
@one_case(
    ("fault", "stage", "code"),
    [
        ("a file to nowhere", "be found in its cgroups", errno.ESRCH),
        ("a file is missing", "be found in its cgroups", errno.ESRCH),
        ("a line too many", "be found in its cgroups", errno.ESRCH),
        ("half a line", "be found in its cgroups", errno.ESRCH),
        ("a file that is shut", "join its cgroups", errno.EBADF),
    ],
)
def test_a_program_outside_one_of_its_groups_does_not_start(
    runner_as: Caller, plugin_dir: Path, fault: str, stage: str, code: int
) -> None:
    plugin_dir.chmod(0o777)
    given = order(runner_as, "/bin/sh", "-c", f"touch {plugin_dir}/ran; sleep 1000")
    with make_own_cgroups(runner_as) as own:
        assert elsewhere.run(own.caller, grouped, given, fault) == [stage, code, []]
        assert own.groups() == []
    assert os.listdir(plugin_dir) == []


def born(refuse: bool) -> dict[str, Any]:
    """Fork into cgroups of our own. Reports where the child is before it has joined any, and after."""
    import json
    import os

    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spawn import init
    from sandbox.spec import Limits

    if refuse:  # as a container's filter does
        numbers = init.SYSCALLS[os.uname().machine]
        init.SYSCALLS[os.uname().machine] = numbers._replace(clone3=99999)
    with make_cgroup(survey(read_mounts()).sites, Limits()) as cgroup, cgroup.open_handles() as handles:
        told_r, told_w = os.pipe()
        pid, inside = init.fork_into(handles)
        if pid == 0:
            places = []
            for join in (False, True):
                if join:
                    init.join_cgroups(handles, born_inside=inside)
                with open("/proc/self/cgroup", encoding="utf-8") as file:
                    places.append(file.read().splitlines())
            os.write(told_w, json.dumps(places).encode())
            os._exit(0)
        os.close(told_w)
        with open(told_r, "rb") as told:
            before, after = json.loads(told.read())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        versions = {group.line: group.site.version for group in cgroup.groups}
        return {
            "code": code,
            "inside": inside,
            "before": [version for line, version in versions.items() if line in before],
            "joined": set(versions) <= set(after),
            "versions": sorted(versions.values()),
        }


@pytest.mark.both_callers
@one_case("refuse", [False, True], ids=["clone3", "clone3 refused"])
def test_a_process_is_born_into_its_v2_group(runner_as: Caller, refuse: bool) -> None:
    """Moving it there would cost 11 ms. If clone3 is refused, it is moved all the same."""
    with make_own_cgroups(runner_as) as own:
        told = elsewhere.run(own.caller, born, refuse)
    assert told["code"] == 0 and told["joined"]
    expected = [2] if 2 in told["versions"] and not refuse else []
    assert (told["inside"], told["before"]) == (bool(expected), expected)


# --- the cell's init
# --------------------------------------------------------------------------------------------


def waited_for(
    given: dict[str, Any], seconds: float | None = None, waits: str = "", alarmed: bool = False
) -> dict[str, Any]:
    """Wait for an order and do nothing else. Returns the report of its init. `alarmed`: it gets a SIGALRM."""
    import errno
    import os
    import signal
    import time

    from sandbox.spawn import reaper, spawner
    from sandbox.spawn.order import SpawnOrder, read_ending

    def refused(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "")

    if waits == "in Python: no memfd":  # vm.memfd_noexec=2
        spawner.executable = refused  # type: ignore[attr-defined, assignment]
    elif waits == "in Python: no exec":  # a security module
        reaper.os = type("Os", (), {**vars(os), "execve": staticmethod(refused)})  # type: ignore[attr-defined, assignment]
    read, write = os.pipe()
    started = time.monotonic()
    deadline = None if seconds is None else started + seconds
    pid = spawner.spawn(SpawnOrder(**{**given, "ending": write, "deadline": deadline}))
    os.close(write)
    if alarmed:
        os.kill(pid, signal.SIGALRM)
    _, status = os.waitpid(pid, 0)
    ending = read_ending(read)
    told = {} if ending is None else ending._asdict()
    return {**told, "code": os.waitstatus_to_exitcode(status), "wall": time.monotonic() - started}


# The init waits as a program of its own, and in Python where that cannot be executed.
WAITS = one_case("waits", ["", "in Python: no memfd", "in Python: no exec"])

DEAF = "trap '' TERM INT HUP QUIT; setsid sh -c \"trap '' TERM; sleep 1000\" & "


@WAITS
@one_case(
    ("script", "seconds"),
    [
        (f"{DEAF} sleep 1000", 0.3),
        (f"{DEAF} kill -STOP $$", 0.3),
        (f"{DEAF} while :; do :; done", 0.3),
        (f"{DEAF} sleep 1000", -5.0),
    ],
    ids=["deaf", "stopped", "busy", "too late already"],
)
def test_the_init_has_a_clock_of_its_own(runner_as: Caller, script: str, seconds: float, waits: str) -> None:
    # elsewhere.run reads stdout to its end, which all of them hold: nobody lives on.
    told = elsewhere.run(runner_as, waited_for, order(runner_as, "/bin/sh", "-c", script), seconds, waits)
    assert told["expired"] is True
    assert os.WIFSIGNALED(told["status"]) and os.WTERMSIG(told["status"]) == signal.SIGKILL
    assert told["code"] == 128 + signal.SIGKILL
    assert max(0.0, seconds) <= told["wall"] < 30


@WAITS
@one_case("seconds", [None, 1000.0])
def test_a_deadline_that_is_not_reached(runner_as: Caller, seconds: float | None, waits: str) -> None:
    told = elsewhere.run(runner_as, waited_for, order(runner_as, "/bin/sh", "-c", "exit 7"), seconds, waits)
    assert (told["expired"], told["code"]) == (False, 7)
    assert os.WEXITSTATUS(told["status"]) == 7


@WAITS
def test_an_alarm_from_elsewhere_is_not_a_deadline(runner_as: Caller, waits: str) -> None:
    given = order(runner_as, "/bin/sh", "-c", "sleep 0.5; exit 7")
    told = elsewhere.run(runner_as, waited_for, given, None, waits, True)
    assert (told["expired"], told["code"]) == (False, 7)


@WAITS
def test_an_end_by_a_signal_is_128_and_its_number(runner_as: Caller, waits: str) -> None:
    told = elsewhere.run(
        runner_as, waited_for, order(runner_as, "/bin/sh", "-c", "kill -SEGV $$"), None, waits
    )
    assert (told["expired"], told["code"]) == (False, 128 + signal.SIGSEGV)
    assert os.WTERMSIG(told["status"]) == signal.SIGSEGV


@WAITS
def test_what_the_program_leaves_behind_is_ended_and_counted(runner_as: Caller, waits: str) -> None:
    # A daemon of its own session, and a child that was busy. elsewhere.run waits for the end of both.
    busy = "x = b'x' * (40 << 20)\nfor _ in range(10**7): pass"
    script = f'{DEAF} /usr/bin/python3 -ISc "{busy}"; exit 3'
    told = elsewhere.run(runner_as, waited_for, order(runner_as, "/bin/sh", "-c", script), None, waits)
    assert (told["expired"], told["code"], told["full"]) == (False, 3, False)
    assert 0.05 < told["user"] < 60 and 0 <= told["system"] < 60
    assert 40 << 20 < told["max_rss"] < 1 << 30


@WAITS
@one_case("script", ["exec true", "exec cat /dev/zero >/sys/0/all"], ids=["empty", "full"])
def test_whether_its_folder_is_full(runner_as: Caller, script: str, waits: str) -> None:
    given = order(runner_as, "/bin/sh", "-c", script, folders=["size=64k,mode=755"], scratch=0)
    assert elsewhere.run(runner_as, waited_for, given, None, waits)["full"] is ("cat" in script)


@WAITS
def test_bytes_read_and_written(runner_as: Caller, waits: str) -> None:
    """The program's bytes and those of children it waited for, without those of the cell's init before
    it."""
    script = (
        "head -c 3000000 /dev/zero >/dev/null; "  # 3 MB each way
        "sh -c 'head -c 2000000 /dev/zero' | cat >/dev/null"  # 2 MB, through a pipe: twice each way
    )
    told = elsewhere.run(runner_as, waited_for, order(runner_as, "/bin/sh", "-c", script), None, waits)
    if told["read"] == 0:
        pytest.skip("this kernel does not count what is read")
    assert 7_000_000 <= told["read"] < 7_500_000
    assert 7_000_000 <= told["written"] < 7_100_000
    little = elsewhere.run(runner_as, waited_for, order(runner_as, "/bin/true"), None, waits)
    assert little["read"] < 100_000 and little["written"] < 1000


def looked_at(given: dict[str, Any]) -> dict[str, Any]:
    """The cell's init, from outside: its owner, its descriptors, its limits, its memory."""
    import os
    import resource
    import signal
    import time

    from sandbox.spawn import spawner
    from sandbox.spawn.order import SpawnOrder

    held, ending = os.memfd_create("held"), os.pipe()
    errors = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    given |= {"hold": [held], "ending": ending[1], "stdio": [0, 1, errors]}
    pid = spawner.spawn(SpawnOrder(**given))
    # The program runs. The cell's init closes what it does not need at the same time, and executes its own
    # small program, which gives itself its name first.
    until, name = time.monotonic() + 30, ""
    while name != "runner-init" and time.monotonic() < until:
        time.sleep(0.01)
        with open(f"/proc/{pid}/comm", encoding="ascii") as file:
            name = file.read().strip()
    own = {}
    for name, who in (("ours", os.getpid()), ("its", pid)):
        with open(f"/proc/{who}/smaps_rollup", encoding="ascii") as file:
            sizes = [line.split() for line in file if line.startswith("Private_")]
        own[name] = sum(int(size) for _, size, _ in sizes)  # kB
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        state = {line.partition(":")[0]: line.partition(":")[2].strip() for line in file}
    with open(f"/proc/{pid}/cmdline", "rb") as file, open(f"/proc/{pid}/environ", "rb") as variables:
        words, environment = file.read(), variables.read()
    with open(f"/proc/{pid}/limits", encoding="ascii") as file:
        limits = {line[:25].strip(): line[25:].split()[:2] for line in file}
    with open(f"/proc/{pid}/oom_score_adj", encoding="ascii") as file:
        score = int(file.read())
    told = {
        "owner": os.stat(f"/proc/{pid}/io").st_uid,
        "files": sorted(os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")),
        "core": limits["Max core file size"],
        "open files": limits["Max open files"][1] == str(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        "score": score,
        "pid": pid,
        "own": own,
        "state": state,
        "words": words.decode(),
        "environment": environment.decode(),
    }
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return told


def test_the_init_from_outside(runner_as: Caller) -> None:
    given = order(runner_as, "/bin/sleep", "1000", rlimits=[[resource.RLIMIT_NOFILE, 17, 17]])
    told = elsewhere.run(runner_as, looked_at, given)
    # It has changed its uid, so nobody of that uid may look into it; its own account it opened before.
    assert told["owner"] == runner_as.uid
    pipe, *others = sorted(told["files"], key=lambda name: not name.startswith("pipe:"))
    assert pipe.startswith("pipe:")
    assert sorted(others) == sorted(["/memfd:held (deleted)", f"/proc/{told['pid']}/io"])
    # The limits are the program's: who is to end it must not run out of anything itself.
    assert told["open files"] and told["core"] == ["0", "0"]
    # It has executed a small program, with 12 kB of its own. A copy of a Python process has megabytes.
    assert told["own"]["its"] < 256 < 2000 < told["own"]["ours"]
    assert told["words"] == "runner-init\0" and told["environment"] == ""
    state = told["state"]
    assert (state["Name"], state["NoNewPrivs"]) == ("runner-init", "1")
    assert all(not int(state[f"Cap{each}"], 16) for each in ("Inh", "Prm", "Eff", "Amb"))
    blocked = int(state["SigBlk"], 16)
    waited_for = {signal.SIGCHLD, signal.SIGALRM, signal.SIGKILL, signal.SIGSTOP}
    assert all(blocked & 1 << (number - 1) for number in signal.valid_signals() - waited_for)


def with_stderr(given: dict[str, Any], slot: int) -> list[str]:
    """The output on a descriptor given for stderr, and on our own."""
    import os

    from sandbox.spawn import spawner
    from sandbox.spawn.order import SpawnOrder

    said_r, said_w = os.pipe()
    own_r, own_w = os.pipe()
    os.dup2(own_w, 2)
    os.close(own_w)
    if slot:
        os.dup2(said_w, slot, inheritable=False)
        os.close(said_w)
        given |= {"stdio": [0, 1, slot]}
    pid = spawner.spawn(SpawnOrder(**given))
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.close(slot or said_w)
    with open(said_r, encoding="ascii") as said, open(own_r, encoding="ascii") as own:
        texts = [said.read(), own.read()]  # to the end: the cell's init holds neither
    os.waitpid(pid, 0)
    return texts


LOOK = "import os, sys\nsys.stderr.write(' '.join(sorted(os.listdir('/proc/self/fd'), key=int)[:-1]))"


def test_another_stderr(runner_as: Caller) -> None:
    given = order(runner_as, "/usr/bin/python3", "-c", LOOK)
    assert elsewhere.run(runner_as, with_stderr, given, 0) == ["", "0 1 2"]
    for slot in (9, 77):
        assert elsewhere.run(runner_as, with_stderr, given, slot) == ["0 1 2", ""]


@one_case(
    ("change", "needed"),
    [
        ("", set()),
        ("network='x'", {"sandbox.spawn.network"}),
        ("guards=('x',)", {"sandbox.spawn.guards"}),
        ("binds=((3, '/x'),)", {"sandbox.spawn.guards"}),
    ],
)
def test_what_an_order_needs_is_loaded_before_the_clone(change: str, needed: set[str]) -> None:
    """The clone has another uid, and perhaps no right to read our code."""
    program = (
        "import sys; sys.path[:0] = [sys.argv[1]]; from sandbox.spawn import spawner, order\n"
        "told = order.SpawnOrder('', (), 0, 0, False, (), (), False)\n"
        f"spawner._load_steps(told._replace({change})); print(*sys.modules)"
    )
    argv = [sys.executable, "-I", "-S", "-c", program, str(ROOT)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert "sandbox.spawn.init" in loaded
    assert loaded & {"sandbox.spawn.network", "sandbox.spawn.guards"} == needed
