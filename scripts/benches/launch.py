"""What a launch of /usr/bin/true costs: by bubblewrap alone, by the runner, and with limits."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import policies
from sandbox.look import SETTLED_SECONDS
from sandbox.speed.value import NamedTuple
from scripts.benches.caller import RUNNER, Caller, Unable, failed
from scripts.benches.rows import Against, Row, Table

WARM_UP = 3

MANIFEST = """\
[plugin]
id = "bench"
version = "1.0.0"
name = "Bench"
description = "Does nothing, as fast as it can."
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "/usr/bin/true"
[plugin.sandbox]
enabled = true
fs_write_paths = ["${state_dir}"]
"""

# Every limit that `runner exec` enforces, except those for stderr.
FULL = {
    "memory": '"256M"',
    "pids": "64",
    "cpu": "1.5",
    "cpu_time": '"30s"',
    "io": '"512M"',
    "open_files": "256",
    "file_size": '"16M"',
    "locked_memory": '"64K"',
    "message_queues": '"64K"',
    "disk": '"64M"',
    "tmp": '"64M"',
    "shm": '"16M"',
    "launch": '"30s"',
    "teardown": '"2s"',
    "deadline": '"60s"',
}
STDERR = {"output": '"1M"', "output_lines": "10000"}

RAW, PYTHON = "raw bwrap", "python -I -S"
NONE, USUAL, ALL, RELAYED = (
    "runner exec, no limits",
    "runner exec, default policy",
    "runner exec, full limits",
    "runner exec, full, and of stderr",
)
# Also with the default policy: without a valid stored plan, and through the script that pip makes.
ANEW, CONSOLE = "runner exec, decided anew", "runner-console exec"
# A command without a manifest, and one that may write to a folder of an ordinary user's.
RUN, WRITES = "runner run", "runner run --write"
FOLDERS_OWNER = 1000  # if root starts it: what root owns is nobody's to write to
_LAUNCH_NUMBER = "TZ"  # plugins get this variable, so a new value of it invalidates a stored plan

# What `runner exec` has to start at the least: bubblewrap, and an interpreter that imports nothing.
OVER_RAW = Against("raw bwrap", (RAW,))
OVER_EXEC = Against("runner exec", (USUAL,))
OVER_SUM = Against("raw bwrap + python -I -S", (RAW, PYTHON))


class Command(NamedTuple):
    argv: list[str]
    files: dict[int, str]  # descriptor number -> the file to open as it
    is_new: bool = False  # each launch gets a new environment, so that no stored plan holds
    launch: Callable[[], Sample] | None = None  # by a program that is running, not a new one

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the files. Done for each launch, because bwrap reads them to the end."""
        for number, path in self.files.items():
            if os.path.lexists(f"/proc/self/fd/{number}"):
                raise Unable(f"descriptor {number}, which {self.argv[0]} needs, is in use here")
            fd = os.open(path, os.O_RDONLY)
            os.dup2(fd, number)
            os.close(fd)
        try:
            yield
        finally:
            for number in self.files:
                os.close(number)


_FIRST_HIGH = 64  # descriptor


@contextmanager
def high_descriptors() -> Iterator[None]:
    """What is opened meanwhile and stays gets a high number: the low ones are for the files of commands."""
    held = []
    while (fd := os.open(os.devnull, os.O_RDONLY)) < _FIRST_HIGH:
        held.append(fd)
    try:
        yield
    finally:
        for number in (*held, fd):
            os.close(number)


class Sample(NamedTuple):
    """Milliseconds."""

    wall: float
    cpu: float  # of all its processes


def bench(caller: Caller, rounds: int) -> list[Table]:
    taken = interleave(caller, _commands(caller), rounds)
    about = f"{rounds} launches of /usr/bin/true each, interleaved"
    over = dict.fromkeys((NONE, USUAL, ALL, RELAYED, ANEW, CONSOLE), (OVER_RAW, OVER_SUM))
    over |= dict.fromkeys((RUN, WRITES), (OVER_RAW, OVER_EXEC))
    headlines = {USUAL: "`runner exec` of `/usr/bin/true`"}
    headlines |= {RUN: "`runner run` of it", WRITES: "`runner run --write` of it"}
    return tables("launch", "launch", caller, about, taken, over, headlines)


def interleave(caller: Caller, commands: Mapping[str, Command], rounds: int) -> dict[str, list[Sample]]:
    """Launch each by turns. Each is first as often as last, because the kernel may still be cleaning up after
    the one before."""
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    names = list(commands)
    warm_up = min(WARM_UP, max(1, rounds // 2))
    for turn in range(warm_up + rounds):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            sample = measure(caller, commands[name])
            if turn >= warm_up:
                samples[name].append(sample)
    return samples


def tables(
    part: str,
    title: str,
    caller: Caller,
    about: str,
    taken: Mapping[str, list[Sample]],
    over: Mapping[str, tuple[Against, ...]],
    headlines: Mapping[str, str] = MappingProxyType({}),
    notes: tuple[str, ...] = (),
) -> list[Table]:
    """Two tables: elapsed time and processor time."""
    wall = [
        Row(name, "ms", [each.wall for each in samples], over.get(name, ()), headlines.get(name, ""))
        for name, samples in taken.items()
    ]
    # Not compared: bubblewrap does not wait for its own child, so the kernel does not count the child's time.
    cpu = [Row(name, "ms", [each.cpu for each in samples]) for name, samples in taken.items()]
    return [
        Table(part, title, caller.name, about, wall, notes),
        Table(
            part,
            f"{title}: processor time",
            caller.name,
            f"{about}; of all processes that their parents waited for",
            cpu,
        ),
    ]


def _commands(caller: Caller) -> Mapping[str, Command]:
    manifest = caller.write("plugin/nexo-plugin.toml", MANIFEST)
    # Not in the default state directory, where nothing should be left.
    state = Path(caller.own("state"))
    found = {
        NONE: policy({}),
        USUAL: (Path(policies.__file__).parent / "default.toml").read_text(),
        ALL: policy(FULL),
        RELAYED: policy({**FULL, **STDERR}),
    }
    commands = {RAW: Command([], {}), PYTHON: Command([sys.executable, "-I", "-S", "-c", "pass"], {})}

    def words(name: str) -> list[str]:
        file = caller.write(f"policies/{len(commands)}.toml", found[name])
        return ["exec", "--policy", file, "--state-dir", str(state / "bench"), manifest]

    for name in found:
        argv = [RUNNER, *words(name)]
        caller.output_of(argv)  # makes the state directory, which bwrap alone would not; fills the caches
        commands[name] = Command(argv, {})
    commands[RAW] = raw(caller, commands[USUAL].argv)
    commands[CONSOLE] = Command([f"{RUNNER}-console", *words(USUAL)], {})
    # Its policy has another name, so it does not replace the stored plan of the others.
    commands[ANEW] = Command([RUNNER, *words(USUAL)], {}, True)
    folder = writable_folder(caller, "work")
    usual = commands[USUAL].argv[commands[USUAL].argv.index("--policy") + 1]
    commands[RUN] = Command([RUNNER, "run", "--policy", usual, "--", "/usr/bin/true"], {})
    commands[WRITES] = Command([*commands[RUN].argv[:4], "--write", folder, "--", "/usr/bin/true"], {})
    time.sleep(SETTLED_SECONDS + 0.2)  # a plan that rests on files that changed just now is not stored
    return commands


def writable_folder(caller: Caller, name: str) -> str:
    """Make a folder that `--write` may name. Returns its path."""
    folder = caller.own(name)
    if caller.uid == 0:
        os.chown(folder, FOLDERS_OWNER, FOLDERS_OWNER)
    return folder


def raw(caller: Caller, argv: Sequence[str]) -> Command:
    """bubblewrap alone, with the arguments and the filter of this `runner exec`."""
    words = list(argv)
    words[1:2] = ["explain", "--format", "argv"]
    return without_shell(caller.output_of(words), caller)


def policy(limits: Mapping[str, str]) -> str:
    """The default policy with these limits instead of its own."""
    text = (Path(policies.__file__).parent / "default.toml").read_text()
    sections = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    kept = [section for section in sections if not section.startswith("[limits.")]
    # Preferred, so that an ordinary user without cgroups can be measured too.
    kept += [
        f'[limits.{name}]\ndefault = {value}\nceiling = {value}\nmode = "prefer"\n'
        for name, value in limits.items()
    ]
    return "".join(kept)


def without_shell(line: str, caller: Caller) -> Command:
    """The command that `explain` prints for bash, without bash, whose own start is not bwrap's cost.

    Redirections become numbered files; `<(printf %s TEXT)` becomes a file that holds TEXT.
    """
    argv: list[str] = []
    files: dict[int, str] = {}
    number: int | None = None  # of a redirection whose file is the next word
    words = iter(shlex.split(line))
    for word in words:
        if word == "<(printf":
            next(words)
            word = caller.write(f"texts/{len(argv)}-{len(files)}", next(words).removesuffix(")"))
        elif redirection := re.fullmatch(r"(\d+)<(.*)", word):
            number, word = int(redirection[1]), redirection[2]
            if not word:
                continue
        if number is None:
            argv.append(word)
        else:
            files[number], number = word, None
    return Command(argv, files)


def measure(caller: Caller, command: Command) -> Sample:
    if command.launch is not None:
        return command.launch()
    with command.opened():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        changed = {_LAUNCH_NUMBER: f"UTC{time.time_ns()}"} if command.is_new else {}
        start = time.perf_counter()
        with caller.start(
            command.argv,
            changed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=tuple(command.files),
        ) as process:
            _, errors = process.communicate()
        taken = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode or errors:  # a failed launch is quick, and must not be measured
        raise failed(command.argv, process.returncode, errors)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(taken * 1000, used * 1000)
