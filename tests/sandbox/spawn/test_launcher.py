"""The last program before the plugin: its behaviour. Its bytes: test_machine_code.py."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandbox.spawn import launcher
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox import cages

# --- what it is made of ------------------------------------------------------------------------------------


def test_it_is_for_two_machines_only() -> None:
    with pytest.raises(OSError, match="there is no program for riscv64"):
        launcher.image((3, 4, 5), 6, 7, "riscv64")


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        (b"", launcher.ExecReport(False)),
        (b"exe", launcher.ExecReport(False)),
        (b"exec", launcher.ExecReport(True)),
        (b"exec\x02\0\0", launcher.ExecReport(True)),
        (launcher.failure_report(errno.ENOENT, found=False), launcher.ExecReport(False, errno.ENOENT, False)),
        (launcher.failure_report(errno.ENOEXEC, found=True), launcher.ExecReport(False, errno.ENOEXEC, True)),
    ],
)
def test_the_meaning_of_its_reports(told: bytes, meant: launcher.ExecReport) -> None:
    assert launcher.read_report(told) == meant


# --- what it does ------------------------------------------------------------------------------------------


def start(
    *argv: str, machine: str = "", env: dict[str, str] | None = None, parked: bytes | None = None
) -> tuple[int, list[bytes], launcher.ExecReport]:
    """Run it without a cage. Returns its status, its stdout and stderr, and its report. `parked`: it is
    parked, and these bytes and the end of the file come on the pipe of its release."""
    emulator = shutil.which(f"qemu-{machine}") if machine else None
    pipes = [os.pipe() for _ in range(4)]
    (in_r, in_w), (out_r, out_w), (err_r, err_w), (told_r, told_w) = pipes
    own = os.memfd_create("launcher", 0)
    release_r, release_w = os.pipe()
    os.write(release_w, parked or b"")
    os.close(release_w)
    for fd in (in_r, out_w, err_w, told_w, own):
        os.set_inheritable(fd, True)
    release = -1 if parked is None else release_r
    os.write(own, launcher.image((in_r, out_w, err_w), own, told_w, machine, release))
    os.write(in_w, b"from stdin\n")
    os.close(in_w)
    words = [f"/proc/self/fd/{own}", *argv]
    process = subprocess.Popen(
        [emulator, *words] if emulator else words,
        env=env or {},
        pass_fds=(in_r, out_w, err_w, told_w, own, *([] if parked is None else [release_r])),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for fd in (in_r, out_w, err_w, told_w, own, release_r):
        os.close(fd)
    said = [_all(fd) for fd in (out_r, err_r, told_r)]
    return process.wait(60), said[:2], launcher.read_report(said[2])


def _all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def machines() -> list[Any]:
    """This machine, and the other one if it can be emulated."""
    other = ({"x86_64", "aarch64"} - {os.uname().machine}).pop()
    missing = shutil.which(f"qemu-{other}") is None
    return ["", pytest.param(other, marks=pytest.mark.skipif(missing, reason=f"no qemu-{other} here"))]


LOOK = """\
import json, os, sys
fds = [int(name) for name in os.listdir('/proc/self/fd')]
print(json.dumps([sys.stdin.read(), sys.argv[1:], dict(os.environb) and sorted(map(repr, os.environb)), fds]))
print('to stderr', file=sys.stderr)
"""


@pytest.mark.parametrize("machine", machines())
def test_a_program_gets_its_streams_words_and_variables(machine: str) -> None:
    env = {"A": "1", "not-a-name": "x", "PWD": "/nowhere", "EMPTY": ""}
    words = ("-x", "--", "", "a b")
    status, (out, err), verdict = start(
        "/usr/bin/python3", "-SEc", LOOK, *words, machine=machine, env={**env, "LC_CTYPE": "C.UTF-8"}
    )
    read, argv, names, fds = json.loads(out)
    assert (status, read, argv, err) == (0, "from stdin\n", list(words), b"to stderr\n")
    assert names == sorted(repr(os.fsencode(name)) for name in (*env, "LC_CTYPE"))
    # 3 is the listing's own; an emulator has some of its own besides.
    assert machine or sorted(fds) == [0, 1, 2, 3]
    assert verdict == launcher.ExecReport(True)


@pytest.mark.parametrize("machine", machines())
def test_files_that_cannot_be_executed(machine: str, tmp_path: Path) -> None:
    def file(name: str, content: str, mode: int = 0o755) -> str:
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
        return str(tmp_path / name)

    expected = {
        f"{tmp_path}/none": (errno.ENOENT, False),
        file("plain", "echo this is no script\n"): (errno.ENOEXEC, True),
        file("lost", "#!/nonexistent/interpreter\n"): (errno.ENOENT, True),
        file("mode", "#!/bin/sh\n", 0o644): (errno.EACCES, True),
        str(tmp_path): (errno.EACCES, True),
        f"{tmp_path}/mode/below": (errno.ENOTDIR, False),
    }
    for path, (number, found) in expected.items():
        status, said, verdict = start(path, machine=machine)
        assert (status, said, verdict) == (125, [b"", b""], launcher.ExecReport(False, number, found)), path


@pytest.mark.parametrize("machine", machines())
def test_a_parked_program_starts_by_a_byte_and_not_at_the_end_of_the_file(machine: str) -> None:
    look = ("/bin/sh", "-c", "ls /proc/self/fd | wc -w")
    status, (out, _), verdict = start(*look, machine=machine, parked=b"r")
    assert (status, verdict) == (0, launcher.ExecReport(True))
    assert machine or out == b"4\n"  # 0 to 2, and ls looking: the pipe of its release is closed
    status, said, verdict = start(*look, machine=machine, parked=b"")
    assert (status, said, verdict) == (125, [b"", b""], launcher.ExecReport(False))


@pytest.mark.launches
def test_bubblewrap_itself_starts_at_the_end_of_the_file() -> None:
    """Why a parked cell does not wait in bubblewrap."""
    read, write = os.pipe()
    os.close(write)
    argv = ["bwrap", "--unshare-user", "--ro-bind", "/", "/", "--block-fd", str(read), "echo", "started"]
    done = subprocess.run(argv, pass_fds=(read,), capture_output=True, timeout=60)
    os.close(read)
    assert done.stdout == b"started\n", done.stderr


def test_a_missing_stream(tmp_path: Path) -> None:
    """It gives up without a report."""
    own = os.memfd_create("launcher", 0)
    os.write(own, launcher.image((3000, 3001, 3002), own, 2))
    done = subprocess.run(
        [f"/proc/self/fd/{own}", "/bin/true"], pass_fds=(own,), capture_output=True, timeout=60
    )
    os.close(own)
    assert (done.returncode, done.stdout, done.stderr) == (125, b"", b"")


# --- in the cage -------------------------------------------------------------------------------------------

INSIDE = """\
import json, os, sys
def told(path):
    with open(path, 'rb') as file:
        return [os.fsdecode(word) for word in file.read().split(b'\\0')[:-1]]
print(json.dumps({
    'env': told('/proc/self/environ'), 'init_env': told('/proc/1/environ'),
    'argv': told('/proc/self/cmdline'), 'init': told('/proc/1/cmdline'),
    'fds': sorted(map(int, os.listdir('/proc/self/fd')))[:-1], 'parent': os.getppid(),
    'ignored': [line for line in open('/proc/self/status') if line.startswith('SigIgn')],
    'init_fds': {name: os.readlink('/proc/1/fd/' + name) for name in os.listdir('/proc/1/fd')},
    'name': open('/proc/self/comm').read(),
}))
"""


def test_the_plugin_sees_nothing_of_it(runner_as: Caller) -> None:
    """Its environment has exactly the given bytes, in order: no name of the launcher, no variable of a
    shell."""
    env = {"WEIRD-NAME": "kept", "_": "own", "SHLVL": "7", "BASH_ENV": "/nowhere", "Z": "a\nb"}
    asked = cages.request("/usr/bin/python3", "-I", "-c", INSIDE, "-n", "--", "")
    end = cages.run(runner_as, asked, env=env)
    assert end["code"] == 0, end
    seen = json.loads(end["output"])
    plain = {"HOME": "/tmp", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    given = dict(pair.split("=", 1) for pair in seen["env"])
    path, directory = given.pop("PATH"), given.pop("PWD", None)
    assert given == {**plain, **env} and path
    assert directory in (None, "/tmp")  # bubblewrap's own word for --chdir
    assert seen["argv"] == ["/usr/bin/python3", "-I", "-c", INSIDE, "-n", "--", ""]
    assert (seen["fds"], seen["parent"], seen["name"], seen["init_env"]) == ([0, 1, 2], 1, "python3\n", [])
    assert seen["init"][:2] == ["bwrap", "--args"] and seen["init"][5:] == seen["argv"]
    # Python ignores two of them itself: SIGPIPE and SIGXFSZ.
    assert int(seen["ignored"][0].split()[1], 16) == 1 << 12 | 1 << 24
    # bubblewrap's own processes hold none of the plugin's streams.
    assert [seen["init_fds"][fd] for fd in "01"] == ["/dev/null"] * 2
    assert seen["init_fds"]["2"].startswith("pipe:")


def without_nameless_programs(given: dict[str, Any]) -> list[Any]:
    """In a pid namespace where a nameless file may not be executed."""
    import os

    with open("/proc/sys/vm/memfd_noexec", "w") as file:
        file.write("2")
    try:
        os.memfd_create("x", 0x10)
        raise AssertionError("it can still be made")
    except PermissionError:
        pass
    end = caged(given)
    return [end["code"], end["output"]]


caged = cages.caged


@pytest.mark.needs("root")
def test_where_every_program_needs_a_name(runner_as_root: Caller) -> None:
    if not os.path.exists("/proc/sys/vm/memfd_noexec"):
        pytest.skip("this kernel has no vm.memfd_noexec")
    script = "ls -l /.launcher; echo x > /.launcher || rm -f /.launcher || ls /proc/self/fd | wc -l"
    given = cages.order(cages.request("/bin/sh", "-c", script))
    prefix = (
        *runner_as_root.prefix,
        "/usr/bin/unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--",
    )
    caller = dataclasses.replace(runner_as_root, prefix=prefix)
    code, output = elsewhere.run(caller, without_nameless_programs, given, using=(cages.cage, caged))
    assert code == 0 and output.startswith("-r-xr-xr-x "), output
    assert output.endswith("\n4\n")  # 0 to 2, and ls looking
