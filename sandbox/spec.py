"""Values that describe the cage: requests, denials, grants.

Nothing here has an effect. Named tuples and not dataclasses, here and everywhere on the launch path:
importing `dataclasses` alone costs more than bubblewrap does.
"""

from __future__ import annotations

from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple

# Where a request stands in its document, as the keys that lead to it. Turned into file:line:column only for a
# message, so a launch without faults never scans for positions.
KeyPath = tuple[str | int, ...]

Access = Literal["read", "write"]
# "open": every host by name, but not the private ranges and not this machine.
NetworkMode = Literal["none", "allowlist", "open", "host"]
SeccompProfile = Literal["strict", "default", "compat"]
ProjectAccess = Literal["none", "read"]  # to the folder a program works on
Place = Literal["header", "query"]  # of a request

LITERAL, SLOT = ("literal",), ("slot",)  # Credential.source

# From least to most access: a ceiling admits everything up to and including itself.
NETWORK_ORDER: tuple[NetworkMode, ...] = ("none", "allowlist", "open", "host")
SECCOMP_ORDER: tuple[SeccompProfile, ...] = ("strict", "default", "compat")

# Under these profiles a program cannot make internet sockets, so a network is of no use to it.
SECCOMP_WITHOUT_INTERNET: tuple[SeccompProfile, ...] = ("strict",)

# The kernel refuses a single argument or variable of 32 pages or more (MAX_ARG_STRLEN).
ARGUMENT_LIMIT = 131072 - 1

STATE_DIR_TOKEN = "${state_dir}"
PLUGIN_DIR_TOKEN = "${plugin_dir}"  # the folder of its manifest

# The plugin's name server, in its own network namespace. Programs also ask there without an /etc/resolv.conf.
NAME_SERVER = "127.0.0.1", 53

INSIDE_ID = 65534  # the uid and gid that every plugin sees as its own, if it has no image: nobody

APPROVED = "your approval"  # origin of what a person granted beyond what the plugin asks


class PathRequest(NamedTuple):
    """One host path a plugin asks for. It appears inside under the same name."""

    path: str  # absolute; may start with STATE_DIR_TOKEN
    access: Access
    required: bool = True  # an optional path that does not exist is skipped and reported
    where: KeyPath = ()
    file: bool = False  # a folder of this name is refused
    origin: str = "manifest"  # who asks: also "command line" and APPROVED
    # Whether a link of the caller's own is followed if the policy or an approval names the very folder that
    # it leads to, and else left out. Without this a link refuses the launch.
    follow: bool = False


class Network(NamedTuple):
    mode: NetworkMode = "none"
    # "name:port" or "name:*", for mode allowlist; for mode open only "localhost:port". POLICY_HOSTS: the
    # plugin names none, and asks for those of the policy.
    hosts: tuple[str, ...] = ()
    where: KeyPath = ()
    required: bool = True  # False: without a grant the plugin runs with less network, or none


POLICY_HOSTS = ("*",)


def names_policy_hosts(asked: Network | None) -> bool:
    """Whether the plugin asks for the hosts of the policy, with or without hosts of its own."""
    return asked is not None and asked.mode == "allowlist" and POLICY_HOSTS[0] in asked.hosts


class EnvRequest(NamedTuple):
    """Variables a plugin wants: set by its manifest, or passed on from the host."""

    name: str
    value: str | None = None  # None: the host's own value is asked for
    required: bool = True
    where: KeyPath = ()
    # Set by the contract, which also makes the folder that it names. An operator cannot set another value.
    fixed: bool = False
    # The host's value is only filled into the plugin's arguments; the variable itself is not passed on.
    fills: bool = False


class Limits(NamedTuple):
    """Limits, in bytes and seconds. None: not requested."""

    memory: int | None = None  # of all processes together, with what they keep in /tmp and /dev/shm
    pids: int | None = None  # processes and threads, not counting those of the cage itself
    cpu: float | None = None  # cores
    cpu_time: float | None = None
    io: int | None = None  # bytes per second, for reading and for writing, on each disk it has files on
    open_files: int | None = None
    file_size: int | None = None
    locked_memory: int | None = None
    message_queues: int | None = None
    disk: int | None = None  # in each folder it may write
    tmp: int | None = None
    shm: int | None = None
    output: int | None = None
    output_lines: int | None = None
    # Clocks, by phase. `runner exec` does not read the streams, so it has only launch, teardown and deadline.
    launch: float | None = None
    handshake: float | None = None
    call: float | None = None
    idle: float | None = None
    teardown: float | None = None
    deadline: float | None = None  # the whole run


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


class MemoryFile(NamedTuple):
    """A file in the cage that exists only in memory. Its content is handed over at the launch, and is in no
    plan, cache or report."""

    dest: str  # absolute, in the cage; in the scratch folder, or on the cage's read-only root
    mode: int = 0o400
    secret: str = ""  # name of the operator's secret that it holds; '': the call supplies the content


class ImageRoot(NamedTuple):
    """An image that takes the place of the system's files: what was asked, and then what is stored of it."""

    reference: str  # as docker and podman write it, in full: docker.io/library/python:3.12
    where: KeyPath = ()
    starts_own: bool = False  # its own entry point, with `args` if there are any; else a command in it
    entrypoint: str | None = None  # in place of its own; empty: the first of `args` is the program
    args: tuple[str, ...] = ()  # in place of its own command
    user: str = ""  # USER or USER:GROUP, by its own files; empty: its own
    directory: str = ""  # the working directory; empty: its own
    places: tuple[tuple[str, str], ...] = ()  # paths of the host that have another path in the cage
    folders: tuple[str, ...] = ()  # in memory, empty
    read_only: bool = False  # there is no layer that takes what it changes
    package: str = ""  # a folder of the host with the program, if the image has only its interpreter
    tree: str = ""  # its files, on the host; empty: it is not installed
    uid: int = 0  # in the cage
    gid: int = 0
    home: str = "/"
    stop_signal: int = 15
    env: tuple[tuple[str, str], ...] = ()


class SandboxSpec(NamedTuple):
    """A manifest's requests for the cage."""

    enabled: bool = True  # False: the manifest prefers to run without any cage
    paths: tuple[PathRequest, ...] = ()
    network: Network | None = None  # None: not requested, so the policy's default holds
    env: tuple[EnvRequest, ...] = ()
    seccomp: SeccompProfile | None = None
    limits: Limits = Limits()
    # Position of each single-valued request, by field name ("seccomp", "memory", …).
    where: tuple[tuple[str, KeyPath], ...] = ()
    scratch: Scratch | None = None
    memory_files: tuple[MemoryFile, ...] = ()
    # A name below the plugin's HOME that leads to the state directory, if it is granted.
    state_link: str = ""
    staged: bool = False  # what it writes to folders of the host is kept apart until a person takes it
    hide: tuple[str, ...] = ()  # credentials that it uses and does not get: see sandbox/policy/credentials.py
    ssh: tuple[str, ...] = ()  # keys and hosts, as sandbox/network/ssh.py writes them
    # A folder with its program that it may change, if the whole state directory is granted: what it changes
    # is kept beside that, and the folder stays as it is.
    overlaid: str = ""
    image: ImageRoot | None = None


class Overrides(NamedTuple):
    """The operator's options on the command line, for this launch."""

    env: tuple[tuple[str, str], ...] = ()
    pass_env: tuple[str, ...] = ()
    limits: Limits = Limits()
    staged: bool = False
    hide: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    image: ImageRoot | None = None


class Approval(NamedTuple):
    """What a person allows one plugin beyond the policy's ceilings (sandbox/policy/approval.py)."""

    read: tuple[str, ...] = ()  # absolute paths; each stands for all below it
    write: tuple[str, ...] = ()
    network: NetworkMode = "none"
    hosts: tuple[str, ...] = ()  # entries of an allowlist, as sandbox/network/rules.py writes them
    env: tuple[str, ...] = ()  # names of the host's variables that are passed on
    steering: tuple[str, ...] = ()  # names of variables that decide which code runs, passed on or set
    seccomp: SeccompProfile = "strict"
    project: ProjectAccess = "none"
    staged: bool = False  # only if what it writes is staged
    hide: tuple[str, ...] = ()  # variables that are passed on only as placeholders, with their hosts
    ssh: tuple[str, ...] = ()  # keys of the person's ssh agent, and the hosts to log in at with them
    images: tuple[str, ...] = ()  # references of images that may be its root

    @property
    def is_empty(self) -> bool:
        return self == Approval()


class Denial(NamedTuple):
    """One request that was refused."""

    rule: str  # stable id: denylist, read_ceiling, network_ceiling, env_ceiling, …
    asked: str  # the manifest's request, as a person would write it
    reason: str  # one sentence
    hint: str = ""  # what to do about it
    required: bool = True  # denying a required request refuses the launch
    where: KeyPath = ()
    # Origin of the request, if not the manifest: "policy", "the program", "the plugin's folder", …
    origin: str = ""


class Note(NamedTuple):
    """A fact about a launch that a person should know, although nothing was refused."""

    # Stable id: unsandboxed, network_host, network_open, outside, missing, program, owner, project, network,
    # withheld, wrapped, dropped, approval, limits, state, link, overlay, image, guarded, staged, obeyed (of a
    # session, after its end).
    rule: str
    message: str
    hint: str = ""

    @property
    def urgent(self) -> bool:
        """Whether it is shown even if nothing failed."""
        urgent = ("unsandboxed", "network_host", "network_open", "outside", "project", "withheld")
        return self.rule in (*urgent, "wrapped", "dropped", "approval", "limits", "state", "link", "staged")


class Project(NamedTuple):
    """The folder a program works on, if it is not the program's own."""

    path: str
    named: bool = False  # requested as the working directory: if it is not granted, the launch is refused
    where: KeyPath = ()
    within: str = ""  # it must be below this folder; '': anywhere
    refusal: str = ""  # reason why it is not shown
    hint: str = ""


class GrantedPath(NamedTuple):
    path: str  # absolute, tokens expanded
    access: Access
    required: bool
    origin: str  # that of its request, "policy" or "state"
    where: KeyPath = ()
    file: bool = False  # a folder of this name is refused
    follow: bool = False  # as in its request


class Credential(NamedTuple):
    name: str  # of the variable in the cage, or of the secret that a file in memory has
    # For whom its value is: rules as sandbox/network/rules.py writes them. Never every name.
    hosts: tuple[str, ...]
    where: tuple[Place, ...] = ("header",)  # where a placeholder is replaced
    # Where its value is: ("env", NAME), ("file", PATH) or ("command", WORD, ...); LITERAL: in the manifest or
    # on the command line; SLOT: the secret of a file in memory. Empty: the host's variable of the same name.
    source: tuple[str, ...] = ()
    keep: float = 0.0  # seconds for which the answer of a command counts


class HostAuthorities(NamedTuple):
    """Roots that some hosts may have beside the system's, by the word of a policy's credential."""

    hosts: tuple[str, ...]  # rules
    files: tuple[str, ...]


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
    staged: bool = False
    # Of each of these, `env` has an empty value: the launch puts a placeholder there.
    credentials: tuple[Credential, ...] = ()
    authorities: tuple[HostAuthorities, ...] = ()  # of the policy's credentials among these
    ssh: tuple[str, ...] = ()  # keys, and the hosts to log in at with them; none without the other

    @property
    def scratch_bytes(self) -> int | None:
        """Size of the scratch folder; None without one."""
        return None if self.scratch is None else self.limits.disk or DEFAULT_SCRATCH_BYTES

    @property
    def refused(self) -> tuple[Denial, ...]:
        """The denials that stop the launch."""
        return tuple(d for d in self.denials if d.required)


def is_variable_name(name: str) -> bool:
    """Whether this is a valid variable name in every shell: [A-Za-z_][A-Za-z0-9_]*"""
    return name.isascii() and name.isidentifier()
