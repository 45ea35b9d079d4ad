"""A granted folder is swapped for a link while plugins are launched: no plugin sees the link's target."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.escape.cage import sandbox_table, toml
from tests.manifests import nexo
from tests.tables import REPEAT

# Before a release run RUNNER_TEST_REPEAT=5.
LAUNCHES = 100 * REPEAT
WORKERS = 2
# Both outcomes have to occur this often. How often they do in so many launches depends on the machine.
AT_LEAST = 10
MOST_ROUNDS = 10


def swap_for_ever(directory: str, link: str) -> None:
    """Exchange two names, with pauses of a few milliseconds: about as long as the steps of a launch."""
    import ctypes
    import os
    import random
    import time

    libc = ctypes.CDLL(None, use_errno=True)
    one, two = directory.encode(), link.encode()
    os.write(1, b"swapping\n")
    while True:
        if libc.renameat2(-100, one, -100, two, 2):  # AT_FDCWD, RENAME_EXCHANGE
            raise OSError(ctypes.get_errno(), "renameat2")
        time.sleep(random.random() ** 3 * 0.02)


def launch(manifest: str, times: int) -> dict[str, int]:
    """Launch many times in one process. Counts each plugin output, or the exit status if there was none."""
    import collections
    import os

    from runner import cli

    found: collections.Counter[str] = collections.Counter()
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 2)
    ours = os.dup(1)
    for _ in range(times):
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(write)
        status = cli.main(["exec", "--policy", "dev", manifest])
        os.dup2(ours, 1)
        with open(read) as file:
            found[file.read().strip() or f"status {status}"] += 1
    return dict(found)


def bind_by_path(directory: str, times: int) -> int:
    """The control: check, then let bwrap bind the path. Returns the first launch that was fooled, or 0."""
    import os
    import subprocess

    for number in range(1, times + 1):
        while os.path.islink(directory):
            pass
        bwrap = ["bwrap", "--ro-bind", "/", "/", "--tmpfs", "/mnt", "--ro-bind", directory, "/mnt/source"]
        done = subprocess.run([*bwrap, "--", "cat", "/mnt/source/who"], capture_output=True, text=True)
        if done.stdout == "other":
            return number
    return 0


@contextmanager
def _swapping(caller: Caller, directory: Path, link: Path) -> Iterator[None]:
    with elsewhere.start(caller, swap_for_ever, str(directory), str(link)) as swapper:
        try:
            assert swapper.stdout is not None
            assert swapper.stdout.readline() == b"swapping\n"
            yield
            assert swapper.poll() is None, "the swapper ended"
        finally:
            swapper.kill()


@pytest.fixture
def source(runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]) -> Path:
    """top/source/who contains "mine". The folder that the link leads to has a file with "other"."""
    write_file(plugin_dir / "data/top/source/who", "mine")
    write_file(plugin_dir / "other/source/who", "other")
    write_file(plugin_dir / "other/who", "other")
    runner_as.give(plugin_dir)
    return plugin_dir / "data/top/source"


@pytest.mark.parametrize("swapped", ["the source", "a folder above it"])
def test_no_launch_shows_the_target_of_the_swapped_link(
    runner_as: Caller,
    plugin_dir: Path,
    source: Path,
    swapped: str,
    nothing_left: None,
    write_file: Callable[..., Path],
) -> None:
    victim = source if swapped == "the source" else source.parent
    link = victim.with_name("link")
    link.symlink_to(plugin_dir / "other")
    runner_as.give(link)
    manifest = write_file(
        plugin_dir / "plugin/nexo-plugin.toml",
        _MANIFEST.format(args=toml([f"{source}/who"]), tables=sandbox_table(read=[str(source)])),
    )
    seen: Counter[str] = Counter()

    def is_enough() -> bool:
        """126: the runner noticed the swap. 125: bubblewrap found another file mounted than it was given."""
        return min(seen["mine"], seen["status 125"] + seen["status 126"]) >= AT_LEAST

    with _swapping(runner_as, victim, link):
        for _ in range(MOST_ROUNDS):
            workers = [
                elsewhere.start(runner_as, launch, str(manifest), LAUNCHES // WORKERS, stderr=subprocess.PIPE)
                for _ in range(WORKERS)
            ]
            for worker in workers:
                seen.update(_result(worker))
            if is_enough():
                break
    # 1: the path did not exist at that moment, and cat failed. Nothing else may happen: never "other".
    assert set(seen) <= {"mine", "status 125", "status 126", "status 1"}, seen
    assert is_enough(), seen


def _result(worker: subprocess.Popen[bytes]) -> dict[str, int]:
    with worker:
        out, err = worker.communicate(timeout=120)
    assert worker.returncode == 0, err.decode()
    return dict(json.loads(out))


def test_checking_a_path_before_binding_it_is_not_enough(
    runner_as: Caller, plugin_dir: Path, source: Path
) -> None:
    link = source.with_name("link")
    link.symlink_to(plugin_dir / "other")
    runner_as.give(link)
    with _swapping(runner_as, source, link):
        assert elsewhere.run(runner_as, bind_by_path, str(source), 200) > 0


_MANIFEST = nexo("swap", "/bin/cat") + "args = {args}\n{tables}\n"
