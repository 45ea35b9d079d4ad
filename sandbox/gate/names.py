"""Host names and the synthetic addresses that stand for them: from the address that a plugin dials, the gate
finds the name."""

from __future__ import annotations

import _socket as socket
import ipaddress

from sandbox.network.egress import SYNTHETIC_IPV4, SYNTHETIC_IPV6
from sandbox.speed.value import NamedTuple

# When all addresses are taken, one is reassigned whose name was neither asked for nor dialled for this long.
# Much longer than the TTL of our answers.
UNUSED_NAME_SECONDS = 3600.0

_IPV4 = ipaddress.IPv4Network(SYNTHETIC_IPV4)
_IPV6 = ipaddress.IPv6Network(SYNTHETIC_IPV6)
_FIRST_IPV4 = int(_IPV4.network_address)
_FIRST_IPV6 = int(_IPV6.network_address)
# Without the first and the last address of the smaller range.
_MOST_NAMES = _IPV4.num_addresses - 2


class Synthetic(NamedTuple):
    ipv4: bytes
    ipv6: bytes


class NameTable:
    """At most `limit` names. A name keeps its addresses as long as it is used."""

    def __init__(self, limit: int) -> None:
        self._limit = max(0, min(limit, _MOST_NAMES))
        self._places: dict[str, int] = {}  # in the order of last use
        self._used: dict[str, float] = {}
        self._names: list[str] = []

    def assign(self, name: str, now: float) -> Synthetic | None:
        """The addresses of a name, which are new at the first call. None if all are taken by names in use."""
        place = self._places.pop(name, None)
        if place is None:
            place = self._take_place(now)
            if place is None:
                return None
            self._names[place] = name
        self._places[name] = place
        self._used[name] = now
        return Synthetic(
            (_FIRST_IPV4 + 1 + place).to_bytes(4, "big"), (_FIRST_IPV6 + 1 + place).to_bytes(16, "big")
        )

    def find(self, address: str, now: float) -> str | None:
        """The name that has this address."""
        place = _place_of(address)
        if place is None or not 0 <= place < len(self._names):
            return None
        name = self._names[place]
        self._places[name] = self._places.pop(name)
        self._used[name] = now
        return name

    def _take_place(self, now: float) -> int | None:
        if len(self._names) < self._limit:
            self._names.append("")
            return len(self._names) - 1
        oldest = next(iter(self._places), None)
        if oldest is None or now - self._used[oldest] < UNUSED_NAME_SECONDS:
            return None
        del self._used[oldest]
        return self._places.pop(oldest)


def is_synthetic(address: str) -> bool:
    return _place_of(address) is not None


def _place_of(address: str) -> int | None:
    if ":" in address:
        number = int.from_bytes(socket.inet_pton(socket.AF_INET6, address), "big")
        return number - _FIRST_IPV6 - 1 if number >> 64 == _FIRST_IPV6 >> 64 else None
    number = int.from_bytes(socket.inet_pton(socket.AF_INET, address), "big")
    offset = number - _FIRST_IPV4
    return offset - 1 if 0 <= offset < _IPV4.num_addresses else None
