"""What the operator allows: for each thing a default, and a ceiling for those who ask for more.

A policy is a file. `load_policy` finds and checks it, telling every fault at once; `grant` lays a manifest's
wishes over it and says, for each thing that was cut, which rule did it. Neither can give what the denylist
refuses: that is decided again, on the opened files, when the plan is made.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import policies
from sandbox.denylist import lexical_fault, lexical_hit, normal, relation
from sandbox.document import Diagnostic, Document, DocumentError, parse, quoted, read_bounded
from sandbox.mounts import contains
from sandbox.sources import SCAN_LIMIT
from sandbox.spec import (
    NETWORK_ORDER,
    SECCOMP_ORDER,
    STATE_DIR_TOKEN,
    Access,
    Denial,
    EnvRequest,
    Grant,
    GrantedPath,
    KeyPath,
    Limits,
    Network,
    NetworkMode,
    PathRequest,
    SandboxSpec,
    SeccompProfile,
)
from sandbox.units import format_duration, format_size, parse_duration, parse_size

SYSTEM_POLICY = "/etc/runner/policy.toml"
ENVIRONMENT_NAME = "RUNNER_POLICY"
DEFAULT_NAME = "default"

# The read-only runtime of every cage, where it exists. Asking for it, or for a part of it, asks for nothing.
# Of /etc/ssl only what is public: /etc/ssl/private holds the host's keys.
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

# Layers an operator may ask for with "prefer": the launch goes on without them where the machine cannot.
LAYERS: tuple[str, ...] = ("seccomp", "uid", "user_namespace_lock", "cgroup_namespace", "session_keyring")

# Variables that make a loader or an interpreter run code or configuration of the setter's choice before the
# program's own. From glibc's list for setuid programs and the manuals of the interpreters.
# Not NODE_PATH and CLASSPATH: they are searched after the program's own modules and replace none of them.
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
    "ENV",
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
# Of PYTHON*, those that change how a program runs but not which code.
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

Mode = Literal["require", "prefer"]

_SIZES = frozenset(("memory", "file_size", "disk", "tmp", "shm", "output"))
_DURATIONS = frozenset(("cpu_time", "deadline"))
LIMIT_NAMES: tuple[str, ...] = Limits._fields
# The memory behind these has no other bound: a policy that does not speak of them must not mean "all of it".
_SIZED: dict[str, float] = {"tmp": 256 << 20, "shm": 64 << 20}


# --- values ---------------------------------------------------------------------------------------


class PathRule(NamedTuple):
    default: tuple[str, ...] = ()
    ceiling: tuple[str, ...] = ()  # a directory stands for all below it; "*" for everything not denied


class NetworkRule(NamedTuple):
    default: NetworkMode = "none"
    ceiling: NetworkMode = "none"
    hosts: tuple[str, ...] = ()  # what an allowlist may contain: "name:port", either may be or start with *


class EnvRule(NamedTuple):
    set: tuple[tuple[str, str], ...] = ()  # the operator's word: manifests cannot change it
    passed: tuple[str, ...] = ()
    ceiling: tuple[str, ...] = ()
    steering: tuple[str, ...] = ()


class SeccompRule(NamedTuple):
    default: SeccompProfile = "default"
    ceiling: SeccompProfile = "default"


class LimitRule(NamedTuple):
    default: float | None = None
    ceiling: float | None = None
    mode: Mode = "require"


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
    env: EnvRule = EnvRule()
    seccomp: SeccompRule = SeccompRule()
    limits: tuple[tuple[str, LimitRule], ...] = ()
    uids: tuple[int, int] = (61184, 65519)
    layers: tuple[tuple[str, Mode], ...] = ()

    def limit(self, name: str) -> LimitRule:
        return dict(self.limits).get(name, LimitRule())

    def layer(self, name: str) -> Mode:
        """What to do where this machine cannot enforce `name`. Silence means: do not launch."""
        return dict(self.layers).get(name, "require")

    def may_read(self, path: str, state_dir: str | None = None) -> bool:
        """Whether a plugin gets `path` for reading if it asks. The denylist has a word of its own."""
        wanted = normal(path)
        if any(contains(runtime, wanted) for runtime in RUNTIME_PATHS):
            return True
        return _admits(self.read.ceiling, wanted, state_dir) or self.may_write(path, state_dir)

    def may_write(self, path: str, state_dir: str | None = None) -> bool:
        return _admits(self.write.ceiling, normal(path), state_dir)


class Overrides(NamedTuple):
    """What the operator said on the command line, for this launch."""

    env: tuple[tuple[str, str], ...] = ()
    pass_env: tuple[str, ...] = ()
    limits: Limits = Limits()


def _expand(path: str, state_dir: str | None) -> str | None:
    """`path` with the token replaced, normal; None if there is no state directory to replace it with."""
    if path != STATE_DIR_TOKEN and not path.startswith(STATE_DIR_TOKEN + "/"):
        return normal(path)
    if state_dir is None:
        return None
    return normal(state_dir + path[len(STATE_DIR_TOKEN) :])


def _admits(ceiling: Iterable[str], path: str, state_dir: str | None) -> bool:
    for allowed in ceiling:
        if allowed == "*":
            return True
        expanded = _expand(allowed, state_dir)
        if expanded is not None and contains(expanded, path):
            return True
    return False


def steers(name: str) -> bool:
    """Whether a variable decides which code a loader or an interpreter runs."""
    return name not in NOT_STEERING and _matches(STEERING, name)


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def host_matches(pattern: str, host: str) -> bool:
    """`*.example.com:443` admits names below example.com and not the name itself; `*` stands for any."""
    wanted_name, _, wanted_port = pattern.lower().rpartition(":")
    name, _, port = host.lower().rpartition(":")
    if wanted_port not in ("*", port):
        return False
    if wanted_name.startswith("*."):
        return name.endswith(wanted_name[1:]) and len(name) > len(wanted_name) - 1
    return wanted_name in ("*", name)


# --- granting -------------------------------------------------------------------------------------


def grant(
    spec: SandboxSpec,
    policy: Policy,
    *,
    state_dir: str | None,
    environ: Mapping[str, str],
    overrides: Overrides | None = None,
    homes: Sequence[str] = (),
    require_enabled: bool = False,
    host_network_allowed: bool = False,
) -> Grant:
    """What `spec` gets under `policy`.

    A path above the ceiling refuses the launch even where the manifest calls it optional: optional is about
    what exists, not about what is allowed. `homes` adds their credentials to the paths refused by name here.
    """
    said = overrides or Overrides()
    where = dict(spec.where)
    denials: list[Denial] = []
    if not spec.enabled:
        if require_enabled:
            denials.append(
                Denial(
                    "sandbox_required",
                    "enabled = false",
                    "the operator requires every plugin to ask for its sandbox (NEXO_PLUGIN_SANDBOX_REQUIRE)",
                    "set enabled = true under [plugin.sandbox]",
                    where=where.get("enabled", ()),
                )
            )
        # Without its sandbox section in force a manifest asks for nothing beyond the plain cage.
        spec = SandboxSpec(enabled=False, env=spec.env, limits=spec.limits, where=spec.where)
    limits, decided_by = _limits(spec, policy, said, denials)
    return Grant(
        policy=policy.name,
        unsandboxed=not spec.enabled and policy.unsandboxed and not require_enabled,
        paths=_paths(spec, policy, state_dir, homes, denials),
        network=_network(spec, policy, host_network_allowed, denials),
        env=_env(spec, policy, environ, said, denials),
        seccomp=_seccomp(spec, policy, where.get("seccomp", ()), denials),
        limits=limits,
        decided_by=decided_by,
        denials=tuple(denials),
    )


def _paths(
    spec: SandboxSpec, policy: Policy, state_dir: str | None, homes: Sequence[str], denials: list[Denial]
) -> tuple[GrantedPath, ...]:
    granted: dict[str, GrantedPath] = {}

    def give(
        path: str, access: Access, required: bool, origin: Literal["manifest", "policy"], at: KeyPath
    ) -> None:
        ours = state_dir is not None and contains(normal(state_dir), path)
        new = GrantedPath(path, access, required, "state" if ours else origin, at)
        old = granted.get(path)
        if old is None or (old.access == "read" and access == "write"):
            granted[path] = new._replace(required=required or (old is not None and old.required))
        elif required and not old.required:
            granted[path] = old._replace(required=True)

    rules: tuple[tuple[Access, PathRule], ...] = (("read", policy.read), ("write", policy.write))
    for access, rule in rules:
        for path in rule.default:
            expanded = _expand(path, state_dir)
            if expanded is not None:  # a default says "where there is one"
                give(expanded, access, False, "policy", ())
    for request in spec.paths:
        denial = _path_denial(request, policy, state_dir, homes)
        expanded = None if denial else _expand(request.path, state_dir)
        if denial is not None:
            denials.append(denial)
        elif expanded is not None:
            give(expanded, request.access, request.required, "manifest", request.where)
    return tuple(granted.values())


def _path_denial(
    request: PathRequest, policy: Policy, state_dir: str | None, homes: Sequence[str]
) -> Denial | None:
    asked, at = request.path, request.where
    absolute = asked
    if asked == STATE_DIR_TOKEN or asked.startswith(STATE_DIR_TOKEN + "/"):
        if state_dir is None:
            reason = "this launch has no state directory"
            return Denial("state_dir", asked, reason, "give it one with --state-dir", where=at)
        absolute = state_dir + asked[len(STATE_DIR_TOKEN) :]
    fault = lexical_fault(absolute)
    if fault is not None:
        return Denial("path", asked, f"the path {fault}", "write an absolute path without '..'", where=at)
    denied = lexical_hit(absolute, homes, policy.deny)
    if denied is not None:
        reason = (
            f"{_RELATIONS[relation(normal(absolute), normal(denied)) or 'equal']} {denied}, which nobody gets"
        )
        if denied in policy.deny:
            reason = reason.replace("nobody gets", f"policy {policy.name} denies")
        hint = "choose another one with --state-dir" if absolute != asked else "remove it from the manifest"
        return Denial("denylist", asked, reason, hint, where=at)
    may = policy.may_read if request.access == "read" else policy.may_write
    if may(absolute, state_dir):
        return None
    verb = "reading" if request.access == "read" else "writing"
    return Denial(
        f"{request.access}_ceiling",
        asked,
        f"policy {policy.name} does not allow {verb} it",
        f'the operator can add "{normal(absolute)}" to ceiling under [{request.access}] in their own policy',
        where=at,
    )


_RELATIONS = {"equal": "it is", "below": "it lies below", "above": "it contains"}


def _network(spec: SandboxSpec, policy: Policy, host_network_allowed: bool, denials: list[Denial]) -> Network:
    rule = policy.network
    if spec.network is None:
        return Network(rule.default)
    asked = spec.network
    ceiling: NetworkMode = "host" if host_network_allowed else rule.ceiling
    if NETWORK_ORDER.index(asked.mode) > NETWORK_ORDER.index(ceiling):
        denials.append(
            Denial(
                "network_ceiling",
                f"network {asked.mode}",
                f"policy {policy.name} allows network {ceiling} at most",
                f'the operator can set ceiling = "{asked.mode}" under [network] in their own policy',
                where=asked.where,
            )
        )
        return Network("none", where=asked.where)
    if asked.mode != "allowlist" or ceiling == "host":
        return asked
    granted = []
    for host in asked.hosts:
        if any(host_matches(pattern, host) for pattern in rule.hosts):
            granted.append(host)
            continue
        denials.append(
            Denial(
                "network_hosts",
                host,
                f"policy {policy.name} does not list this host",
                f'the operator can add "{host}" to hosts under [network] in their own policy',
                where=asked.where,
            )
        )
    return asked._replace(hosts=tuple(granted))


def _seccomp(spec: SandboxSpec, policy: Policy, where: KeyPath, denials: list[Denial]) -> SeccompProfile:
    rule = policy.seccomp
    asked = spec.seccomp
    if asked is None:
        return rule.default
    if SECCOMP_ORDER.index(asked) <= SECCOMP_ORDER.index(rule.ceiling):
        return asked
    denials.append(
        Denial(
            "seccomp_ceiling",
            f"seccomp {asked}",
            f"policy {policy.name} allows seccomp {rule.ceiling} at most",
            f'the operator can set ceiling = "{asked}" under [seccomp] in their own policy',
            where=where,
        )
    )
    return rule.ceiling


def _env(
    spec: SandboxSpec,
    policy: Policy,
    environ: Mapping[str, str],
    overrides: Overrides,
    denials: list[Denial],
) -> tuple[tuple[str, str], ...]:
    rule = policy.env
    fixed = dict(rule.set)
    env = dict(fixed)
    env.update((name, environ[name]) for name in rule.passed if name in environ)
    for request in spec.env:
        denial = _env_denial(request, rule, policy.name, environ)
        if denial is not None:
            denials.append(denial)
        elif request.name in fixed:
            if request.value != fixed[request.name]:
                reason = f"policy {policy.name} sets this variable itself"
                denials.append(
                    Denial("env_policy", request.name, reason, required=False, where=request.where)
                )
        else:
            env[request.name] = environ[request.name] if request.value is None else request.value
    env.update((name, environ[name]) for name in overrides.pass_env if name in environ)
    env.update(overrides.env)
    return tuple(env.items())


_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def _env_denial(request: EnvRequest, rule: EnvRule, policy: str, environ: Mapping[str, str]) -> Denial | None:
    name, at = request.name, request.where
    if not _ENV_NAME.fullmatch(name) or "\0" in (request.value or ""):
        return Denial("env_name", quoted(name), "this cannot be an environment variable", where=at)
    passed = request.value is None and name in rule.passed  # the operator gives it to everybody anyway
    if steers(name) and not passed and not _matches(rule.steering, name):
        return Denial(
            "env_steering",
            name,
            "it decides which code the loader or the interpreter runs, so a manifest may not choose it",
            f'the operator can say --env {name}=…, or add "{name}" to steering under [env] in a policy',
            where=at,
        )
    if request.value is not None:
        return None
    if not passed and not _matches(rule.ceiling, name):
        return Denial(
            "env_ceiling",
            name,
            f"policy {policy} does not pass this variable of the host on",
            f'the operator can say --env {name}=…, or add "{name}" to ceiling under [env] in a policy',
            required=request.required,
            where=at,
        )
    if name not in environ:
        return Denial(
            "env_missing",
            name,
            "the host does not have this variable",
            f"set it, or give it with --env {name}=…",
            required=request.required,
            where=at,
        )
    return None


def _limits(
    spec: SandboxSpec, policy: Policy, overrides: Overrides, denials: list[Denial]
) -> tuple[Limits, tuple[tuple[str, str], ...]]:
    """The lowest of what manifest, command line and ceiling say. The policy's default is for silence only, so
    the command line can lift it, up to the ceiling."""
    values: dict[str, float] = {}
    decided: list[tuple[str, str]] = []
    rules = dict(policy.limits)
    where = dict(spec.where)
    for name in LIMIT_NAMES:
        rule = rules.get(name, LimitRule())
        asked: float | None = getattr(spec.limits, name)
        line: float | None = getattr(overrides.limits, name)
        said = [(v, who) for v, who in ((asked, "manifest"), (line, "command line")) if v is not None]
        if not said and rule.default is not None:
            said.append((rule.default, "policy"))
        if not said:
            continue
        if rule.ceiling is not None:
            said.append((rule.ceiling, "policy"))
        value, who = min(said, key=lambda entry: entry[0])
        values[name] = value
        decided.append((name, who))
        if asked is not None and rule.ceiling is not None and asked > rule.ceiling:
            denials.append(
                Denial(
                    "limit_ceiling",
                    f"{name} = {_shown(name, asked)}",
                    f"policy {policy.name} allows {_shown(name, rule.ceiling)} at most",
                    f"the operator can raise ceiling under [limits.{name}] in their own policy",
                    required=False,
                    where=where.get(name, ()),
                )
            )
    return _as_limits(values), tuple(decided)


def _as_limits(values: Mapping[str, float]) -> Limits:
    real = {"cpu", "cpu_time", "deadline"}
    whole = {name: value if name in real else int(value) for name, value in values.items()}
    return Limits(**whole)  # type: ignore[arg-type]  # names and kinds are those of LIMIT_NAMES


def _shown(name: str, value: float) -> str:
    if name in _SIZES:
        return format_size(int(value))
    if name in _DURATIONS:
        return format_duration(value)
    return f"{value:g}"


# --- finding the file -----------------------------------------------------------------------------

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


def policy_names() -> tuple[str, ...]:
    """The policies that come with the runner."""
    found = os.listdir(_packaged_directory())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def _packaged_directory() -> str:
    return os.path.dirname(os.path.abspath(policies.__file__))


def load_policy(name_or_path: str | None, environ: Mapping[str, str]) -> Policy:
    """The policy in force: as told, else $RUNNER_POLICY, else the system's, else "default".

    Raises DocumentError. A policy that was named and cannot be used is never replaced by another one.
    """
    told = name_or_path or environ.get(ENVIRONMENT_NAME) or None
    if told is None:
        told = SYSTEM_POLICY if os.path.lexists(SYSTEM_POLICY) else DEFAULT_NAME
    if _NAME.fullmatch(told):
        path = os.path.join(_packaged_directory(), told + ".toml")
        if not os.path.exists(path):
            raise DocumentError(_unknown_name(told))
        # The runner's own files are as trustworthy as the code beside them: no check could add to that.
        return parse_policy(path, read_bounded(path), name=told)
    path = os.path.abspath(told)
    fault = untrustworthy(path)
    if fault is not None:
        reason, hint = fault
        raise DocumentError(Diagnostic(path, 0, 0, "policy_untrusted", reason, hint))
    return parse_policy(path, read_bounded(path), name=path)


def _unknown_name(told: str) -> Diagnostic:
    names = policy_names()
    hint = f"there are {', '.join(names)}" + _did_you_mean(told, names)
    if os.path.exists(told):
        hint = f"for the file in this directory write ./{told}"
    return Diagnostic(told, 0, 0, "policy_unknown", f"no policy is called {quoted(told)}", hint)


def untrustworthy(path: str) -> tuple[str, str] | None:
    """Why others than root and the runner's user could change what stands at `path`: (reason, remedy).

    Every directory above counts, as whoever may write to one can put another tree in its place, and so does
    the way through links. A sticky directory such as /tmp lets nobody replace what others own.
    """
    for route in dict.fromkeys((path, os.path.realpath(path))):
        place = route
        while True:
            try:
                status = os.stat(place)
            except OSError:
                return None  # reading it will say so, with the reason
            fault = _weak_spot(place, status, top=place == route)
            if fault is not None:
                return fault
            if place == "/":
                break
            place = os.path.dirname(place)
    return None


def _weak_spot(place: str, status: os.stat_result, *, top: bool) -> tuple[str, str] | None:
    what = "the policy file" if top else f"its directory {place}"
    if status.st_uid not in (0, os.geteuid()):
        remedy = f"chown {os.geteuid()} {place}, or copy the policy to a directory of your own"
        return f"{what} belongs to uid {status.st_uid}, which is neither root nor the runner's user", remedy
    if status.st_mode & 0o022 and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return f"{what} can be written by its group or by everybody", f"chmod go-w {place}"
    return None


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    import difflib  # only when somebody made a mistake

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


# --- reading the file -----------------------------------------------------------------------------


class _Table:
    """One table of the file. Values are taken from it; what is left over was a mistake."""

    def __init__(self, document: Document, faults: list[Diagnostic], value: object, keys: KeyPath) -> None:
        self.document = document
        self.faults = faults
        self.keys = keys
        self.known: list[str] = []
        self.values: dict[str, object] = {}
        if isinstance(value, dict):
            self.values = value
        elif value is not None:
            self.fault((), "policy_type", "must be a table")

    def fault(self, keys: KeyPath, rule: str, message: str, hint: str = "") -> None:
        full = (*self.keys, *keys)
        name = ".".join(str(key) if isinstance(key, str) else f"[{key}]" for key in full).replace(".[", "[")
        line, column = self.document.where(full)
        self.faults.append(
            Diagnostic(self.document.path, line, column, rule, f"{name} {message}".strip(), hint)
        )

    def take(self, key: str) -> object:
        self.known.append(key)
        return self.values.get(key)

    def table(self, key: str) -> _Table:
        return _Table(self.document, self.faults, self.take(key), (*self.keys, key))

    def text(self, key: str) -> str:
        value = self.take(key)
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        self.fault((key,), "policy_type", "must be a text")
        return ""

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, str) and value in choices:
            return value
        shown = quoted(value) if isinstance(value, str) else "this"
        hint = _did_you_mean(value, choices).removeprefix("; ") if isinstance(value, str) else ""
        self.fault((key,), "policy_value", f"must be one of {', '.join(choices)}, not {shown}", hint)
        return default

    def texts(
        self, key: str, check: Callable[[str], str | None], default: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """A list of texts for which `check` has nothing to say; it answers with half a sentence."""
        value = self.take(key)
        if value is None:
            return tuple(default)
        if not isinstance(value, list):
            self.fault((key,), "policy_type", "must be a list of texts")
            return tuple(default)
        found = []
        for number, item in enumerate(value):
            fault = check(item) if isinstance(item, str) else "must be a text"
            if fault is None:
                found.append(item)
            else:
                self.fault((key, number), "policy_value", fault)
        return tuple(dict.fromkeys(found))

    def number(self, key: str, low: int, high: int, default: int) -> int:
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.fault((key,), "policy_value", f"must be a whole number from {low} to {high}")
        return default

    def finish(self) -> None:
        for key in self.values:
            if key not in self.known:
                hint = f"known here: {', '.join(self.known)}" + _did_you_mean(key, self.known)
                self.fault((key,), "policy_unknown_key", "is not a key of a policy", hint)


def parse_policy(path: str, raw: bytes, *, name: str) -> Policy:
    """Read a policy, or raise DocumentError with every fault in it."""
    document = parse(path, raw, "toml")
    faults: list[Diagnostic] = []
    top = _Table(document, faults, document.data, ())
    version = top.take("version")
    if version is None:
        top.fault((), "policy_version", "the version is missing", "write version = 1 at the top")
    elif version != 1 or isinstance(version, bool):
        top.fault(("version",), "policy_version", "must be 1, the only version this runner knows")
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
        env=_env_rule(top.table("env")),
        seccomp=_seccomp_rule(top.table("seccomp")),
        limits=tuple(_limit_rules(top.table("limits"))),
        uids=_uids(top.table("user")),
        layers=tuple(_layers(top.table("layers"))),
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
    denied = None if _place_fault(path) or path.startswith("$") else lexical_hit(path)
    return f"touches {denied}, which no policy can give" if denied else _place_fault(path)


def _ceiling_fault(path: str) -> str | None:
    if path == "*" or _place_fault(path) or path.startswith("$"):
        return None if path == "*" else _place_fault(path)
    denied = lexical_hit(path)
    # A ceiling above a denied path is useful for what else lies below it.
    if denied is not None and contains(normal(denied), normal(path)):
        return f"lies in {denied}, which no policy can give"
    return None


def _path_rule(table: _Table, ceiling: Sequence[str]) -> PathRule:
    rule = PathRule(table.texts("default", _default_fault), table.texts("ceiling", _ceiling_fault, ceiling))
    table.finish()
    return rule


_HOST = re.compile(r"(\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?):(\*|[0-9]{1,5})", re.ASCII | re.IGNORECASE)


def _host_fault(host: str) -> str | None:
    match = _HOST.fullmatch(host)
    if match is None:
        return 'must look like "example.com:443", "*.example.com:443", "*:443" or "example.com:*"'
    if match[4] != "*" and not 0 < int(match[4]) < 65536:
        return "has a port outside of 1 to 65535"
    return None


def _network_rule(table: _Table) -> NetworkRule:
    # No default of "allowlist": a list nobody asked for would have no hosts.
    default = table.choice("default", ("none", "host"), "none")
    ceiling = table.choice("ceiling", NETWORK_ORDER, default)
    hosts = table.texts("hosts", _host_fault)
    table.finish()
    modes: dict[str, NetworkMode] = {mode: mode for mode in NETWORK_ORDER}
    _in_order(table, NETWORK_ORDER, default, ceiling)
    return NetworkRule(modes[default], modes[ceiling], tuple(host.lower() for host in hosts))


def _seccomp_rule(table: _Table) -> SeccompRule:
    default = table.choice("default", SECCOMP_ORDER, "default")
    ceiling = table.choice("ceiling", SECCOMP_ORDER, default)
    table.finish()
    profiles: dict[str, SeccompProfile] = {profile: profile for profile in SECCOMP_ORDER}
    _in_order(table, SECCOMP_ORDER, default, ceiling)
    return SeccompRule(profiles[default], profiles[ceiling])


def _in_order(table: _Table, order: Sequence[str], default: str, ceiling: str) -> None:
    if order.index(default) > order.index(ceiling):
        table.fault(("default",), "policy_order", f"({default}) lies above the ceiling ({ceiling})")


def _name_fault(name: str) -> str | None:
    return None if _ENV_NAME.fullmatch(name) else "cannot be the name of an environment variable"


def _glob_fault(pattern: str) -> str | None:
    if re.fullmatch(r"[A-Za-z0-9_*?]+", pattern, re.ASCII):
        return None
    return "must be a variable name, in which * and ? stand for anything"


def _env_rule(table: _Table) -> EnvRule:
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


def _limit_rules(table: _Table) -> Iterator[tuple[str, LimitRule]]:
    for name in LIMIT_NAMES:
        if name in table.values or name in _SIZED:
            yield name, _limit_rule(table.table(name), name)
    table.known = list(LIMIT_NAMES)
    table.finish()


def _limit_rule(table: _Table, name: str) -> LimitRule:
    default = _amount(table, "default", name)
    ceiling = _amount(table, "ceiling", name)
    if default is None and name in _SIZED:
        default = min(_SIZED[name], ceiling or _SIZED[name])
    mode = table.choice("mode", ("require", "prefer"), "require")
    table.finish()
    if default is not None and ceiling is not None and default > ceiling:
        table.fault(("default",), "policy_order", "lies above the ceiling")
    return LimitRule(default, ceiling, "prefer" if mode == "prefer" else "require")


def _amount(table: _Table, key: str, name: str) -> float | None:
    value = table.take(key)
    if value is None:
        return None
    try:
        if name in _SIZES:
            amount: float = parse_size(value)
        elif name in _DURATIONS:
            amount = parse_duration(value)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("must be a number")
        elif name != "cpu" and not isinstance(value, int):
            raise ValueError("must be a whole number")
        else:
            amount = value
        if not 0 < amount < 1 << 63:
            raise ValueError("must be greater than zero")
    except ValueError as error:
        table.fault((key,), "policy_value", f"is wrong: {error}")
        return None
    return amount


def _uids(table: _Table) -> tuple[int, int]:
    default = (61184, 65519)
    value = table.take("uids")
    table.finish()
    if value is None:
        return default
    if isinstance(value, list) and len(value) == 2 and all(type(uid) is int for uid in value):
        first, last = value
        # 65534 is everybody's "nobody" and 2**16-1 the old -1: files and processes of others carry them.
        if 0 < first <= last < 1 << 31 and not (first <= 65534 <= last or first <= 65535 <= last):
            return first, last
    message = (
        "must be [first, last] with 0 < first <= last, without root and without 65534 and 65535 (nobody)"
    )
    table.fault(("uids",), "policy_value", message)
    return default


def _layers(table: _Table) -> Iterator[tuple[str, Mode]]:
    for name in LAYERS:
        if table.choice(name, ("require", "prefer"), "require") == "prefer":
            yield name, "prefer"
    table.finish()
