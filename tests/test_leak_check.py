"""The leak checks can fail: these tests leave something for them to find."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import TEMP_PREFIX, Caller, descendants, traces, vanished

pytestmark = pytest.mark.both_callers


def test_an_orphan_is_found() -> None:
    # The shell prints the pid of its child and exits. The child's parent is then this process, not pid 1.
    out = subprocess.run(
        ["/bin/sh", "-c", "sleep 60 >/dev/null & echo $!"], stdout=subprocess.PIPE, check=True
    ).stdout
    orphan = int(out)
    try:
        assert orphan in descendants()
        assert not vanished({orphan}, seconds=0)
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert vanished({orphan})
    os.waitpid(orphan, 0)
    assert orphan not in descendants()


def test_a_process_with_an_odd_name_is_found_too() -> None:
    """Anybody's process may have one, as half of a letter."""
    script = r"printf '\303' >/proc/$$/comm; echo named; read word"
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as odd:
        try:
            assert odd.stdout is not None and odd.stdout.readline() == b"named\n"
            assert odd.pid in descendants()
        finally:
            odd.kill()


@pytest.mark.machine
def test_a_file_is_found() -> None:
    path = Path(f"/tmp/runner-left-behind-{os.getpid()}")
    before = traces()
    path.touch()
    try:
        assert traces().since(before) == [str(path)]
    finally:
        path.unlink()


def test_the_tests_own_directories_are_not_leaks(plugin_dir: Path) -> None:
    assert plugin_dir.name.startswith(TEMP_PREFIX)
    assert not any(str(plugin_dir) in file for file in traces().files)


def test_a_caller_has_its_uid_and_home(runner_as: Caller) -> None:
    who = [
        *runner_as.prefix,
        "/bin/sh",
        "-c",
        'id -u; echo "$HOME"; touch "$TMPDIR/x" && rm "$TMPDIR/x"; cat /etc/shadow',
    ]
    done = subprocess.run(who, env=dict(runner_as.environ), capture_output=True, text=True)
    assert done.stdout.splitlines()[:2] == [str(runner_as.uid), str(runner_as.home)]
    assert (done.returncode == 0) == (runner_as.uid == 0)  # only root reads /etc/shadow
