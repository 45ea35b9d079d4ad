"""The disk of a file: for a partition the whole disk, and none for some filesystems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.limits.cgroup import whole_disks
from tests import elsewhere
from tests.conftest import Caller
from tests.tables import one_case

PLACE = Path("/sys/dev/block")


def number(text: str) -> tuple[int, int]:
    major, minor = text.split(":")
    return int(major), int(minor)


def test_the_disks_of_this_machine() -> None:
    names = sorted(os.listdir(PLACE)) if PLACE.exists() else []
    if not names:
        pytest.skip("this machine has no block device")
    for name in names:
        place = (PLACE / name).resolve()
        whole = place.parent if (place / "partition").exists() else place
        assert whole_disks([os.makedev(*number(name))]) == (number((whole / "dev").read_text().strip()),)
    everything = whole_disks(os.makedev(*number(name)) for name in names)
    assert len(set(everything)) == len(everything)
    assert all(os.path.exists(f"{PLACE}/{major}:{minor}/queue") for major, minor in everything), everything


@pytest.mark.parametrize("path", ["/proc", "/sys", "/dev/shm"])
def test_a_filesystem_without_a_disk(path: str) -> None:
    assert whole_disks([os.stat(path).st_dev]) == ()


def test_nothing_and_nonsense() -> None:
    assert whole_disks([]) == ()
    assert whole_disks([0, os.makedev(4000, 77)]) == ()


def on_a_machine(devices: list[list[int]], links: dict[str, str], texts: dict[str, str]) -> list[list[int]]:
    """The disks of an invented machine: its /sys/dev/block is ours, in a mount namespace of our own."""
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid, place = os.geteuid(), os.getegid(), "/sys/dev/block"
    if libc.unshare(0x00020000 | (0x10000000 if uid else 0)) != 0:
        return [[-1, ctypes.get_errno()]]
    if uid:
        own = {"setgroups": "deny", "gid_map": f"{gid} {gid} 1", "uid_map": f"{uid} {uid} 1"}
        for name, text in own.items():
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    for mount in ((None, b"/", None, 0x4000 | 0x40000), (b"none", place.encode(), b"tmpfs", 0)):
        if libc.mount(*mount, None) != 0:
            return [[-1, ctypes.get_errno()]]
    os.chdir(place)
    for name, text in texts.items():
        os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "w", encoding="ascii") as file:
            file.write(text)
    for name, target in links.items():
        os.symlink(target, name)

    from sandbox.limits.cgroup import whole_disks

    return [list(each) for each in whole_disks(os.makedev(*device) for device in devices)]


LINKS = {
    "8:0": "devices/sda",
    "8:1": "devices/sda/sda1",
    "8:2": "devices/sda/sda2",
    "8:16": "devices/sdb",
    "253:0": "devices/dm-0",
    "7:0": "devices/broken",
    "7:1": "devices/torn",
}
TEXTS = {
    "devices/sda/dev": "8:0\n",
    "devices/sda/sda1/dev": "8:1\n",
    "devices/sda/sda1/partition": "1\n",
    "devices/sda/sda2/dev": "8:2\n",
    "devices/sda/sda2/partition": "2\n",
    "devices/sdb/dev": "8:16\n",
    "devices/dm-0/dev": "253:0\n",
    "devices/broken/size": "0\n",
    "devices/torn/dev": "\n",
}


@one_case(
    ("devices", "disks"),
    [
        ([[8, 0]], [[8, 0]]),
        ([[8, 1]], [[8, 0]]),
        ([[8, 2], [8, 16], [8, 1], [8, 0]], [[8, 0], [8, 16]]),
        ([[253, 0]], [[253, 0]]),
        ([[0, 42], [8, 16]], [[8, 16]]),
        ([[7, 0], [7, 1], [7, 2], [8, 16]], [[8, 16]]),
    ],
    ids=["disk", "partition", "each once", "mapped", "no disk", "no answer"],
)
def test_partitions(runner_as_user: Caller, devices: list[list[int]], disks: list[list[int]]) -> None:
    found = elsewhere.run(runner_as_user, on_a_machine, devices, LINKS, TEXTS)
    if found and found[0][0] == -1:
        pytest.skip(f"no mount namespace of our own: {os.strerror(found[0][1])}")
    assert found == disks
