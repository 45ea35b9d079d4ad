"""Loaded -> Decided: apply the policy to the manifest. The result is the grant.

Nothing on the machine is changed. All errors raise `Failure`, with the outcome and the last stage that was
reached.
"""

from __future__ import annotations

import os

from runner.contracts.registry import find_contract
from runner.launch.approve import approval_of
from runner.launch.command import environ_of_host, environ_of_places, mark_entry
from runner.launch.failures import as_failure, judge_denials
from runner.launch.stages import Decided, Invocation, Loaded, Stopwatch
from runner.outcome import EXEC_REFUSED, Failure, Outcome
from runner.plugin import Plugin
from sandbox import look
from sandbox.cache import fingerprint
from sandbox.identity.host_side import FOLDER, is_host_side
from sandbox.identity.reservations import name_file
from sandbox.identity.state import StateRefused, last_used, real_state_dir, state_root
from sandbox.identity.uid_range import RESERVATIONS
from sandbox.paths.homes import homes
from sandbox.policy.approval import raise_ceilings
from sandbox.policy.grant import grant
from sandbox.policy.load import load_policy
from sandbox.policy.policy import Policy
from sandbox.spec import ARGUMENT_LIMIT, PLUGIN_DIR_TOKEN, STATE_DIR_TOKEN, Denial, EnvRequest, Note
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
    if plugin.template is not None:
        plugin, told = _fill_plugin(loaded, policy, environ, own_homes)
    if invocation.command is None and find_contract(plugin.contract).configurations is not None:
        plugin = mark_entry(plugin)
    state_dir, unused = _state_dir(plugin, policy, invocation, environ)
    told = (*told, *found.notes(loaded, environ), *(_unused_note(state_dir, each) for each in unused))
    switches = find_contract(plugin.contract).switches(environ)
    filled = Placeholders(plugin, state_dir, caged=plugin.spec.enabled or not policy.unsandboxed)
    asked = found.with_added(plugin.spec)
    spec = asked._replace(env=tuple(map(filled.request, asked.env)))
    granted = grant(
        spec,
        policy,
        state_dir=state_dir,
        environ=environ_of_host(invocation.command, environ),
        overrides=invocation.overrides,
        homes=own_homes,
        sandbox_required_by=switches.sandbox_required_by,
        host_network_by=switches.host_network_by,
        bare_environment=plugin.entrypoint is not None and plugin.entrypoint.bare_environment,
    )
    denials = tuple(
        denial._replace(required=False) if _is_missing(denial, plugin) else denial
        for denial in granted.denials
    )
    told = (*told, *_withheld_notes(denials, loaded))
    strays = _file_variable_denials(loaded.plugin, plugin, chosen, approved=found.record is not None)
    if strays:
        denials = tuple(each for each in denials if each.asked not in {stray.asked for stray in strays})
    return Decided(
        loaded._replace(plugin=plugin),
        policy,
        granted._replace(denials=(*found.with_remedies(denials, loaded, chosen), *strays)),
        state_dir,
        own_homes,
        timings=loaded.timings,
        approval=found.counted,
        notes=told,
        approval_said=found.said,
        approved_at=0.0 if found.record is None else found.record.when,
        approved_program=() if found.record is None else found.record.key.programs,
    )


def _withheld_notes(denials: Sequence[Denial], loaded: Loaded) -> tuple[Note, ...]:
    """A note about variables of the host that a wrapped entry names and does not get without an approval."""
    command = loaded.invocation.command
    if command is None or command.host_environ is None:
        return ()
    names = [each.asked for each in denials if each.rule == "env_ceiling" and not each.required]
    if not names:
        return ()
    from runner.launch.approve import allow_command

    options = [word for name in names for word in ("--env", name)]
    message = f"the entry asks for variables of the host, which need your yes: {', '.join(names)}"
    return (Note("withheld", message, f"to allow it: {allow_command(loaded, *options)}"),)


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


def _file_variable_denials(
    written: Plugin, filled: Plugin, policy: Policy, *, approved: bool
) -> tuple[Denial, ...]:
    """Denials of variables that decide which code runs and come from a file. The file may change after an
    approval, so no approval covers them. If there is an approval, PATH is one of them."""
    if filled is written:
        return ()
    from sandbox.policy.policy import matches, steers

    known = {each.name for each in written.spec.env}
    return tuple(
        Denial(
            "env_steering",
            each.name,
            "it decides which code the loader or interpreter runs, so a file of variables may not set it",
            f"set {each.name} in the env of the entry, where runner allow shows its value",
            where=each.where,
        )
        for each in filled.spec.env
        if each.name not in known
        and (steers(each.name) or (approved and each.name == "PATH"))
        and not matches(policy.env.steering, each.name)
    )


def _is_missing(denial: Denial, plugin: Plugin) -> bool:
    """Whether the policy refuses an optional path that does not exist: the plugin then loses nothing."""
    return denial.rule in ("read_ceiling", "write_ceiling") and any(
        request.where == denial.where and not request.required and not look.lexists(request.path)
        for request in plugin.spec.paths
    )


# --- the state directory ------------------------------------------------------------------------------------


def _state_dir(
    plugin: Plugin, policy: Policy, invocation: Invocation, environ: Mapping[str, str]
) -> tuple[str | None, tuple[str, ...]]:
    """The plugin's state directory, if the plugin or the policy asks for one, and directories of the same
    plugin that are not used."""
    asked = [request.path for request in plugin.spec.paths]
    if not any(
        path.startswith(STATE_DIR_TOKEN) for path in (*asked, *policy.read.default, *policy.write.default)
    ):
        return None, ()
    if invocation.state_dir is not None:
        chosen = real_state_dir(invocation.state_dir)
        if is_host_side(chosen):
            message = f"state directory {chosen} is in a folder {FOLDER}, where hosts keep what plugins store"
            raise StateRefused(message, "choose another directory with --state-dir")
        return chosen, ()
    used, *unused = _managed_state_dirs(plugin, environ)
    return used, tuple(path for path in unused if look.isdir(path))  # for others there is only a uid


def _unused_note(used: str | None, unused: str) -> Note:
    message = f"earlier versions made two state directories of this plugin: {used} was used last and is used"
    hint = f"take what you need out of it, then: runner state remove {os.path.basename(unused)}"
    return Note("state", f"{message}, {unused} is left alone", hint)


def managed_state_dir(plugin: Plugin, environ: Mapping[str, str]) -> str:
    """The plugin's directory in the runner's own folder of state directories. Raises StateRefused."""
    return _managed_state_dirs(plugin, environ)[0]


def _managed_state_dirs(plugin: Plugin, environ: Mapping[str, str]) -> list[str]:
    """That directory, and then others that earlier versions made for the same plugin. If there are several,
    the last used comes first. Raises StateRefused."""
    root = state_root(environ_of_places(plugin, environ))
    if not root.startswith("/"):  # a relative one would be below the working directory
        message = "there is no place for the plugin's state: HOME is not the path of a folder"
        hint = (
            "set HOME, or choose a directory with --state-dir; what runner wrap wrote needs an account with"
        )
        raise StateRefused(message, f"{hint} a home in the password database")
    folder = real_state_dir(root, follow="own")
    own, *former = (
        os.path.join(folder, state_name(plugin._replace(mark=mark)))
        for mark in (plugin.mark, *plugin.former_marks)
    )
    found = [path for path in former if _is_known_state(path)]
    if not found or not _is_known_state(own):
        return found or [own]
    look.doubt(f"{own} and {found[0]} are state of one plugin")
    return sorted((own, *found), key=last_used, reverse=True)


def _is_known_state(path: str) -> bool:
    """Whether there is such a state directory, or for root a uid that is reserved for it."""
    return look.lexists(path) or (os.geteuid() == 0 and look.lexists(name_file(RESERVATIONS, path)))


def state_name(plugin: Plugin) -> str:
    """The name of that directory, made from the id and the path of the manifest.

    The id alone is not enough: a manifest that claims another plugin's id must not get that plugin's state.
    """
    label = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in plugin.id)[:64]
    marks = (plugin.mark,) if plugin.mark else ()
    place = (plugin.contract, plugin.id, look.realpath(plugin.manifest), *marks)
    return f"{label}.{fingerprint(*(os.fsencode(part) for part in place))[:12]}"


# --- ${state_dir} and ${plugin_dir} -------------------------------------------------------------------------


class Placeholders:
    """${state_dir} and ${plugin_dir} in a plugin's arguments and variables, replaced by the folders."""

    def __init__(self, plugin: Plugin, state_dir: str | None, *, caged: bool) -> None:
        folder = plugin.root or os.path.dirname(plugin.manifest)
        self._folders = {PLUGIN_DIR_TOKEN: plugin.root_inside if caged and plugin.root_inside else folder}
        if state_dir is not None:
            self._folders[STATE_DIR_TOKEN] = state_dir

    def text(self, text: str) -> str:
        for token, folder in self._folders.items():
            if token in text:
                text = text.replace(token, folder)
        # The manifest was checked with the placeholder, and the folder's path may be longer.
        if len(os.fsencode(text)) > ARGUMENT_LIMIT:
            outcome = Outcome(
                "manifest_invalid",
                "manifest",
                f"an argument or variable is longer than {ARGUMENT_LIMIT} bytes, the kernel's limit, once "
                f"{STATE_DIR_TOKEN} and {PLUGIN_DIR_TOKEN} are filled in",
                "argument_too_long",
                "shorten it in the manifest, or use the two placeholders less often in it",
            )
            raise Failure(outcome, EXEC_REFUSED)
        return text

    def request(self, request: EnvRequest) -> EnvRequest:
        return request if request.value is None else request._replace(value=self.text(request.value))
