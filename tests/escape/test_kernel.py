"""The kernel's surface: system calls, terminals, other processes' memory, keys, namespaces, sysctls."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
    split_results,
)
from tests.tables import one_case

ARCH = os.uname().machine
CALLS = syscalls.load(ARCH)
NEWUSER, NEWNS = 0x10000000, 0x00020000
HIGH = 0xFFFFFFFF_00000000
SYSCTL = "/proc/sys/kernel/domainname"


# --- System calls ------------------------------------------------------------------------------------------


class Call(NamedTuple):
    attack: str
    call: str  # its number is the attack's first argument
    arguments: tuple[str, ...]
    expected: str
    control: str | None = (
        ""  # errno without the filter; "": succeeds; None: not compared, the kernel refuses too
    )


TABLE = {
    "mount": Call("system_call", "mount", ("0", "0", "0", "0", "0"), "EPERM", None),
    "umount": Call("system_call", "umount2", ("0", "0"), "EPERM", None),
    "chroot": Call("system_call", "chroot", ("0",), "EPERM", "EFAULT"),
    "join a namespace": Call("system_call", "setns", ("-1", "0"), "EPERM", "EBADF"),
    "unshare nothing": Call("system_call", "unshare", ("0",), "EPERM", ""),
    "clone3": Call("system_call", "clone3", ("0", "0"), "ENOSYS", "EINVAL"),
    "io_uring": Call("system_call", "io_uring_setup", ("0", "0"), "ENOSYS", None),
    "userfaultfd": Call("system_call", "userfaultfd", ("-1",), "ENOSYS", None),
    "open_tree": Call("system_call", "open_tree", ("-1", "0", "0"), "ENOSYS", "EFAULT"),
    "fsopen": Call("system_call", "fsopen", ("0", "0"), "ENOSYS", None),
    "mount_setattr": Call("system_call", "mount_setattr", ("-1", "0", "0", "0", "0"), "ENOSYS", "EINVAL"),
    "bpf": Call("system_call", "bpf", ("-1", "0", "0"), "EPERM", None),
    "perf": Call("system_call", "perf_event_open", ("0", "0", "0", "-1", "-1"), "EPERM", None),
    "file handles": Call("system_call", "name_to_handle_at", ("-1", "0", "0", "0", "0"), "EPERM", "EFAULT"),
    "modules": Call("system_call", "init_module", ("0", "0", "0"), "EPERM", None),
    "kexec": Call("system_call", "kexec_load", ("0", "0", "0", "0"), "EPERM", None),
    "the kernel's log": Call("system_call", "syslog", ("3", "0", "0"), "EPERM", None),
    "trace a child": Call("ptrace_child", "ptrace", (), "EPERM", ""),
    "trace the cage's init": Call("ptrace_init", "ptrace", (), "EPERM", None),
    "a child's memory": Call("process_memory", "process_vm_readv", (), "EPERM", ""),
    "a child's descriptor": Call("steal_descriptor", "pidfd_getfd", (), "EPERM", ""),
    "add a key": Call("add_key", "add_key", ("rt-a",), "EPERM", ""),
    "the session keyring": Call("session_keyring", "keyctl", (), "EPERM", ""),
    "a user namespace by clone": Call("clone", "clone", (f"{NEWUSER:#x}",), "EPERM", "ENOSPC"),
    "the same with a high half": Call("clone", "clone", (f"{HIGH | NEWUSER:#x}",), "EPERM", "ENOSPC"),
    "a number of the future": Call("system_call", "9999", (), "ENOSYS", None),
}


def test_system_calls_that_could_leave_the_cage(cage: ProbeCage) -> None:
    """Calls that could leave the cage, through a real launch. The seccomp tests check the whole table."""
    rows = TABLE.values()
    words = [(row.attack, str(CALLS.get(row.call, row.call)), *row.arguments) for row in rows]
    inside = cage.attacks(*words)
    control = split_results(cage.without("many", json.dumps(words), remove=["--seccomp 10"]))
    seen = {name: answer.refused for name, answer in zip(TABLE, inside, strict=True)}
    assert seen == {name: row.expected for name, row in TABLE.items()}
    unfiltered = {
        name: answer.answer.get("refused", "")
        for (name, row), answer in zip(TABLE.items(), control, strict=True)
        if row.control is not None
    }
    assert unfiltered == {name: row.control for name, row in TABLE.items() if row.control is not None}


# --- Memory of the kernel that no limit counts -------------------------------------------------------------

# One control message of 64,000 bytes that the kernel keeps without looking into it; a key for 127.0.0.1; a
# group on loopback; the same with a sender.
PACKET_OPTIONS = (64000).to_bytes(8, "little").hex() + "0600000001000000"
MD5_KEY = "020000007f000001" + "00" * 120 + "00000400000000006b657973"
GROUP6 = "ff12" + "00" * 13 + "01" + "01000000"
GROUP4, SENDER4 = "e1010101" + "7f000001", "e1010101" + "7f000001" + "7f000002"
TCP4, UDP4, UDP6 = ("2", "1"), ("2", "2"), ("10", "2")


class Kept(NamedTuple):
    words: tuple[str, ...]
    expected: str | None  # None: allowed
    control: bool = True  # False: not every kernel or machine can do it


HUGE = "hugetlbfs" in Path("/proc/filesystems").read_text()
IPV6 = os.path.exists("/proc/net/if_inet6")

KEPT = {
    "an attribute by path": Kept(("large_attribute", "path", "60000"), "ENOTSUP"),
    "an attribute by link": Kept(("large_attribute", "link", "60000"), "ENOTSUP"),
    "an attribute by descriptor": Kept(("large_attribute", "descriptor", "1004"), "ENOTSUP"),
    "an ordinary attribute": Kept(("large_attribute", "path", "996"), None),
    "packet options": Kept(("option", *UDP6, "41", "6", PACKET_OPTIONS, "64000"), "EINVAL"),
    "short packet options": Kept(("option", *UDP6, "41", "6", "10" + "00" * 7 + "06", "16"), "ENOPROTOOPT"),
    "keys": Kept(("option", *TCP4, "6", "14", MD5_KEY, "216"), "ENOPROTOOPT", control=False),
    "tls": Kept(("option", *TCP4, "6", "31", b"tls".hex(), "3"), "ENOPROTOOPT", control=False),
    "a filter": Kept(("socket_filter",), "ENOPROTOOPT"),
    "a group over IPv6": Kept(("option", *UDP6, "41", "20", GROUP6, "20"), "ENOPROTOOPT"),
    "a group": Kept(("option", *UDP4, "0", "35", GROUP4, "8"), None),
    "a group by sender": Kept(("option", *UDP4, "0", "39", SENDER4, "12"), "ENOPROTOOPT"),
    "a listener of a filter": Kept(("listener_of_a_filter", str(CALLS["seccomp"])), "EINVAL"),
    "descriptors to wait for": Kept(("poll_many", "1025"), "EINVAL"),
    "fewer of them": Kept(("poll_many", "1024"), None),
    "a huge file": Kept(("huge_memory_file",), "EINVAL", control=HUGE),
    "a huge page": Kept(
        ("system_call", str(CALLS["mmap"]), "0", "4096", "3", "0x40022", "-1", "0"), "ENOMEM", False
    ),
    "huge shared memory": Kept(
        ("system_call", str(CALLS["shmget"]), "0", "4096", "0x980"), "ENOMEM", control=False
    ),
}


def test_memory_that_nobody_counts(cage: ProbeCage) -> None:
    """With 64 MiB a plugin held gigabytes, by thousands of each."""
    rows = {name: row for name, row in KEPT.items() if IPV6 or row.words[1:3] != UDP6}
    words = [row.words for row in rows.values()]
    inside = dict(zip(rows, cage.attacks(*words), strict=True))
    assert {name: answer.answer.get("refused") for name, answer in inside.items()} == {
        name: row.expected for name, row in rows.items()
    }
    outside = split_results(cage.without("many", json.dumps(words), remove=["--seccomp 10"]))
    refused = {
        name: answer.answer["refused"]
        for (name, row), answer in zip(rows.items(), outside, strict=True)
        if row.control and "done" not in answer.answer
    }
    assert refused == {}, "the kernel refuses these without any filter"


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
        *(("become", uid) for uid in ("0", "1000")),
        *(("exists", place) for place in places),
    ]
    answers = cage.attacks(*asked)
    had, shown, memory, writable, groups, host, clock, ids, limits, entered, *more = answers
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
    # No other identity can be taken.
    assert ids.done == [[65534] * 3, [65534] * 3, []]
    assert [answer.refused for answer in more[:2]] == ["EINVAL", "EINVAL"]
    if is_root:
        assert cage.outside("become", "1000").done is True
    # Limits that always apply.
    found = limits.done
    assert found["CORE"] == found["MSGQUEUE"] == found["RTPRIO"] == [0, 0]
    assert found["NOFILE"][1] <= 4096
    assert found["MEMLOCK"][1] <= 64 << 10
    # Two layers refuse user namespaces. Without the filter the namespace limit refuses (ENOSPC). Without
    # both, the call succeeds.
    assert entered.refused == "EPERM"
    assert cage.without(*namespace, remove=["--seccomp 10"]).refused == "ENOSPC"
    closed = "--disable-userns --assert-userns-disabled"
    assert cage.without(*namespace, remove=["--seccomp 10", closed]).done is True
    # There is no /sys.
    assert [answer.done for answer in more[2:]] == [False] * len(places)
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
    add, find = ("add_key", str(CALLS["add_key"]), name), ("find_key", str(CALLS["keyctl"]), name)
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
        second = subprocess.run([*words, "inotify"], capture_output=True, text=True, timeout=20)
        first.communicate(timeout=20)
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
