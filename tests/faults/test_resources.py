"""Resources that are really used up while a plugin is launched: descriptors, processes, memory, disks.

Each is given in small steps, from nothing to enough. The first step fails and the last one succeeds, so that
every launch between them meets the end of it somewhere else.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.faults.scenes import Scene
from tests.faults.test_launch import launch, plain  # noqa: F401 -- a fixture

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

_LIMITED = """
import os, resource
def limit(kind, size):
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (size, hard))
"""
# Address space beyond what the process has already, in MiB.
_ADDRESSES = """
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
limit(resource.RLIMIT_AS, used + ({} << 20))
"""
# What the plugin's own processes need does not count here: its limits are others.
STEPS: dict[str, tuple[str, Sequence[int]]] = {
    "descriptors": ("limit(resource.RLIMIT_NOFILE, {})", (4, 6, 9, 13, 18, 24, 31, 39, 48, 128)),
    "size of files": ("limit(resource.RLIMIT_FSIZE, {})", (0, 1, 100, 5000, 1 << 20)),
    "memory": (_ADDRESSES, (0, 1, 2, 3, 256)),
}


def check_steps(scene: Scene, code: str, steps: Sequence[int], first: str = _LIMITED) -> None:
    codes = []
    for step in steps:
        ran, wrong = scene.run(None, first + code.format(step))
        assert not wrong, f"{step}: {wrong}: {ran}"
        codes.append(ran.code or ran.status)
    assert codes[0] != "ok" and codes[-1] == "ok", codes


@pytest.mark.parametrize("launch", [plain], indirect=True)
@pytest.mark.parametrize("what", STEPS)
def test_a_launch_with_less_and_less(launch: Scene, what: str) -> None:  # noqa: F811
    check_steps(launch, *STEPS[what])


@pytest.mark.needs("user")
def test_processes_of_the_user(
    runner_as_user: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    scene = Scene(runner_as_user, plain(runner_as_user, plugin_dir, write_file), reports=True)
    beside = sum(uid == runner_as_user.uid for uid in _owners())
    code = f"limit(resource.RLIMIT_NPROC, {beside} + {{}})"
    check_steps(scene, code, (0, 1, 2, 3, 4, 5, 300))


def _owners() -> Iterator[int]:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError):  # it ended after the listing
            yield os.stat(f"/proc/{name}").st_uid


@pytest.mark.needs("root")
@pytest.mark.parametrize(("controller", "name"), [("pids", "pids.max"), ("memory", "memory.limit_in_bytes")])
def test_a_group_around_the_runner(
    runner_as_root: Caller, plugin_dir: Path, write_file: Callable[..., Path], controller: str, name: str
) -> None:
    """The process table is full, or the kernel kills for memory: the runner itself may be what it kills."""
    place = Path("/sys/fs/cgroup", controller)
    if not place.is_dir():
        pytest.skip(f"needs the {controller} controller of cgroup v1")
    group = place / f"faults-{os.getpid()}"
    group.mkdir()
    try:
        scene = Scene(runner_as_root, plain(runner_as_root, plugin_dir, write_file), reports=True)
        join = f"\nwith open('{group}/cgroup.procs', 'w') as file: file.write(str(os.getpid()))\n"
        if controller == "pids":
            steps: Sequence[int] = (1, 2, 3, 4, 5, 6, 100)
            code = f"with open('{group}/{name}', 'w') as file: file.write('{{}}')"
            check_steps(scene, join + code, steps)
        else:
            (group / name).write_text(str(6 << 20))
            ran, wrong = scene.run(None, _LIMITED + join)
            assert (ran.status == -9 and not ran.out) or ran.code != "ok", ran
            assert not [each for each in wrong if "left" in each], wrong
    finally:
        # What the kernel killed may still be on its way out: rmdir says EBUSY until it is gone.
        end = time.monotonic() + 60
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)


@contextlib.contextmanager
def full_disk(place: Path) -> Iterator[Path]:
    """A file system without any room."""
    place.mkdir()
    options = "size=64k,nr_inodes=2,mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)
    try:
        with open(place / "all", "wb") as file, contextlib.suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(4096))
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.needs("root")
def test_a_disk_without_room(
    runner_as_root: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """State, report, approvals and caches on it: a launch that needs room says so, and others do not."""
    words = plain(runner_as_root, plugin_dir, write_file)
    with full_disk(runner_as_root.home.parent / "full") as full:
        done = runner_as_root("exec", "--state-dir", str(full / "state"), *words[1:])
        assert done.returncode == 125 and not done.stdout, done
        assert "launch_failed" in done.stderr and "make room on the filesystem of" in done.stderr
        done = runner_as_root("exec", "--report", str(full / "report.json"), *words[1:])
        assert "the report could not be written: No space left on device" in done.stderr and done.stdout
        home = {"XDG_CONFIG_HOME": str(full / "config"), "XDG_CACHE_HOME": str(full / "cache")}
        done = runner_as_root("allow", "--yes", "--read", "/etc/hostname", words[-1], env=home)
        assert done.returncode and "No space left on device" in done.stderr, done
        assert runner_as_root("exec", words[-1], env=home).returncode == 0
        assert os.listdir(full) == ["all"]
