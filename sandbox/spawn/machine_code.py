"""Turn a listing of machine code into an ELF file: small programs without a library or a loader.

A listing has one line for each instruction: its bytes in hexadecimal, then its text. The tests assemble the
text and compare it with the bytes. The values of one launch follow the instructions, at the label `table`.
"""

from __future__ import annotations

import errno
import os
import struct

from sandbox.speed.typed import Mapping

_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine
_BASE = 0x400000
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_START = _HEADER.size + 2 * _SEGMENT.size
_PAGE_BYTES = 0x10000  # the largest page size of both machines

_MFD_EXEC = 0x10
_INDENT = 4  # of the bytes, in a listing


def instructions(listing: str) -> bytes:
    # A label has a longer indentation, so its line has an empty first word.
    return bytes.fromhex("".join([line[_INDENT:].partition(" ")[0] for line in listing.split("\n")]))


def program(listings: Mapping[str, str], table: bytes, machine: str = "") -> bytes:
    """The program for one launch, as an ELF file. Raises OSError on a machine without a listing."""
    machine = machine or os.uname().machine
    if machine not in listings:
        raise OSError(errno.ENOSYS, f"there is no program for {machine}")
    code = instructions(listings[machine]) + table
    size = _START + len(code)
    ident = b"\x7fELF\x02\x01\x01"  # 64 bit, little endian
    header = _HEADER.pack(
        *(ident, 2, _ELF_MACHINES[machine], 1, _BASE + _START, _HEADER.size, 0, 0),
        *(_HEADER.size, _SEGMENT.size, 2, 0, 0, 0),
    )
    # One segment to read and execute, and a stack that is not executable.
    segments = _SEGMENT.pack(1, 5, 0, _BASE, _BASE, size, size, _PAGE_BYTES)
    segments += _SEGMENT.pack(0x6474E551, 6, 0, 0, 0, 0, 0, 16)
    return header + segments + code


def executable(name: str) -> int:
    """Make an empty, nameless file that may be executed. PermissionError: vm.memfd_noexec forbids it."""
    flags = os.MFD_CLOEXEC
    try:
        # Linux 6.3 and later: where vm.memfd_noexec is set, an executable memfd must be asked for.
        return os.memfd_create(name, flags | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)
