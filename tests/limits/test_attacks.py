"""A plugin that would like more than it was given: no way to its cgroups, none to its limits.

Each attempt has a control: the same where it must work, so that what fails inside does not fail everywhere.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import SYSTEM_PATH, Caller, descendants
from tests.limits.cage import BY_CGROUP, SH, Box, by_cgroup, held, policy, rlimit_of
from tests.tables import wait_for

OK = ("ok", "run", "")
LIMITS = {"memory": "64M", "pids": 16, "cpu": 1, "cpu_time": "10s"}

# What there is of cgroups to be seen, and what comes of mounting them oneself.
SEEN = """
import ctypes, errno, json, os
found = {}
found["mounted"] = [l.split()[4] for l in open("/proc/self/mountinfo") if " - cgroup" in l]
found["sys"] = os.path.lexists("/sys/fs/cgroup")
found["own"] = sorted({line.rstrip().split(":", 2)[2] for line in open("/proc/self/cgroup")})
found["others"] = []
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        found["others"] += [line.rstrip().split(":", 2)[2] for line in open(f"/proc/{pid}/cgroup")]
    except OSError:
        pass
found["others"] = sorted(set(found["others"]))
"""
MOUNTED = """
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("/tmp/mine", exist_ok=True)
for kind in (b"cgroup2", b"cgroup"):
    done = libc.mount(b"none", b"/tmp/mine", kind, 0, b"pids" if kind == b"cgroup" else None)
    found["mount " + kind.decode()] = "done" if done == 0 else errno.errorcode[ctypes.get_errno()]
"""
TOLD = "print(json.dumps(found))\n"

SCORE = """
import errno, json
path = "/proc/self/oom_score_adj"
def write(value):
    try:
        with open(path, "w") as file:
            file.write(str(value))
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
found = {"before": int(open(path).read())}
found["higher"] = write(1000)
found["lower"] = write(found["before"] - 1)
found["lowest"] = write(-1000)
found["after"] = int(open(path).read())
print(json.dumps(found))
"""

# As soon as there is anything at all: a session of its own, and one more below it, before the first word.
AT_ONCE = SH + "setsid sleep 1000 &\nsetsid sh -c 'sleep 1000 & sleep 1000' &\necho ready\nread word\n"


def outside(caller: Caller, code: str) -> dict[str, object]:
    """The same program, as the same caller, without any cage."""
    done = subprocess.run(
        [*caller.prefix, "/usr/bin/python3", "-I", "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": SYSTEM_PATH},
        check=True,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_there_are_no_cgroups_to_be_seen(box: Box) -> None:
    result = box.run(SEEN + MOUNTED + TOLD, limits=LIMITS)
    assert result.outcome == OK, result.err
    found = result.told
    assert found["mounted"] == [] and found["sys"] is False
    assert found["mount cgroup2"] != "done" and found["mount cgroup"] != "done"
    # A namespace of its own: where it is, is all there is. Its name would tell of the host.
    assert found["own"] == ["/"]
    assert set(found["others"]) <= {"/"}
    control = outside(box.caller, SEEN + TOLD)
    assert control["sys"] == Path("/sys/fs/cgroup").exists()
    assert control["mounted"] or not any(by_cgroup(box, name) for name in BY_CGROUP)


@pytest.mark.parametrize("access", ["read", "write"])
def test_a_manifest_that_asks_for_them(box: Box, access: str) -> None:
    allowing = policy(read=("*",), write=("*", "${state_dir}"))
    for path in ("/sys/fs/cgroup", "/sys/fs", "/usr/share" if access == "read" else "${state_dir}"):
        asked = {"read": (path,) if access == "read" else (), "write": (path,) if access == "write" else ()}
        result = box.run("print('ran')", policy=allowing, limits=LIMITS, **asked)  # type: ignore[arg-type]
        if path.startswith("/sys"):
            assert (result.status, result.out) == (126, "")
            assert result.outcome == ("manifest_invalid", "manifest", "denylist")
        else:  # the control: under this policy one may ask for anything else
            assert (result.outcome, result.out) == (OK, "ran\n")


def test_it_stays_the_first_to_go(box: Box) -> None:
    """When the whole machine runs out of memory, a plugin goes before anything of the host's."""
    found = box.run(SCORE, limits=LIMITS).told
    assert found["before"] == found["after"] >= 500
    assert {found[key] for key in ("lower", "lowest", "higher")} <= {"EROFS", "EACCES", "EPERM"}
    control = outside(box.caller, SCORE)
    assert control["higher"] == "done", "who is not in a cage may at least be more modest"


def test_all_of_it_is_in_from_the_beginning(box: Box) -> None:
    """bwrap, the cage's init, the program and whatever it has started at once: by nobody's later doing."""
    with box.running(AT_ONCE, limits=LIMITS) as running:
        family = running.family
        cage = family["bwrap"]
        assert wait_for(lambda: len(_below(cage)) == 6), "init, the program, and what it has started"
        below = {cage, *_below(cage)}
        assert {family["bwrap_init"], family["program"]} < below
        for name in (name for name in LIMITS if by_cgroup(box, name)):
            controller = "cpuacct" if name == "cpu_time" else name
            group = running.group("" if held(box, name) == "cgroup v2" else controller)
            assert group.name.startswith(f"runner-{running.process.pid}-")
            members = {int(word) for word in (group / "cgroup.procs").read_text().split()}
            assert members == below, f"{name}: not all, or others, are in {group}"
        places = {Path(f"/proc/{pid}/cgroup").read_text() for pid in below}
        assert len(places) == 1
        # The cell's init ends the others. It must be neither slowed down with them nor killed for them.
        init = Path(f"/proc/{family['init']}/cgroup").read_text()
        assert (init in places) == (not any(by_cgroup(box, name) for name in LIMITS))
        for name, limit in (("memory", "Max data size"), ("pids", "Max processes")):
            if held(box, name).startswith("RLIMIT"):
                (value,) = {rlimit_of(pid, limit) for pid in below}
                assert value is not None
        running.say("enough")
    assert running.result is not None and running.result.outcome == OK


def _below(pid: int) -> set[int]:
    found: set[int] = set()
    ends = [pid]
    while ends:
        each = ends.pop()
        try:
            children = Path(f"/proc/{each}/task/{each}/children").read_text().split()
        except OSError:  # gone since it was listed
            continue
        found |= {int(child) for child in children}
        ends += [int(child) for child in children]
    return found


def test_nothing_of_the_limits_is_open(box: Box) -> None:
    """The doors through which it joined, and the locks on its groups, are not for the plugin."""
    code = "import json, os\nprint(json.dumps({fd: os.readlink(f'/proc/self/fd/{fd}') for fd in range(64)\n"
    code += "    if os.path.lexists(f'/proc/self/fd/{fd}')}))"
    result = box.run(code, limits={**LIMITS, "deadline": "1m", "open_files": 64})
    assert sorted(result.told) == ["0", "1", "2"]
    with box.running(AT_ONCE, limits=LIMITS) as running:
        for pid in (running.family["bwrap_init"], running.family["program"]):
            opened = {path.name: os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
            assert "0" in opened and not [path for path in opened.values() if "cgroup" in path]
        init = Path(f"/proc/{running.family['init']}/fd").iterdir()
        locks = [path for path in map(os.readlink, init) if "cgroup" in path]
        assert bool(locks) == any(by_cgroup(box, name) for name in LIMITS)
        running.say("enough")


def test_a_new_user_namespace_is_no_new_limit(box: Box) -> None:
    """Where processes are counted by user namespace, one more of them would be one more limit."""
    code = SH + "unshare --user true && echo made\nunshare --user --map-root-user true && echo made\nexit 0\n"
    result = box.run(code, limits=LIMITS)
    assert (result.outcome, result.out) == (OK, "")
    control = subprocess.run([*box.caller.prefix, "unshare", "--user", "true"], check=False)
    if control.returncode:
        pytest.skip("the host itself lets nobody make one")


def test_processes_that_were_left_are_not_left(box: Box) -> None:
    """The program has ended: so has all that it started, before the runner returned."""
    before = descendants()
    result = box.run(AT_ONCE.replace("read word\n", ""), limits=LIMITS)
    assert result.outcome == OK and result.out == "ready\n"
    assert descendants() - before == set()
    assert box.groups_left() == []
