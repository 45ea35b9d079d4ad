"""LaunchPlan: everything about a launch that can be known before it.

A plan is a value: the same request on the same files gives the same bytes. It records the identity (device,
inode) of the files it mounts. Descriptors and the leased uid are not in it; they are filled in at launch. The
values of granted variables are in it, so a plan is as secret as they are.
"""

from __future__ import annotations

from sandbox.network.ssh import FOLDER
from sandbox.spec import INSIDE_ID, Limits, MemoryFile, Note, SeccompProfile
from sandbox.speed.typed import TYPE_CHECKING, Literal, Mapping, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.identity.overlay import OpenOverlay
    from sandbox.network.egress import EgressPlan
    from sandbox.network.ssh import SshPlan
    from sandbox.paths.file_identity import FileIdentity
    from sandbox.plan.layers import Layers
    from sandbox.plan.owners import Decision
    from sandbox.spec import Access, Denial, ImageRoot, Project
    from sandbox.staged.store import OpenLayer

OWN_PLACES = ("/", "/tmp")  # every cage has its own
OVERLAID = "overlaid"  # read-only, and the plugin may change what it sees
STAGED = "staged"  # the same, and a person decides afterwards what of it becomes real


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
    inodes: int = 0  # 0: the kernel's default, half the number of memory pages
    is_scratch: bool = False  # at the end it is checked whether it was full: then the disk limit was reached


class Text(NamedTuple):
    """A small file that we write, on the cage's read-only root."""

    dest: str
    content: bytes
    covers: bool = False  # it is mounted over a file of a bind


class Symlink(NamedTuple):
    dest: str
    target: str


class Mask(NamedTuple):
    """A file hidden under /dev/null. On a nodev mount it cannot be opened at all."""

    dest: str


class Proc(NamedTuple):
    dest: str = "/proc"


class Dev(NamedTuple):
    dest: str = "/dev"


class ReadOnly(NamedTuple):
    """Remount read-only. Comes after everything that is created below."""

    dest: str


class AgentFolder(NamedTuple):
    """The folder with the socket of the ssh agent. It is made at the launch (sandbox/spawn/agent.py)."""

    dest: str = FOLDER


# A MemoryFile is an operation too: its content comes with the launch (sandbox/cell/contents.py).
Operation = Bind | Tmpfs | Text | MemoryFile | Symlink | Mask | Proc | Dev | ReadOnly | AgentFolder


class ShownPath(NamedTuple):
    """A path and why it is in the cage, for people."""

    path: str
    access: Access
    origin: str
    state: str  # "bound" | "missing" | "made at launch" | OVERLAID
    inside: str = ""  # its path in the cage, if that is another


class Idmapped(NamedTuple):
    """A bind that is mounted so that one uid and gid of the host appear as the plugin's."""

    dest: str
    uid: int
    gid: int


class Guard(NamedTuple):
    """A path in a writable bind that is a mount of its own."""

    dest: str  # of the bind
    path: str  # below it
    # "write": a folder on the way to another guard, which can be written but not renamed. "hidden": under
    # /dev/null, like a Mask.
    access: Literal["read", "write", "hidden"]
    # "optional": skipped if it does not exist any more at the launch. "link": a symbolic link, which is not
    # mounted: the plugin could make a new one as well. The search at the end knows it.
    state: Literal["bound", "optional", "made at launch", "link"]
    content: str | None = None  # of a file that is made; None: a folder


class Overlay(NamedTuple):
    """A read-only bind that the plugin may change as far as it sees: the changes are kept elsewhere, and the
    source stays as it is. Where no overlay can be mounted, it is an ordinary read-only bind."""

    dest: str  # of the bind
    # The folder of the host that keeps them (sandbox/identity/overlay.py). Of staged writes it is made at the
    # launch (sandbox/staged/store.py).
    changes: str
    # Of staged writes: the owner of the folder, who appears as the plugin. Without the overlay there is no
    # launch.
    staged_for: tuple[int, int] | None = None
    # Bytes of a layer in memory, in the place of `changes`: of an image, which has no launch without it.
    memory: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether what it takes is there again at the next launch."""
        return self.staged_for is None and not self.memory


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
    owners: Decision | None = None  # of what it writes to the host; None: the caller owns it
    idmapped: tuple[Idmapped, ...] = ()
    egress: EgressPlan | None = None  # what the gate lets through; None: there is no gate
    guards: tuple[Guard, ...] = ()  # in the order in which they are mounted
    overlays: tuple[Overlay, ...] = ()
    ssh: SshPlan | None = None  # what its ssh agent serves; None: it has none
    inside: tuple[int, int] = (INSIDE_ID, INSIDE_ID)  # the uid and gid that it sees as its own
    image: str = ""  # reference of the image that is its root; empty: the system's files are

    def without_overlays(self, why: str) -> LaunchPlan:
        """The same with read-only binds, for a machine that cannot mount overlays."""
        hint = "it works without, unless it writes there: `runner doctor` says what this machine can do"
        bare = {each.dest for each in self.overlays if each.is_kept}
        return self._replace(
            overlays=tuple(each for each in self.overlays if not each.is_kept),
            shown=tuple(
                each._replace(state="bound") if each.path in bare and each.state == OVERLAID else each
                for each in self.shown
            ),
            notes=(
                *self.notes,
                *(Note("overlay", f"{dest} stays read-only: {why}", hint) for dest in sorted(bare)),
            ),
        )

    @property
    def staged(self) -> tuple[Overlay, ...]:
        return tuple(each for each in self.overlays if each.staged_for is not None)

    @property
    def memory_files(self) -> tuple[MemoryFile, ...]:
        return tuple(op for op in self.operations if isinstance(op, MemoryFile))

    @property
    def folders(self) -> tuple[Tmpfs, ...]:
        """The temporary folders with a limit on inodes, which bwrap cannot set. Last, those of layers in
        memory: they are in no cage themselves."""
        found = [op for op in self.operations if isinstance(op, Tmpfs) and op.inodes]
        layers = [each for each in self.overlays if each.memory]
        for each in layers:
            found.append(Tmpfs(changes_of(each.dest), each.memory, 0o755, each.memory >> 12))
        return tuple(found)

    @property
    def filters(self) -> tuple[bytes, ...]:
        """The system call filters of this launch."""
        main = self.layers.seccomp_filter
        if not main:
            return ()
        return main, *self._disk_filters()

    def _disk_filters(self) -> tuple[bytes, ...]:
        writes = bool(self.overlays) or any(isinstance(op, Bind) and op.writable for op in self.operations)
        if self.limits.disk is None or not writes:
            return ()
        from sandbox.seccomp.filter import machine_arch
        from sandbox.seccomp.preallocation import no_preallocation

        return (no_preallocation(machine_arch()),)


def changes_of(dest: str) -> str:
    """The name of the folder with the changes of an overlay. Without a slash: it is no destination."""
    return f"changes of {dest}"


class PlanRefused(Exception):
    """The plan cannot be made within the policy. `denials` say why."""

    def __init__(self, denials: Sequence[Denial]) -> None:
        super().__init__("; ".join(denial.reason for denial in denials))
        self.denials = tuple(denials)


class PlanOutdated(Exception):
    """A source is not what the plan was made for. The plan has to be made again."""


class PlanRequest(NamedTuple):
    """What to run. It knows nothing of plugins."""

    command: str
    args: tuple[str, ...]
    directory: str
    root: str | None  # the program's own folder
    bare_environment: bool
    trusted_command: bool  # the operator wrote the command line, not the plugin's author
    conceal: tuple[str, ...]  # real paths that must not be read from inside
    state_dir: str | None
    project: Project | None = None
    # The state directory it would have, if it has none: a uid can be reserved for that.
    reserved_for: str = ""
    root_inside: str = ""  # path of `root` in the cage; '': the same
    root_is_copy: bool = False  # a copy of the folder `root_inside` of the host, mounted in its place
    # Only these files and folders of `root` are shown, as far as they exist; empty: all of it.
    root_parts: tuple[str, ...] = ()
    by_options: bool = False  # options of the command line ask for paths, not a manifest
    by_approval: bool = False  # the command is from a configuration of the operator's: `allow` grants paths
    search_path: str = ""  # PATH for `command`; '': the caller's
    # The approval is for this program and its script, as `programs.locate` finds them; empty: for any.
    approved_program: tuple[str, ...] = ()
    state_link: str = ""  # a name below HOME in the cage that leads to the state directory, if it is granted
    overlaid: str = ""  # a folder that it may change in an overlay, if it has the whole state directory
    image: ImageRoot | None = None  # that is stored, in place of the system's files


class OpenPlan(NamedTuple):
    """A plan with its sources held open: what was checked is what will be mounted."""

    plan: LaunchPlan
    descriptors: Mapping[str, int]  # by destination
    overlays: Mapping[str, OpenOverlay | OpenLayer] = {}  # noqa: RUF012 -- nobody changes it; by destination

    @property
    def writable(self) -> Mapping[str, int]:
        """The descriptors of folders and files that the plugin may write."""
        binds = (op for op in self.plan.operations if isinstance(op, Bind) and op.writable)
        found = {bind.dest: self.descriptors[bind.dest] for bind in binds if bind.dest in self.descriptors}
        return {**found, **{dest: held.upper for dest, held in self.overlays.items()}}


def missing_note(path: str, origin: str = "manifest") -> Note:
    from sandbox.spec import APPROVED

    who = origin if origin == APPROVED else f"the {origin}"
    message = f"{path}, which {who} asks for, does not exist on this machine"
    return Note("missing", message, "create it if the plugin needs it")
