"""Redirects every TCP port of the plugin's namespace to one listener, by nftables rules.

A listener for each of 65535 ports is not possible. A rule in the namespace redirects each connection to an
address other than loopback's own to REDIRECT_PORT, and the kernel remembers the dialled address
(SO_ORIGINAL_DST). Connections between the plugin's own processes over 127.0.0.0/8 and ::1 are left alone.

The kernel tracks connections for that: 256 bytes and more for each, which no limit counts, until two minutes
after its last packet. Each datagram to another address would be one, and each first packet of TCP whose
sender does not wait for an answer: 262,000 in two seconds, which is all that a namespace may have. So only
what is redirected is tracked, and new connections have a rate: see NEW_AT_ONCE.

A kernel without nftables, or without NAT in it, refuses the messages. Then the launch is refused.
"""

from __future__ import annotations

import struct

from sandbox.network.wire import NLM_F_APPEND, NLM_F_CREATE, encode_message
from sandbox.spawn.order import NetlinkRequest
from sandbox.speed.typed import Any

NETLINK_NETFILTER = 12
# Below 1024, so that no server of the plugin listens on it.
REDIRECT_PORT = 1
# New connections, for each IP version. The first packet of one more is dropped, and sent again in a second.
# With the 120 seconds that the kernel remembers one, at most 13,000 are tracked for each version.
NEW_AT_ONCE = 1000
NEW_PER_SECOND = 100

_TABLE, _CHAIN, _EARLY_CHAIN = "egress", "out", "early"
# From linux/netfilter/nfnetlink.h and nf_tables.h.
_BATCH_BEGIN, _BATCH_END, _NFTABLES = 16, 17, 10
_NEWTABLE, _NEWCHAIN, _NEWRULE = 0, 3, 6
_HOOK_OUTPUT, _PRIORITY_RAW, _PRIORITY_NAT = 3, -300, -100  # connections are tracked at -200
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_META_L4PROTO = 16
_EQUAL, _NOT_EQUAL = 0, 1
_VERDICT, _REGISTER = 0, 1
_DROP, _ACCEPT = 0, 1
_IPPROTO_TCP = 6
_TCP_FLAGS, _SYN, _ACK = 13, 0x02, 0x10  # the offset in the header, and bits
_LIMIT_PACKETS, _LIMIT_OVER = 0, 1


class _Family:
    """How a rule matches an IP version: the offset of the destination address, and the addresses that are not
    redirected."""

    def __init__(self, version: int, number: int, offset: int, mask: bytes, own: bytes) -> None:
        self.version, self.number, self.offset, self.mask, self.own = version, number, offset, mask, own


_FAMILIES = (
    _Family(4, 2, 16, b"\xff\0\0\0", b"\x7f\0\0\0"),
    _Family(6, 10, 24, b"\xff" * 16, bytes(15) + b"\1"),
)


def redirect_requests() -> list[NetlinkRequest]:
    """One batch for each IP version. The kernel applies a batch as a whole or not at all."""
    return [
        NetlinkRequest(
            f"redirect every port of IPv{family.version} to the gate",
            NETLINK_NETFILTER,
            _batch(family),
            family.version,
        )
        for family in _FAMILIES
    ]


def _batch(family: _Family) -> bytes:
    from pyroute2.netlink.nfnetlink import nfgen_msg
    from pyroute2.netlink.nfnetlink.nftsocket import nft_chain_msg, nft_rule_msg, nft_table_msg

    wanted: list[tuple[Any, int, list[tuple[str, object]]]] = [
        (nft_table_msg(), _NEWTABLE, [("NFTA_TABLE_NAME", _TABLE), ("NFTA_TABLE_FLAGS", 0)])
    ]
    for chain, kind, priority, rules in (
        (_EARLY_CHAIN, "filter", _PRIORITY_RAW, _early_rules(family)),
        (_CHAIN, "nat", _PRIORITY_NAT, [_redirection(family)]),
    ):
        hook = {"attrs": [("NFTA_HOOK_HOOKNUM", _HOOK_OUTPUT), ("NFTA_HOOK_PRIORITY", priority)]}
        about = [("NFTA_CHAIN_TABLE", _TABLE), ("NFTA_CHAIN_NAME", chain)]
        more = [("NFTA_CHAIN_HOOK", hook), ("NFTA_CHAIN_TYPE", kind)]
        wanted.append((nft_chain_msg(), _NEWCHAIN, [*about, *more]))
        for rule in rules:
            names = [("NFTA_RULE_TABLE", _TABLE), ("NFTA_RULE_CHAIN", chain)]
            wanted.append((nft_rule_msg(), _NEWRULE, [*names, ("NFTA_RULE_EXPRESSIONS", rule)]))
    begin, end = nfgen_msg(), nfgen_msg()
    begin["res_id"] = end["res_id"] = _NFTABLES
    messages = [encode_message(begin, _BATCH_BEGIN, 1, acknowledged=False)]
    for number, (message, kind_of_message, attributes) in enumerate(wanted, 2):
        message["attrs"] = attributes
        message["nfgen_family"] = family.number
        flags = NLM_F_CREATE | (NLM_F_APPEND if kind_of_message == _NEWRULE else 0)
        messages.append(encode_message(message, _NFTABLES << 8 | kind_of_message, number, flags))
    messages.append(encode_message(end, _BATCH_END, len(wanted) + 2, acknowledged=False))
    return b"".join(messages)


def _early_rules(family: _Family) -> list[list[dict[str, Any]]]:
    """Before connections are tracked. Track nothing but TCP; nothing between the plugin's own addresses, but
    for packets from and to the listener, which have its port; and not too many new connections."""
    untracked = [_expression("notrack"), _verdict(_ACCEPT)]
    return [
        [*_protocol(_NOT_EQUAL), *untracked],
        [
            *_destination(family, _EQUAL),
            *(each for offset in (0, 2) for each in _port(offset, _NOT_EQUAL)),
            *untracked,
        ],
        [
            _expression("payload", dreg=_REGISTER, base=_TRANSPORT_HEADER, offset=_TCP_FLAGS, len=1),
            _masked(bytes([_SYN | _ACK])),
            _compare(_EQUAL, bytes([_SYN])),
            _expression(
                "limit",
                rate=NEW_PER_SECOND,
                unit=1,
                burst=NEW_AT_ONCE,
                type=_LIMIT_PACKETS,
                flags=_LIMIT_OVER,
            ),
            _verdict(_DROP),
        ],
    ]


def _redirection(family: _Family) -> list[dict[str, Any]]:
    """Redirect TCP to an address that is not loopback's own."""
    return [
        *_protocol(_EQUAL),
        *_destination(family, _NOT_EQUAL),
        _expression("immediate", dreg=_REGISTER, data=_value(struct.pack("!H", REDIRECT_PORT))),
        _expression("redir", reg_proto_min=_REGISTER, reg_proto_max=_REGISTER),
    ]


def _protocol(comparison: int) -> list[dict[str, Any]]:
    return [
        _expression("meta", dreg=_REGISTER, key=_META_L4PROTO),
        _compare(comparison, bytes([_IPPROTO_TCP])),
    ]


def _destination(family: _Family, comparison: int) -> list[dict[str, Any]]:
    """Compare the destination with loopback's own addresses."""
    size = len(family.mask)
    return [
        _expression("payload", dreg=_REGISTER, base=_NETWORK_HEADER, offset=family.offset, len=size),
        _masked(family.mask),
        _compare(comparison, family.own),
    ]


def _port(offset: int, comparison: int) -> list[dict[str, Any]]:
    """Compare the port of the source (0) or of the destination (2) with the listener's."""
    return [
        _expression("payload", dreg=_REGISTER, base=_TRANSPORT_HEADER, offset=offset, len=2),
        _compare(comparison, struct.pack("!H", REDIRECT_PORT)),
    ]


def _masked(mask: bytes) -> dict[str, Any]:
    size = len(mask)
    return _expression(
        "bitwise", sreg=_REGISTER, dreg=_REGISTER, len=size, mask=_value(mask), xor=_value(bytes(size))
    )


def _compare(comparison: int, value: bytes) -> dict[str, Any]:
    return _expression("cmp", sreg=_REGISTER, op=comparison, data=_value(value))


def _verdict(code: int) -> dict[str, Any]:
    verdict = {"attrs": [("NFTA_VERDICT_CODE", code)]}
    return _expression("immediate", dreg=_VERDICT, data={"attrs": [("NFTA_DATA_VERDICT", verdict)]})


def _expression(name: str, **fields: object) -> dict[str, Any]:
    data = [(f"NFTA_{name.upper()}_{field.upper()}", value) for field, value in fields.items()]
    return {"attrs": [("NFTA_EXPR_NAME", name), *([("NFTA_EXPR_DATA", {"attrs": data})] if data else [])]}


def _value(raw: bytes) -> dict[str, Any]:
    return {"attrs": [("NFTA_DATA_VALUE", raw)]}
