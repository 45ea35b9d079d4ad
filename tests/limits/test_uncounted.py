"""A plugin that takes kernel pages which no limit counts, in a way that no meter knows, and its neighbour."""

from __future__ import annotations

import pytest

from sandbox.cell.neighbours import other_cells
from sandbox.limits.uncounted import SPARE_BYTES, uncounted_bytes
from tests.limits.cage import Box

MIB = 1 << 20
LIMIT = 64 * MIB
TAKEN = LIMIT + SPARE_BYTES + 130 * MIB  # with what is allowed for each processor

# TCP takes its memory in pieces of 32 KiB (in single pages, where net.core.high_order_alloc_disable is set).
# One byte of each is left unread, and the rest is received: what the kernel counts is the byte.
PIN = f"""
import socket, sys
print("ready", flush=True)
listener = socket.create_server(("127.0.0.1", 0))
def connection():
    client = socket.create_connection(listener.getsockname())
    client.setsockopt(6, 1, 1)  # TCP_NODELAY
    return client, listener.accept()[0]
through, out = connection()
kept, taken, rest = [], 0, bytes(32767)
while taken < {TAKEN}:
    client, other = connection()
    client.setblocking(False)
    kept += [client, other]
    try:
        while taken < {TAKEN}:
            client.send(b".")
            through.sendall(rest)
            left = len(rest)
            while left:
                left -= len(out.recv(left))
            taken += 32768
    except BlockingIOError:
        pass
print(taken, flush=True)
sys.stdin.read()
"""
# More sockets than the other, and nothing to do.
NEIGHBOUR = """
import socket, sys
kept = [socket.socketpair() for _ in range(50)]
print("ready", flush=True)
print(sys.stdin.read(), flush=True)
"""


@pytest.mark.machine
def test_pages_that_nobody_counts_end_the_plugin_and_not_its_neighbour(box: Box) -> None:
    with box.running(NEIGHBOUR, name="neighbour", limits={"memory": "64M"}) as neighbour:
        with box.running(PIN, limits={"memory": LIMIT}) as running:
            running.process.wait(60)
            result = running.end()
        assert result.outcome == ("crashed", "run", "kernel_memory"), result
        assert "sockets and pipes" in result.message and "memory limit" in result.hint
        assert result.hits == [] and (result.usage["memory_peak"] or 0) < LIMIT
        # The control: the same with a memory limit to which that is little.
        before = uncounted_bytes()
        with box.running(PIN, limits={"memory": 4 * TAKEN}) as running:
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
    with box.running(NEIGHBOUR, name="first") as first, box.running(NAMED, name="second") as second:
        one, other = first.family, second.family
        programs = {one["program"], other["program"]}
        for own, its in ((one, other), (other, one)):
            seen = [(first, programs & {*pids}) for first, pids in other_cells(own["init"])]
            # Other tests may have cells as well.
            assert [each for each in seen if each[1]] == [(its["init"] > own["init"], {its["program"]})]
