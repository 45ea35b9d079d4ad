"""Egress by name: the values that the plan, the spawner and the gate share.

The plugin's network namespace has loopback, and local routes for two synthetic ranges. The gate, a process
outside of it, answers the plugin's DNS questions with synthetic addresses, accepts the plugin's connections
to them, and makes the real ones. From the synthetic address it knows the name.
"""

from __future__ import annotations

from sandbox.network.credentials import BrokerPlan
from sandbox.spec import NAME_SERVER
from sandbox.speed.value import NamedTuple

# All of these addresses are local in the plugin's namespace. The first range is for benchmarks (RFC 2544),
# the second a random unique-local prefix: no real address that may be dialled is in either (addresses.py).
SYNTHETIC_IPV4 = "198.18.128.0/17"
SYNTHETIC_IPV6 = "fd6e:a9c1:52e7:b04d::/64"

DNS_ADDRESS, DNS_PORT = NAME_SERVER

# What an entry localhost:PORT is about: in the plugin's namespace, and on this machine.
LOOPBACK = ("127.0.0.1", "::1")

# Reasons of a refusal that a longer list would change.
NOT_LISTED = "is not in its list"
NO_NETWORK = "was refused: the plugin has no network"
OWN_LOOPBACK = "is the plugin's own loopback, and nobody serves this port"


class EgressLimits(NamedTuple):
    """Limits of one plugin's egress. The seconds are those of each connection, the others of all together."""

    connections: int = 256  # open at once
    names: int = 4096  # with a synthetic address
    idle: float = 600.0  # seconds without a byte in either direction
    dial: float = 10.0  # seconds for resolving and connecting
    first_bytes: float = 30.0  # seconds until the name in clear text has arrived
    bytes: int | None = None  # through all connections, both directions
    rate: int | None = None  # bytes per second, both directions
    cpu: float | None = None  # cores that the gate may use: the plugin's cpu limit
    cpu_time: float | None = None  # seconds of processor time for the gate: the plugin's cpu_time limit


class EgressPlan(NamedTuple):
    """What the gate of one plugin allows. Plain data, part of the plan."""

    rules: tuple[str, ...]  # as sandbox/network/rules.py reads them; ("*:*",) for mode "open"
    private: bool = False  # whether names may resolve to private addresses
    limits: EgressLimits = EgressLimits()
    # Ports on which the name in clear text (TLS server name, HTTP Host) has to match.
    judged_ports: tuple[int, ...] = (80, 443)
    every_port: bool = False  # a rule is for every port, which needs the redirection (redirect.py)
    broker: BrokerPlan | None = None  # what reads some of the connections


class GateSockets(NamedTuple):
    """Descriptors of sockets that were made in the plugin's network namespace, and that the gate serves."""

    dns_udp: int
    dns_tcp: int
    listeners: tuple[int, ...]  # one or more for each port, IPv4 and IPv6
    redirected: tuple[int, ...] = ()  # for every port; SO_ORIGINAL_DST has the dialled address and port
    closed_ports: tuple[int, ...] = ()  # at most one: sees the start of connections that nobody accepts


class AuditLine(NamedTuple):
    """One connection or one DNS question, allowed or refused."""

    kind: str  # "dns" | "connect" | "request"; "gate" only in live events, if the gate ended early
    name: str  # the normalised host name, or the address if there is no name
    port: int  # 0 for dns
    verdict: str  # "allowed" | "refused" | "failed" (allowed, but not reachable)
    rule: str = ""  # the rule that allowed it
    reason: str = ""  # why it was refused or failed: the rest of a sentence that begins with the name
    address: str = ""  # the dialled one
    sent: int = 0  # bytes, by the plugin
    received: int = 0
    seconds: float = 0.0
    times: int = 1  # repetitions have a line for the first, second, fourth, eighth time and so on
    # Of a request that the broker has read. Never with a query, and never with a value.
    method: str = ""
    path: str = ""
    status: int = 0  # of the answer
    credential: str = ""  # names of those that were put in
