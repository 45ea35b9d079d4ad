"""The tests' own tools: a process from a template is like a fresh one, and a table names every wrong row."""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

from tests import elsewhere
from tests.conftest import Caller
from tests.tables import Line, check_rows, one_case, run_lines, wait_for
from tests.template import _Forked

pytestmark = pytest.mark.both_callers


def describe_process() -> dict[str, Any]:
    """Everything that a process can see of its own setup."""
    import os
    import resource
    import signal
    import sys
    import threading

    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    names = (
        "Uid",
        "Gid",
        "Groups",
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "CapEff",
        "CapBnd",
        "NoNewPrivs",
        "Seccomp",
    )
    return {
        **{name: status[name] for name in names},
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "umask": os.umask(0o22),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "threads": threading.active_count(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "trio": "trio" in sys.modules,
        "streams": [sys.stdout.line_buffering, sys.stdout.encoding, sys.stdin.fileno(), sys.stderr.errors],
        "argv": sys.argv[:1],
    }


@one_case("more", [{}, {"X": "1"}], ids=["", "a variable"])
def test_a_process_from_a_template_is_like_a_fresh_one(runner_as: Caller, more: dict[str, str]) -> None:
    forked = elsewhere.run(runner_as, describe_process, env=more)
    plain = Caller(**{field.name: getattr(runner_as, field.name) for field in dataclasses.fields(Caller)})
    fresh = elsewhere.run(plain, describe_process, env=more)
    assert forked == fresh
    assert forked["parent"] == os.getpid() and not forked["trio"]


def test_a_forked_process_ends_like_any_other(runner_as: Caller) -> None:
    read, write = os.pipe()
    with (
        open(read, "rb") as reader,
        runner_as.start("exec", "--report", str(write), "/", pass_fds=[write]) as process,
    ):
        os.close(write)
        assert isinstance(process, _Forked)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (126, b"") and b"manifest" in err
        assert b'"manifest_invalid"' in reader.read()

    def waits() -> None:
        import os
        import signal

        os.write(1, b"here\n")
        signal.pause()

    with elsewhere.start(runner_as, waits, start_new_session=True) as killed:
        assert isinstance(killed, _Forked) and elsewhere.line(killed) == b"here\n"
        assert os.getsid(killed.pid) == killed.pid
        killed.kill()
    assert killed.returncode == -signal.SIGKILL


def test_a_process_that_a_template_cannot_make_is_started(runner_as: Caller) -> None:
    started = runner_as.start("--version", env={"PYTHONDEVMODE": "1"}, stdin=subprocess.DEVNULL)
    assert type(started) is subprocess.Popen
    started.communicate(timeout=60)
    assert started.returncode == 0


def test_a_table_names_every_wrong_row() -> None:
    def check(name: str, value: int) -> None:
        assert value % 2 == 0, f"{value} is odd"

    check_rows({"two": 2, "four": 4}, check)
    with pytest.raises(pytest.fail.Exception) as caught:
        check_rows({"one": 1, "two": 2, "three": 3}, check)
    message = str(caught.value)
    assert (
        "2 of 3 rows are wrong" in message
        and "'one'" in message
        and "3 is odd" in message
        and "'two'" not in message
    )
    with pytest.raises(AssertionError, match="without rows"):
        check_rows({}, check)


def test_results_are_in_the_order_of_the_lines(runner_as_user: Caller) -> None:
    lines = [Line(("--version",)), Line(("frobnicate",)), Line(("schema", "nexo"))]
    assert [done.returncode for done in run_lines(runner_as_user, lines)] == [0, 2, 0]


def test_wait_for_is_bounded() -> None:
    assert wait_for(lambda: True, 0)
    assert not wait_for(lambda: False, 0.01)


@one_case("number", [0, 1, 2], ids=str)
@one_case(("word", "length"), [("a", 1), ("bb", 2)])
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, word: str, length: int) -> None:
    assert "RUNNER_TEST_ROW" not in os.environ
    monkeypatch.setenv("RUNNER_TEST_ROW", word)
    (tmp_path / "file").touch(exist_ok=False)
    assert number != 1 or len(word) != length, "both rows below it are wrong"


def test_the_rows_of_one_case_are_named_and_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(inspect.signature(_rows).parameters) == ["tmp_path", "monkeypatch"]
    with pytest.raises(pytest.fail.Exception) as caught:
        _rows(tmp_path=tmp_path, monkeypatch=monkeypatch)
    said = str(caught.value)
    assert said.startswith("1 of 3 rows are wrong.\n\nrow 1, 1:") and "2 of 2 rows are wrong" in said
    assert said.count("both rows below it are wrong") == 2 and "row 1, ('bb', 2):" in said


@one_case("number", [1, 2, 3])
async def _slow_rows(number: int) -> None:
    await trio.lowlevel.checkpoint()
    if number == 1:
        pytest.skip("the first")
    assert number != 2, "even"


@pytest.mark.trio
async def test_rows_may_be_coroutines_and_may_skip() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"1 of 3 rows are wrong.\n\nrow 1, \(2,\):"):
        await _slow_rows()

    def skip(_: str, why: str) -> None:
        pytest.skip(why)

    with pytest.raises(pytest.skip.Exception, match=r"^one; two$"):
        check_rows({"a": "one", "b": "two", "c": "one"}, skip)
    check_rows({"a": "", "b": "two"}, lambda _, why: skip("", why) if why else None)
