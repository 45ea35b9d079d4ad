"""Running without a cage: the guarantees that still hold."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox import cages
from tests.sandbox.limits.own_cgroups import OwnCgroups, make_own_cgroups
from tests.tables import one_case, wait_for

Write = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("nothing_left")

cage = cages.cage


def sh(script: str, **changes: Any) -> Any:
    return cages.request("/bin/sh", "-c", script, **changes)


@one_case(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("exit 137", 137), ("kill -TERM $$", 143)])
def test_exit_codes(runner_as: Caller, script: str, code: int) -> None:
    end = cages.run(runner_as, sh(script), bare=True)
    assert (end["code"], end["reached_exec"], end["signal"]) == (code, True, None)


def test_it_really_is_without_a_cage(runner_as: Caller) -> None:
    end = cages.run(runner_as, sh("id -u; readlink /proc/self/ns/user; cat /proc/self/cmdline"), bare=True)
    uid, namespace, _ = end["output"].split("\n", 2)
    assert (int(uid), namespace) == (runner_as.uid, str(Path("/proc/self/ns/user").readlink()))


def test_the_environment_is_exact(runner_as: Caller) -> None:
    asked = cages.request("/bin/cat", "/proc/self/environ", bare_environment=True)
    given = cages.order(asked, env={"B": "2", "A": "1"}, bare=True)
    end = elsewhere.run(runner_as, cages.caged, given, using=(cage,), env={"CANARY": "sings"})
    assert end["output"] == "A=1\0B=2\0"


def with_open_files(given: dict[str, Any]) -> Any:
    """Inheritable descriptors, one of them above a soft limit that was lowered after it was opened."""
    import os
    import resource

    for number in (7, 40, 400):
        os.dup2(os.open("/", os.O_RDONLY), number, inheritable=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 512))
    return caged(given)


caged = cages.caged


def test_descriptors_are_closed(runner_as: Caller) -> None:
    given = cages.order(cages.request("/bin/ls", "/proc/self/fd"), bare=True)
    end = elsewhere.run(runner_as, with_open_files, given, using=(cage, caged))
    assert end["output"].split() == ["0", "1", "2", "3"]  # 3 is ls looking


def test_signals_session_and_directory(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    write_file(
        plugin_dir / "run", "#!/bin/sh\npwd; ps -o sid= -p $$; echo $$; exec cat /proc/self/status\n", 0o755
    )
    end = cages.run(runner_as, cages.request("./run", directory=str(plugin_dir)), bare=True)
    directory, session, pid, *status = end["output"].splitlines()
    assert directory == str(plugin_dir)
    assert int(session) == int(pid)
    (ignored,) = (int(line.split()[1], 16) for line in status if line.startswith("SigIgn"))
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


def test_no_core_dumps(runner_as: Caller) -> None:
    end = cages.run(runner_as, sh("ulimit -c; ulimit -H -c"), bare=True)
    assert end["output"] == "0\n0\n"


# --- the end -----------------------------------------------------------------------------------------------

DAEMONS = (
    "setsid sh -c 'setsid sleep 1000 & exec sleep 1000' & "
    "setsid sh -c '(trap \"\" TERM INT HUP QUIT; echo deaf; exec sleep 1000) & ' & "
)


def ended(given: dict[str, Any], how: str) -> list[Any]:
    """End it, by killing or by itself. Returns the processes that hold its stdout after wait()."""
    import os
    from contextlib import contextmanager

    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    with contextmanager(cage)(given) as cell:
        os.dup2(saved, 1)
        said = b""
        while b"ready" not in said or b"deaf" not in said:
            said += os.read(read, 100)
        if how == "killed":
            cell.kill()
        elif how == "asked":
            assert cell.signal_program(15)
        end = cell.wait()
        os.set_blocking(read, False)
        assert os.read(read, 100) == b""  # would block, if somebody could still write
        assert not cell.signal_program(15)
    try:
        os.waitpid(-1, os.WNOHANG)
        left = "a child"
    except ChildProcessError:
        left = "nothing"
    return [end.code, left]


@one_case(
    ("how", "last", "code"),
    [
        ("killed", "sleep 1000", 128 + 9),
        ("asked", "sleep 1000", 128 + 15),
        ("by itself", "sleep 0.1; exit 5", 5),
    ],
)
def test_the_whole_tree_is_ended(runner_as: Caller, how: str, last: str, code: int) -> None:
    given = cages.order(sh(DAEMONS + f"echo ready; {last}"), bare=True)
    assert elsewhere.run(runner_as, ended, given, how, using=(cage,)) == [code, "nothing"]


def test_a_tree_that_keeps_forking_is_ended(runner_as: Caller) -> None:
    # Each generation leaves the one before: what is killed has been replaced already, for a while.
    runaway = (
        "import os\n"
        "for _ in range(300):\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.setsid()\n"
        "os.execv('/bin/sleep', ['sleep', '1000'])\n"
    )
    end = cages.run(runner_as, cages.request("/usr/bin/python3", "-c", runaway), bare=True)
    assert end["code"] == 0


def started(given: dict[str, Any]) -> None:
    from contextlib import contextmanager

    with contextmanager(cage)(given) as cell:
        cell.wait()


def test_the_runners_death_ends_the_program(runner_as: Caller) -> None:
    given = cages.order(sh("echo ready; exec sleep 1000"), bare=True)
    with elsewhere.start(runner_as, started, given, using=(cage,)) as runner:
        assert elsewhere.line(runner) == b"ready\n"
        runner.kill()
        assert runner.communicate(timeout=60)[0] == b""


# --- limits -----------------------------------------------------------------------------------------------


def limited(given: dict[str, Any], how: str = "") -> dict[str, Any]:
    """Run it in its own cgroups and with its own stderr. Returns its exit, its output and the processes
    left."""
    import os
    from contextlib import contextmanager

    from sandbox.cell import unsandboxed
    from sandbox.cell.cell import Bounds
    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.limits.rlimits import rlimits
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    said, errors = os.memfd_create("said"), os.memfd_create("errors")
    saved = os.dup(1), os.dup(2)
    real = unsandboxed.start_unsandboxed
    with make_cgroup(survey(read_mounts()).sites, Limits(pids=20, memory=256 << 20, cpu=0.5)) as cgroup:
        handles = cgroup.open_handles

        @contextmanager
        def broken() -> Any:
            with handles() as opened:
                mode, path = os.O_RDONLY, f"{cgroup.groups[-1].path}/cgroup.procs"
                if how == "a file to nowhere":
                    mode, path = os.O_WRONLY, "/dev/null"
                os.dup2(os.open(path, mode), opened.files[-1])
                yield opened._replace(unified=-1)  # not born there: it has to go through the file

        if how.startswith("a file"):
            cgroup.open_handles = broken  # type: ignore[method-assign]
        bounds = Bounds(rlimits(Limits(open_files=64)), cgroup, None, (0, 1, errors))
        unsandboxed.start_unsandboxed = lambda plan: real(plan, bounds)  # type: ignore[assignment, misc]
        os.dup2(said, 1)
        try:
            with contextmanager(cage)(given) as cell:
                if how == "killed":
                    assert wait_for(lambda: os.lseek(said, 0, os.SEEK_END), step=0.001)
                    cell.kill()
                end = cell.wait()
                left = list(cgroup.left())
        finally:
            os.dup2(saved[0], 1)
        lines = list(cgroup.lines)
    for fd in (said, errors):
        os.lseek(fd, 0, os.SEEK_SET)
    return {
        "code": end.code,
        "reached_exec": end.reached_exec,
        "usage": end.usage._asdict(),
        "counted": end.counters.cpu_user is not None,
        "limited": sorted(cgroup.effective),
        "out": os.read(said, 65536).decode(),
        "err": os.read(errors, 65536).decode(),
        "left": left,
        "lines": lines,
    }


@pytest.fixture
def inside(runner_as: Caller) -> Iterator[OwnCgroups]:
    with make_own_cgroups(runner_as) as own:
        yield own
        assert own.groups() == []


def test_limits_need_no_cage(inside: OwnCgroups) -> None:
    script = "cat /proc/self/cgroup; ulimit -n; echo oh >&2; ls -l /proc/self/fd | wc -l; exit 3"
    told = elsewhere.run(inside.caller, limited, cages.order(sh(script), bare=True), using=(cage,))
    *lines, files, descriptors = told["out"].splitlines()
    assert told["lines"] and set(told["lines"]) <= set(lines)
    assert (told["code"], files, told["err"], told["left"]) == (3, "64", "oh\n", [])
    assert int(descriptors) == 5  # 0 to 2, ls looking, and a line above them
    usage = told["usage"]
    assert (usage["memory_peak"] is not None) is ("memory" in told["limited"])
    assert told["counted"] and usage["cpu_user"] + usage["cpu_system"] > 0


@pytest.mark.parametrize(("how", "code"), [("killed", 128 + 9), ("", 0)])
def test_processes_it_leaves_are_found_in_its_groups(inside: OwnCgroups, how: str, code: int) -> None:
    """Also a process that has left its session and its parents."""
    script = DAEMONS.replace("echo deaf", ":") + f"echo ready; {'sleep 1000' if how else 'exit 0'}"
    told = elsewhere.run(inside.caller, limited, cages.order(sh(script), bare=True), how, using=(cage,))
    assert (told["code"], told["left"]) == (code, [])


def test_a_process_that_cannot_join_its_groups_does_not_start(inside: OwnCgroups, plugin_dir: Path) -> None:
    plugin_dir.chmod(0o777)
    given = cages.order(sh(f"touch {plugin_dir}/ran"), bare=True)
    told = elsewhere.run(inside.caller, limited, given, "a file that is shut", using=(cage,))
    assert (told["code"], told["reached_exec"]) == (None, False)
    assert not (plugin_dir / "ran").exists()
    assert elsewhere.run(inside.caller, limited, given, using=(cage,))["code"] == 0  # the control
    assert (plugin_dir / "ran").exists()


def test_a_process_outside_its_groups_does_not_start(inside: OwnCgroups, plugin_dir: Path) -> None:
    plugin_dir.chmod(0o777)
    given = cages.order(sh(f"touch {plugin_dir}/ran"), bare=True)
    told = elsewhere.run(inside.caller, limited, given, "a file to nowhere", using=(cage,))
    assert not (plugin_dir / "ran").exists() and told["code"] is None
