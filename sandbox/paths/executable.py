"""Reads an executable file as the kernel does: its head, and its ELF loader."""

from __future__ import annotations

import errno
import os
import stat
import struct

from sandbox import look
from sandbox.paths.walk import Link, TooManyLinks, close, real_path, walk

_UNREAD_HINT = "find out why the machine cannot read it: `dmesg` tells about faults of a disk"
_SHEBANG_BYTES = 256  # the kernel reads no more of a #! line
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


class ProgramFault(Exception):
    """The command cannot be run in a cage. `found`: the program exists, but cannot be used. `denied`: it may
    not be shown to a plugin."""

    def __init__(self, message: str, hint: str, *, found: bool, denied: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.found = found
        self.denied = denied


def proc_fault(path: str) -> ProgramFault:
    return ProgramFault(
        f"{path} leads into /proc, where one name means a different file to each process",
        "use the program's own path",
        found=True,
    )


def follow(path: str) -> tuple[str, tuple[Link, ...]]:
    """The real path of `path`, and every symbolic link on the way."""
    passed: list[Link] = []
    missing: list[str] = []
    try:
        steps = walk(path, follow="all", missing=missing, passed=passed)
    except TooManyLinks:
        raise ProgramFault(
            f"{path} passes through more than 40 symbolic links",
            "remove the loop, or name the program's real path",
            found=True,
        ) from None
    except OSError:  # a component cannot be opened: the rest is taken as written
        return look.realpath(path), tuple(passed)
    try:
        return "/".join((real_path(steps).rstrip("/"), *missing)) or "/", tuple(passed)
    finally:
        close(steps)


def is_executable(path: str) -> bool:
    try:
        held = look.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL after a script's `env`
        return False
    return stat.S_ISREG(held.st_mode) and bool(held.st_mode & 0o111)


def read_head(path: str, real: str) -> bytes:
    try:
        held = look.stat(real)  # before opening: opening a device can have effects
        if stat.S_ISDIR(held.st_mode):
            raise ProgramFault(
                f"{path} is a directory", "name an executable file in the manifest", found=True
            )
        if not stat.S_ISREG(held.st_mode):
            raise ProgramFault(
                f"{path} is not a regular file", "name an executable file in the manifest", found=True
            )
        if not held.st_mode & 0o111:
            raise ProgramFault(f"{path} is not executable", f"chmod a+x {real}", found=True)
        if look.statvfs(real).f_flag & os.ST_NOEXEC:
            raise ProgramFault(
                f"{path} is on a filesystem that is mounted noexec",
                "move it to another filesystem, or mount that one with exec",
                found=True,
            )
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ProgramFault(
            f"{path} leads to {real}, which does not exist", "correct the link", found=False
        ) from None
    except OSError as error:
        hint = f"chmod a+rx {real}" if isinstance(error, PermissionError) else _UNREAD_HINT
        raise ProgramFault(f"{path} cannot be read: {error.strerror}", hint, found=True) from None
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def interpreter_words(script: str, head: bytes) -> list[str]:
    """The words of a script's #! line. Raises ProgramFault if there is none that the kernel can use."""
    if not head.startswith(b"#!"):
        raise ProgramFault(
            f"{script} is neither an ELF program nor a script with a #! line",
            "name an interpreter on its first line, for example #!/usr/bin/env python3",
            found=True,
        )
    first = head[2:_SHEBANG_BYTES].split(b"\n", 1)[0]
    line = os.fsdecode(first).strip()
    words = line.split()
    if not words or not words[0].startswith("/"):
        raise ProgramFault(
            f"{script}: its #! line has no absolute path ({line!r})",
            "write for example #!/usr/bin/python3 or #!/usr/bin/env python3",
            found=True,
        )
    if first.endswith(b"\r"):
        raise ProgramFault(
            f"{script}: its #! line ends with a carriage return, which the kernel takes as part of the "
            "interpreter's name",
            f"save it with Unix line endings (sed -i 's/\\r$//' {script})",
            found=True,
        )
    return words


_PHENTSIZE = 56  # of ELF64; the kernel runs no other


_MAX_PHDRS = 64 * 1024 // _PHENTSIZE  # the kernel reads no larger table


def read_loader(path: str, real: str, head: bytes) -> str | None:
    """The path in the first PT_INTERP header, which is the one the kernel uses; None if there is none."""
    look.note(real)
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    damaged = ProgramFault(f"{path} is a damaged program", "build or install it again", found=True)
    if size != _PHENTSIZE or count > _MAX_PHDRS:
        raise damaged
    try:
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            table = os.pread(fd, size * count, offset)
            for at in range(0, len(table) - size + 1, size):
                if struct.unpack_from("<I", table, at) == (3,):  # PT_INTERP
                    start, _, _, length = struct.unpack_from("<QQQQ", table, at + 8)
                    return os.fsdecode(os.pread(fd, min(length, 4096), start).rstrip(b"\0"))
        finally:
            os.close(fd)
    except OverflowError:  # an offset beyond the largest file size
        raise damaged from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # such an offset too
            raise damaged from None
        raise ProgramFault(f"{path} cannot be read: {error.strerror}", _UNREAD_HINT, found=True) from None
    return None


def loader_of(path: str, real: str, head: bytes) -> str | None:
    """The loader of an ELF program; None if it needs none. Raises ProgramFault if the program is not built
    for this machine, or its loader is missing: execve would only report "No such file".
    """
    machine = os.uname().machine
    if len(head) < 64 or head[4] != 2 or head[5] != 1:
        raise ProgramFault(f"{path} is not a 64-bit program", f"build it for {machine}", found=True)
    (kind,) = struct.unpack_from("<H", head, 18)
    if kind != ELF_MACHINES.get(machine, kind):
        names = {number: name for name, number in ELF_MACHINES.items()}
        raise ProgramFault(
            f"{path} is a program for {names.get(kind, f'another machine (ELF {kind})')}, this is {machine}",
            f"build or install it for {machine}",
            found=True,
        )
    loader = read_loader(path, real, head)
    if loader is None:
        return None
    if not loader.startswith("/") or not look.isfile(loader):
        raise ProgramFault(
            f"{path} needs the loader {loader}, which does not exist here",
            "install the C library that it was built for, or link it statically",
            found=False,
        )
    return loader
