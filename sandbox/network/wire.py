"""Encodes a netlink message of pyroute2."""

from __future__ import annotations

from sandbox.speed.typed import Any

# From linux/netlink.h.
NLM_F_REQUEST, NLM_F_ACK, NLM_F_REPLACE, NLM_F_CREATE, NLM_F_APPEND = 1, 4, 0x100, 0x400, 0x800


def encode_message(
    message: Any, kind: int, number: int, flags: int = 0, *, acknowledged: bool = True
) -> bytes:
    """The bytes of a message. `acknowledged`: the kernel acknowledges it. Errors are always reported."""
    message["header"]["type"] = kind
    message["header"]["flags"] = NLM_F_REQUEST | (NLM_F_ACK if acknowledged else 0) | flags
    message["header"]["sequence_number"] = number
    message["header"]["pid"] = 0
    message.encode()
    encoded = bytes(message.data)
    return encoded + bytes(-len(encoded) % 4)
