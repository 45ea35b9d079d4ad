"""Decoys: what attacks aim at. Files, sockets that listen, and a process with a secret in its environment.

The program below runs in a process of its own. It removes what it made when its stdin ends, so nothing is
left even if the process that asked for it is killed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Prints what it made as one line of JSON, then answers every connection and datagram until its stdin ends.
_PROGRAM = r"""
import contextlib, json, os, select, shutil, signal, socket, sys, tempfile
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
nonce = sys.argv[1]
made, servers = {"pid": str(os.getpid())}, []
with contextlib.ExitStack() as stack:
    def listen(name, family, kind, address):
        with contextlib.suppress(OSError):
            server = stack.enter_context(socket.socket(family, kind))
            server.bind(address)
            if kind == socket.SOCK_STREAM:
                server.listen()
            server.setblocking(False)
            servers.append(server)
            bound = server.getsockname()
            made[name] = address.replace("\0", "@") if family == socket.AF_UNIX else str(bound[1])
    for name, place in (("folder", "/var/tmp"), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="runner-attack-", dir=place)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            os.chmod(folder, 0o755)
            made[name] = folder
            with open(folder + "/secret", "w") as file:
                file.write(nonce)
            os.chmod(folder + "/secret", 0o644)
    if "folder" in made:
        os.mkdir(made["folder"] + "/open")
        os.chmod(made["folder"] + "/open", 0o777)
        listen("unix", socket.AF_UNIX, socket.SOCK_STREAM, made["folder"] + "/socket")
        with contextlib.suppress(OSError):
            os.chmod(made["folder"] + "/socket", 0o777)
    listen("abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\0runner-attack-" + nonce)
    listen("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
    listen("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
    listen("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0))
    print(json.dumps(made), flush=True)
    while True:
        ready, _, _ = select.select([0, *servers], [], [])
        if 0 in ready and not os.read(0, 4096):
            break
        for server in ready:
            with contextlib.suppress(OSError, AttributeError):
                if server.type == socket.SOCK_DGRAM:
                    server.sendto(b"host", server.recvfrom(64)[1])
                else:
                    with server.accept()[0] as link:
                        link.send(b"host")
"""

_NAME = re.compile(r"\{(\w+)\}")


class Decoys:
    """What was made, by the names that attacks use in braces."""

    def __init__(self, nonce: str, made: Mapping[str, str]) -> None:
        self.nonce = nonce  # also the secret of the files, and a word of the process's command line
        self.variable = secrets.token_hex(16)  # the value of a variable of whoever starts a sandbox
        self.made = {**made, "nonce": nonce, "variable": self.variable, "left": f"left-{nonce}"}

    def fill(self, word: str) -> str | None:
        """A word with the names in braces replaced. None: this machine has no such decoy."""
        if any(name not in self.made for name in _NAME.findall(word)):
            return None
        return _NAME.sub(lambda found: self.made[found[1]], word)


@contextmanager
def make_decoys() -> Iterator[Decoys]:
    nonce = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, nonce],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": os.defpath},
        cwd="/",
        start_new_session=True,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield Decoys(nonce, json.loads(process.stdout.readline() or "{}"))
        finally:
            process.stdin.close()
            process.wait()
