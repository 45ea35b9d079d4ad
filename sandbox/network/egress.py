"""Egress by name: the values that the plan, the spawner and the gate share.

The plugin's network namespace has loopback, and local routes for two synthetic ranges. The gate, a process
outside, answers the plugin's DNS questions with synthetic addresses, takes the plugin's connections to them,
and makes the real ones. It knows the name that was meant from the address that was dialled.
"""

from __future__ import annotations

from sandbox.speed.value import NamedTuple

# Every address of these is local in the plugin's namespace. The first is for benchmarks (RFC 2544), the
# second a random unique-local prefix: no name that may be dialled leads to either (addresses.py).
SYNTHETIC_IPV4 = "198.18.128.0/17"
SYNTHETIC_IPV6 = "fd6e:a9c1:52e7:b04d::/64"

DNS_ADDRESS = "127.0.0.1"
DNS_PORT = 53


NOT_LISTED = "is not in its list"  # the reason of a refusal that a longer list would change


class EgressLimits(NamedTuple):
    """Of all connections of one plugin together, unless it says otherwise."""

    connections: int = 256  # open at once
    names: int = 4096  # that have a synthetic address
    idle: float = 600.0  # seconds without a byte in either direction
    dial: float = 10.0  # seconds for resolving and connecting
    first_bytes: float = 30.0  # seconds until the name in clear text has to be there
    bytes: int | None = None  # through all connections, both ways
    rate: int | None = None  # bytes per second, both ways
    cpu: float | None = None  # cores that the gate itself may use: the plugin's own cpu limit
    cpu_time: float | None = None  # seconds of processor time, likewise


class EgressPlan(NamedTuple):
    """What the gate of one plugin lets through. Plain data: part of the plan."""

    rules: tuple[str, ...]  # as sandbox/network/rules.py reads them; ("*:*",) for mode "open"
    private: bool = False  # whether names may lead to private ranges
    limits: EgressLimits = EgressLimits()
    # The name in clear text has to match on these ports: TLS server name, HTTP Host.
    judged_ports: tuple[int, ...] = (80, 443)
    every_port: bool = False  # some rule is for every port: needs the redirection


class GateSockets(NamedTuple):
    """Made in the plugin's network namespace, served by the gate. Descriptors."""

    dns_udp: int
    dns_tcp: int
    listeners: tuple[int, ...]  # one or more for each port, IPv4 and IPv6; getsockname() tells the port
    redirected: tuple[int, ...] = ()  # SO_ORIGINAL_DST tells what was dialled


class AuditLine(NamedTuple):
    """One connection or one DNS question, allowed or refused."""

    kind: str  # "dns" | "connect"; "gate" in live events alone, if the gate ended early
    name: str  # the host that was meant, normalised; the address where there is no name
    port: int  # 0 for dns
    verdict: str  # "allowed" | "refused" | "failed": allowed, and not reachable
    rule: str = ""  # the rule that allowed it
    reason: str = ""  # why it was refused or failed, the second half of a sentence
    address: str = ""  # that was dialled
    sent: int = 0  # bytes, by the plugin
    received: int = 0
    seconds: float = 0.0
    times: int = 1  # what was refused or asked again has a line for the first, second, fourth, eighth time
