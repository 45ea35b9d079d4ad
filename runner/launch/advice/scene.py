"""Scene: what advice needs to know about a launch that failed.

Plain data: a monitor knows the launch, and sends the scene to the session, which has the plugin's stderr.
Values of variables are not in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from runner.launch.command import wrapped_entry
from runner.launch.verdict import amount_of, raise_hint
from sandbox.paths.mounts import join
from sandbox.policy.policy import ApprovalRule, Policy
from sandbox.spec import NetworkMode
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from runner.launch.stages import Planned

_MOST_WORDS = 64
_LONGEST_WORD = 4096
_UNTOLD = ("HOME", "PATH", "PWD")  # not chosen by the plugin


class Mention(NamedTuple):
    """A word of the command line or of a variable that may be a path."""

    who: str  # "its argument --db", "its variable DB_PATH"
    word: str


class RefusedHost(NamedTuple):
    message: str  # what it asked for, and why that was refused
    rule: str = ""  # the allowlist entry that would allow it; '': there is none


class ProcessLimit(NamedTuple):
    """A limit that is enforced by an rlimit, as for a user without a cgroup. Only the plugin notices that it
    was reached."""

    name: str  # memory, pids
    amount: str
    remedy: str


class Scene(NamedTuple):
    policy: str  # its name
    approvals: ApprovalRule  # what a person may allow
    ceilings: ApprovalRule  # what a manifest may ask for anyway
    denied: tuple[str, ...]  # paths that the policy denies
    homes: tuple[str, ...]
    home: str  # the operator's home, for ~
    directory: str  # where relative words were written
    inside: str  # where the program started
    shown: tuple[str, ...]  # paths with the same file in the cage, or the cage's own; each with all below
    writable: tuple[str, ...]
    guarded: tuple[str, ...]  # in folders that it may write, and read-only
    own: tuple[str, ...]  # manifest, policy, programs: the plugin may not write to a folder with one of them
    network: NetworkMode
    given: tuple[str, ...]  # names of its variables
    withheld: tuple[str, ...]  # names of the operator's variables that it does not have
    denied_names: tuple[str, ...]  # of variables that it asked for, and that were refused
    mentions: tuple[Mention, ...]
    hosts: tuple[RefusedHost, ...] = ()  # by the gate
    loopback: tuple[int, ...] = ()  # ports of this machine that the policy lets people open
    policy_file: str = ""
    # The command that allows a plugin more; empty: the options of its own command line do.
    allow: tuple[str, ...] = ()
    process_limits: tuple[ProcessLimit, ...] = ()
    image: str = ""  # that is its root


# Every class that can occur in one.
SCENE_CLASSES = (Scene, Mention, RefusedHost, ProcessLimit, ApprovalRule)


def scene_of(planned: Planned, environ: Mapping[str, str], hosts: tuple[RefusedHost, ...] = ()) -> Scene:
    from sandbox.plan.operations import shown_places  # a host that is told of a scene makes none

    plan, policy, plugin = planned.plan, planned.policy, planned.plugin
    given = tuple(name for name, _ in plan.env)
    entrypoint = plugin.entrypoint
    return Scene(
        policy=policy.name,
        approvals=policy.approvals,
        ceilings=_ceilings(policy),
        denied=policy.deny,
        homes=planned.decided.homes,
        home=environ.get("HOME", ""),
        directory=plan.directory if entrypoint is None else entrypoint.directory,
        inside=plan.directory,
        shown=shown_places(plan.operations),
        writable=tuple(_writable(planned)),
        guarded=tuple(
            join(guard.dest, guard.path)
            for guard in plan.guards
            if guard.access != "write" and guard.state != "link"
        ),
        own=tuple(
            dict.fromkeys(
                (plugin.manifest, os.path.realpath(plugin.manifest), *plan.argv[:1], *plan.program_files)
            )
        ),
        network=planned.grant.network.mode,
        given=given,
        withheld=tuple(name for name in environ if name not in given),
        denied_names=tuple(
            denial.asked
            for denial in planned.grant.denials
            if denial.rule in ("env_ceiling", "env_steering") and not denial.required
        ),
        mentions=tuple(_mentions(planned)),
        hosts=hosts,
        loopback=policy.network.loopback,
        policy_file=policy.file,
        allow=_allow(planned),
        process_limits=tuple(
            ProcessLimit(
                name,
                amount_of(name, planned.grant.limits),
                raise_hint(name, planned.grant.decided_by, wrapped_entry(planned.invocation.command)),
            )
            for name in ("memory", "pids")
            if name in planned.limits.fallbacks
        ),
        image=plan.image,
    )


def _ceilings(policy: Policy) -> ApprovalRule:
    network = policy.network
    return ApprovalRule(
        read=policy.read.ceiling,
        write=policy.write.ceiling,
        network=network.ceiling,
        hosts=network.hosts,
        env=(*policy.env.passed, *policy.env.ceiling),
        steering=policy.env.steering,
    )


def _writable(planned: Planned) -> Iterator[str]:
    from sandbox.plan.plan import Bind, Tmpfs

    for op in planned.plan.operations:
        if isinstance(op, Tmpfs) or (isinstance(op, Bind) and op.writable):
            yield op.dest
    yield from (each.dest for each in planned.plan.overlays)


def _mentions(planned: Planned) -> Iterator[Mention]:
    from sandbox.paths.program import script_of
    from sandbox.plan.mentions import words_of

    count, script = 0, script_of(planned.plan.argv)
    if os.path.lexists(script):
        script = ""
    for option, name, word in words_of(planned.plan.argv[1:], planned.grant.env):
        if name in _UNTOLD or not word or len(word) > _LONGEST_WORD or "\0" in word or "://" in word:
            continue
        if word == script:  # which is missing: an interpreter does not want to write it
            continue
        yield Mention(f"its variable {name}" if name else f"its argument {option}".rstrip(), word)
        count += 1
        if count == _MOST_WORDS:
            return


def _allow(planned: Planned) -> tuple[str, ...]:
    """A command that people typed has its own options. One from a configuration, and a manifest, do not."""
    invocation = planned.invocation
    command = invocation.command
    if command is not None and not (command.file and command.name):
        return ()
    if command is not None:
        return ("runner", "allow", command.file, "--server", command.name)
    contract = () if invocation.contract is None else ("--contract", invocation.contract)
    server = () if invocation.server is None else ("--server", invocation.server)
    return ("runner", "allow", *contract, invocation.manifest, *server)
