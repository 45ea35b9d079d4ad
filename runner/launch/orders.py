"""Orders to end a plugin, for as long as it runs: signals to the runner, and the end of its caller."""

from __future__ import annotations

import os

from sandbox.speed.scopes import contextmanager
from sandbox.speed.signals import signal
from sandbox.speed.typed import Callable, Iterator, Protocol

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Orders(Protocol):
    """Where orders to end come from, each a signal's number."""

    @property
    def fd(self) -> int: ...

    @property
    def over(self) -> bool:
        """Whether the giver of orders has ended."""
        ...

    def arrived(self) -> list[int]:
        """The orders since the last look. Does not wait."""
        ...


class Signals:
    """Signals that end the runner, as a readable descriptor. A signal that the caller ignores (nohup) stays
    ignored."""

    over = False  # signals can always come

    def __init__(self) -> None:
        # A signal that the caller blocked would never arrive. If it ignored SIGCHLD, there would be no child
        # to wait for.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {
            number: signal.signal(number, lambda *_: None)
            for number in _ENDING
            if signal.getsignal(number) is not signal.SIG_IGN
        }

    def arrived(self) -> list[int]:
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
    """From just before the launch: then a signal must neither be lost nor kill the runner half-way. Before,
    a signal ends the runner at once, even if it hangs on a slow filesystem."""
    signals = Signals()
    try:
        yield signals
    finally:
        signals.close()


class SignalCame(BaseException):
    """A signal that ends the runner came before the launch."""


@contextmanager
def unwinding_signals() -> Iterator[Callable[[], None]]:
    """For a launch that has something to remove before there is a plugin. A signal that would end the runner
    at once raises SignalCame, as SIGINT raises KeyboardInterrupt, and ends the runner when the context ends.
    A second one raises nothing more; nor does a first one once the function that is yielded was called."""
    came: list[int] = []
    calm = False

    def unwind(number: int, _: object) -> None:
        came.append(number)
        if len(came) == 1 and not calm:
            raise SignalCame

    def be_calm() -> None:
        nonlocal calm
        calm = True

    # A monitor has handlers of its own, and its host calls a launch off by other means.
    old = {
        number: signal.signal(number, unwind)
        for number in _ENDING
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield be_calm
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def watch_caller() -> Iterator[int | None]:
    """A descriptor that becomes readable when the process that started us has ended.

    The parent-death signal would be wrong: it follows the thread that forked us, and hosts start processes
    from worker threads that end while the host lives on.
    """
    parent = os.getppid()
    fd = None  # stays so if the parent is outside of our pid namespace
    if parent:
        try:
            fd = os.pidfd_open(parent)
        except ProcessLookupError:
            pass
        if os.getppid() != parent:
            # It ended between the two calls. A pipe without a writer is readable for ever.
            if fd is not None:
                os.close(fd)
            fd, write = os.pipe2(os.O_CLOEXEC)
            os.close(write)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)
