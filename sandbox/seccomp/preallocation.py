"""A small filter beside the main one, for plugins with a disk limit.

The runner can watch a plugin that writes data, which is at most as fast as memory. But one call can
preallocate a whole disk, and RLIMIT_FSIZE does not count space beyond the end of a file. So preallocation is
refused: programs that use it (databases, downloads) also work on filesystems without it, and write instead.

The numbers are written out, because reading the tables and loading the assembler would cost a launch more
than the rest of this module. A test compares them with the tables.
"""

from __future__ import annotations

import struct

from sandbox.seccomp.filter import AUDIT_ARCH
from sandbox.speed.value import NamedTuple

_EOPNOTSUPP = 95

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Offsets in struct seccomp_data; the third is the low half of an ioctl's second argument.
_NUMBER, _ARCH, _REQUEST = 0, 4, 24

# Filesystems with fallocate also offer it as these ioctls: RESVSP, RESVSP64 and ZERO_RANGE. The last one,
# FSSETXATTR, sets the extent size of a file on XFS: then one written byte takes a gigabyte.
REQUESTS = (0x40305828, 0x4030582A, 0x40305839, 0x401C5820)


class Numbers(NamedTuple):
    ioctl: int
    fallocate: int
    file_setattr: int  # FSSETXATTR as a system call


NUMBERS = {"x86_64": Numbers(16, 285, 469), "aarch64": Numbers(29, 47, 469)}


def no_preallocation(arch: str) -> bytes:
    """A filter that refuses preallocation. The main filter judges calls of another architecture."""
    numbers = NUMBERS[arch]
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 0, 9, AUDIT_ARCH[arch]),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 8, 0, numbers.fallocate),
        (_EQUAL, 7, 0, numbers.file_setattr),
        (_EQUAL, 0, 5, numbers.ioctl),
        (_LOAD, 0, 0, _REQUEST),
        *((_EQUAL, 4 - at, 0, request) for at, request in enumerate(REQUESTS)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EOPNOTSUPP),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
