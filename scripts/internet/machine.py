"""A machine with a network of its own, and a small internet behind it, for tests and measurements.

    host (the runner)  45.33.0.2 ── 45.33.0.3, .53 (resolver), 45.33.1.x and 10.9.9.9 (servers)

The addresses of the servers are taken from public ranges, because the runner dials no others. Nothing of it
can be seen outside of the two namespaces. Making them needs root.
"""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HOST, RESOLVER = "45.33.0.2", "45.33.0.53"
_GATEWAY = "45.33.0.3"

_LINK = """
import sys
from pyroute2 import IPRoute
with IPRoute() as kernel:
    kernel.link("add", ifname="host0", kind="veth", peer={"ifname": "net0", "net_ns_pid": int(sys.argv[1])})
    for name in ("lo", "host0"):
        [number] = kernel.link_lookup(ifname=name)
        kernel.link("set", index=number, state="up")
    kernel.addr("add", index=number, address="45.33.0.2", prefixlen=16)
    kernel.addr("add", index=number, address="2600:1f00::2", prefixlen=64, flags=2)
    kernel.route("add", dst="10.9.9.0/24", oif=number)
"""

Seen = dict[str, Any]


@dataclass
class Internet:
    host: int  # a process in the namespaces of the machine
    commands: IO[str]  # to the servers
    seen: queue.SimpleQueue[Seen]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def entering(self, *options: str) -> tuple[str, ...]:
        """A command that starts another one on the machine. `options` are nsenter's."""
        return (
            "/usr/bin/nsenter",
            f"--net=/proc/{self.host}/ns/net",
            f"--mount=/proc/{self.host}/ns/mnt",
            *options,
            "--",
        )

    def look(self) -> list[Seen]:
        """What the servers saw since the last look."""
        number, found = next(self._numbers), []
        self.commands.write(f"{number}\n")
        self.commands.flush()
        while (each := self.seen.get(timeout=60)) != {"seen": "command", "line": str(number)}:
            found.append(each)
        return found

    def connections(self) -> list[str]:
        """The addresses that were dialled since the last look."""
        return [each["address"] for each in self.look() if each["seen"] == "connection"]

    def requests(self) -> list[str]:
        """The first line of each HTTP request since the last look."""
        return [each["line"] for each in self.look() if each["seen"] == "request"]

    def questions(self) -> list[str]:
        """The names that were asked for since the last look."""
        return [each["name"] for each in self.look() if each["seen"] == "question"]


@contextmanager
def make_internet(
    folder: Path,
    addresses: Sequence[str],
    names: Mapping[str, Mapping[str, Any]],
    servers: Sequence[tuple[str, str, int]],
    tls: Mapping[str, str],
) -> Iterator[Internet]:
    """`addresses` have the length of their network. `servers`: kind, address and port. `tls`: the files
    `certificate` and `key`."""
    resolv = folder / "resolv.conf"
    resolv.write_text(f"nameserver {RESOLVER}\n")
    resolv.chmod(0o644)
    told = {
        "link": "net0",
        "addresses": [f"{_GATEWAY}/16", f"{RESOLVER}/16", *addresses],
        "resolvers": [RESOLVER],
        "names": names,
        "servers": servers,
        "tls": tls,
    }
    script = str(Path(__file__).with_name("servers.py"))
    with ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                ["/usr/bin/unshare", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        net = start("--net", "--", sys.executable, script, json.dumps(told))
        host = start(
            "--net", "--mount", "--propagation", "private", "--", "/bin/sh", "-c", "echo up; read line"
        )
        assert net.stdin and net.stdout and host.stdout
        assert host.stdout.readline() == "up\n"
        internet = Internet(host.pid, net.stdin, queue.SimpleQueue())
        target = str(Path("/etc/resolv.conf").resolve())
        _run(*internet.entering(), "/bin/mount", "--bind", str(resolv), target)
        _run(*internet.entering(), sys.executable, "-c", _LINK, str(net.pid))
        net.stdin.write("go\n")
        net.stdin.flush()
        assert net.stdout.readline() == "ready\n"
        threading.Thread(target=_listen, args=(net.stdout, internet.seen), daemon=True).start()
        yield internet


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _listen(stream: IO[str], seen: queue.SimpleQueue[Seen]) -> None:
    for line in stream:
        seen.put(json.loads(line))
