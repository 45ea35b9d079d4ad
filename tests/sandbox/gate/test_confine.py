"""Acts of a process that is confined as the gate is. Each act has a control: without, it succeeds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, SPARE_UID, SYSTEM_PATH

_START = """
import ctypes, os, resource, signal, socket, sys, mmap
from sandbox.gate.calls import gate_filter
from sandbox.gate.confine import close_others, confine, leave_terminal
from sandbox.seccomp.filter import machine_arch
program = gate_filter(machine_arch())
identity = (int(sys.argv[2]),) * 2 if sys.argv[2] != "-" else None
def act():
    {act}
leave_terminal()
out = os.dup(1)
close_others([out])
if sys.argv[1] == "confined":
    confine(identity, 64, lambda: True, program)
try:
    act()
except OSError as error:
    os.write(out, os.strerror(error.errno).encode())
    os._exit(3)
os._exit(0)
"""
ME = str(SPARE_UID) if os.geteuid() == 0 else "-"


def _run(act: str, confined: bool, folder: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-c", _START.format(act=act), "confined" if confined else "free", ME]
    env = {"PATH": SYSTEM_PATH, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, capture_output=True, env=env, cwd=folder, timeout=60, check=False)


@pytest.mark.parametrize(
    "act",
    [
        'os.open("/etc/passwd", os.O_RDONLY)',
        'os.stat("/")',
        'os.listdir("/")',
        "os.fork()",
        'os.execv("/bin/true", ["true"])',
        "socket.socket(socket.AF_UNIX)",
        "socket.socket().bind(('127.0.0.1', 0))",
        "socket.socket().listen()",
        "os.kill(os.getpid(), 0)",
        "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
        "resource.getrlimit(resource.RLIMIT_NOFILE)",
        "os.memfd_create('x')",
        "os.getppid()",
    ],
)
def test_an_act_that_a_gate_never_does_ends_it(act: str) -> None:
    assert _run(act, confined=False).returncode == 0
    assert _run(act, confined=True).returncode == -signal.SIGSYS


@pytest.mark.parametrize(
    "act",
    [
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).connect(('::1', 9))",
        "from sandbox.network.addresses import vet; vet('93.184.216.34')",  # imported before, by `control`
        "os.urandom(16)",
        "[bytearray(1 << 20) for _ in range(16)]",
    ],
)
def test_what_a_gate_does_is_not_stopped(act: str) -> None:
    if "vet" in act:
        act = "vet('93.184.216.34')\nfrom sandbox.network.addresses import vet\nvet('93.184.216.34')"
    done = _run(act, confined=True)
    assert done.returncode == 0, (done.stdout, done.stderr)


def test_memory_has_a_limit() -> None:
    act = "bytearray(100 << 20)"
    assert _run(act, confined=False).returncode == 0
    assert _run(act, confined=True).returncode != 0


_STATE = """
import json, os, resource, sys
from sandbox.gate import confine as module
from sandbox.gate.confine import close_others, confine, leave_terminal
program = b"\\x06\\0\\0\\0\\0\\0\\xff\\x7f"  # allows everything, to look around
fd = os.open("/dev/null", os.O_RDONLY)
process = os.open("/proc/self", os.O_PATH)
leave_terminal()
out = os.dup(1)
close_others([out, process])
status = lambda: dict(line.split(":\\t", 1) for line in
    os.read(os.open("status", os.O_RDONLY, dir_fd=process), 65536).decode().splitlines() if ":\\t" in line)
identity = (int(sys.argv[1]),) * 2 if sys.argv[1] != "-" else None
fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))
module._make_ruleset = lambda libc: -1  # the same
confine(identity, 99, lambda: True, program)
limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in
    ("NOFILE", "FSIZE", "NPROC", "CORE", "MEMLOCK")}
try:
    root = os.listdir("/")
except PermissionError:
    root = []  # an empty directory of root's own
os.write(out, json.dumps([status(), fds, limits, root]).encode())
"""


@pytest.mark.needs("root")
def test_nothing_is_left_to_it() -> None:
    import json

    env = {"PATH": SYSTEM_PATH, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _STATE, ME], capture_output=True, env=env, timeout=60, check=True
    )
    status, fds, limits, root = json.loads(done.stdout)
    assert status["Uid"].split() == status["Gid"].split() == [ME] * 4
    assert status["Groups"].split() == []
    assert {status[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {""}
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2" and status["Umask"] == "0077"
    assert status["SigIgn"] == f"{1 << signal.SIGPIPE - 1:016x}" and int(status["SigCgt"], 16) == 0
    assert root == []
    assert len(fds) == 6  # 0, 1, 2, the two that were kept, and the listing's own
    assert limits == {"NOFILE": [99, 99], **{n: [0, 0] for n in ("FSIZE", "NPROC", "CORE", "MEMLOCK")}}


@pytest.mark.parametrize("kind", ["landlock", "root directory"])
@pytest.mark.needs("root")
def test_each_layer_alone_hides_the_file_system(kind: str) -> None:
    other = (
        "_leave_root_directory = lambda: None" if kind == "landlock" else "_make_ruleset = lambda libc: -1"
    )
    code = _START.replace(
        "leave_terminal()\n",
        f"import sandbox.gate.confine as module; module.{other}\n"
        'program = b"\\x06\\0\\0\\0\\0\\0\\xff\\x7f"\nleave_terminal()\n',
        1,
    )
    code = code.format(act='os.open("/etc/passwd", os.O_RDONLY)')
    env = {"PATH": SYSTEM_PATH, "PYTHONPATH": str(ROOT)}
    for how, expected in (("free", b""), ("confined", b"Permission denied")):
        done = subprocess.run(
            [sys.executable, "-c", code, how, ME], capture_output=True, env=env, timeout=60, check=False
        )
        if kind == "landlock" and how == "confined" and done.returncode == 0:
            pytest.skip("this kernel has no Landlock")
        assert (done.returncode, done.stdout.startswith(expected)) == (0 if how == "free" else 3, True), done
