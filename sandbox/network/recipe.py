"""EgressPlan -> NetworkRecipe: the netlink messages and sockets of a plugin's network namespace.

pyroute2 encodes the messages. Importing it takes half a second, so the bytes are cached by the rules they
result from, and a launch replays them. They are the same on every machine: loopback is interface 1 of every
namespace.

The namespace gets loopback, and a local route for every address that the gate serves: the synthetic ranges,
and the addresses that the rules name. There is no other route, so that connections to other addresses fail at
once.
"""

from __future__ import annotations

from sandbox import cache
from sandbox.cache import CodeMark, fingerprint
from sandbox.network.egress import DNS_ADDRESS, DNS_PORT, SYNTHETIC_IPV4, SYNTHETIC_IPV6, EgressPlan
from sandbox.network.redirect import REDIRECT_PORT, redirect_requests
from sandbox.network.wire import NLM_F_CREATE, NLM_F_REPLACE, encode_message
from sandbox.spawn.order import NetlinkRequest, NetworkRecipe, SocketRequest
from sandbox.speed.typed import TYPE_CHECKING, Iterator, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    IPNetwork = IPv4Network | IPv6Network

NETLINK_ROUTE = 0
_LOOPBACK = 1  # the index of the interface

# From linux/rtnetlink.h.
_RTM_NEWLINK, _RTM_NEWROUTE = 16, 24
_IFF_UP = 1
_RTN_LOCAL, _RT_TABLE_LOCAL, _RT_SCOPE_HOST, _RTPROT_BOOT = 2, 255, 254, 3
_AF_INET, _AF_INET6 = 2, 10

_MESSAGES_AT_ONCE = 64  # the replies to all of them have to fit into the socket's buffer

_WILDCARDS = ((4, "0.0.0.0"), (6, "::"))


class RecipeEntry(NamedTuple):
    recipe: NetworkRecipe
    code: tuple[CodeMark, ...]  # the runner's files that made it


def find_recipe(plan: EgressPlan) -> NetworkRecipe:
    """The recipe of a plan, from the cache if it is there. Raises as make_recipe() does."""
    from sandbox.speed import codec

    name = fingerprint(b"network recipe 3", b"%d" % plan.every_port, *(rule.encode() for rule in plan.rules))
    raw = cache.load(name)
    if raw is not None:
        try:
            entry = codec.unpack(raw, (RecipeEntry, CodeMark, NetworkRecipe, NetlinkRequest, SocketRequest))
        except ValueError:
            entry = None
        if isinstance(entry, RecipeEntry) and cache.is_current(entry.code):
            return entry.recipe
    recipe = make_recipe(plan)
    marks = cache.code_marks("sandbox.network.recipe")
    cache.store(name, codec.pack(RecipeEntry(recipe, marks)))
    return recipe


def make_recipe(plan: EgressPlan) -> NetworkRecipe:
    """The recipe of a plan. Raises ValueError for a rule that cannot be read."""
    from sandbox.network.rules import EVERY_PORT, listed_ports, parse_rules

    rules = parse_rules(plan.rules, ranges=True)
    if not plan.every_port and any(rule.ports == EVERY_PORT for rule in rules):
        raise ValueError("a rule is for every port, and the plan has no redirection")
    networks = _networks([rule.host for rule in rules if rule.kind in ("address", "range")])
    requests = [NetlinkRequest("switch on loopback", NETLINK_ROUTE, _loopback_up()), *_routes(networks)]
    ports = [port for first, last in listed_ports(rules) for port in range(first, last + 1)]
    if plan.every_port:
        requests += redirect_requests()
        # The plugin's own loopback is not redirected.
        opened = listed_ports([rule for rule in rules if rule.kind == "loopback"])
        ports = [port for first, last in opened for port in range(first, last + 1)]
    return NetworkRecipe(tuple(requests), tuple(_sockets(ports, plan.every_port)))


def _sockets(ports: Sequence[int], every_port: bool) -> Iterator[SocketRequest]:
    yield SocketRequest("dns_udp", 4, DNS_ADDRESS, DNS_PORT)
    yield SocketRequest("dns_tcp", 4, DNS_ADDRESS, DNS_PORT, DNS_PORT in ports)
    for port in ports:
        for version, address in _WILDCARDS:
            yield SocketRequest("listener", version, address, port, port == DNS_PORT and version == 4)
    if every_port:
        yield SocketRequest("redirected", 4, "127.0.0.1", REDIRECT_PORT)
        yield SocketRequest("redirected", 6, "::1", REDIRECT_PORT)
    else:
        # Of IPv4 alone: a client that was refused by IPv6 goes on to the host's address of IPv4.
        yield SocketRequest("closed_ports", 4, "0.0.0.0", 0)


# --- routes -------------------------------------------------------------------------------------------------


def _networks(hosts: Sequence[str]) -> list[IPNetwork]:
    """The ranges that are local in the namespace, merged, IPv4 first."""
    import ipaddress

    fourth, sixth = [ipaddress.IPv4Network(SYNTHETIC_IPV4)], [ipaddress.IPv6Network(SYNTHETIC_IPV6)]
    for host in hosts:
        network = ipaddress.ip_network(host)
        if isinstance(network, ipaddress.IPv4Network):
            fourth.append(network)
        else:
            sixth.append(network)
    return [*ipaddress.collapse_addresses(fourth), *ipaddress.collapse_addresses(sixth)]


def _routes(networks: Sequence[IPNetwork]) -> Iterator[NetlinkRequest]:
    for version in (4, 6):
        chosen = [each for each in networks if each.version == version]
        for start in range(0, len(chosen), _MESSAGES_AT_ONCE):
            some = chosen[start : start + _MESSAGES_AT_ONCE]
            messages = b"".join(_local_route(number, each) for number, each in enumerate(some, 1))
            step = f"lead IPv{version} addresses to the gate"
            yield NetlinkRequest(step, NETLINK_ROUTE, messages, version)


def _loopback_up() -> bytes:
    from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

    message = ifinfmsg()
    message["index"] = _LOOPBACK
    message["flags"] = message["change"] = _IFF_UP
    return encode_message(message, _RTM_NEWLINK, 1)


def _local_route(number: int, network: IPNetwork) -> bytes:
    from pyroute2.netlink.rtnl.rtmsg import rtmsg

    message = rtmsg()
    message["family"] = _AF_INET if network.version == 4 else _AF_INET6
    message["dst_len"] = network.prefixlen
    message["table"] = _RT_TABLE_LOCAL
    message["proto"] = _RTPROT_BOOT
    message["scope"] = _RT_SCOPE_HOST if network.version == 4 else 0
    message["type"] = _RTN_LOCAL
    message["attrs"] = [
        ["RTA_DST", str(network.network_address)],
        ["RTA_OIF", _LOOPBACK],
        ["RTA_TABLE", _RT_TABLE_LOCAL],
    ]
    return encode_message(message, _RTM_NEWROUTE, number, NLM_F_CREATE | NLM_F_REPLACE)
