"""Runners that are forked from a template: a process that has imported the runner once.

A launch with a new manifest costs some 340 ms of processor time, three quarters of it imports. Forked from a
template it costs 100 ms. It is the same program: a child of this process with its own streams, environment,
working directory and session. Such a process does not show that a fresh interpreter imports what it needs.
Tests marked `fresh` show that for every verb, and with RUNNER_TEST_FRESH=1 every test does.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from sandbox.identity.state import state_root
from tests.conftest import ROOT, SYSTEM_PATH, Caller, _become_user, lacks
from tests.root_store import mount_point

# The Popen arguments that a template supports. With any other the process is started normally.
_KNOWN = {"stdin", "stdout", "stderr", "pass_fds", "start_new_session", "bufsize"}
# Variables that the interpreter or the loader reads at its start, which a fork cannot change.
_EARLY = ("PYTHON", "LD_", "GLIBC_")

_PROGRAM = """\
import atexit, ctypes, fcntl, gc, importlib, json, os, pkgutil, signal, socket, sys, threading, traceback

import runner.cli, sandbox

# Not trio: `runner call` forks before it imports trio. What trio imports may be loaded.
for name in ("attr", "idna", "jsonschema_rs", "outcome", "pydantic", "sniffio", "sortedcontainers", "ssl"):
    importlib.import_module(name)
sys.modules["trio"] = None
for package in (runner, sandbox):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as missing:
                assert missing.name == "trio", missing
del sys.modules["trio"]
# httpcore would go on without trio. Each runner that needs it imports it again.
for name in [name for name in sys.modules if name.partition(".")[0] in ("httpcore", "httpx")]:
    del sys.modules[name]

# pydantic builds a model when it is first used. Built here, it is not built by each runner.
models = [sys.modules["pydantic"].BaseModel]
for model in models:
    models += model.__subclasses__()
    if model.__module__.startswith(("runner.", "sandbox.")):
        model.model_rebuild()

CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
python = ctypes.pythonapi  # keeps the interpreter's lock
libc = ctypes.PyDLL(None)
libc.syscall.restype = ctypes.c_long


def sibling():
    '''fork(), but the child's parent is our parent, which can then wait for it.'''
    python.PyOS_BeforeFork()
    words = (ctypes.c_long(word) for word in (SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    pid = libc.syscall(*words)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def become(asked, received):
    '''Take on the descriptors, session, environment and directory of the requested process.'''
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in received]
    os.closerange(0, 512)
    for fd, number in zip(high, asked["numbers"]):
        os.dup2(fd, number)
    os.closerange(512, 1024)
    if asked["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    gc.unfreeze()


control = socket.socket(fileno=int(sys.argv[1]))
gc.collect()
gc.freeze()
control.send(b"ready")
while True:
    message, received, _, _ = socket.recv_fds(control, 1 << 20, 32)
    if not message:
        break
    pid = sibling()
    if pid == 0:
        break
    for fd in received:
        os.close(fd)
    control.send(str(pid).encode())
if message:
    asked = json.loads(message)
    control.detach()
    become(asked, received)
    sys.argv = asked["argv"]
    status = 0
    try:
        exec(asked["program"], {"__name__": "__main__"})
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except Exception:
        traceback.print_exc()
        status = 1
    # What the interpreter does at exit, but without the slow teardown of all modules.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""
_RUNNER = "from runner.cli import entry\nentry()"


class Template:
    """A process that forks runners for one kind of caller."""

    def __init__(self, prefix: tuple[str, ...], python: tuple[str, ...], pythonpath: str) -> None:
        self.prefix, self.python, self.pythonpath = prefix, python, pythonpath
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(300)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # one message, one program
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, *python, "-c", _PROGRAM, str(theirs.fileno())],
                env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/", "PYTHONPATH": pythonpath},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        if self._control.recv(16) != b"ready":
            assert self._process.stderr is not None
            raise RuntimeError(f"no template: {self._process.stderr.read().decode(errors='replace')}")

    def fork(self, asked: Mapping[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(asked).encode()], descriptors)
            answer = self._control.recv(64)
        assert answer, "the template has ended"
        return int(answer)

    def close(self) -> None:
        self._control.close()
        self._process.communicate(timeout=60)


class _Forked(subprocess.Popen[bytes]):
    """A Popen that uses a template instead of fork and exec."""

    def __init__(self, template: Template, program: str, argv: Sequence[str], **popen: Any) -> None:
        self._template, self._program, self._argv = template, program, list(argv)
        super().__init__(self._argv, **popen)

    def _execute_child(self, *words: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*words).arguments  # type: ignore[misc]
        ends = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        kept = sorted(given["pass_fds"])
        asked = {
            "program": self._program,
            "argv": self._argv,
            "env": given["env"],
            "cwd": os.fspath(given["cwd"]),
            "new_session": given["start_new_session"],
            "numbers": [0, 1, 2, *kept],
        }
        try:
            self.pid = self._template.fork(asked, [*streams, *kept])
            self._child_created = True
        finally:
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Quick(Caller):
    """A caller whose runners are forked from a template where possible."""

    program: str = _RUNNER

    def start(
        self,
        *args: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "/",
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        template = self._template(env, popen)
        if template is None:
            return super().start(*args, env=env, cwd=cwd, **popen)
        argv = ["runner", *(os.fspath(arg) for arg in args)]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        environ = {**self.environ, **(env or {})}
        return _Forked(template, self.program, argv, env=environ, cwd=cwd, **{**streams, **popen})

    def start_program(self, program: str, *args: str, env: Mapping[str, str], **popen: Any) -> Any:
        """Like `python -c PROGRAM ARG …`, with exactly this environment and these streams. None: no template
        can do it."""
        template = self._template(env, popen.keys() - {"cwd"}, whole=True)
        return None if template is None else _Forked(template, program, ["-c", *args], env=env, **popen)

    @property
    def _origin(self) -> tuple[str, ...]:
        """The prefix of the template to fork from."""
        return self.prefix

    def _template(self, env: Mapping[str, str] | None, popen: Iterable[str], whole: bool = False) -> Any:
        template = _templates.get((self._origin, self.python))
        path = self.environ["PYTHONPATH"]
        early = {name: value for name, value in (env or {}).items() if name.startswith(_EARLY)}
        if template is None or template.pythonpath != path or not set(popen) <= _KNOWN:
            return None
        return template if early == ({"PYTHONPATH": path} if whole else {}) else None


_templates: dict[tuple[tuple[str, ...], tuple[str, ...]], Template] = {}
# The command that starts a process as the caller, the interpreter and its PYTHONPATH.
_Kind = tuple[tuple[str, ...], tuple[str, ...], str]


def quick(caller: Caller) -> Caller:
    """The same caller, whose runners are forked from a template, once the fixture `templates` has made it."""
    return _Quick(**{field.name: getattr(caller, field.name) for field in fields(Caller)})


@dataclass(frozen=True)
class _Prepared(_Quick):
    def command(self, *args: str | os.PathLike[str]) -> list[str]:
        return [*self.prefix, *self.python, "-c", self.program, *(os.fspath(arg) for arg in args)]


def prepared(caller: Caller, code: str) -> Caller:
    """The same caller, whose runners run `code` before they begin."""
    known = {field.name: getattr(caller, field.name) for field in fields(Caller)}
    return _Prepared(**known, program=f"{code}\n{_RUNNER}")


# What a runner with an account does first. Without exec the kernel would take it for a program that changed
# its user: /proc/self would belong to root.
_ENTERS = """\
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def succeed(result):
    if result:
        raise OSError(ctypes.get_errno(), "the account cannot be made")
CLONE_NEWNS, MS_BIND, MS_PRIVATE_BELOW, PR_SET_DUMPABLE = 0x20000, 0x1000, 0x44000, 4
succeed(libc.unshare(CLONE_NEWNS))
succeed(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_PRIVATE_BELOW), None))
succeed(libc.mount({passwd!r}, b"/etc/passwd", None, ctypes.c_ulong(MS_BIND), None))
if {uid} != os.geteuid():
    os.setgroups([])
    os.setresgid({uid}, {uid}, {uid})
    os.setresuid({uid}, {uid}, {uid})
    succeed(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
"""


@dataclass(frozen=True)
class _WithAccount(_Quick):
    """A caller with a password database of its own. Its runners are forked from root's template."""

    entered: tuple[str, ...] = ()  # with another prefix it is on another machine: no template enters that

    def start_program(self, program: str, *args: str, env: Mapping[str, str], **popen: Any) -> Any:
        return None  # such a program would not enter the account

    @property
    def _origin(self) -> tuple[str, ...]:
        return () if self.prefix == self.entered else self.prefix


def with_account(caller: Caller, entering: tuple[str, ...], passwd: str) -> Caller:
    """The same caller behind `entering`: commands that put the file `passwd` in the place of /etc/passwd."""
    behind = replace(caller, prefix=(*entering, *caller.prefix))
    if not isinstance(caller, _Quick):
        return behind
    known = {field.name: getattr(behind, field.name) for field in fields(Caller)}
    code = _ENTERS.format(passwd=os.fsencode(passwd), uid=caller.uid)
    return _WithAccount(**known, program=f"{code}\n{_RUNNER}", entered=behind.prefix)


def settled(caller: Caller) -> Caller:
    """The same caller. Its runners also store plans that rest on files which were changed a moment ago."""
    return prepared(caller, "import sandbox.look\nsandbox.look.SETTLED_SECONDS = -3600.0")


@pytest.fixture(scope="session")
def templates(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the templates until the session ends. Request it before leak checks, which would count them."""
    with contextlib.ExitStack() as stack:
        if not lacks("root"):
            stack.enter_context(_places_of_root())
        stack.enter_context(_running([] if os.environ.get("RUNNER_TEST_FRESH") else _kinds(request)))
        yield


@contextlib.contextmanager
def _places_of_root() -> Iterator[None]:
    """Each stored plan of root's says whether these are there. So no test makes or removes them beside one
    that expects its stored plan to be used."""
    os.makedirs(state_root({}), mode=0o711, exist_ok=True)
    with mount_point():
        yield


def _kinds(request: pytest.FixtureRequest) -> list[_Kind]:
    kinds: list[_Kind] = []
    if not lacks("root"):
        kinds.append(((), (sys.executable,), str(ROOT)))
    if not lacks("user"):
        python, pythonpath = request.getfixturevalue("_code_for_everybody")
        kinds.append((tuple(_become_user()), tuple(python), pythonpath))
    return kinds


@contextlib.contextmanager
def more(entering: tuple[str, ...]) -> Iterator[None]:
    """The same templates once more, on a machine that the command `entering` enters. It has to call exec."""
    with _running(
        [((*entering, *each.prefix), each.python, each.pythonpath) for each in _templates.values()]
    ):
        yield


@contextlib.contextmanager
def session_host() -> Iterator[None]:
    """This process may open sessions. Its fork servers come from a template: their monitors, which read a new
    manifest each, import nothing for it. Closes the last one, which outlives the sessions."""
    from runner.launch.remote import forkserver

    def forked(argv: Sequence[str], **popen: Any) -> Any:
        program = argv.index("-c") + 1
        # What the template has frozen stays so: collecting it would copy all of its memory.
        text = f"import gc; gc.freeze(); {argv[program]}"
        return _Forked(_templates[own], text, ["-c", *argv[program + 1 :]], **popen)

    def start(real: Callable[[], Any] = forkserver.start_by_exec) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", forked)
            return real()

    own = (), (sys.executable,)
    with pytest.MonkeyPatch.context() as patch:
        if own in _templates:
            patch.setattr(forkserver, "start_by_exec", start)
        try:
            yield
        finally:
            forkserver.close()


@pytest.fixture
def sessions(templates: None, nothing_left: None) -> Iterator[None]:
    """For tests that open sessions in this process."""
    with session_host():
        yield


@contextlib.contextmanager
def _running(kinds: Iterable[_Kind]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for prefix, python, pythonpath in kinds:
            template = Template(prefix, python, pythonpath)
            stack.callback(template.close)
            _templates[prefix, python] = template
            stack.callback(_templates.pop, (prefix, python))
        yield
