"""Find the approval of a plugin, and the part of it that the policy admits."""

from __future__ import annotations

import os

from runner.approvals.record import VERSION, ApprovalKey, ApprovalRecord, asked_of, key_of, with_program
from runner.approvals.store import find_approval, find_inapplicable, has_any_approval, was_notified
from runner.launch.command import command_approval, environ_of_places
from runner.launch.stages import Invocation, Loaded
from runner.plugin import Plugin
from sandbox.document.diagnostic import cut
from sandbox.policy.approval import join_approvals, limit_approval, requested_approval
from sandbox.policy.load import binding_policy
from sandbox.policy.policy import Policy, is_loopback
from sandbox.spec import (
    APPROVED,
    NETWORK_ORDER,
    SECCOMP_ORDER,
    Approval,
    Denial,
    EnvRequest,
    Network,
    Note,
    PathRequest,
    SandboxSpec,
    names_policy_hosts,
)
from sandbox.speed.typed import Iterator, Mapping, Sequence, Set
from sandbox.speed.value import NamedTuple

_MOST_NAMED = 10  # variables of one note


class Approved(NamedTuple):
    """The approvals of one plugin in one launch."""

    counted: Approval = Approval()  # the part that the policy admits
    record: ApprovalRecord | None = None  # the stored approval, if there is one
    said: Approval = Approval()  # everything that was approved
    # Every policy whose [approvals] applies. The second is the system's, if a user has chosen another.
    bounds: tuple[Policy, ...] = ()
    # Identifies the plugin of an approval; None: nothing can be approved. Computed from the plugin's folder.
    key: ApprovalKey | None = None
    # A stored approval of the same plugin that does not count: for another program, or of an earlier version.
    passed_over: ApprovalRecord | None = None

    def with_added(self, spec: SandboxSpec) -> SandboxSpec:
        """The requests of the manifest, and what the person added to them. Added paths and variables that do
        not exist are skipped."""
        if self.record is None or self.record.added.is_empty:
            return spec
        added = self.record.added
        have = {request.name for request in spec.env}
        return spec._replace(
            paths=(
                *spec.paths,
                *(PathRequest(path, "read", required=False, origin=APPROVED) for path in added.read),
                *(PathRequest(path, "write", required=False, origin=APPROVED) for path in added.write),
            ),
            network=_with_hosts(spec.network, added),
            env=(*spec.env, *(EnvRequest(name, required=False) for name in added.env if name not in have)),
        )

    def with_remedies(self, denials: Sequence[Denial], loaded: Loaded, policy: Policy) -> tuple[Denial, ...]:
        """The denials. Each that the policy lets a person approve gets a hint with the command for that."""
        if not denials:
            return ()
        bounds = self.bounds
        if bounds == (policy,):  # nothing was approved, so the system's policy was not read yet
            bounds = (policy, *filter(None, [binding_policy(policy)]))
        added = _only_added(loaded.plugin, self)
        return tuple(_with_remedy(denial, loaded, self, bounds, added) for denial in denials)

    def notes(
        self, loaded: Loaded, environ: Mapping[str, str], denials: Sequence[Denial]
    ) -> tuple[Note, ...]:
        """Notes about an approval that does not count, about an entry whose variables act on the runner, and
        about variables of the host that a wrapped entry names and does not get without an approval."""
        found: list[Note] = []
        command = loaded.invocation.command
        if command is not None and command.outdated:
            message = (
                "an earlier version of runner wrap wrote this entry: its variables act on the runner itself"
            )
            found.append(Note("wrapped", message, f"write it anew: {_wrap_command(loaded)}"))
        other, key = self.passed_over, self.key
        is_old = other is not None and key is not None and other.version != VERSION
        if command is not None and command.dropped:
            message = f"added to the entry since it was wrapped, and dropped: {_some(command.dropped)}"
            again = _wrap_command(loaded, "--server", _label(loaded.plugin))
            hint = f"to pass it on: {again}, then restart the host"
            found.append(Note("dropped", message, hint))
        if (why := _why_passed_over(self)) and not (
            is_old and key is not None and was_notified(key, environ_of_places(loaded.plugin, environ))
        ):
            found.append(Note("approval", why, f"to allow it again: {allow_command(loaded)}"))
        names = [each.asked for each in denials if each.rule == "env_ceiling" and not each.required]
        if names and command is not None and command.host_environ is not None:
            options = [word for name in names for word in ("--env", name)]
            message = f"the entry asks for variables of the host, which need your yes: {', '.join(names)}"
            found.append(Note("withheld", message, f"to allow it: {allow_command(loaded, *options)}"))
        return tuple(found)


def approval_of(
    loaded: Loaded, policy: Policy, environ: Mapping[str, str], record: ApprovalRecord | None = None
) -> Approved:
    """The stored approval of this plugin, joined with the options of the command line if it is a command.
    `record`: instead of the stored one. Raises ApprovalsUnusable, and DocumentError for the system's
    policy."""
    plugin = loaded.plugin
    key, places = key_of(plugin), environ_of_places(plugin, environ)
    other = None
    if record is None and key is not None and has_any_approval(key, places):
        key, code = with_program(key, plugin, environ)
        record = find_approval(key, places, code)
        other = find_inapplicable(key, places) if record is None else None
    said = Approval() if record is None else record.whole
    if (image := loaded.invocation.overrides.image) is not None:
        said = join_approvals(said, Approval(images=(image.reference,)))
    if loaded.invocation.command is not None:
        said = join_approvals(said, command_approval(loaded.invocation.command))
        if plugin.spec.image is not None and plugin.spec.image.starts_own:  # the command line's program
            asked = requested_approval(plugin.spec)
            # The volumes of docker run, if the person typed it. Those of an entry came with a configuration.
            own = Approval(images=asked.images)
            if loaded.invocation.command.host_environ is None:
                own = own._replace(read=asked.read, write=asked.write)
            said = join_approvals(said, own)
    if said.is_empty:
        return Approved(said, record, said, (policy,), key, other)
    counted, bounds = said, (policy, *filter(None, [binding_policy(policy)]))
    for bound in bounds:
        counted = limit_approval(counted, bound.approvals)
    return Approved(counted, record, said, bounds, key, other)


def _with_hosts(asked: Network | None, added: Approval) -> Network | None:
    mode = "none" if asked is None else asked.mode
    wider = max(mode, added.network, key=NETWORK_ORDER.index)
    if asked is not None and mode == wider == "open":  # it covers every added host but this machine
        own = filter(is_loopback, added.hosts)
        return asked._replace(hosts=tuple(dict.fromkeys((*asked.hosts, *own))))
    if added.network == "none" or (wider == mode and mode != "allowlist"):
        return asked  # its request covers the added hosts
    if wider != "allowlist":
        return Network(wider, where=() if asked is None else asked.where)
    hosts = () if asked is None else asked.hosts
    where = () if asked is None else asked.where
    return Network("allowlist", tuple(dict.fromkeys((*hosts, *added.hosts))), where)


# --- what a person can do about a denial --------------------------------------------------------------------


def _with_remedy(
    denial: Denial, loaded: Loaded, approved: Approved, bounds: tuple[Policy, ...], added: Set[str]
) -> Denial:
    if denial.asked in added:
        denial = denial._replace(origin=APPROVED)
    if _lacks_hosts(denial, loaded.plugin, bounds):
        # A yes to what it asks for would give it nothing: the policy has no hosts.
        by_nobody = approved.key is None or any(each.approvals.network == "none" for each in bounds)
        if by_nobody or loaded.invocation.command is not None:
            return denial
        named = allow_command(loaded, "--net", "HOST:443")
        return denial._replace(hint=f"to allow a host: {named}; or {denial.hint}")
    wanted = _approval_for(denial, loaded.plugin)
    if wanted is None:
        return denial
    command = loaded.invocation.command
    # What only its entry asks for, a person can allow.
    of_entry = denial.rule == "image_ceiling" and command is not None and command.host_environ is not None
    is_command = command is not None and not of_entry and not _is_volume(denial, loaded.plugin)
    bound = next((each for each in bounds if limit_approval(wanted, each.approvals) != wanted), None)
    if bound is not None:
        if is_command or _covers(approved.said, wanted):
            reason = f"policy {bound.name} lets nobody approve {_named(denial)}"
            if denial.rule == "env_steering":
                reason = f"it decides which code the loader or interpreter runs, and {reason}"
            hint = denial.hint
            if is_command and denial.rule == "env_steering":  # --env NAME=VALUE is what was refused
                hint = f'the operator can add "{denial.asked}" to steering under [env] in the policy'
            return denial._replace(reason=reason, hint=hint)
        return denial
    if is_command or approved.key is None:
        return denial  # the command line already was the approval
    if approved.record is None:
        why = _why_passed_over(approved)
        return denial._replace(
            reason=f"{denial.reason}; {why}" if why else denial.reason,
            hint=f"to allow it: {allow_command(loaded)}; or {denial.hint}",
        )
    return denial._replace(
        reason=f"{denial.reason}, and your approval of {_day(approved.record)} does not cover it",
        hint=f"to see what is new: {allow_command(loaded, '--diff')}; or {denial.hint}",
    )


def _is_volume(denial: Denial, plugin: Plugin) -> bool:
    """Whether it is a folder that the words of an entry mount into its image."""
    return plugin.spec.image is not None and denial.asked in dict(plugin.spec.image.places)


def _lacks_hosts(denial: Denial, plugin: Plugin, bounds: tuple[Policy, ...]) -> bool:
    """Whether the plugin asks for the hosts that the policy lists, and there are none."""
    network = denial.asked in ("network allowlist", "network egress")
    return network and names_policy_hosts(plugin.spec.network) and not bounds[0].network.hosts


def _named(denial: Denial) -> str:
    """What is denied, as part of a sentence."""
    if denial.rule in ("read_ceiling", "write_ceiling"):
        return "reading it" if denial.rule == "read_ceiling" else "writing it"
    return denial.asked if denial.rule in ("network_ceiling", "seccomp_ceiling") else "it"


def _approval_for(denial: Denial, plugin: Plugin) -> Approval | None:
    """The approval that would allow what was denied. None: nobody can approve it."""
    from sandbox.paths.denied_paths import normal

    asked = denial.asked
    word = asked.rpartition(" ")[2]
    match denial.rule:
        case "read_ceiling" if asked.startswith("/"):
            return Approval(read=(normal(asked),))
        case "write_ceiling" if asked.startswith("/"):
            return Approval(write=(normal(asked),))
        case "network_ceiling":
            network = plugin.spec.network
            hosts = () if network is None or names_policy_hosts(network) else network.hosts
            modes = {mode: mode for mode in NETWORK_ORDER}
            return Approval(network=modes[word], hosts=hosts) if word in modes else None
        case "network_hosts" if asked != "network egress":
            return Approval(network="allowlist", hosts=(asked,))
        case "env_ceiling":
            return Approval(env=(asked,))
        case "credential_ceiling":
            return Approval(hide=(word,))
        case "ssh_ceiling":
            return Approval(ssh=(word,))
        case "env_steering":
            return Approval(steering=(asked,))
        case "image_ceiling":
            return Approval(images=(asked,))
        case "seccomp_ceiling":
            profiles = {profile: profile for profile in SECCOMP_ORDER}
            return Approval(seccomp=profiles[word]) if word in profiles else None
    return None


def _only_added(plugin: Plugin, approved: Approved) -> Set[str]:
    """What only the person asked for, by an approval that goes beyond the manifest."""
    if approved.record is None:
        return frozenset()
    added, asked = approved.record.added, asked_of(plugin)
    words = {*added.read, *added.write, *added.hosts, *added.env, *added.hide, *added.ssh}
    return words.difference(asked.read, asked.write, asked.hosts, asked.env, asked.hide, asked.ssh)


def _covers(wide: Approval, narrow: Approval) -> bool:
    """Whether an approval literally names everything that another does."""
    return join_approvals(wide, narrow) == wide


def _why_passed_over(approved: Approved) -> str:
    """Reason why a stored approval does not count, or ''."""
    other, key = approved.passed_over, approved.key
    if other is None or key is None:
        return ""
    why = "an earlier version recorded it, and approvals now name the program that they are for"
    if other.version == VERSION:
        then, now = (" with ".join(each.programs) for each in (other.key, key))
        why = f"it is for {then or 'no program'}, and this is {now or 'none'}"
    return f"your approval of {_day(other)} does not count: {why}"


def _day(record: ApprovalRecord) -> str:
    from time import localtime, strftime

    return strftime("%Y-%m-%d", localtime(record.when))


def _some(names: Sequence[str]) -> str:
    """The first names: a configuration may have any number."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(cut(name, 60) for name in names[:_MOST_NAMED]) + more


def _wrap_command(loaded: Loaded, *options: str) -> str:
    from shlex import join

    return join(("runner", "wrap", loaded.plugin.manifest, *options))


def _label(plugin: Plugin) -> str:
    """What --server calls an entry that `runner wrap` wrote."""
    return f"{plugin.scope}:{plugin.id}" if plugin.scope else plugin.id


def allow_command(loaded: Loaded, *options: str) -> str:
    """The command that shows or allows what this plugin asks, for a shell."""
    from shlex import quote

    invocation, plugin = loaded.invocation, loaded.plugin
    words = ["runner", "allow", *options]
    command, image = invocation.command, invocation.overrides.image
    if image is None and command is not None and not command.file:
        image = command.spec.image
    if image is not None:
        words += ["--image", image.reference]
    if command is not None and not command.file:
        argv = command.argv if image is None else command.argv[1:]  # the first stands for its entry point
        return " ".join(map(quote, (*words, "--name", command.name, "--", *argv)))
    if command is not None:
        return " ".join(map(quote, (*words, command.file, "--server", _label(plugin))))
    if invocation.contract is not None:
        words += ["--contract", invocation.contract]
    words.append(_manifest(invocation, plugin))
    if invocation.server is not None:
        words += ["--server", invocation.server]
    values = dict(invocation.options)
    for flag, name in _choosing(plugin.contract) if values else ():
        if name in values:
            words += [flag, values.get(f"{name}_file", values[name])]
    if invocation.config:
        words += ["--config", invocation.config]
    return " ".join(map(quote, words))


def _choosing(contract: str) -> Iterator[tuple[str, str]]:
    """The options that choose what is asked for, with their names: those that `runner check` takes. All
    others are about one launch or one call."""
    from runner.contracts.registry import find_contract

    for option in find_contract(contract).options:
        if "check" in option.verbs:
            yield option.flag, option.name


def _manifest(invocation: Invocation, plugin: Plugin) -> str:
    """The manifest as given, but absolute: the message may be read in another folder."""
    try:
        return os.path.abspath(invocation.manifest) if invocation.manifest else plugin.manifest
    except FileNotFoundError:  # the current folder is gone
        return plugin.manifest
