"""A plugin can neither read nor change the operator's terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
from typing import Any

import pytest

from tests.escape.cage import ProbeCage, parse_result

# Every known way to a terminal: the plugin's streams, the same reopened, and those of bubblewrap's init.
THEFT = """\
import errno, json, os, select, sys, termios

def attempt(act):
    try:
        return act()
    except (OSError, termios.error) as error:
        return errno.errorcode[error.args[0]]

def read(fd):
    return os.read(fd, 100).decode() if select.select([fd], [], [], wait)[0] else "nothing"

def anew(path):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        return read(fd)
    finally:
        os.close(fd)

def silence(fd):
    modes = termios.tcgetattr(fd)
    modes[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSANOW, modes)
    return "changed"

wait = 0
own = (0, 1, 2)
theirs = [f"/proc/1/fd/{fd}" for fd in own]
found = {
    "terminals": [fd for fd in own if os.isatty(fd)],
    "theirs": [path for path in theirs if attempt(lambda: os.readlink(path).startswith("/dev/pts"))],
    "tty": attempt(lambda: os.open("/dev/tty", os.O_RDWR)),
    "modes": [attempt(lambda: silence(fd)) for fd in own],
    "anew": [attempt(lambda: anew(path)) for path in (*(f"/proc/self/fd/{fd}" for fd in own), *theirs)],
}
os.write(out, b"ready\\n")
wait = 30
found["keys"] = attempt(lambda: read(2) if os.isatty(2) else os.read(2, 100).decode())
print(json.dumps({"done": found}), file=os.fdopen(out, "w"))
"""


def steal(cage: ProbeCage, *options: str, streams: str) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Run the attack while a password is typed. Returns what it got, and the modes before and after."""
    ours, theirs = pty.openpty()
    os.fchown(theirs, cage.caller.uid, -1)
    read, write = os.pipe()
    places = {"t": theirs, "n": subprocess.DEVNULL, "p": write}
    stdin, stdout, stderr = (places[place] for place in streams)
    out = streams.index("p")
    cage.manifest(command="/usr/bin/python3", args=["-I", "-c", f"out = {out}\n{THEFT}"])
    before = termios.tcgetattr(theirs)
    try:
        with cage.caller.start(
            "exec", *options, cage.folder, stdin=stdin, stdout=stdout, stderr=stderr
        ) as process:
            os.close(write)
            with open(read) as reader:
                assert reader.readline() == "ready\n"
                os.write(ours, b"the password\n")
                answer = parse_result(subprocess.CompletedProcess([], 0, reader.read(), ""))
            assert process.wait(60) == 0
        return answer.done, before, termios.tcgetattr(theirs)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("streams", ["npt", "tpt", "ttp"])
def test_a_plugin_cannot_read_keystrokes_or_change_modes(cage: ProbeCage, streams: str) -> None:
    """One or two of the three streams are a terminal."""
    found, before, after = steal(cage, streams=streams)
    assert found["terminals"] == found["theirs"] == []
    assert isinstance(found["tty"], str)  # an errno's name
    assert set(found["modes"]) == {"ENOTTY"} and before == after
    assert "password" not in str(found["anew"])
    assert found["keys"] == "EBADF"


def test_with_tty_the_plugin_has_the_terminal(cage: ProbeCage) -> None:
    """The control: with --tty the plugin reads what is typed through its stderr. bubblewrap's own processes
    still have no terminal."""
    found, before, after = steal(cage, "--tty", streams="npt")
    assert (found["terminals"], found["theirs"]) == ([2], [])
    assert found["modes"] == ["ENOTTY", "ENOTTY", "changed"] and before != after
    assert found["keys"] == "the password\n"
