"""A live cage: how it ends by itself, how it is killed, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.cell import cell
from sandbox.cell.cell import exit_code
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox import cages
from tests.tables import one_case

Write = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("nothing_left")


def sh(script: str) -> Any:
    return cages.request("/bin/sh", "-c", script)


# --- how it ends -------------------------------------------------------------------------------------------


@one_case(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 137", 137),
        ("exit 255", 255),
        ("kill -TERM $$", 128 + signal.SIGTERM),
        ("kill -KILL $$", 128 + signal.SIGKILL),
        ("kill -SEGV $$", 128 + signal.SIGSEGV),
        ("kill -PIPE $$", 128 + signal.SIGPIPE),
    ],
)
def test_exit_codes(runner_as: Caller, script: str, code: int) -> None:
    end = cages.run(runner_as, sh(script))
    assert (end["code"], end["reached_exec"], end["signal"]) == (code, True, None)


def vanishing(given: dict[str, Any], path: str) -> list[Any]:
    """The program disappears between the plan and the launch."""
    import os
    from contextlib import contextmanager

    from sandbox.spawn import spawner

    spawn = spawner.spawn

    def start_without(*words: Any) -> Any:
        os.unlink(path)
        return spawn(*words)

    spawner.spawn = start_without  # type: ignore[assignment]
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    with contextmanager(cage)(given) as cell:
        end = cell.wait()
    return [end.code, end.reached_exec, end.signal]


cage = cages.cage


def test_a_program_that_could_not_be_executed(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    write_file(plugin_dir / "run", "#!/bin/sh\n", 0o755)
    runner_as.give(plugin_dir)
    given = cages.order(cages.request("./run", directory=str(plugin_dir)))
    assert elsewhere.run(runner_as, vanishing, given, f"{plugin_dir}/run", using=(cage,)) == [
        None,
        False,
        None,
    ]


def overlaid(given: dict[str, Any], folder: str, works: bool) -> list[Any]:
    """A launch whose folder has an overlay; unless it `works`, the kernel refuses that."""
    import os
    from contextlib import contextmanager

    from sandbox.cell import launch as launching
    from sandbox.identity.overlay import open_overlay
    from sandbox.plan.plan import Overlay

    # The uid is another one at each launch, and changes belong to one.
    launch, name = launching.launch, "a" if works else "b"

    @contextmanager
    def launch_overlaid(opened: Any, owner: Any, *words: Any) -> Any:
        plan = opened.plan._replace(
            overlays=(Overlay(folder, f"{folder}.state/.storage/demo/overlays/{name}"),)
        )
        with open_overlay(f"{folder}.state/demo", name, owner.uid, owner.gid) as held:
            held = held if works else held._replace(work="none")
            opened = opened._replace(plan=plan, overlays={folder: held})
            with launch(opened, owner, *words) as cell:
                yield cell

    launching.launch = launch_overlaid  # type: ignore[assignment]
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    with contextmanager(cage)(given) as cell:
        end = cell.wait()
    return [end.code, cell.overlay_fault]


@pytest.mark.both_callers
def test_without_its_overlay_it_starts_and_says_why(runner_as: Caller, plugin_dir: Path) -> None:
    folder = plugin_dir / "package"
    (plugin_dir / "package.state/demo").mkdir(parents=True)
    folder.mkdir()
    (folder / "file").touch()
    runner_as.give(plugin_dir)
    script = f"test -e {folder}/file && echo > {folder}/file && rm {folder}/file && exit 7; exit 8"
    given = cages.order(sh(script), paths=[(str(folder), "read")])
    assert elsewhere.run(runner_as, overlaid, given, str(folder), True, using=(cage,)) == [7, ""]
    [code, fault] = elsewhere.run(runner_as, overlaid, given, str(folder), False, using=(cage,))
    assert code == 8 and fault.startswith("this machine mounts no overlay there: ")
    assert (folder / "file").exists()


def swapped(given: dict[str, Any], source: str, other: str) -> list[Any]:
    """A source is replaced between the plan and the launch."""
    import os
    from contextlib import contextmanager

    from sandbox.spawn import spawner

    spawn = spawner.spawn

    def start_swapped(*words: Any) -> Any:
        os.rename(source, source + ".away")
        os.symlink(other, source)
        return spawn(*words)

    spawner.spawn = start_swapped  # type: ignore[assignment]
    said = os.memfd_create("said")
    saved = os.dup(1)
    os.dup2(said, 1)
    os.dup2(said, 2)
    with contextmanager(cage)(given) as cell:
        end = cell.wait()
    os.dup2(saved, 1)
    os.lseek(said, 0, os.SEEK_SET)
    return [end.code, os.read(said, 4096).decode()]


def test_a_replaced_source_is_not_shown(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    write_file(plugin_dir / "asked/word", "public")
    write_file(plugin_dir / "other/word", "SECRET")
    runner_as.give(plugin_dir)
    asked = str(plugin_dir / "asked")
    given = cages.order(sh(f"cat {asked}/word"), paths=[(asked, "read")])
    code, said = elsewhere.run(runner_as, swapped, given, asked, str(plugin_dir / "other"), using=(cage,))
    assert "SECRET" not in said
    assert (code, said) == (0, "public") or code is None
    # The control: without the exchange it is shown.
    os.unlink(asked)
    os.rename(asked + ".away", asked)
    assert cages.run(runner_as, sh(f"cat {asked}/word"), paths=[(asked, "read")])["output"] == "public"


# --- how it is ended ---------------------------------------------------------------------------------------

# Two daemons with sessions of their own, each forked twice, one deaf to everything it may be deaf to.
DAEMONS = (
    "setsid sh -c 'setsid sleep 1000 & exec sleep 1000' & "
    "setsid sh -c '(trap \"\" TERM INT HUP QUIT; echo deaf; exec sleep 1000) & ' & "
)


def killed(given: dict[str, Any]) -> list[Any]:
    """Kill a cage after it has printed that it is ready. Returns the result of wait(), and the processes
    that hold its stdout."""
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
        cell.kill()
        end = cell.wait()
        os.set_blocking(read, False)
        left = (
            "nobody" if os.read(read, 100) == b"" else "somebody"
        )  # would block: somebody could still write
        cell.kill()  # once more does no harm
        assert cell.wait() is end
        assert not cell.signal_program(15)
    return [end.code, end.reached_exec, end.signal, left]


def test_killing_ends_daemons_too(runner_as: Caller) -> None:
    given = cages.order(sh(DAEMONS + "echo ready; sleep 1000"))
    assert elsewhere.run(runner_as, killed, given, using=(cage,)) == [None, True, signal.SIGKILL, "nobody"]


def waited(given: dict[str, Any]) -> list[Any]:
    """Wait for a cage whose program ends by itself. Returns the processes that hold its stdout after
    wait()."""
    import os
    from contextlib import contextmanager

    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    with contextmanager(cage)(given) as cell:
        os.dup2(saved, 1)
        end = cell.wait()
        os.set_blocking(read, False)
        while said := os.read(read, 100):
            assert b"deaf" in said or b"ready" in said
    return [end.code, "nobody"]


def test_wait_returns_after_the_last_process(runner_as: Caller) -> None:
    given = cages.order(sh(DAEMONS + "echo ready; exit 5"))
    assert elsewhere.run(runner_as, waited, given, using=(cage,)) == [5, "nobody"]


def abandoned(given: dict[str, Any]) -> str:
    """Leave the context by an exception while the plugin runs."""
    from contextlib import contextmanager

    try:
        with contextmanager(cage)(given):
            raise KeyError("ours")
    except KeyError as error:
        return str(error)


def test_an_exception_of_the_runner_leaves_nothing(runner_as: Caller) -> None:
    # elsewhere.run reads stdout to its end, which the plugin holds open while it lives.
    assert (
        elsewhere.run(runner_as, abandoned, cages.order(sh(DAEMONS + "sleep 1000")), using=(cage,))
        == "'ours'"
    )


def signalled(given: dict[str, Any], number: int) -> list[Any]:
    import os
    from contextlib import contextmanager

    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    with contextmanager(cage)(given) as cell:
        os.dup2(saved, 1)
        assert os.read(read, 100) == b"ready\n"
        reached = cell.signal_program(number)
        end = cell.wait()
        return [reached, end.code, os.read(read, 100).decode()]


@one_case("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_the_program(runner_as: Caller, number: int) -> None:
    given = cages.order(sh(f"trap 'echo heard; exit 3' {number}; echo ready; sleep 1000 & wait"))
    assert elsewhere.run(runner_as, signalled, given, number, using=(cage,)) == [True, 3, "heard\n"]


def test_an_unhandled_signal_ends_the_program(runner_as: Caller) -> None:
    given = cages.order(sh("echo ready; sleep 1000"))
    assert elsewhere.run(runner_as, signalled, given, 15, using=(cage,)) == [True, 128 + 15, ""]


# --- what it leaves and what it held -----------------------------------------------------------------------


def repeated(given: dict[str, Any]) -> list[int]:
    import os
    from contextlib import contextmanager

    counts = []
    for _ in range(20):
        with contextmanager(cage)(given) as cell:
            cell.wait()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_launches_leak_no_descriptor(runner_as: Caller) -> None:
    counts = elsewhere.run(runner_as, repeated, cages.order(sh("exit 0")), using=(cage,))
    assert len(set(counts)) == 1


def holding_a_lease(given: dict[str, Any], folder: str) -> list[str]:
    """Close our own copy of the lease while the plugin runs: the cage itself holds it."""
    import os
    from contextlib import contextmanager

    from sandbox.identity.leases import UidsUnavailable, lease_any

    def free() -> str:
        try:
            lease_any(500, 500, leases=f"{folder}/leases", reservations=f"{folder}/reservations").close()
        except UidsUnavailable:
            return "taken"
        return "free"

    lease = lease_any(500, 500, leases=f"{folder}/leases", reservations=f"{folder}/reservations")
    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    with contextmanager(cage)({**given, "lease": lease.fd}) as cell:
        os.dup2(saved, 1)
        assert os.read(read, 100) == b"ready\n"
        lease.close()
        during = free()
        cell.kill()
        cell.wait()
        return [during, free()]


def test_the_uid_is_held_by_the_cage_and_not_by_the_runner(runner_as: Caller) -> None:
    given = cages.order(sh("echo ready; sleep 1000"))
    folder = str(runner_as.home)
    assert elsewhere.run(runner_as, holding_a_lease, given, folder, using=(cage,)) == ["taken", "free"]


def test_the_wall_clock_is_plausible(runner_as: Caller) -> None:
    assert 0.4 <= cages.run(runner_as, sh("sleep 0.4"))["usage"]["wall"] < 60
    usage = cages.run(runner_as, sh("exit 0"))["usage"]
    assert 0 < usage["wall"] < 60
    assert usage["cpu_user"] >= 0 and usage["cpu_system"] >= 0 and usage["max_rss"] > 0


def test_the_plugin_sees_three_descriptors_and_no_bwrap_arguments(runner_as: Caller) -> None:
    look = (
        "import os\n"
        "fds = sorted(int(n) for n in os.listdir('/proc/self/fd'))\n"
        "print(fds[:-1], open('/proc/1/environ').read() == '')\n"
        "print(open('/proc/1/cmdline').read().split(chr(0))[0:2], os.getpid() < 5)\n"
    )
    end = cages.run(runner_as, cages.request("/usr/bin/python3", "-c", look))
    assert end["output"] == "[0, 1, 2] True\n['bwrap', '--args'] True\n"


def test_usage_is_the_plugins_and_not_bubblewraps(runner_as: Caller) -> None:
    busy = "import time\nheld = b'x' * (64 << 20)\nwhile time.process_time() < 0.4: pass\n"
    usage = cages.run(runner_as, cages.request("/usr/bin/python3", "-c", busy))["usage"]
    assert 0.4 <= usage["cpu_user"] + usage["cpu_system"] < 10
    assert 64 << 20 <= usage["max_rss"] < 512 << 20


def test_usage_counts_children_the_plugin_waited_for(runner_as: Caller) -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\n"
    usage = cages.run(runner_as, sh(f"/usr/bin/python3 -c '{busy}'; exit 0"))["usage"]
    assert 0.3 <= usage["cpu_user"] + usage["cpu_system"] < 10


def ended(given: dict[str, Any]) -> list[Any]:
    """End a busy plugin from within: the cell's init lives to report what was used."""
    import os
    from contextlib import contextmanager

    said_r, said_w = os.pipe()
    saved = os.dup(1)
    os.dup2(said_w, 1)
    with contextmanager(cage)(given) as cell:
        os.read(said_r, 1)
        cell.end()
        end = cell.wait()
    os.dup2(saved, 1)
    return [end.code, end.signal, end.usage.cpu_user + end.usage.cpu_system]


def test_ending_from_within_reports_usage(runner_as: Caller) -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint('x', flush=True)\ntime.sleep(1000)\n"
    given = cages.order(cages.request("/usr/bin/python3", "-c", busy))
    code, signal, used = elsewhere.run(runner_as, ended, given, using=(cage,))
    assert (code, signal) == (137, None)
    assert 0.3 <= used < 10


def ended_after_the_program(given: dict[str, Any]) -> list[Any]:
    """End a cage whose program has ended and whose bwrap has not reported that yet: it is stopped."""
    import os
    import signal
    import time
    from contextlib import contextmanager

    from sandbox.cell.cell import children

    said_r, said_w = os.pipe()
    saved = os.dup(1)
    os.dup2(said_w, 1)
    with contextmanager(cage)(given) as cell:
        os.read(said_r, 1)
        outer = children(cell.pid)[0]
        inner = children(outer)[0]
        os.kill(outer, signal.SIGSTOP)
        cell.signal_program(signal.SIGTERM)
        while children(inner):
            time.sleep(0.002)
        cell.end()
        os.kill(outer, signal.SIGCONT)
        end = cell.wait()
    os.dup2(saved, 1)
    return [end.code, end.signal]


def test_the_exit_code_of_a_program_that_has_just_ended_is_not_lost(runner_as: Caller) -> None:
    given = cages.order(sh("echo ready; exec sleep 1000"))
    assert elsewhere.run(runner_as, ended_after_the_program, given, using=(cage,)) == [
        128 + signal.SIGTERM,
        None,
    ]


def test_a_process_that_vanishes_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def children(pid: int) -> list[int]:
        if pid == 3:
            raise FileNotFoundError(pid)
        return {1: [2, 3, 4], 2: [5]}.get(pid, [])

    monkeypatch.setattr(cell, "children", children)
    assert sorted(cell.descendants(1)) == [2, 3, 4, 5]


def test_processes_nested_deeper_than_pythons_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell, "children", lambda pid: [pid + 1] if pid < 5000 else [])
    assert len(cell.descendants(0)) == 5000


def test_children_of_any_thread_are_found() -> None:
    """The kernel lists the children of each thread separately."""
    fork = (
        "import os, threading, time\n"
        "def fork():\n"
        "    child = os.fork()\n"
        "    if child: print(child, flush=True)\n"
        "    time.sleep(1000)\n"
        "threading.Thread(target=fork).start()"
    )
    with subprocess.Popen(["/usr/bin/python3", "-c", fork], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert cell.children(process.pid) == cell.descendants(process.pid) == [child]
        finally:
            os.kill(child, 9)
            process.kill()


@one_case(
    ("line", "code"),
    [
        (b'{ "exit-code": 0 }', 0),
        (b'{ "exit-code": 137 }', 137),
        (b'{"exit-code":3}', 3),
        (b'{"other": [1], "exit-code" : 4}', 4),
        (b'{ "child-pid": 17, "net-namespace": 4026531840 }', None),
        (b'{ "exit-code": 1', None),
        (b'{ "exit-code": -1 }', -1),
        (b'{ "exit-code": "1" }', None),
        (b'["exit-code"]', None),
        (b"", None),
        (b"\xff", None),
    ],
)
def test_lines_of_bwraps_status(line: bytes, code: int | None) -> None:
    assert exit_code(line) == code
