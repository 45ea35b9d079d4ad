"""What is done while a call fails: commands of the runner, and what has to be true of each afterwards."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.limits.cgroup import sweep
from sandbox.limits.cgroup_survey import survey
from sandbox.paths.mounts import read_mounts
from tests.conftest import Caller, vanished
from tests.faults.inject import Fault, Injector, Place, observing
from tests.faults.table import ERRNOS, MAY_HAVE_RUN, NEVER_FAILS, NOT_STARTED, SHORTAGES
from tests.tables import REPEAT, wait_for

# A run that has not ended by then hangs. The slowest waits for its launch limit, of a minute.
SECONDS = 240.0
_AT_ONCE = 3
UNREACHED = "the fault was not reached"


@dataclass
class Ran:
    """How a run with a fault ended."""

    status: int
    out: bytes = field(repr=False)
    err: str
    report: dict[str, Any] | None = field(repr=False)
    places: list[Place] = field(repr=False)

    @property
    def code(self) -> str:
        """Its outcome; of a run without a report "": its exit status and a message say it."""
        return str(self.report["outcome"]["code"]) if self.report else ""


@dataclass
class Scene:
    """A command of the runner, or a program."""

    caller: Caller
    words: Sequence[str]
    # What is wrong with the machine afterwards, as sentences. Called after the checks of all scenes.
    check: Callable[[Ran, Fault | None], Iterable[str]] = lambda ran, fault: ()
    reports: bool = False  # it takes --report
    program: str = ""  # Python that runs in place of the runner, with `words` as its arguments
    before: Callable[[], None] = lambda: None  # called before each run
    turn: int = 0  # see `by_turns`
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, fault: Fault | None, first: str = "") -> tuple[Ran, list[str]]:
        """Run it with a fault, or after the Python `first`. Returns how it ended, and what is wrong."""
        with self._lock:
            self._number += 1
            report = self.caller.home / f"report-{self._number}.json"
        words = [*self.words[:1], "--report", str(report), *self.words[1:]] if self.reports else self.words
        injector, wrong = Injector(fault), []
        self.before()
        caller = observing(self.caller, self.program, first)
        with injector.run(lambda **more: caller.start(*words, stdin=subprocess.DEVNULL, **more)) as process:
            try:
                if fault is not None and fault.signal == signal.SIGSTOP and fault.place.role == "runner":
                    _continue(process, injector)
                out, err = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                wrong.append(f"it hangs: {[*map(_cmdline, injector.pids)]}")
                process.kill()
                out, err = process.communicate()
            # Before the context ends: then nobody answers for those that are left.
            if not vanished(set(injector.pids)):
                wrong.append(f"processes are left: {[*map(_cmdline, injector.pids)]}")
        said = json.loads(report.read_text()) if report.exists() else None
        report.unlink(missing_ok=True)
        ran = Ran(process.returncode, out, err.decode(errors="replace"), said, injector.places)
        if fault is None and not first:
            return ran, wrong
        if fault is not None and not injector.reached:
            return ran, [UNREACHED]
        is_killed = fault is not None and fault.signal == signal.SIGKILL
        removes = fault is not None and fault.place.call in ("unlinkat", "rmdir")
        if left := _cgroups(process.pid, swept=is_killed or removes):
            wrong.append(f"cgroups are left: {left}")
        if not self.program and not (is_killed and process.returncode == -signal.SIGKILL):
            wrong += _faults_of_outcome(ran, fault, reports=self.reports)
        wrong += self.check(ran, fault)
        return ran, wrong

    def places(self, runs_in_common: int = 3) -> list[Place]:
        """The places that several healthy runs have in common, in order."""
        runs = []
        for _ in range(runs_in_common):
            ran, wrong = self.run(None)
            assert ran.status == 0 and not wrong, ran
            runs.append(ran.places)
        common = set(runs[0]).intersection(*runs[1:])
        return [place for place in runs[0] if place in common and place[:2] not in NEVER_FAILS]

    def sweep(self, faults: Sequence[Fault], at_once: int = _AT_ONCE) -> None:
        """Run it with each of the faults. Fails once, and names every fault that did wrong."""
        assert faults
        bad: list[str] = []
        # A runner tries the locks of all other runners' cgroups, so how often it does is not its own matter.
        may_miss = len(faults) // 10
        with ThreadPoolExecutor(at_once) as pool:
            for fault, (ran, wrong) in zip(faults, pool.map(self.run, faults), strict=True):
                if wrong == [UNREACHED] and fault.place.number > 1 and may_miss:
                    may_miss -= 1
                elif wrong:
                    told = f"{fault}: {'; '.join(wrong)}\n    exit {ran.status} {ran.code}: {ran.err[-400:]}"
                    logging.info("%s", told)  # --log-cli-level=info shows it at once
                    bad.append(told)
        assert not bad, f"{len(bad)} of {len(faults)} faults:\n" + "\n".join(bad)


def _continue(runner: subprocess.Popen[bytes], injector: Injector) -> None:
    """Let a runner go on when it has stopped. Other processes are for its clocks to end."""
    if wait_for(lambda: injector.reached or runner.poll() is not None, SECONDS) and injector.reached:
        stat = Path(f"/proc/{runner.pid}/stat")
        assert wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] in "TZ", SECONDS)
        runner.send_signal(signal.SIGCONT)


def _faults_of_outcome(ran: Ran, fault: Fault | None, *, reports: bool) -> Iterable[str]:
    """What is wrong with the class of an outcome, and how it is told."""
    if "Traceback" in ran.err:
        yield "it prints a traceback"
    spoken = "runner" in ran.err or ran.code == "crashed"  # what a plugin that crashed said is its own matter
    if ran.status != 0 and not spoken and not (fault and fault.place.call == "write"):
        yield "it says nothing"
    if not reports:
        return
    begun = ran.out or ran.status not in (2, 70)  # else it failed before it knew that it has to report
    if not ran.report and begun and "report" not in ran.err:
        yield "there is no report, and no message about it"
    if ran.status < 0:
        yield f"signal {-ran.status} ended the runner"
    if ran.code == "ok" and ran.status:
        yield "its status and its report differ"
    if ran.code and ran.out and ran.code not in MAY_HAVE_RUN:
        yield f"the plugin ran, and {ran.code} says that nothing was started"
    if ran.code and not ran.out and ran.code not in NOT_STARTED | MAY_HAVE_RUN:
        yield f"{ran.code} is not the class of a launch that failed"
    if (fault is None or fault.error in SHORTAGES) and ran.code == "policy_denied":
        yield "a lack of something is no fault of the policy"


def by_turns(scene: Scene, places: Sequence[Place], every: int) -> list[Place]:
    """Every n-th place among those of the same kind: scenes of another turn take others. With
    RUNNER_TEST_REPEAT=2 all."""
    return sorted(places) if REPEAT > 1 else sorted(places)[scene.turn % every :: every]


def each_of(places: Sequence[Place]) -> list[Fault]:
    """At each place one of its errnos, by turns; with RUNNER_TEST_REPEAT=10 all of them."""
    found = []
    for number, place in enumerate(places):
        errors = ERRNOS[place.call]
        for turn in range(min(REPEAT, len(errors))):
            found.append(Fault(place, errors[(number + turn) % len(errors)]))
    return found


def select(scene: Scene, kinds: str) -> list[Fault]:
    """A fault at the first call of each of these kinds (ROLE/CALL). Those that this machine does not make, of
    several that do the same, are left out."""
    firsts = {f"{place.role}/{place.call}": place for place in reversed(scene.places(1))}
    found = [Fault(firsts[kind], ERRNOS[firsts[kind].call][0]) for kind in kinds.split() if kind in firsts]
    assert len(found) >= 4, sorted(firsts)
    return found


def confinement(out: bytes) -> list[str]:
    """What a plugin that prints its own /proc says about its cage, without what differs between two runs."""
    found = []
    for line in out.decode(errors="replace").splitlines():
        # The runner leaves the limit of addresses as it is, and a test lowers it.
        if re.match(r"(Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp\w*):|Max (?!address)", line):
            found.append(" ".join(line.split()))
        elif re.match(r"\d+:.*:/", line):  # of /proc/self/cgroup
            found.append(re.sub(r"runner-\d+-\d+-\d+", "runner-GROUP", line))
        elif " - " in line:  # of /proc/self/mountinfo: place, options and kind
            found.append(" ".join((*line.split()[4:6], line.split(" - ")[1].split()[0])))
    return found


def _cgroups(pid: int, *, swept: bool) -> list[str]:
    """The groups that a runner has left. `swept`: after the next runner has looked."""
    found = []
    for site in survey(read_mounts()).sites:
        if swept:
            sweep(site.directory)
        found += [
            f"{site.directory}/{name}"
            for name in os.listdir(site.directory)
            if name.startswith(f"runner-{pid}-") and not name.endswith("-self")
        ]
    return found


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()[:80]
    except OSError:
        return ""
