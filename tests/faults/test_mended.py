"""What failing calls found, each at its own place: the smallest case that was wrong."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.install import store
from runner.launch.failures import failure_of
from runner.outcome import EXIT
from sandbox.identity import state
from sandbox.identity.leases import lock_byte
from sandbox.identity.state import StateRefused, lock_exclusively, lock_record, open_record
from sandbox.limits import cgroup, disk_usage
from sandbox.limits.shares import last_number
from sandbox.paths.executable import ProgramFault, read_loader
from tests.faults.scenes import Scene
from tests.faults.test_launch import call  # noqa: F401 -- a fixture

NO_DESCRIPTORS = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def behind(error: Exception, cause: Exception) -> Exception:
    """An error that was raised while another was handled."""
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "ran", "code", "hint"),
    [
        (NO_DESCRIPTORS, False, "launch_failed", "ulimit -n"),
        (NO_DESCRIPTORS, True, "internal", "ulimit -n"),
        (MemoryError(), False, "launch_failed", "memory"),
        (behind(StateRefused("x", "remove it"), NO_DESCRIPTORS), False, "launch_failed", "ulimit -n"),
        (behind(StateRefused("x", "remove it"), OSError(errno.EIO, "")), False, "policy_denied", "remove it"),
        (
            behind(StateRefused("x", "try again"), BlockingIOError(errno.EAGAIN, "")),
            False,
            "policy_denied",
            "try",
        ),
        (ValueError("x"), True, "internal", "bug"),
    ],
)
def test_a_lack_of_something_is_of_its_own_class(error: Exception, ran: bool, code: str, hint: str) -> None:
    outcome = failure_of(error, None, ran=ran).outcome
    assert (outcome.code, outcome.phase) == (code, "run" if ran else outcome.phase)
    assert hint in outcome.hint


def failing(error: OSError = NO_DESCRIPTORS) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_a_program_that_cannot_be_opened_is_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Path("/bin/cat").read_bytes()[:4096]
    assert read_loader("/bin/cat", "/bin/cat", head)
    monkeypatch.setattr("os.open", failing())
    with pytest.raises(ProgramFault, match="cannot be read: Too many open files"):
        read_loader("/bin/cat", "/bin/cat", head)


def test_a_share_that_cannot_be_read_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_number("/proc/sys/fs/file-max")
    assert last_number("/proc/sys/fs/no-such-number") is None
    monkeypatch.setattr("sandbox.limits.shares.kernel_text", failing())
    with pytest.raises(OSError, match="Too many open files"):
        last_number("/proc/sys/fs/file-max")


def test_a_list_of_files_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "index.js").write_text("x")
    assert [name for name, _ in store._listing(str(tmp_path))] == ["index.js"]
    monkeypatch.setattr("os.scandir", failing())
    with pytest.raises(OSError, match="Too many open files"):
        list(store._listing(str(tmp_path)))


def test_a_folder_that_cannot_be_opened_is_not_too_large(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "below").mkdir()

    def measure() -> str:
        fd = os.open(tmp_path, os.O_PATH)
        steps: Iterator[None] = disk_usage.size(fd, 1 << 20)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            return str(end.value.fault)
        finally:
            os.close(fd)

    assert measure() == ""
    real = os.open
    monkeypatch.setattr("os.open", lambda path, *more, **named: (failing() if named else real)(path, *more))
    with pytest.raises(OSError, match="Too many open files"):
        measure()


@pytest.mark.parametrize("name", ["os.open", "fcntl.flock"])
def test_a_group_that_cannot_be_locked_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(name, failing())
    with pytest.raises(OSError, match="Too many open files"):
        cgroup._make_and_lock(str(tmp_path / "group"))
    assert os.listdir(tmp_path) == []


def test_a_launch_waits_for_a_lock_of_a_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, held = os.open(tmp_path, os.O_RDONLY), 0
    try:
        held = open_record(folder, "demo", make=True)
        assert lock_exclusively(held)
        monkeypatch.setattr("time.sleep", lambda _: lock_byte(held, 0, fcntl.F_UNLCK))
        os.close(lock_record(folder, str(tmp_path / "demo"), "manifest"))
        assert lock_exclusively(held)
        monkeypatch.setattr("time.sleep", lambda _: None)
        monkeypatch.setattr(state, "_REMOVAL_SECONDS", 0.0)
        with pytest.raises(StateRefused, match="is being removed"):
            lock_record(folder, str(tmp_path / "demo"), "manifest")
    finally:
        os.close(folder)
        os.close(held)


@pytest.mark.launches
def test_a_call_that_cannot_go_on_has_launched_its_plugin(call: Scene) -> None:  # noqa: F811
    """As when the kernel has no memory for what trio waits for, or for a byte in trio's own socket."""
    lacks = """\
import runner.cli.live.call_once as here
async def fail(*_): raise OSError(24, os.strerror(24))
here.write_in_thread = fail
"""
    breaks = """\
import trio, runner.cli.live.session as here
def fail(*_): raise trio.TrioInternalError
here.run_on_trio = fail
"""
    for each in (lacks, breaks):
        ran, wrong = call.run(None, each)
        assert (ran.code, ran.status, wrong) == ("internal", EXIT["internal"], []), ran
