"""The number of pages that nobody counts, and whose turn it is to be ended for it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from sandbox.limits import meter as meters
from sandbox.limits import uncounted
from sandbox.limits.meter import KERNEL_MEMORY, MACHINE_FILES
from sandbox.limits.uncounted import (
    SPARE_BYTES,
    UncountedMeter,
    count_ends,
    most_uncounted,
    parse_memory,
    parse_zones,
    uncounted_bytes,
    unseen_machine,
)
from tests.tables import one_case

MIB = 1 << 20
LIMIT = 64 * MIB
FULL = most_uncounted(LIMIT)
SECOND = 4 << 30  # bytes for which a plugin needs a second of processor time

MEMORY = """\
MemTotal:       1000000 kB
MemFree:         100000 kB
Cached:          200000 kB
Shmem:            50000 kB
HugePages_Total:      7
"""
ZONES = """\
Node 0, zone   Normal
  pages free     100
        managed  9999
      nr_zspages   20
  pagesets
    cpu: 0
              count:    100
              high:     999
    cpu: 1
              count:    11
"""


def test_the_files_of_the_kernel() -> None:
    assert parse_memory(MEMORY)["Cached"] == 200000 << 10
    assert parse_zones(ZONES) == {"count:": 111, "nr_zspages": 20}
    assert unseen_machine() == "" or "/proc" in unseen_machine()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the kernel says."""
    shown = {"/proc/meminfo": MEMORY, "/proc/zoneinfo": ZONES, "/proc/self/net/sockstat": ""}

    def read(path: str) -> str:
        if path not in shown:
            raise FileNotFoundError(2, "No such file or directory", path)
        return shown[path]

    monkeypatch.setattr(uncounted, "kernel_text", read)
    return shown


@one_case(
    ("path", "line", "pages"),
    [
        *(
            ("/proc/meminfo", f"{name}:  4000 kB", 0)
            for name in ("AnonPages", "Slab", "Hugetlb", "Balloon", "Percpu", "GPUActive", "SecPageTables")
        ),
        ("/proc/meminfo", "Zswap: 4000 kB", 20),  # with the pages of zsmalloc, which it uses
        ("/proc/spl/kstat/zfs/arcstats", "name type data\nsize 4 4096000", 0),
    ],
)
def test_what_has_a_counter_of_its_own_is_no_page_that_nobody_counts(
    files: dict[str, str], path: str, line: str, pages: int
) -> None:
    """A machine with huge pages, a balloon, ZFS or compressed swap."""
    before = uncounted_bytes()
    files[path] = files.get(path, "") + line + "\n"
    assert before - uncounted_bytes() == 4096000 - pages * os.sysconf("SC_PAGE_SIZE")


def test_sockets_that_say_what_they_hold(files: dict[str, str]) -> None:
    before = uncounted_bytes()
    files["/proc/self/net/sockstat"] = "sockets: used 9\nTCP: inuse 1 mem 30\nUDP: inuse 0 mem 4\n"
    assert before - uncounted_bytes() == 34 * os.sysconf("SC_PAGE_SIZE")


def test_the_files_are_of_one_moment(files: dict[str, str]) -> None:
    """Hundreds of MiB that processors keep ready can be taken after the launch."""
    before, at_launch = uncounted_bytes(), dict(files)
    files["/proc/zoneinfo"] = files["/proc/zoneinfo"].replace("count:", "count: 1\ncount:")
    files["/proc/self/net/sockstat"] = "TCP: inuse 1 mem 30"
    assert uncounted_bytes(at_launch) == before != uncounted_bytes()


def test_where_the_kernel_does_not_say(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert unseen_machine() == ""
    zones = files.pop("/proc/zoneinfo")
    assert unseen_machine() == "/proc/zoneinfo: No such file or directory"
    files["/proc/zoneinfo"], files["/proc/meminfo"] = zones, "MemFree: 1 kB"
    assert unseen_machine() == "/proc/meminfo or /proc/zoneinfo has another form"
    files["/proc/meminfo"] = MEMORY
    monkeypatch.setattr(uncounted, "_MEMORY", __file__)  # a file of another filesystem
    monkeypatch.setattr(uncounted, "MACHINE_FILES", (*MACHINE_FILES, __file__))
    files[__file__] = MEMORY
    assert unseen_machine() == f"{__file__} is not the kernel's own: another file is mounted there"
    assert UncountedMeter(LIMIT, list, None, list, {}).due > 1e9
    monkeypatch.setattr(uncounted, "uncounted_bytes", Mock(side_effect=OSError(errno.EMFILE, "Too many")))
    assert unseen_machine() == ""  # for the moment: it does not end the watch


AT_LAUNCH: Any = {"at launch": 500 * MIB}


class Group:
    seconds = 0.0

    def cpu(self) -> float:
        return self.seconds


class Machine:
    """One meter on a machine whose numbers the tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.bytes, self.reads = 100.0, AT_LAUNCH["at launch"], 0
        self.held = {"own": 10}  # sockets and pipes
        self.counting_takes = 0.0
        self.group = cast(Any, Group())
        for module in (uncounted, meters):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(uncounted, "thread_time", lambda: 1.0)
        monkeypatch.setattr(uncounted, "unseen_machine", lambda: "")
        monkeypatch.setattr(uncounted, "_shared_look", self._read)
        monkeypatch.setattr(uncounted, "count_ends", self._count)
        neighbours: Any = lambda: [(who > "own", who) for who in self.held if who != "own"]  # noqa: E731
        own: Any = lambda: "own"  # noqa: E731
        monkeypatch.setattr(uncounted, "uncounted_bytes", lambda texts: texts["at launch"])
        self.meter = UncountedMeter(LIMIT, own, self.group, neighbours, AT_LAUNCH)
        self.after(0, 0)

    def _read(self) -> int:
        self.reads += 1
        return self.bytes

    def _count(self, who: Any, enough: int = 0) -> Generator[None, None, int]:
        self.now += self.counting_takes
        yield
        return self.held[who]

    def after(self, seconds: float, grown: float, worked: float = 1.0) -> str | None:
        """What the meter says, so many seconds later."""
        self.now += seconds
        self.bytes += int(grown)
        self.group.seconds += worked
        return self.meter.look({}, self.now)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_two_looks_have_to_agree(machine: Machine) -> None:
    assert LIMIT + SPARE_BYTES < FULL < LIMIT + 2 * SPARE_BYTES or (os.cpu_count() or 1) > 15
    assert machine.after(2, FULL) is None  # not one byte too many
    assert machine.after(2, 1) is None
    assert machine.meter.due == pytest.approx(machine.now + 0.05)
    assert machine.after(0.06, -1) is None  # gone again
    assert machine.after(2, 1) is None
    assert machine.after(0.06, 0) == KERNEL_MEMORY
    machine.after(2, -FULL)
    machine.counting_takes = 0.03  # in steps; it ends when the second look is due, which is to be made then
    assert machine.after(2, FULL) is None
    assert machine.after(0.03, 0) is None
    assert machine.meter.due <= machine.now
    machine.counting_takes = 0.0
    assert machine.after(0, 0) == KERNEL_MEMORY
    assert machine.meter.why == f"{(FULL + 1) >> 20} MiB while it ran, and it has 10 sockets and pipes"


def test_a_growth_counts_as_far_as_the_plugin_had_time_for_it(machine: Machine) -> None:
    """A machine does many things while a plugin sleeps."""
    assert machine.after(9, 100 * FULL, worked=0.0) is None
    assert machine.after(2, 0, worked=2 * FULL / SECOND) is None
    assert machine.after(9, 100 * FULL, worked=FULL / SECOND) is None
    assert machine.after(9, 100 * FULL, worked=0.001) is None  # together too much
    assert machine.after(0.06, 0, worked=0.0) == KERNEL_MEMORY


def test_nothing_is_read_for_a_plugin_that_sleeps(machine: Machine) -> None:
    """But now and then, so that nobody takes for its work what grew meanwhile."""
    machine.reads = 0
    for reads in (0, 0, 0, 1, 1, 1, 1, 2):
        machine.after(2, 100 * FULL, worked=0.0)
        assert machine.meter.due == pytest.approx(machine.now + 1.0)
        assert machine.reads == reads
    machine.reads = 0
    machine.after(2, 0, worked=0.5)
    assert machine.reads == 1
    assert machine.meter.due == pytest.approx(machine.now + FULL / (1 << 30))


def test_memory_that_falls_is_forgotten(machine: Machine) -> None:
    """A server on this machine fills its sockets and empties them, again and again."""
    for _ in range(20):
        assert machine.after(2, 0.9 * FULL) is None
        assert machine.after(2, -0.9 * FULL) is None
    # What was there before does not hide what comes.
    machine.after(2, -10 * FULL)
    assert machine.after(2, FULL + MIB) is None
    assert machine.after(0.06, 0) == KERNEL_MEMORY


def test_what_was_taken_before_the_first_look_counts(machine: Machine) -> None:
    own: Any = lambda: "own"  # noqa: E731
    fresh = UncountedMeter(LIMIT, own, machine.group, list, AT_LAUNCH)
    machine.bytes += FULL + MIB
    for at, told in ((machine.now, None), (machine.now + 0.06, KERNEL_MEMORY)):
        assert fresh.look({}, at) == told


def test_slowly_is_too_much_as_well(machine: Machine) -> None:
    told = [machine.after(2, MIB) for _ in range(FULL // MIB + 2)]
    assert told[-1] == KERNEL_MEMORY and set(told[:-1]) == {None}


def test_the_plugin_with_most_sockets_and_pipes_goes_first(machine: Machine) -> None:
    """The others look again when it should be gone."""
    machine.held |= {"a": 11, "b": 9, "c": 10, "z": 10}  # z is newer, so it goes before one with as many
    assert machine.after(2, FULL + MIB) is None
    assert machine.meter.due == pytest.approx(machine.now + 0.05 + 2 * 0.25)
    assert machine.after(0.3, 0) is None
    assert machine.after(0.3, -FULL) is None  # it was one of them
    assert machine.after(2, FULL) is None
    assert machine.after(0.6, 0) == KERNEL_MEMORY  # it was not
    machine.held |= {str(number): 99 for number in range(1000)}
    machine.after(2, -FULL)
    assert machine.after(2, FULL + MIB) is None
    assert machine.meter.due == pytest.approx(machine.now + 0.05 + 8 * 0.25)


def test_a_plugin_with_its_three_streams_alone_is_not_ended(machine: Machine) -> None:
    machine.held["own"] = 0
    for _ in range(5):
        assert machine.after(2, FULL) is None
    machine.held["own"] = 1
    assert machine.after(2, 0) == KERNEL_MEMORY


def test_sockets_and_pipes_are_counted_once(tmp_path: Path) -> None:
    def counted(*pids: int, enough: int = 1024) -> int:
        counting = count_ends(pids, enough)
        while True:
            try:
                next(counting)
            except StopIteration as stop:
                found: int = stop.value
                return found

    own = os.getpid()
    streams = [*os.pipe(), *os.pipe(), *os.pipe()]
    before = counted(own)
    read, write = os.pipe()
    one, other = socket.socketpair()
    other.close()
    with one, open(tmp_path / "file", "w"):
        copies = [os.dup(read), os.dup(one.fileno())]
        assert counted(own, own, 2**22 + 1) == before + 2
        assert counted(own, enough=1) == 2
        assert counted(*[own] * 1024) == 1024  # so many descriptors that the rest is not read
        for fd in copies:
            os.close(fd)
    os.close(read)
    os.close(write)
    assert counted(own) == before
    for fd in streams:
        os.close(fd)
