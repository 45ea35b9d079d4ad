"""Other processes: seeing them, signalling them, outliving the runner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import descendants, vanished
from tests.escape.cage import ProbeCage


def test_the_plugin_sees_only_its_own_processes(cage: ProbeCage) -> None:
    inside = cage.attack("pids").done
    assert len(inside) == 2  # bubblewrap's init and the probe
    assert max(inside) < 10
    assert os.getpid() in cage.outside("pids").done


def test_a_process_of_the_same_user_cannot_be_signalled(cage: ProbeCage) -> None:
    with subprocess.Popen([*cage.caller.prefix, "sleep", "1000"]) as sentinel:
        try:
            answer = cage.attack("kill", str(sentinel.pid), "9")
            assert answer.refused == "ESRCH"
            assert sentinel.poll() is None
            assert cage.outside("kill", str(sentinel.pid), "9").done is True
            assert sentinel.wait(timeout=20) == -signal.SIGKILL
        finally:
            sentinel.kill()


def test_kill_minus_one_reaches_no_process_of_the_host(cage: ProbeCage) -> None:
    """kill(-1) spares its sender and the namespace's init."""
    with subprocess.Popen([*cage.caller.prefix, "sleep", "1000"]) as sentinel:
        try:
            assert cage.attack("kill", "-1", "9").answer in ({"done": True}, {"refused": "ESRCH"})
            assert sentinel.poll() is None
        finally:
            sentinel.kill()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM])
def test_the_cages_init_ignores_signals_of_the_plugin(cage: ProbeCage, number: int) -> None:
    answer = cage.attack("kill", "1", str(int(number)))
    assert (answer.code, answer.answer) == (0, {"done": True})


def test_the_exit_status_cannot_be_forged(cage: ProbeCage) -> None:
    """bubblewrap's init passes the status through an eventfd. The plugin must not be able to open it."""
    assert cage.attack("reopened", "1").done == []
    cage.manifest(command="/bin/sh", args=["-c", "exit 7"])
    assert cage.caller("exec", cage.folder).returncode == 7


def test_the_memory_and_root_of_pid_1_are_closed(cage: ProbeCage) -> None:
    """Pid 1 has the same uid as the plugin."""
    assert cage.attack("memory_of", "1").answer.get("done", 0) == 0
    inside, root = cage.attacks(("listing", "/proc/1/root/"), ("listing", "/"))
    assert inside.answer.get("done", root.done) == root.done


def test_a_daemon_ends_with_its_plugin(cage: ProbeCage) -> None:
    """The daemon double-forks, has its own session, ignores SIGTERM and keeps stdout open."""
    began = time.monotonic()
    answer = cage.attack("daemon", "/tmp/held")
    assert answer.done > 0
    assert time.monotonic() - began < 10  # stdout reached its end although the daemon had it open

    before = descendants()
    words = [*cage.caller.prefix, str(cage.folder / "probe.py"), "daemon", str(cage.folder / "open/held")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as control:
        assert control.stdout is not None
        daemon = json.loads(control.stdout.readline())["done"]
        control.wait(timeout=20)
        assert daemon in descendants() - before
        os.kill(daemon, signal.SIGKILL)
        assert vanished({daemon})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_runner_ends_every_process(cage: ProbeCage, number: signal.Signals) -> None:
    before = descendants()
    with cage.running("daemon_and_wait", "/tmp/held") as running:
        inside = descendants() - before
        assert len(inside) >= 5  # the runner, two of bubblewrap, the plugin and its daemon
        running.process.send_signal(number)
        assert running.process.wait(timeout=20) == 128 + number
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
        caller.wait(timeout=20)
        assert vanished(tree)


def test_a_deadline_ends_every_process(cage: ProbeCage, tmp_path: Path) -> None:
    before = descendants()
    answer = cage.attack("daemon_and_wait", "/tmp/held", options=["--deadline", "1"])
    assert answer.code == 124
    assert descendants() <= before
