"""What the whole machine shares: open files, memory of sockets, and closed connections with data to send.

Each attack runs under a share of the machine that is so small that a few thousand files reach it, and once
more, as a control, under the share that a policy has by itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest

from sandbox.limits.shares import FILES, ORPHANS, SOCKET_PAGES, last_number
from tests.limits.cage import PREFER, Box
from tests.tables import one_case

OK, ENDED = ("ok", "run", ""), ("crashed", "run", "machine_share")
MIB = 1 << 20


def share(wanted: int, number: str) -> str:
    """A policy under which a plugin may take `wanted` of a number in /proc/sys."""
    whole = last_number(number)
    if whole is None or whole >= 1 << 40:
        pytest.skip(f"{number} bounds nothing here")
    return f'machine_share = "{(wanted + 0.5) / whole * 100:.6f}%"\n' + PREFER


def ended(box: Box, code: str, policy: str, limits: dict[str, Any]) -> str:
    """The message with which the plugin is ended. Its stdin stays open: it does not end by itself."""
    with box.running(code, policy=policy, limits=limits) as running:
        running.process.wait(60)
        result = running.end()
    assert (result.outcome, result.status, result.hits) == (ENDED, 137, [])
    assert result.hint == "raise machine_share in the policy"
    return result.message


# Descriptors of many processes at once: each opens as many as it may.
DESCRIPTORS = """
import json, os, resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
told, tell = os.pipe()
over, end = os.pipe()
for _ in range(5):
    if os.fork() == 0:
        os.close(end)
        count = 3
        try:
            while True:
                os.open("/usr/bin/env", os.O_RDONLY)
                count += 1
        except OSError:
            os.write(tell, b"%8d" % count)
            os.read(over, 1)
            os._exit(0)
print(json.dumps([most, sum(int(os.read(told, 8)) for _ in range(5))]))
"""


def test_open_files_of_all_processes_fit_into_the_share(box: Box) -> None:
    limits = {"pids": 20}
    policy = share(4000, FILES)
    result = box.run(DESCRIPTORS, policy=policy, limits=limits)
    most, opened = result.printed
    row = result.limit("open_files")
    assert (row["requested"], row["effective"], row["decided_by"]) == (4096, most, "policy")
    assert 195 <= most <= 200 and opened <= 5 * most
    assert row["detail"].startswith("lowered, for 20 processes; all processes together ")
    (explained,) = (
        row
        for row in box.explain(DESCRIPTORS, policy=policy, limits={**limits, "open_files": 1000})["limits"]
        if row["name"] == "open_files"
    )
    assert (explained["requested"], explained["effective"], explained["decided_by"]) == (
        1000,
        most,
        "manifest",
    )
    # The control: by itself a policy leaves them more.
    most, opened = box.run(DESCRIPTORS, limits=limits).printed
    assert most > 200 and opened > 5 * 200


# A file that is mapped stays open after its descriptor is closed.
MAPPED = """
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
print("ready", flush=True)
if os.fork():
    for _ in range(2500):
        fd = os.open("/usr/bin/env", os.O_RDONLY)
        assert libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0) != 2**64 - 1
        os.close(fd)
    print("held", flush=True)
sys.stdin.read()
"""


def test_files_that_are_mapped_count(box: Box) -> None:
    limits = {"memory": "128M", "pids": 8, "open_files": 64}
    message = ended(box, MAPPED, share(2000, FILES), limits)
    assert "open and mapped files, of 200" in message and "of fs.file-max" in message
    held(box, MAPPED, limits)


def held(box: Box, code: str, limits: dict[str, Any]) -> None:
    """The control: under the share that a policy has by itself the plugin goes on."""
    with box.running(code, limits=limits) as running:
        assert running.line() == "held"
        assert running.end().outcome == OK


# Connections to itself whose other end does not read. CLOSE: they are closed with data still to send.
CONNECTIONS = """
import socket, sys
print("ready", flush=True)
server, held = socket.socket(), []
{close} and server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
server.bind(("127.0.0.1", 0))
server.listen(500)
for _ in range({count}):
    client = socket.socket()
    {close} and client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    client.connect(server.getsockname())
    client.setblocking(False)
    held.append(server.accept()[0])
    try:
        while True:
            client.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    client.close() if {close} else held.append(client)
print("held", flush=True)
sys.stdin.read()
"""


@one_case(
    ("code", "policy", "told"),
    [
        pytest.param(
            CONNECTIONS.format(count=10, close=False),
            lambda: share(8 * MIB // mmap.PAGESIZE, SOCKET_PAGES),
            "KiB in sockets, of ",
            id="socket memory",
        ),
        pytest.param(
            CONNECTIONS.format(count=220, close=True),
            lambda: share(200, ORPHANS),
            "connections that were closed and still have data to send, of 200 ",
            id="orphans",
        ),
    ],
)
def test_sockets_fit_into_the_share(box: Box, code: str, policy: Callable[[], str], told: str) -> None:
    limits = {"memory": "256M", "pids": 4, "open_files": 600}
    assert told in ended(box, code, policy(), limits)
    held(box, code, limits)
