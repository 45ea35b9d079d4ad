#!/usr/bin/python3 -I
"""Tries one forbidden act and prints the result: probe.py ATTACK [ARGUMENT …]

Prints one JSON document: {"done": value} or {"refused": "EACCES"}. The same program runs inside the cage and,
as the control, outside of it. The acts of the project's list (sandbox/attacks/probe.py) are beside it, as
acts.py; here are those that only tests make. Adding one is adding a function.
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)


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
        for name in ("CORE", "NOFILE", "MSGQUEUE", "RTPRIO", "NICE", "MEMLOCK", "SIGPENDING")
    }


def priority(get_io_priority):
    """The scheduling policy, the nice value, the class of I/O; and whether it can take more."""
    taken = []
    for take in (
        lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        lambda: os.setpriority(os.PRIO_PROCESS, 0, -1),
    ):
        try:
            take()
            taken.append(True)
        except PermissionError:
            taken.append(False)
    found = [os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)]
    return [*found, libc.syscall(int(get_io_priority), 1, 0) >> 13, *taken]


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


# --- the kernel ---


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


def memory_of(pid):
    with open(f"/proc/{pid}/mem", "rb") as file:
        return len(file.read(0))


def find_key(number, name):
    text = ctypes.create_string_buffer(b"user")
    description = ctypes.create_string_buffer(name.encode())
    return _acts().call(
        number, 10, -3, ctypes.addressof(text), ctypes.addressof(description), 0
    )  # KEYCTL_SEARCH


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


def _acts():
    """The acts of the list. Imported only by attempts that need them."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.path.dirname(__file__))
    import acts

    return acts


def attempt(name, *arguments):
    try:
        act = ATTACKS.get(name) or getattr(_acts(), name)
        return {"done": act(*arguments)}
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
