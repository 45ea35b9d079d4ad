"""What the sockets of a program hold: the kernel's lists, and what is in none of them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from sandbox.cell.cell import children
from sandbox.limits import socket_diag, socket_tables
from sandbox.limits.socket_diag import TCP, DiagFault, ListedSocket, list_sockets, open_diag_socket
from sandbox.limits.socket_meter import largest_socket_bytes, parse_sockstat
from sandbox.limits.socket_tables import SocketLists, SocketTables, open_network, parse_table
from tests.limits.socket_ways import WAY_NAMES, WAYS
from tests.tables import one_case

pytestmark = pytest.mark.launches  # a network namespace

MIB = 1 << 20
GOAL = 8 * MIB

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   0: 0100007F:8CA0 00000000:0000 {state} {sent:08X}:{received:08X} 00:00000000 00000000 0 0 7 1\n"
NETLINK = (
    "sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n"
    "0000000007948a98 0   0          00000000 0        0        0     2        0        4       \n"
    "0000000007948a98 0   77         00000000 900      30       1     2        0        5       \n"
)


@one_case(
    ("lines", "entries"),
    [
        ("", []),
        (LINE.format(state="01", sent=1000, received=500), [ListedSocket(7, 1500)]),
        (
            LINE.format(state="0A", sent=128, received=7),
            [ListedSocket(7, 0)],
        ),  # listening: connections, not bytes
        (LINE.format(state="06", sent=0, received=0) * 2, [ListedSocket(0, None)] * 2),
        ("   0: 0100007F:8C", []),
    ],
    ids=["none", "both queues", "listening", "closed", "cut short"],
)
def test_a_text(lines: str, entries: list[ListedSocket]) -> None:
    assert list(parse_table((HEAD + lines).encode().split(b"\n"))) == entries


def test_the_text_of_netlink() -> None:
    """Without the kernel's own ends."""
    assert list(parse_table(NETLINK.encode().split(b"\n"), True)) == [ListedSocket(5, 930)]


# In a network namespace of its own. It holds what it is told to until it is told something else.
HOLDER = (
    WAYS
    + """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
print(os.getpid(), flush=True)
for line in sys.stdin:
    while kept:
        kept.pop().close()
    print(ALL[line.strip()](8 << 20) if line.strip() else 0, flush=True)
"""
)


class Holder:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self.pid = int(self._out.readline())

    def hold(self, way: str) -> int:
        self._in.write(f"{way}\n")
        self._in.flush()
        return int(self._out.readline())

    def used(self) -> int | None:
        shown = parse_sockstat(Path(f"/proc/{self.pid}/net/sockstat").read_text())
        return None if shown is None else shown.sockets


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    if os.geteuid() != 0:
        pytest.skip("makes a network namespace; tests/limits/test_sockets.py does it without root")
    inside = 'ip link set lo up && exec "$0" -c "$1"'
    words = ["unshare", "--net", "sh", "-c", inside, sys.executable, HOLDER]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        yield Holder(process)
        process.kill()


@pytest.fixture(scope="module")
def network(holder: Holder) -> Iterator[SocketLists]:
    opened = open_network(holder.pid)
    assert opened is not None
    yield opened
    opened.close()


def ended(reading: Generator[None, None, float]) -> float:
    try:
        while True:
            next(reading)
    except StopIteration as stop:
        found: float = stop.value
        return found


@pytest.mark.parametrize("by_diag", [True, False], ids=["sock_diag", "texts"])
def test_each_way_to_hold_memory_counts(
    holder: Holder, network: SocketLists, by_diag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is what the holder says: each of its sockets tells it how much it holds."""
    assert network.kernel is not None, "the kernel of a test machine has sock_diag"
    clock = [100.0]
    monkeypatch.setattr(socket_tables, "monotonic", lambda: clock[0])
    shown = network if by_diag else network._replace(kernel=None)
    tables = SocketTables(shown, lambda: [holder.pid], largest_socket_bytes())
    told = {}
    for way in WAY_NAMES[:-2]:
        assert holder.hold("") == 0
        while (holder.used() or 0) > 2:  # the kernel frees some later; left are ours, and a listener
            pass
        empty = ended(tables.read(holder.used, GOAL))
        held = holder.hold(way)
        found = ended(tables.read(holder.used, 2 * GOAL))
        if not tables.is_sure:
            clock[0] += 0.5
            found += ended(tables.read(holder.used, 2 * GOAL))
        told[way] = (found - empty) / held
    # A text has the bytes that wait, and neither what it takes to keep them nor error queues. Only of a
    # socket that a process has, the kernel tells all in another way.
    unseen = set() if by_diag else {"TCP errors, closed"}
    assert {way for way, share in told.items() if share < 0.99} == unseen
    # What no process has counts as the most that it could hold.
    assert {way for way, share in told.items() if share > 2} == {"UDP errors, in transit"}


def test_what_is_charged_to_the_sender_by_a_cgroup_counts_once(holder: Holder, network: SocketLists) -> None:
    holder.hold("unix")
    for shown in (network, network._replace(kernel=None)):
        tables = SocketTables(shown, lambda: [holder.pid], largest_socket_bytes())
        held = holder.hold("unix")
        most = held + MIB  # with empty sockets
        for charged, least, above in ((0, held, most), (held - MIB, MIB, 2 * MIB), (2 * held, 0, MIB)):
            assert least <= ended(tables.read(holder.used, math.inf, charged)) < above, charged
        holder.hold("netlink")
        assert ended(tables.read(holder.used, math.inf, math.inf)) > GOAL


def test_on_the_hosts_network_only_what_its_processes_have_counts(holder: Holder) -> None:
    tables = SocketTables(None, lambda: [holder.pid], largest_socket_bytes())
    for way in ("netlink", "UDP errors, disconnected", "TCP", "unix"):
        held = holder.hold(way)
        assert held <= ended(tables.read(lambda: None, math.inf)) < held + MIB


def test_a_look_ends_when_there_is_too_much(
    holder: Holder, network: SocketLists, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one begins anew."""
    held = holder.hold("UDP held back")
    monkeypatch.setattr(socket_tables, "_PIECE_BYTES", 1024)
    for shown in (network, network._replace(kernel=None)):
        tables = SocketTables(shown, lambda: [holder.pid], largest_socket_bytes())
        for _ in range(2):
            found = ended(tables.read(holder.used, MIB))
            assert found > MIB
        assert found < held or shown.kernel is not None  # it lists them in large parts
        assert ended(tables.read(holder.used, 2 * GOAL)) > held


def test_more_sockets_than_are_looked_at_are_too_many(
    holder: Holder, network: SocketLists, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.hold("UDP held back")
    monkeypatch.setattr(socket_tables, "_MOST_SOCKETS", 10)
    tables = SocketTables(network, lambda: [holder.pid], 0)
    assert ended(tables.read(holder.used, 1 << 40)) > 1 << 40


def test_a_socket_that_is_missing_for_a_moment_does_not_count(
    holder: Holder, network: SocketLists, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be closed, or passed to another process, while the others are looked at."""
    clock = [100.0]
    monkeypatch.setattr(socket_tables, "monotonic", lambda: clock[0])
    monkeypatch.setattr(socket_tables, "_FEW_MISSING", 0)
    holder.hold("")
    while (holder.used() or 0) > 2:
        pass
    listed = holder.used() or 0
    tables = SocketTables(network, list, 1 << 30)
    for seconds, missing, counted in (
        (0.0, 5, 0),
        (0.4, 1, 0),
        (0.2, 3, 1),  # half a second later, one was missing at every look
        (0.4, 0, 0),
        (0.2, 4, 0),
        (0.6, 4, 4),
        (9.0, 2, 2),
    ):
        clock[0] += seconds
        found = ended(tables.read(lambda missing=missing: listed + missing, MIB))  # type: ignore[misc]
        assert found // (1 << 30) == counted, (seconds, missing)
        assert tables.is_sure is (missing <= counted)


def test_processes_that_may_not_be_inspected(holder: Holder, network: SocketLists) -> None:
    """As root in a container without CAP_SYS_PTRACE: then only the lists count, and nothing is missing."""
    script = f"""
import sys
from sandbox.limits.socket_tables import SocketTables, open_network
tables = SocketTables(open_network({holder.pid})._replace(kernel=None), lambda: [{holder.pid}], 1 << 40)
reading = tables.read(lambda: 1000, 1 << 30)
try:
    while True:
        next(reading)
except StopIteration as stop:
    print(stop.value, tables.is_sure)
"""
    held = holder.hold("netlink")
    words = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", sys.executable, "-c", script]
    found, is_sure = subprocess.check_output(words, text=True).split()
    assert held <= float(found) < held + MIB and is_sure == "True"


def test_a_process_of_our_own_network_is_not_the_plugin(holder: Holder) -> None:
    """The number of a process that has ended may belong to another one by now."""
    assert open_network(os.getpid()) is None
    assert open_network(2**22 + 1) is None
    with pytest.raises(PermissionError), open(os.devnull) as other:
        open_diag_socket(other.fileno())


def test_a_child_that_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_diag, "_CHILD_SECONDS", 0.2)
    monkeypatch.setattr(socket_diag, "_enter", lambda _: os.kill(os.getpid(), signal.SIGSTOP))
    before = children(os.getpid()), os.listdir("/proc/self/fd")
    with pytest.raises(TimeoutError):
        open_diag_socket(0)
    assert (children(os.getpid()), os.listdir("/proc/self/fd")) == before


def test_a_child_that_somebody_else_reaps(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does where SIGCHLD is ignored. It ends between the look and the signal."""
    real, old = os.waitpid, signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def late(pid: int, options: int) -> tuple[int, int]:
        with contextlib.suppress(ChildProcessError):
            real(pid, 0)
        return 0, 0

    monkeypatch.setattr(os, "waitpid", late)
    try:
        with open(f"/proc/{holder.pid}/ns/net", "rb") as namespace:
            open_diag_socket(namespace.fileno()).close()
    finally:
        signal.signal(signal.SIGCHLD, old)


def test_a_kernel_that_does_not_list_them(network: SocketLists) -> None:
    assert network.kernel is not None
    with pytest.raises(DiagFault):
        list(list_sockets(network.kernel, TCP._replace(kind=20, request=bytes([45]) + TCP.request[1:])))
    assert [*list_sockets(network.kernel, TCP)]
