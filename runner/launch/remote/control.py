"""The socket between a session and the monitor of its plugin, as the monitor sees it."""

from __future__ import annotations

import array
import fcntl
import os
import select
import signal
import socket
import termios
import time

from runner.launch.carry_out import CalledOff
from runner.launch.remote.messages import RELEASE, Message
from runner.launch.wait import Need, Steps, drive
from runner.outcome import EXEC_NO_CAGE, Failure, Outcome
from sandbox.speed.codec import encode

# How long a host that does not read its control socket may keep us.
TELL_SECONDS = 10.0
# Of what a host has not read yet. With more, it is told only what it has to know.
_MOST_UNREAD_BYTES = 64 << 10

_MOST_WORDS = 64  # of the host, read at once
_NUMBERS = frozenset(signal.valid_signals())


class Control:
    """The socket to the session."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.over = False
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)

    def read_orders(self) -> list[int]:
        try:
            said = self._socket.recv(_MOST_WORDS)
        except BlockingIOError:
            return []
        except OSError:  # closed with something of ours unread
            said = b""
        self.over = not said
        return [number for number in said if number in _NUMBERS]

    def is_called(self) -> bool:
        """Whether the host has written something, or has ended."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def is_released(self) -> bool:
        """Whether the host has released the plugin, and has said nothing else since. The release is taken.
        With any other word, also a later one, all is left."""
        try:
            said = self._socket.recv(_MOST_WORDS, socket.MSG_PEEK)
        except OSError:
            return False
        if not said or said.strip(RELEASE):
            return False
        self._socket.recv(1)
        return True

    def mention(self, message: Message) -> None:
        """Tell it, if that takes no waiting, and there is memory for it."""
        unread = array.array("i", [0])
        try:
            fcntl.ioctl(self.fd, termios.TIOCOUTQ, unread)
            # A message has a tenth of that at most: the rest has room for it.
            if unread[0] <= _MOST_UNREAD_BYTES:
                self.tell(message)
        except OSError:
            return

    def tell(self, message: Message) -> bool:
        """False if the host has ended, or does not read. Raises OSError if there is no memory for it."""
        return drive(self.telling(message))

    def telling(self, message: Message) -> Steps[bool]:
        """`tell`, step by step."""
        left = memoryview(encode(message) + b"\n")
        until = time.monotonic() + TELL_SECONDS
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                yield Need({self.fd: select.POLLOUT}, until)
            except ConnectionError:
                return False
        return True

    def close(self) -> None:
        self._socket.close()


_BUSY_HINT = "try again when the machine is less busy"


class Interruptible:
    """As long as nothing runs, any word of the host ends the launch at once, even if the monitor hangs on a
    slow filesystem. A signal does the same to `runner exec`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._armed = False
        self._started = False
        self._flags = fcntl.fcntl(control.fd, fcntl.F_GETFL)

    def start(self, seconds: float = 0.0) -> None:
        """`seconds`: after which Failure is raised; 0: never. With seconds no word of the host interrupts,
        and only `look` hears it: in a process that lives on, an exception at any moment leaves descriptors
        and locks behind."""
        self._armed = self._started = True
        if seconds:
            signal.signal(signal.SIGALRM, self._time_out)
            signal.setitimer(signal.ITIMER_REAL, seconds)
        else:
            signal.signal(signal.SIGIO, self._interrupt)
            fcntl.fcntl(self._control.fd, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(self._control.fd, fcntl.F_SETFL, self._flags | os.O_ASYNC)
        self._interrupt()

    def _interrupt(self, *_: object) -> None:
        # The kernel also signals that the host has read what we wrote.
        if self._armed and self._control.is_called():
            self._armed = False
            raise CalledOff

    def _time_out(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            # No OSError: code on the way takes those for its own.
            message = "the machine took too long to prepare the launch"
            raise Failure(Outcome("launch_failed", "launch", message, "resources", _BUSY_HINT), EXEC_NO_CAGE)

    def stop(self) -> None:
        """From now on nothing interrupts. Before the start, `look` asks once more."""
        self._armed = False
        if not self._started:
            return  # the shared monitor has set up the same socket meanwhile
        self._started = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        fcntl.fcntl(self._control.fd, fcntl.F_SETFL, self._flags)
        signal.signal(signal.SIGIO, signal.SIG_IGN)

    def look(self) -> None:
        if self._control.is_called():
            raise CalledOff
