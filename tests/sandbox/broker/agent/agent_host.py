"""The launching process of an agent under test: agent_host.py ORDER, with descriptors that ORDER names.

It makes the listener, as the cell's init does, forks the agent, and prints its pid when it serves. It ends
with the agent's exit code.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from base64 import b64decode

from sandbox.broker.agent.service import AgentDescriptors, run_agent
from sandbox.network.ssh import SshHost
from sandbox.spec import Limits


def main() -> None:
    order = json.loads(sys.argv[1])
    keys = {b64decode(key): name for key, name in order["keys"].items()}
    host = SshHost("git.example.com", 22, tuple(map(b64decode, order["hosts"])))
    outside = socket.socket(socket.AF_UNIX)
    outside.connect(order["outside"])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(order["socket"])
    listener.listen(64)
    listener.setblocking(False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = os.fork()
    if agent == 0:
        held = AgentDescriptors(theirs.fileno(), outside.fileno(), order["audit"], order["alive"])
        run_agent(keys, [host], Limits(), held, None)
    theirs.close()
    outside.close()
    os.close(order["audit"])
    socket.send_fds(ours, [b"l"], [listener.fileno()])
    listener.close()
    ready = ours.recv(1)
    sys.stdout.write(f"{agent if ready == b'g' else 0}\n")
    sys.stdout.flush()
    _, status = os.waitpid(agent, 0)
    os._exit(os.waitstatus_to_exitcode(status) % 256)


if __name__ == "__main__":
    main()
