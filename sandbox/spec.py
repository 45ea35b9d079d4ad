"""Values that describe the cage: requests, denials, grants.

Nothing here has an effect. Those that a launch from a stored plan needs are in a module of their own,
sandbox/given.py, and are offered here too. Named tuples and not dataclasses, here and everywhere on the
launch path: importing `dataclasses` alone costs more than bubblewrap does.
"""

from __future__ import annotations

from sandbox.given import Approval as Approval
from sandbox.given import Limits as Limits
from sandbox.given import MemoryFile as MemoryFile
from sandbox.given import NetworkMode as NetworkMode
from sandbox.given import Note as Note
from sandbox.given import Overrides as Overrides
from sandbox.given import ProjectAccess as ProjectAccess
from sandbox.given import SeccompProfile as SeccompProfile
from sandbox.typed import Literal
from sandbox.value import NamedTuple

# Where a request stands in its document, as the keys that lead to it. Turned into file:line:column only for a
# message, so a launch without faults never scans for positions.
KeyPath = tuple[str | int, ...]

Access = Literal["read", "write"]
# Weakest grant first: a ceiling admits everything up to and including itself.
NETWORK_ORDER: tuple[NetworkMode, ...] = ("none", "allowlist", "open", "host")
SECCOMP_ORDER: tuple[SeccompProfile, ...] = ("strict", "default", "compat")

# With these a program makes no socket of the internet, so a network is of no use to it.
SECCOMP_WITHOUT_INTERNET: tuple[SeccompProfile, ...] = ("strict",)

# The kernel refuses a single argument or variable of 32 pages or more (MAX_ARG_STRLEN).
ARGUMENT_LIMIT = 131072 - 1

STATE_DIR_TOKEN = "${state_dir}"
PLUGIN_DIR_TOKEN = "${plugin_dir}"  # the folder of its manifest

APPROVED = "your approval"  # the origin of what a person gave a plugin beyond what it asks


class PathRequest(NamedTuple):
    """One host path a plugin asks for. It appears inside under the same name."""

    path: str  # absolute; may start with STATE_DIR_TOKEN
    access: Access
    required: bool = True  # an optional path that does not exist is skipped and reported
    where: KeyPath = ()
    file: bool = False  # a folder of this name is refused
    origin: str = "manifest"  # who asks: also "command line" and APPROVED


class Network(NamedTuple):
    mode: NetworkMode = "none"
    # "name:port" or "name:*", for mode allowlist. POLICY_HOSTS: the plugin names none, and asks for those of
    # the policy.
    hosts: tuple[str, ...] = ()
    where: KeyPath = ()
    required: bool = True  # False: without a grant the plugin runs with less network, or none


POLICY_HOSTS = ("*",)


def names_policy_hosts(asked: Network | None) -> bool:
    """Whether the policy's list is asked for, alone or with hosts that the plugin names."""
    return asked is not None and asked.mode == "allowlist" and POLICY_HOSTS[0] in asked.hosts


class EnvRequest(NamedTuple):
    """Variables a plugin wants: set by its manifest, or passed on from the host."""

    name: str
    value: str | None = None  # None: the host's own value is asked for
    required: bool = True
    where: KeyPath = ()
    # Set by the contract, which also makes the folder that it names: an operator's own value would be wrong.
    fixed: bool = False
    # The host's value is only filled into the plugin's words; the variable itself is not passed on.
    fills: bool = False


# Which limits are sizes and which are times; the others are plain numbers.
SIZES = frozenset(
    ("memory", "io", "file_size", "locked_memory", "message_queues", "disk", "tmp", "shm", "output")
)
DURATIONS = frozenset(("cpu_time", "launch", "handshake", "call", "idle", "teardown", "deadline"))


DEFAULT_SCRATCH_BYTES = 64 << 20  # of a scratch folder without a disk limit


class Scratch(NamedTuple):
    """A folder in memory that the plugin may write. It ends with the cage. Its size is the `disk` limit."""

    dest: str  # absolute, in the cage
    where: KeyPath = ()


class SandboxSpec(NamedTuple):
    """A manifest's requests for the cage."""

    enabled: bool = True  # False: the manifest prefers to run without any cage
    paths: tuple[PathRequest, ...] = ()
    network: Network | None = None  # None: the manifest is silent, the policy's default holds
    env: tuple[EnvRequest, ...] = ()
    seccomp: SeccompProfile | None = None
    limits: Limits = Limits()
    # Where each single-valued request stands, by field name ("seccomp", "memory", …).
    where: tuple[tuple[str, KeyPath], ...] = ()
    scratch: Scratch | None = None
    memory_files: tuple[MemoryFile, ...] = ()


class Denial(NamedTuple):
    """One request that was refused."""

    rule: str  # stable id: denylist, read_ceiling, network_ceiling, env_ceiling, …
    asked: str  # the manifest's request, as a person would write it
    reason: str  # one sentence
    hint: str = ""  # what to do about it
    required: bool = True  # denying a required request refuses the launch
    where: KeyPath = ()
    # Where the request came from, if not from the manifest: "policy", "the program", "the plugin's folder", …
    origin: str = ""


class Project(NamedTuple):
    """The folder a program works on, if it is not the program's own."""

    path: str
    named: bool = False  # named as its working directory: it is granted, or the launch is refused
    where: KeyPath = ()
    within: str = ""  # it may be chosen only below this folder; empty: anywhere
    refusal: str = ""  # why it is not offered
    hint: str = ""


class GrantedPath(NamedTuple):
    path: str  # absolute, tokens expanded
    access: Access
    required: bool
    origin: str  # that of its request, "policy" or "state"
    where: KeyPath = ()
    file: bool = False  # a folder of this name is refused


class Grant(NamedTuple):
    """Spec ∩ Policy: everything the plugin gets, and one Denial for each thing cut."""

    policy: str
    unsandboxed: bool
    paths: tuple[GrantedPath, ...]
    network: Network
    env: tuple[tuple[str, str], ...]
    seccomp: SeccompProfile
    limits: Limits
    # (limit name, "manifest" | "policy" | "command line") for each limit that is set, and ("network",
    # "environment") where a contract's own variable gave more than the policy would.
    decided_by: tuple[tuple[str, str], ...]
    denials: tuple[Denial, ...]
    scratch: Scratch | None = None
    memory_files: tuple[MemoryFile, ...] = ()

    @property
    def scratch_bytes(self) -> int | None:
        """The size of the scratch folder; None: there is none."""
        return None if self.scratch is None else self.limits.disk or DEFAULT_SCRATCH_BYTES

    @property
    def refused(self) -> tuple[Denial, ...]:
        """The denials that stop the launch."""
        return tuple(d for d in self.denials if d.required)


def is_variable_name(name: str) -> bool:
    """Whether an environment variable can be called this, in every shell: [A-Za-z_][A-Za-z0-9_]*"""
    return name.isascii() and name.isidentifier()
