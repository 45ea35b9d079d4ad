#!/usr/bin/python3 -I
"""Tries one forbidden act and prints the result: probe.py ATTACK [ARGUMENT …]

Prints one JSON document: {"done": value} or {"refused": "EACCES"}. The same program runs inside the cage and,
as the control, outside of it. Adding an attack is adding a function.
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    """Make a system call with 64-bit arguments."""
    result = libc.syscall(ctypes.c_long(int(number)), *(ctypes.c_ulong(a & (1 << 64) - 1) for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


# --- files ---


def read(path):
    with open(path, "rb") as file:
        return file.read(65536).decode("latin-1")


def listing(path):
    return sorted(os.listdir(path))


def exists(path):
    return os.path.lexists(path)


def write(path):
    with open(path, "ab") as file:
        file.write(b"planted")
    return True


def open_to_read(path):
    os.close(os.open(path, os.O_RDONLY))
    return "opened"


def open_to_write(path):
    os.close(os.open(path, os.O_WRONLY))
    return True


def writable(top):
    """Files that can be opened for writing, without those of processes."""
    found = []
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if not name.isdigit() and name not in ("self", "thread-self")]
        for path in (f"{folder}/{name}" for name in names):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                found.append(path)
            except OSError:
                pass
    return found


def hard_link(source, target):
    os.link(source, target)
    return True


def flood(path, size):
    """How many bytes fit, up to `size`."""
    written = 0
    with open(path, "wb", buffering=0) as file:
        while written < int(size):
            try:
                written += file.write(bytes(65536))
            except OSError as error:
                return [written, errno.errorcode[error.errno]]
    return [written, ""]


def empty_files(folder, most):
    """How many files fit, up to `most`."""
    for number in range(int(most)):
        try:
            os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY))
        except OSError as error:
            return [number, errno.errorcode[error.errno]]
    return [int(most), ""]


def terminals(most):
    """How many pseudo-terminals can be opened, up to `most`."""
    for number in range(int(most)):
        try:
            os.openpty()
        except OSError:
            return number
    return int(most)


def run(*argv):
    return subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout.decode()


def mounts():
    """Mount point and options of every mount."""
    with open("/proc/self/mountinfo") as file:
        return [(line.split()[4], line.split()[5].split(",")) for line in file]


def free_space(path):
    held = os.statvfs(path)
    return held.f_blocks * held.f_frsize


def make_node(path):
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 1))  # /dev/mem
    return True


def set_user_id(path):
    """Every way to make a setuid program that runs as this uid when others start it."""
    made = []
    with open(path, "w"):
        pass
    ways = {
        "chmod": lambda: os.chmod(path, 0o4755),
        "open": lambda: os.close(os.open(f"{path}.open", os.O_CREAT | os.O_WRONLY, 0o4755)),
        "mknod": lambda: os.mknod(f"{path}.mknod", 0o4755),
        "mkdir": lambda: os.chmod(path, 0o2755),
    }
    for name, way in ways.items():
        try:
            way()
            made.append(name)
        except PermissionError:
            pass
    return made


def symlink(target, path):
    os.symlink(target, path)
    return True


# --- processes ---


def status(*names):
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {name: lines[name].split()[0] for name in names}


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def kill(pid, number):
    os.kill(int(pid), int(number))
    return True


def crash(directory):
    os.chdir(directory)
    os.kill(os.getpid(), signal.SIGSEGV)


def limits():
    return {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        for name in ("CORE", "NOFILE", "MSGQUEUE", "RTPRIO", "MEMLOCK", "SIGPENDING")
    }


def daemon(path):
    """Leaves a daemon behind that keeps all our descriptors open."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            held = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            fcntl.flock(held, fcntl.LOCK_SH)
            os.write(writer, b"%d" % os.getpid())
            while True:
                signal.pause()
        os._exit(0)
    return int(os.read(reader, 32))


def daemon_and_wait(path):
    daemon(path)
    print("ready", flush=True)
    while True:
        signal.pause()


def linger():
    """Prints "ready", then waits until stdin ends."""
    print("ready", flush=True)
    sys.stdin.read()
    return True


def write_and_linger(path):
    write(path)
    return linger()


def ids():
    """All uids, gids and groups of this process."""
    return [os.getresuid(), os.getresgid(), os.getgroups()]


def become(uid):
    os.setresuid(int(uid), int(uid), int(uid))
    return True


def exhaust_inotify():
    """Take every inotify instance there is, then wait."""
    taken = []
    while len(taken) < 100000:
        fd = libc.inotify_init1(0)
        if fd < 0:
            break
        taken.append(fd)
    print("ready", flush=True)
    sys.stdin.read()
    return len(taken)


def inotify():
    fd = libc.inotify_init1(0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "")
    return True


# --- descriptors ---


def descriptors(pid):
    """The file of each descriptor, without the one of the listing."""
    folder = f"/proc/{pid}/fd"
    found = {}
    for name in os.listdir(folder):
        try:
            found[name] = os.readlink(f"{folder}/{name}")
        except FileNotFoundError:
            continue
    return found


def through_descriptors(pid, path):
    """Reach `path` from any descriptor of `pid`, as from a directory that was left open."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            with open(f"/proc/{pid}/fd/{name}/{path}", "rb") as file:
                return file.read(4096).decode("latin-1")
        except OSError:
            continue
    raise FileNotFoundError(errno.ENOENT, "")


def reopened(pid):
    """Which descriptors of `pid` can be reopened, without the standard streams."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        for mode in (os.O_RDONLY, os.O_WRONLY):
            try:
                os.close(os.open(f"/proc/{pid}/fd/{name}", mode | os.O_NONBLOCK))
                found.append(name)
            except OSError:
                pass
    return sorted(set(found) - {"0", "1", "2"})


def working_directory():
    return os.getcwd()


def words(*arguments):
    return list(arguments)


def echo_input():
    return sys.stdin.read()


# --- the kernel ---


def system_call(number, *arguments):
    call(number, *(int(a, 0) for a in arguments))
    return True


def large_attribute(way, size):
    """An access control list of so many bytes, on a file of its own."""
    users = [(2, 7, os.getuid())] * ((int(size) - 36) // 8)
    entries = [(1, 7, -1), *users, (4, 7, -1), (16, 7, -1), (32, 7, -1)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    with open(f"/tmp/attribute-{os.getpid()}", "w") as file:
        try:
            target = file.fileno() if way == "descriptor" else file.name
            os.setxattr(target, "system.posix_acl_access", value, follow_symlinks=way != "link")
            return len(value)
        finally:
            os.unlink(file.name)


def option(family, kind, level, name, value, length):
    """Set an option of a new socket to a value in hexadecimal, with zeroes behind it."""
    with socket.socket(int(family), int(kind)) as one:
        one.setsockopt(int(level), int(name), bytes.fromhex(value).ljust(int(length), b"\0"))
    return True


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def socket_filter():
    program = _Program(1, struct.pack("<HBBI", 6, 0, 0, 0xFFFF))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.setsockopt(socket.SOL_SOCKET, 26, bytes(program))  # SO_ATTACH_FILTER
    return True


def listener_of_a_filter(number):
    """SECCOMP_FILTER_FLAG_NEW_LISTENER, for a filter that allows everything, in a child."""
    child = os.fork()
    if child == 0:
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        program = _Program(1, struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000))
        made = libc.syscall(ctypes.c_long(int(number)), 1, 8, ctypes.byref(program))
        os._exit(0 if made >= 0 else ctypes.get_errno())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code, "")
    return True


def poll_many(count):
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if libc.poll((ctypes.c_uint64 * int(count))(), ctypes.c_ulong(int(count)), 0) < 0:
        raise OSError(ctypes.get_errno(), "")
    return True


def huge_memory_file():
    os.close(os.memfd_create("huge", 4))  # MFD_HUGETLB
    return True


def unshare(flags):
    if libc.unshare(int(flags, 0)) < 0:
        raise OSError(ctypes.get_errno(), "")
    return True


def clone(number, flags):
    pid = call(number, int(flags, 0) | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def type_into_terminal(high):
    """TIOCSTI, with a request number whose high half the kernel ignores."""
    request = 0x5412 | int(high, 0)
    for byte in b"echo\n":
        one = ctypes.create_string_buffer(bytes((byte,)))
        if libc.ioctl(0, ctypes.c_ulong(request), one) < 0:
            raise OSError(ctypes.get_errno(), "")
    return True


def open_terminal():
    os.close(os.open("/dev/tty", os.O_RDWR))
    return True


def ptrace_child(number):
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        call(number, 0x4206, pid, 0, 0)  # PTRACE_SEIZE
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return True


def ptrace_init(number):
    call(number, 0x4206, 1, 0, 0)
    return True


def memory_of(pid):
    with open(f"/proc/{pid}/mem", "rb") as file:
        return len(file.read(0))


def process_memory(number):
    """process_vm_readv on a child."""
    secret = ctypes.create_string_buffer(b"secret", 6)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    local = ctypes.create_string_buffer(6)
    here = (ctypes.c_void_p * 2)(ctypes.addressof(local), 6)
    there = (ctypes.c_void_p * 2)(ctypes.addressof(secret), 6)
    try:
        call(number, pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return local.raw.decode()


def steal_descriptor(number):
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        call(number, os.pidfd_open(pid), 0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return True


def add_key(number, name):
    text = ctypes.create_string_buffer(b"user")
    description = ctypes.create_string_buffer(name.encode())
    payload = ctypes.create_string_buffer(b"canary", 6)
    pointers = (ctypes.addressof(p) for p in (text, description, payload))
    return call(number, *pointers, 6, -3)  # the session keyring


def find_key(number, name):
    text = ctypes.create_string_buffer(b"user")
    description = ctypes.create_string_buffer(name.encode())
    return call(number, 10, -3, ctypes.addressof(text), ctypes.addressof(description), 0)  # KEYCTL_SEARCH


def session_keyring(number):
    return call(number, 0, -3, 0, 0, 0)  # KEYCTL_GET_KEYRING_ID


def int_0x80():
    """getpid by int 0x80, the entry of 32-bit programs (x86 only)."""
    import mmap

    code = b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3"  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid()


def run_from_memory(number):
    """Run a program that is not a file, with memfd_create and execveat."""
    fd = os.memfd_create("program", 0)
    with open("/usr/bin/cat", "rb") as file:
        os.write(fd, file.read())
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 1)
        os.execve(fd, ["cat", "/proc/self/status"], {})
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as text:
        lines = dict(line.split(":\t", 1) for line in text.read().splitlines() if ":\t" in line)
    return {name: lines[name].split()[0] for name in ("Seccomp", "NoNewPrivs", "CapEff", "Uid")}


def set_clock():
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    return True


# --- the network ---


def family(number, kind, protocol):
    socket.socket(int(number), int(kind), int(protocol)).close()
    return True


def connect(host, port):
    with socket.create_connection((host, int(port)), timeout=5) as link:
        return link.recv(64).decode()


def connect_unix(name):
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(5)
        link.connect("\0" + name[1:] if name.startswith("@") else name)
        return link.recv(64).decode()


def datagram(host, port):
    """Send a datagram by UDP and return the reply."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as link:
        link.connect((host, int(port)))
        link.send(b"?")
        if not select.select([link], [], [], 3)[0]:
            raise TimeoutError(errno.ETIMEDOUT, "")
        return link.recv(64).decode()


def interfaces():
    return [name for _, name in socket.if_nameindex()]


def own_loopback():
    """A connection to itself over loopback, which must work in the cage."""
    server = socket.create_server(("127.0.0.1", 0))
    link = socket.create_connection(server.getsockname(), timeout=5)
    server.accept()[0].send(b"me")
    return link.recv(64).decode()


# --- the environment ---


def environment():
    return dict(os.environ)


def environments():
    """The environments of all processes that can be read."""
    found = ""
    for pid in pids():
        try:
            found += read(f"/proc/{pid}/environ")
        except OSError:
            pass
    return found


def command_lines():
    return {str(pid): read(f"/proc/{pid}/cmdline").split("\0")[:-1] for pid in pids()}


def hostname():
    return socket.gethostname()


ATTACKS = {name: value for name, value in globals().items() if callable(value) and not name.startswith("_")}


def attempt(name, *arguments):
    try:
        return {"done": ATTACKS[name](*arguments)}
    except OSError as error:
        return {"refused": errno.errorcode.get(error.errno, str(error))}


def many(attempts):
    """Run several attacks, given as a JSON list of word lists."""
    return [attempt(*words) for words in json.loads(attempts)]


ATTACKS["many"] = many


def main():
    print(json.dumps(attempt(*sys.argv[1:])), flush=True)


if __name__ == "__main__":
    main()
