"""Turn assembled instructions into an ELF file: small programs without a library or a loader.

Their sources are in the folder `assembly`. Their bytes stand at the end of this module, so that no
installation needs an assembler; the tests assemble the sources and compare. The values of one launch follow
the instructions, at the label `table`.
"""

from __future__ import annotations

import errno
import os
import struct

_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine
_BASE = 0x400000
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_START = _HEADER.size + 2 * _SEGMENT.size
_PAGE_BYTES = 0x10000  # the largest page size of both machines

_MFD_EXEC = 0x10


def program(name: str, table: bytes, machine: str = "") -> bytes:
    """The program for one launch, as an ELF file. Raises OSError on a machine that it was not written for."""
    machine = machine or os.uname().machine
    if machine not in _ELF_MACHINES:
        raise OSError(errno.ENOSYS, f"there is no program for {machine}")
    code = bytes.fromhex(INSTRUCTIONS[f"{name}.{machine}"]) + table
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


# By the names of their sources. scripts/machine_code.py writes all that follows.
INSTRUCTIONS = {
    "launcher.aarch64": """
        f30340f9f4430091950e138bb6070010170080d2c07a77b8e103172a02008052
        08038052010000d46006f837f7060091ff0e00f101ffff54170080d2c07a77b8
        28078052010000d4f7060091ff1200f161ffff54c01240b94100805222008052
        28038052010000d46004f837c01640b94001f837e1030091220080d2e8078052
        010000d41f04007161030054c01640b928078052010000d4c01240b9c1620091
        820080d208088052010000d4800240f9e10314aae20315aaa81b8052010000d4
        e003004be00300b9600c8012810240f90200805208068052010000d4e00700b9
        c01240b9e1030091020180d208088052010000d4a00f8052c80b8052010000d4
    """,
    "launcher.x86_64": """
        488b1c244c8d6424104c8d6cdc104c8d35d300000031ed418b3cae89ee31d2b8
        240100000f0585c00f88ab000000ffc583fd0375e231ed418b3caeb803000000
        0f05ffc583fd0475ee418b7e10be02000000ba01000000b8480000000f0585c0
        7877418b7e1485ff781c4889e6ba0100000031c00f0583f801755e418b7e14b8
        030000000f05418b7e10498d7618ba04000000b8010000000f05498b3c244c89
        e64c89eab83b0000000f05f7d8890424bf9cffffff498b342431d2b80d010000
        0f0589442404418b7e104889e6ba08000000b8010000000f05bf7d000000b8e7
        0000000f050f1f00
    """,
    "reaper.aarch64": """
        360d0010ff0315d1f30300917f0200f97f0600f92000805221018052e8148052
        010000d4c00a40b9603205b97f3605b960c21491210080d2e20313aa030080d2
        040080d228098052010000d41f0000714c0a0054e0018052c1620091e8148052
        010000d4c00640b961c20491024080d2030080d268088052010000d4609200f9
        0000801261c2149122008052030080d288208052010000d48004f837e0000034
        c10240b91f00016bc1feff54613245b9610200b911000014c0420091010080d2
        020080d2030180d228118052010000d41f380071e00000541f28007180010054
        1f100031e0fcff548005f837e5ffff1721008052610600b90000801221018052
        28108052010000d4deffff1700008052c1a20091020080d2e80c8052010000d4
        00fbff361d0000140000801261420091a8148052010000d4c022019161820291
        68058052010000d4600600f9c00640b961c20c91024080d2030080d268088052
        010000d4609600f9c00a40b9e10313aa02a680d208088052010000d4610240b9
        20180072600000540000021104000014203c085302000014a00f8052c80b8052
        010000d4
    """,
    "reaper.x86_64": """
        4c8d35a90100004881ec400500004989e449c7042400000000bf01000000be09
        000000b89d0000000f05418b4608418984243005000041c78424340500000000
        0000498dbc2430050000be0100000031d2b8070000000f0585c00f8f42010000
        bf0f000000498d7618b89d0000000f05418b7e04498db42430010000ba000200
        004531d2b8110000000f054989842420010000bfffffffff498db42430050000
        ba010000004531d2b83d0000000f0585c078787413413b0675d9418b8c243005
        000041890c24eb37498d7e1031f631d241ba08000000b8800000000f0583f80e
        741483f80a742b83f8fc74a785c00f88ae000000eb9d41c744240401000000bf
        ffffffffbe09000000b83e0000000f05eb8131ff498d762831d2b8260000000f
        0585c00f896affffffeb77bfffffffff498d742410b8620000000f05498d7e48
        498db424a0000000b8890000000f054989442408418b7e04498db42430030000
        ba000200004531d2b8110000000f054989842428010000418b7e084c89e6ba30
        050000b8010000000f05418b042489c783e77f740881c780000000eb0a0fb6fc
        eb05bf7d000000b8e70000000f056690
    """,
}
