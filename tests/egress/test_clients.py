"""Clients of all kinds: HTTP/2, TLS names, a static program, and those that try to change their network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.egress.conftest import Plugin
from tests.internet import API, TWO

pytestmark = [pytest.mark.launches, pytest.mark.needs("root")]


@pytest.mark.needs("curl")
def test_http_2_inside_tls(plugin: Plugin) -> None:
    authority = plugin.internet.authority.read_text()
    script = "import os, sys\nopen('/tmp/ca', 'w').write(sys.argv[1])\n"
    script += "os.execv('/usr/bin/curl', ['curl', '-sS', '-m', '20', '--http2', '--cacert', '/tmp/ca',"
    script += " '-w', ' by HTTP/%{http_version}', 'https://two.example.com/x', 'https://two.example.com/y'])"
    ran = plugin.python(["two.example.com"], script, authority)
    assert ran.stdout == "two by HTTP/2" * 2, ran.process.stderr
    [connection] = ran.network["connections"]
    assert (connection["address"], connection["verdict"]) == (TWO, "allowed")


TLS = """
import json, socket, ssl, sys
found = []
for name in json.loads(sys.argv[1]):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("ipv4.example.com", 443), 20) as line:
        try:
            with context.wrap_socket(line, server_hostname=name) as safe:
                found.append(safe.version())
        except OSError:
            found.append("refused")
print(json.dumps(found))
"""


def test_the_server_name_has_to_be_the_name_that_was_dialled(plugin: Plugin) -> None:
    """An allowed name, an allowed name that was not dialled, a foreign name, none, an address."""
    names = ["ipv4.example.com", "other.example.org", "attacker.example", None, API]
    ran = plugin.python(["ipv4.example.com", "other.example.org"], TLS, json.dumps(names))
    first, *others = json.loads(ran.stdout)
    assert first.startswith("TLSv1") and others == ["refused"] * 4
    told = [(each["verdict"], each["reason"]) for each in ran.network["connections"]]
    assert [verdict for verdict, _ in told] == ["allowed"] + ["refused"] * 4, told
    assert "other.example.org in clear text" in told[1][1] and "attacker.example" in told[2][1]


# Sends a DNS question itself, as Go programs do, and dials the first answer.
STATIC = r"""
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static const char question[] =
    "\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04ipv4\x07" "example\x03" "com\x00\x00\x01\x00\x01";
int main(void) {
    char got[512];
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(53)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int dns = socket(AF_INET, SOCK_DGRAM, 0);
    if (connect(dns, (struct sockaddr *)&to, sizeof to) || write(dns, question, sizeof question - 1) < 0)
        return 1;
    ssize_t size = read(dns, got, sizeof got);
    if (size < (ssize_t)sizeof question + 15) return 2;
    memcpy(&to.sin_addr, got + size - 4, 4);
    to.sin_port = htons(2525);
    int line = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(line, (struct sockaddr *)&to, sizeof to)) return 3;
    size = read(line, got, sizeof got);
    return size <= 0 || fwrite(got, 1, (size_t)size, stdout) != (size_t)size;
}
"""


@pytest.mark.needs("gcc")
def test_a_static_program(plugin: Plugin) -> None:
    source = plugin.write(plugin.folder / "client.c", STATIC)
    program = plugin.folder / "client"
    subprocess.run(["gcc", "-static", "-o", program, source], check=True, capture_output=True)
    program.chmod(0o755)
    ran = plugin(["ipv4.example.com:2525"], "./client")
    assert (ran.process.returncode, ran.stdout) == (0, f"220 {API}\n"), ran.process.stderr


# Tries to change the network it is in, and to see packets. Prints what came of each.
CHANGE = r"""
import json, os, socket, struct

def ask(protocol, *messages):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as kernel:
        kernel.settimeout(60)
        kernel.send(b"".join(messages))
        reply = kernel.recv(65536)
    code = struct.unpack_from("=i", reply, 16)[0]
    return os.strerror(-code) if code else "done"

def message(kind, flags, body):
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body

def attribute(kind, value):
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)

ACK, CREATE = 0x5, 0x405
loopback = socket.if_nametoindex("lo")
host_route = struct.pack("=BBBBBBBBI", 2, 32, 0, 0, 255, 4, 254, 2, 0)  # local to this host
where = attribute(1, socket.inet_aton("45.33.1.20")) + attribute(4, struct.pack("=I", loopback))
address = struct.pack("=BBBBI", 2, 32, 0, 254, loopback) + attribute(2, socket.inet_aton("45.33.1.20"))
link_up = struct.pack("=BBHiII", 0, 0, 0, loopback, 1, 1)
table = struct.pack("=BBH", 1, 0, 0) + attribute(1, b"mine\0")
begin, end = (message(kind, 1, struct.pack(">BBH", 0, 0, 10)) for kind in (16, 17))

def raw(family, kind, protocol=0):
    socket.socket(family, kind, protocol).close()
    return "done"

attempts = {
    "a route": lambda: ask(0, message(24, CREATE, host_route + where)),
    "an address": lambda: ask(0, message(20, CREATE, address)),
    "a link": lambda: ask(0, message(16, ACK, link_up)),
    "a table of nftables": lambda: ask(12, begin, message(10 << 8, CREATE, table), end),
    "packets": lambda: raw(socket.AF_PACKET, socket.SOCK_RAW, 0x300),
    "raw TCP": lambda: raw(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP),
    "any address as one's own": lambda: socket.socket().setsockopt(socket.SOL_IP, 19, 1) or "done",
}
found = {}
for name, attempt in attempts.items():
    try:
        found[name] = attempt()
    except OSError as error:
        found[name] = error.strerror
print(json.dumps(found))
"""


def test_a_plugin_cannot_change_its_network(plugin: Plugin) -> None:
    argv = ["/usr/bin/unshare", "--net", "--", sys.executable, "-I", "-c", CHANGE]
    control = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    assert set(control.values()) == {"done"}, control  # with the rights for it, each works
    # The second list needs the redirection by nftables.
    for hosts in (["ipv4.example.com:2525"], ["ipv4.example.com:*"]):
        found = json.loads(plugin.python(hosts, CHANGE).stdout)
        assert set(found) == set(control) and "done" not in found.values(), found


ABSTRACT = """
import socket, sys
line = socket.socket(socket.AF_UNIX)
try:
    line.connect("\\0" + sys.argv[1])
    print(line.recv(10).decode())
except OSError as error:
    print(error.strerror)
"""

ABSTRACT_SERVER = """
import socket, sys
server = socket.create_server("\\0" + sys.argv[1], family=socket.AF_UNIX)
print("up", flush=True)
while True:
    line, _ = server.accept()
    line.sendall(b"secret")
    line.close()
"""


def test_abstract_sockets_of_the_machine_are_not_there(plugin: Plugin) -> None:
    name = f"egress-{os.getpid()}"
    enter = [*plugin.internet.entering(), sys.executable, "-I", "-c"]
    with subprocess.Popen([*enter, ABSTRACT_SERVER, name], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == b"up\n"
            control = subprocess.run([*enter, ABSTRACT, name], capture_output=True, text=True)
            assert control.stdout == "secret\n"
            ran = plugin.python(["ipv4.example.com:2525"], ABSTRACT, name)
        finally:
            server.kill()
    assert ran.stdout == "Connection refused\n"


# Sends each message to the name service of the cage: as a datagram, and over TCP with and without its length.
# Then it asks for a name as everybody does.
MALFORMED = r"""
import os, random, socket, struct
draw = random.Random(15)
header = struct.pack(">HHHHHH", 1, 0x100, 1, 0, 0, 0)
name = b"\4ipv4\7example\3com\0"
messages = [
    b"", b"\0", header, header[:11], struct.pack(">HHHHHH", 1, 0x100, 65535, 65535, 65535, 65535) + name,
    header + b"\xc0\x0c\0\1\0\1",  # a name that begins with itself
    header + b"\xc0\xff\0\1\0\1", header + b"\x3f" + b"a" * 62, header + b"\x80abc\0\0\1\0\1",
    header + b"\1a" * 200 + b"\0\0\1\0\1",  # too long
    header + b"\3a.b\3com\0\0\1\0\1", header + b"\3a\0b\3com\0\0\1\0\1", header + name + b"\0\xfc\0\1",
    struct.pack(">HHHHHH", 1, 0x8180, 1, 1, 0, 0) + name + b"\0\1\0\1",  # an answer
    bytes(4096), b"\xff" * 60000, header + name + b"\0\1\0\1" + b"x" * 5000,
    *(draw.randbytes(draw.randrange(600)) for _ in range(200)),
    *(header + draw.randbytes(draw.randrange(80)) for _ in range(200)),
]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
    line.connect(("127.0.0.1", 53))
    for message in messages:
        line.send(message)
for message in messages[:40]:
    for whole in (message, len(message).to_bytes(2, "big") + message, b"\xff\xff" + message):
        with socket.create_connection(("127.0.0.1", 53), 20) as line:
            try:
                line.sendall(whole)
                line.shutdown(socket.SHUT_WR)
                while line.recv(65536):
                    pass
            except OSError:  # it was reset, at any moment
                pass
with socket.create_connection(("ipv4.example.com", 2525), 20) as line:
    print(line.makefile().readline().strip())
"""


def test_malformed_questions_are_dropped_and_the_next_one_is_answered(plugin: Plugin) -> None:
    ran = plugin.python(["ipv4.example.com:2525"], MALFORMED)
    assert ran.stdout == f"220 {API}\n", ran.process.stderr
    assert set(plugin.internet.questions()) == {"ipv4.example.com"}
    assert not ran.network["gate_ended_early"]


def test_each_of_two_plugins_at_once_has_its_own_list(plugin: Plugin, tmp_path: Path) -> None:
    """Each stays until both have tried everything."""
    script = "import json, socket, sys\nfound = []\nfor name in sys.argv[1:]:\n    try:\n"
    script += "        with socket.create_connection((name, 2525), 20) as line:\n"
    script += "            found.append(line.makefile().readline().strip())\n"
    script += "    except OSError: found.append('refused')\n"
    script += "print(json.dumps(found), flush=True)\nsys.stdin.read()\n"
    names = ["ipv4.example.com", "other.example.org"]
    processes = []
    try:
        for number, name in enumerate(names):
            entry = {
                "command": "/usr/bin/python3",
                "args": ["-I", "-c", script, *names],
                "x-sandbox": {"network": [f"{name}:2525"]},
            }
            manifest = plugin.write(
                plugin.folder / str(number) / "mcp.json", json.dumps({"mcpServers": {"demo": entry}})
            )
            policy = plugin.policy('ceiling = "allowlist"\nhosts = ["*:*"]')
            processes.append(plugin.caller.start("exec", "--policy", policy, manifest))
        found = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
    finally:
        for process in processes:
            process.communicate()
    assert found == [[f"220 {API}", "refused"], ["refused", "220 45.33.1.20"]]
