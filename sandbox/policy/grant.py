"""A manifest's requests under a policy: what the plugin gets, and which rule cut the rest."""

from __future__ import annotations

from sandbox.document.diagnostic import quoted
from sandbox.paths.denied_paths import DENYLIST_RULE, lexical_fault, lexical_hit, normal
from sandbox.paths.mounts import contains
from sandbox.policy.policy import (
    FRACTIONAL_LIMITS,
    LIMIT_NAMES,
    EnvRule,
    LimitRule,
    PathRule,
    Policy,
    admits_image,
    expand,
    host_matches,
    is_loopback,
    loopback_remedy,
    matches,
    private_fault,
    steers,
)
from sandbox.spec import (
    APPROVED,
    POLICY_HOSTS,
    SECCOMP_ORDER,
    SECCOMP_WITHOUT_INTERNET,
    SLOT,
    STATE_DIR_TOKEN,
    Access,
    Denial,
    EnvRequest,
    Grant,
    GrantedPath,
    ImageRoot,
    KeyPath,
    Limits,
    Network,
    NetworkMode,
    Overrides,
    PathRequest,
    SandboxSpec,
    SeccompProfile,
    is_variable_name,
    names_policy_hosts,
)
from sandbox.speed.typed import TYPE_CHECKING, Mapping, Sequence

if TYPE_CHECKING:
    from sandbox.network.credentials import Credential, HostAuthorities

_MOST_STAGED = 8 << 30  # bytes of staged writes in one folder, where nothing else limits them


def grant(
    spec: SandboxSpec,
    policy: Policy,
    *,
    state_dir: str | None,
    environ: Mapping[str, str],
    overrides: Overrides | None = None,
    homes: Sequence[str] = (),
    sandbox_required_by: str = "",
    host_network_by: str = "",
    bare_environment: bool = False,
) -> Grant:
    """The grant of `spec` under `policy`.

    A path above the ceiling refuses the launch even where the manifest calls it optional: an optional path
    may be missing, not forbidden.

    `bare_environment`: the contract promises exactly the variables it lists. Variables that the policy passes
    to every plugin are then left out; those that the operator sets are not. `homes`: home directories, whose
    credentials are refused by name. `host_network_by`, `sandbox_required_by`: the variable by which the
    operator asks for the host's network, or requires a sandbox for every plugin; '' if it is not set.
    """
    said = overrides or Overrides()
    where = dict(spec.where)
    scratch, memory_files = spec.scratch, spec.memory_files
    staged = spec.staged or said.staged
    denials: list[Denial] = []
    if spec.image is not None and not admits_image(policy.images, spec.image.reference):
        denials.append(_image_denial(spec.image, policy))
    if not spec.enabled:
        if sandbox_required_by:
            at = where.get("enabled", ())
            table = ".".join(map(str, at[:-1]))
            denials.append(
                Denial(
                    "sandbox_required",
                    "enabled = false",
                    f"the operator requires a sandbox for every plugin ({sandbox_required_by})",
                    f"set enabled = true under [{table}]" if table else "set enabled = true in the manifest",
                    where=at,
                )
            )
        # With its sandbox section disabled a manifest asks for nothing beyond the plain cage and its own
        # folder, which its arguments may name.
        own = tuple(path for path in spec.paths if path.path.startswith(STATE_DIR_TOKEN))
        spec = SandboxSpec(enabled=False, paths=own, env=spec.env, limits=spec.limits, where=spec.where)
    limits, decided_by = _limits(spec, policy, said, denials)
    raised = bool(host_network_by) and policy.network.environment_may_raise
    if raised and spec.network is not None and not policy.admits_network(spec.network.mode):
        decided_by = (*decided_by, ("network", "environment"))
    unsandboxed = not spec.enabled and policy.unsandboxed and not sandbox_required_by
    if unsandboxed and staged:
        reason = "it would run without a cage, and only a cage keeps apart what it writes"
        denials.append(Denial("staged", "staged writes", reason, "let the manifest ask for a sandbox"))
    if staged and limits.disk is None:  # what waits for a person is bounded
        ceiling = dict(policy.limits).get("disk", LimitRule()).ceiling
        limits = limits._replace(disk=_MOST_STAGED if ceiling is None else int(ceiling))
        decided_by = (*decided_by, ("disk", "policy"))
    paths = _paths(spec, policy, state_dir, homes, denials)
    network = _network(spec, policy, host_network_by, denials)
    credentials: tuple[Credential, ...] = ()
    authorities: tuple[HostAuthorities, ...] = ()
    if said.hide or policy.hide or spec.hide:
        from sandbox.network.credentials import written_values
        from sandbox.policy.credentials import find_credentials

        asked = [(text, "") for text in spec.hide]
        asked += [(text, APPROVED) for text in policy.hide]
        asked += [(text, "command line") for text in said.hide]
        literals = (written_values(spec.env).keys() - set(said.pass_env)) | dict(said.env).keys()
        credentials, authorities = find_credentials(
            asked,
            policy,
            network,
            denials,
            caged=not unsandboxed,
            literals=literals,
            slots={each.secret for each in memory_files if each.secret},
        )
    ssh: tuple[str, ...] = ()
    if said.ssh or policy.ssh or spec.ssh:
        from sandbox.policy.ssh import find_ssh

        ssh = find_ssh((*said.ssh, *policy.ssh), spec.ssh, policy, network, denials, caged=not unsandboxed)
    hidden = tuple(credential.name for credential in credentials if credential.source != SLOT)
    env = _env(spec, policy, environ, said, denials, bare_environment, hidden)
    seccomp = _seccomp(spec, policy, where.get("seccomp", ()), denials)
    asks_network = network.mode != "none" and not unsandboxed
    if asks_network and (denial := network_denial(network, seccomp, spec, policy)):
        denials.append(denial)
        network = Network("none", where=network.where)
    return Grant(
        policy=policy.name,
        unsandboxed=unsandboxed,
        paths=paths,
        network=network,
        env=env,
        seccomp=seccomp,
        limits=limits,
        decided_by=decided_by,
        denials=tuple(denials),
        scratch=scratch,
        memory_files=memory_files,
        staged=staged,
        credentials=credentials,
        authorities=authorities,
        ssh=ssh,
    )


def _paths(
    spec: SandboxSpec, policy: Policy, state_dir: str | None, homes: Sequence[str], denials: list[Denial]
) -> tuple[GrantedPath, ...]:
    granted: dict[str, GrantedPath] = {}

    def give(
        path: str,
        access: Access,
        required: bool,
        origin: str,
        at: KeyPath,
        *,
        file: bool = False,
        follow: bool = False,
    ) -> None:
        ours = state_dir is not None and contains(normal(state_dir), path)
        new = GrantedPath(path, access, required, "state" if ours else origin, at, file, follow)
        old = granted.get(path)
        if old is None or (old.access == "read" and access == "write"):
            granted[path] = new._replace(required=required or (old is not None and old.required))
        elif required and not old.required:
            granted[path] = old._replace(required=True)

    rules: tuple[tuple[Access, PathRule], ...] = (("read", policy.read), ("write", policy.write))
    for access, rule in rules:
        for path in rule.default:
            expanded = expand(path, state_dir)
            if expanded is not None:  # a default means "if it exists"
                give(expanded, access, False, "policy", ())
    for request in spec.paths:
        denial = _path_denial(request, policy, state_dir, homes)
        expanded = None if denial else expand(request.path, state_dir)
        if denial is not None:
            denials.append(denial)
        elif expanded is not None:
            given = expanded, request.access, request.required, request.origin, request.where
            give(*given, file=request.file, follow=request.follow)
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
        return Denial("path", asked, f"the path {fault}", "use an absolute path without '..'", where=at)
    hit = lexical_hit(absolute, homes, policy.deny)
    if hit is not None:
        hint = hit.hint() if absolute == asked else "choose another state directory with --state-dir"
        return Denial(DENYLIST_RULE, asked, f"it {hit.clause()}", hint, where=at)
    may = policy.may_read if request.access == "read" else policy.may_write
    if may(absolute, state_dir):
        return None
    verb = "reading" if request.access == "read" else "writing"
    entry = asked if asked.startswith(STATE_DIR_TOKEN) else normal(absolute)
    return Denial(
        f"{request.access}_ceiling",
        asked,
        f"policy {policy.name} does not allow {verb} it",
        f'the operator can add "{entry}" to ceiling under [{request.access}] in the policy',
        where=at,
    )


def _network(spec: SandboxSpec, policy: Policy, host_network_by: str, denials: list[Denial]) -> Network:
    rule = policy.network
    if spec.network is None:
        return Network(rule.default)
    asked = spec.network
    if asked.mode == "allowlist" and not asked.hosts:  # an empty list is no network
        return Network("none", where=asked.where)
    if asked.mode == "open" and not asked.required:  # the policy's own hosts are better than none
        asked = asked._replace(mode="allowlist", hosts=(*POLICY_HOSTS, *asked.hosts))
    raised = bool(host_network_by) and rule.environment_may_raise
    ceiling: NetworkMode = "host" if raised else rule.ceiling
    if not policy.admits_network(asked.mode) and not raised:
        ignored = f", and does not let {host_network_by} raise that" if host_network_by else ""
        denials.append(
            Denial(
                "network_ceiling",
                f"network {asked.mode}",
                f"policy {policy.name} allows network {ceiling} at most{ignored}",
                f'the operator can set ceiling = "{asked.mode}" under [network] in the policy'
                + (", and list the hosts there" if asked.mode == "allowlist" else ""),
                asked.required,
                where=asked.where,
            )
        )
        return Network("none", where=asked.where)
    if asked.mode not in ("allowlist", "open"):
        return asked
    granted = []
    for host in (host for host in asked.hosts if host not in POLICY_HOSTS):
        denial = _host_denial(host, policy, ceiling)
        if denial is not None:
            denials.append(denial._replace(required=asked.required, where=asked.where))
        else:
            granted.append(host)
    if names_policy_hosts(asked):
        return _policy_hosts(asked, policy, ceiling, tuple(filter(is_loopback, granted)), denials)
    if asked.mode == "open":
        return asked._replace(hosts=tuple(granted))
    return asked._replace(hosts=tuple(granted)) if granted else Network("none", where=asked.where)


def _host_denial(host: str, policy: Policy, ceiling: NetworkMode) -> Denial | None:
    """Why the plugin does not get this entry of its list; None: it does.

    The gate takes every address of the list as allowed by the operator, private ones too, and every port of
    this machine. So even under a ceiling that lets a manifest name any host, only the policy can list these.
    """
    rule = policy.network
    own = is_loopback(host)
    if own and (remedy := loopback_remedy(host, rule.loopback, policy.file)):
        reason = f"it is this machine (loopback), and policy {policy.name} does not open this port of it"
        return Denial("network_loopback", host, reason, remedy)
    if any(host_matches(pattern, host) for pattern in rule.hosts):
        return None
    hint = f'the operator can add "{host}" to hosts under [network] in the policy'
    if own or ceiling == "allowlist":
        return Denial("network_hosts", host, f"policy {policy.name} does not list this host", hint)
    fault = "" if rule.private else private_fault(host)
    if not fault:
        return None
    reason = f"it {fault}, and policy {policy.name} does not list it"
    return Denial("network_hosts", host, reason, f'{hint}, or set private = "allow" there')


def _policy_hosts(
    asked: Network, policy: Policy, ceiling: NetworkMode, own: tuple[str, ...], denials: list[Denial]
) -> Network:
    """The network with the policy's own hosts. These cover the hosts that the plugin names in addition: all
    others have been refused before. `own`: granted ports of this machine, which it gets only if it names
    them."""
    if ceiling != "allowlist":
        return asked._replace(mode="open", hosts=own)
    listed = tuple(host for host in policy.network.hosts if not is_loopback(host))
    if not listed and not own:
        denials.append(
            Denial(
                "network_hosts",
                "network egress",
                f"policy {policy.name} lists no host",
                'the operator can list them under [network] in the policy, as in hosts = ["example.com:443"]',
                asked.required,
                where=asked.where,
            )
        )
        return Network("none", where=asked.where)
    return asked._replace(hosts=(*listed, *own))


def _image_denial(image: ImageRoot, policy: Policy) -> Denial:
    return Denial(
        "image_ceiling",
        image.reference,
        f"policy {policy.name} does not allow this image in place of the system's files",
        f'the operator can add "{image.reference}" to allow under [images] in the policy',
        where=image.where,
    )


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
            f'the operator can set ceiling = "{asked}" under [seccomp] in the policy',
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
    bare: bool,
    hidden: tuple[str, ...],
) -> tuple[tuple[str, str], ...]:
    """`hidden`: variables that get a placeholder at the launch, however they are asked for."""
    rule = policy.env
    fixed = dict(rule.set)
    env = dict(fixed)
    if not bare:
        env.update((name, environ[name]) for name in rule.passed if name in environ)
    for request in spec.env:
        if request.fills:
            given = request.name in dict(overrides.env) or request.name in overrides.pass_env
            if not given and not (request.name in rule.passed or matches(rule.ceiling, request.name)):
                denials.append(_ceiling_denial(request, policy.name))
            continue
        if request.name in hidden:
            continue
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
    own = {request.name for request in spec.env if request.fixed}
    for name in sorted(own.intersection((*overrides.pass_env, *dict(overrides.env)))):
        reason = "the plugin's contract sets this variable itself"
        denials.append(Denial("env_contract", name, reason, f"leave --env {name} out"))
    env.update((name, environ[name]) for name in overrides.pass_env if name in environ)
    env.update(overrides.env)
    env.update(dict.fromkeys(hidden, ""))
    return tuple(env.items())


def _ceiling_denial(request: EnvRequest, policy: str) -> Denial:
    name = request.name
    return Denial(
        "env_ceiling",
        name,
        f"policy {policy} does not pass this variable on from the host",
        f'the operator can use --env {name}=VALUE, or add "{name}" to ceiling under [env] in the policy',
        required=request.required,
        where=request.where,
    )


def _env_denial(request: EnvRequest, rule: EnvRule, policy: str, environ: Mapping[str, str]) -> Denial | None:
    name, at = request.name, request.where
    if not is_variable_name(name) or "\0" in (request.value or ""):
        return Denial(
            "env_name", quoted(name), "this cannot be the name or value of an environment variable", where=at
        )
    passed = request.value is None and name in rule.passed  # the operator gives it to every plugin anyway
    if steers(name) and not passed and not matches(rule.steering, name):
        return Denial(
            "env_steering",
            name,
            "it decides which code the loader or interpreter runs, so a manifest may not set it",
            f'the operator can use --env {name}=VALUE, or add "{name}" to steering under [env] in the policy',
            where=at,
        )
    if request.value is not None:
        return None
    if not passed and not matches(rule.ceiling, name):
        return _ceiling_denial(request, policy)
    if name not in environ:
        return Denial(
            "env_missing",
            name,
            "this variable is not set in the host's environment",
            f"set it, or use --env {name}=VALUE",
            required=request.required,
            where=at,
        )
    return None


def _limits(
    spec: SandboxSpec, policy: Policy, overrides: Overrides, denials: list[Denial]
) -> tuple[Limits, tuple[tuple[str, str], ...]]:
    """The lowest of manifest, command line and ceiling for each limit. The policy's default applies only if
    manifest and command line name no value, so the command line can raise it, up to the ceiling."""
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
            from sandbox.units import format_limit  # here: only messages need it

            denials.append(
                Denial(
                    "limit_ceiling",
                    f"{name} = {format_limit(name, asked)}",
                    f"policy {policy.name} allows {format_limit(name, rule.ceiling)} at most",
                    f"the operator can raise ceiling under [limits.{name}] in the policy",
                    required=False,
                    where=where.get(name, ()),
                )
            )
    return _as_limits(values), tuple(decided)


def _as_limits(values: Mapping[str, float]) -> Limits:
    whole = {name: value if name in FRACTIONAL_LIMITS else int(value) for name, value in values.items()}
    return Limits(**whole)  # type: ignore[arg-type]  # names and kinds are those of LIMIT_NAMES


# --- networks that the ceilings allow and that cannot work --------------------------------------------------


def network_denial(
    network: Network, seccomp: SeccompProfile, spec: SandboxSpec, policy: Policy
) -> Denial | None:
    """The denial of a network that the ceilings allow and that cannot work: under a seccomp profile without
    internet sockets, or with too many ports. `network` and `seccomp`: what was granted so far."""
    required = spec.network is not None and spec.network.required
    if seccomp in SECCOMP_WITHOUT_INTERNET:
        return Denial(
            "network_seccomp",
            f"network {network.mode}",
            f"the seccomp profile {seccomp} lets no program make a socket of the internet",
            _another_profile(seccomp, spec, policy),
            required,
            where=network.where,
            origin="" if spec.network is not None else "policy",
        )
    if network.mode != "allowlist":
        return None
    from sandbox.network.rules import parse_rules  # here: most plugins have no list of hosts

    try:
        parse_rules(network.hosts, ranges=True)
    except ValueError as error:
        asked = spec.network
        named = asked is not None and asked.mode == "allowlist" and not names_policy_hosts(asked)
        place = "the plugin's own list" if named else "hosts under [network] in the policy"
        hint = f"name fewer ports in {place}, or * for every port of a host"
        return Denial("network_ports", "network allowlist", str(error), hint, required, where=network.where)
    return None


def _another_profile(seccomp: SeccompProfile, spec: SandboxSpec, policy: Policy) -> str:
    if spec.seccomp == seccomp:
        return 'let the manifest ask for seccomp = "default", or for no network'
    ceiling = " and ceiling" if policy.seccomp.ceiling in SECCOMP_WITHOUT_INTERNET else ""
    return f'the operator can set default{ceiling} = "default" under [seccomp] in the policy'
