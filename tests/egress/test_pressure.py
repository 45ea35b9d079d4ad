"""A plugin that opens too much, reads nothing, or leaves its connections half open harms only itself."""

from __future__ import annotations

import json

import pytest

from sandbox.network.egress import EgressLimits
from tests.egress.conftest import Plugin
from tests.internet import API

pytestmark = [pytest.mark.launches, pytest.mark.needs("root")]

# Opens 1000 connections at once, and sees how each begins: with the server's line, or with a reset. It closes
# them only when all have begun. Then it tries one more, until one works.
MANY = """
import json, resource, select, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
address = socket.getaddrinfo("ipv4.example.com", 2525, socket.AF_INET, socket.SOCK_STREAM)[0][4]
watch, lines = select.epoll(), {}
for _ in range(1000):
    line = socket.socket()
    line.setblocking(False)
    line.connect_ex(address)
    lines[line.fileno()] = line
    watch.register(line, select.EPOLLIN)
greeted, refused, tries = [], 0, 0
while len(greeted) + refused < 1000:
    for fd, _ in watch.poll():
        watch.unregister(fd)
        try:
            assert lines[fd].recv(100).startswith(b"220 ")
            greeted.append(lines[fd])
        except (OSError, AssertionError):
            refused += 1
for line in lines.values():
    line.close()
while True:
    with socket.create_connection(address) as line:
        try:
            assert line.recv(100).startswith(b"220 ")
            break
        except (OSError, AssertionError):
            tries += 1
print(json.dumps([len(greeted), refused, tries]))
"""


def test_a_thousand_connections_at_once(plugin: Plugin) -> None:
    most = EgressLimits().connections
    # As many as may wait to be accepted. Beyond that the kernel drops the last step of a handshake without a
    # word: the client takes itself for connected, and one that only reads waits for ever.
    # With so few processes, each may have as many descriptors on a small machine too.
    ran = plugin.python(["ipv4.example.com:2525"], MANY, options=("--limit", "pids=16"))
    assert ran.process.returncode == 0, ran.process.stderr
    greeted, refused, tries = json.loads(ran.stdout)
    assert greeted == most and greeted + refused == 1000
    network = ran.network
    assert network["totals"]["connections"]["allowed"] == most + 1
    reasons = {each["reason"] for each in network["connections"] if each["verdict"] == "refused"}
    assert reasons == {f"is one connection too many: {most} may be open (the connections limit)"}
    # What repeats has a line for the first, second, fourth, eighth … time.
    assert network["totals"]["connections"]["refused"] == refused + tries and not network["gate_ended_early"]
    assert sum(each["verdict"] == "refused" for each in network["connections"]) < 40


# The other connections are in a bad state while each of the lines below is read.
STUCK = """
import json, socket
api = "ipv4.example.com"

def dial(port):
    return socket.create_connection((api, port), 60)

def greeting():
    with dial(2525) as line:
        return line.makefile().readline().strip()

found = {}
# A reader that does not read.
unread = dial(19)
unread.sendall(b"30000000\\n")
found["beside a slow reader"] = greeting()
# A server that does not read: what it takes is bounded.
sink = dial(9)
sink.setblocking(False)
sent = 0
while True:
    try:
        sent += sink.send(bytes(65536))
        assert sent < 100_000_000
    except BlockingIOError:
        break
found["beside a slow server"] = greeting()
# Says nothing, or too little, where the first bytes are judged.
silent, half = dial(443), dial(443)
half.sendall(b"\\x16\\x03\\x01")
found["beside half a greeting"] = greeting()
# Everything arrives in the end, and a half-closed connection still answers.
count = 0
while count < 30000000:
    count += len(unread.recv(1 << 20))
found["read in the end"] = count
with dial(7) as line:
    line.sendall(b"x" * 200000)
    line.shutdown(socket.SHUT_WR)
    found["echoed after half-close"] = sum(map(len, iter(lambda: line.recv(65536), b"")))
print(json.dumps(found), flush=True)
"""


def test_slow_readers_half_open_and_half_closed_connections(plugin: Plugin) -> None:
    ran = plugin.python(["ipv4.example.com:7,9,19,443,2525"], STUCK)
    assert ran.process.returncode == 0, ran.process.stderr
    found = json.loads(ran.stdout)
    assert found.pop("read in the end") == 30_000_000
    assert found.pop("echoed after half-close") == 200_000
    assert len(found) == 3 and set(found.values()) == {f"220 {API}"}
    [echo] = [each for each in ran.network["connections"] if each["port"] == 7]
    assert (echo["sent"], echo["received"], echo["reason"]) == (200_000, 200_000, "")
    # Those that were never finished have their line too.
    assert [each["port"] for each in ran.network["connections"]].count(443) == 2


CLOSE_ONE = """
import socket
for number in range(3):
    with socket.create_connection(("ipv4.example.com", 7), 20) as line:
        try:
            line.sendall(b"x" * 600)
            print(len(line.recv(600, socket.MSG_WAITALL)))
        except ConnectionResetError:
            print("reset")
"""


def test_the_limits_of_the_policy_reach_the_gate(plugin: Plugin) -> None:
    """Each connection moves 1200 bytes, there and back. The control has no such limit."""
    allowed = 'ceiling = "open"\nhosts = ["*:*"]\n'
    control = plugin.python(["ipv4.example.com:7"], CLOSE_ONE, network=allowed)
    assert control.stdout == "600\n" * 3, control.process.stderr
    ran = plugin.python(["ipv4.example.com:7"], CLOSE_ONE, network=allowed + "bytes = 2000")
    assert ran.stdout.startswith("600\n") and not ran.stdout.endswith("600\n"), ran.network
    moved = sum(each["sent"] + each["received"] for each in ran.network["connections"])
    assert moved <= 2000
    reasons = {each["reason"] for each in ran.network["connections"] if each["verdict"] == "refused"}
    assert any("the bytes limit" in reason for reason in reasons)


def test_questions_do_not_push_connections_out_of_the_report(plugin: Plugin) -> None:
    script = """
import socket
def ask(names):
    for name in names:
        try:
            socket.getaddrinfo(name, 1, socket.AF_INET)
        except OSError:
            pass
ask(f"a{n}.junk.example" for n in range(250))
print(socket.create_connection(("ipv4.example.com", 2525), 20).makefile().readline().strip())
ask(f"b{n}.junk.example" for n in range(450))
"""
    ran = plugin.python(["ipv4.example.com:2525"], script)
    assert ran.stdout.startswith("220 "), ran.process.stderr
    assert ran.verdicts() == [("ipv4.example.com", 2525, "allowed")]
    assert len(ran.network["questions"]) == 400 and ran.network["left_out"] > 0
