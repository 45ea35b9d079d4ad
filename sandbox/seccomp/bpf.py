"""Classic BPF for seccomp: an assembler that builds programs from their end.

It emits only instructions that seccomp accepts and that the kernel's verdict cache can emulate (Linux 5.11:
loads of the number and the architecture, comparisons with constants, AND, RET). The filter then never runs
for a call that is decided by its number alone.

Conditional jumps in classic BPF go forward only, by at most 255 instructions. A program that is built from
its end knows every target when the jump to it is written. So a jump that is too far gets an intermediate jump
at once, and no second pass is needed.
"""

from __future__ import annotations

import struct

from sandbox.speed.value import NamedTuple

LD_ABS = 0x20  # A = word at offset k of struct seccomp_data
AND = 0x54
JA = 0x05
JEQ = 0x15
JGE = 0x35
JSET = 0x45
RET = 0x06

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
ERRNO = 0x00050000

OFFSET_NUMBER = 0
OFFSET_ARCH = 4

MAX_INSTRUCTIONS = 4096

_SOCK_FILTER = struct.Struct("<HBBI")
# Up to two intermediate jumps may be inserted between a jump and its targets.
_REACH_INSTRUCTIONS = 255 - 2


def argument_offset(index: int) -> int:
    """The offset of the low half of an argument: struct seccomp_data holds little-endian 64-bit words."""
    return 16 + 8 * index


class Instruction(NamedTuple):
    code: int
    jt: int
    jf: int
    k: int


class Assembler:
    """A program under construction. Places count from the end, so they stay valid as it grows."""

    def __init__(self) -> None:
        self._reversed: list[Instruction] = []
        self._returns: dict[int, int] = {}

    def _prepend(self, code: int, k: int, jt: int = 0, jf: int = 0) -> int:
        self._reversed.append(Instruction(code, jt, jf, k))
        return len(self._reversed) - 1

    def _distance(self, place: int) -> int:
        """The length of a jump from the next instruction to `place`."""
        return len(self._reversed) - place - 1

    def _near(self, place: int) -> int:
        if self._distance(place) <= _REACH_INSTRUCTIONS:
            return place
        target = self._reversed[place]
        if target.code == RET:
            return self.ret(target.k)
        return self._prepend(JA, self._distance(place))

    def ret(self, value: int) -> int:
        """A place that returns this value. An existing one is reused if it is within reach."""
        place = self._returns.get(value)
        if place is None or self._distance(place) > _REACH_INSTRUCTIONS:
            place = self._returns[value] = self._prepend(RET, value)
        return place

    def load(self, offset: int, then: int) -> int:
        """Load a word and continue at `then`."""
        self._fall_through(then)
        return self._prepend(LD_ABS, offset)

    def mask(self, bits: int, then: int) -> int:
        self._fall_through(then)
        return self._prepend(AND, bits)

    def branch(self, code: int, k: int, if_true: int, if_false: int) -> int:
        # An intermediate jump for the second target moves the first one further away: _REACH_INSTRUCTIONS
        # leaves room for that.
        if_true = self._near(if_true)
        if_false = self._near(if_false)
        return self._prepend(code, k, self._distance(if_true), self._distance(if_false))

    def _fall_through(self, place: int) -> None:
        if self._distance(place) != 0:
            self._prepend(JA, self._distance(place))

    def program(self) -> bytes:
        """The finished program. It starts at the instruction that was written last."""
        if len(self._reversed) > MAX_INSTRUCTIONS:
            raise ValueError(f"{len(self._reversed)} instructions: the kernel takes {MAX_INSTRUCTIONS}")
        return b"".join(_SOCK_FILTER.pack(*instruction) for instruction in reversed(self._reversed))


def instructions(program: bytes) -> list[Instruction]:
    if len(program) % _SOCK_FILTER.size:
        raise ValueError(f"{len(program)} bytes are not a whole number of instructions")
    return [Instruction(*fields) for fields in _SOCK_FILTER.iter_unpack(program)]
