"""Sees the plugin's connections to ports that no rule has, so that people are told of them.

Nobody listens on such a port, and the kernel refuses the connection at once. A raw socket in the plugin's
namespace gets a copy of each first packet (SYN), and on the plugin's own loopback of the kernel's refusal. It
sends nothing.
"""

from __future__ import annotations

import _socket as socket
import struct

from sandbox.gate.loop import READ, Loop, RateLimiter
from sandbox.speed.libc import addressof, writable
from sandbox.speed.typed import Callable, Collection

_PER_SECOND = 1000
_MOST_AT_ONCE = 64
_HEADER_BYTES = 128  # of IPv4 with options, and of TCP up to its ports
_BUFFER_BYTES = 64 << 10
_SO_ATTACH_FILTER = 26
_LOOPBACK = 127

_INSTRUCTION = struct.Struct("=HBBI")
# Classic BPF. A raw socket of IPv4 begins with the IP header. To an address other than loopback's own, passes
# packets with SYN and without ACK. Between loopback's own, where the plugin may have a server, passes the
# kernel's refusals of these: RST and ACK, with the sequence number 0.
_FILTER = b"".join(
    _INSTRUCTION.pack(*each)
    for each in (
        (0xB1, 0, 0, 0),  # X = the length of the IP header
        (0x30, 0, 0, 16),  # A = the first byte of the destination
        (0x15, 3, 0, _LOOPBACK),
        (0x50, 0, 0, 13),  # A = the flags of TCP
        (0x54, 0, 0, 0x12),  # of these SYN and ACK
        (0x15, 6, 5, 0x02),
        (0x50, 0, 0, 13),
        (0x54, 0, 0, 0x14),  # of the flags RST and ACK
        (0x15, 0, 2, 0x14),
        (0x40, 0, 0, 4),  # A = the sequence number
        (0x15, 1, 0, 0),
        (0x06, 0, 0, 0),
        (0x06, 0, 0, _HEADER_BYTES),
    )
)


def attach_filter(raw: socket.socket) -> None:
    """Let nothing but what `read_refused` reads into the socket."""
    raw.setblocking(False)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    code = writable(len(_FILTER))
    code.raw = _FILTER
    program = struct.pack("@HP", len(_FILTER) // _INSTRUCTION.size, addressof(code))
    raw.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def read_refused(packet: bytes) -> tuple[str, int] | None:
    """The address and the port that were refused; None if the packet says nothing of the kind."""
    start = (packet[0] & 15) * 4 if packet else 0
    if start < 20 or len(packet) < start + 14:
        return None
    source, target = packet[12:16], packet[16:20]
    ports = struct.unpack_from("!HH", packet, start)
    number, flags = packet[start + 4 : start + 8], packet[start + 13]
    if target[0] != _LOOPBACK:
        return (socket.inet_ntop(socket.AF_INET, target), ports[1]) if flags & 0x12 == 0x02 else None
    is_refusal = flags & 0x14 == 0x14 and not any(number)
    return (socket.inet_ntop(socket.AF_INET, source), ports[0]) if is_refusal else None


class ClosedPorts:
    """Calls `refused` with the address and the port of each connection to a port that is not in `served`."""

    def __init__(
        self, loop: Loop, raw: socket.socket, served: Collection[int], refused: Callable[[str, int], None]
    ) -> None:
        self._raw = raw
        self._served = served
        self._refused = refused
        attach_filter(raw)
        self._rate_limiter = RateLimiter(loop, _PER_SECOND, (raw.fileno(),))
        loop.watch(raw.fileno(), READ, lambda _: self.read())

    def read(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                packet = self._raw.recv(_HEADER_BYTES)
            except OSError:
                return
            found = read_refused(packet)
            if found is not None and found[1] not in self._served:
                self._refused(*found)
            if self._rate_limiter.count():
                return
