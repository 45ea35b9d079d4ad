"""Loaded -> Decided: apply the policy to the manifest. The result is the grant.

Nothing on the machine is changed. All errors raise `Failure`, with the outcome and the last stage that was
reached.
"""

from __future__ import annotations

from runner.approvals.marks import mark_entry
from runner.contracts.registry import find_contract
from runner.launch.approve import approval_of
from runner.launch.command import environ_of_host
from runner.launch.failures import as_failure, judge_denials
from runner.launch.own_folders import Placeholders, state_dir
from runner.launch.stages import Decided, Loaded, Stopwatch
from runner.outcome import EXEC_REFUSED, Failure, Outcome
from runner.plugin import Plugin
from sandbox import look
from sandbox.paths.homes import homes
from sandbox.policy.approval import raise_ceilings
from sandbox.policy.grant import grant
from sandbox.policy.load import load_policy
from sandbox.policy.policy import Policy
from sandbox.spec import Denial, Note
from sandbox.speed.typed import TYPE_CHECKING, Mapping, Sequence

if TYPE_CHECKING:
    from runner.approvals.record import ApprovalRecord


def decide(loaded: Loaded, environ: Mapping[str, str], watch: Stopwatch) -> Decided:
    """Apply the policy to the manifest. Raises Failure, also if the grant is refused."""
    decided = hold_against_policy(loaded, environ)
    with as_failure(decided):
        if decided.grant.refused:
            raise Failure(judge_denials(decided.grant.refused, "policy", decided), EXEC_REFUSED)
    return decided._replace(timings=watch.lap("policy"))


def hold_against_policy(
    loaded: Loaded, environ: Mapping[str, str], record: ApprovalRecord | None = None
) -> Decided:
    """What the plugin would get, even if the grant is refused. `record`: what a person is about to approve,
    instead of the stored approval. Raises Failure."""
    with as_failure(loaded):
        return _decide(loaded, environ, record)


def _decide(loaded: Loaded, environ: Mapping[str, str], record: ApprovalRecord | None) -> Decided:
    plugin, invocation = loaded.plugin, loaded.invocation
    chosen = load_policy(invocation.policy, environ)
    found = approval_of(loaded, chosen, environ, record)
    policy = raise_ceilings(chosen, found.counted)
    own_homes = homes(environ)
    told: tuple[Note, ...] = ()
    strays: tuple[Denial, ...] = ()
    if plugin.template is not None:
        from runner.manifest.fill import file_variable_denials

        plugin, told = _fill_plugin(loaded, policy, environ, own_homes)
        strays = file_variable_denials(loaded.plugin, plugin, chosen, approved=found.record is not None)
    contract = find_contract(plugin.contract)
    if invocation.command is None and contract.configurations is not None:
        plugin = mark_entry(plugin)
    state, state_notes = state_dir(plugin, policy, invocation, environ)
    filled = Placeholders(plugin, state, caged=plugin.spec.enabled or not policy.unsandboxed)
    asked = found.with_added(plugin.spec)
    switches = contract.switches(environ)
    staged = asked.staged or found.said.staged
    spec = asked._replace(env=tuple(map(filled.request, asked.env)), staged=staged)
    granted = grant(
        spec,
        policy,
        state_dir=state,
        environ=environ_of_host(invocation.command, environ),
        overrides=invocation.overrides,
        homes=own_homes,
        sandbox_required_by=switches.get("require_sandbox", ""),
        host_network_by=switches.get("host_network", ""),
        bare_environment=plugin.entrypoint is not None and plugin.entrypoint.bare_environment,
    )
    denials = tuple(
        denial._replace(required=False) if _is_missing(denial, plugin) else denial
        for denial in granted.denials
    )
    if strays:
        denials = tuple(each for each in denials if each.asked not in {stray.asked for stray in strays})
    return Decided(
        loaded._replace(plugin=plugin),
        policy,
        granted._replace(denials=(*found.with_remedies(denials, loaded, chosen), *strays)),
        state,
        own_homes,
        timings=loaded.timings,
        approval=found.counted,
        notes=(*told, *state_notes, *found.notes(loaded, environ, denials)),
        approval_said=found.said,
        approved_at=0.0 if found.record is None else found.record.when,
        approved_program=() if found.record is None else found.record.key.programs,
    )


def _fill_plugin(
    loaded: Loaded, policy: Policy, environ: Mapping[str, str], own_homes: Sequence[str]
) -> tuple[Plugin, tuple[Note, ...]]:
    """The plugin with its placeholders filled in, and a note about what was withheld. Raises Failure."""
    from runner.launch.approve import allow_command
    from runner.manifest.fill import FillRefused, fill, notes

    try:
        filled = fill(loaded.plugin, policy, loaded.invocation.overrides, environ, own_homes)
    except FillRefused as refused:
        found = refused.diagnostic
        outcome = Outcome("launch_failed", "policy", found.message, found.rule, found.hint)
        raise Failure(outcome._replace(diagnostics=(found,)), EXEC_REFUSED) from None
    return filled.plugin, notes(filled, policy.name, allow_command(loaded))


def _is_missing(denial: Denial, plugin: Plugin) -> bool:
    """Whether the policy refuses an optional path that does not exist: the plugin then loses nothing."""
    return denial.rule in ("read_ceiling", "write_ceiling") and any(
        request.where == denial.where and not request.required and not look.lexists(request.path)
        for request in plugin.spec.paths
    )
