"""One launch as a chain of frozen values. Each holds the one before, and each arrow is one function.

    Loaded ──decide──► Decided ──plan──► Planned ──acquire, start──► Started ──wait──► Ended

    Loaded   the manifest was read: the plugin, and warnings
    Decided  the policy was applied: the grant, with one denial for each thing that was cut
    Planned  every path was found and judged: mounts, arguments, layers, limits. Nothing has been changed
    Started  the plugin runs: its processes, clocks, meters and streams
    Ended    its last process has ended

`runner.outcome.Failure` carries the last stage that was reached. Reports, explanations and messages are made
from a stage; only the line and column of a denial are looked up in the file again.

Loaded, Decided and Planned are plain data: named tuples, text, numbers, bytes. They can be written and read
back (`encode_planned`, `decode_planned`), and a launch can start from the copy. Code that works on a Planned
reads all it needs from the Planned itself.
"""

from __future__ import annotations

import time

from sandbox.limits.assigned import AssignedLimits
from sandbox.spec import Approval, Overrides
from sandbox.speed.typed import TYPE_CHECKING, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from runner.launch.command import Command
    from runner.launch.stdio import Plumbing
    from runner.launch.wait import Clocks, End
    from runner.package.signature import VerifiedPackage
    from runner.plugin import Plugin
    from sandbox.cell.cell import Cell
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.limits.cgroup import OuterOomCounter
    from sandbox.limits.disk import DiskMeter
    from sandbox.limits.meter import Meter
    from sandbox.limits.site import Hierarchy, Site
    from sandbox.network.audit import AuditLog
    from sandbox.paths.denied_places import DeniedPlaces
    from sandbox.paths.end_search import FolderSearch
    from sandbox.plan.layers import Layer
    from sandbox.plan.plan import LaunchPlan
    from sandbox.policy.policy import Policy
    from sandbox.spec import Grant, Note
    from sandbox.staged.store import OpenChangeset

Timings = tuple[tuple[str, float], ...]  # (phase, seconds), in order


class HeldManifest(NamedTuple):
    """The path of a manifest, with the text that it had when it was read. The file is not read again: it may
    have a fault by now."""

    path: str
    text: bytes

    def __fspath__(self) -> str:
        return self.path


class Invocation(NamedTuple):
    """What the operator asked for."""

    manifest: str
    contract: str | None = None
    server: str | None = None
    policy: str | None = None
    state_dir: str | None = None
    args: tuple[str, ...] = ()
    overrides: Overrides = Overrides()
    options: tuple[tuple[str, str], ...] = ()  # the contract's own
    config: str = ""  # the plugin's configuration as JSON, where its contract derives requests from it
    command: Command | None = None  # a program without a manifest; `manifest` is empty then
    observe: bool = False  # note what the plugin asks the kernel for, for `runner learn`
    text: bytes | None = None  # of the manifest, in place of what is in the file


class Stopwatch:
    """Measures the phases of one launch. Each stage stores the timings up to then."""

    def __init__(self, laps: Timings = (), since: float | None = None) -> None:
        """`laps` and `since`: of a stopwatch in another process, to continue it."""
        self._last = time.monotonic() if since is None else since
        self._laps = laps

    def lap(self, phase: str) -> Timings:
        """End a phase, or a further part of the last one. Returns all phases so far."""
        now = time.monotonic()
        laps, seconds = self._laps, now - self._last
        if laps and laps[-1][0] == phase:
            laps, seconds = laps[:-1], laps[-1][1] + seconds
        self._laps = (*laps, (phase, seconds))
        self._last = now
        return self._laps


class Loaded(NamedTuple):
    invocation: Invocation
    plugin: Plugin
    diagnostics: tuple[Diagnostic, ...] = ()  # warnings about the manifest
    timings: Timings = ()


class Decided(NamedTuple):
    """What the plugin gets. If the grant is refused, nothing is planned."""

    loaded: Loaded
    policy: Policy
    grant: Grant
    state_dir: str | None = None
    homes: tuple[str, ...] = ()  # home directories, which no plugin gets
    limits: AssignedLimits = AssignedLimits()  # empty until the machine was surveyed
    timings: Timings = ()
    # Where the policy requires a signature: what was found, the copy of the package that was checked and is
    # mounted, and the folder it is a copy of. A rehearsal makes no copy.
    signed: VerifiedPackage | None = None
    signed_image: VerifiedPackage | None = None  # of its image, if a signature and not the policy names it
    copy: str = ""
    original: str = ""
    # The part of a person's approvals that the policy admits. `policy` above has its ceilings raised by it.
    approval: Approval = Approval()
    notes: tuple[Note, ...] = ()  # from before the plan
    approval_said: Approval = Approval()  # everything that was approved
    approved_at: float = 0.0  # when the stored one was given, in seconds since 1970; 0: there is none
    approved_program: tuple[str, ...] = ()  # the program that the stored one is for: ApprovalKey.programs


class JudgedWrites(NamedTuple):
    """What a launch from a stored plan needs to judge again what the plugin may write."""

    denied: DeniedPlaces
    scan_limit: int


class Provision(NamedTuple):
    """What a launch has to acquire beside the sources of the plan.

    So code after the plan needs the decision before it only for reports and messages.
    """

    unsandboxed: bool
    state_dir: str | None
    state_parts: tuple[str, ...]  # folders below it that must exist too
    manifest: str  # its real path, for the record of who owns the state; '': no record
    # The state directory that its uid is reserved for, if it has none and leaves files elsewhere.
    writing_for: str
    sites: tuple[Site, ...]  # where cgroups of dead runners may be
    own_groups: tuple[Hierarchy, ...]  # of the runner itself
    observed: bool = False  # Invocation.observe
    judged: JudgedWrites | None = None  # if it may write to files of the host, beside its state


class Planned(NamedTuple):
    """Everything about a launch that can be known before it.

    A plan may be stored. So it never holds what belongs to one process or one moment: descriptors, a leased
    uid, a cgroup, the runner's own environment. `acquire` gets those. It does hold the values of the
    variables that were granted, in `plan.env`, in the grant and in the invocation. A stored plan is as
    secret as they are: store it in a file that only its owner can read and write.

    A launch from a stored plan opens and checks every source again, and refuses what has changed. It does not
    read manifest and policy again: the store has to drop a plan when one of them, or the runner, changes.
    """

    decided: Decided
    plan: LaunchPlan
    bwrap: str  # path of the bubblewrap to use; empty: the plugin runs unsandboxed
    layers: tuple[Layer, ...]
    limits: AssignedLimits
    euid: int  # the plan is for this user. Under another uid the same plan would mean other rights
    provision: Provision
    timings: Timings = ()

    @property
    def invocation(self) -> Invocation:
        return self.decided.loaded.invocation

    @property
    def plugin(self) -> Plugin:
        return self.decided.loaded.plugin

    @property
    def policy(self) -> Policy:
        return self.decided.policy

    @property
    def grant(self) -> Grant:
        return self.decided.grant

    @property
    def state_dir(self) -> str | None:
        return self.decided.state_dir


class Started(NamedTuple):
    """A plugin that runs, and what has to be watched meanwhile. Not plain data: it holds open files."""

    planned: Planned  # as it was carried out: with the uid that was leased and the limits the kernel took
    cell: Cell
    clocks: Clocks
    meters: tuple[Meter, ...]
    plumbing: Plumbing
    disk: DiskMeter | None = None
    oom_around: OuterOomCounter | None = None
    timings: Timings = ()
    search: FolderSearch | None = None  # of the folders it may write; None: there are none
    staged: OpenChangeset | None = None  # what it wrote, if that is staged

    @property
    def audit(self) -> AuditLog | None:
        """What it did with its network; complete when it has ended."""
        return self.cell.audit


class Ended(NamedTuple):
    started: Started
    end: End
    stderr_writable: bool = True  # the runner's own stderr: nobody may be reading it
    timings: Timings = ()


Stage = Loaded | Decided | Planned | Started | Ended


def ended_of(stage: Stage | None) -> Ended | None:
    return stage if isinstance(stage, Ended) else None


def started_of(stage: Stage | None) -> Started | None:
    if isinstance(stage, Ended):
        return stage.started
    return stage if isinstance(stage, Started) else None


def planned_of(stage: Stage | None) -> Planned | None:
    started = started_of(stage)
    if started is not None:
        return started.planned
    return stage if isinstance(stage, Planned) else None


def decided_of(stage: Stage | None) -> Decided | None:
    planned = planned_of(stage)
    if planned is not None:
        return planned.decided
    return stage if isinstance(stage, Decided) else None


def loaded_of(stage: Stage | None) -> Loaded | None:
    decided = decided_of(stage)
    if decided is not None:
        return decided.loaded
    return stage if isinstance(stage, Loaded) else None


def limits_of(stage: Stage | None) -> AssignedLimits:
    """The limits, each with what enforces it. Empty if the launch was refused before that was known."""
    planned, decided, ended = planned_of(stage), decided_of(stage), ended_of(stage)
    if ended is not None and (lifted := ended.end.lifted):
        return ended.started.planned.limits.without(lifted, "lifted from outside while the plugin ran")
    if planned is not None:
        return planned.limits
    return decided.limits if decided is not None else AssignedLimits()


def with_host(decided: Decided, environ: Mapping[str, str]) -> Decided:
    """With these variables as those of the host that started the entry."""
    invocation = decided.loaded.invocation
    if invocation.command is None:
        return decided
    command = invocation.command._replace(host_environ=environ)
    return decided._replace(loaded=decided.loaded._replace(invocation=invocation._replace(command=command)))


def has_start_notes(planned: Planned) -> bool:
    """Whether there are notes that the operator reads before the plugin starts."""
    wide = planned.grant.unsandboxed or planned.grant.network.mode in ("open", "host")
    return bool(planned.plan.notes or planned.decided.notes or planned.limits.announced or wide)


# --- plans as bytes -----------------------------------------------------------------------------------------


def encode_planned(planned: Planned) -> bytes:
    """A plan as bytes, for another process or a later launch."""
    from sandbox.speed.codec import encode

    return encode(planned)


def decode_planned(raw: bytes) -> Planned:
    """Raises ValueError if `encode_planned` did not write this.

    Values are not validated. Only read what nobody else can have written.
    """
    from sandbox.speed.codec import decode

    planned = decode(raw, planned_classes())
    if not isinstance(planned, Planned):
        raise ValueError("not a plan")
    return planned


def planned_classes() -> tuple[type[tuple[object, ...]], ...]:
    """Every class that can occur in a Planned."""
    from runner.launch.command import Command
    from runner.manifest.cache import PLUGIN_CLASSES
    from runner.package.signature import VerifiedPackage
    from sandbox import spec
    from sandbox.identity.accounts import Account
    from sandbox.limits.assigned import AssignedLimit, Shares
    from sandbox.limits.site import Hierarchy, Site
    from sandbox.network.credentials import BrokerPlan, CertifiedHosts, Credential, HostAuthorities
    from sandbox.network.egress import EgressLimits, EgressPlan
    from sandbox.network.ssh import SshHost, SshPlan
    from sandbox.paths.denied_places import DeniedPlaces
    from sandbox.paths.file_identity import FileIdentity
    from sandbox.paths.guarded import GuardedName
    from sandbox.plan import plan
    from sandbox.plan.layers import Layer, Layers
    from sandbox.plan.owners import Decision, Ownership
    from sandbox.policy import policy

    # fmt: off
    return (
        Invocation, Command, Overrides, Loaded, Decided, Planned, Provision, VerifiedPackage, JudgedWrites,
        DeniedPlaces, GuardedName, *PLUGIN_CLASSES, policy.Policy, policy.PathRule, policy.NetworkRule,
        policy.EnvRule, policy.SeccompRule, policy.CapabilityRule, policy.LimitRule, policy.PackageRule,
        policy.ApprovalRule, Approval, policy.CredentialRule, spec.Grant, spec.GrantedPath, spec.Denial,
        spec.Note, AssignedLimits, AssignedLimit, Shares, Site, Hierarchy, Layer, Layers, Decision, Ownership,
        Account, plan.LaunchPlan, plan.ShownPath, plan.Idmapped, plan.Guard, plan.Overlay, FileIdentity,
        EgressPlan, EgressLimits, BrokerPlan, Credential, CertifiedHosts, HostAuthorities, SshPlan, SshHost,
        plan.Bind, plan.Tmpfs, plan.Text, plan.Symlink, plan.Mask, plan.Proc, plan.Dev, plan.ReadOnly,
        plan.AgentFolder,
    )
    # fmt: on
