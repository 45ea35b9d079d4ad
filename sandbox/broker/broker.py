"""The broker of one plugin: a process of its own, forked and not executed, that alone knows the hidden
values.

    P --fork--> authority: makes the certificates, writes one to P and one to the broker, ends
    P --fork--> broker: reads the roots of the system, confines itself, takes connections from the gate

The gate judges each connection, dials it, and hands both of its ends over on `channel`. The broker ends when
the gate has closed that, when the process that forked it ends, or by an unexpected error.
"""

from __future__ import annotations

import _socket as socket
import encodings.ascii
import encodings.latin_1
import encodings.utf_8  # noqa: F401 -- loaded now: on first use no file can be opened any more
import gc
import os
import select
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from sandbox.broker.calls import broker_filter
from sandbox.broker.tasks import Tasks
from sandbox.gate.audit import MOST_LINE_BYTES, encode_line
from sandbox.gate.confine import (
    close_others,
    confine,
    follow_parent,
    forbid_tracing,
    forget_environment,
    leave_terminal,
)
from sandbox.gate.cpu_limiter import CpuLimiter, CpuTimeSpent
from sandbox.gate.loop import READ, Loop
from sandbox.network.credentials import BrokerPlan, HiddenValue
from sandbox.network.hosts import read_address
from sandbox.seccomp.filter import machine_arch
from sandbox.speed.libc import open_libc

if TYPE_CHECKING:
    from sandbox.broker.connection import BrokerParts, Connection

# Exit codes of the broker's process.
EXIT_ENDED = 0  # the gate has closed the channel
EXIT_FAULT = 70  # an unexpected error while serving
EXIT_UNCONFINED = 125  # it could not begin, or not be confined; it never served

MOST_CONNECTIONS = 320  # the gate has 256 at most, and closed ones linger here
_FDS_PER_CONNECTION, _MORE_FDS = 2, 32
_MOST_MESSAGE_BYTES = 1024
_MOST_AT_ONCE = 16  # connections taken, before other events have their turn
_MSG_CMSG_CLOEXEC = 0x40000000
_MOST_TEXT_CHARACTERS = 300
_FD = struct.Struct("i")


class _GateEnded(Exception):
    """The gate has ended."""


def run_broker(
    channel: int,
    plan: BrokerPlan,
    hidden: Sequence[HiddenValue],
    chain: int,
    alive: int,
    identity: tuple[int, int] | None,
    *,
    cores: float | None = None,
    seconds: float | None = None,
) -> NoReturn:
    """Serve until the gate has ended. Call it in a forked child of a process with one thread.

    `channel`: the socket to the gate. `chain`: a pipe that has the key and the certificate for the plugin
    (authority.py). `alive`: a pipe that is readable when the plugin has ended. `identity`: the uid and gid to
    change to, if root. `cores`, `seconds`: the plugin's limits of processor time.
    """
    code = EXIT_UNCONFINED
    try:
        # The collector would touch objects of the launching process, and so copy the pages they are in.
        gc.freeze()
        leave_terminal()
        close_others({channel, chain, alive})
        forbid_tracing()
        follow_parent(lambda: _is_open(alive))
        forget_environment()
        # A name in a TLS hello that is not ASCII fails in the module _ssl, which then ends the handshake. To
        # show the fault, Python would read source files.
        sys.unraisablehook = lambda _: None
        # This ends when the launch has done its part. Until then this process leaves it the processors.
        certificates = _read_all(chain)
        broker = PluginBroker(plan, hidden)
        broker.load(certificates)
        cpu_limiter = CpuLimiter(cores, seconds, alive)
        program = broker_filter(machine_arch())
        descriptors = MOST_CONNECTIONS * _FDS_PER_CONNECTION + _MORE_FDS
        confine(identity, descriptors, lambda: _is_open(alive), program)
        code = EXIT_FAULT
        broker.serve(channel, alive, cpu_limiter)
        code = EXIT_ENDED
    finally:
        os._exit(code)


class PluginBroker:
    def __init__(self, plan: BrokerPlan, hidden: Sequence[HiddenValue]) -> None:
        from sandbox.broker.terms import BrokerTerms

        self._terms = BrokerTerms(plan, hidden)
        # What counts for one server counts for no other. Made now: later no file can be opened.
        self._roots = {(), *(each.files for each in plan.authorities)}
        self._loop = Loop()
        self._tasks = Tasks(self._loop)
        self._connections: set[Connection] = set()
        self._around: BrokerParts | None = None
        self._channel: socket.socket | None = None
        self._leaving = False
        self._dropped = 0  # lines

    def load(self, certificates: bytes) -> None:
        """Load what needs files: the certificate for the plugin, and the roots of servers."""
        from sandbox.broker.connection import BrokerParts
        from sandbox.broker.tls import make_plugin_context, make_server_context, rehearse

        plugin_tls = make_plugin_context(certificates)
        server_tls = {files: make_server_context(files) for files in self._roots}
        self._around = BrokerParts(self._tasks, self._terms, self._report, plugin_tls, server_tls)
        rehearse(plugin_tls, server_tls[()])
        _preload()
        # A broker may wait for days: what loading has left over is a fifth of its own memory.
        gc.collect()
        with suppress(AttributeError):  # only glibc has it
            open_libc().malloc_trim(0)

    def serve(self, channel: int, alive: int, cpu_limiter: CpuLimiter) -> None:
        self._channel = socket.socket(fileno=channel)
        self._channel.setblocking(False)
        self._loop.watch(channel, READ, lambda _: self._on_channel())
        self._loop.watch(alive, READ, lambda _: self._leave(alive))
        try:
            self._loop.run(cpu_limiter.throttle)
        except (_GateEnded, CpuTimeSpent):
            pass

    def _leave(self, alive: int) -> None:
        self._loop.forget(alive)
        self._leaving = True
        for connection in tuple(self._connections):
            connection.leave()

    # --- the gate ----------------------------------------------------------------------------------

    def _on_channel(self) -> None:
        assert self._channel is not None
        room = socket.CMSG_SPACE(2 * _FD.size)
        for _ in range(_MOST_AT_ONCE):
            try:
                message, rights, flags, _ = self._channel.recvmsg(
                    _MOST_MESSAGE_BYTES, room, _MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                raise _GateEnded from None
            if not message:
                raise _GateEnded
            received = [
                socket.socket(fileno=fd)
                for level, kind, data in rights
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
                for (fd,) in _FD.iter_unpack(data[: len(data) - len(data) % _FD.size])
            ]
            whole = not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
            self._take(message, received if whole else [], received)

    def _take(
        self, message: bytes, sockets: Sequence[socket.socket], received: Sequence[socket.socket]
    ) -> None:
        port, _, host = message.decode("ascii", "replace").partition(" ")
        if (
            len(sockets) != 2
            or not port.isdecimal()
            or not host
            or len(self._connections) >= MOST_CONNECTIONS
        ):
            for each in received:
                each.close()
            return
        from sandbox.broker.connection import Connection
        from sandbox.broker.stream import Stream

        assert self._around is not None
        for each in sockets:
            each.setblocking(False)
        plugin, server = (
            Stream(self._tasks, each, side) for each, side in zip(sockets, ("plugin", "server"), strict=True)
        )
        connection = Connection(self._around, host, int(port), plugin, server, self._connections.discard)
        self._connections.add(connection)
        if self._leaving:
            connection.leave()

    def _report(self, fields: dict[str, str | float]) -> None:
        """Tell the gate about a request. If it does not take the line, the line is dropped and counted."""
        for key, value in fields.items():
            if isinstance(value, str):
                fields[key] = value[:_MOST_TEXT_CHARACTERS]
        line = encode_line(fields)
        if self._dropped and self._say(b"dropped %d" % self._dropped):
            self._dropped = 0
        verdict = str(fields["verdict"]).encode()
        if self._dropped or len(line) > MOST_LINE_BYTES or not self._say(verdict + b" " + line):
            self._dropped += 1

    def _say(self, message: bytes) -> bool:
        assert self._channel is not None
        try:
            return self._channel.send(message) == len(message)
        except OSError:
            return False


def _preload() -> None:
    """Load modules, codecs and tables that Python loads on first use: after confinement no file opens."""
    read_address("192.0.2.7")
    read_address("2001:db8::7")
    str(OSError(1, os.strerror(1)))
    encode_line({"number": 1.5, "text": "\u00e9"})


def _is_open(alive: int) -> bool:
    """Whether the launching process has the other end still."""
    watch = select.poll()
    watch.register(alive, 0)
    return not watch.poll(0)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()
