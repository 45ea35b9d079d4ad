"""The operator's terminal, which a plugin is not given: neither to read nor to change."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
from typing import Any

import pytest

from tests.escape.cage import RemoteCell, told

# Every way to a terminal that is known: its streams, the same opened anew, and those of bubblewrap's init.
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


def steal(cage: RemoteCell, *options: str, streams: str) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """The attack while somebody types; what it got, and the terminal's modes before and after."""
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
            with open(read) as said:
                assert said.readline() == "ready\n"
                os.write(ours, b"the password\n")
                answer = told(subprocess.CompletedProcess([], 0, said.read(), ""))
            assert process.wait(60) == 0
        return answer.done, before, termios.tcgetattr(theirs)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("streams", ["npt", "tpt", "ttp"])
def test_keystrokes_and_modes_are_the_operators(cage: RemoteCell, streams: str) -> None:
    """Whichever of the three is a terminal."""
    found, before, after = steal(cage, streams=streams)
    assert found["terminals"] == found["theirs"] == []
    assert isinstance(found["tty"], str)  # an errno's name
    assert set(found["modes"]) == {"ENOTTY"} and before == after
    assert "password" not in str(found["anew"])
    assert found["keys"] == "EBADF"


def test_with_the_option_they_are_the_plugins(cage: RemoteCell) -> None:
    """The control: stdin is no terminal, and all that is typed goes to the plugin by way of its stderr. That
    is all it has: bubblewrap's own processes have no terminal then either."""
    found, before, after = steal(cage, "--tty", streams="npt")
    assert (found["terminals"], found["theirs"]) == ([2], [])
    assert found["modes"] == ["ENOTTY", "ENOTTY", "changed"] and before != after
    assert found["keys"] == "the password\n"
