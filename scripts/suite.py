"""Run the test suite in parts: tests side by side, then those that need the whole machine, one by one.

    scripts/test [ARGUMENTS]            style, types and the tests: each as root or as an ordinary user
    scripts/test --all [ARGUMENTS]      each as both, `broad` tests, fuzzing, other Pythons, the image
    scripts/test --quick [ARGUMENTS]    the tests that launch nothing
    scripts/test --pythons [ARGUMENTS]  these, on every other Python that is found
    scripts/test --python [ARGUMENTS]   these, on the newest of them

Arguments go to pytest. The last line of the summary says PASSED or FAILED, as the exit code does. Only a test
that a clock of wall time ended is repeated (pyproject.toml): any other that fails now and then has a fault.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.pythons import NotInstallable, Python, environment, find_pythons, missing_versions
from tests.tally import Tally

ROOT = Path(__file__).resolve().parent.parent
CHECK = ROOT / "scripts/check"
# pytest's exit code if it collected no test.
NO_TESTS = 5
INTERRUPTED = 2
# The exit code of scripts/test-container where it cannot run.
CANNOT_RUN = 77
# Tests that launch wait for processes half of the time.
WORKERS_PER_CORE = 2

PARALLEL = ("--part", "parallel")
MACHINE = ("--part", "machine")
QUICK = ("--quick",)
MODES = ("--all", "--quick", "--pythons", "--python")


def main(argv: Sequence[str]) -> int:
    began = time.monotonic()
    mode, arguments = (argv[0], argv[1:]) if argv and argv[0] in MODES else ("", argv)
    here = Python(Path(sys.executable), platform.python_version())
    others, passed_over = find_pythons(sys.base_prefix, platform.python_version())
    _say(f"Python {here.version} ({os.path.realpath(sys.executable)})")
    _say("others here: " + (", ".join(map(str, others)) or "none"))
    if mode == "--quick":
        return run_parts(here, [(*QUICK, *_workers(1))], arguments, began)
    if mode in ("--pythons", "--python"):
        for name, why in passed_over:
            _say(f"passed over: {name}: {why}")
        return run_pythons(others if mode == "--pythons" else newest(others), arguments)
    code = subprocess.run([CHECK, "style"]).returncode
    if code:
        return code
    every = ("--all",) if mode == "--all" else ()
    parts = [(*PARALLEL, *every, *_workers(WORKERS_PER_CORE)), (*MACHINE, *every)]
    with Types() as types:
        # It uses one core. On another all tests are compiled: otherwise each worker would do it.
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
        nowhere = subprocess.DEVNULL
        subprocess.run(collect, cwd=ROOT, env=_environ(), stdout=nowhere, stderr=nowhere)
        code = run_parts(here, parts, arguments, began, types)
    if mode == "--all":
        return worst([code, run_fuzz(), run_pythons(others, ()), run_container()])
    return code


class Types:
    """Checks the types beside the tests. Says what is wrong as soon as it is known."""

    def __enter__(self) -> Types:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # Only with what the tests leave of the processors, also in the part that uses one of them.
        self._process = subprocess.Popen(["nice", "-n", "19", CHECK, "types"], **pipes)  # type: ignore[call-overload]
        self._reader = threading.Thread(target=self._tell)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._reader.join()

    def _tell(self) -> None:
        said = self._process.communicate()[0]
        if self._process.returncode > 0:
            _section("types", [said])

    def wait(self) -> int:
        """Wait for the end of the check. Returns its exit code."""
        self._reader.join()
        return int(self._process.returncode)


def run_parts(
    python: Python,
    parts: Sequence[Sequence[str]],
    arguments: Sequence[str],
    began: float,
    types: Types | None = None,
) -> int:
    """Run one part after the other and print a summary of all, with the time since `began`. Returns the worst
    exit code, which is that of `types` if all tests pass."""
    whole = Tally()
    codes: list[int] = []
    unfinished: list[str] = []
    for part in parts:
        code, tally = _pytest(python, [*part, *arguments])
        codes.append(code)
        whole.add(tally)
        if code < 0:  # otherwise the summary would not show that most tests are missing
            unfinished.append(f"{' '.join(part[:2])} did not come to its end: {signal.strsignal(-code)}")
        if code == INTERRUPTED or (code not in (0, NO_TESTS) and {"-x", "--exitfirst"} & set(arguments)):
            break
    if whole.needs():
        _section("what the machine let us test", whole.needs())
    _section(f"the slowest {len(whole.slowest())}", whole.slowest())
    _section("the slowest files", whole.slowest_files())
    if types is not None and (wrong := types.wait()):
        codes.append(wrong)
        unfinished.append("failed: scripts/check types")
    code = worst(codes)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    _section("result", [*unfinished, *(f"failed: {test}" for test in whole.failures)])
    _say(
        f"{'FAILED' if code else 'PASSED'}: {whole.total()} in {_minutes(time.monotonic() - began)} minutes,"
        f" {_minutes(used.ru_utime + used.ru_stime)} minutes of processor time"
    )
    return code


def run_pythons(pythons: Sequence[Python], arguments: Sequence[str]) -> int:
    """Run the tests that launch nothing on each. A supported Python on which they cannot run is a failure."""
    results: list[str] = []
    failed = 0
    for python in pythons:
        _section(str(python), ())
        try:
            there, lacking = environment(python)
        except NotInstallable as error:
            results.append(f"{python}: NOT TESTED: {error}")
            failed = failed or int(python.is_supported)
            continue
        for requirement in lacking:
            _say(f"cannot be installed there: {requirement}; tests that need it will fail")
        code, tally = _pytest(there, [*QUICK, *_workers(1), "-q", "-p", "no:cacheprovider", *arguments])
        failed = failed or code
        without = f", without {', '.join(lacking)}" if lacking else ""
        results.append(f"{python}{without}: {tally.total()}{'' if code == 0 else f', exit code {code}'}")
    _section("on other Pythons", results or ["none was found"])
    if not_found := missing_versions([*(each.version for each in pythons), platform.python_version()]):
        _say(f"not found here: {', '.join(not_found)}")
    return failed


def newest(pythons: Sequence[Python]) -> Sequence[Python]:
    """The newest supported one, or the newest at all."""
    return ([each for each in pythons if each.is_supported] or list(pythons))[-1:]


def run_fuzz() -> int:
    """Give all parsers new inputs, for a minute."""
    _section("new inputs for all parsers", ())
    return subprocess.run([ROOT / "scripts/fuzz", "--seconds", "60"]).returncode


def run_container() -> int:
    """Run the container image's own tests. They need root; without it, that is said and no failure."""
    _section("the container image", ())
    code = subprocess.run([ROOT / "scripts/test-container"]).returncode
    return 0 if code == CANNOT_RUN and os.geteuid() != 0 else code


def worst(codes: Sequence[int]) -> int:
    """0 if every part passed. A part without tests does not count if another part had some."""
    failures = [code for code in codes if code not in (0, NO_TESTS)]
    if failures:
        return failures[0] if failures[0] > 0 else 128 - failures[0]  # 128 + N for signal N, as in a shell
    return 0 if 0 in codes else NO_TESTS


def _pytest(python: Python, arguments: Sequence[str]) -> tuple[int, Tally]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tally.json")
        argv = [str(python.path), "-m", "pytest", "--tally", str(path), *arguments]
        _flush()
        code = _wait(subprocess.Popen(argv, cwd=ROOT, env=_environ()))
        # If there is no tally, pytest did not finish: its exit code says so.
        return code, Tally.read(path) if path.exists() else Tally()


def _environ() -> dict[str, str]:
    """The environment without PYTHONDONTWRITEBYTECODE, with which each process would compile all tests
    again."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end even if ^C is pressed: pytest gets it too, and reports what it has done so far."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _workers(per_core: float) -> tuple[str, ...]:
    # Tests that share a fixture of their module go to one worker: tests/spread.py.
    return "-n", str(math.ceil(len(os.sched_getaffinity(0)) * per_core)), "--dist", "loadgroup"


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def _section(title: str, lines: Sequence[str]) -> None:
    print(f" {title} ".center(100, "="))
    for line in lines:
        print(line)
    _flush()


def _say(line: str) -> None:
    print(line, flush=True)


def _flush() -> None:
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
