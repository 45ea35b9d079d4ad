"""Grant -> LaunchPlan: everything about a launch that can be known before it.

A plan is a value: the same request on the same files gives the same bytes. What it trusts, it names by
identity. Descriptors, the leased uid and secrets are not in it; they are filled in at launch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sandbox.paths import program as programs
from sandbox.paths.access import unreachable
from sandbox.paths.denylist import Denylist
from sandbox.paths.mounts import contains, join, relative
from sandbox.paths.source import Identity, Missing, Refused, Source, open_source
from sandbox.plan import mentions
from sandbox.plan.layers import Layers, LayerUnavailable
from sandbox.policy.policy import Policy
from sandbox.seccomp import filter as seccomp_filter
from sandbox.spawn.order import FOLDERS_ROOT
from sandbox.spec import Access, Denial, Grant, KeyPath, Limits, Network, Note, Project, SeccompProfile
from sandbox.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.plan.owners import Asked, Decision

DEFAULT_TMP = 64 << 20
DEFAULT_SHM = 16 << 20

# The system's read-only runtime, as far as it exists here. Directories of the old layout (/bin, /lib, …)
# are links on a merged system and become the same links inside.
_RUNTIME_TREES = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/pki/tls/certs")
_RUNTIME_LINKS = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32", "/etc/localtime")
_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/services")
_NETWORK_FILE_LIMIT = 1 << 20

# World-readable or merely root-only parts of a procfs that tell about the host and not about the plugin.
# And of the cage's own init: its memory still holds bwrap's options and the host's mount table.
PROC_MASKS = (
    *("kallsyms", "kcore", "keys", "timer_list", "interrupts", "sched_debug", "kmsg"),
    *("1/mem", "1/task/1/mem"),
)

_PASSWD = b"root:x:0:0:root:/:/usr/sbin/nologin\nnobody:x:65534:65534:plugin:/tmp:/usr/sbin/nologin\n"
_GROUP = b"root:x:0:\nnogroup:x:65534:\n"
_HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"
_NSSWITCH = b"passwd: files\ngroup: files\nhosts: files\n"


_PLUGIN_FOLDER = "the plugin's folder"
_PROJECT = "the project"
OWN_PLACES = ("/", "/tmp")  # which every cage has, and of its own


class Bind(NamedTuple):
    dest: str
    real: str
    writable: bool
    identity: Identity


class Tmpfs(NamedTuple):
    dest: str
    size: int
    mode: int
    inodes: int = 0  # 0: as many as the kernel thinks right, which is half as many as the machine has pages


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


Operation = Bind | Tmpfs | Text | Symlink | Mask | Proc | Dev | ReadOnly


class ShownPath(NamedTuple):
    """A line of the table a person reads: one path and why it is in the cage."""

    path: str
    access: Access
    origin: str
    state: str  # "bound" | "missing" | "made at launch"


class Idmapped(NamedTuple):
    """A bind of its own mount, in which one host uid and gid are the plugin's."""

    dest: str
    uid: int
    gid: int


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

    @property
    def folders(self) -> tuple[Tmpfs, ...]:
        """The temporary folders whose inodes are bounded, which bwrap cannot do."""
        return tuple(op for op in self.operations if isinstance(op, Tmpfs) and op.inodes)

    @property
    def filters(self) -> tuple[bytes, ...]:
        """The system call filters of this launch."""
        main = self.layers.seccomp_filter
        if not main:
            return ()
        if self.owners is not None and self.seccomp == "compat":
            from sandbox.seccomp.preallocation import no_io_uring

            return main, no_io_uring(seccomp_filter.machine_arch()), *self._disk_filters()
        return main, *self._disk_filters()

    def _disk_filters(self) -> tuple[bytes, ...]:
        if self.limits.disk is None or not any(
            isinstance(op, Bind) and op.writable for op in self.operations
        ):
            return ()
        from sandbox.seccomp.preallocation import no_preallocation

        return (no_preallocation(seccomp_filter.machine_arch()),)


class PlanRefused(Exception):
    """The plan cannot be made within the policy: `denials` say what stands in the way."""

    def __init__(self, denials: Sequence[Denial]) -> None:
        super().__init__("; ".join(denial.reason for denial in denials))
        self.denials = tuple(denials)


class Unreadable(Exception):
    """A file the plugin needs and its uid cannot get at."""

    def __init__(self, path: str, uid: int, remedy: str, what: str = "read") -> None:
        super().__init__(f"{path} cannot be {what} by the plugin, which runs as uid {uid}")
        self.hint = remedy


class Request(NamedTuple):
    """What is to be run, without any word of what a plugin is."""

    command: str
    args: tuple[str, ...]
    directory: str
    root: str | None  # the program's own folder
    bare_environment: bool
    trusted_command: bool  # the command line is the operator's own, not a stranger's
    conceal: tuple[str, ...]  # real paths that must not be read from inside
    state_dir: str | None
    rehearse: bool = False  # for explanation only: a state directory need not exist yet
    project: Project | None = None
    reserved_for: str = ""  # the state directory it would have: a uid can be reserved for it all the same


class OpenPlan(NamedTuple):
    """A plan with its sources held open: what was looked at is what will be mounted."""

    plan: LaunchPlan
    descriptors: Mapping[str, int]  # by destination

    @property
    def writable(self) -> Mapping[str, int]:
        """Those of folders and files the plugin may write."""
        binds = (op for op in self.plan.operations if isinstance(op, Bind) and op.writable)
        return {bind.dest: self.descriptors[bind.dest] for bind in binds if bind.dest in self.descriptors}


@contextmanager
def open_plan(
    request: Request,
    grant: Grant,
    policy: Policy,
    layers: Layers,
    denylist: Denylist,
    environ: Mapping[str, str],
    claim: Callable[[Decision | None], int | None] = lambda owners: None,
) -> Iterator[OpenPlan]:
    """Compile `grant` for `request`; the sources stay open for as long as the context lasts.

    `claim` makes the state directory ready, and returns the plugin's uid. It is called when nothing else
    stands in the way any more: a launch that is refused changes nothing.
    """
    opened: dict[str, _Opened] = {}
    try:
        plan = _compile(request, grant, policy, layers, denylist, environ, claim, opened)
        yield OpenPlan(plan, {dest: held.source.fd for dest, held in opened.items()})
    finally:
        for held in opened.values():
            held.source.close()


class _Wanted(NamedTuple):
    path: str
    access: Access
    required: bool
    origin: str
    trusted: bool = False
    where: KeyPath = ()


class _Opened(NamedTuple):
    source: Source
    access: Access
    where: KeyPath


def _compile(
    request: Request,
    grant: Grant,
    policy: Policy,
    layers: Layers,
    denylist: Denylist,
    environ: Mapping[str, str],
    claim: Callable[[Decision | None], int | None],
    opened: dict[str, _Opened],
) -> LaunchPlan:
    require_enforceable(grant.network)
    wanted = list(_runtime())
    links = [Symlink(path, os.readlink(path)) for path in _RUNTIME_LINKS if os.path.islink(path)]
    if request.root is not None:
        wanted.append(_Wanted(request.root, "read", True, _PLUGIN_FOLDER))
    shown_anyway = [*_RUNTIME_LINKS, *(want.path for want in wanted if want.origin == "the system")]
    for asked in grant.paths:
        if asked.origin != "state" and (
            asked.access == "write" or not any(contains(path, asked.path) for path in shown_anyway)
        ):
            wanted.append(_Wanted(asked.path, asked.access, asked.required, asked.origin, where=asked.where))
    project = request.project
    if (
        project is not None
        and not project.refusal
        and not any(contains(path, project.path) for path in shown_anyway)
    ):
        wanted.append(_Wanted(project.path, "read", project.named, _PROJECT, where=project.where))
    state = _state_wanted(request, grant)

    found = _resolve_program(request, wanted, policy, denylist, environ)
    links += [Symlink(link.path, link.target) for link in found.links]
    wanted += [_Wanted(tree, "read", True, "the program", tree.startswith("/usr/")) for tree in found.trees]

    notes = [Note("program", note) for note in found.notes]
    shown = tuple(_open_all(wanted, policy, denylist, opened, notes, rehearse=False))
    _judge_state(state, denylist)
    _refuse_unsafe_places(opened, state)
    _require_directory(request, opened, state)
    owners = _owners(request, policy, layers, opened)
    _require_readable(_binds(opened), request.root, found, layers, owners)
    uid = claim(owners)
    if owners is not None and uid is not None and owners.left:
        owners = _allowed(owners.confirmed(_written(opened), uid))
    if owners is not None:
        notes += [Note("owner", note) for note in owners.notes()]
    shown += tuple(_open_all(state, policy, denylist, opened, notes, rehearse=request.rehearse))

    binds = _binds(opened)
    binds += [
        Bind(path.path, path.path, True, Identity(0, 0, 0, 0))
        for path in shown
        if path.state == "made at launch"
    ]
    binds.sort(key=lambda bind: (bind.dest.count("/"), bind.dest))  # what contains another comes first
    operations = _operations(request, grant, binds, links)
    env = _environment(request, grant, found)
    directory = _directory(request, binds)
    return LaunchPlan(
        argv=found.argv,
        directory=directory,
        env=env,
        operations=operations,
        share_network=grant.network.mode == "host",
        layers=layers,
        seccomp=grant.seccomp,
        limits=grant.limits,
        shown=shown,
        notes=(
            *notes,
            *_missing(shown),
            *mentions.outside(
                found.argv[1:],
                env,
                directory=request.directory,
                inside=directory,
                home=environ.get("HOME", ""),
                visible=_sight_of(operations),
            ),
        ),
        program_files=found.files,
        scripts=found.scripts,
        owners=owners,
        idmapped=tuple(_idmapped(owners, opened, {want.path for want in state})),
    )


def _written(opened: Mapping[str, _Opened]) -> list[Asked]:
    from sandbox.plan.owners import Asked

    return [Asked(held.source, held.where) for held in opened.values() if held.access == "write"]


def _owners(
    request: Request, policy: Policy, layers: Layers, opened: Mapping[str, _Opened]
) -> Decision | None:
    """Whose what it writes will be. Where no uid is dropped it is the caller's, as the plugin is."""
    if layers.uid_range is None or not any(held.access == "write" for held in opened.values()):
        return None
    from sandbox.plan.owners import decide

    return _allowed(
        decide(
            _written(opened),
            policy,
            layers.uid_range,
            state_dir=request.state_dir,
            reserved_for=request.reserved_for,
        )
    )


def _allowed(owners: Decision) -> Decision:
    if owners.denials:
        raise PlanRefused(owners.denials)
    return owners


def _idmapped(
    owners: Decision | None, opened: Mapping[str, _Opened], state: Collection[str]
) -> Iterator[Idmapped]:
    if owners is None:
        return
    for each in owners.paths:
        if each.method == "idmapped":
            yield Idmapped(each.path, each.uid, each.gid)
    if owners.maps_state:
        for path in state:
            if (held := opened.get(path)) is not None:
                yield Idmapped(path, held.source.uid, held.source.gid)


def _binds(opened: Mapping[str, _Opened]) -> list[Bind]:
    return [
        Bind(dest, held.source.real, held.access == "write", held.source.identity)
        for dest, held in opened.items()
    ]


def _state_wanted(request: Request, grant: Grant) -> list[_Wanted]:
    """The state directory, or what is asked of it; who has all of it needs no part of it beside."""
    asked = [
        _Wanted(path.path, path.access, True, "state", trusted=True, where=path.where)
        for path in grant.paths
        if path.origin == "state"
    ]
    whole = [want for want in asked if want.path == request.state_dir and want.access == "write"]
    return whole[:1] or asked


def _judge_state(state: Iterable[_Wanted], denylist: Denylist) -> None:
    """Before anything is made or changed there."""
    refusals = []
    for want in state:
        try:
            open_source(
                want.path, access=want.access, denylist=denylist, trusted=True, own_state=True
            ).close()
        except Missing:
            continue
        except Refused as refused:
            refusals.append(
                Denial(refused.rule, refused.asked, refused.reason, "choose another with --state-dir")
            )
    if refusals:
        raise PlanRefused(refusals)


def require_enforceable(network: Network | None) -> None:
    """Nothing asked or granted may be left out: what this version cannot enforce is not started."""
    if network is not None and network.mode == "allowlist":
        raise LayerUnavailable(
            "network",
            "the network allowlist cannot be enforced by this version",
            'ask for network = "deny", or for "host" under a policy that allows it',
        )


def _runtime() -> Iterator[_Wanted]:
    trees = _RUNTIME_TREES + tuple(path for path in _RUNTIME_LINKS if not path.startswith("/etc"))
    for path in trees:
        if os.path.lexists(path) and not os.path.islink(path):
            yield _Wanted(path, "read", True, "the system", trusted=True)


def _resolve_program(
    request: Request,
    wanted: Sequence[_Wanted],
    policy: Policy,
    denylist: Denylist,
    environ: Mapping[str, str],
) -> programs.Program:
    def denied(path: str) -> str | None:
        hit = denylist.name_hit(path, "read")
        return hit.sentence() if hit is not None else None

    return programs.resolve(
        request.command,
        request.args,
        directory=request.directory,
        search_path=environ.get("PATH") or programs.SYSTEM_PATH,
        roots=[_real(want.path) for want in wanted],
        sight=programs.Sight(denied, lambda path: policy.may_read(path)),
        trusted=request.trusted_command,
    )


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:  # a magic link into somebody else's process; opening it will say so
        return path


def _open_all(
    wanted: Iterable[_Wanted],
    policy: Policy,
    denylist: Denylist,
    opened: dict[str, _Opened],
    notes: list[Note],
    *,
    rehearse: bool,
) -> Iterator[ShownPath]:
    """Open each path once; where one is wanted twice, writing wins. All refusals are told at once."""
    refusals: list[Denial] = []
    for want in wanted:
        known = opened.get(want.path)
        if known is not None and (known.access == "write" or want.access == "read"):
            continue
        try:
            source = open_source(
                want.path,
                access=want.access,
                denylist=denylist,
                mounts=denylist.mounts,
                scan_limit=policy.scan_limit,
                trusted=want.trusted,
                own_state=want.origin == "state",
            )
        except Missing:
            if rehearse and want.origin == "state":
                yield ShownPath(want.path, want.access, want.origin, "made at launch")
                continue
            if not want.required:
                yield ShownPath(want.path, want.access, want.origin, "missing")
                continue
            refusals.append(
                Denial(
                    "missing_path",
                    want.path,
                    f"{want.path} does not exist",
                    "create it, or take it out of the manifest",
                    where=want.where,
                )
            )
        except Refused as refused:
            if want.origin == _PROJECT and not want.required:
                # An offer, which nobody asked for.
                notes.append(Note("project", f"the project {want.path} is not shown: {refused.reason}"))
                continue
            refusals.append(_refusal(want, refused))
        else:
            if known is not None:
                known.source.close()
            opened[want.path] = _Opened(source, want.access, want.where)
            yield ShownPath(want.path, want.access, want.origin, "bound")
    if refusals:
        raise PlanRefused(refusals)


def _missing(shown: Iterable[ShownPath]) -> Iterator[Note]:
    for path in shown:
        if path.state == "missing" and path.origin != _PROJECT:
            yield missing_note(path.path, path.origin)


def missing_note(path: str, origin: str = "manifest") -> Note:
    message = f"{path}, which the {origin} asks for, does not exist on this machine"
    return Note("missing", message, "if the plugin needs it, create it")


def _sight_of(operations: Iterable[Operation]) -> Callable[[str], bool]:
    """Whether an absolute path of the host leads to the same inside."""
    places = [op.dest for op in operations if isinstance(op, Bind | Symlink | Text)]
    return lambda path: any(contains(place, path) for place in places)


def _require_directory(request: Request, opened: Mapping[str, _Opened], state: Iterable[_Wanted]) -> None:
    """A working directory that somebody named is there, or nothing starts: elsewhere a program would read and
    write other files than it was meant to."""
    project = request.project
    if project is None or not project.named or request.directory in OWN_PLACES:
        return
    places = (*opened, *(want.path for want in state), *_RUNTIME_LINKS)
    if any(contains(place, request.directory) for place in places):
        return
    reason = f"it is to be the working directory and is not shown: {project.refusal}"
    raise PlanRefused([Denial("project", project.path, reason, project.hint, where=project.where)])


def _refusal(want: _Wanted, refused: Refused) -> Denial:
    """What stands in the way of one path, blamed on who wanted it."""
    denial = Denial(refused.rule, refused.asked, refused.reason, refused.hint, where=want.where)
    if want.origin == "manifest":
        return denial
    denial = denial._replace(origin=want.origin)
    if want.origin == _PLUGIN_FOLDER and refused.rule == "denylist":
        return denial._replace(
            reason=f"the plugin's folder cannot be shown to it: {refused.reason}",
            hint="move the plugin to a folder of its own elsewhere, such as /opt",
        )
    if refused.rule == "scan_limit":
        # Nobody asked for it by name, so nobody can ask for less of it.
        remedy = "move what it does not need elsewhere, or raise scan_limit in a policy of your own"
        return denial._replace(reason=f"{want.origin} is {want.path}; {refused.reason}", hint=remedy)
    return denial


def _refuse_unsafe_places(opened: Mapping[str, _Opened], state: Iterable[_Wanted]) -> None:
    """No mount point below a writable bind: bwrap before 0.12 follows links there, and an earlier run may
    have planted some."""
    refusals = []
    places = [(dest, held.access, held.where) for dest, held in opened.items()]
    places += [(want.path, want.access, want.where) for want in state]
    for above, access, where in places:
        if access == "read":
            continue
        for dest, _, asked_at in places:
            if dest != above and contains(above, dest):
                refusals.append(
                    Denial(
                        "below_writable",
                        dest,
                        f"{dest} would be mounted below {above}, which the plugin can write",
                        "ask for a writable folder that contains none of the other paths",
                        where=asked_at or where,
                    )
                )
    if refusals:
        raise PlanRefused(refusals)


def _operations(
    request: Request, grant: Grant, binds: Sequence[Bind], links: Iterable[Symlink]
) -> tuple[Operation, ...]:
    limits = grant.limits
    early = [bind for bind in binds if bind.dest in _RUNTIME_TREES or bind.dest in _RUNTIME_LINKS]
    masks = [Mask(f"/proc/{name}") for name in PROC_MASKS if os.path.lexists(f"/proc/{name}")]
    covered = {bind.dest for bind in binds}
    concealed = [
        Mask(join(bind.dest, relative(path, bind.real)))
        for path in request.conceal
        for bind in binds
        if not bind.writable and contains(bind.real, path)
    ]
    ways = dict.fromkeys(links)
    return (
        *early,
        *(link for link in ways if link.dest in _RUNTIME_LINKS),
        Proc(),
        *masks,
        # bwrap covers /proc/sys only where its caller could write to the folder itself, while the sysctls of
        # the plugin's own namespaces are writable one by one; so is its own oom_score_adj.
        ReadOnly("/proc"),
        Dev(),
        *(() if grant.seccomp == "compat" else _NO_TERMINALS),
        _folder("/dev/shm", limits.shm or DEFAULT_SHM),
        ReadOnly("/dev"),
        _folder("/tmp", limits.tmp or DEFAULT_TMP),
        *(link for link in ways if link.dest not in _RUNTIME_LINKS),  # after /tmp: some are below it
        *(bind for bind in binds if bind not in early),
        *dict.fromkeys(concealed),
        *(Text(dest, content) for dest, content in _texts(grant) if dest not in covered),
        ReadOnly("/"),
    )


# kernel.pty.max is one number for the whole machine: a plugin could take all pseudo-terminals there are.
_NO_TERMINALS = (Tmpfs("/dev/pts", 4096, 0o755), ReadOnly("/dev/pts"))

_BYTES_PER_INODE = 4096  # an empty file takes a kilobyte of the kernel's memory, and nothing of the size
_FEWEST_INODES = 1024


def _folder(dest: str, size: int) -> Tmpfs:
    bounded = os.path.isdir(FOLDERS_ROOT)  # not in a chroot that somebody made by hand
    return Tmpfs(dest, size, 0o1777, max(_FEWEST_INODES, size // _BYTES_PER_INODE) if bounded else 0)


def _texts(grant: Grant) -> Iterator[tuple[str, bytes]]:
    yield "/etc/passwd", _PASSWD
    yield "/etc/group", _GROUP
    if grant.network.mode != "host":
        yield "/etc/hosts", _HOSTS
        yield "/etc/nsswitch.conf", _NSSWITCH
        return
    # Copied and not bound: resolv.conf is often a link into /run, where daemons keep their sockets.
    for path in _NETWORK_FILES:
        try:
            with open(path, "rb") as file:
                yield path, file.read(_NETWORK_FILE_LIMIT)
        except OSError:
            continue


def _directory(request: Request, binds: Iterable[Bind]) -> str:
    inside = any(contains(bind.dest, request.directory) for bind in binds)
    if request.project is not None and request.project.named:
        linked = any(contains(place, request.directory) for place in _RUNTIME_LINKS)
        inside = inside or linked or request.directory in OWN_PLACES
    return request.directory if inside else "/tmp"


def _environment(request: Request, grant: Grant, found: programs.Program) -> tuple[tuple[str, str], ...]:
    env: dict[str, str] = {}
    path = ":".join((*found.path_dirs, programs.SYSTEM_PATH))
    if not request.bare_environment:
        env = {"PATH": path, "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        if request.state_dir is not None:
            env["RUNNER_STATE_DIR"] = request.state_dir
    elif found.path_dirs:
        env = {"PATH": path}  # without it the script's `env` would not find its interpreter
    env.update(grant.env)
    return tuple(sorted(env.items()))


def _require_readable(
    binds: Sequence[Bind], root: str | None, found: programs.Program, layers: Layers, owners: Decision | None
) -> None:
    """Every uid of the range has the same rights on what is not its own: the first stands for all."""
    uid = layers.uid_range[0] if layers.uid_range is not None else os.geteuid()
    gid = uid if layers.uid_range is not None else os.getegid()
    if owners is not None and owners.account is not None:
        uid, gid = owners.account.uid, owners.account.gid
    # Where a uid is dropped, who may write was tried already (owners.py).
    writes = 0o2 if layers.uid_range is None else 0
    needed = [
        (bind.real, (0o5 if stat.S_ISDIR(bind.identity.mode) else 0o4) | (writes if bind.writable else 0))
        for bind in binds
        if owners is None or owners.of(bind.dest) is None  # which has been tried, with more than reading
    ]
    needed += [(path, 0o5) for path in found.files]
    needed += [(path, 0o4) for path in found.scripts]
    own = {root, *found.trees, *found.files, *found.scripts}
    for path, bits in needed:
        blocked = unreachable(path, uid, gid, bits)
        if blocked == path and bits & 0o2:
            raise Unreadable(
                path, uid, f"chown {uid} {path}, or let the manifest ask for reading only", "written"
            )
        if blocked == path and path in own:
            raise Unreadable(path, uid, f"chmod {'o+rx' if bits & 1 else 'o+r'} {path}")
        if blocked == path:
            mode = "o+rx" if bits & 1 else "o+r"
            raise Unreadable(
                path, uid, f"let others read it (chmod {mode}, or an ACL for uid {uid}), or ask for less"
            )
        if blocked is not None:
            remedy = f"chmod o+x {blocked}, or move it to where everybody may enter, such as /opt"
            raise Unreadable(blocked, uid, remedy)
