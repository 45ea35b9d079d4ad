"""Tables of similar cases: one test checks all rows and names every row that is wrong."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import pytest

from tests.conftest import Caller

# A factor for the number of repetitions in race tests: RUNNER_TEST_REPEAT=10 before a release.
REPEAT = int(os.environ.get("RUNNER_TEST_REPEAT", "1"))

Key = TypeVar("Key")
Value = TypeVar("Value")


def check_rows(rows: Mapping[Key, Value] | Iterable[tuple[Key, Value]], check: Callable[..., None]) -> None:
    """Call `check(key, value)` for every row. Fails once, and names every row that is wrong."""
    pairs = list(rows.items() if isinstance(rows, Mapping) else rows)
    assert pairs, "a table without rows proves nothing"
    wrong: dict[Key, str] = {}
    for key, value in pairs:
        try:
            check(key, value)
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            wrong[key] = f"{type(error).__name__}: {error}"
    if wrong:
        rows_text = "\n\n".join(f"{key!r}:\n{error}" for key, error in wrong.items())
        pytest.fail(f"{len(wrong)} of {len(pairs)} rows are wrong.\n\n{rows_text}", pytrace=False)


def without_limits_note(err: str) -> str:
    """What was written to stderr, without the line about limits that were asked for and are enforced by
    something weaker: an ordinary user to whom nothing was delegated reads it at each launch."""
    return re.sub(r"^runner: limits that are not enforced in full: .*\n", "", err, flags=re.MULTILINE)


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
    """Run the lines, `at_once` of them in parallel. Returns the results in order. `timeout` is for each."""

    def run(line: Line) -> Done:
        return caller(*line.words, env=line.env, input=line.input, cwd=line.cwd, timeout=timeout)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, lines))


def wait_for(condition: Callable[[], object], seconds: float = 30.0, step: float = 0.01) -> bool:
    """Poll until `condition` is true. Returns False after `seconds`. For changes without a kernel event.

    The default is long enough for a slow machine. Functions run by tests/elsewhere.py can call it too.
    """
    import time

    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(step)
    return True
