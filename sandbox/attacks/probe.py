"""Acts that a cage must refuse. Runs in any sandbox as a plain program: python3 -I -S - < text

`program` in judge.py adds a last line to this text, which calls `main` with the attempts. Each attempt runs
in a child, so that one that is killed does not end the others, and prints one line of JSON.
Adding an act is adding a function. Its arguments are words. No act changes the host, not even if it succeeds
outside of any sandbox; no act takes more than 64 MiB or 50 processes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)

ACT_SECONDS = 15
MOST_BYTES = 4096  # of one answer: the smallest pipe
SEIZE = 0x4206  # PTRACE_SEIZE


def call(number: str, *arguments: int) -> int:
    """Make a system call with 64-bit arguments."""
    longs = (ctypes.c_ulong(each & (1 << 64) - 1) for each in arguments)
    return check(libc.syscall(ctypes.c_long(int(number)), *longs))


def check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


# --- files ---


def read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(1 << 20).decode("latin-1")


def find(path: str) -> bool:
    os.lstat(path)
    return True


def create(path: str) -> bool:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    return True


def change_mode(path: str) -> bool:
    """Set the mode that it has. On a read-only mount this fails before the owner is compared."""
    os.chmod(path, os.stat(path).st_mode & 0o7777)
    return True


def open_to_read(path: str) -> bool:
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    return True


def open_to_write(path: str) -> bool:
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    return True


def make_device() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        os.mknod(f"{folder}/mem", 0o600 | 0o020000, os.makedev(1, 1))
    return True


def set_user_id() -> bool:
    with tempfile.NamedTemporaryFile() as file:
        os.fchmod(file.fileno(), 0o4711)
    return True


def terminal() -> bool:
    os.openpty()
    return True


# --- processes ---


def signal_process(pid: str) -> bool:
    os.kill(int(pid), 0)
    return True


def find_process(word: str) -> bool:
    """Find a process by a word of its command line."""
    for pid in pids():
        try:
            if word in read(f"/proc/{pid}/cmdline"):
                return True
        except OSError:
            continue
    raise FileNotFoundError(errno.ENOENT, "")


def find_variable(value: str) -> bool:
    """Find a value in the environment of any process."""
    for pid in pids():
        try:
            if value in read(f"/proc/{pid}/environ"):
                return True
        except OSError:
            continue
    raise FileNotFoundError(errno.ENOENT, "")


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def leave_a_process(word: str) -> bool:
    """A daemon in a session of its own, which lives for a minute."""
    reading, writing = os.pipe()  # closed by exec
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            try:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                null = os.open("/dev/null", os.O_RDWR)
                for each in (0, 1, 2):
                    os.dup2(null, each)
                code = "import time; time.sleep(60)"
                os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, word])
            finally:
                os._exit(1)
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    os.read(reading, 1)  # until the daemon has its own command line
    return True


def become(uid: str) -> bool:
    os.setresuid(int(uid), int(uid), int(uid))
    return True


def through_descriptors(pid: str, path: str) -> str:
    """Reach `path` from any descriptor of `pid`, as from a directory that was left open."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            with open(f"/proc/{pid}/fd/{name}/{path}", "rb") as file:
                return file.read(64).decode("latin-1")
        except OSError:
            continue
    raise FileNotFoundError(errno.ENOENT, "")


# --- the kernel ---


def system_call(number: str, *arguments: str) -> bool:
    call(number, *(int(each, 0) for each in arguments))
    return True


def unshare(flags: str) -> bool:
    check(libc.unshare(int(flags, 0)))
    return True


def clone(number: str, flags: str) -> bool:
    pid = call(number, int(flags, 0) | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


class _Victim:
    """A child that waits."""

    def __enter__(self) -> int:
        self.pid = os.fork()
        if self.pid == 0:
            time.sleep(ACT_SECONDS)
            os._exit(0)
        return self.pid

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def trace_child(number: str) -> bool:
    with _Victim() as pid:
        call(number, SEIZE, pid, 0, 0)
    return True


def trace_first(number: str) -> bool:
    call(number, SEIZE, 1, 0, 0)
    return True


def read_memory(number: str) -> str:
    """process_vm_readv on a child."""
    secret = ctypes.create_string_buffer(b"secret", 6)
    local = ctypes.create_string_buffer(6)
    here = (ctypes.c_void_p * 2)(ctypes.addressof(local), 6)
    there = (ctypes.c_void_p * 2)(ctypes.addressof(secret), 6)
    with _Victim() as pid:
        call(number, pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
    return local.raw.decode()


def steal_descriptor(open_number: str, get_number: str) -> bool:
    with _Victim() as pid:
        call(get_number, call(open_number, pid, 0), 0, 0)
    return True


def add_key(number: str, name: str, keyring: str) -> bool:
    kind, description, payload = (
        ctypes.create_string_buffer(each) for each in (b"user", name.encode(), b"k")
    )
    call(number, *map(ctypes.addressof, (kind, description, payload)), 1, int(keyring))
    return True


def join_keyring(number: str) -> bool:
    call(number, 1, 0, 0, 0, 0)  # KEYCTL_JOIN_SESSION_KEYRING: a new one, which goes with this process
    return True


def session_keyring(number: str) -> int:
    return call(number, 0, -3, 0, 0, 0)  # KEYCTL_GET_KEYRING_ID


def int_0x80() -> bool:
    """getpid by int 0x80, the entry of 32-bit programs (x86 only). User-Mode Linux has no other calls than
    64-bit ones: there it makes one of these."""
    import mmap

    code = b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3"  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() != os.getpid():
        raise OSError(errno.ENOSYS, "no system calls of 32-bit programs")
    return True


# --- memory of the kernel ---


def large_attribute(way: str, size: str) -> int:
    """An access control list of so many bytes, on a file of its own."""
    users = [(2, 7, os.getuid())] * ((int(size) - 36) // 8)
    entries = [(1, 7, -1), *users, (4, 7, -1), (16, 7, -1), (32, 7, -1)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    with tempfile.NamedTemporaryFile() as file:
        target = file.fileno() if way == "descriptor" else file.name
        os.setxattr(target, "system.posix_acl_access", value, follow_symlinks=way != "link")
        return len(value)


def option(family: str, kind: str, level: str, name: str, value: str, length: str) -> bool:
    """Set an option of a new socket to a value in hexadecimal, with zeroes behind it."""
    with socket.socket(int(family), int(kind)) as one:
        one.setsockopt(int(level), int(name), bytes.fromhex(value).ljust(int(length), b"\0"))
    return True


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def socket_filter() -> bool:
    program = _Program(1, struct.pack("<HBBI", 6, 0, 0, 0xFFFF))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.setsockopt(socket.SOL_SOCKET, 26, bytes(program))  # SO_ATTACH_FILTER
    return True


def listener_of_a_filter(number: str) -> bool:
    """SECCOMP_FILTER_FLAG_NEW_LISTENER, for a filter that allows everything."""
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    program = _Program(1, struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000))
    call(number, 1, 8, ctypes.addressof(program))
    return True


def poll_many(count: str) -> bool:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    check(libc.poll((ctypes.c_uint64 * int(count))(), ctypes.c_ulong(int(count)), 0))
    return True


def zeroes(way: str) -> int:
    """Put a page of /dev/zero into a pipe or a unix socket, without a copy."""
    zero = os.open("/dev/zero", os.O_RDONLY)
    reading, writing = os.pipe()
    if way == "splice":
        return os.splice(zero, writing, 4096)
    if way == "tee":
        os.write(writing, b"zeroes")
        return check(libc.tee(reading, os.pipe()[1], ctypes.c_size_t(6), 0))
    one, other = socket.socketpair()
    with one, other:
        return os.sendfile(one.fileno(), zero, 0, 4096)


def huge_memory_file() -> bool:
    os.close(os.memfd_create("huge", 4))  # MFD_HUGETLB
    return True


# --- resources ---


def memory(size: str) -> bool:
    """Touch so many bytes."""
    try:
        held = bytearray(int(size))
    except MemoryError:
        raise OSError(errno.ENOMEM, "") from None
    for place in range(0, len(held), 4096):
        held[place] = 1
    return True


def processes(count: str) -> bool:
    children = []
    try:
        for _ in range(min(int(count), 50)):
            child = os.fork()
            if child == 0:
                time.sleep(ACT_SECONDS)
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
    return True


def fill(folder: str, size: str) -> bool:
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(0, min(int(size), 64 << 20), 65536):
            file.write(bytes(65536))
    return True


def empty_files(folder: str, count: str) -> bool:
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        for number in range(int(count)):
            os.close(os.open(f"{inside}/{number}", os.O_CREAT | os.O_WRONLY))
    return True


def raise_limit(name: str, value: str) -> bool:
    try:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
    except ValueError:  # Python's word for EPERM here
        raise PermissionError(errno.EPERM, "") from None
    return True


def lock_memory(size: str) -> bool:
    held = ctypes.create_string_buffer(int(size))
    check(libc.mlock(held, ctypes.c_size_t(int(size))))
    return True


# --- the network ---


def family(number: str, kind: str, protocol: str) -> bool:
    socket.socket(int(number), int(kind), int(protocol)).close()
    return True


def connect(host: str, port: str) -> str:
    with socket.create_connection((host, int(port)), timeout=5) as link:
        return link.recv(64).decode("latin-1")


def connect_unix(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(5)
        link.connect("\0" + name[1:] if name.startswith("@") else name)
        return link.recv(64).decode("latin-1")


def datagram(host: str, port: str) -> str:
    """Send a datagram by UDP and return the reply."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect((host, int(port)))
        link.send(b"?")
        if not select.select([link], [], [], 3)[0]:
            raise TimeoutError(errno.ETIMEDOUT, "")
        return link.recv(64).decode("latin-1")


def route(host: str) -> bool:
    """Whether there is a way to a host. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect((host, 53))
    return True


# --- the answers ---


def attempt(words: list[str]) -> dict[str, Any]:
    """Make an attempt. Returns its result, or the name of the errno."""
    try:
        return {"done": globals()[words[0]](*words[1:])}
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        return {"refused": name} if name else {"failed": f"{type(error).__name__}: {error}"[:200]}
    except Exception as error:  # noqa: BLE001 -- the other attempts count too
        return {"failed": f"{type(error).__name__}: {error}"[:200]}


def in_child(words: list[str]) -> dict[str, Any]:
    """Make an attempt in a child. Returns its answer, or the signal that ended it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(ACT_SECONDS)
        answer = json.dumps(attempt(words)).encode()
        os.write(writing, answer if len(answer) <= MOST_BYTES else b'{"done": true}')
        os._exit(0)
    os.close(writing)
    # A process that the act has left keeps the pipe open: the child's end is waited for, not the pipe's.
    _, status = os.waitpid(child, 0)
    answered = select.select([reading], [], [], 0)[0]
    text = os.read(reading, MOST_BYTES) if answered else b""
    os.close(reading)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"ended": signal.Signals(number).name} if number else {"failed": f"exit status {status >> 8}"}


def main(nonce: str, attempts: list[list[str]]) -> None:
    for number, words in enumerate(attempts):
        answer = {"nonce": nonce, "attempt": number, **in_child(words)}
        # With a line feed in front: what others print without an end must not spoil the line.
        os.write(1, b"\n" + json.dumps(answer).encode() + b"\n")
