"""Stream: one side of a connection, in clear text or with TLS. It is read and written in bounded pieces, and
a write ends when the kernel has everything."""

from __future__ import annotations

import _socket as socket
import fcntl
import struct
from collections.abc import Iterable
from typing import Any

from sandbox.broker.calls import SIOCOUTQ
from sandbox.broker.tasks import CLOSED, Tasks, Turns, Wanted
from sandbox.broker.tls import (
    AskedName,
    Context,
    MemoryBIO,
    SSLCertVerificationError,
    SSLEOFError,
    SSLError,
    SSLWantReadError,
    SSLZeroReturnError,
    wrap,
)
from sandbox.gate.loop import READ, WRITE
from sandbox.gate.pump import deliver_on_close, reset_on_close

PIECE_BYTES = 64 << 10  # read at once; a connection holds a few pieces at most
_MOST_UNSENT_BYTES = 64 << 10  # of what TLS wants to send by itself: key updates, alerts


class StreamBroken(Exception):
    """The connection was reset or cut. The text is the rest of a sentence that begins with the host."""

    def __init__(self, reason: str, side: str) -> None:
        super().__init__(reason)
        self.side = side


class StreamCut(StreamBroken):
    """It ended without the end that TLS has."""


class TimeSpent(Exception):
    """What was waited for did not come in time."""


class TlsRefused(Exception):
    """The other end does not accept the handshake, or is not accepted. The text is the reason of OpenSSL."""


class Stream:
    def __init__(self, tasks: Tasks, connection: socket.socket, side: str) -> None:
        """`side`: "plugin" or "server"."""
        self._tasks = tasks
        self._turns = Turns(tasks)
        self._socket = connection
        self.side = side
        self.fd = connection.fileno()
        self.moved_at = tasks.loop.now
        self.closed = False
        self._ahead = b""
        self._tls: Any = None
        self._incoming, self._outgoing = MemoryBIO(), MemoryBIO()
        self._ended = False  # TLS has said so
        self._unsent = b""
        self._sending = (
            False  # also after a write that was given up: what follows would have a hole before it
        )
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reset_on_close(connection)  # if this process dies, nobody takes a part for the whole

    # --- the beginning -----------------------------------------------------------------------------

    async def look_ahead(self, until: float | None) -> bytes:
        """The first bytes; none if the stream ended without one. They will be read again."""
        self._ahead = await self._receive(until)
        return self._ahead

    @property
    def is_secure(self) -> bool:
        return self._tls is not None

    def wrap(self, context: Context, server: str = "", asked: AskedName | None = None) -> None:
        """Speak TLS from now on. `server`: its name, if we are the client."""
        self._asked = asked  # TLS itself does not keep it
        self._tls = wrap(context, self._incoming, self._outgoing, server, asked)

    async def shake_hands(self, until: float) -> None:
        """Raises TlsRefused, StreamBroken and TimeSpent."""
        tls = self._tls
        while True:
            try:
                tls.do_handshake()
            except SSLWantReadError:
                await self._flush(until)
                self._take(await self._receive(until))
                continue
            except SSLError as error:
                self._try_flush()  # the alert that says why
                raise TlsRefused(_describe(error)) from None
            await self._flush(until)
            return

    # --- reading and writing -----------------------------------------------------------------------

    @property
    def readable(self) -> Wanted:
        return self.fd, READ

    @property
    def closing(self) -> Wanted:
        return self.fd, CLOSED

    @property
    def has_read(self) -> bool:
        """Whether there is something that came with what was read: bytes, or the end."""
        tls = self._tls
        return bool(
            self._ahead or self._incoming.pending or self._ended or (tls is not None and tls.pending())
        )

    async def read(self, until: float | None = None) -> bytes:
        """The next bytes; none at the end. Raises StreamBroken and TimeSpent."""
        if self._tls is None:
            return await self._receive(until)
        while True:
            try:
                data = self._decrypt(self._tls)
                self._try_flush()
                return data
            except SSLWantReadError:
                self._take(await self._receive(until))
            except SSLZeroReturnError:
                return b""
            except SSLEOFError:
                raise StreamCut(f"was cut by the {self.side}: TLS has no end", self.side) from None
            except SSLError as error:
                raise self._tls_fault(error) from None

    def try_read(self) -> bytes | None:
        """What can be read at once; None if nothing can, though TLS itself may have sent something."""
        if not self.has_read:
            try:
                raw = self._socket.recv(PIECE_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                return b""
            if self._tls is None:
                return raw
            self._take(raw)
        try:
            return self._decrypt(self._tls)
        except SSLWantReadError:
            self._try_flush()
            return None
        except (SSLZeroReturnError, SSLEOFError):
            return b""
        except SSLError as error:
            raise self._tls_fault(error) from None

    def _tls_fault(self, error: SSLError) -> StreamBroken:
        return StreamBroken(f"broke: the TLS of the {self.side} fails ({_describe(error)})", self.side)

    def _decrypt(self, tls: Any) -> bytes:
        pieces = [tls.read(PIECE_BYTES)]
        while tls.pending() or self._incoming.pending:
            try:
                pieces.append(tls.read(PIECE_BYTES))
            except SSLError:  # the next call says it again
                break
            if not pieces[-1]:
                self._ended = True
                break
        return b"".join(pieces)

    async def write(self, data: bytes, until: float | None = None) -> None:
        """Raises StreamBroken and TimeSpent."""
        if self._tls is None:
            await self._send(data, until)
            return
        view = memoryview(data)
        while view:
            try:
                view = view[self._tls.write(view) :]
            except SSLError as error:
                raise self._tls_fault(error) from None
        await self._flush(until)

    async def discard(self, until: float, most_bytes: int) -> None:
        """Read to the end, and drop it."""
        while most_bytes > 0:
            piece = await self._receive(until)
            if not piece:
                return
            most_bytes -= len(piece)

    # --- the end -----------------------------------------------------------------------------------

    async def finish(self, until: float) -> None:
        """Say in order that nothing more is sent."""
        if self._sending:
            return
        if self._tls is not None:
            try:
                self._tls.shutdown()
            except (SSLError, OSError):
                pass  # it has written the end, and waits for that of the other side
        try:
            await self._flush(until)
            self._socket.shutdown(socket.SHUT_WR)
        except (StreamBroken, TimeSpent, OSError):
            pass

    def count_unacknowledged(self) -> int:
        """The bytes that the other end's kernel has not got yet."""
        try:
            (count,) = struct.unpack("i", fcntl.ioctl(self.fd, SIOCOUTQ, bytes(4)))
        except OSError:
            return 0
        return int(count) + len(self._unsent) + self._outgoing.pending

    def close(self, *, in_order: bool = False) -> None:
        if not self.closed:
            self.closed = True
            self._tasks.drop(self.fd)
            if in_order and self._socket.family != socket.AF_UNIX:
                try:
                    while self._socket.recv(PIECE_BYTES):
                        pass  # with unread bytes it would be reset
                except OSError:
                    pass
                deliver_on_close(self._socket)
            self._tasks.loop.retire(self._socket)

    # --- the socket --------------------------------------------------------------------------------

    def _take(self, raw: bytes) -> None:
        if raw:
            self._incoming.write(raw)
        else:
            self._incoming.write_eof()

    async def _receive(self, until: float | None) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        await self._turns.take()
        while True:
            try:
                data = self._socket.recv(PIECE_BYTES)
                self.moved_at = self._tasks.loop.now
                return data
            except BlockingIOError:
                await self._wait([self.readable], until)
            except OSError:
                raise StreamBroken(f"was reset by the {self.side}", self.side) from None

    async def _flush(self, until: float | None) -> None:
        while self._unsent or self._outgoing.pending:
            data, self._unsent = self._unsent + self._outgoing.read(), b""
            await self._send(data, until)

    def _try_flush(self) -> None:
        """Send what TLS wants to send by itself, as far as that goes at once."""
        if not self._sending and (self._unsent or self._outgoing.pending):
            self._unsent += self._outgoing.read()
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except OSError:
                pass
        if len(self._unsent) + self._outgoing.pending > _MOST_UNSENT_BYTES:
            raise StreamBroken(f"broke: the {self.side} does not read", self.side)

    async def _send(self, data: bytes, until: float | None) -> None:
        view = memoryview(data)
        self._sending = True
        while view:
            try:
                view = view[self._socket.send(view) :]
                self.moved_at = self._tasks.loop.now
            except BlockingIOError:
                await self._wait([(self.fd, WRITE)], until)
            except OSError:
                raise StreamBroken(f"was closed by the {self.side}", self.side) from None
        self._sending = False

    async def _wait(self, wanted: Iterable[Wanted], until: float | None) -> None:
        if until is not None and self._tasks.loop.now >= until:
            raise TimeSpent
        await self._tasks.wait(wanted, until)


def _describe(error: Exception) -> str:
    """The reason without what the other end may have written into it."""
    if isinstance(error, SSLCertVerificationError):
        return error.verify_message
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else "the connection ended"
