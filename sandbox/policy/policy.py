"""The operator's rules: a default for every plugin, and a ceiling for manifests that ask for more.

A policy cannot grant what the denylist refuses: the denylist is checked again, on the opened files, when the
plan is made. load.py finds policies, grant.py applies them to a manifest.
"""

from __future__ import annotations

from sandbox import CODE_ROOT
from sandbox.identity.uid_range import DEFAULT_RANGE
from sandbox.network.egress import EgressLimits
from sandbox.paths.denied_paths import normal
from sandbox.paths.mounts import contains
from sandbox.paths.scan import SCAN_LIMIT
from sandbox.spec import (
    DURATIONS,
    NETWORK_ORDER,
    STATE_DIR_TOKEN,
    Limits,
    NetworkMode,
    Place,
    ProjectAccess,
    SeccompProfile,
)
from sandbox.speed.typed import Iterable, Literal, Sequence
from sandbox.speed.value import NamedTuple

# The read-only runtime of every cage, as far as it exists. Requests for parts of it are always granted.
# Only the public part of /etc/ssl: /etc/ssl/private holds the host's keys.
RUNTIME_PATHS: tuple[str, ...] = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/ca-certificates.conf",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/cert.pem",
    "/etc/ssl/certs",
    "/etc/ssl/cert.pem",
    "/etc/ssl/openssl.cnf",
    "/etc/timezone",
)

# Layers that a policy may mark "prefer": a machine that cannot enforce them launches without them.
LAYERS: tuple[str, ...] = ("seccomp", "uid", "user_namespace_lock", "cgroup_namespace", "session_keyring")

# Variables that make a loader or an interpreter run code, or read configuration, that the variable names
# instead of the program. From glibc's list for setuid programs and the manuals of the interpreters.
# Not NODE_PATH and CLASSPATH: they are searched after the program's own modules and replace none of them.
# Not ENV: only interactive shells read it, and many programs use it for their stage (ENV=production).
STEERING: tuple[str, ...] = (
    "LD_*",
    "GLIBC_TUNABLES",
    "GCONV_PATH",
    "GETCONF_DIR",
    "HOSTALIASES",
    "LOCALDOMAIN",
    "LOCPATH",
    "MALLOC_*",
    "NIS_PATH",
    "NLSPATH",
    "RESOLV_*",
    "RES_OPTIONS",
    "OPENSSL_CONF",
    "OPENSSL_ENGINES",
    "OPENSSL_MODULES",
    "PYTHON*",
    "NODE_OPTIONS",
    "NODE_REPL_EXTERNAL_MODULE",
    "BUN_OPTIONS",
    "JAVA_TOOL_OPTIONS",
    "_JAVA_OPTIONS",
    "JDK_JAVA_OPTIONS",
    "DOTNET_STARTUP_HOOKS",
    "CORECLR_*",
    "COR_*",
    "BASH_ENV",
    "BASH_FUNC_*",
    "BASHOPTS",
    "SHELLOPTS",
    "PROMPT_COMMAND",
    "PS4",
    "ZDOTDIR",
    "PERL5LIB",
    "PERLLIB",
    "PERL5OPT",
    "PERL5DB",
    "RUBYOPT",
    "RUBYLIB",
    "LUA_INIT*",
    "PHPRC",
    "PHP_INI_SCAN_DIR",
    "GIO_EXTRA_MODULES",
    "GIO_MODULE_DIR",
    "GTK_MODULES",
    "QT_PLUGIN_PATH",
)
# The PYTHON* variables that change how a program runs but not which code.
NOT_STEERING = frozenset(
    (
        "PYTHONUNBUFFERED",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONIOENCODING",
        "PYTHONUTF8",
        "PYTHONHASHSEED",
        "PYTHONFAULTHANDLER",
        "PYTHONNODEBUGRANGES",
        "PYTHONOPTIMIZE",
        "PYTHONTRACEMALLOC",
    )
)

SYSTEM_POLICY = "/etc/runner/policy.toml"

# The keys whose signatures count, where a policy does not name another file.
TRUST_FILE = "/etc/runner/trusted-keys"

Mode = Literal["require", "prefer"]
HookFailure = Literal["continue", "abort"]
SignatureMode = Literal["optional", "required"]
LimitMode = Literal["require", "prefer", "delegated"]
LIMIT_MODES: tuple[LimitMode, ...] = ("require", "prefer", "delegated")

LIMIT_NAMES: tuple[str, ...] = Limits._fields
FRACTIONAL_LIMITS = DURATIONS | {"cpu"}  # the others are whole numbers
# Nothing else bounds this memory, so a policy that omits these limits still gets them.
ALWAYS_SIZED: dict[str, float] = {"tmp": 256 << 20, "shm": 64 << 20}


# --- values ---------------------------------------------------------------------------------------


class PathRule(NamedTuple):
    default: tuple[str, ...] = ()
    ceiling: tuple[str, ...] = ()  # a directory stands for all below it; "*" for everything not denied


class NetworkRule(NamedTuple):
    default: NetworkMode = "none"
    ceiling: NetworkMode = "none"
    hosts: tuple[str, ...] = ()  # what an allowlist may contain, as sandbox/network/rules.py has it
    # Whether a contract's own environment variable may give more than the ceiling. A variable is not always
    # set by the person who chose the policy.
    environment_may_raise: bool = False
    private: bool = False  # whether names may lead to private ranges of addresses
    limits: EgressLimits = EgressLimits()  # of allowlist and open
    # Ports of this machine that an entry localhost:PORT may open, of `hosts` or of an approval.
    loopback: tuple[int, ...] = ()


class EnvRule(NamedTuple):
    set: tuple[tuple[str, str], ...] = ()  # set by the operator: manifests cannot change it
    passed: tuple[str, ...] = ()
    ceiling: tuple[str, ...] = ()
    steering: tuple[str, ...] = ()


class SeccompRule(NamedTuple):
    default: SeccompProfile = "default"
    ceiling: SeccompProfile = "default"


class CapabilityRule(NamedTuple):
    """Patterns for protocol words between a plugin and its host. The sandbox does not interpret them."""

    declare: tuple[str, ...] = ()  # capabilities that a plugin may declare in its handshake
    host: tuple[str, ...] = ()  # methods that it may call on its host


class PackageRule(NamedTuple):
    """Whether plugins must be signed, and which keys count. The sandbox does not interpret it."""

    signature: SignatureMode = "optional"
    trust: str = TRUST_FILE  # the file of the keys whose signatures count


class CredentialRule(NamedTuple):
    """A credential of the operator's, by name: plugins that hide this name use it, and never get its value
    (credentials.py)."""

    name: str
    variable: str  # that has the placeholder
    hosts: tuple[str, ...]  # for whom the value is
    source: tuple[str, ...]  # ("file", PATH), ("env", NAME) or ("command", WORD, ...)
    where: tuple[Place, ...] = ("header",)
    authorities: tuple[str, ...] = ()  # files of roots that the hosts may have
    keep: float = 0.0  # seconds for which the answer of a command counts


class ApprovalRule(NamedTuple):
    """What a person may approve beyond the ceilings (approval.py). The default: nothing."""

    read: tuple[str, ...] = ()  # as a ceiling
    write: tuple[str, ...] = ()
    network: NetworkMode = "none"
    hosts: tuple[str, ...] = ()  # where `network` is "allowlist"; above it every host may be approved
    env: tuple[str, ...] = ()  # patterns
    steering: tuple[str, ...] = ()
    seccomp: SeccompProfile = "strict"
    project: ProjectAccess = "none"
    images: tuple[str, ...] = ()  # patterns


class LimitRule(NamedTuple):
    default: float | None = None
    ceiling: float | None = None
    mode: LimitMode = "require"

    def required(self, delegated: bool) -> bool:
        """Whether a launch is refused where this limit cannot be enforced in full.

        `delegated`: the runner is root, or its cgroup was delegated to it, so this machine was set up for
        limits. Elsewhere a user has no means to enforce them, and mode "delegated" accepts that.
        """
        return delegated if self.mode == "delegated" else self.mode != "prefer"


class Policy(NamedTuple):
    name: str
    file: str
    description: str = ""
    unsandboxed: bool = False
    deny: tuple[str, ...] = ()
    scan_limit: int = SCAN_LIMIT
    read: PathRule = PathRule()
    write: PathRule = PathRule(ceiling=(STATE_DIR_TOKEN,))
    network: NetworkRule = NetworkRule()
    project: ProjectAccess = "none"
    env: EnvRule = EnvRule()
    seccomp: SeccompRule = SeccompRule()
    limits: tuple[tuple[str, LimitRule], ...] = ()
    uids: tuple[int, int] = DEFAULT_RANGE
    layers: tuple[tuple[str, Mode], ...] = ()
    capabilities: CapabilityRule = CapabilityRule()
    on_hook_failure: HookFailure = "continue"  # taken as the answer of a hook that failed
    images: tuple[str, ...] = ()  # patterns of references: what a manifest may have as its root
    # An account or uid for plugins that write where no owner can be mapped; see plan/owners.py.
    run_as: str = ""
    packages: PackageRule = PackageRule()
    approvals: ApprovalRule = ApprovalRule()
    credentials: tuple[CredentialRule, ...] = ()
    hide: tuple[str, ...] = ()  # what a person hides from this plugin, by an approval
    ssh: tuple[str, ...] = ()  # with which keys a person lets it log in, and where, by an approval
    move_host: bool = False  # whether other processes of our delegated unit may be moved to a group below it
    # The most that one plugin may take of each number that the whole machine shares; above 0, up to 1.
    machine_share: float = 0.25

    def limit(self, name: str) -> LimitRule:
        return dict(self.limits).get(name, LimitRule())

    def credential(self, name: str) -> CredentialRule | None:
        return next((rule for rule in self.credentials if rule.name == name), None)

    def layer(self, name: str) -> Mode:
        """What to do where this machine cannot enforce `name`. Without an entry the launch is refused."""
        return dict(self.layers).get(name, "require")

    def admits_network(self, mode: NetworkMode) -> bool:
        return NETWORK_ORDER.index(mode) <= NETWORK_ORDER.index(self.network.ceiling)

    def may_read(self, path: str, state_dir: str | None = None) -> bool:
        """Whether a plugin gets `path` for reading if it asks. The denylist decides separately."""
        wanted = normal(path)
        if any(contains(runtime, wanted) for runtime in RUNTIME_PATHS):
            return True
        return admits(self.read.ceiling, wanted, state_dir) or self.may_write(path, state_dir)

    def names_readable(self, path: str) -> bool:
        """Whether `path` itself is listed for reading or writing, not only a folder above it."""
        return normal(path) in (*map(normal, self.read.ceiling), *map(normal, self.write.ceiling))

    def may_write(self, path: str, state_dir: str | None = None) -> bool:
        return admits(self.write.ceiling, normal(path), state_dir)


def expand(path: str, state_dir: str | None) -> str | None:
    """`path` in normal form, with ${state_dir} replaced; None if it needs a state directory and has none."""
    if path != STATE_DIR_TOKEN and not path.startswith(STATE_DIR_TOKEN + "/"):
        return normal(path)
    if state_dir is None:
        return None
    return normal(state_dir + path[len(STATE_DIR_TOKEN) :])


def admits(ceiling: Iterable[str], path: str, state_dir: str | None = None) -> bool:
    """Whether a list of paths, such as a ceiling, covers `path`. `path` is in normal form."""
    for allowed in ceiling:
        if allowed == "*":
            return True
        expanded = expand(allowed, state_dir)
        if expanded is not None and contains(expanded, path):
            return True
    return False


def steers(name: str) -> bool:
    """Whether a variable decides which code a loader or an interpreter runs."""
    return name not in NOT_STEERING and matches(STEERING, name)


def admits_image(patterns: Iterable[str], reference: str) -> bool:
    """Whether a list of images covers a reference. A pattern without a tag covers every tag and digest."""
    name = reference.partition("@")[0]
    folder, slash, last = name.rpartition("/")
    return matches(patterns, reference) or matches(patterns, folder + slash + last.partition(":")[0])


def matches(patterns: Iterable[str], name: str) -> bool:
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    stem, star, rest = pattern.partition("*")
    if not rest and "?" not in stem and "[" not in stem:  # most patterns: a launch then need not import re
        return name.startswith(stem) if star else name == stem
    from fnmatch import fnmatchcase

    return fnmatchcase(name, pattern)


def host_matches(pattern: str, host: str) -> bool:
    """Whether an entry of a policy's `hosts` covers one of a manifest's list."""
    # Imported here: most plugins ask for no host.
    from sandbox.network.rules import covers, parse_rule

    try:
        return covers(parse_rule(pattern, ranges=True), parse_rule(host))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether an entry of a list of hosts stands for ports of this machine."""
    from sandbox.network.rules import parse_rule

    try:
        return parse_rule(host, ranges=True).kind == "loopback"
    except ValueError:
        return False


def loopback_remedy(host: str, opened: Sequence[int], file: str) -> str:
    """What the operator has to do before an entry localhost:PORT can be allowed; '' if the policy opens all
    its ports. `opened`: the policy's `loopback`. `file`: the policy's."""
    from sandbox.network.rules import EVERY_PORT, covers, loopback_rule, parse_rule

    asked = parse_rule(host, ranges=True)
    if covers(loopback_rule(opened), asked):
        return ""
    if asked.ports == EVERY_PORT:
        return "name the port, as in localhost:6379"
    ports = (port for first, last in asked.ports for port in range(first, last + 1))
    line = f"loopback = {list(dict.fromkeys((*opened, *ports)))} under [network]"
    if file == SYSTEM_POLICY or not file.startswith(f"{CODE_ROOT}/"):
        return f"the operator can write {line} in {file}"
    return f"the operator can copy {file} to {SYSTEM_POLICY}, and write {line} there"


def private_fault(host: str) -> str:
    """Why only the policy can list this host, as the second half of a sentence. '' for names, and for
    addresses that a name may lead to anyway."""
    from sandbox.network.rules import parse_rule

    try:
        rule = parse_rule(host)
    except ValueError as error:
        return str(error)
    if rule.kind != "address":
        return ""
    from sandbox.network.addresses import refusal

    if refusal(rule.host, allow_private=True):
        return ""  # never dialled, even if the policy lists it
    return refusal(rule.host)
