"""A plugin cannot reach its cgroups or raise its limits.

Each attempt has a control: the same attempt where it must work.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import SYSTEM_PATH, Caller, descendants
from tests.limits.cage import BY_CGROUP, SH, Box, by_cgroup, enforced_by, policy, rlimit_of, whole_group
from tests.tables import one_case, wait_for

OK = ("ok", "run", "")
LIMITS = {"memory": "64M", "pids": 16, "cpu": 1, "cpu_time": "10s"}

# Lists the cgroups that are visible. MOUNTED tries to mount cgroup file systems.
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

# Starts processes in sessions of their own, one of them with a child, before it prints "ready".
AT_ONCE = SH + "setsid sleep 1000 &\nsetsid sh -c 'sleep 1000 & sleep 1000' &\necho ready\nread word\n"


def outside(caller: Caller, code: str) -> dict[str, object]:
    """Run the same program as the same caller, without a cage."""
    done = subprocess.run(
        [*caller.prefix, "/usr/bin/python3", "-I", "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": SYSTEM_PATH},
        check=True,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_the_plugin_sees_no_cgroups(box: Box) -> None:
    result = box.run(SEEN + MOUNTED + TOLD, limits=LIMITS)
    assert result.outcome == OK, result.err
    found = result.printed
    assert found["mounted"] == [] and found["sys"] is False
    assert found["mount cgroup2"] != "done" and found["mount cgroup"] != "done"
    # In a cgroup namespace the plugin sees its own cgroup as "/". The real path would describe the host.
    assert found["own"] == ["/"]
    assert set(found["others"]) <= {"/"}
    control = outside(box.caller, SEEN + TOLD)
    assert control["sys"] == Path("/sys/fs/cgroup").exists()
    assert control["mounted"] or not any(by_cgroup(box, name) for name in BY_CGROUP)


@one_case("access", ["read", "write"])
def test_a_manifest_that_asks_for_cgroups_is_refused(box: Box, access: str) -> None:
    allowing = policy(read=("*",), write=("*", "${state_dir}"))
    for path in ("/sys/fs/cgroup", "/sys/fs", "/usr/share" if access == "read" else "${state_dir}"):
        asked = {"read": (path,) if access == "read" else (), "write": (path,) if access == "write" else ()}
        result = box.run("print('ran')", policy=allowing, limits=LIMITS, **asked)  # type: ignore[arg-type]
        if path.startswith("/sys"):
            assert (result.status, result.out) == (126, "")
            assert result.outcome == ("manifest_invalid", "manifest", "denylist")
        else:  # the control: this policy grants any other path
            assert (result.outcome, result.out) == (OK, "ran\n")


def test_a_plugin_cannot_lower_its_oom_score(box: Box) -> None:
    """When the machine runs out of memory, the kernel kills a plugin before processes of the host."""
    found = box.run(SCORE, limits=LIMITS).printed
    assert found["before"] == found["after"] >= 500
    assert {found[key] for key in ("lower", "lowest", "higher")} <= {"EROFS", "EACCES", "EPERM"}
    control = outside(box.caller, SCORE)
    assert control["higher"] == "done", "without a cage a process may raise its own score"


def test_every_process_starts_in_the_cgroup(box: Box) -> None:
    """bwrap, the cage's init, the program and its children start in the cgroup. Nothing is moved later."""
    with box.running(AT_ONCE, limits=LIMITS) as running:
        family = running.family
        cage = family["bwrap"]
        assert wait_for(lambda: len(_below(cage)) == 6), "init, the program and its children"
        below = {cage, *_below(cage)}
        assert {family["bwrap_init"], family["program"]} < below
        for name in (name for name in LIMITS if by_cgroup(box, name)):
            controller = "cpuacct" if name == "cpu_time" else name
            group = running.group("" if enforced_by(box, name) == "cgroup v2" else controller)
            assert whole_group(group).name.startswith(f"runner-{running.process.pid}-")
            members = {int(word) for word in (group / "cgroup.procs").read_text().split()}
            assert members == below, f"{name}: {group} has other members"
        places = {Path(f"/proc/{pid}/cgroup").read_text() for pid in below}
        assert len(places) == 1
        # The cell's init kills the others. It must not share their cpu quota or be killed with them.
        init = Path(f"/proc/{family['init']}/cgroup").read_text()
        assert (init in places) == (not any(by_cgroup(box, name) for name in LIMITS))
        for name, limit in (("memory", "Max data size"), ("pids", "Max processes")):
            if enforced_by(box, name).startswith("RLIMIT"):
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
        except OSError:  # it ended after it was listed
            continue
        found |= {int(child) for child in children}
        ends += [int(child) for child in children]
    return found


def opened(pid: int) -> dict[str, str]:
    """What the descriptors of a process lead to. It may close some of them meanwhile."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[link.name] = os.readlink(link)
    return found


def test_no_descriptor_of_a_cgroup_is_inherited(box: Box) -> None:
    """The plugin inherits neither the cgroup.procs files it joined through nor the locks on its cgroups."""
    code = "import json, os\nprint(json.dumps({fd: os.readlink(f'/proc/self/fd/{fd}') for fd in range(64)\n"
    code += "    if os.path.lexists(f'/proc/self/fd/{fd}')}))"
    result = box.run(code, limits={**LIMITS, "deadline": "1m", "open_files": 64})
    assert sorted(result.printed) == ["0", "1", "2"]
    with box.running(AT_ONCE, limits=LIMITS) as running:
        for pid in (running.family["bwrap_init"], running.family["program"]):
            found = opened(pid)
            assert "0" in found and not [path for path in found.values() if "cgroup" in path]
        locks = [path for path in opened(running.family["init"]).values() if "cgroup" in path]
        assert bool(locks) == any(by_cgroup(box, name) for name in LIMITS)
        running.say("enough")


def test_a_plugin_cannot_make_a_user_namespace(box: Box) -> None:
    """RLIMIT_NPROC counts per user namespace: a new namespace would give the plugin a new limit."""
    code = SH + "unshare --user true && echo made\nunshare --user --map-root-user true && echo made\nexit 0\n"
    result = box.run(code, limits=LIMITS)
    assert (result.outcome, result.out) == (OK, "")
    control = subprocess.run([*box.caller.prefix, "unshare", "--user", "true"], check=False)
    if control.returncode:
        pytest.skip("the host does not allow user namespaces")


def test_background_processes_end_with_the_program(box: Box) -> None:
    """When the program ends, all processes it started have ended before the runner returns."""
    before = descendants()
    result = box.run(AT_ONCE.replace("read word\n", ""), limits=LIMITS)
    assert result.outcome == OK and result.out == "ready\n"
    assert descendants() - before == set()
    assert box.groups_left() == []
