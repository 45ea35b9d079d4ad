"""Many launches by one process, and by many at once: nothing grows, nothing is left.

A host that uses the runner as a library launches thousands of plugins from one process. What each launch
forgets to give back is invisible in a test of one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.tables import REPEAT

# Before a release, with RUNNER_TEST_REPEAT=10: 2000, of which 500 are to warm up. What is counted
# (descriptors, children, threads, groups, files) leaks at each launch or never, and a few hundred show it.
LAUNCHES = 400 * min(REPEAT, 5)
# Until then caches fill, lazy imports are made and the allocator finds its size.
WARM_UP = 200 if REPEAT == 1 else 500
# What memory may grow by over all launches after that. Of 2000 launches it is 400 bytes each, where one
# leaked object of ours with its dict is as much, and the smallest leaked descriptor object keeps a page of
# buffers. Of 400 launches it is 3 KB each; the number of objects is then the finer measure.
RSS_SLACK = 600 << 10
# Objects of the interpreter. Tables that double when they are full, free lists; half an object per launch.
OBJECTS_SLACK = (LAUNCHES - WARM_UP) // 2
# /var/cache/runner is root's, for all that runs: a few files are others', one per launch would be ours.
SHARED_SLACK = 200
MINUTES = 60.0

pytestmark = [pytest.mark.machine, pytest.mark.bound(20 * MINUTES)]

MANIFEST = """\
[plugin]
id = "soak"
version = "1.0.0"
name = "Soak"
description = "Ends at once, very often."
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "/usr/bin/true"
[plugin.sandbox]
enabled = true
fs_write_paths = ["${state_dir}"]
[plugin.limits]
"""
# Each of those that takes a cgroup, a descriptor, a clock or a file of the runner's.
LIMITS = {
    "memory": '"256M"',
    "pids": "32",
    "cpu": "2",
    "cpu_time": '"1m"',
    "open_files": "256",
    "file_size": '"1M"',
    "disk": '"4M"',
    "output": '"1M"',
    "launch": '"1m"',
    "deadline": '"5m"',
}


class Held(TypedDict):
    """What a process holds between two launches."""

    fds: list[str]
    threads: int
    children: list[int]  # the dead that nobody waited for as well
    cgroups: list[str]
    rss: int
    objects: int
    files: list[str]  # in places that are this caller's alone
    shared: list[str]  # in places where others make files too


def launch(manifest: str, state_dir: str) -> int:
    """Once, by the way `runner exec` goes; the status it would leave with."""
    import os
    import time

    from runner.cli.exec import _CommandLine
    from runner.launch.run import run
    from runner.launch.stages import Invocation
    from runner.launch.verdict import judge
    from runner.launch.wait import watch_caller

    own = [os.dup(fd) for fd in (0, 1)]  # `runner exec` gives them away; here more launches follow
    with watch_caller() as caller:
        host = _CommandLine(caller, inspect=False, tty=False)
        invocation = Invocation(manifest, state_dir=state_dir)
        ended = run(invocation, os.environ, time.monotonic(), host)
    for fd, copy in enumerate(own):
        os.dup2(copy, fd)
        os.close(copy)
    return judge(ended.end, ended.started.planned.grant.limits)[1]


def look(places: list[str], shared: list[str]) -> Held:
    """What this process holds now."""
    import contextlib
    import gc
    import os
    import sys

    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts

    gc.collect()
    # The interpreter's own, of 4096 places: a name that is looked up as a new string each time (`case` does,
    # of a class) takes another place each time, until all are taken.
    sys._clear_type_cache()
    children = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", "rb") as file:
            children += [int(word) for word in file.read().split()]
    cgroups = []
    for site in survey(read_mounts()).sites:
        for name in os.listdir(site.directory):
            # The group a runner itself moves to (v2) stays for as long as it lives.
            if name.startswith(f"runner-{os.getpid()}-") and not name.endswith("-self"):
                cgroups.append(f"{site.directory}/{name}")
    fds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            fds.append(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
    with open("/proc/self/status", encoding="ascii") as status:
        rss = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))

    def below(tops: list[str]) -> list[str]:
        return [
            os.path.join(folder, name)
            for top in tops
            for folder, folders, names in os.walk(top)
            for name in (*folders, *names)
        ]

    return {
        "fds": fds,
        "threads": len(os.listdir("/proc/self/task")),
        "children": children,
        "cgroups": cgroups,
        "rss": rss,
        "objects": sys.getallocatedblocks(),
        "files": below(places),
        "shared": below(shared),
    }


def soak(
    manifest: str,
    state_dir: str,
    warm_up: int,
    launches: int,
    places: list[str],
    shared: list[str],
    leaking: bool = False,
) -> list[Held]:
    """What it holds after the first `warm_up` launches, and after all. `leaking`: one of each, each time."""
    import json
    import os
    import threading
    from contextlib import ExitStack

    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    held: list[str] = []  # as text: the first listing must not be among the objects of the second
    forgotten: list[object] = []
    over = threading.Event()
    with ExitStack() as stack:
        stack.callback(over.set)

        def leak(number: int) -> None:
            forgotten.append([os.urandom(1) * (256 << 10), {}, {}])
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
            stack.enter_context(make_cgroup(survey(read_mounts()).sites, Limits()))
            thread = threading.Thread(target=over.wait)
            thread.start()
            child = os.fork()
            if child == 0:
                os._exit(0)
            stack.callback(os.waitpid, child, 0)
            for place in (places[0], shared[0]):
                path = os.path.join(place, f"left-{number}")
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
                stack.callback(os.unlink, path)

        for number in range(1, launches + 1):
            # Once with nothing remembered: then all that is ever imported is. In the middle of a run somebody
            # else's launches could push our entries out of root's cache.
            os.environ["RUNNER_CACHE"] = "off" if number == 1 else "on"
            status = launch(manifest, state_dir)
            if status != 0:
                raise SystemExit(f"launch {number} ended with {status}")
            if leaking:
                leak(number)
            if number in (warm_up, launches):
                held.append(json.dumps(look(places, shared)))
    return [json.loads(each) for each in held]


def grown(before: Held, after: Held, rss: int, objects: int, shared: int) -> dict[str, str]:
    """What is more than it was, beyond the slack where there must be some; by name, with the evidence."""
    found: dict[str, str] = {}

    def more(name: str, old: Iterable[object], new: Sequence[object], slack: int = 0) -> None:
        extra = [each for each in new if each not in set(old)]
        if len(extra) > slack:
            found[name] = f"{len(extra)} more, such as {extra[:5]}"

    more("fds", before["fds"], after["fds"])
    more("children", before["children"], after["children"])
    more("cgroups", before["cgroups"], after["cgroups"])
    more("files", before["files"], after["files"])
    more("shared", before["shared"], after["shared"], shared)
    if after["threads"] > before["threads"]:
        found["threads"] = f"{before['threads']}, then {after['threads']}"
    if after["rss"] > before["rss"] + rss:
        found["rss"] = f"{before['rss']} bytes, then {after['rss']}"
    if after["objects"] > before["objects"] + objects:
        found["objects"] = f"{before['objects']}, then {after['objects']}"
    return found


@pytest.fixture
def manifest(plugin_dir: Path, write_file: Callable[..., Path]) -> Path:
    limits = "".join(f"{name} = {value}\n" for name, value in LIMITS.items())
    return write_file(plugin_dir / "nexo-plugin.toml", MANIFEST + limits)


def state_dir(caller: Caller) -> str:
    """Not below the caller's home: that one is closed to the uid root's plugins get."""
    return str(caller.home.parent / "state" / "soak")


def places(caller: Caller) -> tuple[list[str], list[str]]:
    """Where files could pile up: the caller's own, and those it shares."""
    own = [str(caller.home), str(caller.home.parent / "state")]
    return own, ["/run/runner", "/var/lib/runner", "/var/cache/runner"] if caller.uid == 0 else ["/dev/shm"]


@pytest.mark.usefixtures("machine_as_before")
def test_many_launches_leave_nothing_behind(runner_as: Caller, manifest: Path) -> None:
    _make_state_parent(runner_as)
    own, shared = places(runner_as)
    args = (str(manifest), state_dir(runner_as), WARM_UP, LAUNCHES, own, shared)
    before, after = elsewhere.run(runner_as, soak, *args, using=(launch, look), timeout=60 * MINUTES)
    assert before["files"], "nothing was looked at"
    assert grown(before, after, RSS_SLACK, OBJECTS_SLACK, SHARED_SLACK) == {}


@pytest.mark.usefixtures("machine_as_before")
def test_what_leaks_is_found(runner_as: Caller, manifest: Path) -> None:
    """The soak itself can fail: one of each is forgotten at each launch."""
    _make_state_parent(runner_as)
    own, shared = places(runner_as)
    args = (str(manifest), state_dir(runner_as), 10, 30, own, shared, True)
    before, after = elsewhere.run(runner_as, soak, *args, using=(launch, look), timeout=10 * MINUTES)
    found = grown(before, after, RSS_SLACK, 20, 10)
    wanted = {"fds", "threads", "children", "rss", "objects", "files", "shared"}
    assert set(found) - {"cgroups"} == wanted, found
    # Where groups can be made at all: not by an ordinary user without delegation.
    assert ("cgroups" in found) == _makes_groups(runner_as)


@pytest.mark.usefixtures("machine_as_before")
def test_runners_side_by_side_leave_nothing_behind(runner_as: Caller, manifest: Path) -> None:
    """Eight at a time, with one state directory, sweeping while others make their groups."""
    _make_state_parent(runner_as)
    pids: set[int] = set()
    lock = threading.Lock()

    def one(number: int) -> tuple[int, str]:
        process = runner_as.start("exec", "--state-dir", state_dir(runner_as), manifest)
        with lock:
            pids.add(process.pid)
        with process:
            _, complaints = process.communicate(timeout=5 * MINUTES)
        return process.returncode, complaints.decode(errors="replace")

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(one, range(64 * REPEAT)))
    assert [end for end in ends if end != (0, "")] == []
    assert _groups_of(pids) == []


@pytest.mark.needs("root")
def test_a_group_left_behind_is_found() -> None:
    left = Path(f"/sys/fs/cgroup/pids/runner-{os.getpid()}-0-0")
    if not left.parent.is_dir():
        left = Path("/sys/fs/cgroup") / left.name
    left.mkdir()
    try:
        assert _groups_of({os.getpid()}) == [str(left)]
    finally:
        left.rmdir()


def _make_state_parent(caller: Caller) -> None:
    parent = Path(state_dir(caller)).parent
    parent.mkdir()
    parent.chmod(0o755)
    caller.give(parent)


def _makes_groups(caller: Caller) -> bool:
    return bool(elsewhere.run(caller, _sites))


def _sites() -> int:
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts

    return len(survey(read_mounts()).sites)


def _groups_of(pids: Iterable[int]) -> list[str]:
    """The groups that runners of these numbers have made, wherever cgroups are mounted."""
    marks = tuple(f"runner-{pid}-" for pid in pids)
    return [
        os.path.join(folder, name)
        for folder, folders, _ in os.walk("/sys/fs/cgroup")
        for name in folders
        if name.startswith(marks) and not name.endswith("-self")
    ]
