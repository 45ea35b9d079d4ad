"""Decided -> Planned: find, open and check every path of the grant. Nothing on the machine is changed."""

from __future__ import annotations

import os

from runner.contracts.registry import find_contract
from runner.launch.approve import allow_command
from runner.launch.command import Command
from runner.launch.denylist import denied_places, writes_outside
from runner.launch.failures import as_failure
from runner.launch.own_folders import Placeholders, managed_state_dir
from runner.launch.sources import Sources, writes_files
from runner.launch.stages import Decided, JudgedWrites, Planned, Provision, Stopwatch
from runner.outcome import EXEC_NOT_FOUND, EXEC_REFUSED, Failure, Outcome
from sandbox import look
from sandbox.limits.assign import assign
from sandbox.limits.cgroup_survey import Survey, survey
from sandbox.paths.denylist import Denylist
from sandbox.paths.mounts import contains, read_mounts
from sandbox.plan.available_layers import available_layers
from sandbox.plan.compile import open_plan
from sandbox.plan.find_bwrap import find_bwrap
from sandbox.plan.layers import Layers, list_layers
from sandbox.plan.plan import OWN_PLACES, LaunchPlan, PlanRequest
from sandbox.spawn.spawner import can_join_keyring
from sandbox.spec import Project
from sandbox.speed.typed import Mapping


def plan(decided: Decided, environ: Mapping[str, str], watch: Stopwatch, sources: Sources) -> Planned:
    """Make the plan. The sources stay open in `sources`. Raises Failure."""
    policy, granted = decided.policy, decided.grant
    with as_failure(decided):
        needs_cage = granted.scratch or granted.memory_files or decided.loaded.plugin.spec.image
        if granted.unsandboxed and needs_cage:
            raise _no_cage()
        bwrap = "" if granted.unsandboxed else find_bwrap(environ).path
        layers = available_layers(granted, policy, bwrap, can_join_keyring=can_join_keyring())
        mounts = read_mounts()
        found = survey(mounts, move_host=policy.move_host)
        decided = decided._replace(limits=assign(granted, policy, found))
    with as_failure(decided):
        denied = denied_places(decided, bwrap, environ)
        denylist = Denylist(mounts, **denied._asdict())
        request = _request(decided, layers, environ)
        opening = open_plan(request, granted, policy, layers, denylist, environ)
        compiled = sources.hold(opening, decided.limits, found, denylist).opened.plan
        if decided.signed is not None:
            from runner.launch.signed import require_checked

            require_checked(decided, compiled)
        provision = _provision(decided, compiled, found, environ)
        if writes_files(compiled):
            judged = JudgedWrites(denied, policy.scan_limit)
            provision = provision._replace(judged=judged)
    identity = compiled.owners.identity() if compiled.owners is not None else ""
    return Planned(
        decided,
        compiled,
        bwrap,
        list_layers(
            layers,
            granted,
            policy,
            identity,
            compiled.inside[0],
            layered=any(each.memory for each in compiled.overlays),
        ),
        decided.limits,
        os.geteuid(),
        provision,
        watch.lap("plan"),
    )


def _provision(
    decided: Decided, compiled: LaunchPlan, found: Survey, environ: Mapping[str, str]
) -> Provision:
    plugin, state_dir = decided.loaded.plugin, decided.state_dir
    # For a directory that an ordinary user chose with --state-dir there is no record of its owner.
    managed = compiled.layers.uid_range is not None or decided.loaded.invocation.state_dir is None
    leaves = compiled.owners is not None and bool(compiled.owners.left)
    return Provision(
        unsandboxed=decided.grant.unsandboxed,
        state_dir=state_dir,
        state_parts=tuple(
            path.path[len(state_dir) + 1 :]
            for path in decided.grant.paths
            if state_dir is not None and path.origin == "state" and path.path != state_dir
        ),
        manifest=look.realpath(plugin.manifest) if managed else "",
        writing_for=managed_state_dir(plugin, environ) if leaves else "",
        sites=found.sites,
        own_groups=found.own,
        observed=decided.loaded.invocation.observe,
    )


def _no_cage() -> Failure:
    message = "the plugin has files that exist only in a cage, and it would run without one"
    hint = 'take unsandboxed = "allow" out of the policy, or let the manifest ask for a sandbox'
    return Failure(Outcome("policy_denied", "plan", message, "unsandboxed", hint), EXEC_REFUSED)


def _request(decided: Decided, layers: Layers, environ: Mapping[str, str]) -> PlanRequest:
    plugin, entrypoint = decided.loaded.plugin, decided.loaded.plugin.entrypoint
    assert entrypoint is not None  # `load` has refused it
    if not look.isdir(entrypoint.directory):  # also of an image: its working directory is another
        outcome = Outcome(
            "launch_failed",
            "plan",
            f"the working directory {entrypoint.directory} does not exist",
            "not_found",
            "create it, or name another",
        )
        raise Failure(outcome, EXEC_NOT_FOUND)
    writes = writes_outside(decided)
    operators_own = find_contract(plugin.contract).configurations is not None
    command = decided.loaded.invocation.command
    configured = operators_own and (command is None or bool(command.file))
    filled = Placeholders(plugin, decided.state_dir, caged=not decided.grant.unsandboxed)
    return PlanRequest(
        command=entrypoint.command,
        args=(*map(filled.text, entrypoint.args), *decided.loaded.invocation.args),
        directory=entrypoint.directory,
        root=plugin.shown_folder or plugin.root,
        bare_environment=entrypoint.bare_environment,
        trusted_command=operators_own,
        conceal=(look.realpath(plugin.manifest),) if configured else (),
        state_dir=decided.state_dir,
        project=_project(decided) if command is None else _directory(command),
        reserved_for=managed_state_dir(plugin, environ) if writes and layers.uid_range is not None else "",
        # Without a cage every path is that of the host.
        root_inside="" if decided.grant.unsandboxed else plugin.root_inside,
        root_parts=() if decided.grant.unsandboxed else plugin.root_parts,
        by_options=command is not None,
        by_approval=configured,
        root_is_copy=bool(decided.copy) and plugin.root_inside == decided.original,
        search_path=entrypoint.search_path,
        approved_program=decided.approved_program,
        state_link=plugin.spec.state_link,
        overlaid=plugin.spec.overlaid,
        image=plugin.spec.image,
    )


def _directory(command: Command) -> Project | None:
    """The working directory of a command, if an option names it. That option alone does not show it."""
    if not command.named_directory:
        return None
    return Project(
        command.directory, True, refusal="no option shows it", hint="use --project, --read or --write"
    )


def _project(decided: Decided) -> Project | None:
    """The folder that the plugin works on. `refusal`: the reason if it is not shown."""
    project, policy, homes = decided.loaded.plugin.project, decided.policy, decided.homes
    if project is None:
        return None
    real, within = look.realpath(project.path), look.realpath(project.within or "/")
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
        if policy.approvals.project == "read":
            hint = f"to allow it: {allow_command(decided.loaded)}; or {hint}"
    return project._replace(refusal=refusal, hint=hint)
