"""The machine of a run, and its load meanwhile."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sandbox.speed.value import NamedTuple

_QUIET_LOAD = 0.5  # for each processor
_QUIET_STEAL = 0.01


class Machine(NamedTuple):
    model: str
    architecture: str
    processors: int
    memory: str
    system: str
    kernel: str
    cgroups: str
    python: str
    bwrap: str
    peers: tuple[tuple[str, str], ...] = ()  # name and version

    def facts(self) -> list[tuple[str, str]]:
        return [
            ("processor", self.model),
            ("architecture", self.architecture),
            ("processors", str(self.processors)),
            ("memory", self.memory),
            ("system", self.system),
            ("kernel", self.kernel),
            ("cgroups", self.cgroups),
            ("Python", self.python),
            ("bubblewrap", self.bwrap),
            *self.peers,
        ]


def look(bwrap: str) -> Machine:
    release = platform.freedesktop_os_release() if os.path.exists("/etc/os-release") else {}
    found = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    total = re.search(r"^MemTotal: +(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    unified = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
    return Machine(
        found[1] if found else "unknown",
        platform.machine(),
        os.cpu_count() or 1,
        f"{int(total[1]) / (1 << 20):.0f} GiB" if total else "unknown",
        release.get("PRETTY_NAME", "unknown"),
        f"Linux {platform.release()}",
        "v2" if unified else "v1" if os.path.isdir("/sys/fs/cgroup/memory") else "none",
        platform.python_version(),
        version_of([bwrap, "--version"]),
    )


def version_of(argv: Sequence[str]) -> str:
    """The first line that a program prints about itself, without its name."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as fault:
        return f"unknown: {fault}"
    line = next(iter((done.stdout or done.stderr).splitlines()), "")
    number = re.search(r"\d+(\.\d+)+\S*", line)
    return number[0] if number else line or "unknown"


def available_bytes() -> int:
    """Memory that new processes can have without swapping."""
    found = re.search(r"^MemAvailable: +(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


# --- the load -----------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """The load of the whole machine, from the first sample to the last."""

    seconds: float
    processors: int
    before: float  # the load average of one minute
    after: float
    highest: float  # of all that were seen between two parts
    busy: float  # part of all processor time that anything used, this benchmark included
    stolen: float  # part that the hypervisor gave to other machines

    def sentence(self) -> str:
        quiet = self.before <= _QUIET_LOAD * self.processors and self.stolen <= _QUIET_STEAL
        verdict = (
            "The machine was quiet."
            if quiet
            else "The machine was not quiet: only the ratios mean something, and small differences nothing."
        )
        return (
            f"The run took {self._duration()}. The load average was {self.before:.1f} before "
            f"it, {self.highest:.1f} at most and {self.after:.1f} after it. The {self.processors} processors "
            f"were busy {self.busy:.0%} of the time; the hypervisor took {self.stolen:.1%} for others. "
            f"{verdict}"
        )

    def _duration(self) -> str:
        return f"{self.seconds / 60:.0f} minutes" if self.seconds >= 120 else f"{self.seconds:.0f} seconds"


class Watch:
    """Watches the load from its creation on."""

    def __init__(self, stat: Callable[[], str] = lambda: _read("/proc/stat")) -> None:
        self._stat = stat
        self._start = time.monotonic()
        self._first = _jiffies(stat())
        self._loads = [os.getloadavg()[0]]

    def look(self) -> None:
        self._loads.append(os.getloadavg()[0])

    def load(self) -> Load:
        self.look()
        passed = [after - before for before, after in zip(self._first, _jiffies(self._stat()), strict=True)]
        _, _, _, idle, waiting, _, _, stolen = passed
        whole = sum(passed) or 1
        return Load(
            time.monotonic() - self._start,
            os.cpu_count() or 1,
            self._loads[0],
            self._loads[-1],
            max(self._loads),
            (whole - idle - waiting - stolen) / whole,
            stolen / whole,
        )


def _jiffies(stat: str) -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal. What guests used is part of user already."""
    return [int(word) for word in stat.splitlines()[0].split()[1:9]]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
