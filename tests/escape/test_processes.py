"""Other processes: seeing them, signalling them, outliving the runner."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.spawn.priority import SYSCALLS
from tests.conftest import descendants, vanished
from tests.escape.cage import ProbeCage, parse_result
from tests.tables import one_case


@pytest.mark.needs("root")
def test_no_plugin_inherits_a_priority_above_the_ordinary(cage: ProbeCage) -> None:
    """The caller has real-time scheduling, real-time I/O and a negative nice value. The control is the same
    program as the caller's own. A lower priority is inherited."""
    numbers = SYSCALLS[os.uname().machine]
    libc = ctypes.CDLL(None)

    def raise_all() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, -5)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(3))
        assert libc.syscall(numbers.ioprio_set, 1, 0, 1 << 13 | 4) == 0

    try:
        subprocess.run(["true"], preexec_fn=raise_all, check=True)
    except subprocess.SubprocessError:
        pytest.skip("this machine gives root no real-time priority")
    asked = "priority", str(numbers.ioprio_get)
    control = cage.outside(*asked, preexec_fn=raise_all).done
    assert control[2] == 1 and control[0] != os.SCHED_OTHER and control[1] < 0
    cage.manifest()
    command = cage.caller.command("exec", cage.folder, "--", *asked)

    def caged(before: Callable[[], object]) -> list[object]:
        environ = dict(cage.caller.environ)
        done = subprocess.run(
            command, preexec_fn=before, env=environ, capture_output=True, text=True, cwd="/"
        )
        found: list[object] = parse_result(done).done
        return found

    assert caged(raise_all) == [os.SCHED_OTHER, 0, 0, False, False]
    assert caged(lambda: os.setpriority(os.PRIO_PROCESS, 0, 7))[:2] == [os.SCHED_OTHER, 7]


def test_other_processes_are_neither_seen_nor_signalled(cage: ProbeCage) -> None:
    """Of the same user. kill(-1) spares its sender and the namespace's init, which ignores the plugin's."""
    signals = (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM)
    with subprocess.Popen([*cage.caller.prefix, "sleep", "1000"]) as sentinel:
        try:
            inside, one, *first, everybody, memory, root, reopened = cage.attacks(
                ("pids",),
                ("kill", str(sentinel.pid), "9"),
                *(("kill", "1", str(int(number))) for number in signals),
                ("kill", "-1", "9"),
                ("memory_of", "1"),
                ("listing", "/proc/1/root/"),
                ("reopened", "1"),
            )
            assert len(inside.done) == 2  # bubblewrap's init and the probe
            assert max(inside.done) < 10
            assert os.getpid() in cage.outside("pids").done
            assert one.refused == "ESRCH"
            assert [(answer.code, answer.answer) for answer in first] == [(0, {"done": True})] * 3
            assert everybody.answer in ({"done": True}, {"refused": "ESRCH"})
            assert sentinel.poll() is None
            assert cage.outside("kill", str(sentinel.pid), "9").done is True
            assert sentinel.wait(timeout=60) == -signal.SIGKILL
        finally:
            sentinel.kill()
    # Pid 1 has the same uid as the plugin: its memory and its root are closed.
    assert memory.answer.get("done", 0) == 0
    shown = cage.attack("listing", "/").done
    assert root.answer.get("done", shown) == shown
    # bubblewrap's init passes the exit status through an eventfd. The plugin must not be able to open it.
    assert reopened.done == []
    cage.manifest(command="/bin/sh", args=["-c", "exit 7"])
    assert cage.caller("exec", cage.folder).returncode == 7


def test_a_daemon_ends_with_its_plugin(cage: ProbeCage) -> None:
    """The daemon double-forks, has its own session, ignores SIGTERM and keeps stdout open."""
    answer = cage.attack("daemon", "/tmp/held")  # returns: stdout reached its end, though the daemon had it
    assert answer.done > 0

    before = descendants()
    words = [*cage.caller.prefix, str(cage.folder / "probe.py"), "daemon", str(cage.folder / "open/held")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as control:
        assert control.stdout is not None
        daemon = json.loads(control.stdout.readline())["done"]
        control.wait(timeout=60)
        assert daemon in descendants() - before
        os.kill(daemon, signal.SIGKILL)
        assert vanished({daemon})


@one_case("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_runner_ends_every_process(cage: ProbeCage, number: signal.Signals) -> None:
    before = descendants()
    with cage.running("daemon_and_wait", "/tmp/held") as running:
        inside = descendants() - before
        assert len(inside) >= 5  # the runner, two of bubblewrap, the plugin and its daemon
        running.process.send_signal(number)
        assert running.process.wait(timeout=60) == 128 + number
        assert vanished(inside)


def test_the_death_of_the_caller_ends_every_process(cage: ProbeCage) -> None:
    """The caller is a process between the test and the runner. Only the caller is killed."""
    cage.manifest()
    command = cage.caller.command("exec", cage.folder, "--", "daemon_and_wait", "/tmp/held")
    script = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    before = descendants()
    with subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", script, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(cage.caller.environ),
    ) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"ready\n"
        tree = descendants() - before
        assert len(tree) >= 5  # the caller, the runner, two of bubblewrap, the plugin and its daemon
        caller.kill()
        caller.wait(timeout=60)
        assert vanished(tree)


def test_a_deadline_ends_every_process(cage: ProbeCage, tmp_path: Path) -> None:
    before = descendants()
    answer = cage.attack("daemon_and_wait", "/tmp/held", options=["--deadline", "1"])
    assert answer.code == 124
    assert descendants() <= before
