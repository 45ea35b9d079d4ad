"""Tables of similar cases: one test checks all rows and names every row that is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from tests.conftest import Caller

# A factor for the number of repetitions in race tests: RUNNER_TEST_REPEAT=10 before a release.
REPEAT = int(os.environ.get("RUNNER_TEST_REPEAT", "1"))

# Fixtures that are folders: each row of one_case has its own.
_ROWS_OWN = ("plugin_dir", "tmp_path", "place")

Key = TypeVar("Key")
Value = TypeVar("Value")


def check_rows(rows: Mapping[Key, Value] | Iterable[tuple[Key, Value]], check: Callable[..., None]) -> None:
    """Call `check(key, value)` for every row. Fails once, and names every row that is wrong. Skips if every
    row does."""
    with _Verdict() as verdict:
        for key, value in rows.items() if isinstance(rows, Mapping) else rows:
            with verdict.row(key):
                check(key, value)


class _Verdict:
    """Of several rows: fails at the end if one failed."""

    def __init__(self) -> None:
        self._count = 0
        self._wrong: dict[Any, str] = {}
        self._skipped: list[str] = []

    @contextlib.contextmanager
    def row(self, key: Any) -> Iterator[None]:
        self._count += 1
        try:
            yield
        except pytest.skip.Exception as skip:
            self._skipped.append(str(skip))
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 -- the rows after it count too
            self._wrong[key] = f"{type(error).__name__}: {error}"

    def __enter__(self) -> _Verdict:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        assert self._count, "a table without rows proves nothing"
        if self._wrong:
            text = "\n\n".join(f"{key!r}:\n{error}" for key, error in self._wrong.items())
            pytest.fail(f"{len(self._wrong)} of {self._count} rows are wrong.\n\n{text}", pytrace=False)
        if len(self._skipped) == self._count:
            pytest.skip("; ".join(dict.fromkeys(self._skipped)))


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


def wait_for(condition: Callable[[], object], seconds: float = 120.0, step: float = 0.01) -> bool:
    """Poll until `condition` is true. Returns False after `seconds`. For changes without a kernel event.

    The default only guards against hanging. Functions run by tests/elsewhere.py can call it too.
    """
    import time

    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(step)
    return True


def one_case(
    names: str | Sequence[str], rows: Iterable[Any], ids: Iterable[str] | Callable[[Any], str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Like `pytest.mark.parametrize`, but all rows are one test, which names every row that is wrong.

    For rows that share their fixtures: the caller with its home and caches, and the leak check at the end.
    Each row has a `plugin_dir`, a `tmp_path` and a `place` of its own. Its patches by `monkeypatch` end with
    it.
    """
    words = [word.strip() for word in names.split(",")] if isinstance(names, str) else list(names)
    given_rows = list(rows)
    values = [_values(row, len(words)) for row in given_rows]
    if ids is None or callable(ids):
        names_of_rows = [getattr(row, "id", None) or ids for row in given_rows]
    else:
        names_of_rows = list(ids)
    keys = [_Row(number, *row) for number, row in enumerate(zip(values, names_of_rows, strict=True))]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(test)

        @contextlib.contextmanager
        def arguments(given: Mapping[str, Any], key: _Row) -> Iterator[dict[str, Any]]:
            own = {
                name: _folder(value, key.number) if name in _ROWS_OWN else value
                for name, value in given.items()
            }
            patch = given.get("monkeypatch")
            with patch.context() if patch else contextlib.nullcontext() as patched:
                if patch:
                    own["monkeypatch"] = patched
                yield {**own, **dict(zip(words, key.values, strict=True))}

        def case(**given: Any) -> None:
            with _Verdict() as verdict:
                for key in keys:
                    with verdict.row(key), arguments(given, key) as all_given:
                        test(**all_given)

        async def async_case(**given: Any) -> None:
            with _Verdict() as verdict:
                for key in keys:
                    with verdict.row(key), arguments(given, key) as all_given:
                        await test(**all_given)

        made: Any = functools.wraps(test)(async_case if inspect.iscoroutinefunction(test) else case)
        left = [each for name, each in signature.parameters.items() if name not in words]
        made.__signature__ = signature.replace(parameters=left)
        del made.__wrapped__  # pytest would take the rows' names for fixtures
        return made

    return decorate


@dataclasses.dataclass(frozen=True, eq=False)
class _Row:
    """Says which row is wrong. What it is made of may be large: it is looked at only then."""

    number: int
    values: Sequence[Any]
    name: str | Callable[[Any], str] | None

    def __repr__(self) -> str:
        if isinstance(self.name, str):
            return f"row {self.number}, {self.name}"
        try:
            return f"row {self.number}, {self.name(*self.values) if self.name else repr(self.values)[:200]}"
        except (ValueError, RecursionError):  # a number or a list that Python does not print
            return f"row {self.number}"


def _values(row: Any, count: int) -> Sequence[Any]:
    if isinstance(row, type(pytest.param())):
        assert not row.marks, "a row that is marked is a test of its own: use pytest.mark.parametrize"
        return row.values
    return row if count > 1 else (row,)


def _folder(place: Path, number: int) -> Path:
    folder = place / f"row-{number}"
    folder.mkdir()
    folder.chmod(place.stat().st_mode & 0o777)
    return folder
