"""What a launch of /usr/bin/true costs: by bubblewrap alone, by the runner, and with limits."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import policies
from sandbox.value import NamedTuple
from scripts.benches.caller import RUNNER, Caller, Unable, failed
from scripts.benches.figures import median, percentile

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

RAW, NONE, USUAL, ALL, RELAYED, BARE = (
    "raw bwrap",
    "no limits",
    "default policy",
    "full limits",
    "full, and of stderr",
    "python -c 0",
)


class Command(NamedTuple):
    argv: list[str]
    files: dict[int, str]  # descriptor number -> the file to open as it

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


class Sample(NamedTuple):
    """Milliseconds."""

    wall: float
    cpu: float  # of all its processes


def bench(caller: Caller, rounds: int) -> None:
    commands = _commands(caller)
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    names = list(commands)
    for turn in range(WARM_UP + rounds):
        # Each is first as often as last, because the kernel may still be cleaning up after the one before.
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            sample = measure(caller, commands[name])
            if turn >= WARM_UP:
                samples[name].append(sample)
    print(f"\nlaunch, as {caller.name}: {rounds} of /usr/bin/true each, interleaved, in milliseconds")
    pairs = ((NONE, RAW), (USUAL, RAW), (USUAL, NONE), (ALL, NONE), (RELAYED, ALL))
    print_samples(samples, pairs)


def print_samples(samples: Mapping[str, list[Sample]], pairs: Sequence[tuple[str, str]]) -> None:
    """`pairs`: what is compared with what."""
    print(f"  {'':20} {'p50':>7} {'p90':>7} {'min':>7}   {'processor time, p50':>20}")
    for name, taken in samples.items():
        wall = [sample.wall for sample in taken]
        cpu = median([sample.cpu for sample in taken])
        figures = f"{median(wall):7.1f} {percentile(wall, 90):7.1f} {min(wall):7.1f}"
        print(f"  {name:20} {figures}   {cpu:20.1f}")
    for one, other in pairs:
        print(f"  {one} over {other}: {_compared(samples[one], samples[other])}")


def _compared(ones: list[Sample], others: list[Sample]) -> str:
    """The difference turn by turn, because both saw the same machine."""
    added = [one.wall - other.wall for one, other in zip(ones, others, strict=True)]
    burnt = [one.cpu - other.cpu for one, other in zip(ones, others, strict=True)]
    ratio = median([one.wall for one in ones]) / median([other.wall for other in others])
    return (
        f"p50 {median(added):+.1f} p90 {percentile(added, 90):+.1f}, "
        f"processor time {median(burnt):+.1f}, ratio {ratio:.2f}"
    )


def _commands(caller: Caller) -> Mapping[str, Command]:
    manifest = caller.write("plugin/nexo-plugin.toml", MANIFEST)
    # Not in the default state directory, where nothing should be left.
    state = Path(caller.folder, "state")
    state.mkdir()
    if os.geteuid() == 0:
        os.chown(state, caller.uid, caller.uid)
    state.chmod(0o755)
    found = {
        NONE: _policy({}),
        USUAL: (Path(policies.__file__).parent / "default.toml").read_text(),
        ALL: _policy(FULL),
        RELAYED: _policy({**FULL, **STDERR}),
    }
    commands: dict[str, Command] = {}
    for name, text in found.items():
        file = caller.write(f"policies/{len(commands)}.toml", text)
        argv = [RUNNER, "exec", "--policy", file, "--state-dir", str(state / "bench"), manifest]
        caller.output_of(argv)  # makes the state directory, which bwrap alone would not; fills the caches
        commands[name] = Command(argv, {})
    argv = list(commands[NONE].argv)
    argv[1:2] = ["explain", "--format", "argv"]
    commands[RAW] = without_shell(caller.output_of(argv), caller)
    commands[BARE] = Command([sys.executable, "-I", "-c", "0"], {})
    return commands


def _policy(limits: Mapping[str, str]) -> str:
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
    with command.opened():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        with caller.start(
            command.argv,
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
