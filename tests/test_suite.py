"""The test suite's own tools: each of its checks can fail, and says what to do.

The tests run pytest with the suite's conftest on small files, in processes of their own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from scripts import suite
from scripts.pythons import Python, find_pythons, missing_versions
from scripts.suite import NO_TESTS, Types, newest, run_parts, worst
from tests.conftest import ROOT, unreachable
from tests.spread import groups
from tests.tally import Tally

Write = Callable[..., Path]


def run(path: Path, text: str, *arguments: str, **popen: object) -> subprocess.CompletedProcess[str]:
    """Run pytest on a file with this text, as scripts/test would."""
    return subprocess.run(command(path, text, *arguments), **options(), **popen)  # type: ignore[call-overload]


def command(path: Path, text: str, *arguments: str) -> list[str]:
    path.mkdir(exist_ok=True)
    (path / "test_it.py").write_text(text)
    configuration = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider")
    return [sys.executable, "-m", "pytest", "-p", "tests.conftest", *configuration, *arguments, str(path)]


# For tests that leave something behind.
IMPATIENT = {"RUNNER_TEST_PATIENCE": "0.03"}
# For the others: what this run's own tests have beside them is not theirs, and goes on its own time.
PATIENT = {"RUNNER_TEST_PATIENCE": "10"}


def options(more: Mapping[str, str] | None = None) -> dict[str, object]:
    # It must not take itself for an xdist worker of this run.
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "RUNNER_TEST"))
    }
    return {
        "cwd": ROOT,
        "env": {**env, **PATIENT, **(more or {})},
        "capture_output": True,
        "text": True,
        "timeout": 200,
    }


# --- Signals -----------------------------------------------------------------------------------------------

ORDINARY = """
import signal, subprocess

def test_ordinary() -> None:
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN}
    assert ignored == {signal.SIGPIPE, signal.SIGXFSZ}
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    words = dict(line.split(":") for line in status.splitlines())
    assert int(words["SigIgn"], 16) == int(words["SigBlk"], 16) == 0

def test_again() -> None:
    test_ordinary()
"""


def strange() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@pytest.mark.launches
def test_signals_are_reset_at_the_start_of_a_run(tmp_path: Path) -> None:
    """That they are in a worker too is tested below, with what hangs."""
    done = run(tmp_path / "it", ORDINARY, preexec_fn=strange)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


# --- A bound for every test --------------------------------------------------------------------------------

HANGING = (
    ORDINARY.replace("\ndef ", "\n@pytest.mark.bound(60)\ndef ").replace("\nimport ", "\nimport pytest, ", 1)
    + """
import os, pytest, signal, subprocess, threading, trio

pytestmark = pytest.mark.bound(2)

def test_pause() -> None:
    signal.pause()

def test_read() -> None:
    os.read(os.pipe()[0], 1)

def test_wait() -> None:
    with subprocess.Popen(["sleep", "20"]) as process:
        try:
            process.wait()
        finally:
            process.kill()

def test_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

@pytest.mark.trio
async def test_trio() -> None:
    await trio.sleep_forever()

def test_trio_once_more() -> None:
    trio.run(trio.sleep, 0)
    assert signal.set_wakeup_fd(-1) == -1

@pytest.fixture
def slow() -> None:
    signal.pause()

def test_setup(slow: None) -> None:
    pass

def test_quick_enough() -> None:
    pass

@pytest.mark.bound(60)
def test_may_take_longer() -> None:
    signal.sigtimedwait([], 2.5)

def test_swallows() -> None:
    try:
        signal.pause()
    except BaseException:
        pass
    signal.pause()
"""
)


@pytest.mark.launches
def test_a_test_that_hangs_fails_and_says_where(tmp_path: Path) -> None:
    """The alarm comes again if it was swallowed."""
    done = run(tmp_path / "it", HANGING, "-n", "1", preexec_fn=strange)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"6 failed, 5 passed, 1 error", done.stdout), done.stdout
    assert done.stdout.count("still running after 2 seconds") >= 7
    for place in ("signal.pause()", "os.read(os.pipe()[0], 1)", "process.wait()", "lock.acquire()"):
        assert place in done.stdout
    assert re.search(r"task .*test_trio.*\n(.*\n)*?.*in test_trio", done.stdout), done.stdout


# --- Leak checks -------------------------------------------------------------------------------------------

COUNTS = """
import pytest

def test_unmarked(machine_as_before: None) -> None:
    pass

@pytest.mark.machine
def test_marked(machine_as_before: None) -> None:
    pass
"""


@pytest.mark.machine
def test_only_marked_tests_may_check_the_whole_machine(tmp_path: Path) -> None:
    done = run(tmp_path / "it", COUNTS)
    assert "1 passed, 1 error" in done.stdout, done.stdout
    assert "Mark the test @pytest.mark.machine" in done.stdout
    done = run(tmp_path / "it", COUNTS, "-n", "2")
    assert "2 errors" in done.stdout, done.stdout
    assert "do not run beside others" in done.stdout


LEAVES_A_PROCESS = """
import subprocess

def test_leaves(nothing_left: None) -> None:
    subprocess.run(["/bin/sh", "-c", "sleep 1000 & "])
"""


@pytest.mark.launches
def test_a_leftover_process_fails_its_test(tmp_path: Path) -> None:
    argv = command(tmp_path / "it", LEAVES_A_PROCESS, "-n", "1")
    done = subprocess.run(argv, **options(IMPATIENT))  # type: ignore[call-overload]
    assert "1 passed, 1 error" in done.stdout, done.stdout
    assert "processes left behind" in done.stdout and "sleep 1000" in done.stdout


LEAVES_FILES = """
import os, pathlib, pytest
from tests.conftest import TEMP_PREFIX

@pytest.mark.parametrize("name", ["runner-%s", TEMP_PREFIX + "%s"])
def test_leaves(name: str) -> None:
    pathlib.Path("/tmp", name % os.environ["LEFT"]).touch()
"""


@pytest.mark.machine
def test_leftover_files_fail_the_run(tmp_path: Path) -> None:
    mark = f"left-{os.getpid()}"
    argv = command(tmp_path / "it", LEAVES_FILES, "-n", "1")
    try:
        done = subprocess.run(argv, **options({**IMPATIENT, "LEFT": mark}))  # type: ignore[call-overload]
        left = sorted(path.name for path in Path("/tmp").glob(f"*{mark}"))
        assert len(left) == 2
        assert done.returncode == 1, done.stdout
        assert "2 passed" in done.stdout and "left on the machine by this run" in done.stdout
        assert all(f"/tmp/{name}" in done.stdout for name in left), done.stdout
    finally:
        for path in Path("/tmp").glob(f"*{mark}"):
            path.unlink()


# --- The tests that launch nothing -------------------------------------------------------------------------

LAUNCHES = """
import pytest, subprocess
from tests.conftest import Caller

def test_undeclared() -> None:
    subprocess.run(["unshare", "--user", "true"], check=True)

def test_threads_and_processes_are_fine() -> None:
    import threading
    thread = threading.Thread(target=subprocess.run, args=(["true"],))
    thread.start()
    thread.join()

@pytest.mark.launches
def test_declared() -> None:
    pass

def test_has_a_caller(runner_as: Caller) -> None:
    pass

@pytest.mark.needs("root")
def test_needs() -> None:
    pass
"""


@pytest.mark.launches
def test_a_quick_run_deselects_and_forbids_launches(tmp_path: Path) -> None:
    done = run(tmp_path / "it", LAUNCHES, "--quick", "-n", "1")
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "test_undeclared" in done.stdout and "mark it @pytest.mark.launches" in done.stdout


# --- Who calls, and what only --all runs -------------------------------------------------------------------

CALLERS = """
import pytest
from tests.conftest import Caller

@pytest.mark.parametrize("number", range(20))
def test_one(runner_as: Caller, number: int) -> None:
    pass

@pytest.mark.both_callers
@pytest.mark.parametrize("number", range(20))
def test_both(number: int, runner_as: Caller) -> None:
    pass

@pytest.mark.broad
def test_broad() -> None:
    pass
"""


@pytest.mark.needs("root", "user")
def test_each_test_has_one_caller_unless_all_are_asked_for(tmp_path: Path) -> None:
    some = run(tmp_path / "it", CALLERS, "--collect-only", "-q").stdout
    assert some.count("::test_one[") == 20 and some.count("::test_both[") == 40
    assert "::test_broad" not in some
    assert all(5 <= len(re.findall(rf"::test_one\[{name}-", some)) <= 15 for name in ("root", "user"))
    every = run(tmp_path / "it", CALLERS, "--collect-only", "-q", "--all").stdout
    assert every.count("::test_one[") == 40 and "::test_broad" in every


# --- Tests that go to one worker ---------------------------------------------------------------------------

SHARES = """
import pytest

@pytest.fixture(scope="module")
def costly() -> int:
    return 1

@pytest.mark.parametrize("number", range(8))
def test_with(number: int, costly: int) -> None:
    pass

@pytest.mark.parametrize("number", range(8))
def test_without(number: int) -> None:
    pass
"""


def test_tests_that_share_a_module_fixture_go_to_one_worker(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    folder.mkdir()
    (folder / "test_it.py").write_text(SHARES)
    assert groups(folder, folder) == {"test_it.py::test_with": "test_it.py::costly"}
    assert set(groups()) >= {"tests/test_packaging.py::test_the_wheel_holds_every_file_of_the_packages"}


# --- The summary -------------------------------------------------------------------------------------------

NEEDS = """
import pytest

@pytest.mark.parametrize("number", range(4))
@pytest.mark.needs("gcc")
def test_it(number: int) -> None:
    pass

@pytest.mark.needs("gcc")
def test_not_here() -> None:
    pytest.skip("the moon is full")

def test_without() -> None:
    pass

@pytest.mark.needs("gcc")
def test_fails() -> None:
    assert False

@pytest.fixture
def broken() -> None:
    assert False

def test_error(broken: None) -> None:
    pass
"""


@pytest.mark.needs("gcc")
def test_the_tally_is_right(tmp_path: Path) -> None:
    """With a worker. Without one, it is that of the parts below."""
    path = tmp_path / "tally.json"
    run(tmp_path / "it", NEEDS, "-n", "1", "--tally", str(path))
    tally = Tally.read(path)
    assert tally.counts == {"passed": 5, "failed": 1, "skipped": 1, "error": 1}
    assert tally.ran == {"gcc": 5} and tally.skipped == {"gcc": {"the moon is full": 1}}
    assert len(tally.seconds) == 8
    assert sorted(name.rpartition("::")[2] for name in tally.failures) == ["test_error", "test_fails"]
    whole = Tally()
    whole.add(tally)
    whole.add(tally)
    assert whole.total() == "10 passed, 2 failed, 2 error, 2 skipped"
    assert whole.needs() == ["gcc         10 ran", "             2 skipped: the moon is full"]
    assert len(whole.slowest()) == 8
    [line] = whole.slowest_files()
    assert line.endswith("test_it.py (8 tests)")


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, NO_TESTS], 0),
        ([NO_TESTS, 0], 0),
        ([NO_TESTS, NO_TESTS], NO_TESTS),
        ([1, 0], 1),
        ([0, 1], 1),
        ([NO_TESTS, 1], 1),
        ([2], 2),
        ([-9, 0], 137),
    ],
)
def test_the_exit_code_of_several_parts(codes: Sequence[int], code: int) -> None:
    assert worst(codes) == code


@pytest.mark.machine
def test_parts_have_one_summary(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, write_file: Write
) -> None:
    for name in [name for name in os.environ if name.startswith(("PYTEST_XDIST", "RUNNER_TEST"))]:
        monkeypatch.delenv(name)
    here = Python(Path(sys.executable), "3.11.2")
    arguments = command(tmp_path / "it", COUNTS)[3:]
    parts = [("--part", "parallel"), ("--part", "machine")]
    assert run_parts(here, parts, arguments, time.monotonic()) == 1
    said = capfd.readouterr().out
    assert re.search(r"failed: .*::test_unmarked\nFAILED: 1 passed, 1 error in 0:\d\d minutes, \d+:", said), (
        said
    )
    assert said.index("the slowest 2") > said.index("1 passed, 1 deselected")
    assert run_parts(here, parts[1:], arguments, time.monotonic()) == 0
    assert "PASSED: 1 passed in " in capfd.readouterr().out
    # Types are checked beside the tests.
    monkeypatch.setattr(
        suite, "CHECK", write_file(tmp_path / "check", "#!/bin/sh\necho no $1; exit 3\n", 0o755)
    )
    with Types() as types:
        assert run_parts(here, parts[1:], arguments, time.monotonic(), types) == 3
    said = capfd.readouterr().out
    assert "no types" in said and "failed: scripts/check types\nFAILED: 1 passed in " in said


@pytest.mark.launches
def test_a_killed_part_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("PYTEST_XDIST", "RUNNER_TEST"))]:
        monkeypatch.delenv(name)
    text = "import os, signal\ndef test_it() -> None:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    arguments = command(tmp_path / "it", text)[3:]
    here = Python(Path(sys.executable), "3.11.2")
    assert run_parts(here, [("--part", "parallel")], arguments, time.monotonic()) == 137
    said = capfd.readouterr().out
    assert "--part parallel did not come to its end: Killed" in said and "FAILED: no tests" in said


# --- Other Pythons -----------------------------------------------------------------------------------------


@pytest.fixture
def interpreter(write_file: Write) -> Callable[..., Path]:
    """interpreter(path, version, …): a script that claims to be a Python of that version."""

    def make(
        path: Path, version: str, name: str = "cpython", level: str = "final", free_threaded: bool = False
    ) -> Path:
        minor = [int(word) for word in version.split(".")[:2]]
        prefix = str(path.parent.parent)
        answer = [str(path), version, name, level, minor, prefix, prefix, free_threaded]
        text = str(answer).replace("'", '"').replace("True", "true").replace("False", "false")
        return write_file(path, f"#!/bin/sh\necho '{text}'\n", 0o755)

    return make


def test_every_python_is_found_once(tmp_path: Path, interpreter: Callable[..., Path]) -> None:
    home, shim = tmp_path / "home", tmp_path / "shims"
    pyenv = interpreter(home / ".pyenv/versions/3.12.1/bin/python3", "3.12.1")
    interpreter(home / ".local/share/uv/python/cpython-3.12.1-linux/bin/python3.12", "3.12.1")
    conda = interpreter(home / "miniconda3/envs/new/bin/python3.13", "3.13.10")
    older = interpreter(home / ".asdf/installs/python/3.13.9/bin/python3", "3.13.9")
    interpreter(home / ".pyenv/versions/3.10.1/bin/python3", "3.10.1")
    interpreter(home / ".pyenv/versions/pypy/bin/python3", "3.11.9", name="pypy")
    interpreter(home / ".pyenv/versions/3.15/bin/python3.15", "3.15.0a1", level="alpha")
    interpreter(home / ".pyenv/versions/3.14t/bin/python3", "3.14.0", free_threaded=True)
    own = interpreter(tmp_path / "usr/bin/python3.11", "3.11.2")
    # A shim without a version, which fails, and names that are not interpreters.
    shim.mkdir()
    for name in ("python3.12", "python3-config", "python3.12-config"):
        (shim / name).write_text("#!/bin/sh\nexit 127\n")
        (shim / name).chmod(0o755)
    found, passed_over = find_pythons(
        str(own.parent.parent),
        "3.11.2",
        {"HOME": str(home), "PATH": f"{shim}:/nonexistent:relative"},
        [str(own.parent)],
    )
    assert [(each.path, each.version) for each in found] == [
        (pyenv, "3.12.1"),
        (older, "3.13.9"),
        (conda, "3.13.10"),
    ]
    assert {why for _, why in passed_over} == {
        "it is not CPython",
        "it is not a release",
        "it is built without a global interpreter lock",
    }


def test_the_newest_supported_python_is_chosen() -> None:
    old, new, newer = (Python(Path(f"/{version}"), version) for version in ("3.12.1", "3.13.2", "3.99.0"))
    assert newest([old, new, newer]) == [new]
    assert newest([newer]) == [newer] and newest([]) == []


def test_missing_versions_are_named() -> None:
    assert missing_versions(["3.11.2", "3.13.0"]) == ["3.12", "3.14"]


def test_an_unreachable_interpreter_is_named(tmp_path: Path) -> None:
    """pytest's own directories are closed to other users, like a home directory."""
    python = tmp_path / "bin/python3.13"
    python.parent.mkdir(parents=True)
    python.touch()
    said = unreachable(str(python), "python3.13")
    closed = next(path for path in reversed(python.parents) if not path.stat().st_mode & 0o001)
    assert f"not {python} (only its owner may enter {closed})" in said
    assert "no python3.13 with the same packages in /usr/bin" in said


# --- What people have of the runner on the machine ---------------------------------------------------------

LOOKS = """
import os

def test_looks() -> None:
    print("found", os.listdir("/var/lib/runner"))
    os.mkdir("/var/lib/runner/plugins")
"""


@pytest.mark.needs("root")
def test_the_store_of_people_is_hidden(tmp_path: Path) -> None:
    people = "mount --make-rprivate / && mount -t tmpfs none /var/lib && mkdir -p /var/lib/runner/store"
    script = f'{people} && "$@"; status=$?; find /var/lib/runner; exit "$status"'
    ended = []
    for more in ((), ("--quick",), ("-n1",)):
        argv = command(tmp_path / "hidden", LOOKS, "-rA", *more)
        done = subprocess.run(["unshare", "--mount", "sh", "-c", script, "sh", *argv], **options())  # type: ignore[call-overload]
        ended.append((done.returncode, "found []" in done.stdout, done.stdout.splitlines()[-2:]))
    assert ended == [(0, True, ["/var/lib/runner", "/var/lib/runner/store"])] * 3
    # The control: who cannot mount sees it, and is told.
    refuse = f'{people} && exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin "$@"'
    argv = ["unshare", "--mount", "sh", "-c", refuse, "sh", *command(tmp_path / "hidden", LOOKS, "-rA")]
    done = subprocess.run(argv, **options())  # type: ignore[call-overload]
    assert "found ['store']" in done.stdout
    assert "tests see what people have in /var/lib/runner: [Errno 1]" in done.stdout
