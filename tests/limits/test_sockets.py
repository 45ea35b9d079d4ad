"""Socket buffers count as memory, also where the kernel does not enforce that."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from tests.limits.cage import PREFER, Box
from tests.limits.socket_ways import REFUSED_WAYS, WAY_NAMES, WAYS

MIB = 1 << 20

# A server and its client in one process, like development servers and language runtimes.
ECHO = """
import json, socket, threading
server = socket.create_server(("127.0.0.1", 0))
def serve():
    for _ in range(50):
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)
threading.Thread(target=serve, daemon=True).start()
got = 0
for _ in range(50):
    with socket.create_connection(server.getsockname()) as client:
        for _ in range(8):
            client.sendall(bytes(65536))
            left = 65536
            while left:
                left -= len(client.recv(left))
            got += 65536
print(json.dumps(got))
"""


# Holds so many bytes in each of these ways, says so or why not, and waits for the end of its stdin.
EACH = """
def tried(name):
    try:
        return ALL[name]({goal})
    except OSError as error:
        return errno.errorcode[error.errno]

print("ready", flush=True)
print(json.dumps({{name: tried(name) for name in {ways}}}), flush=True)
sys.stdin.read()
"""
LARGE = 32 * MIB
OPEN_FILES = 4096  # socket buffers can be small, and then it takes many
# On a machine with little memory, its share of what all sockets may hold is less than its memory limit.
WHOLE_MACHINE = 'machine_share = "100%"\n' + PREFER


def test_all_ways_to_hold_memory_of_the_kernel_at_once(box: Box) -> None:
    """Three are refused. Ten count, most of which no cgroup charges: if one did not, it would be less than
    the limit, because a plugin of a cgroup has some MiB beside its sockets."""
    code = WAYS + EACH.format(ways=(*REFUSED_WAYS, *WAY_NAMES[:9], "unix"), goal=LARGE)
    most = 10 * LARGE - 6 * MIB
    limits = {"memory": most, "open_files": OPEN_FILES}
    with box.running(code, limits=limits, policy=WHOLE_MACHINE) as running:
        running.process.wait(60)
        result = running.end()
    assert result.outcome == ("crashed", "run", "oom")
    assert result.usage["memory_peak"] > most and "its sockets" in result.message
    limits["memory"] = 12 * LARGE
    with box.running(code, limits=limits, policy=WHOLE_MACHINE) as running:
        held = json.loads(running.line())  # the control
        assert {name: held.pop(name) for name in REFUSED_WAYS} == REFUSED_WAYS
        assert len(held) == 10 and all(LARGE <= each < 1.1 * LARGE for each in held.values())
        assert running.end().outcome == ("ok", "run", "")


def test_sockets_that_no_process_has_count_as_the_most_they_could_hold(box: Box) -> None:
    code = WAYS + EACH.format(ways=["UDP errors, in transit"], goal=LARGE)
    with box.running(code, limits={"memory": LARGE + 16 * MIB, "open_files": OPEN_FILES}) as running:
        running.process.wait(60)
        assert running.end().outcome == ("crashed", "run", "oom")
    with box.running(code, limits={"memory": 256 * LARGE, "open_files": OPEN_FILES}) as running:
        assert json.loads(running.line())["UDP errors, in transit"] >= LARGE  # the control
        assert running.end().outcome == ("ok", "run", "")


# Packets that open a connection and have data in them. The listener keeps each until its connection is
# established, which none is: no answer has as many hops left as the client asks for.
FIRST_PACKETS = """
import errno, json, socket
listener = socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=4096)
listener.setsockopt(41, 49, 1)  # IPV6_RECVPKTINFO
told = []
for _ in range({count}):
    client = socket.socket(socket.AF_INET6)
    client.setblocking(False)
    client.setsockopt(41, 73, 255)  # IPV6_MINHOPCOUNT
    for option in (34, 30):  # TCP_FASTOPEN_NO_COOKIE, TCP_FASTOPEN_CONNECT
        try:
            client.setsockopt(6, option, 1)
            told.append("set")
        except OSError as error:
            told.append(errno.errorcode[error.errno])
    for send in (client.sendto, lambda data, flags, to: client.sendmsg([data], [], flags, to)):
        try:
            send(bytes(60000), 0x20000000, listener.getsockname())  # MSG_FASTOPEN
            told.append("sent")
        except OSError as error:
            told.append(errno.errorcode[error.errno])
    client.close()
print(json.dumps(sorted(set(told))))
"""


def test_no_data_in_the_first_packet_of_a_connection(box: Box) -> None:
    """Nobody counts what such packets take: with three sockets a plugin had ten times its limit."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6 on loopback")
    result = box.run(FIRST_PACKETS.format(count=5), limits={"memory": "32M"})
    assert (result.outcome, result.printed) == (("ok", "run", ""), ["ENOPROTOOPT", "ENOTSUP"])
    # The control. Where net.ipv4.tcp_fastopen is 0, the kernel refuses the rest as well.
    outside = [sys.executable, "-c", FIRST_PACKETS.format(count=1)]
    assert "set" in json.loads(subprocess.check_output(outside, text=True))


def test_closed_connections_do_not_count(box: Box) -> None:
    """The kernel's records of closed connections are small and belong to no process."""
    code = """
import json, socket
servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
for number in range(9000):
    server = servers[number % 3]
    client = socket.create_connection(server.getsockname())
    server.accept()[0].close()
    client.close()
print(json.dumps(number))
"""
    result = box.run(code, limits={"memory": "32M"})
    assert (result.outcome, result.printed) == (("ok", "run", ""), 8999)


def test_empty_sockets_count_little(box: Box) -> None:
    code = """
import json, socket, sys
print("ready", flush=True)
server = socket.create_server(("127.0.0.1", 0))
held = []
for _ in range(900):
    client = socket.create_connection(server.getsockname())
    held += [client, server.accept()[0]]
print(json.dumps(len(held)), flush=True)
sys.stdin.read()
"""
    with box.running(code, limits={"memory": "64M", "open_files": 2048}) as running:
        assert running.line() == "1800"
        assert running.end().outcome == ("ok", "run", "")


def test_a_program_that_connects_to_itself_works(box: Box) -> None:
    result = box.run(ECHO, limits={"memory": "64M"})
    assert result.outcome == ("ok", "run", "")
    assert result.printed == 50 * 8 * 65536
