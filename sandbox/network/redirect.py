"""Redirects every TCP port of the plugin's namespace to one listener, by two nftables rules.

A listener for each of 65535 ports is not possible. A rule in the namespace redirects each connection to an
address other than loopback's own to REDIRECT_PORT, and the kernel remembers the dialled address
(SO_ORIGINAL_DST). Connections between the plugin's own processes over 127.0.0.0/8 and ::1 are left alone.

A kernel without nftables, or without NAT in it, refuses the messages. Then the launch is refused.
"""

from __future__ import annotations

import struct

from sandbox.network.wire import NLM_F_CREATE, encode_message
from sandbox.spawn.order import NetlinkRequest
from sandbox.speed.typed import Any

NETLINK_NETFILTER = 12
# Below 1024, so that no server of the plugin listens on it.
REDIRECT_PORT = 1

_TABLE, _CHAIN = "egress", "out"
# From linux/netfilter/nfnetlink.h and nf_tables.h.
_BATCH_BEGIN, _BATCH_END, _NFTABLES = 16, 17, 10
_NEWTABLE, _NEWCHAIN, _NEWRULE = 0, 3, 6
_HOOK_OUTPUT, _PRIORITY_NAT = 3, -100
_NETWORK_HEADER = 1
_META_L4PROTO = 16
_EQUAL, _NOT_EQUAL = 0, 1
_REGISTER = 1
_IPPROTO_TCP = 6


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

    hook = {"attrs": [("NFTA_HOOK_HOOKNUM", _HOOK_OUTPUT), ("NFTA_HOOK_PRIORITY", _PRIORITY_NAT)]}
    table, chain, rule = nft_table_msg(), nft_chain_msg(), nft_rule_msg()
    table["attrs"] = [("NFTA_TABLE_NAME", _TABLE), ("NFTA_TABLE_FLAGS", 0)]
    chain["attrs"] = [
        ("NFTA_CHAIN_TABLE", _TABLE),
        ("NFTA_CHAIN_NAME", _CHAIN),
        ("NFTA_CHAIN_HOOK", hook),
        ("NFTA_CHAIN_TYPE", "nat"),
    ]
    rule["attrs"] = [
        ("NFTA_RULE_TABLE", _TABLE),
        ("NFTA_RULE_CHAIN", _CHAIN),
        ("NFTA_RULE_EXPRESSIONS", _expressions(family)),
    ]
    begin, end = nfgen_msg(), nfgen_msg()
    begin["res_id"] = end["res_id"] = _NFTABLES
    messages = [encode_message(begin, _BATCH_BEGIN, 1, acknowledged=False)]
    for number, (message, kind) in enumerate(((table, _NEWTABLE), (chain, _NEWCHAIN), (rule, _NEWRULE)), 2):
        message["nfgen_family"] = family.number
        messages.append(encode_message(message, _NFTABLES << 8 | kind, number, NLM_F_CREATE))
    messages.append(encode_message(end, _BATCH_END, 5, acknowledged=False))
    return b"".join(messages)


def _expressions(family: _Family) -> list[dict[str, Any]]:
    """The rule: redirect TCP to an address that is not loopback's own."""
    size = len(family.mask)
    return [
        _expression("meta", dreg=_REGISTER, key=_META_L4PROTO),
        _expression("cmp", sreg=_REGISTER, op=_EQUAL, data=_value(bytes([_IPPROTO_TCP]))),
        _expression("payload", dreg=_REGISTER, base=_NETWORK_HEADER, offset=family.offset, len=size),
        _expression(
            "bitwise",
            sreg=_REGISTER,
            dreg=_REGISTER,
            len=size,
            mask=_value(family.mask),
            xor=_value(bytes(size)),
        ),
        _expression("cmp", sreg=_REGISTER, op=_NOT_EQUAL, data=_value(family.own)),
        _expression("immediate", dreg=_REGISTER, data=_value(struct.pack("!H", REDIRECT_PORT))),
        _expression("redir", reg_proto_min=_REGISTER, reg_proto_max=_REGISTER),
    ]


def _expression(name: str, **fields: object) -> dict[str, Any]:
    data = [(f"NFTA_{name.upper()}_{field.upper()}", value) for field, value in fields.items()]
    return {"attrs": [("NFTA_EXPR_NAME", name), ("NFTA_EXPR_DATA", {"attrs": data})]}


def _value(raw: bytes) -> dict[str, Any]:
    return {"attrs": [("NFTA_DATA_VALUE", raw)]}
