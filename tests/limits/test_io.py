"""Bytes per second on a disk, where there is an io controller. Elsewhere the report says nothing enforces it.

The plugin uses O_DIRECT, because only uncached I/O is throttled. The tests check a minimum duration only: a
slow machine takes longer, never shorter.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.limits.cage import Box, Running, by_cgroup, enforced_by, policy

MIB = 1 << 20
OK = ("ok", "run", "")

# Tests read the system's Python interpreter, which is on a disk. /tmp may not be.
DIRECT = """
import json, mmap, os, sys, time
buffer = mmap.mmap(-1, 65536)
buffer[:] = b'x' * 65536
def read(path):
    fd, done = os.open(path, os.O_RDONLY | os.O_DIRECT), 0
    while done < {size} and (got := os.readv(fd, [buffer])):
        done += got
    return done
def write(path):
    fd, done = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600), 0
    while done < {size}:
        done += os.writev(fd, [buffer])
    return done
started = time.monotonic()
done = {what}({path!r})
print(json.dumps([done, time.monotonic() - started]))
"""


def _on_disk(path: Path) -> bool:
    return os.path.exists(f"/sys/dev/block/{os.major(path.stat().st_dev)}:{os.minor(path.stat().st_dev)}")


@pytest.mark.parametrize("what", ["read", "write"])
def test_io_is_throttled_to_the_limit(box: Box, what: str) -> None:
    if not by_cgroup(box, "io"):
        pytest.skip("nothing enforces io here")
    place = box.folder / "open"
    place.mkdir()
    place.chmod(0o777)
    path = Path(os.path.realpath("/usr/bin/python3")) if what == "read" else place / "file"
    if not _on_disk(path if what == "read" else place):
        pytest.skip(f"{path} is not on a disk")
    code = DIRECT.format(what=what, path=str(path), size=MIB)
    with_write = policy(write=(str(place),))
    free = box.run(code, policy=with_write, write=(str(place),))
    assert free.outcome == OK, free.err
    done, alone = free.printed
    assert done == MIB
    if alone > 0.6:
        pytest.skip(f"the disk takes {alone:.1f} s without a limit: too slow to show that it is throttled")
    (place / "file").unlink(missing_ok=True)
    result = box.run(code, policy=with_write, write=(str(place),), limits={"io": "1M"})
    assert result.outcome == OK and result.hits == []
    done, seconds = result.printed
    assert done == MIB
    assert seconds > 0.8, f"{MIB} bytes at {MIB} a second took {seconds:.2f} s, and {alone:.2f} s without"
    limit = result.limit("io")
    assert limit["requested"] == limit["effective"] == MIB
    assert (limit["enforced_by"], limit["degraded"]) == (enforced_by(box, "io"), False)


def test_the_cgroup_has_the_limit(box: Box) -> None:
    if not by_cgroup(box, "io"):
        pytest.skip("nothing enforces io here")
    waits = "print('ready', flush=True)\ninput()"
    with box.running(waits, limits={"io": "3M"}) as running:
        limits = _throttles(running)
        running.say("thanks")
    disk = os.stat("/usr").st_dev
    assert _whole_disk(disk) in limits
    assert set(limits.values()) == {(3 * MIB, 3 * MIB)}


def _throttles(running: Running) -> dict[str, tuple[int, int]]:
    """Bytes per second to read and to write, for each disk."""
    group = running.group("io")
    found: dict[str, tuple[int, int]] = {}
    if (group / "io.max").exists():
        for line in (group / "io.max").read_text().splitlines():
            disk, *words = line.split()
            values = dict(word.split("=") for word in words)
            found[disk] = int(values["rbps"]), int(values["wbps"])
        return found
    files = [group / f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    reads, writes = (dict(line.split() for line in file.read_text().splitlines()) for file in files)
    return {disk: (int(reads[disk]), int(writes[disk])) for disk in {*reads, *writes}}


def _whole_disk(device: int) -> str:
    """The disk of a partition."""
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    place = place.parent if (place / "partition").exists() else place
    return (place / "dev").read_text().strip()


def test_without_an_io_controller_the_limit_is_degraded_or_refused(box: Box, runner_as: Caller) -> None:
    if by_cgroup(box, "io"):
        pytest.skip("a cgroup enforces io here")
    result = box.run("pass", limits={"io": "1M"})
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    limit = result.limit("io")
    assert (limit["enforced_by"], limit["effective"], limit["degraded"]) == ("", None, True)
    assert limit["detail"]
    refused = box.run("pass", policy=policy("require"), limits={"io": "1M"})
    assert (refused.status, refused.outcome) == (125, ("sandbox_unavailable", "plan", "io"))
    assert "io limit cannot be enforced" in refused.message and refused.hint
