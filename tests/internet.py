"""Fixtures: a machine with a network of its own, and a small internet behind it.

    host (the runner)  45.33.0.2 ── 45.33.0.3, .53 (resolver), 45.33.1.x and 10.9.9.9 (servers)

The addresses of the servers are taken from public ranges, because the runner dials no others. Nothing of it
can be seen outside of the two namespaces.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.conftest import ROOT, Caller

API, OTHER, PRIVATE, HOST = "45.33.1.10", "45.33.1.20", "10.9.9.9", "45.33.0.2"
API_IPV6 = "2600:1f00::10"
RESOLVER = "45.33.0.53"

NAMES: Mapping[str, Mapping[str, Any]] = {
    "api.example.com": {"A": [API], "AAAA": [API_IPV6]},
    "ipv4.example.com": {"A": [API]},
    "ipv6.example.com": {"AAAA": [API_IPV6]},
    "example.com": {"A": [OTHER]},
    "deep.api.example.com": {"A": [OTHER]},
    "other.example.org": {"A": [OTHER]},
    "alias.example.com": {"CNAME": "ipv4.example.com"},
    "inside.example.com": {"A": [PRIVATE]},
    "alias-inside.example.com": {"CNAME": "inside.example.com"},
    "loop.example.com": {"A": ["127.0.0.1"]},
    "metadata.example.com": {"A": ["169.254.169.254"]},
    "self.example.com": {"A": [HOST]},
    "mixed.example.com": {"A": [PRIVATE, API]},
    "rebinding.example.com": {"A": [[API], [PRIVATE], [PRIVATE]]},
    "many.example.com": {"A": [f"45.33.1.{n}" for n in range(10, 60)]},
    "dead.example.com": {"A": ["45.33.1.99"]},
}
SERVERS = (
    *(
        (kind, address, port)
        for address in (API, OTHER, PRIVATE)
        for kind, port in (("http", 80), ("tls", 443))
    ),
    *((kind, address, port) for address in (API, OTHER, PRIVATE) for kind, port in (("line", 2525),)),
    *(("echo", API, 7), ("sink", API, 9), ("source", API, 19)),
    *(("http", API_IPV6, 80), ("line", API_IPV6, 2525)),
)

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


@dataclasses.dataclass
class Internet:
    host: int  # a process in the namespaces of the machine
    authority: Path  # the certificate of the test authority
    seen: queue.SimpleQueue[dict[str, Any]]

    @property
    def entering(self) -> tuple[str, ...]:
        """A command that starts another one on the machine."""
        return (
            "/usr/bin/nsenter",
            f"--net=/proc/{self.host}/ns/net",
            f"--mount=/proc/{self.host}/ns/mnt",
            "--",
        )

    def on_machine(self, caller: Caller) -> Caller:
        return dataclasses.replace(caller, prefix=(*self.entering, *caller.prefix))

    def connections(self) -> list[str]:
        """The addresses that were dialled since the last look."""
        found = []
        while not self.seen.empty():
            each = self.seen.get()
            if each["seen"] == "connection":
                found.append(each["address"])
        return found

    def questions(self) -> list[str]:
        """The names that were asked for since the last look."""
        found = []
        while not self.seen.empty():
            each = self.seen.get()
            if each["seen"] == "question":
                found.append(each["name"])
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    folder = tmp_path_factory.mktemp("internet")
    folder.chmod(0o755)
    authority = trustme.CA()
    certificate = authority.issue_cert(*NAMES)
    files = {"certificate": folder / "server.pem", "key": folder / "server.key"}
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    (folder / "authority.pem").chmod(0o644)
    certificate.cert_chain_pems[0].write_to_path(str(files["certificate"]))
    certificate.private_key_pem.write_to_path(str(files["key"]))
    resolv = folder / "resolv.conf"
    resolv.write_text(f"nameserver {RESOLVER}\n")
    told = {
        "link": "net0",
        "addresses": [
            *(f"{address}/16" for address in ("45.33.0.3", RESOLVER, API, OTHER)),
            *(f"{PRIVATE}/24", f"{API_IPV6}/64"),
        ],
        "resolvers": [RESOLVER],
        "names": NAMES,
        "servers": SERVERS,
        "tls": {name: str(path) for name, path in files.items()},
    }
    script = str(ROOT / "tests/plugins/internet.py")
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
        seen: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        world = Internet(host.pid, folder / "authority.pem", seen)
        target = str(Path("/etc/resolv.conf").resolve())
        _run(*world.entering, "/bin/mount", "--bind", str(resolv), target)
        _run(*world.entering, sys.executable, "-c", _LINK, str(net.pid))
        net.stdin.write("go\n")
        net.stdin.flush()
        assert net.stdout.readline() == "ready\n"
        threading.Thread(target=_listen, args=(net.stdout, seen), daemon=True).start()
        yield world


@pytest.fixture
def internet(world: Internet) -> Internet:
    """The same for all tests of a module; what was seen before is forgotten."""
    world.connections()
    return world


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _listen(stream: Any, seen: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in stream:
        seen.put(json.loads(line))
