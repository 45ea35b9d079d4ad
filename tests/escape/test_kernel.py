"""The kernel's surface: system calls, terminals, other processes' memory, keys, namespaces, sysctls."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.seccomp import syscalls
from tests import elsewhere
from tests.conftest import SYSTEM_PATH
from tests.escape.cage import (
    STAND_IN_UID,
    AttackResult,
    ProbeCage,
    parse_result,
    sandbox_table,
)
from tests.tables import one_case

ARCH = os.uname().machine
CALLS = syscalls.load(ARCH)
NEWUSER = 0x10000000
SYSCTL = "/proc/sys/kernel/domainname"


# --- What the plugin is ------------------------------------------------------------------------------------

# What the filter lets through, beside the attacks on the kernel's memory that it refuses
# (sandbox/attacks/attacks.py).
ALLOWED = (
    ("large_attribute", "path", "996"),
    ("option", "2", "2", "0", "35", "e10101017f000001", "8"),  # a multicast group
    ("poll_many", "1024"),
)
A_CALL_OF_THE_FUTURE = ("system_call", "9999")


def test_what_the_plugin_is_and_sees(cage: ProbeCage) -> None:
    """One launch, and the same questions without a cage."""
    capabilities = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    layers = {"NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "1", "Uid": "65534", "Gid": "65534"}
    places = ("/sys", "/sys/fs/cgroup", "/sys/firmware", "/sys/kernel", "/proc/sys/fs/binfmt_misc/register")
    namespace = ("unshare", f"{NEWUSER:#x}")
    asked: list[tuple[str, ...]] = [
        ("status", *capabilities),
        ("status", *layers),
        ("run_from_memory", "0"),
        ("writable", "/proc"),
        ("read", "/proc/self/cgroup"),
        ("hostname",),
        ("set_clock",),
        ("ids",),
        ("limits",),
        namespace,
        ("interfaces",),
        A_CALL_OF_THE_FUTURE,
        *ALLOWED,
        *(("exists", place) for place in places),
    ]
    answers = cage.attacks(*asked)
    had, shown, memory, writable, groups, host, clock, ids, limits, entered, seen, future, *more = answers
    is_root = cage.caller.uid == 0
    assert set(had.done.values()) == {"0" * 16}
    if is_root:
        # The control: in a plain bwrap a plugin of root has all capabilities.
        control = cage.under_plain_bwrap("status", "CapEff", bwrap=["--unshare-user", "--dev-bind", "/", "/"])
        assert int(control.done["CapEff"], 16) & 1 << 21
    assert shown.done == layers
    assert cage.outside("status", "NoNewPrivs", "Seccomp").done == {"NoNewPrivs": "0", "Seccomp": "0"}
    # A program executed from a memfd has the same filter, uid and capabilities as the plugin.
    assert memory.done == {"Seccomp": "2", "NoNewPrivs": "1", "CapEff": "0" * 16, "Uid": "65534"}
    assert cage.outside("run_from_memory", "0").done["Seccomp"] == "0"
    # In /proc only files of the plugin's own process are writable.
    assert writable.done == []
    if is_root:
        assert SYSCTL in cage.outside("writable", "/proc/sys").done
    # Its cgroup is the root.
    assert {line.split(":", 2)[2] for line in groups.done.splitlines()} == {"/"}
    assert host.done == "plugin"
    assert cage.outside("hostname").done == os.uname().nodename
    assert clock.refused == "EPERM"
    if is_root:
        # The clock is not really set: EFAULT shows that the permission check passed.
        assert cage.outside("system_call", str(CALLS["clock_settime"]), "0", "0").refused == "EFAULT"
    assert ids.done == [[65534] * 3, [65534] * 3, []]
    assert seen.done == ["lo"]
    assert future.refused == "ENOSYS"
    assert [answer.answer.get("refused") for answer in more[: len(ALLOWED)]] == [None] * len(ALLOWED)
    # Limits that always apply.
    found = limits.done
    assert found["CORE"] == found["MSGQUEUE"] == found["RTPRIO"] == found["NICE"] == [0, 0]
    assert found["NOFILE"][1] <= 4096
    assert found["MEMLOCK"][1] <= 64 << 10
    # Two layers refuse user namespaces. Without the filter the namespace limit refuses (ENOSPC). Without
    # both, the call succeeds.
    assert entered.refused == "EPERM"
    assert cage.without(*namespace, remove=["--seccomp 10"]).refused == "ENOSPC"
    closed = "--disable-userns --assert-userns-disabled"
    assert cage.without(*namespace, remove=["--seccomp 10", closed]).done is True
    # There is no /sys.
    assert [answer.done for answer in more[len(ALLOWED) :]] == [False] * len(places)
    assert cage.outside("exists", "/sys/fs/cgroup").done is True


@pytest.mark.skipif(ARCH != "x86_64", reason="int 0x80 exists on x86 only")
def test_a_32_bit_system_call_kills(cage: ProbeCage) -> None:
    answer = cage.attack("int_0x80")
    assert answer.code == 128 + signal.SIGSYS
    control = cage.outside("int_0x80")
    assert control.answer == {"done": True} or control.code == -signal.SIGSEGV  # a kernel without CONFIG_IA32


# --- Terminals ---------------------------------------------------------------------------------------------


@one_case("high", ["0", "0xffffffff00000000"])
def test_nothing_is_typed_into_the_callers_terminal(cage: ProbeCage, high: str) -> None:
    """CVE-2017-5226, and CVE-2019-10063 for the high half."""
    cage.manifest()
    inside = _in_a_terminal(cage.caller.command("exec", cage.folder, "--", "type_into_terminal", high), cage)
    assert inside.refused in ("EPERM", "EIO")
    assert "echo" not in inside.out

    if Path("/proc/sys/dev/tty/legacy_tiocsti").read_text().strip() == "1":
        words = [str(cage.folder / "probe.py"), "type_into_terminal", high]
        control = _in_a_terminal([*cage.caller.prefix, "bwrap", "--dev-bind", "/", "/", "--", *words], cage)
        assert control.done is True


def test_each_of_the_two_layers_against_typing_is_enough(cage: ProbeCage) -> None:
    attack = ("type_into_terminal", "0")
    for removed in ("--seccomp 10", "--new-session"):
        cage.manifest()
        line = cage.caller("explain", "--format", "argv", cage.folder).stdout.strip()
        line = line.replace(f" {removed} ", " ").replace(
            f" -- {cage.folder}/probe.py", f' -- {cage.folder}/probe.py "$@"'
        )
        answer = _in_a_terminal([*cage.caller.prefix, "bash", "-c", line, "bash", *attack], cage)
        assert answer.refused in ("EPERM", "EIO"), removed


def test_the_callers_terminal_cannot_be_opened(cage: ProbeCage) -> None:
    cage.manifest()
    inside = _in_a_terminal(cage.caller.command("exec", cage.folder, "--", "open_terminal"), cage)
    assert inside.refused in ("ENXIO", "EIO", "ENOENT")
    control = _in_a_terminal([*cage.caller.prefix, str(cage.folder / "probe.py"), "open_terminal"], cage)
    assert control.done is True


def _in_a_terminal(argv: list[str], cage: ProbeCage) -> AttackResult:
    """Run `argv` with a pseudo-terminal as stdin and controlling terminal, and pipes for its output."""
    script = "\n".join(
        (
            "import fcntl, os, sys, termios",
            "os.setsid()",
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0)",
            "os.execvp(sys.argv[1], sys.argv[1:])",
        )
    )
    master, slave = os.openpty()
    try:
        # The terminal belongs to the caller, as a login's does.
        os.fchmod(slave, 0o666)
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", script, *argv],
            stdin=slave,
            capture_output=True,
            text=True,
            timeout=60,
            env=dict(cage.caller.environ),
        )
    finally:
        os.close(slave)
        os.close(master)
    return parse_result(done)


# --- Keys --------------------------------------------------------------------------------------------------


def test_a_plugin_cannot_find_a_key_of_another(cage: ProbeCage) -> None:
    name = f"rt-{os.getpid()}"
    add = ("add_key", str(CALLS["add_key"]), name, "-3")
    find = ("find_key", str(CALLS["keyctl"]), name)
    assert [answer.refused for answer in cage.attacks(add, find)] == ["EPERM", "EPERM"]
    # The control: two plain bwraps started from one session share its keyring.
    probe = f"bwrap --dev-bind / / -- {cage.folder}/probe.py"
    shell = f"{probe} {' '.join(add)} && {probe} {' '.join(find)}"
    join = f"import ctypes, os; ctypes.CDLL(None).syscall({CALLS['keyctl']}, 1, 0)"
    join += f"; os.execvp('sh', ['sh', '-c', {shell!r}])"
    argv = [*cage.caller.prefix, "/usr/bin/python3", "-I", "-c", join]
    control = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={"PATH": SYSTEM_PATH})
    assert control.stdout.count("done") == 2, control.stdout + control.stderr


def test_the_plugin_has_its_own_session_keyring(cage: ProbeCage) -> None:
    """The spawner gives the plugin its own session keyring. Tested without the seccomp filter."""

    def keyrings(probe: str, keyctl: str) -> list[str]:
        import os

        from sandbox.spawn import spawner
        from sandbox.spawn.order import SpawnOrder

        found = []
        for keyring in (False, True):
            read, write = os.pipe()
            saved = os.dup(1)
            os.dup2(write, 1)
            os.close(write)
            argv = ("python3", "-I", probe, "session_keyring", keyctl)
            uid, gid = os.geteuid(), os.getegid()
            order = SpawnOrder("/usr/bin/python3", argv, uid, gid, False, (), (), keyring)
            pid = spawner.spawn(order)
            os.dup2(saved, 1)
            with open(read) as answer:
                found.append(answer.read())
            os.waitpid(pid, 0)
        return found

    probe = str(cage.folder / "probe.py")
    shared, own = elsewhere.run(cage.caller, keyrings, probe, str(CALLS["keyctl"]))
    assert shared != own
    assert "done" in own


# --- Identity ----------------------------------------------------------------------------------------------


def test_each_running_plugin_of_root_has_its_own_uid(cage: ProbeCage) -> None:
    with cage.running("linger") as one, cage.running("linger") as two, cage.running("linger") as three:
        uids = [os.stat(f"/proc/{each.pid}").st_uid for each in (one, two, three)]
    if cage.caller.uid == 0:
        assert len(set(uids)) == 3
        assert all(uid in range(2147418112, 1 << 31) for uid in uids)
    else:
        assert set(uids) == {cage.caller.uid}


@pytest.mark.machine
@pytest.mark.needs("root")
def test_a_plugin_cannot_use_up_the_inotify_instances_of_others(cage: ProbeCage) -> None:
    """inotify instances are counted per uid on the host."""
    if cage.caller.uid != 0:
        pytest.skip("without root all plugins are the caller: there is no uid to give them")
    with cage.running("exhaust_inotify") as greedy:
        assert cage.attack("inotify").done is True
    assert json.loads(greedy.out)["done"] > 0

    # The control: two plain bwraps with the same uid share the limit.
    words = [
        "setpriv",
        f"--reuid={STAND_IN_UID}",
        f"--regid={STAND_IN_UID}",
        "--clear-groups",
        "bwrap",
        "--dev-bind",
        "/",
        "/",
        "--",
    ]
    words.append(str(cage.folder / "probe.py"))
    with subprocess.Popen(
        [*words, "exhaust_inotify"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"ready\n"
        second = subprocess.run([*words, "inotify"], capture_output=True, text=True, timeout=60)
        first.communicate(timeout=60)
    assert json.loads(second.stdout) == {"refused": "EMFILE"}


# --- Which bubblewrap --------------------------------------------------------------------------------------


def test_a_bubblewrap_on_path_or_in_the_working_directory_is_not_used(
    cage: ProbeCage, write_file: Callable[..., Path]
) -> None:
    fake = write_file(cage.folder / "open/bwrap", "#!/bin/sh\necho FAKE\n", 0o755)
    path = f"{fake.parent}:{SYSTEM_PATH}"
    cage.manifest()
    done = cage.caller("exec", cage.folder, "--", "words", "real", env={"PATH": path}, cwd=fake.parent)
    assert parse_result(done).done == ["real"]
    control = subprocess.run(["sh", "-c", "bwrap"], env={"PATH": path}, capture_output=True, text=True)
    assert control.stdout == "FAKE\n"


@pytest.mark.needs("root")
@one_case(("mode", "status"), [("0755", 0), ("4755", 125), ("0775", 125)])
def test_a_setuid_or_group_writable_bubblewrap_is_refused(cage: ProbeCage, mode: str, status: int) -> None:
    """The copy is on a tmpfs in a new mount namespace, and disappears with it."""
    cage.manifest()
    script = (
        "mount -t tmpfs -o mode=755 none /mnt && cp /usr/bin/bwrap /mnt/bwrap && chmod $0 /mnt/bwrap"
        ' && exec "$@"'
    )
    command = cage.caller.command("exec", cage.folder, "--", "words")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, mode, *command],
        env={**cage.caller.environ, "RUNNER_BWRAP": "/mnt/bwrap"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    if status:
        assert "/mnt/bwrap" in done.stderr


def test_files_in_the_state_directory_do_not_belong_to_root(cage: ProbeCage) -> None:
    """Files that a plugin writes belong to its own uid, never to root."""
    if cage.caller.uid != 0:
        pytest.skip("without root the plugin's files are the caller's")
    state = Path(f"{cage.folder}.state")
    try:
        answer = cage.attack(
            "write",
            f"{state}/x",
            tables=sandbox_table(write=["${state_dir}"]),
            options=["--state-dir", str(state)],
        )
        assert answer.done is True
        assert (state / "x").stat().st_uid in range(2147418112, 1 << 31)
        assert state.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(state)
