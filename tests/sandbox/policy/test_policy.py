from __future__ import annotations

import os
import re
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from sandbox import cache
from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.identity import accounts
from sandbox.network.egress import EgressLimits
from sandbox.paths.denied_paths import HOST_PATHS
from sandbox.policy import load as module
from sandbox.policy.approval import limit_approval, raise_ceilings
from sandbox.policy.grant import grant
from sandbox.policy.load import load_policy, policy_folders, policy_names, trust_fault
from sandbox.policy.parse import parse_policy
from sandbox.policy.policy import (
    LAYERS,
    LIMIT_NAMES,
    RUNTIME_PATHS,
    ApprovalRule,
    CapabilityRule,
    EnvRule,
    LimitRule,
    NetworkRule,
    PackageRule,
    PathRule,
    Policy,
    SeccompRule,
    host_matches,
    matches,
    steers,
)
from sandbox.spec import (
    POLICY_HOSTS,
    Approval,
    Denial,
    EnvRequest,
    Grant,
    Limits,
    Network,
    NetworkMode,
    Overrides,
    PathRequest,
    SandboxSpec,
    SeccompProfile,
)
from sandbox.surroundings import ClientSurroundings, enter
from tests.tables import one_case

STATE = "/var/lib/somewhere/plugin"
PLAIN = Policy("test", "/test.toml")


def given(spec: SandboxSpec, policy: Policy = PLAIN, **options: Any) -> Grant:
    return grant(spec, policy, **{"state_dir": STATE, "environ": {}, **options})


def rules(result: Grant) -> list[tuple[str, bool]]:
    return [(denial.rule, denial.required) for denial in result.denials]


# --- the policies that come along -----------------------------------------------------------------


def test_the_packaged_policies() -> None:
    assert policy_names() == ("default", "dev", "strict")
    for name in policy_names():
        policy = load_policy(name, {})
        assert policy.name == name and policy.description and not policy.unsandboxed


def test_default_gives_an_unknown_plugin_nothing_of_the_host() -> None:
    policy = load_policy("default", {})
    assert policy.network == NetworkRule("none", "none", (), environment_may_raise=True)
    assert policy.read.default == policy.write.default == ()
    assert policy.write.ceiling == ("${state_dir}",)
    assert "*" not in policy.read.ceiling + policy.env.ceiling and policy.env.steering == ()
    assert policy.seccomp == SeccompRule("default", "default")
    defaults = {name for name, rule in policy.limits if rule.default is not None}
    assert defaults == {"memory", "pids", "tmp", "shm"}  # by silence a manifest loses nothing else
    assert policy.uids == (2147418112, 2147483647)
    assert all(policy.layer(layer) == "require" for layer in LAYERS)


def test_strict_is_nowhere_wider_than_default() -> None:
    strict, default = load_policy("strict", {}), load_policy("default", {})
    assert strict.seccomp == SeccompRule("strict", "strict")
    assert strict.read.ceiling == () and strict.write.ceiling == default.write.ceiling
    assert strict.capabilities == CapabilityRule()
    assert strict.env.passed == strict.env.ceiling == strict.env.steering == ()
    for name, rule in default.limits:
        tighter = strict.limit(name)
        assert tighter.ceiling is not None and rule.ceiling is not None and tighter.ceiling <= rule.ceiling
        if rule.default is not None:
            assert tighter.default is not None and tighter.default < rule.default


@pytest.mark.parametrize(
    ("policy", "delegated", "elsewhere"),
    [
        ("default", {"memory", "pids"}, set()),
        ("strict", {"memory", "pids", "cpu_time"}, {"memory", "pids", "cpu_time"}),
        ("dev", set(), set()),
    ],
)
def test_which_limits_a_machine_has_to_enforce_for_a_silent_manifest(
    policy: str, delegated: set[str], elsewhere: set[str]
) -> None:
    """Only limits that need cgroups."""
    chosen = load_policy(policy, {})
    granted = given(SandboxSpec(), chosen).limits
    for has_cgroup, expected in ((True, delegated), (False, elsewhere)):
        assert expected == {
            name
            for name in ("memory", "pids", "cpu", "cpu_time", "io")
            if getattr(granted, name) is not None and chosen.limit(name).required(has_cgroup)
        }


def test_asking_for_a_lower_limit_never_refuses_the_launch() -> None:
    """Under default, on a machine where the user cannot make cgroups."""
    default = load_policy("default", {})
    assert not any(
        default.limit(name).required(False) for name in ("memory", "pids", "cpu", "cpu_time", "io")
    )
    # Where one can, the two that a silent manifest has too are a must.
    must = {
        name for name in ("memory", "pids", "cpu", "cpu_time", "io") if default.limit(name).required(True)
    }
    assert must == {"memory", "pids"}


@pytest.mark.parametrize(
    ("policy", "declares", "memory", "roots"),
    [("default", True, True, False), ("strict", False, False, False), ("dev", True, True, True)],
)
def test_capabilities_and_host_methods_a_plugin_may_use(
    policy: str, declares: bool, memory: bool, roots: bool
) -> None:
    rule = load_policy(policy, {}).capabilities
    assert matches(rule.declare, "anything") is declares
    assert matches(rule.host, "memory.recall") is matches(rule.host, "broker.publish") is memory
    assert matches(rule.host, "roots/list") is matches(rule.host, "sampling/createMessage") is roots


def test_dev_has_no_ceilings_for_limits() -> None:
    assert all(rule.ceiling is None for _, rule in load_policy("dev", {}).limits)


def test_dev_reads_what_is_not_denied_and_has_the_network_on_request() -> None:
    dev = load_policy("dev", {})
    asks = SandboxSpec(
        paths=(PathRequest("/srv/data", "read"), PathRequest("/tmp/x", "write")),
        network=Network("host"),
        seccomp="compat",
    )
    assert given(asks, dev).denials == ()
    assert given(SandboxSpec(), dev).network.mode == "none"
    for path in HOST_PATHS:
        assert rules(given(SandboxSpec(paths=(PathRequest(path, "read"),)), dev)) == [("denylist", True)]


# --- which policy ---------------------------------------------------------------------------------


@pytest.fixture
def system_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "etc" / "policy.toml"
    path.parent.mkdir(mode=0o755)
    monkeypatch.setattr(module, "SYSTEM_POLICY", str(path))
    return path


def written(path: Path, text: str = "version = 1\n", mode: int = 0o644) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_search_order_of_policies(tmp_path: Path, system_policy: Path) -> None:
    mine = written(tmp_path / "mine.toml")
    other = written(tmp_path / "other.toml")
    assert load_policy(None, {}).name == "default"
    written(system_policy)
    assert load_policy(None, {}).name == str(system_policy)
    assert load_policy(None, {"RUNNER_POLICY": ""}).name == str(system_policy)
    assert load_policy(None, {"RUNNER_POLICY": "strict"}).name == "strict"
    assert load_policy(None, {"RUNNER_POLICY": str(other)}).name == str(other)
    assert load_policy(str(mine), {"RUNNER_POLICY": str(other)}).name == str(mine)
    assert load_policy("dev", {"RUNNER_POLICY": str(other)}).name == "dev"
    # Of a client of a hub, which is in a folder of its own.
    of_client = copy_context()
    of_client.run(enter, ClientSurroundings({}, str(tmp_path)))
    for named, environ in (("./mine.toml", {}), (None, {"RUNNER_POLICY": "./mine.toml"})):
        assert of_client.run(load_policy, named, environ).name == str(mine)
        assert of_client.run(policy_folders, named, environ)[0] == str(tmp_path)


def test_a_policy_that_cannot_be_used_is_never_replaced(tmp_path: Path, system_policy: Path) -> None:
    system_policy.symlink_to("nowhere")
    with pytest.raises(DocumentError):
        load_policy(None, {})
    for told in ("nosuch", str(tmp_path / "nosuch.toml"), "../default", str(tmp_path)):
        with pytest.raises(DocumentError):
            load_policy(told, {})
        with pytest.raises(DocumentError):
            load_policy(None, {"RUNNER_POLICY": told})


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DocumentError) as caught:
        load_policy("strickt", {})
    (fault,) = caught.value.diagnostics
    assert "default, dev, strict" in fault.hint and "did you mean 'strict'?" in fault.hint
    written(tmp_path / "strickt")
    with pytest.raises(DocumentError) as caught:
        load_policy("strickt", {})
    assert "./strickt" in caught.value.diagnostics[0].hint


@pytest.mark.parametrize(
    ("file_mode", "directory_mode", "trusted"),
    [
        (0o644, 0o755, True),
        (0o600, 0o700, True),
        (0o664, 0o755, False),
        (0o646, 0o755, False),
        (0o644, 0o775, False),
        (0o644, 0o757, False),
        (0o644, 0o1777, True),  # sticky: nobody can replace what is ours
    ],
)
def test_a_policy_others_can_write_is_refused(
    tmp_path: Path, file_mode: int, directory_mode: int, trusted: bool
) -> None:
    directory = tmp_path / "directory"
    directory.mkdir()
    path = written(directory / "policy.toml", mode=file_mode)
    directory.chmod(directory_mode)
    assert (trust_fault(str(path)) is None) is trusted
    if trusted:
        assert load_policy(str(path), {}).name == str(path)
        return
    with pytest.raises(DocumentError) as caught:
        load_policy(str(path), {})
    (fault,) = caught.value.diagnostics
    assert fault.rule == "policy_untrusted" and fault.hint.startswith("chmod go-w ")


def test_a_weak_directory_further_up_or_on_the_way_of_a_link(tmp_path: Path) -> None:
    weak = tmp_path / "weak"
    (weak / "strong").mkdir(parents=True)
    written(weak / "strong" / "policy.toml")
    strong = written(tmp_path / "policy.toml")
    (weak / "link.toml").symlink_to(strong)
    assert trust_fault(str(weak / "link.toml")) is None
    weak.chmod(0o777)
    assert str(weak) in (trust_fault(str(weak / "strong" / "policy.toml")) or ("",))[0]
    assert str(weak) in (trust_fault(str(weak / "link.toml")) or ("",))[0]
    assert trust_fault(str(strong)) is None


def test_every_link_on_the_way_counts(tmp_path: Path) -> None:
    """good/link.toml -> weak/hop -> real.toml: a user who can write to weak/ chooses the policy."""
    good, weak = tmp_path / "good", tmp_path / "weak"
    good.mkdir()
    weak.mkdir()
    real = written(tmp_path / "real.toml")
    (good / "link.toml").symlink_to("../weak/hop")
    (weak / "hop").symlink_to(real)
    (tmp_path / "folder").symlink_to("weak/folder")
    (weak / "folder").symlink_to(good)
    for path in (good / "link.toml", tmp_path / "folder" / "link.toml"):
        assert trust_fault(str(path)) is None
    weak.chmod(0o777)
    assert trust_fault(str(real)) is None
    for path in (good / "link.toml", tmp_path / "folder" / "link.toml"):
        reason, hint = trust_fault(str(path)) or ("", "")
        assert f"its directory {weak} can be written" in reason and hint == f"chmod go-w {weak}"
        with pytest.raises(DocumentError):
            load_policy(str(path), {})


@pytest.mark.needs("root")
def test_a_link_of_another_user_in_a_sticky_directory_is_refused(tmp_path: Path) -> None:
    real = written(tmp_path / "real.toml")
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "link.toml").symlink_to(real)
    assert trust_fault(str(sticky / "link.toml")) is None  # the control
    os.lchown(sticky / "link.toml", 54321, 54321)
    reason, _ = trust_fault(str(sticky / "link.toml")) or ("", "")
    assert f"the link {sticky}/link.toml that leads to it belongs to uid 54321" in reason


def test_circular_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(DocumentError) as caught:
        load_policy(str(tmp_path / "loop.toml"), {})
    assert caught.value.diagnostics[0].rule == "file_unreadable"


@pytest.mark.needs("root")
def test_a_policy_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "policy.toml")
    assert trust_fault(str(path)) is None
    os.chown(path, 54321, 54321)
    assert "54321" in (trust_fault(str(path)) or ("",))[0]


# --- reading --------------------------------------------------------------------------------------


def faults(text: str) -> list[Diagnostic]:
    with pytest.raises(DocumentError) as caught:
        parse_policy("p.toml", text.encode(), name="p")
    return list(caught.value.diagnostics)


FULL = """version = 1
description = "all of it"
unsandboxed = "allow"
deny = ["/srv/vault/", "//srv/other"]
scan_limit = 7
machine_share = "12.5%"
[read]
default = ["/srv/data"]
ceiling = ["/srv", "*"]
[write]
default = ["${state_dir}"]
ceiling = ["${state_dir}/x", "/etc"]
[network]
default = "none"
ceiling = "allowlist"
hosts = ["Example.com:443", "*.example.com:*", "*:22"]
connections = 7
bytes = "2G"
rate = "512K"
idle = "90s"
[env]
set = {A = "1"}
pass = ["B"]
ceiling = ["C_*"]
steering = ["LD_*"]
[seccomp]
default = "strict"
ceiling = "compat"
[limits.memory]
default = "256M"
ceiling = "1G"
mode = "prefer"
[limits.deadline]
default = "2m"
[limits.cpu]
ceiling = "50%"
[limits.pids]
default = 5
mode = "delegated"
[limits.io]
mode = "require"
[limits.tmp]
ceiling = "1M"
[user]
uids = [100000, 165535]
[layers]
seccomp = "prefer"
[capabilities]
declare = ["fs.read", "net.*", "fs.read"]
host = ["roots/list", "sampling/*"]
[packages]
signature = "required"
trust = "/etc/keys"
"""


def test_every_key_of_a_policy() -> None:
    policy = parse_policy("p.toml", FULL.encode(), name="p")
    assert policy == Policy(
        name="p",
        file="p.toml",
        description="all of it",
        unsandboxed=True,
        deny=("/srv/vault", "/srv/other"),
        scan_limit=7,
        machine_share=0.125,
        read=PathRule(("/srv/data",), ("/srv", "*")),
        write=PathRule(("${state_dir}",), ("${state_dir}/x", "/etc")),
        network=NetworkRule(
            "none",
            "allowlist",
            ("example.com:443", "*.example.com:*", "*:22"),
            limits=EgressLimits(connections=7, bytes=2 << 30, rate=512 << 10, idle=90.0),
        ),
        env=EnvRule((("A", "1"),), ("B",), ("C_*",), ("LD_*",)),
        seccomp=SeccompRule("strict", "compat"),
        limits=(
            ("memory", LimitRule(256 << 20, 1 << 30, "prefer")),
            ("pids", LimitRule(5, None, "delegated")),
            ("cpu", LimitRule(None, 0.5)),
            ("io", LimitRule()),
            ("tmp", LimitRule(1 << 20, 1 << 20)),
            ("shm", LimitRule(64 << 20)),
            ("deadline", LimitRule(120.0)),
        ),
        uids=(100000, 165535),
        layers=(("seccomp", "prefer"),),
        capabilities=CapabilityRule(("fs.read", "net.*"), ("roots/list", "sampling/*")),
        packages=PackageRule("required", "/etc/keys"),
    )


def test_an_empty_policy_gives_nothing_and_limits_the_memory_filesystems() -> None:
    policy = parse_policy("p.toml", b"version = 1", name="p")
    assert policy == Policy(
        "p", "p.toml", limits=(("tmp", LimitRule(256 << 20)), ("shm", LimitRule(64 << 20)))
    )


FAULTS = {
    "version = 2": "policy_version",
    "version = true": "policy_version",
    "unsandboxed = true": "policy_value",
    '[hooks]\non_failure = "perhaps"': "policy_value",
    '[packages]\nsignature = "require"': "policy_value",
    "[packages]\nsignature = true": "policy_value",
    '[packages]\ntrust = "keys"': "policy_value",
    '[packages]\ntrust = "/etc/../keys"': "policy_value",
    "[packages]\ntrust = 1": "invalid_type",
    '[packages]\nsignatures = "required"': "policy_unknown_key",
    '[hooks]\non_falure = "abort"': "policy_unknown_key",
    'unsandboxed = "alow"': "policy_value",
    'description = ["x"]': "invalid_type",
    'deny = ["relative"]': "policy_value",
    'deny = ["/a/../b"]': "policy_value",
    'deny = ["/"]': "policy_value",
    'deny = ["${state_dir}"]': "policy_value",
    'deny = "/x"': "invalid_type",
    "scan_limit = 0": "policy_value",
    "machine_share = 0.25": "policy_value",
    'machine_share = "25"': "policy_value",
    'machine_share = "0%"': "policy_value",
    'machine_share = "100.1%"': "policy_value",
    'machine_share = " 25%\\n"': "policy_value",
    "scan_limit = true": "policy_value",
    'scan_limit = "many"': "policy_value",
    "read = 3": "invalid_type",
    'read = {default = ["/etc"]}': "policy_value",
    'read = {default = ["/root"]}': "policy_value",
    'read = {default = ["*"]}': "policy_value",
    'read = {ceiling = ["/root/.cache"]}': "policy_value",
    'read = {ceiling = ["${home}/x"]}': "policy_value",
    'read = {cieling = ["/srv"]}': "policy_unknown_key",
    "network = {connections = 0}": "policy_value",
    "network = {connections = 1025}": "policy_value",
    'network = {connections = "many"}': "policy_value",
    "network = {bytes = 0}": "policy_value",
    'network = {bytes = "lots"}': "policy_value",
    "network = {rate = -1}": "policy_value",
    "network = {rate = true}": "policy_value",
    "network = {idle = 0}": "policy_value",
    'network = {idle = "10M"}': "policy_value",
    'network = {default = "allowlist"}': "policy_value",
    'network = {default = "host", ceiling = "none"}': "policy_order",
    'network = {ceiling = "internet"}': "policy_value",
    'network = {environment = "may-raise"}': "policy_value",
    "network = {environment = true}": "policy_value",
    'network = {hosts = ["example.com"]}': "policy_value",
    'network = {hosts = ["example.com:0"]}': "policy_value",
    'network = {hosts = ["example.com:65536"]}': "policy_value",
    'network = {hosts = ["ex*mple.com:443"]}': "policy_value",
    'network = {hosts = ["a_b.example.com:443"]}': "policy_value",
    'network = {hosts = ["a..example.com:443"]}': "policy_value",
    'network = {hosts = ["*.2.3:443"]}': "policy_value",
    'network = {hosts = ["127.1:443"]}': "policy_value",
    'network = {hosts = ["10.0.0.1/8:443"]}': "policy_value",
    'network = {hosts = ["example.com:1-65"]}': "policy_value",
    "network = {loopback = 6379}": "invalid_type",
    f"network = {{loopback = {[*range(100, 165)]}}}": "invalid_type",
    "network = {loopback = [0]}": "policy_value",
    "network = {loopback = [65536]}": "policy_value",
    "network = {loopback = [true]}": "policy_value",
    'network = {loopback = ["6379"]}': "policy_value",
    "network = {loopback = [6379, 53]}": "policy_value",  # the gate's own ports
    "network = {loopback = [1]}": "policy_value",
    'env = {set = {"A=B" = "x"}}': "policy_value",
    "env = {set = {A = 1}}": "policy_value",
    "env = {set = 1}": "invalid_type",
    'env = {pass = ["A*"]}': "policy_value",
    'env = {ceiling = ["[A-Z]*"]}': "policy_value",
    'seccomp = {default = "compat", ceiling = "strict"}': "policy_order",
    'limits = {memory = {default = "2G", ceiling = "1G"}}': "policy_order",
    'limits = {memory = {default = "many"}}': "policy_value",
    "limits = {memory = {default = 0}}": "policy_value",
    "limits = {pids = {default = 1.5}}": "policy_value",
    'limits = {cpu = {default = "one"}}': "policy_value",
    "limits = {cpu = {ceiling = 0.001}}": "policy_value",
    "limits = {memory = {ceiling = 512}}": "policy_value",
    "limits = {open_files = {default = true}}": "policy_value",
    "limits = {message_queues = {ceiling = 0}}": "policy_value",
    'limits = {idle = {default = "-1s"}}': "policy_value",
    "limits = {pids = {default = []}}": "policy_value",
    "limits = {pids = {mode = true}}": "policy_value",
    "limits = {pids = 5}": "invalid_type",
    "limits = {pids = {defualt = 5}}": "policy_unknown_key",
    'limits = {memory = {mode = "maybe"}}': "policy_value",
    "limits = {ram = {}}": "policy_unknown_key",
    "user = {uids = [0, 100]}": "policy_value",
    "user = {uids = [60000, 65534]}": "policy_value",
    "user = {uids = [200, 100]}": "policy_value",
    "user = {uids = [1, 2, 3]}": "policy_value",
    "user = {uids = [true, 3]}": "policy_value",
    "user = {run_as = 0}": "policy_value",
    'user = {run_as = "0"}': "policy_value",
    'user = {run_as = "root"}': "policy_value",
    'user = {run_as = "nobody"}': "policy_value",
    "user = {run_as = 65534}": "policy_value",
    "user = {run_as = -1}": "policy_value",
    "user = {run_as = 4294967295}": "policy_value",
    "user = {run_as = 2147418112}": "policy_value",  # a plugin's
    'user = {run_as = "no such account"}': "policy_value",
    "user = {run_as = true}": "invalid_type",
    'user = {run_as = ""}': "invalid_type",
    'user = {runas = "www-data"}': "policy_unknown_key",
    'layers = {seccmp = "prefer"}': "policy_unknown_key",
    'layers = {seccomp = "off"}': "policy_value",
    "capabilities = []": "invalid_type",
    'capabilities = {declare = "*"}': "invalid_type",
    "capabilities = {declare = [1]}": "policy_value",
    'capabilities = {declare = [""]}': "policy_value",
    'capabilities = {host = ["memory. recall"]}': "policy_value",
    'capabilities = {host = ["memory\\n"]}': "policy_value",
    'capabilities = {hosts = ["*"]}': "policy_unknown_key",
    "colour = 1": "policy_unknown_key",
}


@one_case(("line", "rule"), FAULTS.items(), ids=FAULTS)
def test_faults(line: str, rule: str) -> None:
    text = line if line.startswith("version") else f"version = 1\n{line}"
    (fault,) = faults(text)
    assert fault.rule == rule
    assert fault.line == text.count("\n") + 1 and fault.column >= 1


def test_all_faults_in_one_pass_with_their_positions() -> None:
    text = 'vresion = 1\ndeny = ["x",\n  "/y", "z"]\n[layers]\nuid = "no"\n'
    found = [(f.line, f.column, f.rule) for f in faults(text)]
    assert found == [
        (1, 1, "policy_version"),
        (1, 1, "policy_unknown_key"),
        (2, 9, "policy_value"),
        (3, 9, "policy_value"),
        (5, 1, "policy_value"),
    ]


@pytest.mark.parametrize("word", ["hosts", "Host", "hst"])
def test_no_mistyped_word_is_corrected_to_the_widest_network(word: str) -> None:
    [fault] = faults(f'version = 1\n[network]\nceiling = "{word}"\n')
    assert "did you mean" not in fault.hint and fault.hint.startswith(
        '"allowlist" reaches the hosts of a list'
    )
    [near] = faults('version = 1\n[network]\nceiling = "alowlist"\n')  # the control
    assert near.hint == "did you mean 'allowlist'?"


def test_a_bad_limit_is_named_with_its_position() -> None:
    text = (
        "version = 1\n[limits.memory]\n  default = 256\nceiling = 1.5\nmode = 'deleguated'\n"
        "[limits.cpu]\nceiling = '0.1%'\n[limits.memroy]\nceiling = 5\n"
    )
    found = [(f.place, f.rule, f.message, f.hint) for f in faults(text)]
    small = "256 is less than 1 MiB, and no program starts with less; did you mean 256M?"
    size = "1.5 is not a size: write bytes as a number, or as in 512K, 256M, 1.5GiB"
    share = "'0.1%' is less than 0.01, and the kernel gives no smaller share"
    mode = "must be one of require, prefer, delegated, not 'deleguated'"
    assert found == [
        ("p.toml:3:3", "policy_value", f"limits.memory.default is wrong: {small}", ""),
        ("p.toml:4:1", "policy_value", f"limits.memory.ceiling is wrong: {size}", ""),
        ("p.toml:5:1", "policy_value", f"limits.memory.mode {mode}", "did you mean 'delegated'?"),
        ("p.toml:7:1", "policy_value", f"limits.cpu.ceiling is wrong: {share}", ""),
        (
            "p.toml:8:9",
            "policy_unknown_key",
            "limits.memroy is not a key of a policy",
            "did you mean 'memory'?",
        ),
    ]


@pytest.mark.parametrize(
    ("mode", "delegated", "required"),
    [
        ("require", True, True),
        ("require", False, True),
        ("prefer", True, False),
        ("prefer", False, False),
        ("delegated", True, True),
        ("delegated", False, False),
        (None, True, True),  # silence
        (None, False, True),
    ],
)
def test_limits_a_machine_has_to_enforce(mode: str | None, delegated: bool, required: bool) -> None:
    line = "" if mode is None else f"mode = '{mode}'\n"
    policy = parse_policy("p.toml", f"version = 1\n[limits.memory]\n{line}".encode(), name="p")
    assert policy.limit("memory").required(delegated) is required
    assert policy.limit("pids").required(delegated) is True  # nothing is said of it at all


def test_an_unknown_mode_counts_as_require() -> None:
    odd: Any = "later"
    assert LimitRule(mode=odd).required(False)


@pytest.mark.parametrize("name", policy_names())
def test_a_remembered_policy_is_the_same_policy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "directory", lambda: str(tmp_path / "cache"))
    first = load_policy(name, {})
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.delattr("sandbox.policy.parse.parse_policy")  # so that the second can only be remembered
    second = load_policy(name, {})
    assert second == first and [type(a) for a in second] == [type(a) for a in first]
    for (_, was), (_, now) in zip(first.limits, second.limits, strict=True):
        assert type(now) is LimitRule and [type(a) for a in now] == [type(a) for a in was]
        assert now.required(True) is was.required(True) and now.required(False) is was.required(False)


def test_a_mistyped_key_gets_a_suggestion() -> None:
    (fault,) = faults("version = 1\nscan_limt = 1\n")
    assert "did you mean 'scan_limit'?" in fault.hint


@pytest.mark.parametrize("raw", [b"version = ", b"\xff", b"a" * (2 << 20)])
def test_invalid_toml_is_a_fault_too(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(raw)
    path.chmod(0o600)
    with pytest.raises(DocumentError):
        load_policy(str(path), {})


# --- paths ----------------------------------------------------------------------------------------

PATHS = [
    # read ceiling, write ceiling, access, asked, rule of the denial
    ([], [], "read", "/srv/data", "read_ceiling"),
    (["/srv"], [], "read", "/srv/data", None),
    (["/srv/data"], [], "read", "/srv/data/", None),
    (["/srv/data"], [], "read", "/srv", "read_ceiling"),
    (["/srv/data"], [], "read", "/srv/database", "read_ceiling"),
    (["*"], [], "read", "/anything", None),
    (["*"], [], "read", "/root/x", "denylist"),
    (["*"], [], "read", "/etc", "denylist"),
    (["*"], [], "read", "/srv/../root", "path"),
    (["*"], [], "read", "relative", "path"),
    (["*"], [], "read", "/home/me/.ssh", "denylist"),
    (["*"], [], "read", "/home/me", "denylist"),
    (["*"], [], "read", "/extra/below", "denylist"),
    ([], [], "read", "/usr/share/x", None),
    ([], [], "read", "/etc/ssl/certs", None),
    ([], [], "read", "/etc/ssl/private", "read_ceiling"),
    ([], [], "write", "/usr/share/x", "write_ceiling"),
    (["*"], [], "write", "/srv/data", "write_ceiling"),
    ([], ["/srv"], "write", "/srv/data", None),
    ([], ["/srv"], "read", "/srv/data", None),
    ([], ["${state_dir}"], "write", "${state_dir}", None),
    ([], ["${state_dir}"], "write", "${state_dir}/sub", None),
    ([], ["${state_dir}"], "write", STATE, None),
    ([], ["${state_dir}"], "write", STATE + "-other", "write_ceiling"),
    ([], ["${state_dir}"], "write", "${state_dir}/../other", "path"),
    ([], ["${state_dir}/sub"], "write", "${state_dir}", "write_ceiling"),
    ([], [], "write", "${state_dir}", "write_ceiling"),
    ([], ["*"], "write", "${state_dirs}", "path"),
]


@one_case(("read", "write", "access", "asked", "rule"), PATHS)
@one_case("required", [True, False])
def test_path_ceilings(
    read: list[str], write: list[str], access: Any, asked: str, rule: str | None, required: bool
) -> None:
    policy = PLAIN._replace(
        read=PathRule((), tuple(read)), write=PathRule((), tuple(write)), deny=("/extra",)
    )
    spec = SandboxSpec(paths=(PathRequest(asked, access, required, ("fs", 0)),))
    result = given(spec, policy, homes=["/home/me"])
    if rule is None:
        (path,) = result.paths
        assert path.access == access and path.required is required and path.where == ("fs", 0)
        assert path.path == asked.replace("${state_dir}", STATE).rstrip("/")
        assert path.origin == ("state" if path.path.startswith(STATE) else "manifest")
        assert result.denials == ()
    else:
        # Optional is about what exists: asking for more than is allowed always refuses the launch.
        (denial,) = result.refused
        assert (denial.rule, denial.asked, denial.where) == (rule, asked, ("fs", 0))
        assert result.paths == ()


def test_without_a_state_directory() -> None:
    spec = SandboxSpec(paths=(PathRequest("${state_dir}", "write"),))
    result = given(spec, state_dir=None)
    assert rules(result) == [("state_dir", True)] and "--state-dir" in result.denials[0].hint
    quiet = PLAIN._replace(write=PathRule(("${state_dir}",), ("${state_dir}",)))
    assert given(SandboxSpec(), quiet, state_dir=None).paths == ()


def test_a_state_directory_on_the_denylist_names_the_remedy() -> None:
    spec = SandboxSpec(paths=(PathRequest("${state_dir}", "write"),))
    (denial,) = given(spec, state_dir="/root/state").denials
    assert denial.rule == "denylist" and "--state-dir" in denial.hint


def test_defaults_are_given_unasked_and_writing_wins_over_reading() -> None:
    policy = PLAIN._replace(read=PathRule(("/srv/a", "/srv/b"), ("*",)), write=PathRule((), ("*",)))
    spec = SandboxSpec(paths=(PathRequest("/srv/a", "write"), PathRequest("/srv/a", "read", False)))
    assert [(p.path, p.access, p.required, p.origin) for p in given(spec, policy).paths] == [
        ("/srv/a", "write", True, "manifest"),
        ("/srv/b", "read", False, "policy"),
    ]


def test_the_runtime_does_not_open_denied_paths() -> None:
    for path in RUNTIME_PATHS:
        assert given(SandboxSpec(paths=(PathRequest(path, "read"),))).denials == ()


# --- network, seccomp -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ceiling", "asked", "granted"),
    [
        ("none", "none", "none"),
        ("none", "allowlist", None),
        ("none", "host", None),
        ("allowlist", "none", "none"),
        ("allowlist", "allowlist", "allowlist"),
        ("allowlist", "host", None),
        ("host", "none", "none"),
        ("host", "allowlist", "allowlist"),
        ("host", "host", "host"),
    ],
)
def test_network_ceiling(ceiling: NetworkMode, asked: NetworkMode, granted: NetworkMode | None) -> None:
    policy = PLAIN._replace(network=NetworkRule("none", ceiling, ("*:*",)))
    result = given(SandboxSpec(network=Network(asked, ("example.com:443",), ("net",))), policy)
    assert result.network.mode == (granted or "none")
    assert rules(result) == ([] if granted else [("network_ceiling", True)])


def test_a_silent_manifest_gets_the_default_network() -> None:
    assert given(SandboxSpec()).network == Network("none")
    policy = PLAIN._replace(network=NetworkRule("host", "host"))
    assert given(SandboxSpec(), policy).network == Network("host")
    assert given(SandboxSpec(network=Network("none")), policy).network.mode == "none"


def test_host_network_by_the_operators_variable() -> None:
    spec = SandboxSpec(network=Network("host"))
    assert rules(given(spec)) == [("network_ceiling", True)]
    raising = PLAIN._replace(network=NetworkRule(environment_may_raise=True))
    allowed = given(spec, raising, host_network_by="ALLOW")
    assert allowed.network.mode == "host" and allowed.denials == ()
    assert given(SandboxSpec(), raising, host_network_by="ALLOW").network.mode == "none"
    assert rules(given(spec, raising)) == [("network_ceiling", True)]
    # A policy that does not say so is not beaten by a variable, and says that it was set for nothing.
    ignored = given(spec, host_network_by="ALLOW")
    assert rules(ignored) == [("network_ceiling", True)] and ignored.network.mode == "none"
    assert ignored.denials[0].reason.endswith("and does not let ALLOW raise that")


def test_each_host_outside_the_list_is_a_denial() -> None:
    policy = PLAIN._replace(network=NetworkRule("none", "allowlist", ("*.good.com:443",)))
    asks = Network("allowlist", ("a.good.com:443", "evil.com:443", "a.good.com:80"), ("net",))
    result = given(SandboxSpec(network=asks), policy)
    assert result.network.hosts == ("a.good.com:443",)
    assert [(d.rule, d.asked, d.required) for d in result.denials] == [
        ("network_hosts", "evil.com:443", True),
        ("network_hosts", "a.good.com:80", True),
    ]


PRIVATE_WORDS = (
    "10.9.9.9:2525",
    "192.168.1.1:443",
    "100.64.0.1:443",
    "[fd00::1]:443",
    "[2002:a09:909::]:2525",  # 6to4, of 10.9.9.9
    "[64:ff9b::a09:909]:2525",  # NAT64
)


@pytest.mark.parametrize("ceiling", ["open", "host"])
@pytest.mark.parametrize("host", PRIVATE_WORDS)
def test_a_manifest_cannot_name_a_private_address_by_itself(ceiling: NetworkMode, host: str) -> None:
    """Under a wide ceiling it can name other hosts. For the gate a listed address is the operator's word."""
    asks = SandboxSpec(network=Network("allowlist", (host, "45.33.1.10:80", "evil.com:1"), ("net",)))
    for hosts in ((), ("*:*",)):  # a * stands for names, and for no address
        result = given(asks, PLAIN._replace(network=NetworkRule("none", ceiling, hosts)))
        assert result.network.hosts == ("45.33.1.10:80", "evil.com:1")
        [denial] = result.denials
        assert (denial.rule, denial.asked, denial.required) == ("network_hosts", host, True)
        assert "private" in denial.reason and 'private = "allow"' in denial.hint
    for rule in (NetworkRule("none", ceiling, (host,)), NetworkRule("none", ceiling, private=True)):
        result = given(asks, PLAIN._replace(network=rule))
        assert result.network.hosts == (host, "45.33.1.10:80", "evil.com:1") and result.denials == ()


LOOPBACK, ANY = "localhost:6379", ("*:*", "*:6379", "0.0.0.0/0:*", "127.0.0.0/8:*", "*.localhost:*")


@one_case(
    ("rule", "granted"),
    [
        (NetworkRule("none", "allowlist", (LOOPBACK,), loopback=(6379,)), True),
        (NetworkRule("none", "host", (LOOPBACK,), loopback=(5432, 6379)), True),
        (NetworkRule("none", "allowlist", ("localhost:5432,6379",), loopback=(6379,)), True),
        # Without one of the two words, without both, and with others in their place.
        (NetworkRule("none", "allowlist", (LOOPBACK,)), False),
        (NetworkRule("none", "host", (LOOPBACK,), private=True), False),
        (NetworkRule("none", "allowlist", (LOOPBACK,), loopback=(6380,)), False),
        (NetworkRule("none", "allowlist", loopback=(6379,)), False),
        (NetworkRule("none", "open", loopback=(6379,)), False),
        (NetworkRule("none", "host", ANY, private=True, loopback=(6379,)), False),
        (NetworkRule("none", "allowlist", (*ANY, "127.0.0.1:6379"), private=True, loopback=(6379,)), False),
    ],
)
def test_a_port_of_this_machine_needs_two_words_of_the_policy(rule: NetworkRule, granted: bool) -> None:
    """One that it may be opened at all, and one that opens it by name: of the operator, or of an approval."""
    policy = PLAIN._replace(network=rule)
    asks = SandboxSpec(network=Network("allowlist", (LOOPBACK,), ("net",)))
    result = given(asks, policy)
    assert (result.network.hosts, not result.denials) == ((LOOPBACK,) if granted else (), granted)
    if not granted:
        [denial] = result.denials
        opened = 6379 in rule.loopback
        assert (denial.rule, denial.asked) == ("network_hosts" if opened else "network_loopback", LOOPBACK)
        line = f"loopback = {[*rule.loopback, 6379]} under [network]"
        assert opened or line in denial.hint
    # Another port of it, and every port, never.
    for other in ("localhost:6378", "localhost:*", "localhost:6379-6381"):
        assert given(SandboxSpec(network=Network("allowlist", (other,))), policy).refused
    # Nor does a request for every host, or for the open network, give a port.
    listed = NetworkRule("none", rule.ceiling, (*rule.hosts, "a.example:1"), loopback=rule.loopback)
    for asked in (Network("allowlist", ("*",)), Network("open", required=False), Network("open")):
        got = given(SandboxSpec(network=asked), PLAIN._replace(network=listed)).network
        assert not any("localhost:" in host and "*." not in host for host in got.hosts), got
    # Who asks for those of the policy, or for every host, and names it as well.
    for asked in (Network("allowlist", ("*", LOOPBACK)), Network("open", (LOOPBACK,), required=False)):
        got = given(SandboxSpec(network=asked), PLAIN._replace(network=listed)).network
        assert (LOOPBACK in got.hosts) is granted, got


def test_what_a_person_may_open_of_this_machine() -> None:
    said = Approval(network="allowlist", hosts=(LOOPBACK,))
    for rule, counted in (
        (ApprovalRule(network="host"), True),
        (ApprovalRule(network="allowlist", hosts=(LOOPBACK,)), True),
        (ApprovalRule(network="open", hosts=(LOOPBACK,)), True),
        # "open" is every host by name, and not this machine.
        (ApprovalRule(network="open"), False),
        (ApprovalRule(network="allowlist", hosts=ANY), False),
        (ApprovalRule(hosts=(LOOPBACK,)), False),
    ):
        kept = limit_approval(said, rule)
        assert (kept.hosts == (LOOPBACK,)) is counted
        policy = raise_ceilings(PLAIN._replace(network=NetworkRule(loopback=(6379,))), kept)
        asks = SandboxSpec(network=Network("allowlist", (LOOPBACK,)))
        assert (given(asks, policy).denials == ()) is counted
        unopened = raise_ceilings(PLAIN._replace(network=NetworkRule("none", "host")), kept)
        assert rules(given(asks, unopened)) == [("network_loopback", True)]


@pytest.mark.parametrize("ceiling", ["none", "allowlist", "open", "host"])
def test_an_empty_list_is_no_network(ceiling: NetworkMode) -> None:
    policy = PLAIN._replace(network=NetworkRule("none", ceiling, ("*:*",)))
    result = given(SandboxSpec(network=Network("allowlist", (), ("net",))), policy)
    assert (result.network.mode, result.denials) == ("none", ())


def test_a_private_address_by_the_operators_range_or_variable() -> None:
    asks = SandboxSpec(network=Network("allowlist", ("10.9.9.9:2525",)))
    ranged = NetworkRule("none", "open", ("10.0.0.0/8:2525",))
    assert given(asks, PLAIN._replace(network=ranged)).denials == ()
    assert given(asks, PLAIN._replace(network=ranged._replace(hosts=("10.0.0.0/8:443",)))).refused
    raised = PLAIN._replace(network=NetworkRule(environment_may_raise=True))
    assert given(asks, raised, host_network_by="ALLOW").refused


def test_an_entry_that_no_list_can_have_is_refused() -> None:
    asks = SandboxSpec(network=Network("allowlist", ("10.0.0.0/8:443",)))
    assert given(asks, PLAIN._replace(network=NetworkRule("none", "open"))).refused


@pytest.mark.parametrize(
    ("rule", "mode", "refusals"),
    [
        (NetworkRule("none", "allowlist", ("a.good.com:443",)), "allowlist", [("network_hosts", False)]),
        (NetworkRule("none", "allowlist"), "none", [("network_hosts", False)] * 2),
        (NetworkRule("none", "none"), "none", [("network_ceiling", False)]),
        (NetworkRule("none", "open"), "allowlist", []),
    ],
)
def test_what_is_not_required_is_withheld_and_nothing_is_refused(
    rule: NetworkRule, mode: str, refusals: list[tuple[str, bool]]
) -> None:
    asks = Network("allowlist", ("a.good.com:443", "evil.com:443"), required=False)
    result = given(SandboxSpec(network=asks), PLAIN._replace(network=rule))
    assert (result.network.mode, rules(result), result.refused) == (mode, refusals, ())
    asks = Network("open", required=False)
    result = given(SandboxSpec(network=asks), PLAIN._replace(network=rule))
    assert result.refused == () and result.network.mode == ("open" if rule.ceiling == "open" else mode)


@pytest.mark.parametrize(
    ("rule", "mode", "hosts", "refusals"),
    [
        (NetworkRule("none", "allowlist", ("*.good.com:443",)), "allowlist", ("*.good.com:443",), []),
        (NetworkRule("none", "open"), "open", (), []),
        (NetworkRule("none", "host", ("*.good.com:443",)), "open", (), []),
        (NetworkRule("none", "allowlist"), "none", (), [("network_hosts", True)]),
        (NetworkRule("none", "none", ("*.good.com:443",)), "none", (), [("network_ceiling", True)]),
    ],
)
def test_a_plugin_that_names_no_host_gets_those_of_the_policy(
    rule: NetworkRule, mode: str, hosts: tuple[str, ...], refusals: list[tuple[str, bool]]
) -> None:
    result = given(SandboxSpec(network=Network("allowlist", POLICY_HOSTS)), PLAIN._replace(network=rule))
    assert (result.network.mode, result.network.hosts, rules(result)) == (mode, hosts, refusals)


@pytest.mark.parametrize(
    ("listed", "refusals", "hosts"),
    [
        (("api.example:443", "gw.example:443"), [], ("api.example:443", "gw.example:443")),
        (("*.example:443",), [], ("*.example:443",)),
        (("api.example:443",), [("network_hosts", True)], ("api.example:443",)),
        ((), [("network_hosts", True)] * 2, ()),
    ],
)
def test_hosts_of_the_policy_and_one_of_its_own(
    listed: tuple[str, ...], refusals: list[tuple[str, bool]], hosts: tuple[str, ...]
) -> None:
    """As a plugin asks that also talks to its host's gateway."""
    asks = SandboxSpec(network=Network("allowlist", (*POLICY_HOSTS, "gw.example:443")))
    result = given(asks, PLAIN._replace(network=NetworkRule("none", "allowlist", listed)))
    assert (result.network.hosts, rules(result)) == (hosts, refusals)
    assert given(asks, PLAIN._replace(network=NetworkRule("none", "open"))).network.mode == "open"


MANY_PORTS = tuple(f"n{port}.example:{port}" for port in range(1, 66))


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    ("asked", "ceiling", "listed", "place"),
    [
        (Network("allowlist", MANY_PORTS), "open", (), "the plugin's own list"),
        (Network("allowlist", MANY_PORTS), "allowlist", ("*:*",), "the plugin's own list"),
        (Network("allowlist", POLICY_HOSTS), "allowlist", MANY_PORTS, "hosts under [network]"),
        (Network("allowlist", (*POLICY_HOSTS, "n9.example:9")), "allowlist", MANY_PORTS, "under [network]"),
        (Network("open", required=False), "allowlist", MANY_PORTS, "hosts under [network] in the policy"),
    ],
)
def test_a_list_of_too_many_ports_is_a_denial(
    asked: Network, ceiling: NetworkMode, listed: tuple[str, ...], place: str, required: bool
) -> None:
    required = required and asked.required
    asked = asked._replace(required=required, where=("net",))
    policy = PLAIN._replace(network=NetworkRule("none", ceiling, listed))
    result = given(SandboxSpec(network=asked), policy)
    assert result.network == Network("none", where=("net",))
    [denial] = result.denials
    assert (denial.rule, denial.required, denial.where) == ("network_ports", required, ("net",))
    assert denial.reason == "the list names 65 ports; 64 are the most" and place in denial.hint
    # The control: one port less.
    less = policy._replace(network=policy.network._replace(hosts=listed[-64:]))
    result = given(SandboxSpec(network=asked._replace(hosts=asked.hosts[-64:])), less)
    assert len(result.network.hosts) == 64 and result.denials == ()


def test_staged_writes_need_a_cage_and_a_bound() -> None:
    free = PLAIN._replace(unsandboxed=True)
    spec = SandboxSpec(enabled=False)
    for result in (
        given(spec._replace(staged=True), free),
        given(spec, free, overrides=Overrides(staged=True)),
    ):
        assert result.unsandboxed and rules(result) == [("staged", True)]
    assert given(spec, free).denials == ()
    ceiling = PLAIN._replace(limits=(("disk", LimitRule(ceiling=1 << 20)),))
    wanted = SandboxSpec(staged=True)
    assert [given(wanted, each).limits.disk for each in (PLAIN, ceiling)] == [8 << 30, 1 << 20]
    assert given(SandboxSpec(), PLAIN).limits.disk is None
    assert given(wanted._replace(limits=Limits(disk=4096)), ceiling).limits.disk == 4096


@pytest.mark.parametrize("mode", ["allowlist", "open", "host"])
@pytest.mark.parametrize(
    ("asked", "rule", "hint"),
    [
        ("strict", SeccompRule(), 'let the manifest ask for seccomp = "default"'),
        (None, SeccompRule("strict", "strict"), 'set default and ceiling = "default" under [seccomp]'),
        (None, SeccompRule("strict", "default"), 'set default = "default" under [seccomp]'),
    ],
)
def test_a_network_without_sockets_is_a_denial(
    mode: NetworkMode, asked: SeccompProfile | None, rule: SeccompRule, hint: str
) -> None:
    policy = PLAIN._replace(network=NetworkRule("none", "host"), seccomp=rule)
    network = Network(mode, ("a.example:443",) if mode == "allowlist" else (), ("net",))
    result = given(SandboxSpec(network=network, seccomp=asked), policy)
    assert result.network.mode == "none" and result.seccomp == "strict"
    [denial] = result.denials
    assert (denial.rule, denial.asked, denial.required) == ("network_seccomp", f"network {mode}", True)
    assert hint in denial.hint and denial.where == ("net",)
    # The controls: sockets, or no network.
    assert given(SandboxSpec(network=network), policy._replace(seccomp=SeccompRule())).denials == ()
    assert given(SandboxSpec(network=Network("none"), seccomp=asked), policy).denials == ()
    withheld = given(SandboxSpec(network=network._replace(required=False), seccomp=asked), policy)
    assert withheld.refused == () and withheld.network.mode == "none" and withheld.denials


def test_the_default_network_without_sockets_refuses_nothing() -> None:
    policy = PLAIN._replace(network=NetworkRule("host", "host"), seccomp=SeccompRule("strict", "strict"))
    result = given(SandboxSpec(), policy)
    assert (result.network.mode, rules(result)) == ("none", [("network_seccomp", False)])
    # Without a cage there is no filter either.
    free = given(SandboxSpec(enabled=False), policy._replace(unsandboxed=True))
    assert (free.network.mode, free.denials) == ("host", ())


@pytest.mark.parametrize(
    ("pattern", "host", "answer"),
    [
        ("example.com:443", "example.com:443", True),
        ("example.com:443", "EXAMPLE.com:443", True),
        ("example.com:443", "example.com:80", False),
        ("example.com:*", "example.com:80", True),
        ("example.com:443", "www.example.com:443", False),
        ("*.example.com:443", "www.example.com:443", True),
        ("*.example.com:443", "a.b.example.com:443", True),
        ("*.example.com:443", "example.com:443", False),
        ("*.example.com:443", ".example.com:443", False),
        ("*.example.com:443", "evilexample.com:443", False),
        ("*.example.com:443", "example.com.evil.org:443", False),
        ("*:443", "anything.org:443", True),
        ("*:443", "anything.org:4430", False),
        ("*:443", "*:443", True),
        ("example.com:443", "example.com:*", False),
        ("example.com:*", "example.com:*", True),
        ("example.com:80,8000-8010", "example.com:8010", True),
        ("example.com:80,8000-8010", "example.com:8011", False),
        ("10.0.0.0/8:443", "10.1.2.3:443", True),
        ("10.0.0.0/8:443", "11.1.2.3:443", False),
        # A wildcard stands for names. An address is written out, or lies in a range that is.
        ("*:443", "10.1.2.3:443", False),
        ("*.2.3:443", "10.1.2.3:443", False),
        ("10.1.2.3:443", "10.1.2.3:443", True),
        ("[::1]:443", "[0::1]:443", True),
        # This machine is one word, which no other entry stands for, and which stands for no other.
        ("localhost:443", "localhost:443", True),
        ("localhost:443", "localhost:444", False),
        ("*:*", "localhost:443", False),
        ("*.localhost:443", "localhost:443", False),
        ("127.0.0.0/8:443", "localhost:443", False),
        ("0.0.0.0/0:*", "localhost:443", False),
        ("127.0.0.1:443", "localhost:443", False),
        ("localhost:443", "127.0.0.1:443", False),
        ("localhost:443", "[::1]:443", False),
        ("localhost:443", "a.localhost:443", False),
    ],
)
def test_host_patterns(pattern: str, host: str, answer: bool) -> None:
    assert host_matches(pattern, host) is answer


@pytest.mark.parametrize("ceiling", ["strict", "default", "compat"])
@pytest.mark.parametrize("asked", ["strict", "default", "compat"])
def test_seccomp_ceiling(ceiling: SeccompProfile, asked: SeccompProfile) -> None:
    order = ["strict", "default", "compat"]
    policy = PLAIN._replace(seccomp=SeccompRule("strict", ceiling))
    result = given(SandboxSpec(seccomp=asked, where=(("seccomp", ("s",)),)), policy)
    if order.index(asked) <= order.index(ceiling):
        assert result.seccomp == asked and result.denials == ()
    else:
        assert result.seccomp == ceiling
        assert [(d.rule, d.required, d.where) for d in result.denials] == [("seccomp_ceiling", True, ("s",))]
    assert given(SandboxSpec(), policy).seccomp == "strict"


# --- environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "GCONV_PATH",
        "GLIBC_TUNABLES",
        "MALLOC_CHECK_",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PYTHONBREAKPOINT",
        "PYTHONINSPECT",
        "NODE_OPTIONS",
        "JAVA_TOOL_OPTIONS",
        "_JAVA_OPTIONS",
        "BASH_ENV",
        "PERL5LIB",
        "PERL5OPT",
        "RUBYOPT",
        "RUBYLIB",
        "BASH_FUNC_ls",
        "SHELLOPTS",
        "OPENSSL_CONF",
        "DOTNET_STARTUP_HOOKS",
    ],
)
def test_variables_that_steer_need_the_operator(name: str) -> None:
    spec = SandboxSpec(env=(EnvRequest(name, "x", required=False),))
    result = given(spec)
    assert rules(result) == [("env_steering", True)] and result.env == ()
    assert given(spec, PLAIN._replace(env=EnvRule(steering=(name,)))).env == ((name, "x"),)
    # A ceiling of everything does not mean these.
    asks = SandboxSpec(env=(EnvRequest(name),))
    wide = PLAIN._replace(env=EnvRule(ceiling=("*",)))
    assert rules(given(asks, wide, environ={name: "x"})) == [("env_steering", True)]


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "TMPDIR",
        "LANG",
        "TZ",
        "NODE_ENV",
        "NODE_PATH",
        "OLD_NAME",
        "ENVIRONMENT",
        "PYTHONUNBUFFERED",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONIOENCODING",
        "PYTHONUTF8",
        "PYTHONHASHSEED",
        "API_KEY",
        "CLASSPATH",
        "RUST_LOG",
    ],
)
def test_other_variables_are_the_manifests_own(name: str) -> None:
    assert not steers(name)
    result = given(SandboxSpec(env=(EnvRequest(name, "x"),)))
    assert result.env == ((name, "x"),) and result.denials == ()


@pytest.mark.parametrize("required", [True, False])
def test_variables_of_the_host(required: bool) -> None:
    environ = {"TOKEN": "t", "API_KEY": "k", "SECRET": "s"}
    policy = PLAIN._replace(env=EnvRule(passed=("TOKEN", "ABSENT"), ceiling=("API_*",)))
    spec = SandboxSpec(
        env=tuple(EnvRequest(n, None, required) for n in ("API_KEY", "SECRET", "API_NONE", "TOKEN"))
    )
    result = given(spec, policy, environ=environ)
    assert dict(result.env) == {"TOKEN": "t", "API_KEY": "k"}
    assert [(d.rule, d.asked, d.required) for d in result.denials] == [
        ("env_ceiling", "SECRET", required),
        ("env_missing", "API_NONE", required),
    ]
    assert dict(given(SandboxSpec(), policy, environ=environ).env) == {"TOKEN": "t"}


def test_precedence_when_two_set_the_same_variable() -> None:
    policy = PLAIN._replace(env=EnvRule(set=(("A", "policy"), ("B", "policy"))))
    spec = SandboxSpec(
        env=(EnvRequest("A", "manifest"), EnvRequest("B", "policy"), EnvRequest("C", "manifest"))
    )
    said = Overrides(env=(("C", "line"), ("LD_PRELOAD", "line")), pass_env=("D", "NONE"))
    result = given(spec, policy, environ={"D": "host"}, overrides=said)
    assert dict(result.env) == {"A": "policy", "B": "policy", "C": "line", "D": "host", "LD_PRELOAD": "line"}
    assert rules(result) == [("env_policy", False)]


@pytest.mark.parametrize("said", [Overrides(env=(("A", "line"),)), Overrides(pass_env=("A",))])
def test_the_operator_cannot_replace_a_variable_of_the_contract(said: Overrides) -> None:
    """The control: a variable of the manifest can be replaced."""
    for fixed, found in ((True, [("env_contract", True)]), (False, [])):
        spec = SandboxSpec(env=(EnvRequest("A", "contract", fixed=fixed),))
        assert rules(given(spec, environ={"A": "host"}, overrides=said)) == found


@pytest.mark.parametrize("name", ["", "A=B", "A B", "1A", "A\0", "Ä"])
def test_texts_that_are_not_variable_names(name: str) -> None:
    result = given(SandboxSpec(env=(EnvRequest(name, "x"),)))
    assert rules(result) == [("env_name", True)] and result.env == ()


def test_a_value_with_nul() -> None:
    assert rules(given(SandboxSpec(env=(EnvRequest("A", "x\0y"),)))) == [("env_name", True)]


# --- limits ---------------------------------------------------------------------------------------


@one_case(
    ("default", "ceiling", "manifest", "line", "value", "who"),
    [
        (None, None, None, None, None, None),
        (10, None, None, None, 10, "policy"),
        (10, 20, None, None, 10, "policy"),
        (None, 20, None, None, None, None),
        (10, 20, 15, None, 15, "manifest"),
        (10, 20, 5, None, 5, "manifest"),
        (10, 20, 20, None, 20, "manifest"),
        (10, 20, 30, None, 20, "policy"),
        (10, 20, None, 15, 15, "command line"),
        (10, 20, None, 30, 20, "policy"),
        (10, 20, 15, 12, 12, "command line"),
        (10, 20, 12, 15, 12, "manifest"),
        (None, None, 7, None, 7, "manifest"),
    ],
)
@one_case("name", LIMIT_NAMES)
def test_limits(
    name: str,
    default: int | None,
    ceiling: int | None,
    manifest: int | None,
    line: int | None,
    value: int | None,
    who: str | None,
) -> None:
    policy = PLAIN._replace(limits=((name, LimitRule(default, ceiling)),))
    asks: dict[str, Any] = {name: manifest}
    said: dict[str, Any] = {name: line}
    spec = SandboxSpec(limits=Limits(**asks), where=((name, ("limits", name)),))
    result = given(spec, policy, overrides=Overrides(limits=Limits(**said)))
    assert getattr(result.limits, name) == value
    assert result.decided_by == (((name, who),) if who else ())
    cut = manifest is not None and ceiling is not None and manifest > ceiling
    assert [(d.rule, d.required, d.where) for d in result.denials] == (
        [("limit_ceiling", False, ("limits", name))] if cut else []
    )


@for_all(
    st.sampled_from(LIMIT_NAMES),
    *[st.none() | st.integers(1, 50)] * 4,
)
def test_the_lowest_wins(
    name: str, default: int | None, ceiling: int | None, manifest: int | None, line: int | None
) -> None:
    policy = PLAIN._replace(limits=((name, LimitRule(default, ceiling)),))
    asks: dict[str, Any] = {name: manifest}
    said: dict[str, Any] = {name: line}
    result = given(SandboxSpec(limits=Limits(**asks)), policy, overrides=Overrides(limits=Limits(**said)))
    value = getattr(result.limits, name)
    asked = [amount for amount in (manifest, line) if amount is not None]
    if not asked and default is None:
        assert value is None
    else:
        bounds = [amount for amount in (*asked, ceiling) if amount is not None]
        assert value == min([default, *bounds] if default is not None and not asked else bounds)
        who = {"manifest": manifest, "command line": line, "policy": ceiling if asked else default}
        assert value == who[dict(result.decided_by)[name]] or value == ceiling
        assert type(value) is int  # as it was written
    assert all(other is None for key, other in result.limits._asdict().items() if key != name)


def test_each_limit_is_decided_on_its_own() -> None:
    policy = PLAIN._replace(
        limits=(
            ("memory", LimitRule(1 << 30, 2 << 30)),
            ("cpu", LimitRule(None, 2.0)),
            ("io", LimitRule(None, 100 << 20)),
            ("deadline", LimitRule(60.0)),
        )
    )
    spec = SandboxSpec(limits=Limits(memory=512 << 20, cpu=4.0, io=50 << 20, idle=9.5))
    result = given(spec, policy, overrides=Overrides(limits=Limits(memory=1 << 30, io=5000, pids=7)))
    assert result.limits == Limits(memory=512 << 20, cpu=2.0, io=5000, pids=7, idle=9.5, deadline=60.0)
    assert dict(result.decided_by) == {
        "memory": "manifest",
        "pids": "command line",
        "cpu": "policy",
        "io": "command line",
        "idle": "manifest",
        "deadline": "policy",
    }
    assert [denial.asked for denial in result.denials] == ["cpu = 4"]


# --- without a sandbox ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "require", "unsandboxed", "denied"),
    [
        (False, False, False, []),
        (True, False, True, []),
        (False, True, False, [("sandbox_required", True)]),
        (True, True, False, [("sandbox_required", True)]),
    ],
)
def test_a_manifest_that_wants_no_sandbox(
    allowed: bool, require: bool, unsandboxed: bool, denied: list[tuple[str, bool]]
) -> None:
    policy = PLAIN._replace(unsandboxed=allowed)
    spec = SandboxSpec(
        enabled=False,
        paths=(PathRequest("/root", "write"),),
        network=Network("host"),
        seccomp="compat",
        env=(EnvRequest("A", "1"),),
    )
    result = given(spec, policy, sandbox_required_by="SWITCH" if require else "")
    assert result.unsandboxed is unsandboxed and rules(result) == denied
    # In its cage it asks for nothing extra.
    assert (result.paths, result.network.mode, result.seccomp, result.env) == (
        (),
        "none",
        "default",
        (("A", "1"),),
    )


def test_with_a_sandbox_the_permission_to_go_without_changes_nothing() -> None:
    assert not given(SandboxSpec(), PLAIN._replace(unsandboxed=True)).unsandboxed
    assert given(SandboxSpec(), sandbox_required_by="SWITCH").denials == ()


def test_every_denial_is_a_sentence_with_a_remedy() -> None:
    spec = SandboxSpec(
        paths=(PathRequest("/srv", "read"), PathRequest("/srv", "write"), PathRequest("/root", "read")),
        network=Network("host"),
        seccomp="compat",
        env=(EnvRequest("LD_PRELOAD", "x"), EnvRequest("SECRET")),
        limits=Limits(memory=2),
    )
    denials: tuple[Denial, ...] = given(
        spec, PLAIN._replace(limits=(("memory", LimitRule(None, 1)),))
    ).denials
    assert len(denials) == 8
    for denial in denials:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", denial.rule)
        assert denial.asked and denial.reason and denial.hint
        assert not denial.reason.endswith(".")


# --- run_as ------------------------------------------------------------------------------------------------


@pytest.fixture
def passwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "passwd"
    path.write_text(
        "root:x:0:0::/:/bin/sh\ntoor:x:0:0::/:/bin/sh\nhouse:x:1234:5678::/:/bin/sh\nodd line\n"
        "operator:x:11:0::/:/bin/sh\n"
    )
    monkeypatch.setattr(accounts, "PASSWD", str(path))
    return path


def test_run_as_is_an_account_or_a_uid(passwd: Path) -> None:
    for word, found in (
        ('"house"', ("house", 1234, 5678)),
        ("1234", ("house", 1234, 5678)),
        ('"4321"', ("4321", 4321, 4321)),
    ):
        policy = parse_policy("p.toml", f"version = 1\n[user]\nrun_as = {word}\n".encode(), name="p")
        assert accounts.find_account(policy.run_as) == found
    assert parse_policy("p.toml", b"version = 1\n", name="p").run_as == ""


@pytest.mark.parametrize(("name", "whose"), [("toor", "uid"), ("operator", "primary group")])
def test_an_account_that_is_root_by_another_name(passwd: Path, name: str, whose: str) -> None:
    (fault,) = faults(f'version = 1\n[user]\n  run_as = "{name}"\n')
    assert fault.place == "p.toml:3:3"
    assert fault.message == f"user.run_as is root: the {whose} of {name} is 0, and no plugin runs as root"


def test_an_account_that_has_become_root_is_noticed(
    passwd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is cached, the account is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "policy.toml"
    path.write_text('version = 1\n[user]\nrun_as = "house"\n')
    for _ in range(2):
        assert load_policy(str(path), {}).run_as == "house"
    passwd.write_text("house:x:0:0::/:/bin/sh\n")
    with pytest.raises(DocumentError) as caught:
        load_policy(str(path), {})
    (fault,) = caught.value.diagnostics
    assert (fault.line, fault.column) == (3, 1) and "no plugin runs as root" in fault.message
