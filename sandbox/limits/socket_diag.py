"""The sockets of a network namespace as the kernel's sock_diag lists them, each with the memory it holds.

/proc/net/tcp shows the bytes in the queues of a TCP socket, but not the kernel's overhead for them, and not
the error queue. sock_diag(7) shows all of it, and takes a sixth of the time. Its socket has to be made by a
process in the namespace, so this forks one: setns(2) to a user namespace cannot be undone.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import struct

from sandbox.speed.libc import open_libc
from sandbox.speed.scopes import suppress
from sandbox.speed.signals import signal
from sandbox.speed.typed import Generator
from sandbox.speed.value import NamedTuple

# From linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and linux/unix_diag.h.
_NETLINK_SOCK_DIAG = 4
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_INODE = struct.Struct("=I")
_SOCK_DIAG_BY_FAMILY, _TCPDIAG_GETSOCK = 20, 18
_INET_DIAG_SKMEMINFO, _UNIX_DIAG_MEMINFO = 7, 5
_UDIAG_SHOW_MEMINFO = 0x20
_ALL_STATES = 0xFFFFFFFF
_TIME_WAIT = 1 << 6  # not listed: there are many, and sockstat counts them
_ID = bytes(48)  # struct inet_diag_sockid, unused in a dump

_NS_GET_USERNS = 0xB701
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CHUNK_BYTES = 64 << 10
# For the child, which makes one socket. The clocks of the plugin wait for it.
_CHILD_SECONDS = 5.0

# The first members of the kernel's sk_meminfo: received, its limit, being sent, its limit, reserved, queued
# to be sent, options, and what waits for a busy socket.
_MEMORY = struct.Struct("=8I")
MEMORY_BYTES = _MEMORY.size


class DiagFault(Exception):
    """The kernel does not list these sockets: it has no sock_diag, or cannot load the module."""


class ListedSocket(NamedTuple):
    inode: int  # 0: in no process, because it is not accepted yet, or closed
    held: int | None  # bytes; None: only the record of a connection, before or after its socket


class _List(NamedTuple):
    """A request for a list of sockets, and the layout of the reply."""

    kind: int
    request: bytes
    inode: int  # offset in each entry of the reply
    attributes: int  # offset of the first attribute
    memory: int  # type of the attribute with the memory


def _internet(family: int, protocol: int) -> _List:
    body = struct.pack("=BBBxI", family, protocol, 1 << (_INET_DIAG_SKMEMINFO - 1), _ALL_STATES) + _ID
    return _List(_SOCK_DIAG_BY_FAMILY, body, 68, 72, _INET_DIAG_SKMEMINFO)


# The older request for TCP lists both families in one walk through the table, which is most of the cost.
_BOTH_TCP = (
    struct.pack("=3xB", 1 << (_INET_DIAG_SKMEMINFO - 1))
    + _ID
    + struct.pack("=II", _ALL_STATES & ~_TIME_WAIT, 0)
)
TCP = _List(_TCPDIAG_GETSOCK, _BOTH_TCP, 68, 72, _INET_DIAG_SKMEMINFO)
UDP4 = _internet(_socket.AF_INET, _socket.IPPROTO_UDP)
UDP6 = _internet(_socket.AF_INET6, _socket.IPPROTO_UDP)
UNIX = _List(
    _SOCK_DIAG_BY_FAMILY,
    struct.pack("=BxxxIII8x", _socket.AF_UNIX, _ALL_STATES, 0, _UDIAG_SHOW_MEMINFO),
    4,
    16,
    _UNIX_DIAG_MEMINFO,
)


def list_sockets(kernel: _socket.socket, wanted: _List) -> Generator[list[ListedSocket], None, None]:
    """Yield all sockets of one kind, in parts. Raises DiagFault."""
    try:
        yield from _drain(kernel)
        length = _HEADER.size + len(wanted.request)
        kernel.send(_HEADER.pack(length, wanted.kind, _DUMP, 0, 0) + wanted.request)
        while True:
            # The kernel writes the next part when this one is received, so recv() never has to wait.
            chunk = kernel.recv(_CHUNK_BYTES, _socket.MSG_DONTWAIT)
            found: list[ListedSocket] = []
            at = 0
            while at + _HEADER.size <= len(chunk):
                length, kind, _, _, _ = _HEADER.unpack_from(chunk, at)
                if kind == _DONE:
                    yield found
                    return
                if kind == _ERROR or length < _HEADER.size:
                    raise DiagFault
                found.append(_read(chunk, at + _HEADER.size, at + length, wanted))
                at += (length + 3) & ~3
            yield found
    except (OSError, struct.error):
        raise DiagFault from None


def _drain(kernel: _socket.socket) -> Generator[list[ListedSocket], None, None]:
    """Read the rest of an earlier list that was not read to its end."""
    try:
        while kernel.recv(_CHUNK_BYTES, _socket.MSG_DONTWAIT):
            yield []
    except BlockingIOError:
        pass


def _read(chunk: bytes, begin: int, end: int, wanted: _List) -> ListedSocket:
    (inode,) = _INODE.unpack_from(chunk, begin + wanted.inode)
    at = begin + wanted.attributes
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(chunk, at)
        if kind == wanted.memory:
            return ListedSocket(inode, memory_of(chunk, at + _ATTRIBUTE.size))
        at += max((length + 3) & ~3, _ATTRIBUTE.size)
    return ListedSocket(inode, None)


def memory_of(memory: bytes, at: int = 0) -> int:
    """The bytes that a socket holds, from its sk_meminfo."""
    received, _, sent, _, _, queued, options, waiting = _MEMORY.unpack_from(memory, at)
    return int(received + max(sent, queued) + options + waiting)


def open_diag_socket(namespace: int) -> _socket.socket:
    """A sock_diag socket in the network namespace of this descriptor. Raises OSError."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    try:
        child = os.fork()
        if child == 0:
            try:
                _enter(namespace)
                made = _socket.socket(
                    _socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
                )
                rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", made.fileno()))
                theirs.sendmsg([b"."], [rights])
            finally:
                os._exit(0)
        theirs.close()
        ours.settimeout(_CHILD_SECONDS)
        try:
            _, given, _, _ = ours.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
        finally:
            # Somebody else has reaped it: a handler of this process, or the kernel, where SIGCHLD is ignored.
            with suppress(ChildProcessError, ProcessLookupError):
                if not os.waitpid(child, os.WNOHANG)[0]:
                    os.kill(child, signal.SIGKILL)  # it may have been stopped
                    os.waitpid(child, 0)
    finally:
        theirs.close()
        ours.close()
    for _, _, data in given:
        return _socket.socket(fileno=struct.unpack("i", data)[0])
    raise PermissionError("the network namespace cannot be entered")


def _enter(namespace: int) -> None:
    """Enter the network namespace. Without root that needs the user namespace that owns it."""
    libc = open_libc()
    if libc.setns(namespace, _CLONE_NEWNET) == 0:
        return
    owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    if libc.setns(owner, _CLONE_NEWUSER) != 0 or libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise PermissionError
