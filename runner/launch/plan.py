"""Decided -> Planned: every path of the grant is found, opened and judged. Nothing on the machine changes."""

from __future__ import annotations

import os
import sys

from runner.approvals.store import approvals_folder
from runner.contracts.registry import all_host_places, find_contract
from runner.late_site import complete_search_path
from runner.launch.acquire import Held, Sources
from runner.launch.approve import allow_command
from runner.launch.command import Command, environ_of_host
from runner.launch.prepare import Placeholders, managed_state_dir
from runner.launch.stages import Decided, Planned, Provision, Stopwatch, failing
from runner.outcome import EXEC_NOT_FOUND, EXEC_REFUSED, Failure, Outcome
from runner.plugin import Plugin
from sandbox import CODE_ROOT, cache, look
from sandbox.identity.host_side import host_sides
from sandbox.identity.leases import RESERVATIONS
from sandbox.identity.state import PACKAGES, state_root
from sandbox.limits.assign import assign
from sandbox.limits.cgroup_survey import Survey, survey
from sandbox.paths.denied_paths import lexical_fault, normal
from sandbox.paths.denylist import Denylist
from sandbox.paths.executable import follow
from sandbox.paths.mounts import Mounts, contains, read_mounts
from sandbox.plan.available_layers import available_layers, listed
from sandbox.plan.compile import open_plan
from sandbox.plan.find_bwrap import find_bwrap, trusted_program
from sandbox.plan.layers import Layers
from sandbox.plan.plan import OWN_PLACES, LaunchPlan, PlanRequest
from sandbox.policy.policy import Policy
from sandbox.spawn.spawner import can_join_keyring
from sandbox.spec import Project
from sandbox.typed import Mapping, Sequence


def plan(decided: Decided, environ: Mapping[str, str], watch: Stopwatch, sources: Sources) -> Planned:
    """Raises Failure. The sources stay open in `sources`."""
    policy, granted = decided.policy, decided.grant
    with failing(decided):
        if granted.unsandboxed and (granted.scratch or granted.memory_files):
            raise _no_cage()
        bwrap = "" if granted.unsandboxed else find_bwrap(environ).path
        layers = available_layers(granted, policy, bwrap, can_join_keyring=can_join_keyring())
        mounts = read_mounts()
        found = survey(mounts, move_host=policy.move_host)
        decided = decided._replace(limits=assign(granted, policy, found))
    with failing(decided):
        denylist = make_denylist(decided, bwrap, mounts, environ)
        request = _request(decided, layers, environ)
        opening = open_plan(request, granted, policy, layers, denylist, environ)
        compiled = sources.hold(opening, decided.limits, found, denylist).opened.plan
        if decided.signed is not None:
            from runner.launch.signed import require_checked

            require_checked(decided, compiled)
        provision = _provision(decided, compiled, found, environ)
    identity = compiled.owners.identity() if compiled.owners is not None else ""
    return Planned(
        decided,
        compiled,
        bwrap,
        listed(layers, granted, policy, identity),
        decided.limits,
        os.geteuid(),
        provision,
        watch.lap("plan"),
    )


def _provision(
    decided: Decided, compiled: LaunchPlan, found: Survey, environ: Mapping[str, str]
) -> Provision:
    plugin, state_dir = decided.loaded.plugin, decided.state_dir
    # The runner keeps no record of a directory that an ordinary user chose with --state-dir.
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
    )


def hold_again(planned: Planned, environ: Mapping[str, str], sources: Sources) -> Held:
    """Open the sources of a plan that was made earlier, and judge each again. Raises PlanRefused, and
    BwrapUnusable if its bubblewrap is not trusted any more."""
    from sandbox.plan.sources import reopen

    if planned.bwrap:
        trusted_program(planned.bwrap)
    mounts = read_mounts()
    denylist = make_denylist(planned.decided, planned.bwrap, mounts, environ)
    opening = reopen(planned.plan, denylist, scan_limit=planned.policy.scan_limit)
    found = survey(mounts, move_host=planned.policy.move_host)
    return sources.hold(opening, assign(planned.grant, planned.policy, found), found, denylist)


def _no_cage() -> Failure:
    message = "the plugin has files that exist only in a cage, and it would run without one"
    hint = 'take unsandboxed = "allow" out of the policy, or let the manifest ask for a sandbox'
    return Failure(Outcome("policy_denied", "plan", message, "unsandboxed", hint), EXEC_REFUSED)


def _request(decided: Decided, layers: Layers, environ: Mapping[str, str]) -> PlanRequest:
    plugin, entrypoint = decided.loaded.plugin, decided.loaded.plugin.entrypoint
    assert entrypoint is not None  # `load` has refused it
    if not look.isdir(entrypoint.directory):
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
        root=plugin.root,
        bare_environment=entrypoint.bare_environment,
        trusted_command=operators_own,
        conceal=(look.realpath(plugin.manifest),) if configured else (),
        state_dir=decided.state_dir,
        project=_project(decided) if command is None else _directory(command),
        reserved_for=managed_state_dir(plugin, environ) if writes and layers.uid_range is not None else "",
        # Without a cage there is no other name.
        root_inside="" if decided.grant.unsandboxed else plugin.root_inside,
        root_parts=() if decided.grant.unsandboxed else plugin.root_parts,
        by_options=command is not None,
        root_is_copy=bool(decided.copy) and plugin.root_inside == decided.original,
        search_path=entrypoint.search_path,
        approved_program=decided.approved_program,
    )


def _directory(command: Command) -> Project | None:
    """The working directory of a command, if an option names it. Only other options show it."""
    if not command.named_directory:
        return None
    return Project(
        command.directory, True, refusal="no option shows it", hint="use --project, --read or --write"
    )


def _project(decided: Decided) -> Project | None:
    """The folder the plugin works on, with the reason why it is not shown, if there is one."""
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


# --- what no plugin gets ------------------------------------------------------------------------------------


def make_denylist(decided: Decided, bwrap: str, mounts: Mounts, environ: Mapping[str, str]) -> Denylist:
    state_dir = decided.state_dir
    chosen = state_dir is not None and decided.loaded.invocation.state_dir is not None
    hosts = chosen or writes_outside(decided)
    if hosts:
        complete_search_path()  # what .pth files add to it is ours too: see _own_code
    # What the runner itself uses, and what it uses where nobody wrapped an entry.
    environs = (environ, environ_of_host(decided.loaded.invocation.command, environ))
    return Denylist(
        mounts,
        homes=decided.homes,
        policy=decided.policy.deny,
        runner=tuple(dict.fromkeys(p for each in environs for p in _own_places(each, decided.homes))),
        protected=_own_code(bwrap),
        deciding=(
            *_deciding_files(decided.loaded.plugin, decided.policy),
            *(place for each in environs if hosts for place in _host_places(decided, each)),
        ),
        storage=() if state_dir is None else (host_sides(state_dir),),
        copy=decided.copy,
        runtime_dir=environs[1].get("XDG_RUNTIME_DIR"),
        guarded=all_host_places().project if hosts else (),
    )


def _own_places(environ: Mapping[str, str], homes: Sequence[str]) -> tuple[str, ...]:
    """The runner's own folders; the first holds the state directories."""
    root = state_root(environ)
    places = [root, os.path.join(os.path.dirname(root), PACKAGES), *cache.every_directory(homes)]
    if (approvals := approvals_folder(environ)) is not None:
        places.append(os.path.dirname(approvals))
    if os.geteuid() == 0:
        places += [os.path.dirname(RESERVATIONS), RESERVATIONS]
    return tuple(dict.fromkeys(look.realpath(place) for place in places))


def _own_code(bwrap: str) -> tuple[str, ...]:
    """The programs that the runner executes and the places it imports from. A plugin that can write to one
    of them can run code outside of its cage."""
    imported = [place for place in sys.path if place.startswith("/") and place != "/" and look.exists(place)]
    places = [CODE_ROOT, bwrap, sys.prefix, sys.base_prefix, look.realpath(sys.executable), *imported]
    return tuple(dict.fromkeys(place for place in places if place))


def writes_outside(decided: Decided) -> bool:
    """Whether the plugin may write anything but its own state."""
    return any(path.access == "write" and path.origin != "state" for path in decided.grant.paths)


def _host_places(decided: Decided, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where hosts keep what they run, under every name."""
    places = all_host_places()
    found = [os.path.join(home, place) for home in decided.homes for place in places.home]
    if (base := environ.get("XDG_CONFIG_HOME", "")).startswith("/"):
        inside = [place.removeprefix(".config/") for place in places.home if place.startswith(".config/")]
        found += [os.path.join(base, place) for place in inside]
    found += places.system
    found += [named for name in places.variables if (named := environ.get(name, "")).startswith("/")]
    usable = [normal(place) for place in found if lexical_fault(place) is None]
    return tuple(dict.fromkeys(place for place in usable if place != "/"))


def _deciding_files(plugin: Plugin, policy: Policy) -> tuple[str, ...]:
    """Manifest and policy, under every name they have. A plugin that can write to one of them decides what it
    gets next time."""
    found: list[str] = []
    for path in (plugin.manifest, policy.file):
        real, links = follow(path)
        found += [path, real, *(link.path for link in links)]
    return tuple(dict.fromkeys(found))
