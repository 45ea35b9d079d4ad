"""Networks for tests of the gate: an "internet" with servers and a name server, a host that reaches it, and
plugins' namespaces behind a gate on that host.

A socket stays in the network namespace it was made in. So the test process itself holds all ends: it makes
each socket in a thread that has moved to the right namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sandbox.network.egress import EgressPlan
from sandbox.network.recipe import make_recipe
from sandbox.speed import codec
from tests.conftest import ROOT, USER_UID

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
NAME_SERVER = "10.77.0.2"
HOST_ADDRESS = "10.77.0.1"
PUBLIC = "93.184.216.34"
PUBLIC_6 = "2606:2800:220:1::34"
PRIVATE = "10.99.0.7"  # a server on it, in the internet namespace
_SECONDS = 60.0  # a wait that takes longer has failed

_LIBC = ctypes.CDLL(None, use_errno=True)


class Client(socket.socket):
    was_reset = False  # before connect() had returned


class Namespace:
    """A network namespace, kept by a descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def make(cls) -> Namespace:
        def enter() -> int:
            if _LIBC.unshare(CLONE_NEWNET) < 0:
                raise OSError(ctypes.get_errno(), "unshare")
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        return cls(_in_thread(enter))

    @classmethod
    def of(cls, pid: int) -> Namespace:
        return cls(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    def run(self, act: Callable[[], T]) -> T:
        def enter() -> T:
            if _LIBC.setns(self.fd, CLONE_NEWNET) < 0:
                raise OSError(ctypes.get_errno(), "setns")
            return act()

        return _in_thread(enter)

    def ip(self, *words: str) -> None:
        self.run(lambda: subprocess.run(["/usr/sbin/ip", *words], check=True, capture_output=True))

    def make_socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> Client:
        made = self.run(lambda: Client(family, kind))
        made.settimeout(_SECONDS)
        return made

    def connect(self, address: str, port: int) -> Client:
        made = self.make_socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            made.connect((address, port))
        except ConnectionResetError:
            made.was_reset = True
        except BaseException:
            made.close()
            raise
        return made

    def listen(self, address: str, port: int, backlog: int = 1024) -> socket.socket:
        made = self.make_socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        made.listen(backlog)
        return made

    def close(self) -> None:
        os.close(self.fd)


def _in_thread(act: Callable[[], T]) -> T:
    box: list[Any] = []

    def run() -> None:
        try:
            box.extend((True, act()))
        except BaseException as error:  # noqa: BLE001 -- raised again below
            box.extend((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not box[0]:
        raise box[1]
    result: T = box[1]
    return result


# --- the name server -------------------------------------------------------------------------------

A, CNAME, AAAA = 1, 5, 28
Record = tuple[str, int, str]  # owner, kind, address or target


def encode_name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label) + b"\0"


def encode_record(record: Record, ttl: int = 0) -> bytes:
    owner, kind, value = record
    if kind == CNAME:
        data = encode_name(value)
    else:
        data = socket.inet_pton(socket.AF_INET if kind == A else socket.AF_INET6, value)
    return encode_name(owner) + struct.pack("!HHIH", kind, 1, ttl, len(data)) + data


class NameServerDouble:
    """Answers from `zone`: for each name the records of every look, the last of them again and again."""

    def __init__(self, namespace: Namespace) -> None:
        self.zone: dict[str, list[list[Record]]] = {}
        self.asked: list[tuple[str, int]] = []
        self.silent = False
        self.truncates = False
        self.late = False  # a question over UDP is answered when the same one is asked again
        self._held: dict[bytes, tuple[bytes, Any]] = {}
        self._udp = namespace.make_socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((NAME_SERVER, 53))
        self._tcp = namespace.listen(NAME_SERVER, 53)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self.zone.clear()
        self.asked.clear()
        self.silent = self.truncates = self.late = False
        self._held.clear()

    def answer(self, message: bytes, tcp: bool) -> bytes | None:
        number = message[:2]
        labels, at = [], 12
        while message[at]:
            labels.append(message[at + 1 : at + 1 + message[at]].decode())
            at += 1 + message[at]
        name, kind = ".".join(labels).lower(), struct.unpack_from("!H", message, at + 1)[0]
        looks = self.zone.get(name)
        self.asked.append((name, kind))
        if self.silent:
            return None
        section = message[12 : at + 5]
        if looks is None:
            return number + struct.pack("!5H", 0x8183, 1, 0, 0, 0) + section
        if self.truncates and not tcp:
            return number + struct.pack("!5H", 0x8380, 1, 0, 0, 0) + section
        times = sum(each == (name, kind) for each in self.asked)
        records = [each for each in looks[min(times, len(looks)) - 1] if each[1] in (CNAME, kind)]
        body = b"".join(map(encode_record, records))
        return number + struct.pack("!5H", 0x8180, 1, len(records), 0, 0) + section + body

    def _serve(self) -> None:
        while not self._stop.is_set():
            ready = select.select([self._udp, self._tcp], [], [], 0.2)[0]
            if self._udp in ready:
                message, sender = self._udp.recvfrom(4096)
                reply = self.answer(message, False)
                if self.late:
                    held, (reply, sender) = (reply, sender), self._held.get(message[2:], (None, sender))
                    self._held[message[2:]] = held[0] or b"", held[1]
                if reply is not None:
                    self._udp.sendto(reply, sender)
            if self._tcp in ready:
                with self._tcp.accept()[0] as client, contextlib.suppress(OSError):
                    client.settimeout(5)
                    message = client.recv(4096)
                    reply = self.answer(message[2:], True)
                    if reply is not None:
                        client.sendall(len(reply).to_bytes(2, "big") + reply)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._udp.close()
        self._tcp.close()


# --- the lab ---------------------------------------------------------------------------------------


class Lab:
    def __init__(self) -> None:
        self.internet, self.host = Namespace.make(), Namespace.make()
        peer = f"/proc/{os.getpid()}/fd/{self.internet.fd}"
        self.host.ip("link", "add", "up0", "type", "veth", "peer", "name", "down0", "netns", peer)
        for space, link, address, address6 in (
            (self.host, "up0", HOST_ADDRESS, "fd77::1"),
            (self.internet, "down0", NAME_SERVER, "fd77::2"),
        ):
            space.ip("link", "set", "lo", "up")
            space.ip("addr", "add", f"{address}/30", "dev", link)
            space.ip("-6", "addr", "add", f"{address6}/64", "dev", link, "nodad")
            space.ip("link", "set", link, "up")
        self.host.ip("route", "add", "default", "via", NAME_SERVER)
        self.host.ip("-6", "route", "add", "default", "via", "fd77::2")
        for network in ("93.184.216.0/24", "10.99.0.0/24"):
            self.internet.ip("route", "add", "local", network, "dev", "lo")
        self.internet.ip("-6", "addr", "add", f"{PUBLIC_6}/128", "dev", "lo", "nodad")
        self.names = NameServerDouble(self.internet)
        self.folder = tempfile.TemporaryDirectory()
        (Path(self.folder.name) / "hosts").write_text("127.0.0.1 localhost\n93.184.216.35 static.example\n")
        os.chmod(self.folder.name, 0o755)

    def close(self) -> None:
        self.names.close()
        self.internet.close()
        self.host.close()
        self.folder.cleanup()

    @contextlib.contextmanager
    def gate(
        self, plan: EgressPlan, *, user: bool = False, gets: EgressPlan | None = None, asks: str = ""
    ) -> Iterator[GateDouble]:
        """`asks`: options of resolv.conf."""
        resolver = f"nameserver {NAME_SERVER}\noptions {asks}\n"
        (Path(self.folder.name) / "resolv.conf").write_text(resolver)
        double = GateDouble(self, plan, user, gets or plan)
        try:
            yield double
        finally:
            double.close()


@functools.cache
def _recipe(rules: tuple[str, ...], every_port: bool) -> str:
    return codec.encode(make_recipe(EgressPlan(rules, every_port=every_port))).decode()


class GateDouble:
    """A live gate, and the namespace that it serves."""

    def __init__(self, lab: Lab, plan: EgressPlan, user: bool, gets: EgressPlan) -> None:
        audit_r, audit_w = os.pipe()
        alive_r, self._alive = os.pipe()
        os.set_blocking(audit_r, False)
        self._audit, self._rest = audit_r, b""
        self._lines: list[dict[str, Any]] = []
        order = {
            "plan": codec.encode(gets).decode(),
            "recipe": _recipe(plan.rules, plan.every_port),
            "audit": audit_w,
            "alive": alive_r,
            "identity": None if user else [USER_UID + 100, USER_UID + 100],
        }
        folder = lab.folder.name
        script = (
            f"mount --bind {folder}/resolv.conf /etc/resolv.conf && mount --bind {folder}/hosts /etc/hosts"
        )
        become = (
            f"setpriv --reuid={USER_UID} --regid={USER_UID} --clear-groups --no-new-privs --" if user else ""
        )
        argv = [sys.executable, "-P", "tests/sandbox/gate/gate_host.py", json.dumps(order)]
        command = ["unshare", "-m", "sh", "-c", f'{script} && exec {become} "$@"', "sh", *argv]
        self.process = lab.host.run(
            lambda: subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                pass_fds=(audit_w, alive_r),
                cwd=ROOT,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            )
        )
        os.close(audit_w)
        os.close(alive_r)
        assert self.process.stdout is not None
        told = sorted(self.process.stdout.readline() for _ in range(2))
        if told[-1] != b"ready\n":
            lines = self.lines()
            self.close()
            raise RuntimeError(f"the gate did not start: {told} {lines}")
        self.pid, self.plugin_pid = json.loads(told[0])
        self.plugin = Namespace.of(self.plugin_pid)

    def end(self, *, deliver: bool = False) -> int:
        """The cell has ended: the gate has to end by itself, at once or when it has delivered everything. Its
        exit code."""
        if deliver:
            self.dismiss()
        elif self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        os.set_blocking(self._audit, True)
        self.lines()  # to the end: the gate's last lines wait until they are read
        return self.process.wait(_SECONDS)

    def dismiss(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended since it was told before
            os.write(self._alive, b".")

    def close(self) -> None:
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        self.process.kill()  # the gate and the plugin die with it
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        # Its pipe ends when the gate is gone.
        os.set_blocking(self._audit, True)
        while os.read(self._audit, 65536):
            pass
        os.close(self._audit)
        if hasattr(self, "plugin"):
            self.plugin.close()

    # --- what it says ------------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        """All audit lines so far."""
        while True:
            try:
                piece = os.read(self._audit, 65536)
            except BlockingIOError:
                break
            if not piece:
                break
            *whole, self._rest = (self._rest + piece).split(b"\n")
            self._lines += [json.loads(line) for line in whole]
        return self._lines

    def wait_line(self, **fields: Any) -> dict[str, Any]:
        """The next line with these fields, which is removed."""
        until = time.monotonic() + _SECONDS
        while True:
            for line in self.lines():
                if all(line.get(key) == value for key, value in fields.items()):
                    self._lines.remove(line)
                    return line
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._audit], [], [], left)[0]:
                raise AssertionError(f"no audit line has {fields}: {self._lines}")
            if self.process.poll() is not None and not self.lines():
                raise AssertionError(f"the gate has ended: {self.process.returncode}, {self._lines}")

    # --- what the plugin does ----------------------------------------------------------------------

    def ask(self, name: str, kind: int = A) -> tuple[int, list[str]]:
        """A question over UDP: the code and the addresses."""
        question = struct.pack("!6H", 4711, 0x0100, 1, 0, 0, 0) + encode_name(name)
        question += struct.pack("!HH", kind, 1)
        with self.plugin.make_socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            asker.connect(("127.0.0.1", 53))
            asker.settimeout(2)
            for _ in range(int(_SECONDS / 2)):  # as every resolver: a datagram may be lost
                asker.send(question)
                with contextlib.suppress(TimeoutError):
                    return read_addresses(asker.recv(4096), len(question))
        raise AssertionError(f"no answer for {name}")

    def resolve(self, name: str, kind: int = A) -> str:
        code, addresses = self.ask(name, kind)
        assert code == 0 and len(addresses) == 1, (code, addresses)
        return addresses[0]

    def connect(self, name: str, port: int, kind: int = A) -> Client:
        return self.plugin.connect(self.resolve(name, kind), port)


def read_addresses(reply: bytes, question_bytes: int) -> tuple[int, list[str]]:
    """Of one of the gate's own answers, in which every record's name is a pointer to the question."""
    _, flags, _, answers, _, _ = struct.unpack_from("!6H", reply)
    found, at = [], question_bytes
    for _ in range(answers):
        assert reply[at : at + 2] == b"\xc0\x0c"
        kind, _, _, length = struct.unpack_from("!HHIH", reply, at + 2)
        data = reply[at + 12 : at + 12 + length]
        found.append(socket.inet_ntop(socket.AF_INET if kind == A else socket.AF_INET6, data))
        at += 12 + length
    return flags & 0xF, found


def is_reset(connection: Client) -> bool:
    """Whether the other end refuses it: an error, and not an orderly end or a byte."""
    try:
        connection.recv(1)
    except ConnectionResetError:
        return True
    return connection.was_reset


@contextlib.contextmanager
def serving(listener: socket.socket, act: Callable[[socket.socket], None] | None = None) -> Iterator[None]:
    """Serve every connection in a thread of its own."""
    chosen = act or echo
    served: list[tuple[socket.socket, threading.Thread]] = []

    def handle(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(_SECONDS)
            chosen(client)

    def accept() -> None:
        while True:
            try:
                client = listener.accept()[0]
            except TimeoutError:
                continue
            except OSError:
                return
            thread = threading.Thread(target=handle, args=(client,))
            served.append((client, thread))
            thread.start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        for client, handler in served:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            handler.join()


def echo(client: socket.socket) -> None:
    while data := client.recv(65536):
        client.sendall(data)
