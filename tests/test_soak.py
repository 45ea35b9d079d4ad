"""Many launches by one process, and by many at once: nothing grows, nothing is left.

A host that uses the runner as a library launches thousands of plugins from one process. A small leak at each
launch does not show in a test of one launch. The last test makes calls to plugins of all contracts, and looks
at all processes of the runner: the host, its fork server and its monitor.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.manifests import SANDBOX, nexo
from tests.runner.serve.shelf import SHARES, put_example
from tests.tables import REPEAT, without_limits_note

# Before a release, with RUNNER_TEST_REPEAT=10: 2000, of which 500 warm up. What is counted (descriptors,
# children, threads, cgroups, files) leaks at each launch or never: a few hundred launches show it.
LAUNCHES = 400 * min(REPEAT, 5)
# In these launches caches fill, lazy imports run and the allocator reaches its size.
WARM_UP = 200 if REPEAT == 1 else 500
# How much memory may grow over all launches after that. With 2000 launches it is 400 bytes each, about one
# leaked object with its dict; the smallest leaked descriptor object keeps a page of buffers. With 400
# launches it is 3 KB each, and the number of objects is the finer measure.
RSS_SLACK_BYTES = 600 << 10
# Objects of the interpreter: tables that double when full, and free lists. Half an object per launch.
OBJECTS_SLACK = (LAUNCHES - WARM_UP) // 2
# All of root's runners share /var/cache/runner: a few new files may be others', one per launch is a leak.
SHARED_SLACK = 200
MINUTES = 60.0
# Calls of all contracts together, and how many of them run at once. RUNNER_SOAK_CALLS=1000 is a short run.
CALLS = int(os.environ.get("RUNNER_SOAK_CALLS", "10000"))
AT_ONCE = 32
# Python's objects stay as many, within 3000. Memory is what the allocators do not give back: of 10,000 calls
# the host's grows by 7 MB, most of it in the first 4000. So the second half is flat.
MIXED_OBJECTS_SLACK = 5000
MIXED_SLACK_BYTES = 12 << 20
SECOND_HALF_SLACK_BYTES = 4 << 20
_BY_CLOCK = re.compile(r"within \d+\w+;|did not run after|was not finished after")

pytestmark = [pytest.mark.machine, pytest.mark.bound(20 * MINUTES), pytest.mark.broad]

MANIFEST = nexo("soak", "/usr/bin/true") + SANDBOX + 'fs_write_paths = ["${state_dir}"]\n[plugin.limits]\n'
# Every limit for which the runner needs a cgroup, a descriptor, a timer or a file.
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


class Resources(TypedDict):
    """The resources of a process between two launches."""

    fds: list[str]
    threads: int
    children: list[int]  # zombies included
    cgroups: list[str]
    rss: int
    objects: int
    files: list[str]  # in directories that only this caller uses
    shared: list[str]  # in directories where others make files too


def launch(manifest: str, state_dir: str) -> int:
    """Launch once, as `runner exec` does. Returns its exit status."""
    import os
    import time

    from runner.cli.shared.launching import CommandLineHost
    from runner.launch.orders import watch_caller
    from runner.launch.run import run
    from runner.launch.stages import Invocation
    from runner.launch.verdict import judge

    own = [os.dup(fd) for fd in (0, 1)]  # `runner exec` closes them, but here more launches follow
    with watch_caller() as caller:
        host = CommandLineHost()
        host.caller = caller
        invocation = Invocation(manifest, state_dir=state_dir)
        ended = run(invocation, os.environ, time.monotonic(), host)
    for fd, copy in enumerate(own):
        os.dup2(copy, fd)
        os.close(copy)
    return judge(ended.end, ended.started.planned.grant.limits)[1]


def look(places: list[str], shared: list[str]) -> Resources:
    """The resources that this process has now."""
    import contextlib
    import gc
    import os
    import sys

    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts

    gc.collect()
    # The interpreter's type cache has 4096 entries. A name that is looked up as a new string each time, as
    # `case` does with a class, takes a new entry each time until the cache is full.
    sys._clear_type_cache()
    children = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", "rb") as file:
            children += [int(word) for word in file.read().split()]
    cgroups = []
    for site in survey(read_mounts()).sites:
        for name in os.listdir(site.directory):
            # The leaf that a runner itself moves to (v2) stays as long as the runner lives.
            if name.startswith(f"runner-{os.getpid()}-") and not name.endswith("-self"):
                cgroups.append(f"{site.directory}/{name}")
    fds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
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
) -> list[Resources]:
    """Resources after the first `warm_up` launches, and after all. `leaking`: leak one of each per launch."""
    import json
    import os
    import threading
    from contextlib import ExitStack

    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    held: list[str] = []  # as text, so that the first result adds no objects to the second
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
            # The first launch runs without the cache, so that everything is imported. Later the launches of
            # others could push our entries out of root's cache.
            os.environ["RUNNER_CACHE"] = "off" if number == 1 else "on"
            status = launch(manifest, state_dir)
            if status != 0:
                raise SystemExit(f"launch {number} ended with {status}")
            if leaking:
                leak(number)
            if number in (warm_up, launches):
                held.append(json.dumps(look(places, shared)))
    return [json.loads(each) for each in held]


def grown(before: Resources, after: Resources, rss: int, objects: int, shared: int) -> dict[str, str]:
    """The resources that grew by more than their slack, by name, with examples."""
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
    """Not below the caller's home, which the uids of root's plugins cannot enter."""
    return str(caller.home.parent / "state" / "soak")


def places(caller: Caller) -> tuple[list[str], list[str]]:
    """Directories where files could pile up: the caller's own, and those it shares."""
    own = [str(caller.home), str(caller.home.parent / "state")]
    return own, ["/run/runner", "/var/lib/runner", "/var/cache/runner"] if caller.uid == 0 else ["/dev/shm"]


@pytest.mark.usefixtures("machine_as_before")
def test_many_launches_leave_nothing_behind(runner_as: Caller, manifest: Path) -> None:
    _make_state_parent(runner_as)
    own, shared = places(runner_as)
    args = (str(manifest), state_dir(runner_as), WARM_UP, LAUNCHES, own, shared)
    before, after = elsewhere.run(runner_as, soak, *args, using=(launch, look), timeout=60 * MINUTES)
    assert before["files"], "no files were found"
    assert grown(before, after, RSS_SLACK_BYTES, OBJECTS_SLACK, SHARED_SLACK) == {}


@pytest.mark.usefixtures("machine_as_before")
def test_leaks_are_found(runner_as: Caller, manifest: Path) -> None:
    """The soak test itself can fail: here each launch leaks one of each."""
    _make_state_parent(runner_as)
    own, shared = places(runner_as)
    args = (str(manifest), state_dir(runner_as), 10, 30, own, shared, True)
    before, after = elsewhere.run(runner_as, soak, *args, using=(launch, look), timeout=10 * MINUTES)
    found = grown(before, after, RSS_SLACK_BYTES, 20, 10)
    wanted = {"fds", "threads", "children", "rss", "objects", "files", "shared"}
    assert set(found) - {"cgroups"} == wanted, found
    # An ordinary user without delegation cannot make cgroups.
    assert ("cgroups" in found) == _makes_groups(runner_as)


@pytest.mark.usefixtures("machine_as_before")
def test_runners_side_by_side_leave_nothing_behind(runner_as: Caller, manifest: Path) -> None:
    """Eight at a time, with one state directory. They sweep while others make their cgroups."""
    _make_state_parent(runner_as)
    pids: set[int] = set()
    lock = threading.Lock()

    def one(number: int) -> tuple[int, str]:
        process = runner_as.start("exec", "--state-dir", state_dir(runner_as), manifest)
        with lock:
            pids.add(process.pid)
        with process:
            _, err = process.communicate(timeout=5 * MINUTES)
        said = err.decode(errors="replace")
        return process.returncode, said if _makes_groups(runner_as) else without_limits_note(said)

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(one, range(64 * REPEAT)))
    assert [end for end in ends if end != (0, "")] == []
    assert _groups_of(pids) == []


class Sample(TypedDict):
    """What the runner's processes have after so many calls, with one plugin running and none being called."""

    calls: int
    processes: list[str]  # names, of the whole tree
    rss: dict[str, int]  # of each process of the runner, by name
    objects: int  # of the host's interpreter
    pss: int  # of all these together
    fds: dict[str, int]
    threads: dict[str, int]
    cgroups: int
    mounts: int


def sample(calls: int) -> Sample:
    """Look at this process and at everything below it."""
    import contextlib
    import gc
    import os
    import sys

    from sandbox.cell.cell import descendants
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts

    gc.collect()
    sys._clear_type_cache()
    names: dict[int, str] = {os.getpid(): "host"}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="ascii") as file:
            names[pid] = file.read().strip()
    own = {
        pid: name for pid, name in names.items() if name in ("host", "runner-forksrv") or "monitor" in name
    }
    found: dict[str, dict[str, int]] = {"rss": {}, "fds": {}, "threads": {}}
    pss = 0
    for pid, name in own.items():
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in list(file)[1:]}
        found["rss"][name] = found["rss"].get(name, 0) + sizes["Rss:"]
        pss += sizes["Pss:"]
        for kind, folder in (("fds", "fd"), ("threads", "task")):
            found[kind][name] = found[kind].get(name, 0) + len(os.listdir(f"/proc/{pid}/{folder}"))
    marks = tuple(f"runner-{pid}-" for pid in own)
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mounts = list(file)
    return {
        "calls": calls,
        "processes": sorted(names.values()),
        "rss": found["rss"],
        "objects": sys.getallocatedblocks(),
        "pss": pss,
        "fds": found["fds"],
        "threads": found["threads"],
        "cgroups": sum(
            name.startswith(marks)
            for site in survey(read_mounts()).sites
            for name in os.listdir(site.directory)
        ),
        "mounts": sum(any(word in mount for word in ("runner", "bwrap", "nsfs", "/rt-")) for mount in mounts),
    }


def soak_with_calls(
    shelf: list[tuple[str, str, str, dict[str, Any]]], calls: int, at_once: int, leaking: bool = False
) -> tuple[dict[str, dict[str, int]], list[Sample]]:
    """Call the plugins of the shelf by turns: name, path, tool, input. Returns how often each had which
    outcome, and a sample after each tenth of the calls. `leaking`: leak one of each per call."""
    import os
    from itertools import count

    import trio

    from runner.exceptions import PluginError, PluginFailure
    from runner.lifecycle.exceptions import Overloaded
    from runner.lifecycle.spec import Spec
    from runner.lifecycle.supervisor import Supervisor, open_supervisor

    outcomes: dict[str, dict[str, int]] = {name: {} for name, *_ in shelf}
    samples: list[Sample] = []
    forgotten: list[object] = []
    numbers = count()

    async def call_one(supervisor: Supervisor, number: int) -> None:
        name, _, tool, given = shelf[number % len(shelf)]
        while True:
            code = "ok"
            try:
                await supervisor.call(name, tool, dict(given))
            except Overloaded:  # by a plugin that takes few calls at once: an outcome, and called again
                code = "overloaded"
            except (PluginError, PluginFailure) as failure:
                code = f"{type(failure).__name__}: {failure}"
            outcomes[name][code] = outcomes[name].get(code, 0) + 1
            if code != "overloaded":
                return
            await trio.sleep(0.02)

    async def call_until(supervisor: Supervisor, end: int) -> None:
        while (number := next(numbers)) < end:
            await call_one(supervisor, number)
            if leaking:
                os.open("/dev/null", os.O_RDONLY)
                forgotten.append([os.urandom(1) * (256 << 10), *([] for _ in range(200))])

    async def main() -> None:
        nonlocal numbers
        async with open_supervisor() as supervisor:
            for name, path, _, _ in shelf:
                supervisor.add(Spec(name, path))
            for tenth in range(1, 11):
                numbers = count(calls * (tenth - 1) // 10)
                async with trio.open_nursery() as nursery:
                    for _ in range(at_once):
                        nursery.start_soon(call_until, supervisor, calls * tenth // 10)
                # The first plugin keeps running, and with it the monitor that started all others.
                for name, *_ in shelf[1:]:
                    await supervisor.stop(name)
                wanted = len(samples[0]["processes"]) if samples else 0
                while True:  # the last processes of a plugin that was stopped end on their own time
                    taken = sample(calls * tenth // 10)
                    if not samples or len(taken["processes"]) <= wanted:
                        break
                    await trio.sleep(0.05)
                samples.append(taken)
                for name, *_ in shelf[1:]:
                    await supervisor.start(name)

    trio.run(main)
    return outcomes, samples


def grown_in_calls(first: Sample, last: Sample, slack: int) -> dict[str, object]:
    """What the last sample has more than the first, by name. `slack`: bytes of memory."""
    found: dict[str, object] = {}
    if last["processes"] != first["processes"]:
        found["processes"] = (first["processes"], last["processes"])
    if sum(last["threads"].values()) > sum(first["threads"].values()) + AT_ONCE:  # trio keeps idle ones
        found["threads"] = (first["threads"], last["threads"])
    for name in ("fds", "cgroups", "mounts"):
        if last[name] != first[name]:
            found[name] = (first[name], last[name])
    if last["objects"] > first["objects"] + MIXED_OBJECTS_SLACK:
        found["objects"] = (first["objects"], last["objects"])
    for name, size in last["rss"].items():
        if size > first["rss"].get(name, 0) + slack:
            found[f"rss of {name}"] = (first["rss"].get(name), size)
    if last["pss"] > first["pss"] + slack:
        found["pss"] = (first["pss"], last["pss"])
    return found


@pytest.fixture
def shelf(plugin_dir: Path) -> list[tuple[str, str, str, dict[str, Any]]]:
    """One plugin of each contract. The first is of a contract whose plugin lives between calls."""
    contracts = sorted(SHARES, key=lambda name: name != "nexo")
    made = [put_example(contract, f"{contract}0", plugin_dir) for contract in contracts]
    return [(each.name, str(plugin_dir / f"{each.contract}0"), each.tool, dict(each.input)) for each in made]


@pytest.mark.usefixtures("machine_as_before")
@pytest.mark.bound(60 * MINUTES)
def test_many_calls_of_all_contracts_leave_nothing_behind(
    runner_as: Caller, shelf: list[tuple[str, str, str, dict[str, Any]]]
) -> None:
    outcomes, samples = elsewhere.run(
        runner_as, soak_with_calls, shelf, CALLS, AT_ONCE, using=(sample,), timeout=60 * MINUTES
    )
    # Shown by --log-cli-level=info.
    logging.info("%s\n%s", outcomes, "\n".join(map(str, samples)))
    for name, counts in outcomes.items():
        # A contract may have clocks of its own, which a busy machine meets. That is an outcome too.
        others = [told for told in counts if told not in ("ok", "overloaded") and not _BY_CLOCK.search(told)]
        assert not others, f"{name}: {counts}"
        assert sum(counts.values()) - counts.get("overloaded", 0) >= CALLS // len(shelf)
        assert counts["ok"] > CALLS // len(shelf) // 2
    assert grown_in_calls(samples[0], samples[-1], MIXED_SLACK_BYTES) == {}
    assert grown_in_calls(samples[len(samples) // 2], samples[-1], SECOND_HALF_SLACK_BYTES) == {}


@pytest.mark.usefixtures("machine_as_before")
def test_a_leak_in_calls_is_found(
    runner_as: Caller, shelf: list[tuple[str, str, str, dict[str, Any]]]
) -> None:
    _, samples = elsewhere.run(runner_as, soak_with_calls, shelf, 60, 8, True, using=(sample,))
    assert set(grown_in_calls(samples[0], samples[-1], 4 << 20)) >= {"fds", "rss of host", "objects"}


@pytest.mark.needs("root")
def test_a_leftover_cgroup_is_found() -> None:
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
    """The cgroups that runners with these pids have made."""
    marks = tuple(f"runner-{pid}-" for pid in pids)
    return [
        os.path.join(folder, name)
        for folder, folders, _ in os.walk("/sys/fs/cgroup")
        for name in folders
        if name.startswith(marks) and not name.endswith("-self")
    ]
