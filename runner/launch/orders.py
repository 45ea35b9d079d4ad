"""Orders to end a plugin while it runs: signals to the runner, and the end of its caller."""

from __future__ import annotations

import os

from sandbox.speed.scopes import contextmanager
from sandbox.speed.signals import signal
from sandbox.speed.typed import Callable, Iterator, Protocol

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Orders(Protocol):
    """A source of orders to end the plugin. Each order is a signal's number."""

    @property
    def fd(self) -> int: ...

    @property
    def over(self) -> bool:
        """Whether the sender of orders has ended."""
        ...

    def read_orders(self) -> list[int]:
        """The orders that have arrived since the last call. Does not block."""
        ...


class Signals:
    """Turns signals that would end the runner into a readable descriptor. A signal that the caller ignores
    (nohup) stays ignored."""

    over = False  # signals can always come

    def __init__(self) -> None:
        # A signal that the caller blocked would never arrive. If SIGCHLD were ignored, the kernel would reap
        # our children itself.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {
            number: signal.signal(number, lambda *_: None)
            for number in _ENDING
            if signal.getsignal(number) is not signal.SIG_IGN
        }

    def read_orders(self) -> list[int]:
        try:
            return [number for number in os.read(self.fd, 64) if number in self._old]
        except BlockingIOError:
            return []

    def close(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.fd)
        os.close(self._write)


@contextmanager
def watch_signals() -> Iterator[Signals]:
    """Watch signals from just before the start on, when a signal must neither be lost nor kill the runner
    half-way. Before that, a signal ends the runner at once, even if it hangs on a slow filesystem."""
    signals = Signals()
    try:
        yield signals
    finally:
        signals.close()


class SignalCame(BaseException):
    """A signal that ends the runner arrived before the start."""


@contextmanager
def unwinding_signals() -> Iterator[Callable[[], None]]:
    """For a launch that has to clean up before there is a plugin.

    A signal that would end the runner at once raises SignalCame, as SIGINT raises KeyboardInterrupt, and ends
    the runner when the context ends. Only the first signal raises, and none after the yielded function was
    called.
    """
    came: list[int] = []
    calm = False

    def unwind(number: int, _: object) -> None:
        came.append(number)
        if len(came) == 1 and not calm:
            raise SignalCame

    def ignore_signals() -> None:
        nonlocal calm
        calm = True

    # A monitor has handlers of its own, and its host cancels a launch by other means.
    old = {
        number: signal.signal(number, unwind)
        for number in _ENDING
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield ignore_signals
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def watch_caller() -> Iterator[int | None]:
    """A descriptor that becomes readable when the process that started us has ended.

    The parent-death signal would be wrong: it follows the thread that forked us, and hosts start processes
    from threads that end while the host lives on.
    """
    parent = os.getppid()
    fd = None  # None if the parent is outside of our pid namespace
    if parent:
        try:
            fd = os.pidfd_open(parent)
        except ProcessLookupError:
            pass
        if os.getppid() != parent:
            # The parent ended between the two calls. A pipe without a writer is always readable.
            if fd is not None:
                os.close(fd)
            fd, write = os.pipe2(os.O_CLOEXEC)
            os.close(write)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)
