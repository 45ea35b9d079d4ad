"""Which code of ours a process runs. A process that lives long has read it long ago.

In a checkout, files change without a new version. A fork server decides by what it has imported, whatever
stands in the files by now. So the plans it keeps are named by its own code: another process finds them only
if it has imported the same files.
"""

from __future__ import annotations

import os
import sys
import time

from sandbox import CODE_ROOT, cache, facts
from sandbox.look import SETTLED_SECONDS
from sandbox.typed import Iterator
from sandbox.value import NamedTuple

_PACKAGES = ("runner", "sandbox", "policies")


def own_files() -> Iterator[str]:
    """The files of our modules that this process has imported."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES:
            file = getattr(module, "__file__", None)
            if file and file.startswith(f"{CODE_ROOT}{os.sep}"):
                yield file


class OwnCode(NamedTuple):
    files: frozenset[str]
    mark: str  # depends on all of them


def own_code(since: float) -> OwnCode | None:
    """The code that was imported since that time, in seconds since 1970. None: one of the files changed so
    late that another text may have been imported than stands there now."""
    newest = int((since - SETTLED_SECONDS) * 1e9)
    parts: list[bytes] = []
    files = frozenset(own_files())
    for file in sorted(files):
        real = os.path.realpath(file)  # some installers make links to files that change in place
        found = facts.place(real)
        if len(found) != facts.DATED or any(isinstance(when, int) and when > newest for when in found[-2:]):
            return None
        parts += (os.fsencode(file), os.fsencode(real), repr(found).encode())
    return OwnCode(files, cache.fingerprint(*parts))


def process_began() -> float:
    """When this process was started, in seconds since 1970: it has imported nothing before. 0: not known."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return 0.0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age
