"""A grant never holds what policy and approvals do not allow: judged by sets, in a world of few names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from sandbox.policy.approval import limit_approval, raise_ceilings, requested_approval
from sandbox.policy.grant import grant
from sandbox.policy.policy import (
    ApprovalRule,
    EnvRule,
    LimitRule,
    NetworkRule,
    PathRule,
    Policy,
    SeccompRule,
)
from sandbox.spec import (
    NETWORK_ORDER,
    SECCOMP_ORDER,
    Approval,
    EnvRequest,
    Limits,
    Network,
    Overrides,
    PathRequest,
    SandboxSpec,
)

STATE = "/state/p"
DENIED = ("/root", "/etc/shadow", "/home/me/.ssh", "/srv/no")
READABLE = ("/usr",)  # the runtime
# All the paths, hosts and variables there are. An entry means the set of those that it covers.
PATHS = (
    *("/", "/srv", "/srv/a", "/srv/a/b", "/srv/ab", "/srv/no", "/srv/no/x", "/usr", "/usr/lib", "/root/x"),
    *(
        "/etc/shadow",
        "/home/me",
        "/home/me/.ssh/id",
        "/home/me/w",
        STATE,
        "/state",
        "/state/p/sub",
        "/state/pq",
    ),
)
PRIVATE = "10.0.0.1"
HOSTS = [(host, port) for host in ("a.com", "x.a.com", "xa.com", PRIVATE) for port in (80, 443)]
NAMES = ("A", "AB", "LD_PRELOAD", "PYTHONPATH", "PYTHONUTF8", "SET")
STEERING = ("LD_PRELOAD", "PYTHONPATH")


def below(entries: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for entry in entries:
        top = [part for part in entry.replace("${state_dir}", STATE).split("/") if part not in ("", ".")]
        found |= {path for path in PATHS if entry == "*" or path.split("/")[1:][: len(top)] == top}
        found |= {"/"} if entry == "*" or not top else set()
    return found


def covered(entries: Iterable[str]) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for entry in entries:
        name, _, ports = entry.rpartition(":")
        for host, port in HOSTS:
            same = host == name or (name == "*.a.com" and host == "x.a.com")
            same = same or (name == "10.0.0.0/8" and host == PRIVATE)
            if same and ports in ("*", str(port)):
                found.add((host, port))
    return found


def named(patterns: Iterable[str]) -> set[str]:
    return {
        name
        for name in NAMES
        for each in patterns
        if name == each or (each.endswith("*") and name.startswith(each[:-1]))
    }


def lists(values: Iterable[str], most: int = 3) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(tuple(values)), max_size=most).map(tuple)


SPELLED = (
    *PATHS,
    "/srv//a/",
    "/srv/./a/b",
    "${state_dir}",
    "${state_dir}/sub",
    "//srv/no/",
    "/usr/../root/x",
    "a",
)
CEILINGS = lists(
    ("*", "/srv", "/srv/a", "/srv//a/b/", "/home/me", "/state", "/etc", "${state_dir}", "/usr/lib")
)
ENTRIES = ("a.com:443", "a.com:*", "x.a.com:80", "xa.com:80", "10.0.0.1:443")
RULES = lists((*ENTRIES, "*.a.com:443", "*.a.com:*", "10.0.0.0/8:443"))
PATTERNS = lists(("A", "A*", "PYTHON*", "*", "LD_PRELOAD", "SET"))
MODES = st.sampled_from(NETWORK_ORDER)
PROFILES = st.sampled_from(SECCOMP_ORDER)
AMOUNTS = st.none() | st.integers(1, 9)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    modes = sorted((draw(MODES), draw(MODES)), key=NETWORK_ORDER.index)  # a default is not above its ceiling
    profiles = sorted((draw(PROFILES), draw(PROFILES)), key=SECCOMP_ORDER.index)
    approvals = ApprovalRule(
        *(draw(CEILINGS), draw(CEILINGS), draw(MODES), draw(RULES), draw(PATTERNS), draw(PATTERNS)),
        draw(PROFILES),
    )
    return Policy(
        *("p", "/p.toml"),
        unsandboxed=draw(st.booleans()),
        deny=("/srv/no",),
        read=PathRule(ceiling=draw(CEILINGS)),
        write=PathRule(ceiling=draw(CEILINGS)),
        network=NetworkRule(modes[0], modes[1], draw(RULES), draw(st.booleans()), draw(st.booleans())),
        env=EnvRule((("SET", "policy"),), draw(lists(NAMES)), draw(PATTERNS), draw(PATTERNS)),
        seccomp=SeccompRule(profiles[0], profiles[1]),
        limits=tuple((name, LimitRule(ceiling=draw(AMOUNTS))) for name in ("memory", "cpu")),
        approvals=approvals,
    )


SPECS = st.builds(
    SandboxSpec,
    enabled=st.sampled_from((True, True, True, False)),
    paths=st.lists(
        st.builds(PathRequest, st.sampled_from(SPELLED), st.sampled_from(("read", "write")), st.booleans()),
        max_size=4,
    ).map(tuple),
    network=st.none()
    | st.builds(Network, MODES | st.just("allowlist"), lists((*ENTRIES, "*", "*.a.com:443"), 5)),
    env=st.lists(
        st.builds(
            EnvRequest, st.sampled_from(NAMES), st.none() | st.just("own"), st.booleans(), fills=st.booleans()
        ),
        max_size=4,
    ).map(tuple),
    seccomp=st.none() | PROFILES,
    limits=st.builds(Limits, memory=AMOUNTS, cpu=AMOUNTS),
)
APPROVALS = st.builds(
    Approval,
    *(lists(PATHS), lists(PATHS), MODES, lists(ENTRIES), lists(NAMES), lists(NAMES), PROFILES),
)


OPEN = Policy("p", "/p.toml", network=NetworkRule(ceiling="open"))
LISTED = SandboxSpec(network=Network("allowlist", (f"{PRIVATE}:443",)))


@example(OPEN, [LISTED], Approval(), False, False)
@given(policies(), st.lists(SPECS, min_size=2, max_size=4), APPROVALS, st.booleans(), st.booleans())
def test_a_grant_holds_nothing_that_is_not_allowed(
    policy: Policy, specs: list[SandboxSpec], approval: Approval, raises: bool, required: bool
) -> None:
    for spec in specs:
        check(policy, spec, approval, raises, required)
        check(policy, spec, requested_approval(spec), raises, required)


def check(policy: Policy, spec: SandboxSpec, approval: Approval, raises: bool, required: bool) -> None:
    may = policy.approvals
    options: dict[str, Any] = {"homes": ["/home/me"], "environ": dict.fromkeys(NAMES, "host")}
    found = grant(
        spec,
        raise_ceilings(policy, limit_approval(approval, may)),
        state_dir=STATE,
        sandbox_required_by="REQUIRED" if required else "",
        host_network_by="RAISES" if raises else "",
        overrides=Overrides(limits=Limits(memory=7)),
        **options,
    )
    denied = below(DENIED)
    above = {path for path in PATHS if any(each.startswith(path.rstrip("/") + "/") for each in DENIED)}
    # An approval counts as far as [approvals] admits it.
    approved_write = below(set(approval.write) & below(may.write))
    approved_read = below(set(approval.read) & below((*may.read, *may.write)))
    writable = below(policy.write.ceiling) | approved_write
    readable = writable | below(policy.read.ceiling) | approved_read | below(READABLE)
    for path in found.paths:
        assert path.path in (readable if path.access == "read" else writable) - denied - above, path

    approved_mode = min(approval.network, may.network, key=NETWORK_ORDER.index)
    ceiling = max(policy.network.ceiling, approved_mode, key=NETWORK_ORDER.index)
    if raises and policy.network.environment_may_raise:
        ceiling = "host"
    assert NETWORK_ORDER.index(found.network.mode) <= NETWORK_ORDER.index(ceiling)
    every = may.network in ("open", "host")
    approved_hosts = {each for each in approval.hosts if every or covered([each]) <= covered(may.hosts)}
    hosts = covered(policy.network.hosts) | (covered(approved_hosts) if may.network != "none" else set())
    if ceiling != "allowlist":
        hosts |= {each for each in HOSTS if policy.network.private or each[0] != PRIVATE}
    assert found.network.mode != "allowlist" or covered(found.network.hosts) <= hosts

    passed = set(policy.env.passed)
    given_env = named(policy.env.ceiling) | (set(approval.env) & named(may.env)) | passed
    steering = named(policy.env.steering) | (set(approval.steering) & named(may.steering))
    for name, value in found.env:
        assert name in given_env or value != "host", name
        assert name not in STEERING or name in steering or (name in passed and value == "host"), name
        assert name != "SET" or value == "policy" or name in passed, value

    profile = max(
        policy.seccomp.ceiling,
        min(approval.seccomp, may.seccomp, key=SECCOMP_ORDER.index),
        key=SECCOMP_ORDER.index,
    )
    assert SECCOMP_ORDER.index(found.seccomp) <= SECCOMP_ORDER.index(profile)
    for name, rule in policy.limits:
        value = getattr(found.limits, name)
        assert rule.ceiling is None or value is None or value <= rule.ceiling
    assert not found.unsandboxed or (policy.unsandboxed and not spec.enabled and not required)
