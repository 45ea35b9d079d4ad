"""The host's network: its listening sockets, other machines, and address families that bypass namespaces."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.escape.cage import ProbeCage, split_results

GREETING = b"host"
SHARED = "--unshare-net"  # controls remove this option from the plan


@contextmanager
def _serving(server: socket.socket) -> Iterator[None]:
    """Send a greeting on every connection, and in reply to every datagram, until the context ends."""
    stop_r, stop_w = os.pipe()

    def serve() -> None:
        while True:
            ready, _, _ = select.select([server.fileno(), stop_r], [], [])
            if stop_r in ready:
                return
            if server.type == socket.SOCK_DGRAM:
                _, sender = server.recvfrom(64)
                server.sendto(GREETING, sender)
            else:
                link, _ = server.accept()
                with link:
                    link.send(GREETING)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        os.write(stop_w, b"x")
        thread.join()
        os.close(stop_r)
        os.close(stop_w)


def _listening(stack: ExitStack, family: int, kind: int, address: tuple[str, int] | str) -> socket.socket:
    server = stack.enter_context(closing(socket.socket(family, kind)))
    server.bind(address)
    if kind == socket.SOCK_STREAM:
        server.listen()
    stack.enter_context(_serving(server))
    return server


def test_listening_sockets_of_the_host_cannot_be_reached(cage: ProbeCage) -> None:
    abstract = f"@rt-{os.getpid()}"
    with ExitStack() as stack:
        tcp = _listening(stack, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)).getsockname()[1]
        udp = _listening(stack, socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)).getsockname()[1]
        _listening(stack, socket.AF_UNIX, socket.SOCK_STREAM, "\0" + abstract[1:])
        attacks = {
            "TCP": ("connect", "127.0.0.1", str(tcp)),
            "UDP": ("datagram", "127.0.0.1", str(udp)),
            "an abstract socket": ("connect_unix", abstract),
        }
        if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
            try:
                six = _listening(stack, socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)).getsockname()[1]
                attacks["TCP over IPv6"] = ("connect", "::1", str(six))
            except OSError:
                pass  # the host has no IPv6 address
        inside = {
            name: answer.refused
            for name, answer in zip(attacks, cage.attacks(*attacks.values()), strict=True)
        }
        assert set(inside.values()) <= {"ECONNREFUSED", "ENETUNREACH", "EADDRNOTAVAIL"}
        control = split_results(cage.without("many", json.dumps(list(attacks.values())), remove=[SHARED]))
        assert [answer.done for answer in control] == ["host"] * len(attacks)


def test_other_machines_cannot_be_reached(cage: ProbeCage) -> None:
    assert cage.attack("interfaces").done == ["lo"]
    attempts = cage.attacks(("connect", "192.0.2.1", "80"), ("datagram", "192.0.2.1", "53"))
    assert [answer.refused for answer in attempts] == ["ENETUNREACH", "ENETUNREACH"]
    if len(socket.if_nameindex()) > 1:
        assert len(cage.without("interfaces", remove=[SHARED]).done) > 1


def test_a_plugin_can_connect_to_itself(cage: ProbeCage) -> None:
    assert cage.attack("own_loopback").done == "me"


class Family(NamedTuple):
    number: int
    kind: int
    protocol: int = 0


FAMILIES = {
    "AF_VSOCK": Family(40, socket.SOCK_STREAM),
    "AF_PACKET": Family(17, socket.SOCK_DGRAM),
    "AF_ALG": Family(38, socket.SOCK_SEQPACKET),
    "AF_BLUETOOTH": Family(31, socket.SOCK_RAW),
    "AF_CAN": Family(29, socket.SOCK_RAW),
    "AF_XDP": Family(44, socket.SOCK_RAW),
    "NETLINK_AUDIT": Family(16, socket.SOCK_RAW, 9),
    "NETLINK_KOBJECT_UEVENT": Family(16, socket.SOCK_RAW, 15),
    "NETLINK_SOCK_DIAG": Family(16, socket.SOCK_RAW, 4),
    "NETLINK_NETFILTER": Family(16, socket.SOCK_RAW, 12),
    "NETLINK_GENERIC": Family(16, socket.SOCK_RAW, 16),
}


def test_address_families_that_bypass_the_network_namespace(cage: ProbeCage) -> None:
    words = [("family", str(f.number), str(int(f.kind)), str(f.protocol)) for f in FAMILIES.values()]
    inside = cage.attacks(*words)
    assert {name: answer.refused for name, answer in zip(FAMILIES, inside, strict=True)} == dict.fromkeys(
        FAMILIES, "EAFNOSUPPORT"
    )
    # Without the filter the result depends on the kernel's configuration. Netlink is always built in.
    control = split_results(cage.without("many", json.dumps(words), remove=["--seccomp 10"]))
    open_ones = {name for name, answer in zip(FAMILIES, control, strict=True) if "done" in answer.answer}
    assert len(open_ones) >= 2


def test_the_strict_profile_has_no_sockets_at_all(cage: ProbeCage) -> None:
    words = [("family", "1", "1", "0"), ("family", "2", "1", "0"), ("family", "10", "1", "0")]
    strict = cage.attacks(*words, tables='[plugin.sandbox]\nenabled = true\nseccomp = "strict"\n')
    assert {answer.refused for answer in strict} == {"EAFNOSUPPORT"}
    assert [answer.done for answer in cage.attacks(*words)] == [True] * 3
