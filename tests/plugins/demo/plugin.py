#!/usr/bin/python3 -I
"""A demonstration plugin: tries what a plugin should be able to do, then what it should not, and prints both.

Exits with 0 if everything is as it should be, else with 1.
Its argument is the caller's home directory, which it tries to read. Without one it looks for any home.
"""

import ctypes
import os
import pwd
import socket
import sys

CLONE_NEWUSER = 0x10000000


def own_file():
    with open(__file__) as file:
        return f"{len(file.read())} bytes"


def state():
    path = os.path.join(os.environ["RUNNER_STATE_DIR"], "runs")
    with open(path, "a+") as file:
        file.write("x")
        file.seek(0)
        return f"run number {len(file.read())}"


def scratch():
    with open("/tmp/scratch", "w") as file:
        file.write("x")
    room = os.statvfs("/tmp")
    return f"{room.f_blocks * room.f_frsize >> 20} MiB, gone afterwards"


def standard_input():
    return repr(sys.stdin.readline().strip())


def shadow():
    with open("/etc/shadow") as file:
        return file.readline()


def home():
    if len(sys.argv) > 1:
        return ", ".join(os.listdir(sys.argv[1]))
    people = [entry.pw_dir for entry in pwd.getpwall() if entry.pw_uid >= 1000 and entry.pw_uid != 65534]
    for path in [*people, "/root", "/home"]:
        if os.path.isdir(path) and os.listdir(path):
            return ", ".join(os.listdir(path))
    raise LookupError("was told none, and finds none")


def network():
    with socket.create_connection(("192.0.2.1", 80), timeout=3):  # TEST-NET-1: a route would be enough
        return "connected"


def write_usr():
    with open("/usr/bin/ls", "ab"):
        return "opened for writing"


def environment():
    for name in ("/proc/self/environ", "/proc/1/environ"):
        with open(name, "rb") as file:
            if b"DEMO_SECRET" in file.read():
                return f"the secret is in {name}"
    raise LookupError("only " + " ".join(sorted(os.environ)))


def processes():
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, 2, os.getpid())]
    if others:
        return f"pids {' '.join(others)}"
    raise LookupError("sees itself and its init")


def user_namespace():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "has one"


def become_root():
    os.setuid(0)
    return pwd.getpwuid(os.getuid()).pw_name


GIVEN = (
    ("read its own folder", own_file),
    ("write to its state directory", state),
    ("use a private /tmp", scratch),
    ("talk over stdin and stdout", standard_input),
)
REFUSED = (
    ("read /etc/shadow", shadow),
    ("look into the caller's home", home),
    ("open a TCP connection", network),
    ("change a program in /usr", write_usr),
    ("find the caller's environment", environment),
    ("see other processes", processes),
    ("make a user namespace", user_namespace),
    ("become root", become_root),
)


def attempt(act):
    try:
        return True, act()
    except LookupError as nothing:
        return False, str(nothing)
    except OSError as error:
        return False, error.strerror or str(error)


def main():
    wrong = 0
    for acts, expected in ((GIVEN, True), (REFUSED, False)):
        for what, act in acts:
            succeeded, detail = attempt(act)
            wrong += succeeded is not expected
            mark = "  " if succeeded is expected else "!!"
            print(f"{mark} {'got' if succeeded else 'refused':8} {what:32} {detail}")
    print(f"   result   {len(GIVEN) + len(REFUSED) - wrong} of {len(GIVEN) + len(REFUSED)} as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
