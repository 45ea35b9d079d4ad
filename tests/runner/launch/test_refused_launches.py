"""A launch that the surroundings refuse says who refused it, and by which option that is mended."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.container import filter as container_filter
from tests.conftest import ROOT, Caller
from tests.manifests import nexo
from tests.sandbox.doctor.groups import in_groups_of_their_own, with_read_only_groups

MANIFEST = nexo("small", "./plugin")
STATE = '[plugin.sandbox]\nenabled = true\nfs_write_paths = ["${state_dir}"]\n'
# Limits as in the image: made do with where cgroups are read-only.
POLICY = 'version = 1\n[limits.memory]\ndefault = "1G"\nmode = "prefer"\n'


def behind(caller: Caller, *words: str) -> Caller:
    """The same caller, whose every command goes by way of these words, as who runs the tests."""
    return dataclasses.replace(caller, prefix=(*words, *caller.prefix))


def filtered(caller: Caller, profile: Path) -> Caller:
    # By absolute path: env finds what the prefix calls by name.
    return behind(caller, sys.executable, str(ROOT / "tests/filtered.py"), str(profile), "/usr/bin/env")


@pytest.fixture
def plugin(plugin_dir: Path, write_file: Callable[..., Path]) -> Callable[[str], Path]:
    def make(script: str) -> Path:
        write_file(plugin_dir / "plugin", f"#!/bin/sh\n{script}\n").chmod(0o755)
        return write_file(plugin_dir / "nexo-plugin.toml", MANIFEST)

    return make


# --- filters ------------------------------------------------------------------------------------------------


def test_the_shipped_filter_lets_plugins_start(runner_as: Caller, plugin: Callable[[str], Path]) -> None:
    done = filtered(runner_as, container_filter.OUTPUT)("exec", plugin("grep ^Seccomp: /proc/self/status"))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["Seccomp:", "2"], "")


def test_each_call_that_the_filter_adds_is_needed_and_missed_by_name(
    runner_as: Caller, plugin: Callable[[str], Path], plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    manifest = plugin("true")
    for name in container_filter.ADDITIONS:
        others = tuple(each for each in container_filter.ADDITIONS if each != name)
        text = container_filter.text(container_filter.profile(others))
        done = filtered(runner_as, write_file(plugin_dir / "filter.json", text))("exec", manifest)
        assert done.returncode == 125, (name, done.stderr)
        said = next(line for line in done.stderr.splitlines() if line.startswith("runner: "))
        assert said.startswith("runner: sandbox_unavailable: ") and name in said, (name, said)
        assert "seccomp filter" in said
        # By where this runs: a unit of systemd, a container, or neither.
        options = ("--security-opt seccomp=", "localhostProfile", "SystemCallFilter=", "RestrictNamespaces=")
        assert any(option in done.stderr for option in options), name


def test_a_refusal_reaches_who_calls_and_the_report(
    runner_as: Caller, plugin: Callable[[str], Path], plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    others = tuple(each for each in container_filter.ADDITIONS if each != "sethostname")
    profile = write_file(plugin_dir / "filter.json", container_filter.text(container_filter.profile(others)))
    caller = filtered(runner_as, profile)
    done = caller("call", "--json", plugin("cat"), "anything")
    assert done.returncode == 22, done.stderr
    told = json.loads(done.stderr.splitlines()[-1])
    assert (told["code"], told["phase"], told["cause"]) == (
        "sandbox_unavailable",
        "launch",
        "user_namespaces",
    )
    assert "sethostname" in told["message"] and "seccomp=" in told["hint"] and "\n" not in told["hint"]
    report = runner_as.home / "report.json"
    assert caller("exec", "--report", report, plugin("true")).returncode == 125
    assert json.loads(report.read_text())["outcome"]["cause"] == "user_namespaces"


def killing(plugin_dir: Path, write_file: Callable[..., Path], *calls: str) -> Path:
    """A filter as systemd makes one of SystemCallFilter= without an error number."""
    entry = {"names": calls, "action": "SCMP_ACT_KILL_PROCESS"}
    document = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [entry]}
    return write_file(plugin_dir / "filter.json", json.dumps(document))


@pytest.mark.both_callers
def test_a_filter_that_kills_is_not_a_crash_of_the_plugin(
    runner_as: Caller, plugin: Callable[[str], Path], plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """Whether it kills bubblewrap or the runner itself, everything that it kills for is named."""
    manifest = plugin("true")
    caller = filtered(runner_as, killing(plugin_dir, write_file, "mount", "sethostname"))
    done = caller("exec", manifest)
    assert (done.returncode, done.stdout) == (125, ""), done.stderr
    assert "sandbox_unavailable" in done.stderr and "crashed" not in done.stderr
    assert "mount with SIGSYS and sethostname with SIGSYS" in done.stderr
    # The runner asks for a keyring before anything else. To prefer that layer would not be enough.
    caller = filtered(runner_as, killing(plugin_dir, write_file, "keyctl", "pivot_root"))
    done = caller("call", "--json", manifest, "anything")
    assert done.returncode == 22, done.stderr
    told = json.loads(done.stderr.splitlines()[-1])
    assert (told["code"], told["cause"]) == ("sandbox_unavailable", "session_keyring")
    assert "Also in the way: user namespaces: " in told["message"], told
    assert "pivot_root with SIGSYS" in told["message"] and '"prefer"' not in told["hint"], told
    # The control: a filter that kills for what nobody does is no reason.
    done = filtered(runner_as, killing(plugin_dir, write_file, "reboot"))("exec", manifest)
    assert (done.returncode, done.stderr) == (0, "")


# --- /proc and capabilities ---------------------------------------------------------------------------------


@pytest.mark.needs("root")
def test_a_masked_proc_is_named(runner_as: Caller, plugin: Callable[[str], Path]) -> None:
    mask = 'mount --bind /dev/null /proc/timer_list; exec "$@"'
    caller = behind(runner_as, "/usr/bin/unshare", "--mount", "/bin/sh", "-ec", mask, "sh")
    done = caller("exec", plugin("true"))
    assert done.returncode == 125
    assert "sandbox_unavailable" in done.stderr and "masked, e.g. /proc/timer_list" in done.stderr
    # By the engine whose container this looks like.
    options = ("--security-opt systempaths=unconfined", "--security-opt unmask=ALL", "procMount: Unmasked")
    assert any(option in done.stderr for option in options), done.stderr


@pytest.mark.needs("root")
@pytest.mark.parametrize("state", ["", STATE], ids=["without state", "with state"])
def test_a_root_without_capabilities_is_told_which(
    runner_as_root: Caller,
    plugin: Callable[[str], Path],
    plugin_dir: Path,
    write_file: Callable[..., Path],
    state: str,
) -> None:
    """Also where it is refused earlier, because it may not write in a directory of somebody else."""
    manifest = plugin("true")
    manifest.write_text(MANIFEST + state)
    caller = behind(runner_as_root, "/usr/bin/setpriv", "--bounding-set=-all", "--inh-caps=-all", "--")
    hide = "mount -t tmpfs -o uid=1000,mode=755 none /var/lib; " if state else ""
    caller = behind(caller, "/usr/bin/unshare", "--mount", "/bin/sh", "-ec", f'{hide}exec "$@"', "sh")
    done = caller("exec", "--policy", write_file(plugin_dir / "policy.toml", POLICY), manifest)
    assert done.returncode == 125, done.stderr
    assert "sandbox_unavailable" in done.stderr and "CAP_SETUID" in done.stderr
    assert "--cap-add SETUID" in done.stderr


def test_a_launch_that_fails_for_another_reason_accuses_nobody(
    runner_as: Caller, plugin: Callable[[str], Path]
) -> None:
    done = runner_as("exec", "--limit", "open_files=3", plugin("true"))
    assert done.returncode not in (0, 22)
    assert "sandbox_unavailable" not in done.stderr


# --- memory of the container --------------------------------------------------------------------------------


@pytest.mark.needs("root")
def test_a_run_that_cannot_be_written(runner_as_root: Caller, plugin: Callable[[str], Path]) -> None:
    script = 'mount -t tmpfs -o ro none /run && exec "$@"'
    manifest = plugin("echo hi")
    done = behind(runner_as_root, "/usr/bin/unshare", "--mount", "/bin/sh", "-c", script, "sh")(
        "exec", manifest
    )
    assert done.stdout == "" and "--tmpfs /run" in done.stderr, done.stderr


def test_too_few_descriptors_are_not_the_manifests_fault(
    runner_as: Caller, plugin: Callable[[str], Path]
) -> None:
    manifest = plugin("echo hi")
    for number in (8, 10, 12):
        done = behind(runner_as, "/usr/bin/prlimit", f"--nofile={number}")("exec", manifest)
        assert done.returncode == 125 and "policy_denied" not in done.stderr, (number, done.stderr)
        assert "ulimit" in done.stderr
    control = behind(runner_as, "/usr/bin/prlimit", "--nofile=64")("exec", manifest)
    assert control.stdout == "hi\n", control.stderr


@pytest.mark.needs("user")
def test_too_few_processes(runner_as_user: Caller, plugin: Callable[[str], Path]) -> None:
    manifest = plugin("echo hi")
    limited = dataclasses.replace(
        runner_as_user, prefix=(*runner_as_user.prefix, "/usr/bin/prlimit", "--nproc=1")
    )
    done = limited("exec", manifest)
    assert done.returncode == 125 and "ulimit -u" in done.stderr, done.stderr


# Keys in the session keyring that the command inherits: all that this user may have, or that many fewer.
ALL_KEYS = """
import ctypes, errno, os, sys, time
add_key, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(keyctl, 1, 0, 0, 0, 0) > 0
# The user's own two keyrings stay for ever once somebody has asked for one. Now they are there.
assert libc.syscall(keyctl, 0, -4, 1, 0, 0) > 0
most, spare = int(open("/proc/sys/kernel/keys/maxkeys").read()), int(sys.argv[1])
for number in range(most - 3 - spare):  # beside the keyring itself and these two
    while libc.syscall(add_key, b"user", b"%d" % number, b"x", 1, -3) < 0:
        assert ctypes.get_errno() == errno.EDQUOT
        time.sleep(0.01)  # the kernel frees those of the last command later
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.machine  # others that are this user could join no keyring meanwhile
@pytest.mark.needs("user")
@pytest.mark.usefixtures("nothing_left")
def test_too_few_keys(runner_as_user: Caller, plugin: Callable[[str], Path]) -> None:
    def with_keys(spare: str) -> Caller:
        filling = ("/usr/bin/python3", "-c", ALL_KEYS, spare)
        return dataclasses.replace(runner_as_user, prefix=(*runner_as_user.prefix, *filling))

    manifest, full = plugin("echo hi"), with_keys("0")
    for policy in ("default", "dev"):
        done = full("exec", "--policy", ROOT / f"policies/{policy}.toml", manifest)
        assert (done.returncode, done.stdout) == (125, ""), done.stderr
        assert "could not join a session keyring: Disk quota exceeded" in done.stderr
        assert "kernel.keys.maxkeys" in done.stderr
    told = full("doctor").stdout
    assert "keyctl is answered with EDQUOT" in told and "raise kernel.keys.maxkeys" in told
    control = with_keys("50")
    assert control("exec", manifest).stdout == "hi\n"
    assert "this user may have" in control("doctor").stdout


@pytest.mark.needs("root")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("exec python3 -c 'held = []\nwhile True: held.append(b\"x\" * (8 << 20))'", "oom"),
        ("kill -9 $$", "signal:9"),  # the control: nobody ran out of anything
    ],
    ids=["memory", "kill"],
)
def test_a_kill_for_the_memory_of_the_container_is_told_from_others(
    runner_as: Caller,
    plugin: Callable[[str], Path],
    plugin_dir: Path,
    write_file: Callable[..., Path],
    script: str,
    cause: str,
) -> None:
    policy = write_file(plugin_dir / "policy.toml", POLICY)
    report = runner_as.home / "report.json"
    with in_groups_of_their_own(with_read_only_groups(runner_as), owned=False) as (caller, groups):
        limits = [
            each for group in groups for each in (group / "memory.limit_in_bytes", group / "memory.max")
        ]
        limit = next((path for path in limits if path.exists()), None)
        if limit is None:
            pytest.skip("no memory controller in a group that can be made here")
        limit.write_text(str(128 << 20))
        done = caller("exec", "--policy", policy, "--report", report, plugin(script))
    assert done.returncode == 137, done.stderr
    outcome = json.loads(report.read_text())["outcome"]
    assert (outcome["code"], outcome["cause"]) == ("crashed", cause), outcome
    if cause == "oom":
        assert "a group around the runner, ran out of memory" in done.stderr
        assert "docker run --memory" in done.stderr


# --- what a policy trusts -----------------------------------------------------------------------------------


PLAIN = """version = 1
[read]
ceiling = ["{place}"]
[write]
ceiling = ["{place}"]
"""
CREDENTIALS = """
[credentials.by_file]
hosts = ["a.example:443"]
from = "file:{place}/value/token"
authorities = ["{place}/roots/ca.pem"]
[credentials.by_command]
hosts = ["b.example:443"]
from = ["{place}/program/get", "--by", "{place}/script/more"]
"""


def test_no_plugin_gets_what_the_policy_has_credentials_from(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """Neither the value in its file, nor a way to change what runs outside of any cage or whom the broker
    trusts. Also if it uses none of the credentials."""
    files = [plugin_dir / name for name in ("value/token", "roots/ca.pem", "program/get", "script/more")]
    for file in files:
        write_file(file, "text\n", 0o755)
    texts = {"plain": PLAIN, "policy": PLAIN + CREDENTIALS}
    plain, policy = (
        write_file(plugin_dir / f"policies/{name}.toml", text.format(place=plugin_dir))
        for name, text in texts.items()
    )
    runner_as.give(plugin_dir)

    def start(rules: Path, option: str, *paths: Path) -> tuple[int, str]:
        words = [str(word) for path in paths for word in (option, path)]
        done = runner_as("run", "--policy", rules, *words, "--", "/bin/true", cwd="/")
        return done.returncode, done.stderr

    token, *others = files
    for option, path, reason in (
        ("--read", token, "which this policy denies"),
        ("--read", token.parent, "which this policy denies"),
        *(("--write", each.parent, "no plugin may write it") for each in others),
    ):
        status, said = start(policy, option, path)
        assert status == 126 and reason in said, (option, path, said)
    # The controls: it may read the others, and without the credentials write all of them.
    for rules, option, shown in ((policy, "--read", others), (plain, "--write", files)):
        status, said = start(rules, option, *(each.parent for each in shown))
        assert status == 0, said
