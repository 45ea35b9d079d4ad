"""The last program before the plugin: it connects the plugin's streams, and reports whether exec worked.

bwrap leaves two processes running, and both keep the descriptors 0, 1 and 2 that it was started with. If
these were the plugin's pipes, nobody could see that the plugin has closed one. Both close everything above
2. So the streams pass bwrap under higher numbers, and a program inside has to move them.

A shell could do that. But a shell adds variables to the environment (PWD, SHLVL), drops those with names it
does not accept, runs as a script what the kernel does not execute, cannot mark a descriptor close-on-exec,
and may not be in the cage. So the launcher is a program of our own: 65 instructions (assembly/launcher.*),
without a library or a loader. bwrap gets it as a descriptor without a name, and nothing of it is left when
the plugin starts. Only where a nameless file may not be executed (vm.memfd_noexec=2) it is a read-only file
in the cage.

In a parked cell it waits for one byte on a pipe before it executes the program, and exits at the end of the
file: when the process that holds the other end dies, no program starts. bwrap's own --block-fd would start it
then.

It writes "exec" to a pipe that the exec closes. An errno after that means that the exec has failed. An empty
pipe means that the launcher did not get as far as the exec.
"""

from __future__ import annotations

import struct

from sandbox.spawn.machine_code import program
from sandbox.speed.value import NamedTuple

# Its name in the cage, by the number of its descriptor.
PATH = "/proc/self/fd/{}"

_ABOUT_TO_EXEC = b"exec"
_FAILURE = struct.Struct("=Ii")  # errno of execve, and the result of faccessat for the same path


def image(
    streams: tuple[int, int, int], own: int, report_fd: int, machine: str = "", release: int = -1
) -> bytes:
    """The program for one launch, as an ELF file.

    The numbers are those of its descriptors: the streams to move, its own file, the pipe on which it reports
    its progress, and in a parked cell the pipe on which its release comes. Raises OSError on a machine
    that it was not written for.
    """
    # The table of assembly/launcher.inc.
    table = struct.pack("<6i", *streams, own, report_fd, release) + _ABOUT_TO_EXEC
    return program("launcher", table, machine)


class ExecReport(NamedTuple):
    """The launcher's report, read after it has ended or has become the plugin."""

    executed: bool  # the plugin runs, or ran
    errno: int = 0  # of the failed execve; 0: it was not reached
    found: bool = False  # the file exists, so ENOENT is about its interpreter or loader


def read_report(written: bytes) -> ExecReport:
    if not written.startswith(_ABOUT_TO_EXEC):
        return ExecReport(False)
    rest = written[len(_ABOUT_TO_EXEC) :]
    if len(rest) < _FAILURE.size:
        return ExecReport(True)
    number, access = _FAILURE.unpack_from(rest)
    return ExecReport(False, number, access == 0)


def failure_report(number: int, *, found: bool) -> bytes:
    """The report of a failed execve. Also written where a program is executed without the launcher."""
    return _ABOUT_TO_EXEC + _FAILURE.pack(number, 0 if found else -1)
