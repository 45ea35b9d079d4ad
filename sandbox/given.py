"""Values of sandbox/spec.py that outlive the decision: a launch from a stored plan needs no others."""

from __future__ import annotations

from sandbox.typed import Literal
from sandbox.value import NamedTuple

# "open": every host by name, but not the private ranges and not this machine.
NetworkMode = Literal["none", "allowlist", "open", "host"]
SeccompProfile = Literal["strict", "default", "compat"]
ProjectAccess = Literal["none", "read"]  # to the folder a program works on


class Limits(NamedTuple):
    """Limits. None means no request; sizes in bytes, times in seconds."""

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
    # Clocks, by phase. runner exec passes streams on unread, and sees only launch, teardown and deadline.
    launch: float | None = None
    handshake: float | None = None
    call: float | None = None
    idle: float | None = None
    teardown: float | None = None
    deadline: float | None = None  # the whole run


class MemoryFile(NamedTuple):
    """A file in the cage that exists only in memory. Its content is handed over at the launch, and is in no
    plan, cache or report."""

    dest: str  # absolute, in the cage; in the scratch folder, or on the cage's read-only root
    mode: int = 0o400
    secret: str = ""  # the name of the operator's secret that it holds; empty: the call brings the content


class Note(NamedTuple):
    """A fact about a launch that a person should know, although nothing was refused."""

    # Stable id: unsandboxed, network_host, network_open, outside, missing, program, owner, project, network,
    # withheld, wrapped, approval, limits.
    rule: str
    message: str
    hint: str = ""

    @property
    def urgent(self) -> bool:
        """Whether it is shown even if nothing failed."""
        urgent = ("unsandboxed", "network_host", "network_open", "outside", "project", "withheld")
        return self.rule in (*urgent, "wrapped", "approval", "limits")


class Overrides(NamedTuple):
    """The operator's options on the command line, for this launch."""

    env: tuple[tuple[str, str], ...] = ()
    pass_env: tuple[str, ...] = ()
    limits: Limits = Limits()


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

    @property
    def is_empty(self) -> bool:
        return self == Approval()
