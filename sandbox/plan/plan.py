"""Grant -> LaunchPlan: everything about a launch that can be known before it.

A plan is a value: the same request on the same files gives the same bytes. What it trusts, it names by
identity. Descriptors and the leased uid are not in it; they are filled in at launch. The values of granted
variables are in it, so a plan is as secret as they are.
"""

from __future__ import annotations

from sandbox.spec import Limits, MemoryFile, Note, SeccompProfile
from sandbox.speed.typed import TYPE_CHECKING, Literal, Mapping, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.network.egress import EgressPlan
    from sandbox.paths.file_identity import FileIdentity
    from sandbox.plan.layers import Layers
    from sandbox.plan.owners import Decision
    from sandbox.spec import Access, Denial, Project

OWN_PLACES = ("/", "/tmp")  # which every cage has, and of its own


class Bind(NamedTuple):
    dest: str
    real: str
    writable: bool
    identity: FileIdentity
    moved_from: str = ""  # its name on the host, if that is not `dest`

    @property
    def path(self) -> str:
        """Its name on the host, as asked."""
        return self.moved_from or self.dest


class Tmpfs(NamedTuple):
    dest: str
    size: int
    mode: int
    inodes: int = 0  # 0: as many as the kernel thinks right, which is half as many as the machine has pages
    is_scratch: bool = False  # whether it was full is told at the end: then the disk limit was met


class Text(NamedTuple):
    """A small file of our own making, on the cage's read-only root."""

    dest: str
    content: bytes


class Symlink(NamedTuple):
    dest: str
    target: str


class Mask(NamedTuple):
    """A file hidden under /dev/null; on a nodev mount that refuses to be opened at all."""

    dest: str


class Proc(NamedTuple):
    dest: str = "/proc"


class Dev(NamedTuple):
    dest: str = "/dev"


class ReadOnly(NamedTuple):
    """Remount: nothing is created below from here on."""

    dest: str


# A MemoryFile is an operation too: its content comes with the launch (sandbox/cell/contents.py).
Operation = Bind | Tmpfs | Text | MemoryFile | Symlink | Mask | Proc | Dev | ReadOnly


class ShownPath(NamedTuple):
    """A line of the table a person reads: one path and why it is in the cage."""

    path: str
    access: Access
    origin: str
    state: str  # "bound" | "missing" | "made at launch"
    inside: str = ""  # where it is in the cage, if not under its own name


class Idmapped(NamedTuple):
    """A bind of its own mount, in which one host uid and gid are the plugin's."""

    dest: str
    uid: int
    gid: int


class Guard(NamedTuple):
    """A path in a writable bind that is a mount of its own."""

    dest: str  # of the bind
    path: str  # below it
    # "write": a folder on the way to another guard. It can be written, and not be renamed. "hidden": under
    # /dev/null, like a Mask.
    access: Literal["read", "write", "hidden"]
    # "optional": left out if it is gone by then.
    state: Literal["bound", "optional", "made at launch"]
    content: str | None = None  # of what is made; None: a folder


class LaunchPlan(NamedTuple):
    argv: tuple[str, ...]
    directory: str
    env: tuple[tuple[str, str], ...]
    operations: tuple[Operation, ...]
    share_network: bool
    layers: Layers
    seccomp: SeccompProfile
    limits: Limits
    shown: tuple[ShownPath, ...]
    notes: tuple[Note, ...]
    program_files: tuple[str, ...]
    scripts: tuple[str, ...]
    owners: Decision | None = None  # of what it writes to folders of the host, where no owner is the caller
    idmapped: tuple[Idmapped, ...] = ()
    egress: EgressPlan | None = None  # what the gate lets through; None: there is no gate
    guards: tuple[Guard, ...] = ()  # in the order in which they are mounted

    @property
    def memory_files(self) -> tuple[MemoryFile, ...]:
        return tuple(op for op in self.operations if isinstance(op, MemoryFile))

    @property
    def folders(self) -> tuple[Tmpfs, ...]:
        """The temporary folders with a limit on inodes, which bwrap cannot set."""
        return tuple(op for op in self.operations if isinstance(op, Tmpfs) and op.inodes)

    @property
    def filters(self) -> tuple[bytes, ...]:
        """The system call filters of this launch."""
        main = self.layers.seccomp_filter
        if not main:
            return ()
        if self.owners is not None and self.seccomp == "compat":
            from sandbox.seccomp.filter import machine_arch
            from sandbox.seccomp.preallocation import no_io_uring

            return main, no_io_uring(machine_arch()), *self._disk_filters()
        return main, *self._disk_filters()

    def _disk_filters(self) -> tuple[bytes, ...]:
        if self.limits.disk is None or not any(
            isinstance(op, Bind) and op.writable for op in self.operations
        ):
            return ()
        from sandbox.seccomp.filter import machine_arch
        from sandbox.seccomp.preallocation import no_preallocation

        return (no_preallocation(machine_arch()),)


class PlanRefused(Exception):
    """The plan cannot be made within the policy: `denials` say what stands in the way."""

    def __init__(self, denials: Sequence[Denial]) -> None:
        super().__init__("; ".join(denial.reason for denial in denials))
        self.denials = tuple(denials)


class PlanRequest(NamedTuple):
    """What is to be run, without any word of what a plugin is."""

    command: str
    args: tuple[str, ...]
    directory: str
    root: str | None  # the program's own folder
    bare_environment: bool
    trusted_command: bool  # the command line is the operator's own, not a stranger's
    conceal: tuple[str, ...]  # real paths that must not be read from inside
    state_dir: str | None
    project: Project | None = None
    reserved_for: str = (
        ""  # the state directory it would have, if it has none: a uid can be reserved for that
    )
    root_inside: str = ""  # where `root` is in the cage; empty: under its own name
    root_is_copy: bool = False  # of the folder `root_inside` of the host, whose place it takes
    # Only these files and folders of `root` are shown, as far as they exist; empty: all of it.
    root_parts: tuple[str, ...] = ()
    by_options: bool = False  # the command line asks for paths, and no manifest
    search_path: str = ""  # where `command` is looked up; empty: on the caller's PATH
    # A person allowed this program with what else is chosen, as `programs.locate` finds both; empty: any.
    approved_program: tuple[str, ...] = ()


class OpenPlan(NamedTuple):
    """A plan with its sources held open: what was looked at is what will be mounted."""

    plan: LaunchPlan
    descriptors: Mapping[str, int]  # by destination

    @property
    def writable(self) -> Mapping[str, int]:
        """Those of folders and files the plugin may write."""
        binds = (op for op in self.plan.operations if isinstance(op, Bind) and op.writable)
        return {bind.dest: self.descriptors[bind.dest] for bind in binds if bind.dest in self.descriptors}


def missing_note(path: str, origin: str = "manifest") -> Note:
    from sandbox.spec import APPROVED

    who = origin if origin == APPROVED else f"the {origin}"
    message = f"{path}, which {who} asks for, does not exist on this machine"
    return Note("missing", message, "create it if the plugin needs it")
