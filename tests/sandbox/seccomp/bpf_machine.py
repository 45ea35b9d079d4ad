"""A machine that runs seccomp programs, written from the kernel's documentation and not from our compiler.

It refuses what the kernel's checker refuses: unknown instructions, loads outside struct seccomp_data or not
on a word, jumps out of the program, a program that can run off its end.
"""

from __future__ import annotations

import struct

MASK = 0xFFFFFFFF


class BadProgramError(AssertionError):
    pass


class Machine:
    def __init__(self, program: bytes) -> None:
        if not program or len(program) % 8 or len(program) // 8 > 4096:
            raise BadProgramError(f"{len(program)} bytes")
        self.code = list(struct.iter_unpack("<HBBI", program))
        for at, (op, jt, jf, k) in enumerate(self.code):
            left = len(self.code) - at - 1
            if op == 0x20 and (k % 4 or k >= 64):
                raise BadProgramError(f"{at}: load of offset {k}")
            if op in (0x15, 0x25, 0x35, 0x45) and (jt >= left or jf >= left):
                raise BadProgramError(f"{at}: jump out of the program")
            if op == 0x05 and k >= left:
                raise BadProgramError(f"{at}: jump out of the program")
            if op not in (0x20, 0x54, 0x05, 0x15, 0x25, 0x35, 0x45, 0x06):
                raise BadProgramError(f"{at}: instruction {op:#x}")
        if self.code[-1][0] != 0x06:
            raise BadProgramError("runs off its end")

    def unreachable(self) -> list[int]:
        """Instructions that no execution can reach."""
        todo, seen = [0], set()
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            op, jt, jf, k = self.code[at]
            if op in (0x15, 0x25, 0x35, 0x45):
                todo += [at + 1 + jt, at + 1 + jf]
            elif op == 0x05:
                todo.append(at + 1 + k)
            elif op != 0x06:
                todo.append(at + 1)
        return [at for at in range(len(self.code)) if at not in seen]

    def run(self, arch: int, number: int, *arguments: int) -> tuple[int, int]:
        """The value returned and the number of instructions it took."""
        padded = [a & (1 << 64) - 1 for a in arguments] + [0] * (6 - len(arguments))
        data = struct.pack("<IIQ6Q", number & MASK, arch, 0x7F0000001000, *padded)
        at = steps = accumulator = 0
        while True:
            op, jt, jf, k = self.code[at]
            at, steps = at + 1, steps + 1
            if op == 0x20:
                (accumulator,) = struct.unpack_from("<I", data, k)
            elif op == 0x54:
                accumulator &= k
            elif op == 0x05:
                at += k
            elif op == 0x15:
                at += jt if accumulator == k else jf
            elif op == 0x25:
                at += jt if accumulator > k else jf
            elif op == 0x35:
                at += jt if accumulator >= k else jf
            elif op == 0x45:
                at += jt if accumulator & k else jf
            else:
                return k, steps


def verdict(value: int) -> str:
    """The verdict in the profiles' spelling."""
    names = {0x7FFF0000: "allow", 0x80000000: "kill"}
    errnos = {
        1: "EPERM",
        12: "ENOMEM",
        22: "EINVAL",
        38: "ENOSYS",
        92: "ENOPROTOOPT",
        93: "EPROTONOSUPPORT",
        95: "EOPNOTSUPP",
        97: "EAFNOSUPPORT",
    }
    if value in names:
        return names[value]
    assert value & 0xFFFF0000 == 0x00050000, hex(value)
    return errnos[value & 0xFFFF]
