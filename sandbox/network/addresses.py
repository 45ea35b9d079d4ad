"""Addresses that must not be dialled, also if a name leads to them. The owner of a name chooses its
addresses.

The tables follow IANA's registries of special-purpose addresses. They are spelled out because Python's
`is_private` differs from version to version. Of IPv6 only the range for global use (2000::/3) may be dialled.
An address that carries an IPv4 address is also judged by that one.
"""

from __future__ import annotations

import _socket as socket  # the module `socket` takes longer to import than everything else here
import struct
from functools import cache

from sandbox.network.hosts import read_address
from sandbox.speed.typed import TYPE_CHECKING, Collection

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    Address = IPv4Address | IPv6Address

# Metadata services: every program that can reach one gets the keys of a cloud machine. Some are outside of
# every special range. Two clouds have several of them in one private IPv6 range.
METADATA: tuple[str, ...] = (
    "169.254.169.254",
    "169.254.170.2",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "fd00:ec2::/32",
    "fd00:c1::/32",
    "fd20:ce::254",
    "fd00:42::42",
)

# The ranges that `allow_private` opens.
PRIVATE: tuple[str, ...] = (
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "fc00::/7",
)

# The first that contains an address gives the reason.
SPECIAL: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "is unspecified"),
    ("127.0.0.0/8", "is this machine (loopback)"),
    ("169.254.0.0/16", "is link-local"),
    ("192.0.0.0/24", "is reserved for protocols"),
    ("192.0.2.0/24", "is for documentation only"),
    ("198.51.100.0/24", "is for documentation only"),
    ("203.0.113.0/24", "is for documentation only"),
    ("192.88.99.0/24", "is reserved (a relay of 6to4)"),
    ("198.18.0.0/15", "is for benchmarks only"),
    ("224.0.0.0/4", "is multicast"),
    ("255.255.255.255/32", "is broadcast"),
    ("240.0.0.0/4", "is reserved"),
    ("::/128", "is unspecified"),
    ("::1/128", "is this machine (loopback)"),
    ("fe80::/10", "is link-local"),
    ("fec0::/10", "is reserved (once site-local)"),
    ("ff00::/8", "is multicast"),
    ("2001:db8::/32", "is for documentation only"),
    ("3fff::/20", "is for documentation only"),
    ("2001:2::/48", "is for benchmarks only"),
    # Only the network that uses it knows which bits are the IPv4 address.
    ("64:ff9b:1::/48", "is translated to an IPv4 address that cannot be known (local NAT64)"),
)
_GLOBAL = "2000::/3"
_PROTOCOLS = "2001::/23"  # reserved for protocols; Teredo lies in it
_NAT64 = bytes.fromhex("0064ff9b") + bytes(8)
_TEREDO = bytes.fromhex("20010000")
# From linux/rtnetlink.h.
_RTM_NEWROUTE, _RTM_GETROUTE, _NLM_F_REQUEST, _RTA_DST = 24, 26, 1, 1
_ANSWER_BYTES = 4096  # one route takes some hundred
_ROUTES_TO_ITSELF = (2, 4)  # RTN_LOCAL, RTN_ANYCAST
_ISATAP = (bytes.fromhex("00005efe"), bytes.fromhex("02005efe"))


def refusal(address: str, *, allow_private: bool = False, own_addresses: Collection[str] = ()) -> str:
    """Why `address` must not be dialled, as the rest of a sentence that begins with it; "" if it may.

    `allow_private` opens the private ranges and nothing else. `own_addresses`: the addresses of this machine,
    which are never dialled.
    """
    found = read_address(address)
    if found is None:
        return "is not an address"
    own = frozenset(own for own in map(read_address, own_addresses) if own is not None)
    return _judge(found, allow_private, own)


def vet(address: str, *, allow_private: bool = False) -> str:
    """refusal(), with the current addresses of this machine."""
    found = read_address(address)
    if found is None:
        return "is not an address"
    try:
        own = frozenset(each for each in (found, *(inner for inner, _ in _carried(found))) if _is_own(each))
    except OSError as error:
        return f"cannot be told from an address of this machine ({error.strerror})"
    return _judge(found, allow_private, own)


def is_own(address: str) -> bool:
    """Whether packets to `address` stay on this machine. Raises OSError if the kernel cannot be asked."""
    found = read_address(address)
    return found is not None and _is_own(found)


def _is_own(address: Address) -> bool:
    """Ask the kernel for the type of the route. Nothing is sent to the address."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    target = struct.pack("=HH", 4 + len(address.packed), _RTA_DST) + address.packed
    route = struct.pack("=8BI", family, address.max_prefixlen, 0, 0, 0, 0, 0, 0, 0) + target
    header = struct.pack("=IHHII", 16 + len(route), _RTM_GETROUTE, _NLM_F_REQUEST, 0, 0)
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    kernel = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
    try:
        kernel.send(header + route)
        answer = kernel.recv(_ANSWER_BYTES)
    finally:
        kernel.close()
    # Any other reply is an error: there is no route, so the address cannot be dialled.
    return struct.unpack_from("=H", answer, 4)[0] == _RTM_NEWROUTE and answer[16 + 7] in _ROUTES_TO_ITSELF


def _judge(address: Address, allow_private: bool, own: Collection[Address]) -> str:
    special, private = _ranges(address.version)
    number = int(address)
    for first, last, reason in special:
        if first <= number <= last:
            return reason
    if address in own:
        return "is an address of this machine"
    if any(first <= number <= last for first, last in private):
        return "" if allow_private else "is private"
    for inner, form in _carried(address):
        reason = _judge(inner, allow_private, own)
        if reason:
            return f"carries an IPv4 address ({form}) that {reason}"
    return "" if address.version == 4 else _judge_range(address)


def _judge_range(address: IPv6Address) -> str:
    """Judge an address that is in no table by its range."""
    from ipaddress import IPv6Network

    if address.packed.startswith((_NAT64, _TEREDO)):
        return ""
    if address in IPv6Network(_PROTOCOLS):
        return "is reserved for protocols"
    return "" if address in IPv6Network(_GLOBAL) else "is reserved"


def _carried(address: Address) -> list[tuple[IPv4Address, str]]:
    """The IPv4 addresses inside an IPv6 address, each with the form that carries it."""
    from ipaddress import IPv4Address

    if address.version == 4:
        return []
    packed = address.packed
    found = []
    if packed.startswith(bytes(12)):
        found.append((packed[12:], "IPv4-compatible"))
    if packed.startswith(_NAT64):
        found.append((packed[12:], "NAT64"))
    if packed.startswith(bytes.fromhex("2002")):
        found.append((packed[2:6], "6to4"))
    if packed.startswith(_TEREDO):
        found.append((packed[4:8], "Teredo"))
        found.append((bytes(byte ^ 0xFF for byte in packed[12:]), "Teredo"))
    if packed[8:12] in _ISATAP:
        found.append((packed[12:], "ISATAP"))
    return [(IPv4Address(inner), form) for inner, form in found]


@cache
def _ranges(version: int) -> tuple[tuple[tuple[int, int, str], ...], tuple[tuple[int, int], ...]]:
    """The special and the private ranges, as numbers: every connection is compared with all of them."""
    from ipaddress import ip_network

    special = [(network, "serves the keys of cloud machines (metadata)") for network in METADATA]
    found = [(ip_network(network), reason) for network, reason in (*special, *SPECIAL)]
    private = [each for each in map(ip_network, PRIVATE) if each.version == version]
    return (
        tuple((int(each[0]), int(each[-1]), why) for each, why in found if each.version == version),
        tuple((int(each[0]), int(each[-1])) for each in private),
    )
