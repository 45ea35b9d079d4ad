"""The observer's own process: it is asked about each observed call of the cage, notes it, and lets it go on.

It decides nothing and grants nothing. Every answer is "continue", and the cage judges the call as if nobody
had looked. The plugin can change a path after it was read here, or be read half-way through a change. So what
is noted is what the plugin showed, never a reason to give it anything.

It runs outside of the cage, in a process that was forked and not executed. Nobody else has the listener: when
this process ends, the kernel fails the waiting calls with ENOSYS, and the runner ends the plugin. If the
runner is root, this process has the plugin's uid: that uid made the cage's user namespace, and may read the
memory of the processes in it, and it may read nothing else.
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import json
import os
import select
import struct

from sandbox.files import write_all
from sandbox.gate.confine import close_others, follow_parent, forget_environment, leave_terminal
from sandbox.plan import bwrap
from sandbox.seccomp.filter import machine_arch
from sandbox.seccomp.observation import ObservedCall, observed_calls
from sandbox.spawn import launcher
from sandbox.speed.libc import addressof, get_errno, open_libc, writable
from sandbox.speed.typed import NoReturn
from sandbox.speed.value import NamedTuple

# The plugin chooses how many paths there are. What comes after these bounds is counted.
MOST_PATHS = 10_000
MOST_PATH_BYTES = 2 << 20  # of all of them together
MOST_CONNECTIONS = 1000
LONGEST_PATH = 4096  # as the kernel has it, with the NUL

# What was done with a path, as bits of one number.
LOOKED, READ, LISTED, WRITTEN, MADE, RUN, CONNECTED = (1 << bit for bit in range(7))
_USE_OF_KIND = {"look": LOOKED, "make": MADE, "run": RUN}
USES = ("look", "read", "list", "write", "make", "run", "connect")  # by bit

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
# ioctl(2) requests of a listener, the same on both architectures.
_RECEIVE, _SEND, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082104
_SYNC_WAKE_UP = 1  # Linux 6.6: the caller runs on this processor next
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif
_ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp
_CONTINUE = 1
_VECTOR = struct.Struct("@PN")  # struct iovec
_AT_FDCWD = 0xFFFFFF9C  # -100, the low 32 bits
_PAGE = 4096  # a read never crosses the end of one: the next may not be mapped
_CREATES = os.O_CREAT | os.O_TRUNC
_O_PATH = 0x200000  # the same on both architectures
# What bwrap executes last of all (sandbox/cell/launch.py). Nothing else does before the plugin runs.
_LAUNCHERS = (launcher.PATH.format("").encode(), bwrap.LAUNCHER.encode())
_LONGEST_ADDRESS = 128  # struct sockaddr_storage
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address follows


class SeenCall(NamedTuple):
    """What a call is about: a path, or the address of a host."""

    path: bytes = b""
    use: int = 0
    address: str = ""
    port: int = 0


class UnreadCall(Exception):
    """The arguments of a call could not be read."""


class Notes:
    """What was seen, in bounded memory."""

    def __init__(self) -> None:
        self.paths: dict[bytes, list[int]] = {}  # uses and times
        self.connections: dict[tuple[str, int], int] = {}
        self.missed = 0  # calls about others, after a bound was reached
        self.unread = 0  # calls whose arguments could not be read
        self._room = MOST_PATH_BYTES

    def add_path(self, path: bytes, use: int) -> None:
        known = self.paths.get(path)
        if known is not None:
            known[0] |= use
            known[1] += 1
        elif len(self.paths) < MOST_PATHS and len(path) <= self._room:
            self._room -= len(path)
            self.paths[path] = [use, 1]
        else:
            self.missed += 1

    def add_connection(self, address: str, port: int) -> None:
        key = address, port
        if key in self.connections or len(self.connections) < MOST_CONNECTIONS:
            self.connections[key] = self.connections.get(key, 0) + 1
        else:
            self.missed += 1

    def document(self) -> bytes:
        document = {
            "paths": [[os.fsdecode(path), *noted] for path, noted in self.paths.items()],
            "connections": [[*key, times] for key, times in self.connections.items()],
            "missed": self.missed,
            "unread": self.unread,
        }
        return json.dumps(document).encode()


class NotifierDescriptors(NamedTuple):
    channel: int  # a socket on which the listener comes
    alive: int  # readable when the plugin has ended, or the launching process has
    result: int  # a file in memory for the notes


def run_notifier(descriptors: NotifierDescriptors, identity: tuple[int, int] | None) -> NoReturn:
    """The whole life of the process. `identity`: the uid and the gid to change to."""
    status = 1
    try:
        leave_terminal()
        close_others(set(descriptors))
        forget_environment()
        calls = observed_calls(machine_arch())  # the table is read while it can be
        if identity is not None:
            uid, gid = identity
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        libc = open_libc()
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        follow_parent(lambda: not _is_readable(descriptors.alive))
        listener = _receive_listener(descriptors.channel)
        notes = Notes()
        if listener is not None:
            os.close(descriptors.channel)
            _Notifier(listener, descriptors.alive, calls, notes).serve()
        write_all(descriptors.result, notes.document())
        status = 0
    finally:
        os._exit(status)


def _receive_listener(channel: int) -> int | None:
    """Wait for the listener. None: the cage could not be built."""
    source = _socket.socket(fileno=os.dup(channel))
    try:
        _, rights, _, _ = source.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    finally:
        source.close()
    for _, _, data in rights:
        return int.from_bytes(data[:4], "little")
    return None


def _is_readable(fd: int) -> bool:
    watch = select.poll()
    watch.register(fd, select.POLLIN)
    return bool(watch.poll(0))


class _Notifier:
    def __init__(
        self,
        listener: int,
        alive: int,
        calls: dict[int, tuple[str, ObservedCall]],
        notes: Notes,
    ) -> None:
        self._listener = listener
        self._alive = alive
        self._calls = calls
        self._notes = notes
        self._begun = False  # bwrap has started the plugin's launcher; before that, all calls are bwrap's
        self._libc = open_libc()
        self._memory = writable(_PAGE)
        self._local = writable(_VECTOR.size)
        self._remote = writable(_VECTOR.size)

    def serve(self) -> None:
        """Answer until the plugin's last process has ended."""
        try:
            fcntl.ioctl(self._listener, _SET_FLAGS, _SYNC_WAKE_UP)
        except OSError:
            pass  # an older kernel
        watch = select.poll()
        watch.register(self._listener, select.POLLIN)
        watch.register(self._alive, select.POLLIN)
        while True:
            for fd, events in watch.poll():
                if fd == self._alive:
                    return
                if events & select.POLLIN:
                    self._answer()
                else:  # no process has the filter any more
                    watch.unregister(self._listener)

    def _answer(self) -> None:
        raw = bytearray(_NOTIFICATION.size)  # the kernel wants zeros
        try:
            fcntl.ioctl(self._listener, _RECEIVE, raw, True)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):  # its process was killed meanwhile
                return
            raise
        number, pid, _, call, _, _, *arguments = _NOTIFICATION.unpack(raw)
        seen, is_read = SeenCall(), True
        try:
            name, observed = self._calls[call]
            if self._begun or observed.kind == "run":
                seen = self._read(pid, name, observed, arguments)
        except (UnreadCall, OSError):
            is_read = False
        try:
            fcntl.ioctl(self._listener, _SEND, _ANSWER.pack(number, 0, 0, _CONTINUE))
        except OSError as error:
            # The kernel takes no answer to a call that was interrupted. Then its pid may already be another
            # process, whose memory was read: nothing of it counts.
            if error.errno == errno.ENOENT:
                return
            raise
        if not self._begun:
            self._begun = seen.path.startswith(_LAUNCHERS)
            # The first call is that of a copy of the runner, whose memory is closed to the plugin's uid.
            self._notes.unread = 0 if self._begun else self._notes.unread + (not is_read)
        elif not is_read:
            self._notes.unread += 1
        elif seen.path:
            self._notes.add_path(seen.path, seen.use)
        elif seen.address:
            self._notes.add_connection(seen.address, seen.port)

    def _read(self, pid: int, name: str, call: ObservedCall, arguments: list[int]) -> SeenCall:
        if call.kind == "connect":
            return read_address(self._bytes(pid, arguments[1], min(arguments[2], _LONGEST_ADDRESS)))
        path = self._text(pid, arguments[call.path])
        if not path:
            return SeenCall()  # ENOENT, wherever it runs
        if not path.startswith(b"/"):
            path = self._absolute(pid, path, arguments[call.directory] if call.directory >= 0 else _AT_FDCWD)
        if call.mode >= 0 and arguments[call.mode] & os.W_OK:
            return SeenCall(path, WRITTEN)  # many programs ask first, and do not try what is refused
        if call.kind != "open":
            return SeenCall(path, _USE_OF_KIND[call.kind])
        flags = arguments[call.flags]
        if name == "openat2":
            flags = int.from_bytes(self._bytes(pid, flags, 8), "little")
        return SeenCall(path, use_of(flags))

    def _absolute(self, pid: int, path: bytes, directory: int) -> bytes:
        at = directory & 0xFFFFFFFF
        where = f"/proc/{pid}/cwd" if at == _AT_FDCWD else f"/proc/{pid}/fd/{at}"
        base = os.readlink(os.fsencode(where))
        if not base.startswith(b"/") or base.endswith(b" (deleted)"):
            raise UnreadCall
        return b"/" + os.path.join(base, path).lstrip(b"/")

    def _text(self, pid: int, address: int) -> bytes:
        """The text at this address, up to its NUL."""
        found = b""
        while len(found) < LONGEST_PATH:
            size = _PAGE - address % _PAGE
            got = self._copy(pid, address, size)
            part: bytes = self._memory.value  # up to a NUL, or all of it
            found += part[:got]
            if len(part) < got:
                return found
            address += got
        raise UnreadCall

    def _bytes(self, pid: int, address: int, size: int) -> bytes:
        found = b""
        while len(found) < size:
            got = self._copy(pid, address, min(size - len(found), _PAGE - address % _PAGE))
            found += self._memory.raw[:got]
            address += got
        return found

    def _copy(self, pid: int, address: int, size: int) -> int:
        """Copy memory of a process that waits. Returns how many bytes were copied."""
        _VECTOR.pack_into(self._local, 0, addressof(self._memory), size)
        _VECTOR.pack_into(self._remote, 0, address, size)
        got: int = self._libc.process_vm_readv(pid, self._local, 1, self._remote, 1, 0)
        if got <= 0:
            raise UnreadCall if got == 0 else OSError(get_errno(), "")
        return got


def use_of(flags: int) -> int:
    """What a file is opened for."""
    if flags & _O_PATH:
        return LOOKED
    if flags & os.O_ACCMODE or flags & _CREATES:
        return WRITTEN
    return LISTED if flags & os.O_DIRECTORY else READ


def read_address(raw: bytes) -> SeenCall:
    """The socket file, or the address and the port, that a struct sockaddr names."""
    family = int.from_bytes(raw[:2], "little")
    if family == _AF_UNIX:
        path = raw[2:].split(b"\0")[0]
        # An abstract socket belongs to the plugin's network namespace, and a relative path is its own too.
        return SeenCall(path, CONNECTED) if path.startswith(b"/") else SeenCall()
    port = int.from_bytes(raw[2:4], "big")
    if family == _AF_INET6 and len(raw) >= 24 and raw[8:20] == _MAPPED:
        return SeenCall(address=_socket.inet_ntop(_AF_INET, raw[20:24]), port=port)
    if family == _AF_INET6 and len(raw) >= 24:
        return SeenCall(address=_socket.inet_ntop(_AF_INET6, raw[8:24]), port=port)
    if family == _AF_INET and len(raw) >= 8:
        return SeenCall(address=_socket.inet_ntop(_AF_INET, raw[4:8]), port=port)
    return SeenCall()
