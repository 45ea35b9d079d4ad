"""The hub: the process that serves all hosts of one user, each through a thin client of its own (via.py).

Each client has its own gateway: its configuration, settings, policy and approvals are read with its
variables, in its working folder, and its sessions, questions and subscriptions are nobody else's. What
clients have in common is this process, and the processes of plugins that may be shared (shared.py).

A client's first line says what it was started with. Lines of JSON follow, both ways; a line that begins with
# goes to the client's stderr.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import select
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import trio
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPDeprecationWarning

from runner import __version__
from runner.approvals.record import ApprovalsUnusable
from runner.extras import missing
from runner.gateway.confinement import less_allowed, read_marks
from runner.gateway.options import StdioOptions
from runner.gateway.shared import SharedPlugins
from runner.gateway.stdio import ClientLines, ClientWriter, StdioGateway, end_by_signal
from runner.gateway.via import folder_fault, places
from runner.lifecycle.feed import BoundedFeed, FeedSource
from runner.serve.listen import CannotListen, listen_unix, raise_descriptors
from runner.serve.peer import unix_peer
from sandbox import surroundings
from sandbox.document.diagnostic import DocumentError, cut, printable
from sandbox.surroundings import ClientSurroundings

MOST_CLIENTS = 64
_HELLO_SECONDS = 10.0
_MOST_SAID = 1000  # lines for a client's stderr, that wait
_LOCK_SECONDS = 10.0  # for a hub that is ending
_LOOK_SECONDS = 0.05
_ACCEPT_AGAIN_SECONDS = 0.5
_STUCK_SECONDS = 0.2  # for which a client may leave an answer before it is taken for one that does not read
_ANOTHER = "end your hosts' sessions, and the hub ends too; or name another socket with --via"
_SPACES = ("mnt", "user", "pid", "net")
_SO_PEERPIDFD = 77

# The options that these words mean in this folder. Raises ValueError, DocumentError and ApprovalsUnusable.
ReadOptions = Callable[[Sequence[str], str], StdioOptions]


class HubRefusal(Exception):
    """Why a client is not served."""


class ClientHello(NamedTuple):
    words: tuple[str, ...]
    environ: Mapping[str, str]
    folder: str


class GatewayHub:
    def __init__(
        self, nursery: trio.Nursery, idle: float, read_options: ReadOptions, say: Callable[[str], None]
    ) -> None:
        """`idle`: seconds without a call, after which a plugin ends; and without a client, the hub."""
        self._nursery = nursery
        self._idle = idle
        self._read_options = read_options
        self._say = say
        self._shared = SharedPlugins(nursery)
        self._clients = 0
        self._unused = trio.CancelScope()

    async def serve(self, listener: trio.SocketListener) -> None:
        """Until it was unused for its time."""
        while True:
            # Who started it is given time to come, whatever the time without a client is.
            first = trio.current_time() + max(self._idle, _HELLO_SECONDS)
            with trio.CancelScope(deadline=first) as self._unused:
                while True:
                    try:
                        stream = await listener.accept()
                    except OSError as error:  # no descriptor is left, or the client has gone already
                        self._say(f"no client can be accepted: {error.strerror}")
                        await trio.sleep(_ACCEPT_AGAIN_SECONDS)
                        continue
                    self._clients += 1
                    self._unused.deadline = float("inf")
                    self._nursery.start_soon(self._serve, stream)
            if not self._clients:
                return

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                await self._serve_client(stream)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it has gone while it was told something
        except* Exception as bugs:  # noqa: BLE001 -- of one client; the others go on
            for bug in _leaves(bugs):
                self._say(f"internal: {type(bug).__name__}: {bug}")
        finally:
            self._clients -= 1
            if not self._clients:
                self._unused.deadline = trio.current_time() + self._idle

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        said: FeedSource[str] = FeedSource(_MOST_SAID)

        def say(text: str) -> None:
            said.tell(f"#runner gateway: {printable(text)}\n")

        writer = HubWriter(stream)
        lines = HubLines(stream, say, writer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pass_on, said.subscribe(), writer)
            try:
                gateway = await self._greet(stream, lines, say)
            except HubRefusal as refusal:
                await writer.write(json.dumps({"refused": printable(str(refusal))}) + "\n")
            else:
                with closing(gateway):  # also if the client has gone meanwhile
                    await writer.write('{"ready": true}\n')
                    reads: Any = lines  # they have what the transport uses
                    writes: Any = writer
                    async with stdio_server(reads, writes) as streams:
                        await gateway.run(*streams)
            said.close()

    async def _greet(
        self, stream: trio.SocketStream, lines: ClientLines, say: Callable[[str], None]
    ) -> StdioGateway:
        """Raises HubRefusal."""
        if fault := peer_fault(stream.socket):
            raise HubRefusal(fault)
        if self._clients > MOST_CLIENTS:
            raise HubRefusal(f"{MOST_CLIENTS} clients use this hub, which is the most; end sessions of hosts")
        hello = None
        with trio.move_on_after(_HELLO_SECONDS):
            hello = read_hello(await anext(lines, ""))
        if hello is None:
            raise HubRefusal(f"the client did not say within {_HELLO_SECONDS:g} s what it was started with")
        # For this task, and all that it starts.
        surroundings.enter(ClientSurroundings(hello.environ, hello.folder))
        return await trio.to_thread.run_sync(self._make_gateway, hello, say)

    def _make_gateway(self, hello: ClientHello, say: Callable[[str], None]) -> StdioGateway:
        try:
            options = self._read_options(hello.words, hello.folder)
            try:
                return StdioGateway(options, hello.environ, say, opener=self._shared.open, idle=self._idle)
            except BaseException:
                options.close()  # no client of this hub may leave something open
                raise
        except ModuleNotFoundError as error:
            raise HubRefusal(missing("gateway", error)) from None
        except DocumentError as error:
            told = (part for each in error.diagnostics for part in (each.text(), each.hint) if part)
            raise HubRefusal("; ".join(told)) from None
        except ValueError as error:
            raise HubRefusal(str(error)) from None
        except ApprovalsUnusable as unusable:
            raise HubRefusal(f"{unusable}; {unusable.hint}") from None
        except Exception as bug:  # noqa: BLE001 -- this client is told, and the others go on
            raise HubRefusal(f"internal: {type(bug).__name__}: {bug}") from None


class HubWriter(ClientWriter):
    """Knows whether its client reads."""

    def __init__(self, stream: trio.abc.SendStream) -> None:
        super().__init__(stream)
        self._began = math.inf  # writing what is not taken yet
        self._taken = trio.Event()

    async def write(self, text: str) -> None:
        async with self._turn:
            self._began, self._taken = trio.current_time(), trio.Event()
            try:
                await self._stream.send_all(text.encode())
            finally:
                self._began = math.inf
                self._taken.set()

    async def until_read(self) -> None:
        while trio.current_time() - self._began > _STUCK_SECONDS:
            await self._taken.wait()


class HubLines(ClientLines):
    """Of a client that does not read, nothing more is taken: its answers would fill the memory of all."""

    def __init__(self, stream: trio.abc.ReceiveStream, say: Callable[[str], None], writer: HubWriter) -> None:
        super().__init__(stream, say)
        self._writer = writer

    async def __anext__(self) -> str:
        await self._writer.until_read()
        return await super().__anext__()


def read_hello(line: str) -> ClientHello:
    """Raises HubRefusal."""
    try:
        said = json.loads(line)
        version, folder = str(said["version"]), str(said["folder"])
        words = tuple(map(str, said["words"]))
        environ = {str(name): str(value) for name, value in said["environ"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise HubRefusal("what was sent is not the first line of a client of this hub") from None
    if version != __version__:
        raise HubRefusal(
            f"this hub is of version {__version__}, and the client of {cut(version, 40)}; {_ANOTHER}"
        )
    if not folder.startswith("/"):
        raise HubRefusal("the client is in no folder")
    if (mine := places(os.environ)) != (its := places(environ)):
        names = sorted(name for name in {*mine, *its} if mine.get(name) != its.get(name))
        raise HubRefusal(f"this hub was started with another {cut(', '.join(names), 500)}; {_ANOTHER}")
    return ClientHello(words, environ, folder)


def peer_fault(connection: trio.socket.SocketType) -> str:
    """Why who has connected is not served, or ''. A plugin of the same user would have the same uid; its
    cage is another set of namespaces."""
    peer = unix_peer(connection)
    if peer.uid != os.geteuid():
        return f"this hub serves the user {os.geteuid()}, and not {peer.uid}"
    try:
        same = all(
            os.path.samefile(f"/proc/{peer.pid}/ns/{name}", f"/proc/self/ns/{name}") for name in _SPACES
        )
        less = less_allowed(read_marks(str(peer.pid)), read_marks("self"))
    except OSError:
        same, less = False, ""
    if not same or has_ended(connection):  # else its id may be another process's by now
        return (
            "this hub serves processes outside of any cage and container, in its own namespaces; others use"
            " another --via"
        )
    if not less:
        return ""
    return (
        "this hub may do what its client may not, or makes files in another way"
        f" ({less} in /proc/PID/status); use --shared, which takes a hub of its own, or another --via"
    )


def has_ended(connection: trio.socket.SocketType) -> bool:
    """Whether the process that has connected has ended: another one may hold the connection then. A kernel
    before 6.5 does not say."""
    try:
        fd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        return error.errno == errno.ESRCH
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(fd)


async def _pass_on(said: BoundedFeed[str], writer: ClientWriter) -> None:
    async for line in said:
        await writer.write(line)


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


@contextmanager
def _only_one(path: str) -> Iterator[None]:
    """While this context lasts, no other hub listens there. Raises CannotListen."""
    try:
        fd = os.open(f"{path}.hub", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CannotListen(f"--listen {path}: {path}.hub cannot be opened: {error.strerror}") from None
    try:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CannotListen(f"--listen {path}: another hub serves there") from None
                time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(fd)


def run(path: str, idle: float, read_options: ReadOptions, say: Callable[[str], None]) -> None:
    """Raises CannotListen."""
    warnings.simplefilter("ignore", MCPDeprecationWarning)
    path = os.path.abspath(path)
    with suppress(OSError):  # its fault is told
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    if fault := folder_fault(path):
        raise CannotListen(f"--listen {path}: {fault}")
    os.chdir("/")
    raise_descriptors()
    with _only_one(path), listen_unix(path) as listening:
        try:
            trio.run(_run, listening, idle, read_options, say)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)


async def _run(
    listening: socket.socket, idle: float, read_options: ReadOptions, say: Callable[[str], None]
) -> None:
    listening.setblocking(False)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_by_signal, nursery.cancel_scope)
        await GatewayHub(nursery, idle, read_options, say).serve(listener)
        nursery.cancel_scope.cancel()
