"""`runner gateway --via SOCKET`: a host's entry as a thin client of the hub, which serves all hosts of a
user.

It passes lines between its host and the hub, and starts the hub if there is none. What the hub answered is
passed on even if the hub has died meanwhile. Requests that it did not answer end with an error that says so,
and the next message of the host starts a new hub, which hears the host's `initialize` again. Imports as
little as it can: there is one for each session of a host.
"""

from __future__ import annotations

import _socket as socket  # the module itself makes enumerations of all its constants
import fcntl
import json
import os
import re
import select
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from runner import __version__
from runner.gateway.confinement import is_confined, read_marks
from sandbox.cache import fingerprint

MOST_LINE = 16 << 20  # bytes of one message of the host: as much as a plugin's may have
_READ_BYTES = 64 << 10
_WRITE_BYTES = 4 << 10  # a pipe that can be written takes so much without waiting
_MOST_WAITING = 1 << 20  # bytes that one side has not taken, before the other is read on
_MOST_STANDING = 257  # requests that a new hub hears again: the level, and subscriptions
_START_SECONDS = 30.0
_MOST_STARTS = 3  # one that ends at once may have found another one that was ending
_LOOK_SECONDS = 0.02  # between two looks whether the hub is there
_END_SECONDS = 10.0  # for the hub's next words, and for the host to take some, after it has closed
_MOST_LOG = 2000  # bytes of a hub that does not start
# Where the files of this user are. Who has others has another hub.
_PLACES = (
    "HOME",
    "SUDO_USER",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
)
# As the SDK writes an answer; another form is parsed.
_ANSWER = re.compile(rb'\{"jsonrpc":"2\.0","id":(-?[0-9]{1,18}|"[^"\\]{0,1000}"),"(?:result|error)":')
_LOST = (
    "the hub of this gateway ended before it answered, so nobody knows whether this was done; look before you"
    " repeat it. The next request starts a new hub"
)


class HubUnusable(Exception):
    """The message says what to do."""


def places(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that say where files are, and those for the runner itself."""
    found = {name: value for name, value in environ.items() if name in _PLACES or name.startswith("RUNNER_")}
    return dict(sorted(found.items()))


def default_hub(environ: Mapping[str, str]) -> str:
    """Where the hub of this user, and of this runner, listens. Another build has another one, and so has who
    may do less."""
    parts = [places(environ), __version__, sys.prefix, __file__, read_marks("self")]
    mark = fingerprint(json.dumps(parts).encode())[:16]
    if os.geteuid() == 0:
        return f"/run/runner-gateway/{mark}.sock"
    base = environ.get("XDG_RUNTIME_DIR", "")
    return os.path.join(
        base if base.startswith("/") else f"/run/user/{os.geteuid()}", "runner/gateway", f"{mark}.sock"
    )


def folder_fault(path: str) -> str:
    """Why others could put a socket of theirs there, or ''."""
    folder = os.path.dirname(path)
    try:
        found = os.stat(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}; name a place with --via"
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX:  # as /tmp: it is for everybody
        return f"{folder} is not a folder of your own; name a place in one that only you can use"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"{folder} has to be a folder that only you can use: chmod 700 {folder}, or name another place"
    return ""


class ThinClient:
    def __init__(
        self, path: str, words: Sequence[str], command: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        """`words`: the options of the gateway. `command`: starts the hub."""
        self._path = path
        self._command = command
        self._environ = environ
        hello = {"version": __version__, "words": list(words), "environ": dict(environ), "folder": _folder()}
        self._hello = json.dumps(hello).encode() + b"\n"
        self._hub: socket.socket | None = None
        self._to_hub, self._to_host = bytearray(), bytearray()
        self._of_hub, self._of_host = _Lines(), _Lines()
        self._pending: dict[str, Any] = {}  # ids that the host waits for
        self._questions: dict[str, Any] = {}  # our id of a question of the hub's -> the hub's
        self._count = 0
        self._initialize: dict[str, Any] | None = None
        self._initialized = b""
        self._standing: dict[str, dict[str, Any]] = {}
        self._again: set[str] = set()  # ids of what a new hub hears again: the host has had the answers
        self._first = ""  # the id of the `initialize` that has to be answered before anything else is sent
        self._held: list[bytes] = []

    # --- the hub ------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Raises HubUnusable."""
        until = time.monotonic() + _START_SECONDS
        _make_folder(self._path)
        if fault := folder_fault(self._path):
            raise HubUnusable(f"--via {self._path}: {fault}")
        hub = self._greet()
        if hub is None:
            try:
                hub = self._start(until)
            except OSError as error:  # a full disk, or a file beside the socket that is not ours
                place = f": {error.filename}" if error.filename else ""
                message = f"--via {self._path}: no hub can be started: {error.strerror or error}{place}"
                raise HubUnusable(message) from None
        self._hub = hub

    def _start(self, until: float) -> socket.socket:
        """One of all clients starts it, and the others wait."""
        starter: _Starter | None = None
        starts = 0
        lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            while time.monotonic() < until:
                has_lock = _try_lock(lock)
                if (hub := self._greet()) is not None:
                    return hub
                if has_lock and (starter is None or starter.has_failed()):
                    if starts >= _MOST_STARTS:
                        break
                    starter, starts = _Starter(self._path, self._command, self._environ, starter), starts + 1
                time.sleep(_LOOK_SECONDS)
        finally:
            os.close(lock)
        told = "" if starter is None else starter.last_words()
        raise HubUnusable(
            f"--via {self._path}: no hub answers there, and none starts{': ' if told else ''}{told}"
        )

    def _greet(self) -> socket.socket | None:
        """A connection to a hub that takes this client; None: there is none. Raises HubUnusable."""
        hub = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            hub.connect(self._path)
            raw = hub.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            uid = int.from_bytes(raw[4:8], sys.byteorder)
            if uid != os.geteuid():  # before it hears a variable of ours
                raise HubUnusable(
                    f"--via {self._path}: the user {uid} listens there, and not you; name another place"
                )
            hub.settimeout(_START_SECONDS)
            try:
                hub.sendall(self._hello)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it may have refused this client before it read that: what it says is still to be read
            lines = _Lines()
            while True:
                more = hub.recv(_READ_BYTES)
                if not more:  # it ended
                    hub.close()
                    return None
                whole = iter(lines.take(more))
                for line in whole:
                    if line.startswith(b"#"):
                        _say(line)
                        continue
                    answer = json.loads(line)
                    if "refused" in answer:
                        raise HubUnusable(str(answer["refused"]))
                    self._of_hub = lines
                    hub.settimeout(None)
                    for each in whole:  # it may have said more at once
                        self.from_hub(each)
                    return hub
        except (OSError, ValueError):
            hub.close()
            return None
        except HubUnusable:
            hub.close()
            raise

    def _lose(self) -> None:
        """The hub has gone. What it had answered was passed on."""
        assert self._hub is not None
        self._hub.close()
        self._hub, self._first = None, ""
        self._to_hub.clear()
        self._of_hub = _Lines()
        self._held.clear()
        self._again.clear()
        for number in map(json.loads, self._questions):
            params = {"requestId": number, "reason": _LOST}
            self._tell({"method": "notifications/cancelled", "params": params})
        self._questions.clear()
        self._fail(_LOST)

    def _fail(self, why: str) -> None:
        pending, self._pending = self._pending, {}
        for number in pending.values():
            self._tell(_error(number, why))

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._to_host += json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"

    def _repeat(self) -> None:
        """Tell a new hub what the old one knew of this host."""
        if self._initialize is None:
            return
        self._first = self._send_again(self._initialize)

    def _send_again(self, message: Mapping[str, Any]) -> str:
        self._count += 1
        number = f"runner-again-{self._count}"
        self._again.add(_key(number))
        self._to_hub += json.dumps({**message, "id": number}).encode() + b"\n"
        return _key(number)

    def _repeated(self) -> None:
        self._first = ""
        if self._initialized:
            self._to_hub += self._initialized
        for message in self._standing.values():
            self._send_again(message)
        for line in self._held:
            self._to_hub += line
        self._held.clear()
        for what in ("tools", "prompts", "resources"):  # a new hub reads the configuration anew
            self._tell({"method": f"notifications/{what}/list_changed"})

    # --- messages -----------------------------------------------------------------------------------------

    def from_host(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None  # the hub says what is wrong with it
        if isinstance(message, dict) and "method" not in message and "id" in message:
            known = _key(message["id"])
            if known not in self._questions:
                return  # an answer to a hub that has gone
            message["id"] = self._questions.pop(known)
            line = json.dumps(message).encode() + b"\n"
        # The older protocol has lists of messages.
        requests = [
            each
            for each in (message if isinstance(message, list) else [message])
            if isinstance(each, dict) and isinstance(each.get("method"), str)
        ]
        if self._hub is None:
            try:
                self.connect()
            except HubUnusable as unusable:
                for each in requests:
                    if each.get("id") is not None:
                        self._tell(_error(each["id"], str(unusable)))
                _complain(str(unusable))
                return
            if not isinstance(message, dict) or message.get("method") != "initialize":
                self._repeat()
        for each in requests:
            self._note(each, line)
        if self._first:
            self._held.append(line)
        else:
            self._to_hub += line

    def _note(self, message: dict[str, Any], line: bytes) -> None:
        """Remember what the host waits for, and what a new hub has to know."""
        method, params = message["method"], message.get("params")
        params = params if isinstance(params, dict) else {}
        if message.get("id") is not None:
            self._pending[_key(message["id"])] = message["id"]
        if method == "initialize":
            self._initialize, self._initialized = message, b""
            self._standing.clear()
        elif method == "notifications/initialized":
            self._initialized = line
        elif method == "notifications/cancelled":
            self._pending.pop(_key(params.get("requestId")), None)
        elif method == "resources/unsubscribe":
            self._standing.pop(str(params.get("uri")), None)
        elif method in ("logging/setLevel", "resources/subscribe"):
            uri = str(params.get("uri", ""))
            if uri in self._standing or len(self._standing) < _MOST_STANDING:
                self._standing[uri] = message

    def from_hub(self, line: bytes) -> None:
        if line.startswith(b"#"):
            _say(line)
            return
        found = _ANSWER.match(line)
        try:
            message = {"id": json.loads(found[1])} if found is not None else json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._to_host += line  # the host says what is wrong with it
        elif "method" not in message:
            number = _key(message.get("id"))
            if number in self._again:
                self._again.discard(number)
                if number == self._first:
                    self._repeated()
                return
            self._pending.pop(number, None)
            self._to_host += line
        elif message.get("id") is None:
            self._to_host += line
        else:
            # Two hubs may use the same number, and no answer must be taken for one to another question.
            self._count += 1
            number = f"runner-{self._count}"
            self._questions[_key(number)] = message["id"]
            self._to_host += json.dumps({**message, "id": number}).encode() + b"\n"

    # --- the loop -----------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the host has closed. Raises HubUnusable if there is no hub at the start."""
        self.connect()
        reads, ends_at = True, 0.0
        while True:
            if not reads and (time.monotonic() > ends_at or (self._hub is None and not self._to_host)):
                return 0
            poll = select.poll()
            waiting = max(len(self._to_hub), len(self._to_host), sum(map(len, self._held)))
            if reads and waiting < _MOST_WAITING:
                poll.register(0, select.POLLIN)
            poll.register(1, select.POLLOUT if self._to_host else 0)  # also: the host has gone
            if self._hub is not None:
                wanted = select.POLLIN if len(self._to_host) < _MOST_WAITING else 0
                poll.register(self._hub, wanted | (select.POLLOUT if self._to_hub else 0))
            hub = None if self._hub is None else self._hub.fileno()
            for fd, events in poll.poll(None if reads else 1000 * _END_SECONDS):
                if fd == 1:
                    if events & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                        return 0
                    if self._to_host:
                        del self._to_host[: os.write(1, self._to_host[:_WRITE_BYTES])]
                        ends_at = time.monotonic() + _END_SECONDS
                elif fd == 0:
                    reads = self._read_host()
                    if not reads:
                        ends_at = time.monotonic() + _END_SECONDS
                        self._close_half()
                elif fd == hub and self._hub is not None:
                    self._serve_hub(events)
            if not reads and not self._to_hub:
                self._close_half()

    def _read_host(self) -> bool:
        more = os.read(0, _READ_BYTES)
        for line in self._of_host.take(more):
            self.from_host(line)
        if len(self._of_host.rest) > MOST_LINE:
            _complain(f"the client sent a line of more than {MOST_LINE} bytes; the gateway ends")
            return False
        return bool(more)

    def _close_half(self) -> None:
        if self._hub is not None and not self._to_hub and not self._held:
            try:
                self._hub.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it has gone, which is read

    def _serve_hub(self, events: int) -> None:
        assert self._hub is not None
        try:
            if events & select.POLLOUT and self._to_hub:
                del self._to_hub[: self._hub.send(self._to_hub[:_READ_BYTES], socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:  # it has died: what it said before can still be read
            self._to_hub.clear()
        if not events & ~select.POLLOUT:
            return
        try:
            more = self._hub.recv(_READ_BYTES)
        except OSError:
            more = b""
        for line in self._of_hub.take(more):
            self.from_hub(line)
        if not more:
            self._lose()


class _Lines:
    def __init__(self) -> None:
        self.rest = bytearray()

    def take(self, more: bytes) -> list[bytes]:
        """The lines that are whole now, with their ends."""
        if b"\n" not in more:
            self.rest += more
            return []
        whole, _, rest = more.rpartition(b"\n")
        lines = (bytes(self.rest) + whole).split(b"\n")
        self.rest = bytearray(rest)
        return [line + b"\n" for line in lines]


class _Starter:
    """A hub that is being started: by the user's service manager, else detached from this host."""

    def __init__(
        self, path: str, command: Sequence[str], environ: Mapping[str, str], failed: _Starter | None
    ) -> None:
        self._log = f"{path}.log"
        self._status: int | None = None  # once it has ended
        self.by_manager = failed is None and (words := manager_words(path, command, environ)) != []
        argv = [*words, *command] if self.by_manager else list(command)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        actions = [
            (os.POSIX_SPAWN_DUP2, null, 0),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ]
        # The hub gets the places alone: all else belongs to the host that happens to start it.
        given = dict(environ) if self.by_manager else {**places(environ), **_of_interpreter(environ)}
        try:
            self._pid = os.posix_spawn(argv[0], argv, given, file_actions=actions, setsid=True)
        finally:
            os.close(log)
            os.close(null)

    def has_failed(self) -> bool:
        """Whether there will be no hub of this start. The manager's program ends when it has started one."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None and (not self.by_manager or self._status != 0)

    def last_words(self) -> str:
        with open(self._log, "rb") as file:
            return file.read(_MOST_LOG).decode("utf-8", "replace").strip()


def manager_words(path: str, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What starts a command as a unit of the user's service manager; empty: there is none. In a unit the hub
    outlives the host that started it, and gets cgroups for the limits of plugins."""
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    program, marks = "/usr/bin/systemd-run", read_marks("self")
    if not os.path.exists(f"{runtime}/systemd/private") or not os.access(program, os.X_OK):
        return []
    if is_confined(marks):
        return []  # a unit is not, and such a hub would not serve this client
    unit = f"runner-gateway-{fingerprint(path.encode())[:12]}-{os.getpid()}"
    told = [f"{name}={value}" for name, value in places(environ).items()]
    return [
        *(program, "--user", "--quiet", "--collect", f"--unit={unit}", "--property=Delegate=yes"),
        # The usual one is the command, with its variables, and others may read the journal.
        "--description=the hub of runner gateway",
        *(f"--property=UMask={marks.get('Umask', '0022')}", "--working-directory=/", "--"),
        *("/usr/bin/env", "-i", *told),  # and nothing that the manager has
    ]


def _of_interpreter(environ: Mapping[str, str]) -> dict[str, str]:
    """Where its modules are, if that is how this process was started: the command `runner` is not."""
    path = "" if sys.flags.ignore_environment else environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": path} if path else {}


def _make_folder(path: str) -> None:
    folder = os.path.dirname(path)
    for each in (os.path.dirname(folder), folder):
        try:
            os.mkdir(each, 0o700)
        except OSError:
            pass  # it is there, or its fault is told


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _error(number: Any, why: str) -> dict[str, Any]:
    return {"id": number, "error": {"code": -32603, "message": why}}


def _complain(text: str) -> None:
    _say(f"#runner gateway: {text}\n".encode(errors="backslashreplace"))  # a path may be no UTF-8


def _key(number: Any) -> str:
    return json.dumps(number)


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return "/"


def _say(line: bytes) -> None:
    try:
        os.write(2, line[1:])
    except OSError:
        pass  # nobody reads it


def run_via(path: str, words: Sequence[str], command: Sequence[str]) -> int:
    """Returns the exit status."""
    client = ThinClient(path, words, command, os.environ)
    try:
        return client.run()
    except HubUnusable as unusable:
        _complain(str(unusable))
        return 1
    except (BrokenPipeError, KeyboardInterrupt):  # the host has gone
        return 0
