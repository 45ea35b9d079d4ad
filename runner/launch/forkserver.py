"""The process monitors are forked from: everything imported, no threads, nothing of the host's.

One for each host process. It is told what to launch by messages of one byte and six descriptors (the Gear of
runner/launch/monitor.py), forks a monitor for each, and ends when its host does. Monitors do not need it: a
plugin outlives the fork server it came from, and the next launch starts another one.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import NoReturn

from runner.contracts.registry import all_contracts
from runner.launch import monitor
from runner.launch.monitor import Gear, Order
from runner.launch.prepare import Invocation
from sandbox import CODE_ROOT
from sandbox.files import write_all
from sandbox.value import NamedTuple

_GEAR = len(Gear._fields)
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from runner.launch.forkserver import main; main(int(sys.argv[1]))"
)
# What decides how names are turned into bytes; it must be the same on both sides.
_LOCALE = ("LC_ALL", "LC_CTYPE", "LANG")


# --- in the fork server -------------------------------------------------------------------------------------


def main(fd: int) -> NoReturn:
    """The process `by_exec` starts."""
    try:
        serve(socket.socket(fileno=fd))
    except Exception:  # noqa: BLE001 -- there is nobody to tell, unless somebody looks for a fault
        if os.environ.get("RUNNER_DEBUG"):
            sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def serve(orders: socket.socket) -> None:
    """Fork a monitor for each order, until there is nobody left to give one."""
    _detach(orders)
    _preload()
    if gc.isenabled():  # else this is a copy of who is in a hurry
        gc.collect()
    gc.freeze()  # what is there now is shared with all monitors, as long as nobody looks through it
    gc.disable()
    while True:
        try:
            word, fds, _, _ = socket.recv_fds(orders, 1, _GEAR, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                continue
            return
        if not word:
            return
        try:
            if len(fds) == _GEAR:  # else too few could be opened; the host sees its socket closed
                _fork(Gear(*fds), orders)
        finally:
            for fd in fds:
                os.close(fd)


def _fork(gear: Gear, orders: socket.socket) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        monitor.refuse(gear.control, error)
        return
    if pid == 0:
        try:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _be_called("runner-monitor")
            monitor.keep(gear)
        finally:
            os._exit(1)


def _detach(orders: socket.socket) -> None:
    """Nothing of the host's: no terminal that could interrupt us, no descriptor, no directory."""
    with suppress(OSError):  # a leader already
        os.setsid()
    orders.setblocking(True)
    os.closerange(3, orders.fileno())
    os.closerange(orders.fileno() + 1, 0x7FFFFFFF)
    os.chdir("/")
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it: an error, not the end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _be_called("runner-fork server")


def _be_called(name: str) -> None:
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def _preload() -> None:
    """What launches import when they come to it. Not the models of manifests: they are large, and a manifest
    that was read once is remembered."""
    from importlib import import_module

    for name in ("hashlib", "sandbox.plan.bwrap", "sandbox.limits.disk", "sandbox.units"):
        import_module(name)
    all_contracts()


# --- in the host -----------------------------------------------------------------------------------------


class ForkServer(NamedTuple):
    orders: socket.socket  # SOCK_SEQPACKET: a message arrives whole or not at all
    pidfd: int
    host: tuple[object, ...]  # who it was started by

    def is_alive(self) -> bool:
        if self.orders.fileno() < 0:
            return False  # closed, and the number may be somebody else's
        dead = select.poll()
        dead.register(self.pidfd, select.POLLIN)
        return not dead.poll(0)

    def close(self) -> None:
        """Its monitors live on, and end with their plugins."""
        self.orders.close()
        with suppress(OSError):  # reaped by somebody else; or we are not who we were, and it ends by itself
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)


_lock = threading.Lock()
_current: ForkServer | None = None


def current() -> ForkServer:
    """This process's own, started if there is none. Raises OSError."""
    global _current
    with _lock:
        if _current is not None and _current.host != _host():
            _current.close()
            _current = None
        if _current is None:
            _current = by_exec()
        return _current


def close(which: ForkServer | None = None) -> None:
    """End it: all of them, or `which` if it is still the one, because it was found dead."""
    global _current
    with _lock:
        if _current is not None and which in (None, _current):
            _current.close()
            _current = None


def _host() -> tuple[object, ...]:
    """A host that has changed its ids must not launch with those it had."""
    return os.getresuid(), os.getresgid()


def _forget() -> None:
    """In a child of the host: it has the socket, which would keep its parent's fork server alive."""
    global _lock, _current
    _lock = threading.Lock()
    if _current is not None:
        _current.orders.close()
        os.close(_current.pidfd)
        _current = None


os.register_at_fork(after_in_child=_forget)


def by_exec() -> ForkServer:
    """A new interpreter: right for every process, whatever threads it has."""
    import atexit
    import subprocess

    if not sys.executable:
        raise OSError(errno.ENOENT, "this process does not know the Python it runs")
    # All that the host itself would import from, but for places relative to where it happens to be. They are
    # what no plugin may write to (runner/launch/prepare.py).
    path = [place for place in sys.path if place.startswith("/")]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            argv = [
                sys.executable,
                "-I",
                "-X",
                f"utf8={sys.flags.utf8_mode}",
                "-c",
                _START,
                str(theirs.fileno()),
                *dict.fromkeys((*path, CODE_ROOT)),
            ]
            debug = {"RUNNER_DEBUG": "1"} if os.environ.get("RUNNER_DEBUG") else {}
            process = subprocess.Popen(
                argv,
                env={**{name: os.environ[name] for name in _LOCALE if name in os.environ}, **debug},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if debug else subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        process.returncode = 0  # ours to wait for, by its pidfd
        atexit.unregister(close)
        atexit.register(close)
        return _started(ours, process.pid)
    except BaseException:
        ours.close()
        raise


def by_fork() -> ForkServer | None:
    """A copy of this process, at once and with all it has imported: only for who has no threads, and has not
    begun with anything. None: it has. The one made is the one `current` gives."""
    global _current
    if threading.active_count() != 1 or "trio" in sys.modules:
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = os.fork()
    except BaseException:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1) if os.environ.get("RUNNER_DEBUG") else (0, 1, 2):
                os.dup2(null, number)
            main(theirs.fileno())
        finally:
            os._exit(1)
    theirs.close()
    with _lock:
        if _current is not None:
            _current.close()
        _current = _started(ours, pid)
        return _current


def _started(orders: socket.socket, pid: int) -> ForkServer:
    orders.setblocking(False)
    return ForkServer(orders, os.pidfd_open(pid), _host())


class LaunchTicket:
    """One launch, from the host's side: its ends of the plugin's pipes and of the control socket."""

    def __init__(
        self,
        invocation: Invocation,
        *,
        environ: Mapping[str, str],
        cwd: str | None = None,
        grace: float | None = None,
    ) -> None:
        started = time.monotonic()
        _require_sayable(invocation, environ)
        order = Order(invocation, dict(environ), _absolute(cwd), started, grace)
        with ExitStack() as stack:

            def kept(*fds: int) -> tuple[int, ...]:
                for fd in fds:
                    stack.callback(os.close, fd)
                return fds

            (memory,) = kept(os.memfd_create("runner-order", os.MFD_CLOEXEC))
            write_all(memory, order.encode())
            stdin, self.stdin = kept(*os.pipe2(os.O_CLOEXEC))
            self.stdout, stdout = kept(*os.pipe2(os.O_CLOEXEC))
            self.stderr, stderr = kept(*os.pipe2(os.O_CLOEXEC))
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self.control, control = kept(*(end.detach() for end in pair))
            (host,) = kept(os.pidfd_open(os.getpid()))
            self._given: Gear | None = Gear(memory, stdin, stdout, stderr, control, host)
            stack.pop_all()
        self.forkserver: ForkServer | None = None  # that took it

    def send(self, forkserver: ForkServer) -> None:
        """Raises BlockingIOError if there is no room yet, OSError if the fork server cannot take it."""
        assert self._given is not None
        socket.send_fds(forkserver.orders, [b"o"], self._given)
        self.forkserver = forkserver
        self.give_away()

    def give_away(self) -> None:
        """Our copies of the plugin's ends."""
        given, self._given = self._given, None
        for fd in given or ():
            os.close(fd)

    def close(self) -> None:
        """Whoever took it sees that nobody waits for it any more."""
        self.give_away()
        for fd in (self.stdin, self.stdout, self.stderr, self.control):
            os.close(fd)


def _require_sayable(invocation: Invocation, environ: Mapping[str, str]) -> None:
    """What no process can be given is the caller's mistake, and is said before anything is started."""
    for variables in (environ.items(), invocation.overrides.env):
        for name, value in variables:
            if not _is_word(name) or not name or "=" in name or not _is_word(value):
                raise ValueError(f"{name!r} is no variable of an environment, or has no value for one")
    for word in invocation.args:
        if not _is_word(word):
            raise ValueError(f"{word!r} cannot be an argument of a program")


def _is_word(word: object) -> bool:
    try:
        return isinstance(word, str) and b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:  # half a surrogate pair that stands for no byte
        return False


def _absolute(cwd: str | None) -> str:
    if cwd is not None:
        return os.path.abspath(cwd)
    try:
        return os.getcwd()
    except FileNotFoundError:  # removed since: then nothing relative can be meant
        return "/"
