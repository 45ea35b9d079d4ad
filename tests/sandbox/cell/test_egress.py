"""The network namespace of a plugin with a list of hosts, and the process that serves it from outside.

The gate here is a small one of the tests: it says which address was dialled, and judges nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from typing import Any, NoReturn, cast

import pytest

from sandbox.cell.beside import AuditMeter
from sandbox.cell.egress import GateProcess
from sandbox.spawn.order import NetworkOrder, NetworkRecipe
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox import cages

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.both_callers]

PYTHON = "/usr/bin/python3"
HOSTS = ["example.com:443,8080", "9.9.9.9:443", "10.0.0.0/8:443"]
cage = cages.cage


def small_gate(channel: int, plan: Any, audit: int, alive: int, identity: Any, broker: int) -> NoReturn:
    import json
    import os
    import select
    import socket

    from sandbox.gate.flows import read_destination
    from sandbox.network.sockets import receive_sockets, send_ready

    sockets = receive_sockets(channel)
    if identity is not None:
        os.setresgid(identity[1], identity[1], identity[1])
        os.setresuid(identity[0], identity[0], identity[0])
    held = {fd: socket.socket(fileno=fd) for fd in (*sockets.listeners, *sockets.redirected)}
    resolver = socket.socket(fileno=sockets.dns_udp)
    send_ready(channel)
    while True:
        ready, _, _ = select.select([alive, sockets.dns_udp, *held], [], [])
        if alive in ready:
            os._exit(0)
        for each in ready:
            if each == sockets.dns_udp:
                question, asker = resolver.recvfrom(512)
                resolver.sendto(b"answer to " + question, asker)
                continue
            link, _ = held[each].accept()
            with link:
                dialled = read_destination(link, each in sockets.redirected)
                link.sendall(f"{dialled[0]} {dialled[1]}".encode())
            line = {"kind": "connect", "name": dialled[0], "port": dialled[1], "verdict": "allowed"}
            os.write(audit, json.dumps(line).encode() + b"\n")


def behind_gate(given: dict[str, Any], fault: str) -> dict[str, Any]:
    """Launch with the small gate, or one that has a fault. Returns what was printed, the audit lines, and
    the owner of the network namespace."""
    import fcntl
    import os
    import signal
    from contextlib import contextmanager

    from sandbox.cell import egress
    from sandbox.plan.layers import LayerUnavailable
    from sandbox.spawn import network as network_steps

    def dead_gate(channel: int, plan: Any, audit: int, alive: int, identity: Any, broker: int) -> NoReturn:
        import gc
        import json

        from sandbox.cell.contents import Contents

        held = [each for each in gc.get_objects() if isinstance(each, Contents)]
        reason = f"no filter; {plan.limits.cpu} cores, {plan.limits.cpu_time} s, {held}"
        os.write(audit, json.dumps({"kind": "fault", "reason": reason}).encode() + b"\n")
        os._exit(1)

    def silent_gate(channel: int, plan: Any, audit: int, alive: int, identity: Any, broker: int) -> NoReturn:
        os.read(alive, 1)  # until its end
        os._exit(0)

    changed: Any = egress
    changed._run_gate = {"dead": dead_gate, "silent": silent_gate}.get(fault, small_gate)
    if fault == "silent":
        changed = network_steps
        changed._GATE_SECONDS = 0.1
    said = os.memfd_create("said")
    saved = os.dup(1)
    os.dup2(said, 1)
    told: dict[str, Any] = {}
    opened = set(os.listdir("/proc/self/fd"))
    try:
        with contextmanager(cage)(given) as cell:
            assert cell.gate is not None
            if fault == "killed":
                os.kill(cell.gate.pid, signal.SIGKILL)
                os.waitid(os.P_PID, cell.gate.pid, os.WEXITED | os.WNOWAIT)
            network = os.open(f"/proc/{cell.pid}/ns/net", os.O_RDONLY)
            try:
                owner = fcntl.ioctl(network, 0xB701)  # NS_GET_USERNS
                told["owner"] = [os.fstat(owner).st_ino, os.stat("/proc/self/ns/user").st_ino]
                told["init"] = os.stat(f"/proc/{cell.pid}/ns/user").st_ino
                os.close(owner)
            except PermissionError:
                told["owner"] = None  # a namespace above ours
            finally:
                os.close(network)
            if given["request"]["args"][-1] == "wait":
                os.close(given["release"])
            told["code"] = cell.wait().code
            log = cell.gate.log
        told["audit"] = [[line.name, line.port] for line in log.lines]
    except LayerUnavailable as missing:
        told["refused"] = [missing.layer, str(missing)]
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    told["leaked"] = sorted(set(os.listdir("/proc/self/fd")) - opened - {str(said)})
    os.lseek(said, 0, os.SEEK_SET)
    told["said"] = os.read(said, 1 << 16).decode()
    return told


PROBE = """
import errno, json, socket, subprocess, sys
socket.setdefaulttimeout(20)
def dial(target):
    host, port = target
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as link:
            link.connect((host, port))
            return link.recv(100).decode()
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
def send(target):
    host, port = target
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
            link.connect((host, port))
            link.send(b"x")
            return link.recv(100).decode()
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
def ping(_):
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP).close()
        return "made"
    except OSError as error:
        return errno.errorcode[error.errno]
def serve(port):
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port)); server.listen()
            with socket.create_connection(("127.0.0.1", port)) as link:
                peer, _ = server.accept(); peer.send(b"own"); peer.close()
                return link.recv(10).decode()
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
def read(path):
    return open(path).read()
acts = {"dial": dial, "send": send, "ping": ping, "serve": serve, "read": read}
print(json.dumps([acts[name](what) for name, what in json.loads(sys.argv[1])]))
"""


def probe(caller: Caller, acts: list[Any], fault: str = "", **more: Any) -> dict[str, Any]:
    request = cages.request(PYTHON, "-c", PROBE, json.dumps(acts))
    given = cages.order(request, **{"network": "allowlist", "hosts": HOSTS, **more})
    result: dict[str, Any] = elsewhere.run(caller, behind_gate, given, fault, using=(cage, small_gate))
    result["answers"] = json.loads(result["said"]) if result["said"].startswith("[") else result["said"]
    return result


def test_what_is_listed_reaches_the_gate_and_nothing_else_does(runner_as: Caller) -> None:
    reached: list[tuple[Any, str]] = [
        (["dial", ["198.18.128.7", 443]], "198.18.128.7 443"),
        (["dial", ["198.18.255.255", 8080]], "198.18.255.255 8080"),
        (["dial", ["fd6e:a9c1:52e7:b04d::7", 443]], "fd6e:a9c1:52e7:b04d::7 443"),
        (["dial", ["9.9.9.9", 443]], "9.9.9.9 443"),
        (["dial", ["10.1.2.3", 8080]], "10.1.2.3 8080"),
        (["send", ["127.0.0.1", 53]], "answer to x"),
        (["serve", 3000], "own"),
    ]
    refused: list[tuple[Any, str]] = [
        (["dial", ["198.18.128.7", 80]], "ECONNREFUSED"),  # a port that is not listed
        (["dial", ["9.9.9.10", 443]], "ENETUNREACH"),  # an address that is not listed
        (["dial", ["198.18.127.255", 443]], "ENETUNREACH"),
        (["dial", ["192.168.1.1", 443]], "ENETUNREACH"),
        (["dial", ["169.254.169.254", 80]], "ENETUNREACH"),
        (["dial", ["2606:4700::1111", 443]], "ENETUNREACH"),
        (["dial", ["127.0.0.1", 22]], "ECONNREFUSED"),
        (["send", ["198.18.128.7", 443]], "ECONNREFUSED"),  # UDP
        (["send", ["8.8.8.8", 53]], "ENETUNREACH"),
        (["ping", None], "EPROTONOSUPPORT"),  # by seccomp; without it by a sysctl
        (["serve", 8080], "EADDRINUSE"),  # the plugin cannot listen on a port of its list
    ]
    found = probe(runner_as, [act for act, _ in (*reached, *refused)])
    assert found["answers"] == [answer for _, answer in (*reached, *refused)]
    assert found["audit"] == [act[1] for act, _ in reached[:5]]
    assert (found["code"], found["leaked"]) == (0, [])


def test_the_files_of_the_resolver_are_ours(runner_as: Caller) -> None:
    paths = ["/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/hosts"]
    resolver, switch, hosts = probe(runner_as, [["read", path] for path in paths])["answers"]
    assert resolver.splitlines()[0] == "nameserver 127.0.0.1"
    assert "hosts: files dns" in switch.splitlines()
    assert hosts == "127.0.0.1 localhost\n::1 localhost\n"


def test_no_namespace_of_the_plugin_owns_its_network(runner_as: Caller) -> None:
    found = probe(runner_as, [])
    if runner_as.uid == 0:
        owner, ours = found["owner"]
        assert owner == ours  # root's own: the initial one
    else:
        owner, ours = found["owner"]
        assert owner == found["init"] != ours  # of the cell's init; the plugin is in one below it


@pytest.mark.needs("root")
def test_root_in_a_container_has_its_network_made_by_the_cells_init(runner_as_root: Caller) -> None:
    """Without the capabilities for a network namespace of root's own, it is made as for everybody else."""
    less = "-sys_admin,-net_admin"
    weaker = Caller(
        "root",
        0,
        runner_as_root.home,
        ("/usr/bin/setpriv", f"--bounding-set={less}", f"--inh-caps={less}"),
        runner_as_root.python,
        runner_as_root.environ,
    )
    found = probe(weaker, [["dial", ["198.18.128.7", 443]], ["dial", ["9.9.9.10", 443]]])
    assert found["answers"] == ["198.18.128.7 443", "ENETUNREACH"]
    owner, ours = found["owner"]
    assert owner == found["init"] != ours


# The attacks run with the widest filter, and each with all capabilities that a user namespace gives.
ATTACKS = """
import ctypes, json, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def tell(value):
    return "done" if value >= 0 else os.strerror(ctypes.get_errno())
def route(message):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(message)
        answer = kernel.recv(4096)
    return os.strerror(-struct.unpack_from("=i", answer, 16)[0])
def up(flags):
    body = struct.pack("=BxHiII", 0, 0, 1, flags, 1)
    return struct.pack("=IHHII", 16 + len(body), 16, 5, 1, 0) + body
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP).close()
    ping = "done"
except OSError as error:
    ping = error.strerror
told = {"ping": ping, "user": tell(libc.unshare(0x10000000))}
told["down"] = route(up(0))
address = struct.pack("=HH4s", 8, 1, socket.inet_aton("8.8.0.0")) + struct.pack("=HHi", 8, 4, 1)
body = struct.pack("=8BI", 2, 16, 0, 0, 255, 3, 254, 2, 0) + address
told["route"] = route(struct.pack("=IHHII", 16 + len(body), 24, 0x405, 1, 0) + body)
try:
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w") as file:
        file.write("0")
    told["sysctl"] = "done"
except OSError as error:
    told["sysctl"] = error.strerror
told["net"] = tell(libc.unshare(0x40000000))
with socket.socket() as link:
    link.settimeout(60)
    try:
        link.connect(("198.18.128.7", 443))
        told["after"] = link.recv(100).decode()
    except OSError as error:
        told["after"] = error.strerror
print(json.dumps(told))
"""


def test_the_plugin_cannot_change_its_network(runner_as: Caller) -> None:
    request = cages.request(PYTHON, "-c", ATTACKS)
    given = cages.order(request, network="allowlist", hosts=HOSTS, seccomp="compat")
    found = elsewhere.run(runner_as, behind_gate, given, "", using=(cage, small_gate))
    told = json.loads(found["said"])
    assert told["down"] == told["route"] == "Operation not permitted"
    assert told["sysctl"] in ("Read-only file system", "Permission denied")
    assert told["ping"] == "Protocol not supported"
    # Without a namespace of its own it is still connected to the gate; in one of its own to nothing.
    assert (told["net"] == "done") == (told["after"] == "Network is unreachable")
    assert told["after"] in ("198.18.128.7 443", "Network is unreachable")


@pytest.mark.needs("root")
@pytest.mark.launches
def test_the_same_acts_succeed_where_nothing_forbids_them() -> None:
    """The control of the test above: root in a network namespace that it owns."""
    act = ATTACKS.replace("libc.unshare(0x10000000)", "0")
    done = subprocess.run(["unshare", "--net", PYTHON, "-c", act], capture_output=True, timeout=60)
    told = json.loads(done.stdout)
    assert (told["down"], told["route"], told["net"]) == ("Success", "Success", "done")


def test_every_port_is_redirected(runner_as: Caller) -> None:
    acts = [
        (["dial", ["198.18.128.7", 1]], "198.18.128.7 1"),
        (["dial", ["198.18.128.7", 443]], "198.18.128.7 443"),
        (["dial", ["198.18.128.7", 65535]], "198.18.128.7 65535"),
        (["dial", ["fd6e:a9c1:52e7:b04d::7", 5432]], "fd6e:a9c1:52e7:b04d::7 5432"),
        (["dial", ["127.0.0.1", 443]], "ECONNREFUSED"),  # its own loopback is left alone
        (["dial", ["127.0.0.1", 1]], "127.0.0.1 1"),  # the listener itself, which knows it
        (["serve", 4430], "own"),
        (["dial", ["9.9.9.9", 443]], "ENETUNREACH"),
        (["send", ["198.18.128.7", 443]], "ECONNREFUSED"),
    ]
    found = probe(runner_as, [act for act, _ in acts], network="open", hosts=[])
    assert found["answers"] == [answer for _, answer in acts]


def test_a_gate_that_does_not_get_ready_keeps_the_plugin_from_starting(runner_as: Caller) -> None:
    found = probe(runner_as, [["serve", 3000]], "silent")
    assert found["refused"] == ["network", "could not be served by the gate: Connection timed out"]
    assert (found["said"], found["leaked"]) == ("", [])


def test_a_gate_that_cannot_start_keeps_the_plugin_from_starting(runner_as: Caller) -> None:
    """It has the plugin's limits of processor time, and none of its secrets."""
    found = probe(
        *(runner_as, [["serve", 3000]], "dead"),
        limits={"cpu": 0.5, "cpu_time": 7.0},
        contents=[{"key": "a secret of the plugin"}],
    )
    assert found["refused"][0] == "network"
    held = "[<contents of 0 secrets and 0 files>]"
    assert found["refused"][1].endswith(f"(the gate says: no filter; 0.5 cores, 7.0 s, {held})")
    assert (found["said"], found["leaked"]) == ("", [])


def test_without_its_gate_connections_are_refused(runner_as: Caller) -> None:
    """The plugin starts, its gate is killed, then the plugin connects."""
    acts = [["dial", ["198.18.128.7", 443]], ["send", ["127.0.0.1", 53]], ["dial", ["9.9.9.9", 443]]]
    found = elsewhere.run(
        runner_as,
        without_gate,
        acts,
        PYTHON,
        PROBE,
        HOSTS,
        cages.order(cages.request(PYTHON)),
        using=(cage, small_gate, behind_gate),
    )
    assert json.loads(found["said"]) == ["ECONNREFUSED"] * 3


def without_gate(
    acts: list[Any], python: str, probe: str, hosts: list[str], given: dict[str, Any]
) -> dict[str, Any]:
    import json
    import os

    read, write = os.pipe()
    os.dup2(read, 0)
    script = "import sys; sys.stdin.read(); exec(sys.argv[2])"
    given["request"]["args"] = ["-c", script, json.dumps(acts), probe, "wait"]
    given |= {"network": "allowlist", "hosts": hosts, "release": write}
    return behind_gate(given, "killed")


def test_the_end_of_the_gate_is_noticed_once() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    order = NetworkOrder(NetworkRecipe((), ()), -1, "")
    with socket.socket() as channel:
        gate = GateProcess(os.getpid(), read, -1, order, cast(Any, channel))
    meter = AuditMeter(gate)
    os.write(write, b'{"kind":"dns","name":"example.com","port":0,"verdict":"allowed"}\n')
    assert meter.look(dict(meter.interest()), 0.0) is None
    assert ([line.name for line in gate.log.lines], gate.log.gate_ended_early) == (["example.com"], False)
    os.close(write)
    assert meter.look(dict(meter.interest()), 0.0) is None
    assert gate.log.gate_ended_early and not meter.interest()  # an end is readable for ever
    os.close(read)
    os.close(gate.pidfd)


def test_the_gates_delivery_is_waited_for_until_somebody_says_stop() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    stop, stopping = os.pipe()
    told, alive = os.pipe()
    order = NetworkOrder(NetworkRecipe((), ()), -1, "")
    with socket.socket() as channel:
        gate = GateProcess(os.getpid(), read, alive, order, cast(Any, channel))
    gate.dismiss()
    assert os.read(told, 10)  # a byte: deliver; an end would mean at once
    os.write(stopping, b"x")
    gate.drain(1e6, (stop,))
    os.write(write, b'{"kind":"fault","reason":"no memory"}\n')
    os.close(write)
    gate.drain(1e6)  # to its end
    events: list[Any] = []
    gate.log.on_line = events.append
    gate.log.end_early()
    assert gate.log.gate_ended_early and "no memory" in events[0].reason and events[0].kind == "gate"
    for fd in (read, stop, stopping, told, alive, gate.pidfd):
        os.close(fd)
