"""`runner doctor` on this machine as it is, and on this machine made worse in every way we can make it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.build import build_version
from runner.cli import doctor
from sandbox.doctor.finding import Finding
from sandbox.doctor.probes import REQUIRED
from sandbox.limits.cgroup_survey import survey
from sandbox.paths.mounts import read_mounts
from tests.conftest import SYSTEM_PATH, Caller
from tests.manifests import nexo
from tests.sandbox.doctor.groups import in_groups_of_their_own, made_in, with_read_only_groups
from tests.tables import one_case, wait_for

REAL = shutil.which("bwrap", path=SYSTEM_PATH) or "/usr/bin/bwrap"

# What the scenes below have in common. `then_doctor` ends in the doctor, in a fresh interpreter.
_STAGE = """
import ctypes, os, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER = 0x00020000, 0x10000000

def must(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def mount(source, target, kind, flags):
    must(libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None))

def then_doctor():
    os.execv(sys.executable, [sys.executable, "-m", "runner", "doctor", *sys.argv[1:]])

def seccomp_filter(answer):
    # Like a container engine's: clone and unshare may not make user namespaces.
    clone, unshare = {"x86_64": (56, 272), "aarch64": (220, 97)}[os.uname().machine]
    load, equal, bits, ret = 0x20, 0x15, 0x45, 0x06
    program = [
        (load, 0, 0, 0), (equal, 1, 0, clone), (equal, 0, 3, unshare),
        (load, 0, 0, 16), (bits, 0, 1, NEWUSER), (ret, 0, 0, answer),
        (ret, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *i) for i in program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    must(libc.prctl(38, 1, 0, 0, 0))
    must(libc.prctl(22, 2, head, 0, 0))

def user_namespace(uid_map):
    ready_r, ready_w = os.pipe()
    done_r, done_w = os.pipe()
    child = os.fork()
    if child:
        os.close(ready_w)
        os.read(ready_r, 1)
        for kind in ("uid", "gid"):
            if uid_map.split()[2] == "1":
                with open(f"/proc/{child}/setgroups", "w") as file:
                    file.write("deny")
            with open(f"/proc/{child}/{kind}_map", "w") as file:
                file.write(uid_map)
        os.write(done_w, b"x")
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    must(libc.unshare(NEWUSER))
    os.write(ready_w, b"x")
    os.read(done_r, 1)
"""


def examined(
    caller: Caller, scene: str = "", env: dict[str, str] | None = None, arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """The doctor's document, after `scene` has changed the world around it."""
    code = f"{_STAGE}\n{textwrap.dedent(scene)}\nthen_doctor()\n"
    done = subprocess.run(
        [*caller.prefix, *caller.python, "-c", code, "--format", "json", *arguments],
        env={**caller.environ, **(env or {})},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    assert (result["schema"], result["version"]) == ("runner.doctor.v1", build_version())
    assert result["policy_digest"].startswith("sha256:") and len(result["policy_digest"]) == 7 + 64
    assert done.returncode == (0 if result["ok"] else 22)
    return result


def finding(result: dict[str, Any], layer: str) -> dict[str, str]:
    (found,) = [each for each in result["findings"] if each["layer"] == layer]
    assert set(found) == {"layer", "status", "summary", "detail", "remedy", "cause"}
    return dict(found)


# --- as it is -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_this_machine_enforces_the_default_policy(runner_as: Caller) -> None:
    result = examined(runner_as)
    assert result["ok"] is True, result["unmet"]
    statuses = {each["layer"]: each["status"] for each in result["findings"]}
    expected = dict.fromkeys(REQUIRED - {"cage", "fresh_proc"}, "ok")
    if runner_as.uid != 0:
        expected["uid_drop"] = "info"
    assert {layer: statuses.get(layer) for layer in expected} == expected


@pytest.mark.usefixtures("nothing_left")
def test_nothing_is_left_when_the_doctor_is_killed(runner_as: Caller) -> None:
    chance = random.Random(7)
    for _ in range(20):
        with runner_as.start("doctor", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                process.wait(chance.uniform(0.05, 0.25))
            except subprocess.TimeoutExpired:
                process.kill()


# --- limits --------------------------------------------------------------------------------------------

LIMITS = tuple(f"{name}_limit" for name in ("memory", "pids", "cpu", "cpu_time", "io"))


def held(result: dict[str, Any]) -> dict[str, str]:
    return {name: finding(result, name)["status"] for name in LIMITS}


@pytest.mark.needs("root")
@pytest.mark.usefixtures("nothing_left")
def test_limits_are_tried_and_no_group_is_left(runner_as: Caller) -> None:
    """In groups that belong to the caller: who is not root can do as much there as root."""
    with in_groups_of_their_own(runner_as) as (caller, _):
        result = examined(caller)
    assert result["unmet"] == []
    promised = survey(read_mounts())
    for name in ("memory", "pids", "cpu"):
        site = promised.site(name)
        if site is not None and site.version == 1:  # below a group of v2, others would have to be handed down
            found = finding(result, f"{name}_limit")
            assert (found["status"], found["summary"]) == ("ok", "held by cgroup v1")
    assert finding(result, "cpu_time_limit")["status"] == "ok"


def _members(procs: Path) -> str:
    try:
        return procs.read_text()
    except OSError:  # the group is removed
        return ""


@pytest.mark.needs("root")
def test_what_a_killed_doctor_left_is_swept_by_the_next(runner_as: Caller) -> None:
    chance = random.Random(11)
    with in_groups_of_their_own(runner_as) as (caller, groups):
        for _ in range(20):
            with caller.start("doctor", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                try:
                    process.wait(chance.uniform(0.05, 0.25))
                except subprocess.TimeoutExpired:
                    process.kill()
        # What it leaves, in case chance was kind. Of cpuacct alone it makes groups only without a v2 tree.
        for group in (group for group in groups if group.parent.name != "cpuacct"):
            (group / "runner-1-1-0").mkdir()
            runner_as.give(group / "runner-1-1-0")
        # A process that was killed holds its group until it has ended.
        left = [path for group in groups for path in group.rglob("cgroup.procs")]
        assert wait_for(lambda: not any(map(_members, left)))
        examined(caller)
        assert [path for group in groups for path in made_in(group)] == []


@pytest.mark.needs("root")
def test_groups_mounted_read_only_are_told(runner_as: Caller) -> None:
    """As Docker does it: the most common reason why root cannot."""
    result = examined(with_read_only_groups(runner_as))
    found = finding(result, "memory_limit")
    assert "is mounted read-only" in found["summary"] and found["cause"] == "read_only"
    assert "ProtectControlGroups=no" in found["remedy"] and "container" in found["remedy"]
    if runner_as.uid == 0:
        assert result["unmet"] == ["memory_limit", "pids_limit"]
        assert 'mode = "prefer" under [limits.memory]' in found["remedy"]
        assert "docker run --memory" in found["remedy"] and "is not started" in found["detail"]
    else:
        assert result["unmet"] == []
        assert "RLIMIT_DATA (for each process separately" in found["detail"]
    assert {status for name, status in held(result).items() if name[:3] not in ("mem", "pid")} == {"info"}
    assert finding(result, "cgroup_kill")["status"] == finding(result, "cgroup_freeze")["status"] == "info"


@pytest.mark.needs("root")
def test_groups_that_cannot_be_seen_are_told(runner_as: Caller) -> None:
    hidden = 'mount -t tmpfs none /sys/fs/cgroup; exec "$@"'
    prefix = ("/usr/bin/unshare", "--mount", "/bin/sh", "-ec", hidden, "sh", *runner_as.prefix)
    result = examined(replace(runner_as, prefix=prefix))
    assert result["unmet"] == (["memory_limit", "pids_limit"] if runner_as.uid == 0 else [])
    assert set(held(result).values()) <= {"missing", "degraded", "info"}


@pytest.mark.needs("root")
def test_a_promise_that_does_not_hold_is_found_out(runner_as: Caller) -> None:
    """All looks well to the survey; the attempt fails. What works without is not accused."""
    unified = survey(read_mounts()).unified
    if unified is None or unified.controllers:
        pytest.skip("needs a cgroup v2 tree without controllers")
    with in_groups_of_their_own(runner_as) as (caller, groups):
        own = next(group for group in groups if str(group).startswith(unified.directory))
        assert finding(examined(caller), "cgroup_freeze")["status"] == "ok"  # the control
        (own / "cgroup.max.descendants").write_text("0")
        result = examined(caller)
        assert (
            finding(result, "cgroup_freeze")["status"] == finding(result, "cgroup_kill")["status"] == "info"
        )
        assert finding(result, "memory_limit")["status"] == "ok"
        counted = finding(result, "cpu_time_limit")
        assert (counted["status"], "cgroup v1" in counted["summary"]) == ("ok", True)  # cpuacct


@pytest.mark.needs("root")
def test_a_disk_limit_of_the_policy_needs_a_freezer(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    caller = with_read_only_groups(runner_as)
    policy = write_file(plugin_dir / "policy.toml", 'version = 1\n[limits.disk]\ndefault = "1G"\n')
    found = finding(examined(caller, arguments=("--policy", str(policy))), "cgroup_freeze")
    assert (found["status"], "SIGSTOP" in found["summary"]) == ("degraded", True)
    assert "Delegate=yes" in found["remedy"]


# --- bwrap ----------------------------------------------------------------------------------------------


@pytest.fixture
def bwrap_copy() -> Iterator[Path]:
    """A bwrap of our own, in a place that only root can change."""
    folder = Path(f"/var/lib/rt-doctor-{os.getpid()}")
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    try:
        shutil.copyfile(REAL, folder / "bwrap")
        (folder / "bwrap").chmod(0o755)
        yield folder / "bwrap"
    finally:
        shutil.rmtree(folder)


@pytest.mark.needs("root")
def test_a_bwrap_that_cannot_be_trusted_is_refused(runner_as: Caller, bwrap_copy: Path) -> None:
    env = {"RUNNER_BWRAP": str(bwrap_copy)}
    assert examined(runner_as, env=env)["ok"] is True  # the control
    for mode, cause, remedy in ((0o4755, "setuid", "chmod u-s"), (0o757, "writable", "chmod go-w")):
        bwrap_copy.chmod(mode)
        result = examined(runner_as, env=env)
        assert {"bwrap", "cage"} <= set(result["unmet"])
        assert finding(result, "bwrap")["cause"] == cause
        assert remedy in finding(result, "bwrap")["remedy"]


def test_a_missing_bwrap_is_told(runner_as: Caller) -> None:
    result = examined(runner_as, env={"RUNNER_BWRAP": "/nonexistent/bwrap"})
    assert result["unmet"] == ["bwrap", "cage"]
    assert finding(result, "bwrap")["cause"] == "missing"


def test_a_fake_bwrap_on_path_is_never_run(runner_as: Caller, plugin_dir: Path) -> None:
    plugin_dir.chmod(0o777)
    fake = plugin_dir / "bwrap"
    fake.write_text(f"#!/bin/sh\ntouch {plugin_dir}/ran\n")
    fake.chmod(0o755)
    env = {"PATH": f"{plugin_dir}:{SYSTEM_PATH}"}
    subprocess.run(["bwrap"], env=env, check=True)
    assert (plugin_dir / "ran").exists()  # the control: it can be run, and would be seen
    (plugin_dir / "ran").unlink()
    result = examined(runner_as, env=env)
    assert result["ok"] is True
    assert str(plugin_dir) not in finding(result, "bwrap")["summary"]
    assert not (plugin_dir / "ran").exists()


# --- user namespaces refused ----------------------------------------------------------------------------


@pytest.mark.needs("root")
def test_a_user_namespace_with_enough_ids_is_no_obstacle(runner_as_root: Caller) -> None:
    """The control of the sysctl below."""
    result = examined(runner_as_root, 'user_namespace("0 0 65536")')
    assert result["ok"] is True, result


FORBID = 'open("/proc/sys/user/max_user_namespaces", "w").write("0")'


@pytest.mark.needs("root")
def test_the_sysctl_that_forbids_user_namespaces_is_named(runner_as_root: Caller) -> None:
    result = examined(runner_as_root, f'user_namespace("0 0 65536"); {FORBID}')
    assert {"user_namespaces", "pid_namespace", "cage"} == set(result["unmet"])
    found = finding(result, "user_namespaces")
    assert found["cause"] == "sysctl:user.max_user_namespaces"
    assert "sysctl -w user.max_user_namespaces=" in found["remedy"]


@pytest.mark.needs("user")
def test_the_sysctl_is_named_to_an_ordinary_user(runner_as_user: Caller) -> None:
    result = examined(runner_as_user, f'user_namespace(f"0 {{os.getuid()}} 1"); {FORBID}')
    assert "user_namespaces" in result["unmet"]
    assert finding(result, "user_namespaces")["cause"] == "sysctl:user.max_user_namespaces"
    assert "user namespace" in finding(result, "bwrap")["summary"]  # whose owner cannot be known in there


@one_case(
    ("answer", "what"),
    [("0x00050001", "EPERM"), ("0x00050026", "ENOSYS"), ("0x80000000", "SIGSYS")],
    ids=["EPERM", "ENOSYS", "kill"],
)
@pytest.mark.usefixtures("nothing_left")
def test_an_outer_seccomp_filter_is_named(runner_as: Caller, answer: str, what: str) -> None:
    result = examined(runner_as, f"seccomp_filter({answer})")
    assert {"user_namespaces", "pid_namespace", "cage"} == set(result["unmet"])
    found = finding(result, "user_namespaces")
    assert (found["cause"], what in found["summary"]) == ("outer_seccomp", True), found
    assert found["remedy"]


def test_an_outer_seccomp_filter_that_allows_is_not_accused(runner_as: Caller) -> None:
    result = examined(runner_as, "seccomp_filter(0x7FFF0000)")
    assert result["ok"] is True
    assert "runs under a seccomp filter" in finding(result, "surroundings")["summary"]


@pytest.mark.needs("root")
def test_root_without_capabilities_is_told(runner_as_root: Caller) -> None:
    bare = """
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; the exec below does the rest
    """
    result = examined(runner_as_root, bare)
    assert {"uid_drop", "pid_namespace", "cage"} <= set(result["unmet"])
    found = finding(result, "uid_drop")
    assert found["cause"] == "capabilities"
    assert "CAP_SETUID" in found["summary"] and "--cap-add SETUID" in found["remedy"]


@pytest.mark.needs("root")
def test_root_of_a_namespace_without_the_plugins_uids_is_told(runner_as_root: Caller) -> None:
    result = examined(runner_as_root, 'user_namespace("0 0 1")')
    assert {"uid_drop", "pid_namespace", "cage"} == set(result["unmet"])
    assert finding(result, "uid_drop")["cause"] == "unmapped_uid"


@pytest.mark.needs("root")
def test_a_namespace_with_65536_ids_has_other_uids_for_plugins(runner_as_root: Caller) -> None:
    assert "2147418112-2147483647" in finding(examined(runner_as_root), "uid_range")["summary"]  # the control
    result = examined(runner_as_root, 'user_namespace("0 0 65536")')
    assert finding(result, "uid_drop")["summary"].startswith("a process changed to uid 65519")
    assert "61184-65519" in finding(result, "uid_range")["summary"]
    assert finding(result, "uid_pool")["summary"].count("of 2168") == 2


@pytest.mark.needs("root")
def test_a_container_that_masks_proc_is_told(runner_as_root: Caller) -> None:
    private = """
    must(libc.unshare(NEWNS))
    mount("none", "/", None, 16384 | 1 << 18)  # MS_REC | MS_PRIVATE
    """
    assert examined(runner_as_root, private)["ok"] is True  # the control
    masked = f'{textwrap.dedent(private)}\nmount("/dev/null", "/proc/timer_list", None, 4096)  # MS_BIND'
    result = examined(runner_as_root, masked)
    assert result["unmet"] == ["fresh_proc", "pid_namespace", "cage"]
    assert finding(result, "fresh_proc")["cause"] == "container"
    assert "systempaths=unconfined" in finding(result, "fresh_proc")["remedy"]


@pytest.mark.needs("root")
def test_a_chroot_is_told(runner_as_root: Caller, plugin_dir: Path) -> None:
    scene = f"""
    must(libc.unshare(NEWNS))
    mount("none", "/", None, 16384 | 1 << 18)
    new = {str(plugin_dir / "root")!r}
    os.mkdir(new)
    for name in os.listdir("/"):
        old = "/" + name
        if os.path.islink(old):
            os.symlink(os.readlink(old), new + old)
        elif os.path.isdir(old):
            os.mkdir(new + old)
            mount(old, new + old, None, 4096 | 16384)
    os.chroot(new)
    os.chdir("/")
    """
    result = examined(runner_as_root, scene)
    assert {"user_namespaces", "pid_namespace", "cage"} <= set(result["unmet"])
    assert finding(result, "user_namespaces")["cause"] == "chroot"


# --- for people -----------------------------------------------------------------------------------------

FINDINGS = (
    Finding("bwrap", "ok", "/usr/bin/bwrap"),
    Finding("user_namespaces", "missing", "refused", "tried as uid 7", "first line\nsecond line…", "sysctl"),
    Finding("symlinks", "degraded", "unprotected", "", "protect them"),
    Finding("landlock", "info", "ABI 7", "not shown"),
)


def test_text_is_aligned_and_remedies_stand_below() -> None:
    assert doctor.text(FINDINGS, FINDINGS[1:2], "default", True, False).splitlines() == [
        "✓ bwrap            /usr/bin/bwrap",
        "✗ user namespaces  refused",
        "                   tried as uid 7",
        "                   -> first line",
        "                   second line…",
        "! symlinks         unprotected",
        "                   -> protect them",
        "· landlock         ABI 7",
        "",
        "The default policy cannot be enforced here, so no plugin will be started. Missing: user namespaces.",
    ]


def test_a_terminal_without_utf8_gets_ascii() -> None:
    shown = doctor.text(FINDINGS, FINDINGS[1:2], "default", False, False)
    assert shown.isascii()
    assert shown.startswith("ok bwrap            /usr/bin/bwrap\nNO user namespaces  refused\n")
    assert "second line..." in shown


def test_the_verdict_counts_warnings() -> None:
    assert doctor.verdict(FINDINGS[:1], (), "default").endswith("can be enforced here.")
    assert doctor.verdict((FINDINGS[0], FINDINGS[2]), (), "strict").endswith("1 warning above.")
    assert doctor.verdict(FINDINGS, (), "/etc/p.toml").endswith("2 warnings above.")


@pytest.mark.parametrize(("encoding", "able"), [("utf-8", True), ("ascii", False), ("latin-1", False)])
def test_marks_follow_the_encoding_of_stdout(encoding: str, able: bool) -> None:
    assert doctor._unicode(io.TextIOWrapper(io.BytesIO(), encoding)) is able


def test_colour_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    outer, inner = os.openpty()
    with open(inner, "w") as terminal, open(tmp_path / "file", "w") as file, open(outer, "rb"):
        assert doctor._colour(terminal) is True
        assert doctor._colour(file) is False
        monkeypatch.setenv("NO_COLOR", "1")
        assert doctor._colour(terminal) is False
    assert "\033[31m✗\033[0m user" in doctor.text(FINDINGS, FINDINGS[1:2], "default", True, True)


def test_text_comes_out_in_any_locale(runner_as: Caller) -> None:
    done = runner_as("doctor", env={"PYTHONIOENCODING": "ascii", "RUNNER_BWRAP": "/nonexistent"})
    assert (done.returncode, done.stderr) == (22, "")
    assert done.stdout.isascii()
    assert "cannot be enforced here" in done.stdout.splitlines()[-1]


# --- by which policy ------------------------------------------------------------------------------------


@pytest.mark.needs("root")
def test_the_policy_in_force_decides_what_is_required(
    runner_as_root: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """As for a launch: --policy, then RUNNER_POLICY, then the machine's own, then the default."""
    text = 'version = 1\n[user]\nuids = [900000, 900001]\n[layers]\nuid = "prefer"\n'
    policy = str(write_file(plugin_dir / "lenient.toml", text))
    small = 'user_namespace("0 0 65536")'  # in which the policy's uids do not exist
    for env, arguments in (
        ({"RUNNER_POLICY": policy}, ()),
        ({"RUNNER_POLICY": "strict"}, ("--policy", policy)),
    ):
        result = examined(runner_as_root, small, env=env, arguments=arguments)
        assert (result["policy"], "uid_drop" in result["unmet"]) == (policy, False)
        assert finding(result, "uid_drop")["status"] == "missing"
        assert "900000-900001" in finding(result, "uid_drop")["summary"]
    result = examined(runner_as_root, small, env={"RUNNER_POLICY": policy}, arguments=("--policy", "default"))
    assert result["policy"] == "default"
    assert examined(runner_as_root)["policy"] == "default"


@pytest.mark.needs("root")
def test_the_machines_own_policy_is_judged_and_named(
    runner_as_root: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """/etc/runner/policy.toml, in a mount namespace of the test's own."""
    folder = plugin_dir / "etc"
    policy = write_file(
        folder / "runner/policy.toml", 'version = 1\n[limits.memory]\ndefault = "1G"\nmode = "prefer"\n'
    )
    show = f"""
        must(libc.unshare(NEWNS))
        mount("none", "/", None, 1 << 18 | 16384)
        mount("{folder}", "/etc", None, 4096)
    """
    result = examined(runner_as_root, show)
    assert result["policy"] == result["policy_file"] == "/etc/runner/policy.toml"
    assert result["policy_digest"] == f"sha256:{hashlib.sha256(policy.read_bytes()).hexdigest()}"
    assert "the policy /etc/runner/policy.toml" in doctor.verdict([], [], "/etc/runner/policy.toml")


MODES = {
    "require": ('default = "1G"\nmode = "require"', "missing", "missing"),
    "silence": ('default = "1G"', "missing", "missing"),
    "delegated": ('default = "1G"\nmode = "delegated"', "missing", "degraded"),
    "prefer": ('default = "1G"\nmode = "prefer"', "degraded", "degraded"),
    "ceiling": ('ceiling = "1G"\nmode = "require"', "info", "info"),
}


@pytest.mark.needs("root")
@one_case("mode", MODES)
def test_the_policy_says_which_limits_are_needed(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path], mode: str
) -> None:
    rule, for_root, for_users = MODES[mode]
    policy = write_file(plugin_dir / "policy.toml", f"version = 1\n[limits.memory]\n{rule}\n")
    result = examined(with_read_only_groups(runner_as), arguments=("--policy", str(policy)))
    expected = for_root if runner_as.uid == 0 else for_users
    found = finding(result, "memory_limit")
    assert found["status"] == expected
    assert result["unmet"] == (["memory_limit"] if expected == "missing" else [])
    assert {finding(result, name)["status"] for name in ("pids_limit", "cpu_limit")} == {"info"}
    # It is true of a launch.
    plugin = write_file(plugin_dir / "nexo-plugin.toml", nexo("held", "/bin/true"))
    launched = with_read_only_groups(runner_as)("exec", "--policy", policy, plugin)
    assert launched.returncode == (125 if expected == "missing" else 0), launched.stderr
    assert ("the memory limit" in launched.stderr) == (expected == "missing")


def test_an_empty_policy_names_nothing(runner_as_user: Caller) -> None:
    done = runner_as_user("doctor", "--policy", "")
    assert (done.returncode, done.stdout) == (2, "") and "its value is empty" in done.stderr


@one_case("named", ["nosuch", "/nonexistent/policy.toml"])
def test_a_policy_that_cannot_be_used(runner_as_user: Caller, named: str) -> None:
    done = runner_as_user("doctor", "--policy", named)
    assert (done.returncode, done.stdout) == (26, "")
    assert done.stderr.startswith("runner doctor: ") and named in done.stderr
