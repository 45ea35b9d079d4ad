"""Callers with cgroups of their own, or with none they can use: made by root, for root and for users."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sandbox.limits.cgroup_survey import survey
from sandbox.paths.mounts import read_mounts
from tests.conftest import Caller
from tests.tables import wait_for


@contextlib.contextmanager
def in_groups_of_their_own(
    caller: Caller, *, owned: bool = True
) -> Iterator[tuple[Caller, tuple[Path, ...]]]:
    """The caller, whose processes start in new groups that hold nothing else. `owned`: the groups belong to
    the caller, as if they had been delegated. At the end they must be empty."""
    groups = []
    for number, site in enumerate(survey(read_mounts()).sites):
        group = Path(site.directory) / f"rt-{os.getpid()}-{time.monotonic_ns()}-{number}"
        group.mkdir()
        groups.append(group)
        if owned:
            caller.give(group)
            if site.version == 2:
                os.setxattr(group, "user.delegate", b"1")  # systemd's mark
    enter = "; ".join(f"echo $$ > {shlex.quote(str(group))}/cgroup.procs" for group in groups)
    prefix = ("/bin/sh", "-ec", f'{enter}; exec "$@"', "sh", *caller.prefix)
    try:
        yield replace(caller, prefix=prefix), tuple(groups)
    finally:
        left = [path for group in groups for path in made_in(group)]
        for path in (*left, *groups):
            _remove(path)
    assert left == []


def made_in(group: Path) -> list[Path]:
    return [path for path in group.iterdir() if path.is_dir()]


def _remove(group: Path) -> None:
    """Its members may have ended a moment ago."""

    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    assert wait_for(is_removed, 10), f"{group} is left"


def with_read_only_groups(caller: Caller) -> Caller:
    """In a mount namespace where cgroups are read-only, as in a container."""
    points = [m.point for m in read_mounts().all if m.fstype in ("cgroup", "cgroup2")]
    script = "; ".join(f"mount -o remount,bind,ro {shlex.quote(point)}" for point in points)
    shell = ("/bin/sh", "-ec", f'{script}; exec "$@"', "sh")
    return replace(caller, prefix=("/usr/bin/unshare", "--mount", *shell, *caller.prefix))
