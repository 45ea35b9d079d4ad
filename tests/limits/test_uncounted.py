"""A plugin that takes kernel pages which no limit counts, in a way that no meter knows, and its neighbour."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sandbox.cell.neighbours import other_cells
from sandbox.limits.uncounted import count_ends, most_uncounted, uncounted_bytes
from tests.limits.cage import Box
from tests.limits.socket_ways import REFUSED_WAYS, WAYS

MIB = 1 << 20
LIMIT = 64 * MIB
TAKEN = most_uncounted(LIMIT) + 64 * MIB
# TCP takes its memory in pieces of 32 KiB, or in single pages.
SINGLE_PAGES = Path("/proc/sys/net/core/high_order_alloc_disable")
PIECE = os.sysconf("SC_PAGE_SIZE") if SINGLE_PAGES.read_text().strip() == "1" else 1 << 15
BYTES_EACH = 256
OPEN_FILES = 4096  # socket buffers can be small, and then it takes many

# Every way to hold memory of the kernel that we know, but file locks: a little by each. Most count as memory,
# some are refused. Nobody counts the others: access control lists, multicast groups, filters, waiting calls.
KNOWN = (
    WAYS
    + r"""
import os, select, signal, threading

def lists(goal):
    one = lambda tag, who=0xFFFFFFFF: struct.pack("=HHI", tag, 7, who)
    value = struct.pack("=I", 2) + one(1) + one(2, os.getuid()) * 120 + one(4) + one(16) + one(32)
    for number in range(goal // 2048):
        os.mkdir(f"/tmp/{number}")
        for kind in ("access", "default"):
            os.setxattr(f"/tmp/{number}", f"system.posix_acl_{kind}", value)
    return goal

def groups(goal):
    for _ in range(goal // 7168):
        kept.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        for number in range(20):
            kept[-1].setsockopt(0, 35, bytes([224, 1, 1, number, 127, 0, 0, 1]))  # IP_ADD_MEMBERSHIP
    return goal

def own_filter(_):
    load, allow = struct.pack("HBBI", 0, 0, 0, 0), struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
    code = ctypes.create_string_buffer(load * 4000 + allow)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4001, ctypes.addressof(code)))
    if os.fork() == 0:
        _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        while _libc.prctl(22, 2, program, 0, 0) == 0:  # PR_SET_SECCOMP
            pass
        signal.pause()
    return 1

def waiting(_):
    def wait():
        poll = select.poll()
        for number in range(1000, 2000):
            poll.register(number, 0)
        poll.poll(60000)
    threading.Thread(target=wait, daemon=True).start()
    return 1

def pipes(goal):
    held = 0
    while held < goal:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        held += os.write(writing, bytes(65536))
    return held

def moved(call):
    zero, (reading, writing) = os.open("/dev/zero", os.O_RDONLY), os.pipe()
    return call(zero, writing)

# Sockets that no process has count as the most they could hold: test_sockets.py has these.
del ALL["UDP errors, in transit"], ALL["TCP errors, closed"]
ALL |= {
    "lists": lists, "groups": groups, "own filter": own_filter, "waiting": waiting, "pipes": pipes,
    "splice": lambda goal: moved(lambda zero, pipe: os.splice(zero, pipe, goal)),
    "sendfile": lambda goal: moved(lambda zero, pipe: os.sendfile(pipe, zero, 0, goal)),
}
def tried(name):
    try:
        return ALL[name](1 << 20)
    except OSError as error:
        return errno.errorcode[error.errno]

print("ready", flush=True)
print(json.dumps({name: tried(name) for name in ALL}), flush=True)
"""
)
REFUSED = {**REFUSED_WAYS, "splice": "EINVAL", "sendfile": "EINVAL"}

# And one that no limit and no meter of sockets knows. One byte of each piece is left unread, and the rest is
# received: what the kernel counts is the byte. A connection has no more bytes than the buffers of any machine
# have room for: where one is full, the kernel copies the bytes together and frees the pieces.
PIN = f"""
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
def connection():
    client = socket.create_connection(listener.getsockname())
    client.setsockopt(6, 1, 1)  # TCP_NODELAY
    return client, listener.accept()[0]
through, out = connection()
kept_bytes, taken, rest = [], 0, bytes({PIECE} - 1)
while taken < GOAL:
    client, other = map(large, connection())
    kept_bytes += [client, other]
    try:
        for _ in range({BYTES_EACH}):
            client.send(b".")
            through.sendall(rest)
            left = len(rest)
            while left:
                left -= len(out.recv(left))
            taken += {PIECE}
    except BlockingIOError:
        pass
print(taken, flush=True)
sys.stdin.read()
"""
# Many sockets, and nothing to do.
SOCKETS = """
import array, socket, sys
kept = [socket.socketpair() for _ in range(50)]
"""
# No process has most of them open. A kernel that does not list unix sockets (UNIX_DIAG) cannot say what these
# hold, so they count as the most they could: this needs a high memory limit there, or none.
IN_TRANSIT = """
ends = array.array("i", [end.fileno() for pair in kept[1:] for end in pair])
kept[0][0].sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ends)])
del kept[1:]
"""
IDLE = """
print("ready", flush=True)
print(sys.stdin.read(), flush=True)
"""


@pytest.mark.machine
def test_pages_that_nobody_counts_end_the_plugin_and_not_its_neighbour(box: Box) -> None:
    """After all that is known, which together is not too much."""
    before = uncounted_bytes()
    with box.running(SOCKETS + IDLE, name="neighbour", limits={"memory": "64M"}) as neighbour:
        # More than enough: what others give back at the same time is taken for the plugin's.
        code = f"GOAL = {3 * TAKEN}\n{KNOWN}{PIN}"
        with box.running(code, limits={"memory": LIMIT, "open_files": OPEN_FILES}) as running:
            held = json.loads(running.line())
            running.process.wait(60)
            result = running.end()
        assert {name: held.pop(name) for name in REFUSED} == REFUSED
        assert len(held) == 15 and all(each >= MIB for each in held.values() if each != 1), held
        assert result.outcome == ("crashed", "run", "kernel_memory"), result
        assert "sockets and pipes" in result.message and "memory limit" in result.hint
        assert result.hits == [] and (result.usage["memory_peak"] or 0) < LIMIT
        # The control: the same with a memory limit to which that is little.
        code = f"GOAL = {TAKEN}\n{KNOWN}{PIN}"
        with box.running(code, limits={"memory": 4 * TAKEN, "open_files": OPEN_FILES}) as running:
            assert json.loads(running.line()).keys() == {*held, *REFUSED}
            assert int(running.line()) >= TAKEN
            assert uncounted_bytes() - before > TAKEN / 2
            assert running.end().outcome == ("ok", "run", "")
        assert neighbour.process.poll() is None
        assert neighbour.end().outcome == ("ok", "run", "")


# It takes the name of a cell's init.
NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"runner-init", 0, 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_cells_see_each_other(box: Box) -> None:
    many = SOCKETS + IN_TRANSIT + IDLE
    with box.running(many, name="first") as first, box.running(NAMED, name="second") as second:
        one, other = first.family, second.family
        programs = {one["program"], other["program"]}
        for own, its in ((one, other), (other, one)):
            seen = [(first, programs & {*pids}) for first, pids in other_cells(own["init"])]
            # Other tests may have cells as well.
            assert [each for each in seen if each[1]] == [(its["init"] > own["init"], {its["program"]})]
        # Sockets in transit count too: else a plugin could hide behind one with fewer.
        assert counted(one["program"]) >= 100 > counted(other["program"])
        # Of a cell whose program has none beside its streams, none count: bwrap's and ours are not its own.
        assert [counted(*pids) for _, pids in other_cells(one["init"]) if other["program"] in pids] == [0]


def counted(*pids: int) -> int:
    counting = count_ends(pids)
    while True:
        try:
            next(counting)
        except StopIteration as stop:
            return int(stop.value)
