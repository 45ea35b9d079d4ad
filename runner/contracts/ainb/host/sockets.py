"""host/unix_socket_*: streams to sockets of the host that the manifest lists and the policy allows.

What a path leads to is decided once, on a descriptor, and that descriptor is connected. Only links that root
made in root's own folders are followed (/var/run): a plugin that can write beside a listed socket could put a
link to another daemon's socket in its place.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import trio

from runner.contracts.ainb.host.params import MANIFEST_VALIDATION, denied, invalid
from runner.contracts.ainb.payload import encode
from runner.protocol.bus import Room
from runner.protocol.host_services import HostError, Tell
from runner.protocol.jsonrpc import INVALID_PARAMS
from sandbox.paths.denied_paths import lexical_fault
from sandbox.paths.denylist import Denylist
from sandbox.paths.homes import homes
from sandbox.paths.mounts import contains, read_mounts
from sandbox.paths.walk import LinkRefused, TooManyLinks, close, real_path, walk

CAPABILITY = "unix_socket_dial"
EVENT = "plugin/handle_event"

SOCKETS_MOST = 16  # of one plugin
UNSENT_MOST_BYTES = 1 << 20  # of one stream, until the socket takes them. More ends the stream
_PIECE_BYTES = 64  # that a piece costs beside its data
READ_BYTES = 64 << 10  # of a stream, for one event

# Never dialled, even if the manifest lists them: a program could control the host through these.
_DENIED_NAMES = frozenset(
    "docker.sock containerd.sock podman.sock crio.sock cri-dockerd.sock buildkitd.sock"
    " system_bus_socket".split()
)
_DENIED_FOLDERS = ("/run/user", "/run/systemd", "/run/dbus")

# Searches at the same time, for one plugin: a path on a dead network filesystem blocks a thread for ever.
_THREADS = 4

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SHOWN = 512  # characters of a path in a message


class _Stream:
    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.unsent: deque[bytes] = deque()
        self.bytes = 0
        self.changed = trio.Event()
        self.overrun = False

    def put(self, data: bytes) -> None:
        if not data:
            return
        if self.bytes + cost(data) > UNSENT_MOST_BYTES:
            self.overrun = True
        else:
            self.unsent.append(data)
            self.bytes += cost(data)
        self.changed.set()


def cost(data: bytes) -> int:
    return len(data) + _PIECE_BYTES


class _Handover:
    """Passes a descriptor from a thread to a task that may have been cancelled. Then it is closed."""

    def __init__(self) -> None:
        self.fd = -1
        self._over = False
        self._lock = threading.Lock()

    def give(self, fd: int) -> None:
        with self._lock:
            if self._over:
                os.close(fd)
            else:
                self.fd = fd

    def end(self) -> None:
        with self._lock:
            self._over = True
            if self.fd >= 0:
                os.close(self.fd)


class UnixSockets:
    """The sockets of one session. `listed`: the manifest's list; None: it says `true`. `denied`: paths that
    the policy denies."""

    def __init__(
        self,
        listed: Sequence[str] | None,
        environ: Mapping[str, str],
        tell: Tell,
        room: Room,
        denied: Sequence[str] = (),
    ) -> None:
        self._listed = listed
        self._environ = environ
        self._tell = tell
        self._room = room
        self._streams: dict[str, _Stream] = {}
        self._closed = False
        self._denied = tuple(denied)
        self._denylist: Denylist | None = None
        self._threads = trio.CapacityLimiter(_THREADS)

    async def dial(self, path: str) -> dict[str, str]:
        """Raises HostError."""
        if self._listed is None:
            raise HostError(MANIFEST_VALIDATION, f"{CAPABILITY} must be a list of paths, not true")
        if len(self._streams) >= SOCKETS_MOST:
            raise invalid(f"there are {SOCKETS_MOST} sockets already: close one")
        opened = _Handover()
        try:
            await trio.to_thread.run_sync(
                lambda: opened.give(self._open_listed(path)), abandon_on_cancel=True, limiter=self._threads
            )
            connection = await _connect(opened.fd, path)
        finally:
            opened.end()
        if self._closed or len(self._streams) >= SOCKETS_MOST:
            connection.close()
            full = f"there are {SOCKETS_MOST} sockets already: close one"
            raise invalid("the session is over" if self._closed else full)
        name = secrets.token_hex(16)
        stream = self._streams[name] = _Stream()
        # It lives as long as the session (close_all), and not as long as this request.
        trio.lowlevel.spawn_system_task(self._carry, name, stream, trio.SocketStream(connection))
        return {"stream_id": name}

    def send(self, name: str, data: bytes) -> None:
        if name in self._streams:
            self._streams[name].put(data)

    def close(self, name: str) -> None:
        stream = self._streams.pop(name, None)
        if stream is not None:
            stream.scope.cancel()

    def close_all(self) -> None:
        self._closed = True
        for name in tuple(self._streams):
            self.close(name)

    # --- one stream -----------------------------------------------------------------------------------------

    async def _carry(self, name: str, stream: _Stream, connection: trio.SocketStream) -> None:
        """Carry bytes both ways until one side ends it. Never raises: it is a task of trio's own."""
        try:
            with stream.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send, stream, connection)
                    end = await self._receive(name, connection)
                    nursery.cancel_scope.cancel()
                self._event(name, end)
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError, _Overrun) as group:
            reason = next(iter(_leaves(group)), "")
            self._event(name, {"kind": "error", "error": reason})
        except* Exception as group:  # noqa: BLE001 -- it would end trio
            self._event(name, {"kind": "error", "error": f"{type(group.exceptions[0]).__name__} in the host"})
        finally:
            self._streams.pop(name, None)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(connection)

    async def _receive(self, name: str, connection: trio.SocketStream) -> dict[str, str]:
        while data := await connection.receive_some(READ_BYTES):
            self._event(name, {"kind": "data", "bytes": encode(bytes(data))})
            await self._room()  # the daemon waits while the plugin does not read
        return {"kind": "eof"}

    async def _send(self, stream: _Stream, connection: trio.SocketStream) -> None:
        while True:
            if stream.overrun:
                raise _Overrun(f"more than {UNSENT_MOST_BYTES} bytes wait to be sent")
            if not stream.unsent:
                stream.changed = trio.Event()
                await stream.changed.wait()
                continue
            data = stream.unsent.popleft()
            await connection.send_all(data)
            stream.bytes -= cost(data)

    def _event(self, name: str, value: Mapping[str, str]) -> None:
        if name in self._streams:  # not closed by the plugin
            self._tell(EVENT, {"topic": f"socket:{name}", "payload": json.dumps(value).encode()})

    # --- paths, in a thread ---------------------------------------------------------------------------------

    def _open_listed(self, path: str) -> int:
        """An O_PATH descriptor of the socket, if it is one that the manifest lists. Raises HostError."""
        asked = self._expand(path)
        if asked is None or lexical_fault(asked) is not None or self._is_denied(asked):
            raise denied(CAPABILITY, path=path)
        try:
            fd, real = _open(asked)
        except (LinkRefused, TooManyLinks):
            raise denied(CAPABILITY, path=path) from None
        except OSError as error:
            # A plugin must not learn whether other paths exist.
            if asked not in [self._expand(entry) for entry in self._listed or ()]:
                raise denied(CAPABILITY, path=path) from None
            raise _failed(path, error) from None
        try:
            if real not in self._places() or self._is_denied(real):
                raise denied(CAPABILITY, path=path)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise HostError(INVALID_PARAMS, f"dial {path[:_SHOWN]}: it is not a socket")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _is_denied(self, path: str) -> bool:
        if os.path.basename(path) in _DENIED_NAMES or any(contains(each, path) for each in _DENIED_FOLDERS):
            return True
        if self._denylist is None:
            self._denylist = Denylist(read_mounts(), homes=homes(self._environ), policy=self._denied)
        return any(
            # Sockets of the user lie in /run too. The manifest has to name each, and the policy allows it.
            found.applies(relation, "read") and found.origin != "sockets"
            for relation, found in self._denylist.related(path)
        )

    def _places(self) -> set[str]:
        """The paths of the listed sockets."""
        found = set()
        for entry in self._listed or ():
            place = self._expand(entry)
            if place is None or lexical_fault(place) is not None:
                continue
            try:
                fd, real = _open(place)
            except (OSError, LinkRefused, TooManyLinks):
                continue
            os.close(fd)
            found.add(real)
        return found

    def _expand(self, path: str) -> str | None:
        """The path with ~ and ${VARIABLE} replaced. None: there is no such variable."""
        if path == "~" or path.startswith("~/"):
            path = "${HOME}" + path[1:]
        names = _VARIABLE.findall(path)
        if any(not self._environ.get(name) for name in names):
            return None
        return _VARIABLE.sub(lambda found: self._environ[found[1]], path)


class _Overrun(Exception):
    """The plugin sends faster than the socket takes it."""


def _open(path: str) -> tuple[int, str]:
    """An O_PATH descriptor, and where it is. Raises as `walk` does."""
    steps = walk(path, follow="system")
    try:
        return os.dup(steps[-1].fd), real_path(steps)
    finally:
        close(steps)


async def _connect(fd: int, path: str) -> trio.socket.SocketType:
    """Raises HostError."""
    connection = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        await connection.connect(f"/proc/self/fd/{fd}")
        connection.getpeername()  # trio takes a full queue of the listener (EAGAIN) for a connection
    except OSError as error:
        connection.close()
        raise _failed(path, error) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _failed(path: str, error: OSError) -> HostError:
    return HostError(INVALID_PARAMS, f"dial {path[:_SHOWN]}: {error.strerror} (os error {error.errno})")


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[str]:
    texts: list[str] = []
    for each in group.exceptions:
        texts += _leaves(each) if isinstance(each, BaseExceptionGroup) else [str(each)]
    return texts
