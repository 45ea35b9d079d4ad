"""From a manifest's path to a cage that is ready to start.

Everything that can go wrong on the way raises `Failure` with its outcome; nothing prints, nothing exits.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

from runner.launch.placeholders import Placeholders
from runner.manifest.load import ManifestRead, contract, load
from runner.outcome import EXEC_NO_CAGE, EXEC_NOT_FOUND, EXEC_REFUSED, Failure, Outcome, Phase
from runner.plugin import Plugin
from sandbox import CODE_ROOT, cache
from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.fingerprint import fingerprint
from sandbox.identity.state import Owner, StateRefused, Writing, owned_state, real_state_dir, state_root
from sandbox.identity.uids import RESERVATIONS, UidsUnavailable
from sandbox.limits.assign import AssignedLimits, assign
from sandbox.limits.block_devices import whole_disks
from sandbox.limits.cgroup import Cgroup, CgroupFault, OomAround, made, sweep
from sandbox.limits.cgroup_survey import Lack, Survey, survey
from sandbox.paths.access import unreachable
from sandbox.paths.denylist import Denylist, homes
from sandbox.paths.mounts import contains, read_mounts
from sandbox.paths.program import ProgramFault, follow
from sandbox.plan.find_bwrap import BwrapUnusable, find_bwrap
from sandbox.plan.layers import Layer, Layers, LayerUnavailable, available_layers, listed
from sandbox.plan.plan import (
    OWN_PLACES,
    Bind,
    LaunchPlan,
    OpenPlan,
    PlanRefused,
    Request,
    Unreadable,
    open_plan,
    require_enforceable,
)
from sandbox.policy.grant import Overrides, grant
from sandbox.policy.load import load_policy
from sandbox.policy.policy import Policy
from sandbox.spawn.spawner import can_join_keyring
from sandbox.spec import STATE_DIR_TOKEN, Denial, Grant, Project
from sandbox.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.plan.owners import Decision


class Invocation(NamedTuple):
    """What the operator asked for."""

    manifest: str
    contract: str | None = None
    server: str | None = None
    policy: str | None = None
    state_dir: str | None = None
    args: tuple[str, ...] = ()
    overrides: Overrides = Overrides()


class Timings:
    """Seconds by phase, in order."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = now - self._last
        self._last = now


class Prepared:
    """How far an invocation has come; a failed one is reported with what was known by then."""

    def __init__(self, invocation: Invocation) -> None:
        self.invocation = invocation
        self.timings = Timings()
        self.loaded: ManifestRead | None = None
        self.policy: Policy | None = None
        self.grant: Grant | None = None
        self.open_plan: OpenPlan | None = None
        self.owner: Owner | None = None
        self.limits = AssignedLimits()
        self.cgroup: Cgroup | None = None
        self.oom_around: OomAround | None = None
        self.layers: tuple[Layer, ...] = ()
        self.bwrap = ""
        self.state_dir: str | None = None
        self.homes: tuple[str, ...] = ()

    @property
    def plugin(self) -> Plugin | None:
        return self.loaded.plugin if self.loaded is not None else None


@contextmanager
def ready(prepared: Prepared, environ: Mapping[str, str], *, rehearse: bool = False) -> Iterator[OpenPlan]:
    """Everything up to the launch, filled into `prepared` step by step. Raises Failure.

    `rehearse` changes nothing on the machine: no state directory is made and no uid leased.
    """
    with ExitStack() as stack:
        try:
            _read(prepared)
            _decide(prepared, environ)
            opened = _plan(prepared, environ, stack, rehearse)
        except DocumentError as error:
            raise Failure(_invalid(error.diagnostics, "policy"), EXEC_REFUSED) from None
        except PlanRefused as refused:
            raise Failure(_denied(refused.denials, "plan"), EXEC_REFUSED) from None
        except StateRefused as refused:
            outcome = Outcome("policy_denied", "plan", str(refused), "state_dir", refused.hint)
            raise Failure(outcome, EXEC_REFUSED) from None
        except Unreadable as unreadable:
            outcome = Outcome("policy_denied", "plan", str(unreadable), "unreadable", unreadable.hint)
            raise Failure(outcome, EXEC_REFUSED) from None
        except ProgramFault as fault:
            raise Failure(*_program_outcome(fault)) from None
        except LayerUnavailable as missing:
            raise _unavailable(missing.layer, str(missing), missing.hint) from None
        except UidsUnavailable as missing:
            hint = "runner doctor shows how full the range is, runner state list whose uids are reserved"
            raise _unavailable("uid", str(missing), hint) from None
        except BwrapUnusable as missing:
            raise _unavailable("bubblewrap", missing.reason, missing.hint) from None
        yield opened


def _read(prepared: Prepared) -> None:
    invocation = prepared.invocation
    prepared.loaded = load(invocation.manifest, contract=invocation.contract, server=invocation.server)
    if prepared.loaded.plugin is None:
        raise Failure(_invalid(prepared.loaded.diagnostics, "manifest"), EXEC_REFUSED)
    if prepared.loaded.plugin.entrypoint is None:
        outcome = Outcome(
            "launch_failed",
            "manifest",
            f"{prepared.loaded.plugin.id} names no command to run",
            "no_entrypoint",
            'give the manifest a command, e.g. [plugin.entrypoint] command = "./plugin.py"',
        )
        raise Failure(outcome, EXEC_NOT_FOUND)
    prepared.timings.mark("manifest")


def _decide(prepared: Prepared, environ: Mapping[str, str]) -> None:
    plugin, invocation = prepared.plugin, prepared.invocation
    assert plugin is not None
    prepared.policy = load_policy(invocation.policy, environ)
    prepared.state_dir = _state_dir(plugin, prepared.policy, invocation, environ)
    prepared.homes = homes(environ)
    switches = contract(plugin.contract).switches(environ)
    filled = Placeholders(plugin, prepared.state_dir)
    spec = plugin.spec._replace(env=tuple(map(filled.request, plugin.spec.env)))
    prepared.grant = grant(
        spec,
        prepared.policy,
        state_dir=prepared.state_dir,
        environ=environ,
        overrides=invocation.overrides,
        homes=prepared.homes,
        require_enabled=switches.require_enabled,
        host_network_by=switches.host_network_by,
        bare_environment=plugin.entrypoint is not None and plugin.entrypoint.bare_environment,
    )
    # First: who is told to raise a ceiling should not find out then that it is of no use.
    asked = plugin.spec
    require_enforceable(asked.network if asked.enabled else None)
    prepared.grant = prepared.grant._replace(
        denials=tuple(
            denial._replace(required=False) if _is_missing(denial, plugin) else denial
            for denial in prepared.grant.denials
        )
    )
    if prepared.grant.refused:
        raise Failure(_denied(prepared.grant.refused, "policy"), EXEC_REFUSED)
    prepared.timings.mark("policy")


def _plan(prepared: Prepared, environ: Mapping[str, str], stack: ExitStack, rehearse: bool) -> OpenPlan:
    plugin, policy, granted = prepared.plugin, prepared.policy, prepared.grant
    assert plugin is not None and plugin.entrypoint is not None and policy is not None and granted is not None
    if not granted.unsandboxed:
        prepared.bwrap = find_bwrap(environ).path
    layers = available_layers(granted, policy, prepared.bwrap, can_join_keyring=can_join_keyring())
    mounts = read_mounts()
    found = survey(mounts)
    prepared.limits = assign(granted, policy, found)
    denylist = Denylist(
        mounts,
        homes=prepared.homes,
        policy=policy.deny,
        runner=_own_places(environ),
        protected=_own_code(prepared.bwrap),
        deciding=_deciding_files(plugin, policy),
        runtime_dir=environ.get("XDG_RUNTIME_DIR"),
    )
    if not os.path.isdir(plugin.entrypoint.directory):
        outcome = Outcome(
            "launch_failed",
            "plan",
            f"the working directory {plugin.entrypoint.directory} does not exist",
            "not_found",
            "create it, or change it in the manifest",
        )
        raise Failure(outcome, EXEC_NOT_FOUND)
    writes = any(path.access == "write" and path.origin != "state" for path in granted.paths)
    operators_own = contract(plugin.contract).OPERATORS_OWN_COMMAND
    filled = Placeholders(plugin, prepared.state_dir)
    request = Request(
        command=plugin.entrypoint.command,
        args=(*map(filled.text, plugin.entrypoint.args), *prepared.invocation.args),
        directory=plugin.entrypoint.directory,
        root=plugin.root,
        bare_environment=plugin.entrypoint.bare_environment,
        trusted_command=operators_own,
        conceal=(os.path.realpath(plugin.manifest),) if operators_own else (),
        state_dir=prepared.state_dir,
        rehearse=rehearse,
        project=_project(plugin, policy, prepared.homes),
        reserved_for=_managed_state_dir(plugin, environ) if writes and layers.uid_range is not None else "",
    )

    def claim(owners: Decision | None) -> int | None:
        if rehearse:
            return None
        prepared.owner = _claim(prepared, granted, layers, owners, environ, stack)
        return prepared.owner.uid

    opened = stack.enter_context(open_plan(request, granted, policy, layers, denylist, environ, claim))
    prepared.open_plan = opened
    owner = prepared.owner
    owners = opened.plan.owners
    identity = owners.identity() if owners is not None else ""
    prepared.layers = listed(layers, granted, policy, owner.uid if owner is not None else None, identity)
    _require_same(owner, opened.plan)
    if owners is None or not owners.maps_state:
        _require_reachable(prepared.state_dir, owner)
    if granted.limits.disk is not None and not granted.unsandboxed:
        _require_room(opened, granted.limits.disk)
    if not rehearse and prepared.limits.sites:
        _group(prepared, found, opened.plan, stack)
    if not rehearse and (prepared.cgroup is None or not prepared.cgroup.counts_memory):
        prepared.oom_around = OomAround(found.own)
    prepared.timings.mark("plan")
    return opened


def _project(plugin: Plugin, policy: Policy, homes: Sequence[str]) -> Project | None:
    """The folder it is at work on, with the reason why it is not offered, if there is one."""
    project = plugin.project
    if project is None:
        return None
    real, within = os.path.realpath(project.path), os.path.realpath(project.within or "/")
    asking = "let the manifest ask to read it under a policy that allows it, or take it out"
    refusal, hint = "", asking
    if project.path in OWN_PLACES:
        refusal = "every cage has one of its own"
    elif project.path in homes or real in homes:
        refusal = "it is a home directory"
    elif not contains(within, real):
        refusal = f"it leads out of {project.within}, the folder of the manifest"
    elif policy.project != "read":
        refusal = f'policy {policy.name} says access = "none" under [project]'
        hint = 'set access = "read" under [project] in a policy of your own; or ' + asking
    return project._replace(refusal=refusal, hint=hint)


def _claim(
    prepared: Prepared,
    granted: Grant,
    layers: Layers,
    owners: Decision | None,
    environ: Mapping[str, str],
    stack: ExitStack,
) -> Owner:
    """Who the plugin is, with its state directory made ready. Also where nothing asks for one: the uid."""
    state_dir, plugin = prepared.state_dir, prepared.plugin
    # An ordinary user's own directories are not managed here: who chose them knows where they are.
    managed = layers.uid_range is not None or prepared.invocation.state_dir is None
    manifest = os.path.realpath(plugin.manifest) if plugin is not None and managed else ""
    parts = [
        path.path[len(state_dir) + 1 :]
        for path in granted.paths
        if state_dir is not None and path.origin == "state" and path.path != state_dir
    ]
    account, writing = owners.account if owners is not None else None, None
    if account is not None and state_dir is None:
        return Owner(account.uid, account.gid, None)
    if owners is not None and owners.left and plugin is not None:
        writing = Writing(owners.left, _managed_state_dir(plugin, environ))
    try:
        own = account if owners is not None and not owners.maps_state else None
        claimed = owned_state(
            state_dir, layers.uid_range, parts, manifest=manifest, writing=writing, account=own
        )
        owner = stack.enter_context(claimed)
        return owner if account is None else owner._replace(uid=account.uid, gid=account.gid)
    except OSError as error:
        if isinstance(error, PermissionError) and layers.uid_range is not None:
            _require_capabilities(layers.uid_range)
        place, hint = error.filename or state_dir, "choose a writable place with --state-dir"
        if layers.uid_range is not None and str(place).startswith("/run/"):
            hint = "uids of plugins are leased there: make it writable (in a container: --tmpfs /run)"
        raise StateRefused(f"{place}: {error.strerror}", hint) from None


def _require_capabilities(uid_range: tuple[int, int]) -> None:
    """Of a root that may not write everywhere. Raises LayerUnavailable if it may not drop its uid either."""
    from sandbox.doctor.probes import first_obstacle

    found = first_obstacle(os.environ, uid_range=uid_range)
    if found is not None and found.layer == "uid_drop":
        raise LayerUnavailable(found.layer, found.summary, " ".join(found.remedy.split())) from None


def _group(prepared: Prepared, found: Survey, plan: LaunchPlan, stack: ExitStack) -> None:
    """The plugin's cgroups. Where one turns out not to work, the next best means is taken, or the launch is
    over: as the policy says."""
    assert prepared.grant is not None and prepared.policy is not None
    limits = prepared.grant.limits
    disks = () if limits.io is None else whole_disks(_devices(plan))
    for site in found.sites:
        sweep(site.directory)  # also where this one makes none: the next who does may be long in coming
    while True:
        prepared.limits = assign(prepared.grant, prepared.policy, found, disks)
        try:
            cgroup = stack.enter_context(made(prepared.limits.sites, limits, disks))
        except CgroupFault as fault:
            lack = Lack(f"cgroup {fault}", "runner doctor tells more")
            found = found.without(fault.site.directory, fault.controllers, lack)
            continue
        prepared.cgroup = cgroup
        prepared.limits = prepared.limits.confirmed(cgroup.effective)
        return


def _require_room(opened: OpenPlan, limit: int) -> None:
    from sandbox.limits.disk import DiskMeter
    from sandbox.units import format_limit

    meter = DiskMeter(opened.writable, limit, lambda: ())
    try:
        if meter.measure():
            message = f"{meter.where} holds more already than the disk limit of {format_limit('disk', limit)}"
            outcome = Outcome("policy_denied", "plan", message, "disk", "make room there, or give it more")
            raise Failure(outcome, EXEC_REFUSED)
    finally:
        meter.close()


def _devices(plan: LaunchPlan) -> Iterator[int]:
    for operation in plan.operations:
        if isinstance(operation, Bind):
            yield operation.identity.dev


def _require_same(owner: Owner | None, plan: LaunchPlan) -> None:
    """What was made ready is what will be mounted, and not another directory put in its place meanwhile."""
    for operation in plan.operations:
        if isinstance(operation, Bind) and owner is not None and operation.dest in owner.state:
            opened = (operation.identity.dev, operation.identity.ino)
            if opened != owner.state[operation.dest]:
                raise StateRefused(
                    f"state directory {operation.dest} was replaced while it was being opened",
                    "choose a place with --state-dir that nobody else can write",
                )


def _require_reachable(state_dir: str | None, owner: Owner | None) -> None:
    if state_dir is None or owner is None:
        return
    blocked = unreachable(state_dir, owner.uid, owner.gid, 0o7)
    if blocked is not None:
        raise Unreadable(blocked, owner.uid, f"chmod o+x {blocked}, or choose another place with --state-dir")


def _is_missing(denial: Denial, plugin: Plugin) -> bool:
    """An optional path that policy would refuse and that is not there anyway: nothing is lost."""
    return denial.rule in ("read_ceiling", "write_ceiling") and any(
        request.where == denial.where and not request.required and not os.path.lexists(request.path)
        for request in plugin.spec.paths
    )


def _state_dir(
    plugin: Plugin, policy: Policy, invocation: Invocation, environ: Mapping[str, str]
) -> str | None:
    """Where this plugin's state lives, if it or the policy asks for any.

    Named by id and by where the plugin is: an id is only what a manifest claims, and a stranger who claims
    another plugin's id must not be handed that plugin's state.
    """
    asked = [request.path for request in plugin.spec.paths]
    if not any(
        path.startswith(STATE_DIR_TOKEN) for path in (*asked, *policy.read.default, *policy.write.default)
    ):
        return None
    if invocation.state_dir is not None:
        return real_state_dir(invocation.state_dir)
    return _managed_state_dir(plugin, environ)


def _managed_state_dir(plugin: Plugin, environ: Mapping[str, str]) -> str:
    """In the runner's own place."""
    return os.path.join(real_state_dir(state_root(environ), follow="own"), state_name(plugin))


def state_name(plugin: Plugin) -> str:
    """What the plugin's directory is called in the place of all states."""
    label = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in plugin.id)[:64]
    place = (plugin.contract, plugin.id, os.path.realpath(plugin.manifest))
    return f"{label}.{fingerprint(*(os.fsencode(part) for part in place))[:12]}"


def _own_places(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What is the runner's own and nobody's to ask for."""
    places = [state_root(environ), cache.directory()]
    if os.geteuid() == 0:
        places.append(os.path.dirname(RESERVATIONS))
    return tuple(os.path.realpath(place) for place in places if place is not None)


def _own_code(bwrap: str) -> tuple[str, ...]:
    """What we run, and from where we import: a plugin that could write there would be outside before long."""
    imported = [
        place for place in sys.path if place.startswith("/") and place != "/" and os.path.exists(place)
    ]
    places = [CODE_ROOT, bwrap, sys.prefix, sys.base_prefix, os.path.realpath(sys.executable), *imported]
    return tuple(dict.fromkeys(place for place in places if place))


def _deciding_files(plugin: Plugin, policy: Policy) -> tuple[str, ...]:
    """Files that say what a plugin may do, under every name: writing one is writing the next grant."""
    found: list[str] = []
    for path in (plugin.manifest, policy.file):
        real, links = follow(path)
        found += [path, real, *(link.path for link in links)]
    return tuple(dict.fromkeys(found))


# --- what went wrong ------------------------------------------------------------------------------


def _invalid(diagnostics: tuple[Diagnostic, ...], phase: Literal["manifest", "policy"]) -> Outcome:
    """Of a manifest, or of a policy: both are documents, with the same kind of faults."""
    errors = [d for d in diagnostics if d.severity == "error"]
    faults = "one fault" if len(errors) == 1 else f"{len(errors)} faults"
    return Outcome(
        "manifest_invalid" if phase == "manifest" else "policy_invalid",
        phase,
        f"{errors[0].file if errors else f'the {phase}'} has {faults}",
        errors[0].rule if errors else "",
        "mend what is listed" + ("; runner check shows the same" if phase == "manifest" else ""),
        diagnostics=diagnostics,
    )


def _denied(denials: tuple[Denial, ...], phase: Phase) -> Outcome:
    asked = [denial for denial in denials if not denial.origin]
    things = "one thing" if len(asked) == 1 else f"{len(asked)} things"
    message = f"the manifest asks for {things} it may not have"
    if not asked:
        message = f"{denials[0].origin} cannot be shown to the plugin"
    return Outcome(
        "policy_denied",
        phase,
        message,
        denials[0].rule,
        denials[0].hint,
        denials=denials,
    )


def _unavailable(layer: str, message: str, hint: str) -> Failure:
    return Failure(Outcome("sandbox_unavailable", "plan", message, layer, hint), EXEC_NO_CAGE)


def _program_outcome(fault: ProgramFault) -> tuple[Outcome, int]:
    if fault.denied:
        return Outcome("policy_denied", "plan", str(fault), "program", fault.hint), EXEC_REFUSED
    cause = "not_executable" if fault.found else "not_found"
    status = EXEC_REFUSED if fault.found else EXEC_NOT_FOUND
    return Outcome("launch_failed", "plan", str(fault), cause, fault.hint), status
