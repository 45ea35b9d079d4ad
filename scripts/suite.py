"""Run the test suite in parts: tests side by side, then those that need the whole machine, one by one.

    scripts/test [ARGUMENTS]            everything, after style and types
    scripts/test --quick [ARGUMENTS]    the tests that launch nothing
    scripts/test --pythons [ARGUMENTS]  these, on every other Python that is found

Arguments go to pytest.

A few tests that failed side by side run once more, one by one: the contracts fix some deadlines (rune gives
a plugin two seconds for its handshake), and two busy workers on a slow machine can use them up. Such a test
must pass then, and the summary names it. A test that needs the machine for itself is not repeated.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.pythons import NotInstallable, Python, environment, find_pythons, missing_versions
from tests.tally import Tally

ROOT = Path(__file__).resolve().parent.parent
# pytest's exit code if no test was collected.
NO_TESTS = 5
FAILED = 1
INTERRUPTED = 2
# More failures than this are not the machine's fault.
MOST_REPEATED = 20

PARALLEL = ("--part", "parallel")
MACHINE = ("--part", "machine")
QUICK = ("--quick",)


def main(argv: Sequence[str]) -> int:
    mode, arguments = (argv[0], argv[1:]) if argv[:1] in (["--quick"], ["--pythons"]) else ("", argv)
    here = Python(Path(sys.executable), platform.python_version())
    others, passed_over = find_pythons(sys.base_prefix, platform.python_version())
    _say(f"Python {here.version} ({os.path.realpath(sys.executable)})")
    _say("others here: " + (", ".join(map(str, others)) or "none"))
    if mode == "--quick":
        return run_parts(here, [(*QUICK, *_workers())], arguments)
    if mode == "--pythons":
        for name, why in passed_over:
            _say(f"passed over: {name}: {why}")
        return run_pythons(others, arguments)
    if code := subprocess.run([ROOT / "scripts/check"]).returncode:
        return code
    return run_parts(here, [(*PARALLEL, *_workers()), MACHINE], arguments)


def run_parts(python: Python, parts: Sequence[Sequence[str]], arguments: Sequence[str]) -> int:
    """Run one part after the other and print a summary of all. Returns the worst exit code."""
    began = time.monotonic()
    whole = Tally()
    codes: list[int] = []
    unfinished: list[str] = []
    repeated: list[str] = []
    for part in parts:
        code, tally = _pytest(python, [*part, *arguments])
        if code == FAILED and "-n" in part and _passes_alone(python, tally):
            code = 0
            repeated += tally.failures
        codes.append(code)
        whole.add(tally)
        if code < 0:  # otherwise the summary would not show that most tests are missing
            unfinished.append(f"{' '.join(part[:2])} did not come to its end: {signal.strsignal(-code)}")
        if code == INTERRUPTED or (code not in (0, NO_TESTS) and {"-x", "--exitfirst"} & set(arguments)):
            break
    if whole.needs():
        _section("what the machine let us test", whole.needs())
    if repeated:
        _section("failed beside others and passed alone", repeated)
    _section(f"the slowest {len(whole.slowest())}", whole.slowest())
    _section("the slowest files", whole.slowest_files())
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    _section(f"{whole.total()} in {minutes}:{seconds:02} minutes", unfinished)
    return worst(codes)


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
        code, tally = _pytest(there, [*QUICK, *_workers(), "-q", "-p", "no:cacheprovider", *arguments])
        if code == FAILED and _passes_alone(there, tally):
            code = 0
            results += [f"{python}: failed beside others and passed alone: {test}" for test in tally.failures]
        failed = failed or code
        without = f", without {', '.join(lacking)}" if lacking else ""
        results.append(f"{python}{without}: {tally.total()}{'' if code == 0 else f', exit code {code}'}")
    _section("on other Pythons", results or ["none was found"])
    if not_found := missing_versions([*(each.version for each in pythons), platform.python_version()]):
        _say(f"not found here: {', '.join(not_found)}")
    return failed


def worst(codes: Sequence[int]) -> int:
    """0 if every part passed. A part without tests does not count if another part had some."""
    failures = [code for code in codes if code not in (0, NO_TESTS)]
    if failures:
        return failures[0] if failures[0] > 0 else 128 - failures[0]  # 128 + N for signal N, as in a shell
    return 0 if 0 in codes else NO_TESTS


def _passes_alone(python: Python, tally: Tally) -> bool:
    """Run the tests that failed again, one by one, without the arguments: those may name other tests."""
    if not 0 < len(tally.failures) <= MOST_REPEATED:
        return False
    _section(f"again, one by one: {len(tally.failures)} that failed beside others", ())
    code, again = _pytest(python, ["-p", "no:cacheprovider", *tally.failures])
    return code == 0 and not again.failures and again.counts["passed"] == len(tally.failures)


def _pytest(python: Python, arguments: Sequence[str]) -> tuple[int, Tally]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tally.json")
        argv = [str(python.path), "-m", "pytest", "--tally", str(path), *arguments]
        _flush()
        code = _wait(subprocess.Popen(argv, cwd=ROOT, env=_environ()))
        # If there is no tally, pytest did not finish: its exit code says so.
        return code, Tally.read(path) if path.exists() else Tally()


def _environ() -> dict[str, str]:
    """Without PYTHONDONTWRITEBYTECODE, with which each process of a run would compile all tests again."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end even if ^C is pressed: pytest gets it too, and reports what it has done so far."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _workers() -> tuple[str, ...]:
    # Tests that share a fixture of their module go to one worker: tests/spread.py.
    return "-n", str(len(os.sched_getaffinity(0))), "--dist", "loadgroup"


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
