"""Install the observer's filter in the process that becomes bwrap, and send its listener out of the cage.

Runs between the clone and the exec. The filter is the first of the cage, so it holds for bwrap and for
everything that bwrap starts. The listener is closed here as soon as it was sent: if the observer ends, nobody
has a copy, and the kernel fails the observed calls with ENOSYS. They never wait for nobody.
"""

from __future__ import annotations

import _socket
import errno
import os
import struct

from sandbox.spawn.order import ObserverOrder
from sandbox.speed.libc import Library, addressof, get_errno, writable

# Of seccomp(2).
SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER = 1
_NEW_LISTENER = 1 << 3
# Linux 5.19: a call that the observer has received is not restarted for a signal. Without it, a program that
# sends itself signals all the time (Go does) makes its calls over and over.
_WAIT_KILLABLE = 1 << 5

_PROGRAM = struct.Struct("@HP")  # struct sock_fprog
_INSTRUCTION_BYTES = 8


def install_filter(libc: Library, order: ObserverOrder) -> None:
    """Raises OSError. EBUSY: there is a filter with a listener around the runner already."""
    number = SECCOMP.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, "")
    code = writable(len(order.filter))
    code.raw = order.filter
    program = writable(_PROGRAM.size)
    program.raw = _PROGRAM.pack(len(order.filter) // _INSTRUCTION_BYTES, addressof(code))
    listener = -1
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        listener = libc.syscall(number, _SET_MODE_FILTER, flags, program)
        if listener >= 0 or get_errno() != errno.EINVAL:
            break
    if listener < 0:
        raise OSError(get_errno(), "")
    # From here to the exec, nothing may be called that the filter observes.
    channel = _socket.socket(fileno=order.channel)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("=i", listener))
    channel.sendmsg([b"l"], [rights])
    os.close(listener)
    channel.close()
