"""The launching process of a gate under test: python gate_host.py ORDER, with descriptors that ORDER names.

It forks the gate, then a process that makes the plugin's network namespace and stays in it. It prints both
pids, and ends with the gate's exit code.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from sandbox.gate.gate import run_gate
from sandbox.network.egress import EgressLimits, EgressPlan
from sandbox.spawn.network import make_network, outside_network, wait_for_gate
from sandbox.spawn.order import NetlinkRequest, NetworkOrder, NetworkRecipe, SocketRequest
from sandbox.speed import codec
from sandbox.speed.libc import get_errno, open_libc

_CLONE_NEWUSER = 0x10000000


def main() -> None:
    order = json.loads(sys.argv[1])
    plan = codec.decode(order["plan"].encode(), (EgressPlan, EgressLimits))
    recipe = codec.decode(order["recipe"].encode(), (NetworkRecipe, NetlinkRequest, SocketRequest))
    assert isinstance(plan, EgressPlan) and isinstance(recipe, NetworkRecipe)
    identity = tuple(order["identity"]) if order["identity"] else None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gate = os.fork()
    if gate == 0:
        run_gate(theirs.fileno(), plan, order["audit"], order["alive"], identity)
    theirs.close()
    os.close(order["audit"])
    plugin = os.fork()
    if plugin == 0:
        _be_plugin(NetworkOrder(recipe, ours.fileno(), outside_network()))
    ours.close()
    _, status = os.waitpid(gate, os.WNOHANG)
    sys.stdout.write(json.dumps([gate, plugin]) + "\n")
    sys.stdout.flush()
    _, status = os.waitpid(gate, 0)
    os.kill(plugin, signal.SIGKILL)
    os._exit(os.waitstatus_to_exitcode(status) % 256)


def _be_plugin(order: NetworkOrder) -> None:
    libc = open_libc()
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    uid, gid = os.getuid(), os.getgid()
    if uid:
        if libc.unshare(_CLONE_NEWUSER) < 0:
            raise OSError(get_errno(), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    make_network(order, libc)
    wait_for_gate(order)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
