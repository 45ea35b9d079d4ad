"""The process that forks monitors. It has everything imported, no threads, and nothing of the host's.

Each host process has one. It gets its orders as messages of one byte and seven descriptors
(LaunchDescriptors), forks a process for each, and ends with its host. A monitor does not need it: a plugin
outlives the fork server it came from, and the next launch starts another one.

It also forks the monitor that the plugins of a host share (runner/launch/remote/shared_monitor.py), and the
next one when that has ended or takes no more.
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
from typing import TYPE_CHECKING, NoReturn

from runner.launch.remote.descriptors import receive_descriptors, send_descriptors
from runner.launch.remote.messages import LaunchDescriptors, LaunchOrder
from runner.launch.stages import Invocation
from sandbox import CODE_ROOT, facts, surroundings
from sandbox.cell.contents import Contents
from sandbox.files import write_all
from sandbox.speed.codec import encode
from sandbox.speed.late_site import LateSite, is_site_waiting
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from runner.launch.remote.shared_plan import SharedMonitor

_COUNT = len(LaunchDescriptors._fields)
_START = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from runner.launch.remote.forkserver import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
# What a launch imports where it needs it: `runner exec` mostly does not.
_PRELOADED = tuple(
    (
        "hashlib encodings.ascii runner.launch.network_report sandbox.limits.disk sandbox.limits.socket_meter"
        " sandbox.plan.bwrap sandbox.units sandbox.cell.neighbours sandbox.limits.uncounted"
    ).split()
)
# These decide how file names become bytes. Host and fork server must agree.
_LOCALE = ("LC_ALL", "LC_CTYPE", "LANG")


# --- in the fork server -------------------------------------------------------------------------------------


def main(fd: int, command: int = 0, *, preload: bool = True) -> NoReturn:
    """The process that is started. `command`: the pid of its host, if that is a command of ours."""
    facts.first_of_ours = command or os.getpid()
    if sys.flags.no_site:  # as its host
        sys.meta_path.append(LateSite())
    try:
        serve(socket.socket(fileno=fd), preload)
    except Exception:  # noqa: BLE001 -- nobody reads it, unless RUNNER_DEBUG is set
        if os.environ.get("RUNNER_DEBUG"):
            sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def serve(orders: socket.socket, preload: bool) -> None:
    """Fork a process for each order, until the host has ended. `preload`: there will be many, and plugins
    that share a monitor."""
    _detach(orders)
    # Here and not above: the host imports this module too, and launches nothing itself.
    from runner.launch.remote import shared_monitor  # noqa: F401 -- to have it imported

    if preload:
        _preload()
    if gc.isenabled():  # a host that disabled it is in a hurry, and this is its copy
        gc.collect()
    gc.freeze()  # memory stays shared with all monitors as long as no collection touches it
    gc.disable()
    shared: SharedMonitor | None = None
    while True:
        try:
            word, fds = receive_descriptors(orders, 1, _COUNT)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                continue
            return
        if not word:
            return
        try:
            if len(fds) == _COUNT:  # else some could not be received; the host sees its socket closed
                if preload and (shared is None or not shared.is_open()):
                    shared = _fork_shared(shared)
                _fork(LaunchDescriptors(*fds), orders, shared)
        finally:
            for fd in fds:
                os.close(fd)


def _fork(descriptors: LaunchDescriptors, orders: socket.socket, shared: SharedMonitor | None) -> None:
    """Fork the process of one launch."""
    from runner.launch.remote import monitor

    try:
        pid = os.fork()
    except OSError as error:
        monitor.refuse(descriptors.control, error)
        return
    if pid == 0:
        try:
            orders.close()
            _become_monitor()
            monitor.monitor_launch(descriptors, shared)
        finally:
            os._exit(1)


def _fork_shared(before: SharedMonitor | None) -> SharedMonitor | None:
    """Fork the monitor that plugins share. None: there is none, and each launch has its own."""
    from runner.launch.remote import shared_monitor
    from runner.launch.remote.shared_plan import SharedMonitor

    if before is not None:
        before.plans.close()
    with ExitStack() as stack:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(ours.close)
            stack.callback(theirs.close)
            pid = os.fork()
        except OSError:
            return None
        if pid == 0:
            try:
                os.closerange(3, theirs.fileno())  # also those of the launch that is waiting
                os.closerange(theirs.fileno() + 1, 0x7FFFFFFF)
                _become_monitor()
                shared_monitor.monitor_plans(theirs)
            finally:
                os._exit(1)
        stack.pop_all()
    theirs.close()
    return SharedMonitor(ours)


def _become_monitor() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _set_name("runner-monitor")


def _detach(orders: socket.socket) -> None:
    """Keep nothing of the host's: no terminal that could interrupt us, no descriptor, no directory."""
    with suppress(OSError):  # a session leader already
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
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as in any Python process: EFBIG, not death
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _set_name("runner-forksrv")  # the kernel keeps 15 bytes


def _set_name(name: str) -> None:
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def _preload() -> None:
    """Import what launches import lazily. Not the models of manifests: they are large, and a manifest that
    was read once is in the cache."""
    from importlib import import_module

    from runner.contracts.registry import all_host_places
    from runner.launch.stages import planned_classes

    for name in _PRELOADED:
        import_module(name)
    planned_classes()
    all_host_places()


# --- in the host -----------------------------------------------------------------------------------------


class ForkServer(NamedTuple):
    orders: socket.socket  # SOCK_SEQPACKET: a message arrives whole or not at all
    pidfd: int
    host: tuple[object, ...]  # the ids it was started with

    def is_alive(self) -> bool:
        if self.orders.fileno() < 0:
            return False  # closed, and the number may belong to another file
        dead = select.poll()
        dead.register(self.pidfd, select.POLLIN)
        return not dead.poll(0)

    def close(self) -> None:
        """End it. Its monitors live on, and end with their plugins."""
        self.orders.close()
        with suppress(OSError):  # already reaped; or our uid has changed, and it ends when its socket closes
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)


is_command = False  # whether this process is a command of ours, and not another program that uses the library
_lock = threading.Lock()
_current: ForkServer | None = None


def current() -> ForkServer:
    """This process's fork server, started if there is none. Raises OSError."""
    global _current
    with _lock:
        if _current is not None and _current.host != _host():
            _current.close()
            _current = None
        if _current is None:
            _current = start_by_exec()
        return _current


def close(which: ForkServer | None = None) -> None:
    """End this process's fork server. With `which`: only if it is that one, which was found dead."""
    global _current
    with _lock:
        if _current is not None and which in (None, _current):
            _current.close()
            _current = None


def _host() -> tuple[object, ...]:
    """The host's ids. A host that changed them must not launch with the old ones."""
    return os.getresuid(), os.getresgid()


def _forget() -> None:
    """In a forked child of the host: close its copy of the socket, which keeps the parent's server alive."""
    global _lock, _current
    _lock = threading.Lock()
    if _current is not None:
        _current.orders.close()
        os.close(_current.pidfd)
        _current = None


os.register_at_fork(after_in_child=_forget)


def start_by_exec() -> ForkServer:
    """Start one as a new interpreter. Works in every process, whatever threads it has."""
    import atexit
    import subprocess

    if not sys.executable:
        raise OSError(errno.ENOENT, "this process does not know the Python it runs")
    # Every place the host itself imports from, without those relative to its working directory. No plugin may
    # write to them (runner/launch/denylist.py).
    path = [place for place in sys.path if place.startswith("/")]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            argv = [
                sys.executable,
                "-I",
                *(("-S",) if is_site_waiting() else ()),
                "-X",
                f"utf8={sys.flags.utf8_mode}",
                "-c",
                _START,
                str(theirs.fileno()),
                str(os.getpid() if is_command else 0),
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
        process.returncode = 0  # we wait for it by its pidfd; subprocess must not
        atexit.unregister(close)
        atexit.register(close)
        return _make(ours, process.pid)
    except BaseException:
        ours.close()
        raise


def start_by_fork() -> ForkServer | None:
    """Start one as a copy of this process: at once. It imports the launch while this process goes on. Only
    for a command of ours, without threads, that has not started trio. None: this one has. Afterwards
    `current` gives the copy."""
    global _current, is_command
    is_command = True
    if threading.active_count() != 1 or "trio" in sys.modules:
        return None
    command = os.getpid()
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
            main(theirs.fileno(), command, preload=False)
        finally:
            os._exit(1)
    theirs.close()
    with _lock:
        if _current is not None:
            _current.close()
        _current = _make(ours, pid)
        return _current


def _make(orders: socket.socket, pid: int) -> ForkServer:
    orders.setblocking(False)
    return ForkServer(orders, os.pidfd_open(pid), _host())


class LaunchTicket:
    """One launch on the host's side: the host's ends of the plugin's pipes and of the control socket."""

    def __init__(
        self,
        invocation: Invocation,
        *,
        environ: Mapping[str, str],
        cwd: str | None = None,
        contents: Contents | None = None,
        parks: bool = False,
    ) -> None:
        began = time.monotonic()
        _require_passable(invocation, environ)
        order = LaunchOrder(invocation, dict(environ), _absolute(cwd), began, parks)
        with ExitStack() as stack:

            def kept(*fds: int) -> tuple[int, ...]:
                for fd in fds:
                    stack.callback(os.close, fd)
                return fds

            (memory,) = kept(os.memfd_create("runner-order", os.MFD_CLOEXEC))
            write_all(memory, encode(order))
            (shared,) = kept((contents or Contents()).share())
            stdin, self.stdin = kept(*os.pipe2(os.O_CLOEXEC))
            self.stdout, stdout = kept(*os.pipe2(os.O_CLOEXEC))
            self.stderr, stderr = kept(*os.pipe2(os.O_CLOEXEC))
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self.control, control = kept(*(end.detach() for end in pair))
            (host,) = kept(os.pidfd_open(os.getpid()))
            given = LaunchDescriptors(memory, shared, stdin, stdout, stderr, control, host)
            self._given: LaunchDescriptors | None = given
            stack.pop_all()
        self.forkserver: ForkServer | None = None  # the one it was sent to

    def send(self, forkserver: ForkServer) -> None:
        """Raises BlockingIOError if there is no room yet, OSError if the fork server cannot take it."""
        assert self._given is not None
        send_descriptors(forkserver.orders, b"o", self._given)
        self.forkserver = forkserver
        self.give_away()

    def give_away(self) -> None:
        """Close our copies of the plugin's ends."""
        given, self._given = self._given, None
        for fd in given or ():
            os.close(fd)

    def close(self) -> None:
        """Close everything. A monitor that has the ticket sees that nobody waits for it any more."""
        self.give_away()
        for fd in (self.stdin, self.stdout, self.stderr, self.control):
            os.close(fd)


def _require_passable(invocation: Invocation, environ: Mapping[str, str]) -> None:
    """Refuse arguments and variables that no process can be given. Raises ValueError."""
    for variables in (environ.items(), invocation.overrides.env):
        for name, value in variables:
            if not _is_passable(name) or not name or "=" in name or not _is_passable(value):
                raise ValueError(
                    f"{name!r} cannot be an environment variable: name and value have to be text without "
                    "NUL, and the name must not be empty or contain '='"
                )
    command = invocation.command
    for word in (*invocation.args, *(() if command is None else command.argv)):
        if not _is_passable(word):
            raise ValueError(f"{word!r} cannot be an argument: arguments have to be text without NUL")


def _is_passable(word: object) -> bool:
    try:
        return isinstance(word, str) and b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return False


def _absolute(cwd: str | None) -> str:
    if cwd is not None:
        return os.path.abspath(cwd)
    try:
        return surroundings.working_folder()
    except FileNotFoundError:  # the directory was removed: no relative path can be meant
        return "/"
