"""Make the plugin's network namespace, set it up with prepared messages, and hand its sockets to the gate.

A plugin without a network has no gate. The runner then gets one socket, which sees the names that the plugin
looks up (sandbox/cell/name_lookups.py).

It is made by root, before its uid is dropped, or by the cell's init in its own user namespace. Either way it
is owned by a user namespace outside of the plugin's, so no capability that the plugin gets lets it change
routes or rules. A socket stays in the namespace it was made in, so the gate can serve it from outside. Only
the gate holds these sockets: when it has ended, connections are refused.

Runs between a clone and an exec: the standard library only. `_socket` and not `socket`, which takes longer
to import than the namespace takes to make.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import struct
import time

from sandbox.spawn.order import LEAVE, MEET_GATE, NetlinkRequest, NetworkFault, NetworkOrder, SocketRequest
from sandbox.speed.libc import Library, get_errno
from sandbox.speed.typed import Sequence

CLONE_NEWNET = 0x40000000

_NAMESPACE = "/proc/self/ns/net"

# From linux/netlink.h. A header: length, type, flags, number, port.
HEADER = struct.Struct("=IHHII")
_ERROR = struct.Struct("=i")
_NLMSG_ERROR = 2
_NLM_F_ACK = 4
_ANSWER_BYTES = 64 << 10

# Connections that may wait to be accepted, for each listener. The client of one more retries after a second.
_BACKLOG_CONNECTIONS = 1024
_GATE_SECONDS = 10.0  # how long the gate may take to get ready, if the launch has no limit
READY = b"g"  # the gate's answer

# Errors of a kernel without IPv6, or with IPv6 switched off.
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EOPNOTSUPP, errno.EACCES, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


# Steps of this module. A recipe adds its own.
_MAKE, _LISTEN, _HAND_OVER = (
    "make a network namespace",
    "listen for the plugin's connections",
    "hand the sockets to the gate",
)
STEPS = frozenset((_MAKE, _LISTEN, _HAND_OVER, LEAVE, MEET_GATE))


class _Step:
    """The current step, for the message if it fails."""

    def __init__(self) -> None:
        self.name = _MAKE


def make_network(order: NetworkOrder, libc: Library) -> None:
    """Move this process to a new network namespace, set it up, and hand its sockets to the gate.

    Raises NetworkFault. The namespace ends with this process.
    """
    step = _Step()
    try:
        if libc.unshare(CLONE_NEWNET) < 0:
            raise OSError(get_errno(), "")
        has_ipv6 = _set_up(order.recipe.requests, step)
        step.name = _LISTEN
        sockets = [each for each in order.recipe.sockets if has_ipv6 or each.version == 4]
        try:
            _send_sockets(sockets, order, step)
        except OSError:  # for example, a filter around the runner knows no sockets of the internet
            if order.gate:
                raise
    except NetworkFault:
        raise
    except OSError as error:
        raise NetworkFault(step.name, error.errno or errno.EIO) from None


def outside_network() -> str:
    """The runner's network namespace, for NetworkOrder."""
    return os.readlink(_NAMESPACE)


def require_own_network(order: NetworkOrder) -> None:
    """Raise OSError if this process is still in the runner's network namespace, where bwrap would then
    run."""
    if os.readlink(_NAMESPACE) == order.outside:
        raise OSError(errno.EPERM, "")


def wait_for_gate(order: NetworkOrder) -> None:
    """Wait until the gate is confined and serves. Raises OSError if it ends or takes too long."""
    left = _GATE_SECONDS if order.until is None else order.until - time.monotonic()
    watch = select.poll()
    watch.register(order.channel, select.POLLIN)
    if not watch.poll(max(0.0, left) * 1000):
        raise OSError(errno.ETIMEDOUT, "")
    if os.read(order.channel, 1) != READY:
        raise OSError(errno.ECONNREFUSED, "")  # it has ended
    os.close(order.channel)


# --- netlink ------------------------------------------------------------------------------------------------


def _set_up(requests: Sequence[NetlinkRequest], step: _Step) -> bool:
    """Send all requests. Returns whether the namespace has IPv6."""
    has_ipv6 = True
    kernels: dict[int, _socket.socket] = {}
    try:
        for request in requests:
            if request.version == 6 and not has_ipv6:
                continue
            step.name = request.step
            try:
                if request.protocol not in kernels:
                    kernels[request.protocol] = _socket.socket(
                        _socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, request.protocol
                    )
                send_request(kernels[request.protocol], request.messages)
            except OSError as error:
                if request.version != 6 or error.errno not in _NO_IPV6:
                    raise
                has_ipv6 = False
    finally:
        for kernel in kernels.values():
            kernel.close()
    return has_ipv6 and any(request.version == 6 for request in requests) and _knows_ipv6()


def _knows_ipv6() -> bool:
    try:
        _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC, 0).close()
    except OSError:
        return False
    return True


def send_request(kernel: _socket.socket, messages: bytes) -> None:
    """Send messages, and check that the kernel has accepted each. Raises OSError.

    The kernel handles a message during `send`: all answers are there when it returns.
    """
    waiting = _numbers(messages)
    kernel.send(messages)
    while waiting:
        try:
            answer = kernel.recv(_ANSWER_BYTES, _socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise OSError(errno.EPROTO, "") from None  # one of them was not answered
        at = 0
        while at + HEADER.size <= len(answer):
            length, kind, _, number, _ = HEADER.unpack_from(answer, at)
            if kind == _NLMSG_ERROR and min(length, len(answer) - at) >= HEADER.size + _ERROR.size:
                (code,) = _ERROR.unpack_from(answer, at + HEADER.size)
                if code:
                    raise OSError(-code, "")
                waiting.discard(number)
            at += max((length + 3) & ~3, HEADER.size)


def _numbers(messages: bytes) -> set[int]:
    """The numbers of the messages that ask for an answer."""
    found, at = set(), 0
    while at + HEADER.size <= len(messages):
        length, _, flags, number, _ = HEADER.unpack_from(messages, at)
        if flags & _NLM_F_ACK:
            found.add(number)
        at += max((length + 3) & ~3, HEADER.size)
    return found


# --- sockets ------------------------------------------------------------------------------------------------


def _send_sockets(wanted: Sequence[SocketRequest], order: NetworkOrder, step: _Step) -> None:
    made: list[_socket.socket] = []
    try:
        counts = {"listener": 0, "redirected": 0, "closed_ports": 0}
        for each in wanted:
            try:
                made.append(_bind(each))
            except OSError:
                if each.use == "closed_ports":
                    continue  # nothing depends on it: a container may have no CAP_NET_RAW
                raise
            if each.use in counts:
                counts[each.use] += 1
        step.name = _HAND_OVER
        header = b"%d %d %d" % (*counts.values(),)
        descriptors = struct.pack(f"{len(made)}i", *(each.fileno() for each in made))
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)
        channel = _socket.socket(fileno=os.dup(order.channel))
        try:
            channel.sendmsg([header], [rights])
        finally:
            channel.close()
    finally:
        for one in made:
            one.close()


def _bind(wanted: SocketRequest) -> _socket.socket:
    family = _socket.AF_INET6 if wanted.version == 6 else _socket.AF_INET
    if wanted.use == "closed_ports":
        raw = _socket.SOCK_RAW | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
        return _socket.socket(family, raw, _socket.IPPROTO_TCP)
    datagrams = wanted.use == "dns_udp"
    kind = _socket.SOCK_DGRAM if datagrams else _socket.SOCK_STREAM
    made = _socket.socket(family, kind | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK, 0)
    try:
        if wanted.version == 6:
            made.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 1)
        if wanted.shares_port:
            made.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEPORT, 1)
        made.bind((wanted.address, wanted.port))
        if not datagrams:
            made.listen(_BACKLOG_CONNECTIONS)
    except BaseException:
        made.close()
        raise
    return made
