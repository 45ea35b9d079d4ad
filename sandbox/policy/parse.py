"""Parse a policy. All faults are reported at once, each with its position."""

from __future__ import annotations

import re

from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.document.read import parse
from sandbox.identity.accounts import UnknownAccount, find_account
from sandbox.identity.uid_range import DEFAULT_RANGE
from sandbox.network.egress import DNS_PORT, EgressLimits
from sandbox.network.redirect import REDIRECT_PORT
from sandbox.network.rules import LAST_PORT, MOST_PORTS, parse_rule
from sandbox.paths.denied_paths import lexical_fault, lexical_hit, normal
from sandbox.paths.scan import SCAN_LIMIT
from sandbox.policy.policy import (
    ALWAYS_SIZED,
    LAYERS,
    LIMIT_MODES,
    LIMIT_NAMES,
    TRUST_FILE,
    ApprovalRule,
    CapabilityRule,
    EnvRule,
    HookFailure,
    LimitMode,
    LimitRule,
    Mode,
    NetworkRule,
    PackageRule,
    PathRule,
    Policy,
    SeccompRule,
)
from sandbox.policy.table import PolicyTable
from sandbox.spec import (
    NETWORK_ORDER,
    SECCOMP_ORDER,
    STATE_DIR_TOKEN,
    NetworkMode,
    ProjectAccess,
    SeccompProfile,
    is_variable_name,
)
from sandbox.speed.typed import Iterator, Sequence
from sandbox.units import parse_limit, parse_size


def parse_policy(path: str, raw: bytes, *, name: str) -> Policy:
    """Read a policy, or raise DocumentError with every fault in it."""
    document = parse(path, raw, "toml")
    faults: list[Diagnostic] = []
    top = PolicyTable(document, faults, document.data, ())
    version = top.take("version")
    if version is None:
        top.fault((), "policy_version", "the version is missing", "write version = 1 at the top")
    elif version != 1 or isinstance(version, bool):
        top.fault(("version",), "policy_version", "must be 1, the only version this runner knows")
    uids, run_as = _user(top.table("user"))
    policy = Policy(
        name=name,
        file=path,
        description=top.text("description"),
        unsandboxed=top.choice("unsandboxed", ("deny", "allow"), "deny") == "allow",
        deny=tuple(normal(p) for p in top.texts("deny", _deny_fault)),
        scan_limit=top.number("scan_limit", 1, 100_000_000, SCAN_LIMIT),
        read=_path_rule(top.table("read"), ()),
        write=_path_rule(top.table("write"), (STATE_DIR_TOKEN,)),
        network=_network_rule(top.table("network")),
        project=_project_access(top.table("project")),
        env=_env_rule(top.table("env")),
        seccomp=_seccomp_rule(top.table("seccomp")),
        limits=tuple(_limit_rules(top.table("limits"))),
        uids=uids,
        layers=tuple(_layers(top.table("layers"))),
        capabilities=_capability_rule(top.table("capabilities")),
        on_hook_failure=_hook_failure(top.table("hooks")),
        run_as=run_as,
        packages=_package_rule(top.table("packages")),
        approvals=_approval_rule(top.table("approvals")),
        move_host=_moves_host(top.table("cgroups")),
        machine_share=_machine_share(top),
    )
    top.finish()
    if faults:
        raise DocumentError(*sorted(faults, key=lambda fault: (fault.line, fault.column)))
    return policy


def _deny_fault(path: str) -> str | None:
    fault = lexical_fault(path)
    if fault is None and normal(path) == "/":
        return "would deny everything"
    return fault


def _place_fault(path: str) -> str | None:
    if path == STATE_DIR_TOKEN:
        return None
    rest = path[len(STATE_DIR_TOKEN) :] if path.startswith(STATE_DIR_TOKEN + "/") else path
    fault = lexical_fault(rest)
    if fault is not None and "$" in path:
        fault += f"; of all variables only {STATE_DIR_TOKEN} is known, at the beginning"
    return fault


def _default_fault(path: str) -> str | None:
    hit = None if _place_fault(path) or path.startswith("$") else lexical_hit(path)
    return hit.clause() if hit else _place_fault(path)


def _ceiling_fault(path: str) -> str | None:
    if path == "*" or _place_fault(path) or path.startswith("$"):
        return None if path == "*" else _place_fault(path)
    hit = lexical_hit(path)
    # A ceiling that contains a denied path still admits the other folders below it.
    return hit.clause() if hit is not None and hit.relation != "above" else None


def _path_rule(table: PolicyTable, ceiling: Sequence[str]) -> PathRule:
    rule = PathRule(table.texts("default", _default_fault), table.texts("ceiling", _ceiling_fault, ceiling))
    table.finish()
    return rule


def _host_fault(host: str) -> str | None:
    try:
        parse_rule(host, ranges=True)
    except ValueError as error:
        return f"{error}; entries look like example.com:443, *.example.com:443, *:443 or example.com:*"
    return None


def _network_rule(table: PolicyTable) -> NetworkRule:
    # "allowlist" cannot be the default: without a manifest's list it would have no hosts.
    default = table.choice("default", ("none", "host"), "none")
    ceiling = table.choice("ceiling", NETWORK_ORDER, default)
    hosts = table.texts("hosts", _host_fault)
    may_raise = table.choice("environment", ("ignored", "may_raise"), "ignored") == "may_raise"
    private = table.choice("private", ("deny", "allow"), "deny") == "allow"
    limits = _egress_limits(table)
    loopback = _loopback_ports(table)
    table.finish()
    modes: dict[str, NetworkMode] = {mode: mode for mode in NETWORK_ORDER}
    _in_order(table, NETWORK_ORDER, default, ceiling)
    return NetworkRule(
        modes[default],
        modes[ceiling],
        tuple(dict.fromkeys(str(parse_rule(host, ranges=True)) for host in hosts)),
        may_raise,
        private,
        limits,
        loopback,
    )


# Those of the gate in the plugin's own namespace.
_GATE_PORTS = (REDIRECT_PORT, DNS_PORT)


def _loopback_ports(table: PolicyTable) -> tuple[int, ...]:
    value = table.take("loopback")
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MOST_PORTS:
        table.fault(("loopback",), "policy_type", f"must be a list of up to {MOST_PORTS} ports, as in [6379]")
        return ()
    for number, port in enumerate(value):
        if type(port) is not int or not 0 < port <= LAST_PORT:
            table.fault(("loopback", number), "policy_value", f"must be a port from 1 to {LAST_PORT}")
        elif port in _GATE_PORTS:
            table.fault(
                ("loopback", number), "policy_value", f"cannot be opened: the gate itself has port {port}"
            )
    return tuple(dict.fromkeys(port for port in value if type(port) is int))


# The gate holds up to six descriptors for each connection. With more it could exceed its descriptor limit.
_MOST_CONNECTIONS = 1024


def _egress_limits(table: PolicyTable) -> EgressLimits:
    usual = EgressLimits()
    idle = _amount(table, "idle", "idle")
    return usual._replace(
        connections=table.number("connections", 1, _MOST_CONNECTIONS, usual.connections),
        idle=usual.idle if idle is None else idle,
        bytes=_size(table, "bytes"),
        rate=_size(table, "rate"),
    )


def _size(table: PolicyTable, key: str) -> int | None:
    value = table.take(key)
    if value is None:
        return None
    try:
        size = parse_size(value)
        if size == 0:
            raise ValueError("it has to be more than 0")
    except ValueError as error:
        table.fault((key,), "policy_value", f"is wrong: {error}")
        return None
    return size


def _project_access(table: PolicyTable) -> ProjectAccess:
    access: ProjectAccess = "read" if table.choice("access", ("none", "read"), "none") == "read" else "none"
    table.finish()
    return access


def _moves_host(table: PolicyTable) -> bool:
    moves = table.choice("host", ("stay", "move"), "stay") == "move"
    table.finish()
    return moves


def _seccomp_rule(table: PolicyTable) -> SeccompRule:
    default = table.choice("default", SECCOMP_ORDER, "default")
    ceiling = table.choice("ceiling", SECCOMP_ORDER, default)
    table.finish()
    profiles: dict[str, SeccompProfile] = {profile: profile for profile in SECCOMP_ORDER}
    _in_order(table, SECCOMP_ORDER, default, ceiling)
    return SeccompRule(profiles[default], profiles[ceiling])


def _in_order(table: PolicyTable, order: Sequence[str], default: str, ceiling: str) -> None:
    if order.index(default) > order.index(ceiling):
        table.fault(("default",), "policy_order", f"({default}) lies above the ceiling ({ceiling})")


def _name_fault(name: str) -> str | None:
    return None if is_variable_name(name) else "cannot be the name of an environment variable"


def _glob_fault(pattern: str) -> str | None:
    if re.fullmatch(r"[A-Za-z0-9_*?]+", pattern, re.ASCII):
        return None
    return "must be a variable name, in which * and ? stand for anything"


def _env_rule(table: PolicyTable) -> EnvRule:
    values = table.take("set")
    fixed = []
    if values is not None and not isinstance(values, dict):
        table.fault(("set",), "policy_type", "must be a table of texts")
    for name, value in values.items() if isinstance(values, dict) else ():
        fault = _name_fault(name)
        if fault is None and (not isinstance(value, str) or "\0" in value):
            fault = "must be a text without NUL"
        if fault is not None:
            table.fault(("set", name), "policy_value", fault)
        else:
            fixed.append((name, value))
    rule = EnvRule(
        tuple(fixed),
        table.texts("pass", _name_fault),
        table.texts("ceiling", _glob_fault),
        table.texts("steering", _glob_fault),
    )
    table.finish()
    return rule


def _capability_fault(pattern: str) -> str | None:
    # Protocols choose these names, so every printable name without spaces is accepted.
    if pattern and len(pattern) <= 256 and pattern.isprintable() and " " not in pattern:
        return None
    return "must be a capability or a method, in which * and ? stand for anything"


def _capability_rule(table: PolicyTable) -> CapabilityRule:
    rule = CapabilityRule(table.texts("declare", _capability_fault), table.texts("host", _capability_fault))
    table.finish()
    return rule


def _hook_failure(table: PolicyTable) -> HookFailure:
    choice = table.choice("on_failure", ("continue", "abort"), "continue")
    table.finish()
    return "abort" if choice == "abort" else "continue"


def _package_rule(table: PolicyTable) -> PackageRule:
    required = table.choice("signature", ("optional", "required"), "optional") == "required"
    trust = table.text("trust") or TRUST_FILE
    fault = lexical_fault(trust)
    if fault is not None:
        table.fault(("trust",), "policy_value", fault)
    table.finish()
    return PackageRule("required" if required else "optional", trust)


def _approval_rule(table: PolicyTable) -> ApprovalRule:
    modes: dict[str, NetworkMode] = {mode: mode for mode in NETWORK_ORDER}
    profiles: dict[str, SeccompProfile] = {profile: profile for profile in SECCOMP_ORDER}
    rule = ApprovalRule(
        read=table.texts("read", _ceiling_fault),
        write=table.texts("write", _ceiling_fault),
        network=modes[table.choice("network", NETWORK_ORDER, "none")],
        hosts=tuple(
            dict.fromkeys(str(parse_rule(host, ranges=True)) for host in table.texts("hosts", _host_fault))
        ),
        env=table.texts("env", _glob_fault),
        steering=table.texts("steering", _glob_fault),
        seccomp=profiles[table.choice("seccomp", SECCOMP_ORDER, "strict")],
        project="read" if table.choice("project", ("none", "read"), "none") == "read" else "none",
    )
    table.finish()
    return rule


def _limit_rules(table: PolicyTable) -> Iterator[tuple[str, LimitRule]]:
    for name in LIMIT_NAMES:
        if name in table.values or name in ALWAYS_SIZED:
            yield name, _limit_rule(table.table(name), name)
    table.known = list(LIMIT_NAMES)
    table.finish()


def _limit_rule(table: PolicyTable, name: str) -> LimitRule:
    default = _amount(table, "default", name)
    ceiling = _amount(table, "ceiling", name)
    if default is None and name in ALWAYS_SIZED:
        default = min(ALWAYS_SIZED[name], ceiling or ALWAYS_SIZED[name])
    mode = table.choice("mode", LIMIT_MODES, "require")
    table.finish()
    if default is not None and ceiling is not None and default > ceiling:
        table.fault(("default",), "policy_order", "lies above the ceiling")
    modes: dict[str, LimitMode] = {mode: mode for mode in LIMIT_MODES}
    return LimitRule(default, ceiling, modes[mode])


def _amount(table: PolicyTable, key: str, name: str) -> float | None:
    value = table.take(key)
    if value is None:
        return None
    try:
        return parse_limit(name, value)
    except ValueError as error:
        table.fault((key,), "policy_value", f"is wrong: {error}")
        return None


_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)


def _machine_share(table: PolicyTable) -> float:
    value, usual = table.take("machine_share"), Policy("", "").machine_share
    if value is None:
        return usual
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    share = float(match[1]) / 100 if match else 0.0
    if 0 < share <= 1:
        return share
    table.fault(("machine_share",), "policy_value", 'must be a text such as "25%", above 0% and up to 100%')
    return usual


def _user(table: PolicyTable) -> tuple[tuple[int, int], str]:
    uids = _uids(table)
    run_as = _run_as(table, uids)
    table.finish()
    return uids, run_as


def _run_as(table: PolicyTable, uids: tuple[int, int]) -> str:
    value = table.take("run_as")
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        table.fault(("run_as",), "policy_type", "must be the name of an account, or a uid")
        return ""
    try:
        account = find_account(str(value))
    except UnknownAccount as unknown:
        hint = "make an account for plugins (useradd --system NAME), or leave run_as out"
        table.fault(("run_as",), "policy_value", str(unknown), hint)
        return ""
    if any(first <= number <= last for first, last in (uids, DEFAULT_RANGE) for number in account[1:]):
        table.fault(("run_as",), "policy_value", "is among the uids that plugins without it are given")
    return str(value)


def _uids(table: PolicyTable) -> tuple[int, int]:
    default = DEFAULT_RANGE
    value = table.take("uids")
    if value is None:
        return default
    if isinstance(value, list) and len(value) == 2 and all(type(uid) is int for uid in value):
        first, last = value
        # 65534 is "nobody" and 65535 the 16-bit -1: files and processes of other programs have them.
        if 0 < first <= last < 1 << 31 and not (first <= 65534 <= last or first <= 65535 <= last):
            return first, last
    message = (
        "must be [first, last] with 0 < first <= last, without root and without 65534 and 65535 (nobody)"
    )
    table.fault(("uids",), "policy_value", message)
    return default


def _layers(table: PolicyTable) -> Iterator[tuple[str, Mode]]:
    for name in LAYERS:
        if table.choice(name, ("require", "prefer"), "require") == "prefer":
            yield name, "prefer"
    table.finish()
