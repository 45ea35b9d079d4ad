"""Tables of cases that one process, or one launch, works through: near-identical cases cost one start.

`check_rows` looks at every row and names all that are wrong. `run_lines` runs many command lines of the
runner from one process that has imported it once and forks for each.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest

from tests import elsewhere
from tests.conftest import Caller

# Races are run this many times as often: RUNNER_TEST_REPEAT=10 before a release.
REPEAT = int(os.environ.get("RUNNER_TEST_REPEAT", "1"))

Key = TypeVar("Key")
Value = TypeVar("Value")


def check_rows(rows: Mapping[Key, Value] | Iterable[tuple[Key, Value]], check: Callable[..., None]) -> None:
    """`check(key, value)` for every row. Fails once, and names every row that is wrong."""
    pairs = list(rows.items() if isinstance(rows, Mapping) else rows)
    assert pairs, "a table without rows shows nothing"
    wrong: dict[Key, str] = {}
    for key, value in pairs:
        try:
            check(key, value)
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            wrong[key] = f"{type(error).__name__}: {error}"
    if wrong:
        told = "\n\n".join(f"{key!r}:\n{error}" for key, error in wrong.items())
        pytest.fail(f"{len(wrong)} of {len(pairs)} rows are wrong.\n\n{told}", pytrace=False)


class Line(NamedTuple):
    """A command line of the runner."""

    words: Sequence[str | os.PathLike[str]]
    env: Mapping[str, str] = {}
    input: str | None = None
    cwd: str = "/"


Done = subprocess.CompletedProcess[str]


def run_lines(
    caller: Caller, lines: Sequence[Line], *, at_once: int = 2, timeout: float = 60.0
) -> list[Done]:
    """What came of each line, as `caller`, in the order of the lines.

    Each is a process with its own streams, environment and working directory, but not a fresh interpreter.
    For questions about its start, its pid or its signals, call the caller itself. `timeout` is for each.
    """
    told = [
        [[os.fspath(word) for word in line.words], dict(line.env), line.input, line.cwd] for line in lines
    ]
    found = elsewhere.run(
        caller, run_each, told, at_once, timeout, using=(run_one,), timeout=30 + timeout * len(lines)
    )
    return [Done(line.words, *each) for line, each in zip(lines, found, strict=True)]


def run_one(words: list[str], env: dict[str, str], streams: list[int], cwd: str) -> None:
    """In a fork, as `python -m runner` would. It does not return."""
    import os
    import sys

    from runner.cli import entry

    try:
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        os.closerange(3, 1024)
        os.environ.update(env)
        os.chdir(cwd)
        sys.argv = ["runner", *words]
        entry()
    finally:
        os._exit(99)


def run_each(lines: list[list[Any]], at_once: int, seconds: float) -> list[list[Any]]:
    """Status, stdout and stderr of each."""
    import os
    import select
    import signal
    import tempfile
    from importlib import import_module

    # What takes long to import. Not more: a verb must still find by itself what it needs.
    for name in ("argparse", "pydantic", "jsonschema_rs", "trio", "runner.manifest", "runner.opening"):
        import_module(name)
    found: dict[int, list[Any]] = {}
    running: dict[int, tuple[int, int, list[Any]]] = {}  # pidfd -> number, pid, streams

    def take_one() -> None:
        ended = select.select(list(running), [], [], seconds)[0]
        if not ended:
            left = [lines[number][0] for number, _, _ in running.values()]
            for _, pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"not over within {seconds:g} seconds: {left}")
        for pidfd in ended:
            number, pid, files = running.pop(pidfd)
            os.close(pidfd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said = []
            for file in files[1:]:
                file.seek(0)
                said.append(file.read().decode("utf-8", "surrogateescape"))
            for file in files:
                file.close()
            found[number] = [status, *said]

    for number, (words, env, given, cwd) in enumerate(lines):
        while len(running) >= at_once:
            take_one()
        files = [open(os.devnull, "w+b"), tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        if given is not None:
            files[0].close()
            files[0] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed when it has ended, as the others
            files[0].write(given.encode())
            files[0].seek(0)
        pid = os.fork()
        if pid == 0:
            run_one(words, env, [file.fileno() for file in files], cwd)
        running[os.pidfd_open(pid)] = number, pid, files
    while running:
        take_one()
    return [found[number] for number in range(len(lines))]


def wait_for(condition: Callable[[], object], seconds: float = 30.0, step: float = 0.01) -> bool:
    """Whether it came true. For what the kernel sends no event for.

    The bound is for a machine that hangs, not for one that is slow.
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(step)
    return True
