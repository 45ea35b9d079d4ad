"""What the doctor reports as enforced: tried for real, and each answer also forced the other way."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pyseccomp
import pytest

from sandbox import cache
from sandbox.doctor import bwrap_version, conditions, ids, probes, rehearsal, user_namespaces
from sandbox.doctor.finding import Finding
from sandbox.doctor.probes import launcher_in_cage, named_hosts
from sandbox.doctor.trial import (
    KILLED,
    Note,
    Run,
    TrialOutcome,
    in_child,
    run_spawned,
    system_call,
    try_user_namespace,
)
from sandbox.doctor.user_namespaces import (
    FILTER,
    PROFILE,
    UNIT,
    Surroundings,
    apparmor_remedy,
    container,
    container_remedy,
    filter_remedy,
    refusal,
)
from sandbox.identity.uid_range import id_is_mapped
from sandbox.identity.uids import Occupancy
from sandbox.network.egress import EgressPlan
from sandbox.network.recipe import make_recipe
from sandbox.network.trial import RecipeRefusal, try_recipe
from sandbox.policy import policy
from sandbox.spawn.order import NetworkRecipe
from tests import elsewhere
from tests.conftest import ROOT, SPARE_UID, SYSTEM_PATH, Caller
from tests.tables import one_case

REAL = os.path.realpath(shutil.which("bwrap", path=SYSTEM_PATH) or "/usr/bin/bwrap")
# The uid a root's trial becomes; an ordinary user's stays its own.
UID = SPARE_UID + 3 if os.geteuid() == 0 else None


# --- children -----------------------------------------------------------------------------------------


def test_a_child_reports_each_step() -> None:
    def act(note: Note) -> None:
        note("first", 1)
        note("second", "two")

    assert in_child(act) == TrialOutcome({"first": 1, "second": "two"})


def test_steps_before_a_deadly_signal_are_kept() -> None:
    def act(note: Note) -> None:
        note("before", 0)
        os.kill(os.getpid(), signal.SIGSYS)

    assert in_child(act) == TrialOutcome({"before": 0}, signal=signal.SIGSYS)


def test_an_exception_is_reported() -> None:
    def act(note: Note) -> None:
        raise ValueError("no such thing")

    assert in_child(act).error == "ValueError: no such thing"


@pytest.mark.usefixtures("nothing_left")
def test_a_child_that_hangs_is_ended() -> None:
    def act(note: Note) -> None:
        note("before", 0)
        signal.pause()

    for seconds in (0.1, 1.0, 10.0):  # until it has had time to begin
        outcome = in_child(act, timeout=seconds)
        assert outcome.late
        if outcome.steps:
            break
    assert outcome.steps == {"before": 0}


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_a_program_that_hangs_is_ended_with_all_its_children() -> None:
    run = run_spawned(("/bin/sh", "-c", "sleep 1000 & sleep 1000"), uid=UID, timeout=0.5)
    assert (run.late, run.worked) == (True, False)


@pytest.mark.launches
def test_the_spawner_names_the_failed_stage() -> None:
    run = run_spawned(("/nonexistent",), uid=UID)
    assert (run.stage, run.number, run.worked) == ("start bubblewrap", errno.ENOENT, False)


def test_a_raw_system_call_answers_as_the_kernel_does() -> None:
    assert system_call("getppid") == os.getppid()
    assert system_call("landlock_create_ruleset", 0, 0, 0x8000) < 0


# --- who refuses --------------------------------------------------------------------------------------

FREE = Surroundings(
    uid=1000,
    capabilities=0,
    seccomp=0,
    no_new_privileges=False,
    label="",
    max_user_namespaces=15000,
    userns_clone=None,
    apparmor_restricts=None,
    chrooted=False,
    uid_mapped=True,
    container="",
    masked_proc=(),
)
NONSENSE: dict[str, int | str] = {"clone_nonsense": errno.EINVAL, "unshare_nonsense": errno.EINVAL}
MADE: dict[str, int | str] = {**NONSENSE, "create": 0, "label": ""}


@pytest.mark.parametrize(
    ("steps", "around", "cause", "remedy"),
    [
        ({"clone_nonsense": errno.EPERM}, FREE, "outer_seccomp", "RestrictNamespaces=no"),
        ({"clone_nonsense": errno.ENOSYS}, FREE, "outer_seccomp", "seccomp=unconfined"),
        (
            {"clone_nonsense": errno.EINVAL, "unshare_nonsense": errno.EPERM},
            FREE._replace(container="docker"),
            "outer_seccomp",
            "systempaths=unconfined",
        ),
        (
            {**NONSENSE, "mount_nonsense": errno.EPERM},
            FREE._replace(container="docker"),
            "outer_seccomp",
            "policies/container/seccomp.json",
        ),
        (
            {**NONSENSE, "mount_nonsense": errno.EFAULT, "umount2_nonsense": errno.ENOSYS},
            FREE._replace(container="podman"),
            "outer_seccomp",
            "unmask=ALL",
        ),
        (
            {**MADE, "map": 0, "uts": 0, "sethostname_nonsense": errno.EPERM},
            FREE._replace(container="kubernetes"),
            "outer_seccomp",
            "localhostProfile",
        ),
        (
            {**MADE, "map": 0, "pivot_root_nonsense": errno.EPERM, "proc": errno.EPERM},
            FREE._replace(masked_proc=("/proc/acpi",)),
            "outer_seccomp",  # first: what a filter hides the kernel was not asked
            "SystemCallFilter=",
        ),
        # Without the right to it the kernel itself answers EPERM: what failed before is the reason.
        (
            {**MADE, "map": errno.EPERM, "sethostname_nonsense": errno.EPERM},
            FREE._replace(uid=0),
            "capabilities",
            "CAP_SETFCAP",
        ),
        (
            {**NONSENSE, "create": errno.ENOSPC},
            FREE._replace(max_user_namespaces=0),
            "sysctl:user.max_user_namespaces",
            "sysctl -w user.max_user_namespaces=15000",
        ),
        ({**NONSENSE, "create": errno.ENOSPC}, FREE, "limit", "outer one"),
        ({**NONSENSE, "create": errno.EINVAL}, FREE, "kernel", "CONFIG_USER_NS"),
        (
            {**NONSENSE, "create": errno.EPERM},
            FREE._replace(userns_clone=0),
            "sysctl:kernel.unprivileged_userns_clone",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        ({**NONSENSE, "create": errno.EPERM}, FREE._replace(chrooted=True), "chroot", "pivot_root"),
        (
            {**NONSENSE, "create": errno.EPERM},
            FREE._replace(uid_mapped=False),
            "unmapped_uid",
            "map this uid",
        ),
        # Ubuntu 23.10 refuses at once; 24.04 lets it be made under a profile that may do nothing with it.
        (
            {**NONSENSE, "create": errno.EACCES},
            FREE._replace(apparmor_restricts=1, label="unconfined"),
            "apparmor",
            "policies/apparmor/runner",
        ),
        (
            {**MADE, "label": "unprivileged_userns (enforce)", "map": errno.EPERM},
            FREE._replace(apparmor_restricts=1, label="unconfined"),
            "apparmor",
            "apparmor_parser -r",
        ),
        (
            {**MADE, "map": 0, "mount": 0, "tmpfs": errno.EACCES},
            FREE._replace(label="docker-default (enforce)", container="docker"),
            "apparmor",
            "apparmor=unconfined",
        ),
        (
            {**MADE, "map": 0, "tmpfs": 0, "proc": errno.EPERM},
            FREE._replace(masked_proc=("/proc/acpi", "/proc/keys"), container="docker"),
            "container",
            "systempaths=unconfined",
        ),
        ({**MADE, "map": errno.EPERM}, FREE._replace(uid=0), "capabilities", "CAP_SETFCAP"),
        ({**NONSENSE, "create": errno.EPERM}, FREE._replace(container="lxc"), "container", "seccomp="),
        ({**NONSENSE, "create": errno.EACCES}, FREE, "security_module", "audit log"),
        ({**NONSENSE, "create": errno.EPERM}, FREE, "unknown", "kernel log"),
    ],
)
def test_the_refusing_mechanism_is_named(
    steps: dict[str, int | str], around: Surroundings, cause: str, remedy: str
) -> None:
    found = refusal(TrialOutcome(steps), around)
    assert found is not None
    assert (found.cause, remedy in found.remedy) == (cause, True), found


@pytest.mark.launches
def test_every_call_that_a_filter_kills_for_is_named() -> None:
    """In a child, which cannot get rid of its filter."""

    def act(note: Note) -> None:
        rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        for call in ("mount", "sethostname"):
            rules.add_rule(pyseccomp.KILL_PROCESS, call)
        rules.load()
        found = refusal(try_user_namespace(None), FREE)
        assert found is not None
        note("cause", found.cause)
        note("sentence", found.sentence)

    told = in_child(act)
    assert told.error == ""
    assert told.steps["cause"] == "outer_seccomp"
    assert str(told.steps["sentence"]).endswith("answers mount with SIGSYS and sethostname with SIGSYS")
    found = refusal(TrialOutcome({}, signal=signal.SIGSYS), FREE)
    assert found is not None and found.cause == "outer_seccomp"


def test_a_unit_is_told_its_own_options() -> None:
    steps: dict[str, int | str] = {**MADE, "map": 0, "sethostname_nonsense": errno.EPERM}
    in_unit = FREE._replace(unit="host.service")
    found = refusal(TrialOutcome({**steps, "mount_nonsense": KILLED}), in_unit)
    assert found is not None
    for words in ("in the unit host.service: ", "ProtectHostname=no", "= has to allow @mount and", UNIT):
        assert words in found.remedy, found
    assert "docker" not in found.remedy
    # A container that a unit started is a container.
    found = refusal(TrialOutcome(steps), in_unit._replace(container="docker"))
    assert found is not None and "docker run" in found.remedy
    assert "AF_NETLINK" in filter_remedy(in_unit, ("socket(AF_NETLINK)",))
    masked = TrialOutcome({**MADE, "map": 0, "tmpfs": 0, "proc": errno.EPERM})
    found = refusal(masked, in_unit._replace(masked_proc=("/proc/kmsg",)))
    assert found is not None and "ProtectKernelLogs=no" in found.remedy


def test_the_shipped_unit_lets_cages_be_built() -> None:
    """It sets nothing that the remedies take back, and allows what they add."""
    lines = [line.partition("=") for line in (ROOT / UNIT).read_text().splitlines() if line[:1].isupper()]
    options = {name: value for name, _, value in lines}
    for call, wanted in user_namespaces._OPTIONS.items():
        for option, _, value in (each.partition("=") for each in wanted):
            assert (
                option not in options
                if value == "no"
                else value in options[option].split()
                or (
                    value == "@keyring" and "@system-service" in options[option].split()  # which has it
                )
            ), (call, option)
    assert not {"ProtectKernelTunables", "ProtectKernelLogs", "ProcSubset", "ProtectControlGroups"} & set(
        options
    )
    assert options["NoNewPrivileges"] == "yes" and options["CapabilityBoundingSet"] == ""
    assert options["ProtectSystem"] == "strict" and "memory" in options["Delegate"]


def test_no_mechanism_is_named_if_all_steps_work() -> None:
    around = FREE._replace(container="docker", label="docker-default", masked_proc=("/proc/acpi",))
    assert refusal(TrialOutcome({**MADE, "map": 0, "tmpfs": 0, "proc": 0}), around) is None


def test_the_apparmor_profile_is_shipped_with_the_commands_that_load_it() -> None:
    commands = apparmor_remedy()
    assert shlex.quote(f"{ROOT}/{PROFILE}") in commands
    assert "apparmor_parser -r /etc/apparmor.d/runner" in commands
    script = commands.partition("as root: ")[2].partition(" > ")[0]
    made = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True).stdout
    folder = os.path.realpath(sysconfig.get_path("scripts"))
    assert f'@{{runner}} = "{folder}"\n' in made and os.path.exists(f"{folder}/runner")
    assert "profile runner @{runner}/runner{,-console} flags=(unconfined) {\n  userns,\n" in made


@pytest.mark.parametrize(
    ("text", "first", "last", "mapped"),
    [
        ("0 0 4294967295\n", 61184, 65519, True),
        ("0 1000 1\n", 61184, 65519, False),
        ("0 100000 65536\n", 61184, 65519, True),
        ("0 100000 65519\n", 61184, 65519, False),
        ("0 100000 65520\n", 61184, 65519, True),
        ("63000 5 9000\n0 1 63000\n", 61184, 65519, True),
        ("0 1 62999\n63000 5 9000\n", 61184, 65519, False),
    ],
)
def test_a_range_is_mapped_only_as_a_whole(
    tmp_path: Path, text: str, first: int, last: int, mapped: bool
) -> None:
    (tmp_path / "map").write_text(text)
    assert id_is_mapped(first, last, str(tmp_path / "map")) is mapped


# --- the rehearsal ------------------------------------------------------------------------------------


@pytest.mark.launches
def test_every_layer_holds_in_a_rehearsal() -> None:
    findings = rehearsal.rehearse(REAL, UID)
    assert {finding.layer: finding.status for finding in findings} == dict.fromkeys(
        probes.REQUIRED
        - {
            "bwrap",
            "user_namespaces",
            "fresh_proc",
            "pid_namespace",
            "uid_drop",
            "session_keyring",
            "seccomp",
            "cage",
            "launcher",
        },
        "ok",
    )


@pytest.fixture
def dishonest(plugin_dir: Path) -> Callable[[str], str]:
    """dishonest(code): a bwrap that changes its list of `words` before it calls the real one."""

    def make(code: str) -> str:
        path = plugin_dir / "bwrap"
        path.write_text(
            "#!/usr/bin/python3 -IS\n"
            "import os, sys\n"
            "fd = int(sys.argv[2])\n"
            "words = os.read(fd, 1 << 20).decode().split('\\0')[:-1]\n"
            "os.close(fd)\n"
            "def drop(option, count):\n"
            "    while option in words:\n"
            "        at = words.index(option)\n"
            "        del words[at : at + count + 1]\n"
            f"{code}\n"
            f"os.execve({REAL!r}, ['bwrap', *words, *sys.argv[3:]], {{}})\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.layer: finding.status for finding in findings if finding.status != "ok"}


@pytest.mark.launches
def test_the_dishonest_bwrap_is_honest_when_told_nothing(dishonest: Callable[[str], str]) -> None:
    """The control of the two tests below."""
    assert statuses(rehearsal.rehearse(dishonest(""), UID)) == {}


@pytest.mark.launches
@one_case(
    ("code", "layer"),
    [
        ("drop('--unshare-ipc', 0)", "namespaces"),
        ("drop('--unshare-uts', 0); drop('--hostname', 1)", "namespaces"),
        ("drop('--unshare-cgroup', 0)", "cgroup_namespace"),
        ("drop('--unshare-net', 0)", "network"),
        ("words[:0] = ['--uid', '5']; drop('--uid', 1); words[:0] = ['--uid', '5']", "identity"),
        ("drop('--cap-drop', 1); words += ['--cap-add', 'ALL']", "capabilities"),
        ("os.open('/', os.O_PATH); os.set_inheritable(3, True)", "session"),
        ("words += ['--tmpfs', '/fd-bind']", "fd_binds"),
        ("words += ['--ro-bind', '/proc/kallsyms', '/proc/kallsyms']", "masked_proc"),
        ("words[-4:-4] = ['--ro-bind', '/sys', '/sys']; drop('--remount-ro', 1)", "masked_proc"),
        ("words += ['--tmpfs', '/tmp', '--remount-ro', '/tmp']", "scratch"),
        ("drop('--add-seccomp-fd', 1)", "seccomp_in_cage"),
        ("drop('--remount-ro', 1)", "read_only_root"),
    ],
)
def test_a_layer_that_bwrap_accepts_but_does_not_make_is_detected(
    dishonest: Callable[[str], str], code: str, layer: str
) -> None:
    findings = rehearsal.rehearse(dishonest(code), UID)
    assert statuses(findings).get(layer) == "missing", findings
    fault = next(finding for finding in findings if finding.layer == layer)
    assert fault.cause == "ineffective"


@pytest.mark.launches
@one_case(
    ("option", "layer"),
    [
        ("--ro-bind-fd", "fd_binds"),
        ("--disable-userns", "nested_user_namespaces"),
        ("--unshare-net", "network"),
        ("--add-seccomp-fd", "seccomp_in_cage"),
    ],
)
def test_a_layer_that_bwrap_refuses_is_named_alone(
    dishonest: Callable[[str], str], option: str, layer: str
) -> None:
    old = dishonest(
        f"if {option!r} in words:\n    sys.stderr.write('bwrap: Unknown option {option}\\n'); sys.exit(1)"
    )
    findings = rehearsal.rehearse(old, UID)
    assert statuses(findings) == {layer: "missing"}
    fault = next(finding for finding in findings if finding.layer == layer)
    assert fault.summary == f"bwrap: Unknown option {option}"
    assert "too old" in fault.remedy


@pytest.mark.launches
def test_where_no_cage_can_be_built_one_finding_says_so(
    dishonest: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = dishonest("sys.stderr.write('bwrap: No permissions\\n'); sys.exit(1)")
    (finding,) = rehearsal.rehearse(broken, UID)
    assert (finding.layer, finding.status) == ("cage", "missing")
    assert "No permissions" in finding.summary
    no_openat2 = "bwrap: Can't open source /usr: Function not implemented"
    monkeypatch.setattr(rehearsal, "read_surroundings", lambda: FREE._replace(unit="host.service"))
    (finding,) = rehearsal.rehearse(dishonest(f"sys.exit({no_openat2!r})"), UID)
    assert "in the unit host.service: RestrictSUIDSGID=no" in finding.remedy


@pytest.mark.launches
def test_layers_that_only_fail_together_do_not_pass(dishonest: Callable[[str], str]) -> None:
    picky = dishonest("if '--add-seccomp-fd' in words and '--unshare-net' in words: sys.exit(1)")
    assert statuses(rehearsal.rehearse(picky, UID)) == {"cage": "missing"}


@pytest.mark.launches
def test_an_incomplete_report_proves_nothing(dishonest: Callable[[str], str]) -> None:
    silent = dishonest("sys.argv[4:] = ['/bin/sh', '-c', ':']")
    findings = rehearsal.rehearse(silent, UID)
    assert all(finding.status == "missing" for finding in findings)


@pytest.mark.launches
def test_a_launcher_that_may_not_run_is_found(dishonest: Callable[[str], str]) -> None:
    """As on a machine with a list of the programs that may be executed."""
    found = launcher_in_cage(REAL, UID)
    assert (found.layer, found.status) == ("launcher", "ok")
    refuses = (
        "if sys.argv[4].startswith('/proc/self/fd/'):\n"
        "    sys.stderr.write('bwrap: execvp: Permission denied\\n'); sys.exit(1)"
    )
    found = launcher_in_cage(dishonest(refuses), UID)
    assert (found.status, "Permission denied" in found.summary) == ("missing", True)
    assert "execute a memfd" in found.remedy
    # And one that starts something else in its place.
    assert launcher_in_cage(dishonest("sys.argv[4:] = ['/bin/sh', '-c', ':']"), UID).status == "missing"


def test_a_failed_run_is_reported_in_a_sentence() -> None:
    assert rehearsal.describe_run(Run(stage="drop the user id", number=errno.EPERM)).startswith(
        "could not drop the user id"
    )
    assert rehearsal.describe_run(Run(late=True)) == "it took longer than 60 s"
    assert "31" in rehearsal.describe_run(Run(signal=31))


# --- the other probes ---------------------------------------------------------------------------------


def test_a_probe_that_raises_is_a_finding() -> None:
    def broken(machine: probes.Machine) -> Finding:
        raise ZeroDivisionError("of the probe")

    machine = probes.Machine({}, None, FREE, (61184, 65519))
    (finding,) = probes.run_probe("seccomp", broken, machine)
    assert (finding.layer, finding.status) == ("seccomp", "missing")
    assert "ZeroDivisionError: of the probe" in finding.summary
    assert probes.unmet([finding]) == (finding,)


def test_only_missing_required_layers_fail_the_verdict() -> None:
    assert not probes.unmet([Finding("seccomp", "ok", ""), Finding("core_dumps", "degraded", "")])
    assert not probes.unmet([Finding("memory_limit", "degraded", ""), Finding("swap", "missing", "")])
    limit = Finding("memory_limit", "missing", "")
    assert probes.unmet([limit]) == (limit,)
    findings = [Finding("seccomp", "missing", ""), Finding("seccomp_in_cage", "missing", "")]
    assert probes.unmet(findings) == tuple(findings)
    assert probes.unmet(findings, ["uid"]) == tuple(findings)
    assert not probes.unmet(findings, ["seccomp"])


def test_every_layer_a_policy_may_name_is_known_here() -> None:
    assert set(probes.POLICY_LAYERS) == set(policy.LAYERS)
    assert {layer for layers in probes.POLICY_LAYERS.values() for layer in layers} <= probes.REQUIRED


@pytest.mark.parametrize(
    ("version", "cves"),
    [
        ("0.12.0", []),
        ("0.12", []),
        ("0.11.2", ["CVE-2026-87766"]),
        ("0.11.1", ["CVE-2026-87766", "CVE-2026-41163"]),
        ("0.8.0", ["CVE-2026-87766"]),
        ("0.4.0", ["CVE-2026-87766", "CVE-2020-5291"]),
    ],
)
def test_flaws_by_version(version: str, cves: list[str]) -> None:
    assert [flaw.cve for flaw in bwrap_version.flaws_of(bwrap_version.version_numbers(version))] == cves


def test_an_unreadable_version_is_a_warning() -> None:
    assert bwrap_version.version_numbers("unreleased") == ()


def test_accounts_within_the_range_are_found(tmp_path: Path) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text(
        "root:x:0:0::/root:/bin/sh\nlow:x:61184:1::/:/\nodd line\nhigh:x:65519:1::/:/\nout:x:65520:1::/:/\n"
    )
    assert ids.accounts_within(61184, 65519, str(passwd)) == ["low (61184)", "high (65519)"]


def test_ranges_of_containers_are_found(tmp_path: Path) -> None:
    subuid = tmp_path / "subuid"
    subuid.write_text("before:100:100\nme:100000:65536\nodd line\nyou:165536:65536\n")
    assert ids.subordinate_within(165535, 165535, str(subuid)) == ["me"]
    assert ids.subordinate_within(165535, 165536, str(subuid)) == ["me", "you"]
    assert ids.subordinate_within(200, 99999, str(subuid)) == []


@pytest.mark.needs("root")
def test_an_account_within_the_range_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = ids.uid_range(0, 2147418112, 2147483647)
    assert (finding.status, "used by plugins only" in finding.summary) == ("ok", True)
    monkeypatch.setattr(ids, "accounts_within", lambda first, last, path="": ["mallory (61200)"])
    (finding,) = ids.uid_range(0, 61184, 65519)
    assert (finding.status, "mallory (61200)" in finding.summary) == ("degraded", True)
    monkeypatch.undo()
    monkeypatch.setattr(ids, "subordinate_within", lambda first, last: ["mallory"])
    (finding,) = ids.uid_range(0, 100000, 165535)
    assert (finding.status, "containers of mallory" in finding.summary) == ("degraded", True)


@pytest.mark.parametrize(
    ("booted", "mapped", "status"), [(1, 0, "degraded"), (0, 1, "degraded"), (0, 0, "ok")]
)
def test_the_range_of_systemds_services_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, booted: int, mapped: int, status: str
) -> None:
    """Unless it is the range of a container that shares no uids with others."""
    monkeypatch.setattr(os.path, "exists", lambda path: bool(booted))
    monkeypatch.setattr(ids, "id_is_mapped", lambda first, last: bool(mapped))
    (finding,) = ids.uid_range(0, 65000, 65519)
    assert (finding.status, "DynamicUser" in finding.summary) == (status, status == "degraded")


@pytest.mark.parametrize(("reserved", "status"), [(28, "ok"), (29, "degraded"), (32, "degraded")])
def test_a_pool_that_is_nearly_full_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, reserved: int, status: str
) -> None:
    full = Occupancy(reserved, 32, 3, 33, 0)
    monkeypatch.setattr(ids, "occupancy", lambda first, last: full)
    (finding,) = ids.uid_pool(0, 5000, 5064)
    assert finding.status == status
    told = (
        f"{reserved} of 32 uids for plugins with state are reserved, 3 of 33 uids for plugins without "
        "state are in use"
    )
    assert finding.summary == told
    assert ("runner state remove" in finding.remedy) == (status == "degraded")
    assert ids.uid_pool(1000, 5000, 5064) == []  # an ordinary user has no uids to give


@pytest.mark.parametrize(
    ("pattern", "status"),
    [("core", "ok"), ("/var/core.%p", "ok"), ("|/usr/share/apport/apport -p%p", "degraded")],
)
def test_a_core_pattern_that_starts_a_program_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, pattern: str, status: str
) -> None:
    monkeypatch.setattr(conditions, "sysctl", lambda name: pattern)
    assert conditions.core_dumps().status == status


@pytest.mark.parametrize(("value", "status"), [(0, "degraded"), (1, "ok"), (2, "ok"), (None, "info")])
def test_unprotected_links_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, value: int | None, status: str
) -> None:
    monkeypatch.setattr(conditions, "sysctl_number", lambda name: value)
    assert {finding.status for finding in conditions.protected_links()} == {status}


def test_an_interpreter_below_a_denied_path_is_a_warning(plugin_dir: Path, tmp_path: Path) -> None:
    home = plugin_dir / "home"
    hidden = home / ".docker" / "bin"  # denied in every home
    hidden.mkdir(parents=True)
    for folder in (hidden, plugin_dir / "fine"):
        folder.mkdir(exist_ok=True)
        (folder / "python3").write_text("#!/bin/sh\n")
        (folder / "python3").chmod(0o755)
    (plugin_dir / "linked").mkdir()
    (plugin_dir / "linked" / "python3").symlink_to(hidden / "python3")

    def status(folder: Path) -> str:
        environ = {"PATH": str(folder), "HOME": str(home)}
        return next(f.status for f in conditions.interpreters(environ) if f.layer == "interpreter_python3")

    assert status(plugin_dir / "fine") == "ok"
    (plugin_dir / "shims").mkdir()
    (plugin_dir / "shims/python3").write_text('#!/bin/sh\nexec "/opt/pyenv/libexec/pyenv" exec "$0" "$@"\n')
    (plugin_dir / "shims/python3").chmod(0o755)
    assert status(plugin_dir / "shims") == "degraded"
    assert status(hidden) == "degraded"
    assert status(plugin_dir / "linked") == "degraded"
    assert status(tmp_path) == "info"


# --- what stands around -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("docker", ("docker run", "systempaths=unconfined")),
        ("podman", ("podman run", "unmask=ALL")),
        ("kubernetes", ("securityContext", "procMount: Unmasked", "hostUsers: false")),
        ("lxc", ("docker run", "podman run")),
    ],
)
def test_the_remedy_is_in_the_words_of_the_engine(engine: str, words: tuple[str, ...]) -> None:
    remedy = container_remedy(engine)
    assert all(word in remedy for word in (*words, "docs/containers.md", FILTER))


def test_a_pod_is_known_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """On cgroup v2 a pod's own cgroup has no telling name."""

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setenv("container", "other")
    found = []
    for variable in ("SOMETHING_ELSE", "KUBERNETES_SERVICE_HOST"):
        with monkeypatch.context() as patch:
            patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
            patch.setenv(variable, "10.0.0.1")
            patch.setattr("builtins.open", refuse)
            found.append(container())
    assert found == ["other", "kubernetes"]


def test_the_cache_directory_is_reported_or_why_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", "off")
    assert conditions.manifest_cache().status == "info"
    monkeypatch.delenv("RUNNER_CACHE")
    monkeypatch.setattr(cache, "_own_directory", lambda: str(tmp_path / "cache"))
    assert conditions.manifest_cache() == Finding("cache", "ok", str(tmp_path / "cache"))
    # A home and a /tmp that are read-only, as far as this process can see.
    monkeypatch.setattr(cache, "_can_be_written", lambda path: False)
    found = conditions.manifest_cache()
    shared = "/run" if os.geteuid() == 0 else "/tmp"
    assert (found.status, f"{shared} cannot be written" in found.summary) == ("degraded", True), found
    assert "--tmpfs" in found.remedy
    assert os.listdir(tmp_path) == []


# --- lists of hosts -----------------------------------------------------------------------------------

REDIRECT = "redirect every port of IPv4 to the gate"


def refuse_recipes(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse_step(recipe: NetworkRecipe) -> None:
        if any(step == each.step for each in recipe.requests):
            raise RecipeRefusal(step, errno.EOPNOTSUPP)

    monkeypatch.setattr(probes, "try_recipe", refuse_step)


def test_a_list_of_hosts_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_recipes(monkeypatch, "switch on loopback")
    (found,) = named_hosts()
    assert (found.layer, found.status) == ("named_hosts", "missing")
    assert "could not switch on loopback: Operation not supported" in found.summary and found.remedy


def test_a_list_of_hosts_without_nftables(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_recipes(monkeypatch, REDIRECT)
    works, lacks = named_hosts()
    assert (works.status, lacks.layer, lacks.status) == ("ok", "every_port", "info")
    assert REDIRECT in lacks.summary and "CONFIG_NFT_REDIR" in lacks.remedy


def examined_hosts() -> list[list[str]]:
    from sandbox.doctor.probes import named_hosts

    return [[each.layer, each.status, each.summary] for each in named_hosts()]


def test_a_list_of_hosts_on_this_machine(runner_as: Caller) -> None:
    found = elsewhere.run(runner_as, examined_hosts)
    assert [row[0] for row in found] == ["named_hosts", "every_port"], found
    assert found[0][1] == "ok"  # the second depends on how the kernel was built


@pytest.mark.launches
def test_a_recipe_that_the_kernel_refuses_is_told_with_its_step() -> None:
    recipe = make_recipe(EgressPlan(("*:*",), every_port=True))
    broken = [
        each._replace(messages=each.messages.replace(b"redir\0", b"rodir\0"))
        if each.step == REDIRECT
        else each
        for each in recipe.requests
    ]
    with pytest.raises(RecipeRefusal, match=f"could not {REDIRECT}: No such file"):
        try_recipe(recipe._replace(requests=tuple(broken)))
    try_recipe(recipe)
