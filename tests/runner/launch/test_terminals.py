"""`runner exec` on a terminal: what is typed and printed passes through pipes, as if nobody stood between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.manifests import nexo
from tests.tables import one_case, wait_for

pytestmark = pytest.mark.usefixtures("nothing_left")

MANIFEST = nexo("typing", "./plugin")


class _Plugin:
    """Writes a plugin, and says how the runner starts it."""

    def __init__(self, caller: Caller, folder: Path, write: Callable[..., Path]) -> None:
        self.caller, self.folder, self.write = caller, folder, write
        self.report = caller.home / "report.json"

    def run(self, act: Callable[..., Any], script: str, *options: str) -> Any:
        self.write(self.folder / "plugin", f"#!/bin/sh\n{script}\n", 0o755)
        manifest = self.write(self.folder / "nexo-plugin.toml", MANIFEST)
        words = ["exec", "--report", str(self.report), *options, str(manifest)]
        argv = [*self.caller.python, "-m", "runner", *words]
        return elsewhere.run(self.caller, act, argv, using=(Terminal,), timeout=120)

    def ways(self) -> dict[str, str]:
        import json

        found: dict[str, str] = json.loads(self.report.read_text())["streams"]
        return found


@pytest.fixture
def plugin(runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]) -> _Plugin:
    return _Plugin(runner_as, plugin_dir, write_file)


class Terminal:
    """A terminal with a session on it, of which this process is the leader; and a person in front of it."""

    def __init__(self) -> None:
        import fcntl
        import os
        import termios

        if os.fork():  # whoever started us may be leader of a group; the leader of a session must not be
            _, status = os.wait()
            os._exit(os.waitstatus_to_exitcode(status))
        os.setsid()
        self.ours, self.theirs = os.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSCTTY, 0)
        self.seen = b""

    def start(self, argv: list[str], *, foreground: bool = True) -> Any:
        """A job as a shell starts it."""
        import os
        import signal
        import subprocess

        process = subprocess.Popen(
            argv, stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, process_group=0
        )
        if foreground:
            self.bring_forward(process.pid)
        else:
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            os.tcsetpgrp(self.theirs, os.getpgrp())
        return process

    def bring_forward(self, group: int) -> None:
        import os
        import signal

        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(self.theirs, group)

    def type(self, text: str) -> None:
        import os

        os.write(self.ours, text.encode())

    def expect(self, text: str, seconds: float = 60) -> str:
        """What is shown until `text` has been."""
        import os
        import select

        while text.encode() not in self.seen:
            assert select.select([self.ours], [], [], seconds)[0], (text, self.seen)
            self.seen += os.read(self.ours, 4096)
        before, _, self.seen = self.seen.partition(text.encode())
        return before.decode()

    def wait_until_over(self, runner: int) -> None:
        """Until nothing of the plugin is left, and only the runner's own last words can be."""

        def children() -> str:
            with open(f"/proc/{runner}/task/{runner}/children") as file:
                return file.read()

        assert wait_for(lambda: not children())

    def is_quiet(self, pid: int) -> bool:
        """Whether a process comes to use no processor. Until it does it may have something left to do."""
        import time

        def ticks() -> int:
            with open(f"/proc/{pid}/stat") as file:
                return sum(int(word) for word in file.read().rpartition(")")[2].split()[11:13])

        for _ in range(60):
            before = ticks()
            time.sleep(0.5)  # not a wait for something: the time in which nothing must happen
            if ticks() == before:
                return True
        return False

    def left(self) -> str:
        """What was typed and nobody has read."""
        import os

        os.set_blocking(self.theirs, False)
        lines = b""
        try:
            while True:
                lines += os.read(self.theirs, 4096)
        except BlockingIOError:
            return lines.decode()


def conversed(argv: list[str]) -> list[Any]:
    terminal = Terminal()
    process = terminal.start(argv)
    terminal.expect("ready\r\n")
    terminal.type("one\n")
    terminal.expect("one\r\n")  # the terminal's echo
    between = terminal.expect("heard one\r\n")
    terminal.type("two\n")
    terminal.expect("heard two\r\n")
    terminal.type("\x04")
    order = terminal.expect("over\r\n")
    return [between, order, process.wait(60)]


def test_a_conversation(plugin: _Plugin) -> None:
    """Each line as it is typed and printed, both outputs in the order of writing, and ^D ends it."""
    script = "echo ready; while read word; do echo heard $word; done"
    script += "; for i in 1 2 3 4 5 6 7 8 9; do echo out $i; echo err $i >&2; done; echo over; exit 3"
    between, order, status = plugin.run(conversed, script)
    assert (between, status) == ("", 3)
    assert order == "".join(f"out {i}\r\nerr {i}\r\n" for i in range(1, 10))
    assert plugin.ways() == dict.fromkeys(("stdin", "stdout", "stderr"), "relayed")


def stopped(argv: list[str]) -> list[Any]:
    import time

    terminal = Terminal()
    process = terminal.start(argv)
    terminal.expect("ready\r\n")
    terminal.type("\x13\n")  # ^S, and the word it waits for
    time.sleep(4)  # more than anybody else is waited for
    running = process.poll() is None
    terminal.type("\x11")
    terminal.expect("the result\r\n")
    return [running, process.wait(60)]


def test_a_terminal_that_is_stopped_is_waited_for(plugin: _Plugin) -> None:
    assert plugin.run(stopped, "echo ready; read word; echo the result") == [True, 0]


def impatient(argv: list[str]) -> list[Any]:
    import signal

    terminal = Terminal()
    process = terminal.start(argv)
    terminal.expect("ready\r\n")
    terminal.type("\x13\n")
    terminal.wait_until_over(process.pid)
    process.send_signal(signal.SIGTERM)
    return [process.wait(60)]


def test_but_not_against_somebodys_will(plugin: _Plugin) -> None:
    """The plugin has ended by then, and its status is told."""
    assert plugin.run(impatient, "echo ready; read word; echo the result; exit 3") == [3]


def abandoned(argv: list[str]) -> list[Any]:
    import signal

    terminal = Terminal()
    # A process between us and the runner, which is killed.
    process = terminal.start(["/bin/sh", "-c", '"$@" & echo "runner $!"; wait', "sh", *argv])
    runner = int(terminal.expect("ready\r\n").split()[1])
    terminal.type("\x13\n")
    terminal.wait_until_over(runner)

    def lives() -> bool:
        try:
            with open(f"/proc/{runner}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"  # whoever has to wait for it by now
        except FileNotFoundError:
            return False

    before = lives()
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    return [before, not wait_for(lambda: not lives())]


def test_nor_for_a_caller_that_is_gone(plugin: _Plugin) -> None:
    assert plugin.run(abandoned, "echo ready; read word; echo the result") == [True, False]


def typed_ahead(argv: list[str]) -> list[Any]:
    import os

    terminal = Terminal()
    process = terminal.start(argv)
    terminal.expect("ready\r\n")
    terminal.type("one\ntwo\nthree\n")
    terminal.expect("heard one\r\n")
    process.wait(60)
    terminal.bring_forward(os.getpgrp())
    return [process.returncode, terminal.left()]


def test_what_is_typed_for_the_next_program_stays_there(plugin: _Plugin) -> None:
    """The runner is at most one line ahead of a plugin that reads one."""
    status, left = plugin.run(typed_ahead, "echo ready; read word; echo heard $word")
    assert status == 0 and left.endswith("three\n")


def interrupted(argv: list[str]) -> list[Any]:
    terminal = Terminal()
    process = terminal.start(argv)
    terminal.expect("ready\r\n")

    quiet = terminal.is_quiet(process.pid)
    terminal.type("\x03")
    shown = terminal.expect("caught\r\n")
    return [quiet, shown.count("caught"), process.wait(60)]


def test_waiting_costs_nothing_and_an_interrupt_is_the_runners(plugin: _Plugin) -> None:
    quiet, more, status = plugin.run(
        interrupted, "trap 'echo caught; exit 4' INT; echo ready; while :; do sleep 1000 & wait; done"
    )
    assert quiet
    assert (more, status) == (0, 4)  # once: the runner passed it on


def in_background(argv: list[str]) -> list[Any]:
    import subprocess

    terminal = Terminal()
    subprocess.run(["stty", "tostop"], stdin=terminal.theirs, check=True)
    process = terminal.start(argv, foreground=False)

    def state() -> str:
        with open(f"/proc/{process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    terminal.expect("ready\r\n")  # although `tostop` is set
    terminal.type("word\n")
    # Twice: in that time it has looked whether it is in the foreground.
    quiet = terminal.is_quiet(process.pid) and terminal.is_quiet(process.pid)
    sleeps = wait_for(lambda: state() == "S", 10)  # not stopped; it may happen to run when we look
    terminal.bring_forward(process.pid)
    terminal.expect("heard word\r\n")
    return [quiet, sleeps, process.wait(60)]


def test_a_job_in_the_background(plugin: _Plugin) -> None:
    """It is not stopped when somebody types, nor does it burn a core; in the foreground it reads on."""
    assert plugin.run(in_background, "echo ready; read word; echo heard $word") == [True, True, 0]


def looked_at(argv: list[str]) -> list[Any]:
    import os
    import subprocess

    terminal = Terminal()
    read, write = os.pipe()
    with open(os.devnull) as null:
        process = subprocess.Popen(argv, stdin=null, stdout=write, stderr=terminal.theirs)
    os.close(write)
    with open(read) as said:
        found = said.read()
    return [found, process.wait(60)]


LOOK = "for fd in 0 1 2; do if [ -t $fd ]; then echo $fd is a terminal; fi; done"


@one_case("option", ["", "--tty", "output"])
def test_which_streams_are_relayed(plugin: _Plugin, option: str) -> None:
    options = {"": (), "--tty": ("--tty",), "output": ("--limit", "output=1K", "--tty")}[option]
    found, status = plugin.run(looked_at, LOOK, *options)
    assert (found, status) == ("2 is a terminal\n" if option == "--tty" else "", 0)
    assert plugin.ways() == {
        "stdin": "direct",
        "stdout": "direct",
        "stderr": "direct" if option == "--tty" else "relayed",
    }


SPOIL = """\
exec /usr/bin/python3 -I -c '
import fcntl, os
for fd in (0, 1, 2):
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_ASYNC
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK | os.O_APPEND)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    except PermissionError:
        os.write(1, b"refused ")
print("spoilt", flush=True)
'"""


def flags_after(argv: list[str]) -> list[Any]:
    """For a terminal as it is, and for one of which the caller wants signals: whether O_ASYNC was refused to
    the plugin, how the runner ended, and the flags of the terminal with their owner before and after."""
    import fcntl
    import os
    import signal

    def flags() -> list[Any]:
        fd = terminal.theirs
        return [fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, 16, bytes(8)).hex()]  # F_GETOWN_EX

    terminal, told = Terminal(), []
    for wanted in (0, os.O_ASYNC):
        if wanted:
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            fcntl.fcntl(terminal.theirs, fcntl.F_SETFL, flags()[0] | wanted)
        before = flags()
        process = terminal.start(argv)
        refused = terminal.expect("spoilt\r\n").count("refused")
        told.append([refused, process.wait(60), before, flags()])
    return told


@pytest.mark.both_callers
def test_flags_that_a_plugin_sets_on_the_terminal_are_undone(plugin: _Plugin) -> None:
    """With O_ASYNC the terminal's foreground group gets signals, and F_GETOWN is negative for a group. The
    plugin may not set it: SIGIO would end the runner of an ordinary user, and nobody would undo it."""
    for refused, code, before, after in plugin.run(flags_after, SPOIL, "--tty"):
        assert (refused, code, after) == (3, 0, before)
