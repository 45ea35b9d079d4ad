"""What the spawner is told about the plugin's network: values only, as in sandbox/spawn/order.py."""

from __future__ import annotations

from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple


class NetlinkRequest(NamedTuple):
    """Netlink messages that are sent to the kernel as they are."""

    step: str  # for the message "could not STEP: ERRNO"
    protocol: int  # NETLINK_ROUTE or NETLINK_NETFILTER
    messages: bytes  # one or more, each with a number of its own
    version: int = 4  # 6: of no use on a kernel without IPv6


class SocketRequest(NamedTuple):
    """A socket that is made in the plugin's network namespace and served by a process outside."""

    use: Literal["dns_udp", "dns_tcp", "listener", "redirected"]
    version: int  # 4 or 6; 6 is left out on a kernel without IPv6
    address: str
    port: int
    shares_port: bool = False  # another socket of the list is bound to the same port


class NetworkRecipe(NamedTuple):
    """How the network namespace of a plugin is made. Plain data: the same for every launch of one plan."""

    requests: tuple[NetlinkRequest, ...]
    sockets: tuple[SocketRequest, ...]  # one dns_udp, one dns_tcp, then listeners, then redirected


class NetworkOrder(NamedTuple):
    recipe: NetworkRecipe
    channel: int  # to the gate: a socket that keeps the borders of messages
    outside: str  # the runner's own network namespace, as /proc/self/ns/net names it
    until: float | None = None  # on the monotonic clock: how long the gate may take to get ready
    made: bool = False  # by root, before the uid is dropped; otherwise by the cell's init
