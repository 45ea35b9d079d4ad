"""A launch from a stored plan. Carried out as any other: only the sources are opened by what they were."""

from __future__ import annotations

from runner.launch.carry_out import LaunchHost, plan_steps
from runner.launch.sources import Sources
from runner.launch.stages import JudgedWrites, Planned, Provision, Stopwatch, started_of, with_host
from runner.launch.stored.entry import UNIT, LaunchRequest, LazyValue, PlanEntry, fillings, forget, read, say
from runner.launch.wait import drive
from runner.outcome import Failure
from sandbox import cache
from sandbox.facts import Facts
from sandbox.speed import codec
from sandbox.speed.bundle import load
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.launch.stages import Decided, Ended
    from sandbox.speed.typed import Sequence


def find(request: LaunchRequest) -> PlanEntry | None:
    """Returns the plan that was stored for this launch, if its facts still hold."""
    raw = None if request.name is None else cache.load(request.name)
    if raw is None:
        return None
    try:
        entry = read(raw)
        if entry is not None and any(kind == UNIT for kind, _ in entry.blanks):
            from runner.launch.stored.unit import in_own_unit

            entry = in_own_unit(entry)
            if entry is None:
                say("the stored plan does not hold: it is for another kind of systemd unit")
        if entry is None:
            return None
        changed = Facts(*entry.facts).changed(request.variables)
    except Exception as error:  # noqa: BLE001 -- whatever is wrong with it, the launch can be decided anew
        say(f"the stored plan cannot be read: {error!r}")
        forget(request)
        return None
    if changed:
        say(f"the stored plan does not hold: {changed} is not as it was")
        return None
    return entry


def planned_of(entry: PlanEntry, request: LaunchRequest) -> Planned:
    """Returns the plan, with its blanks filled in for this launch. Raises ValueError."""
    filled = fillings(entry.blanks, request)
    try:
        fields = codec.from_plain(entry.plan, _plan_classes(entry.plan), filled)
    except ValueError:  # it has what few plans have
        from runner.launch.stages import planned_classes

        fields = codec.from_plain(entry.plan, planned_classes(), filled)
    decided: Any = LazyValue(lambda: _decided(entry.rest, filled, request))
    return Planned(decided, *fields)


def _decided(rest: bytes, filled: Sequence[str], request: LaunchRequest) -> Decided:
    import marshal

    from runner.launch.stages import planned_classes

    decided: Decided = codec.from_plain(marshal.loads(rest), planned_classes(), filled)
    return decided if request.host is None else with_host(decided, request.host)


def _plan_classes(plain: Any) -> tuple[type[tuple[Any, ...]], ...]:
    """The classes of most stored plans, outside of `rest`. `plain`: the plan as it was stored."""
    from sandbox.limits.assigned import AssignedLimit, AssignedLimits, Shares
    from sandbox.limits.site import Hierarchy, Site
    from sandbox.paths.file_identity import FileIdentity
    from sandbox.plan import plan
    from sandbox.plan.layers import Layer, Layers
    from sandbox.spec import Limits, Note

    fields = plan.LaunchPlan._fields
    written: tuple[type[tuple[Any, ...]], ...] = ()
    if plain[1 + Planned._fields[1:].index("provision")][1 + Provision._fields.index("judged")] is not None:
        load("write")
        from sandbox.paths.denied_places import DeniedPlaces
        from sandbox.paths.guarded import GuardedName

        written = JudgedWrites, DeniedPlaces, GuardedName, plan.Guard
    owned: tuple[type[tuple[Any, ...]], ...] = ()
    if plain[1][1 + fields.index("owners")] is not None:
        load("owners")
        from sandbox.plan.owners import Decision, Ownership

        owned = Decision, Ownership, plan.Idmapped
    egress: tuple[type[tuple[Any, ...]], ...] = ()
    if plain[1][1 + fields.index("egress")] is not None:
        load("hosts")
        from sandbox.network.credentials import BrokerPlan, CertifiedHosts, Credential, HostAuthorities
        from sandbox.network.egress import EgressLimits, EgressPlan

        egress = EgressLimits, EgressPlan, BrokerPlan, Credential, CertifiedHosts, HostAuthorities
    ssh: tuple[type[tuple[Any, ...]], ...] = ()
    if plain[1][1 + fields.index("ssh")] is not None:
        from sandbox.network.ssh import SshHost, SshPlan

        ssh = SshHost, SshPlan, plan.AgentFolder
    return (
        *written,
        *owned,
        *egress,
        *ssh,
        *(Provision, AssignedLimits, AssignedLimit, Shares, Site, Hierarchy, Layer, Layers),
        *(plan.LaunchPlan, plan.ShownPath, plan.Overlay, FileIdentity, Limits, Note),
        *(plan.Bind, plan.Tmpfs, plan.Text, plan.Symlink, plan.Mask, plan.Proc, plan.Dev, plan.ReadOnly),
    )


class DecideAnew(BaseException):
    """The stored plan could not be carried out, and nothing was started. A BaseException, so that code which
    turns errors of a launch into outcomes lets it pass."""


def run_stored(entry: PlanEntry, request: LaunchRequest, began: float, host: LaunchHost) -> Ended:
    """Raises Failure, and DecideAnew."""
    try:
        return _carry_out(entry, request, began, host)
    except Exception as error:
        if isinstance(error, Failure) and started_of(error.stage) is not None:
            raise  # it ran: the plan is good
        say(f"the stored plan cannot be carried out: {error!r}")
        forget(request)
        if host.is_ready:
            raise  # a process may have been started, and streams handed over: nothing is done twice
        raise DecideAnew from None


def _carry_out(entry: PlanEntry, request: LaunchRequest, began: float, host: LaunchHost) -> Ended:
    watch = Stopwatch()
    planned = planned_of(entry, request)
    plan = planned.plan
    if planned.provision.unsandboxed or plan.memory_files or plan.staged:
        raise ValueError("such a plan is never stored")
    if not plan.layers.session_keyring:  # whether one can be joined is tried, and is no fact
        from sandbox.spawn.spawner import can_join_keyring

        if can_join_keyring():
            raise ValueError("this machine gives more than the plan has")
    if planned.provision.state_dir is not None:
        load("state")
    contents = None
    if plan.egress is not None and plan.egress.broker is not None:
        from runner.launch.hidden import with_hidden

        # As `plan_steps` does, without reading the decision: no literal value has the name of a credential.
        given = request.environ if request.host is None else request.host
        contents = with_hidden(None, plan.egress.broker, given, {}, request.environ)
    with Sources() as sources:
        sources.hold_known(planned)
        return drive(plan_steps(planned, request.environ, began, host, sources, watch, contents))
