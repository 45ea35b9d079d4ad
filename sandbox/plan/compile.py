"""Grant -> LaunchPlan: open every source, decide what is mounted where, and refuse what cannot be.

The same request on the same files gives the same plan.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sandbox.paths import program as programs
from sandbox.paths.access import require_access
from sandbox.paths.denylist import Denylist
from sandbox.paths.mounts import contains
from sandbox.paths.source import FileIdentity, Missing, OpenSource, Refused, open_source
from sandbox.plan import mentions
from sandbox.plan.egress import plan_egress
from sandbox.plan.layers import Layers
from sandbox.plan.operations import RUNTIME_LINKS, RUNTIME_TREES, operations, sight_of
from sandbox.plan.plan import (
    OWN_PLACES,
    Bind,
    Idmapped,
    LaunchPlan,
    OpenPlan,
    PlanRefused,
    PlanRequest,
    ShownPath,
    Symlink,
    missing_note,
)
from sandbox.policy.policy import Policy
from sandbox.spec import Access, Denial, Grant, KeyPath, Note
from sandbox.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.plan.owners import Decision, WriteRequest

_PLUGIN_FOLDER = "the plugin's folder"
_PROJECT = "the project"
_STATE_DIR_VARIABLE = "RUNNER_STATE_DIR"


@contextmanager
def open_plan(
    request: PlanRequest,
    grant: Grant,
    policy: Policy,
    layers: Layers,
    denylist: Denylist,
    environ: Mapping[str, str],
) -> Iterator[OpenPlan]:
    """Compile `grant` for `request`. The sources stay open for as long as the context lasts.

    Nothing on the machine is changed. A state directory that does not exist yet is made by the launch, and
    opened there (sources.py).
    """
    opened: dict[str, _Opened] = {}
    try:
        plan = _compile(request, grant, policy, layers, denylist, environ, opened)
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
    file: bool = False  # and no folder


class _Opened(NamedTuple):
    source: OpenSource
    access: Access
    where: KeyPath


def _compile(
    request: PlanRequest,
    grant: Grant,
    policy: Policy,
    layers: Layers,
    denylist: Denylist,
    environ: Mapping[str, str],
    opened: dict[str, _Opened],
) -> LaunchPlan:
    egress = plan_egress(grant, policy)
    wanted = list(_runtime())
    links = [Symlink(path, os.readlink(path)) for path in RUNTIME_LINKS if os.path.islink(path)]
    if request.root is not None:
        wanted.append(_Wanted(request.root, "read", True, _PLUGIN_FOLDER))
    shown_anyway = [*RUNTIME_LINKS, *(want.path for want in wanted if want.origin == "the system")]
    for asked in grant.paths:
        covered = asked.access == "read" and any(contains(path, asked.path) for path in shown_anyway)
        if covered and asked.required and not os.path.lexists(asked.path):
            covered = False  # opened below, and reported as missing
        if asked.origin != "state" and not covered:
            want = _Wanted(asked.path, asked.access, asked.required, asked.origin, False, asked.where)
            wanted.append(want._replace(file=asked.file))
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
    shown = tuple(_open_all(wanted, policy, denylist, opened, notes))
    _judge_state(state, denylist)
    _refuse_unsafe_places(opened, state)
    _require_directory(request, opened, state)
    owners = _owners(request, policy, layers, opened)
    _require_readable(_binds(opened), request.root, found, layers, owners)
    if owners is not None:
        notes += [Note("owner", note) for note in owners.notes()]
    shown += tuple(_open_all(state, policy, denylist, opened, notes))

    binds = _binds(opened)
    binds += [
        Bind(path.path, path.path, True, FileIdentity(0, 0, 0, 0))
        for path in shown
        if path.state == "made at launch"
    ]
    binds.sort(key=lambda bind: (bind.dest.count("/"), bind.dest))  # what contains another comes first
    mounted = operations(request, grant, binds, links)
    env = _environment(request, grant, found)
    directory = _directory(request, binds)
    return LaunchPlan(
        argv=found.argv,
        directory=directory,
        env=env,
        operations=mounted,
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
                # These say nothing about what the plugin wants.
                [pair for pair in env if pair[0] not in (_STATE_DIR_VARIABLE, "HOME")],
                directory=request.directory,
                inside=directory,
                home=environ.get("HOME", ""),
                visible=sight_of(mounted, () if project is None else (project.path,)),
            ),
        ),
        program_files=found.files,
        scripts=found.scripts,
        owners=owners,
        idmapped=tuple(_idmapped(owners, opened, {want.path for want in state})),
        egress=egress,
    )


def _written(opened: Mapping[str, _Opened]) -> list[WriteRequest]:
    from sandbox.plan.owners import WriteRequest

    return [WriteRequest(held.source, held.where) for held in opened.values() if held.access == "write"]


def _owners(
    request: PlanRequest, policy: Policy, layers: Layers, opened: Mapping[str, _Opened]
) -> Decision | None:
    """Who will own what the plugin writes. None if no uid is dropped: then the caller does."""
    if layers.uid_range is None or not any(held.access == "write" for held in opened.values()):
        return None
    from sandbox.plan.owners import decide

    owners = decide(
        _written(opened),
        policy,
        layers.uid_range,
        state_dir=request.state_dir,
        reserved_for=request.reserved_for,
    )
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


def _state_wanted(request: PlanRequest, grant: Grant) -> list[_Wanted]:
    """The state directory, or the parts of it that are asked for. All of it includes the parts."""
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
                Denial(
                    refused.rule, refused.asked, refused.reason, "choose another directory with --state-dir"
                )
            )
    if refusals:
        raise PlanRefused(refusals)


def _runtime() -> Iterator[_Wanted]:
    trees = RUNTIME_TREES + tuple(path for path in RUNTIME_LINKS if not path.startswith("/etc"))
    for path in trees:
        if os.path.lexists(path) and not os.path.islink(path):
            yield _Wanted(path, "read", True, "the system", trusted=True)


def _resolve_program(
    request: PlanRequest,
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
    except OSError:  # a magic link into another process; opening it will report that
        return path


def _open_all(
    wanted: Iterable[_Wanted],
    policy: Policy,
    denylist: Denylist,
    opened: dict[str, _Opened],
    notes: list[Note],
) -> Iterator[ShownPath]:
    """Open each path once; if one is wanted twice, writing wins. All refusals are raised together."""
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
            if want.origin == "state":  # the launch makes it
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
                    "create it, or remove it from the manifest",
                    where=want.where,
                )
            )
        except Refused as refused:
            if want.origin == _PROJECT and not want.required:
                # The project is offered, not asked for.
                notes.append(Note("project", f"the project {want.path} is not shown: {refused.reason}"))
                continue
            refusals.append(_refusal(want, refused))
        else:
            if want.file and source.kind != "file":
                source.close()
                reason = f"{want.path} is a folder, and a program was asked for"
                refusals.append(Denial("not_a_file", want.path, reason, "name the file", where=want.where))
                continue
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


def _require_directory(request: PlanRequest, opened: Mapping[str, _Opened], state: Iterable[_Wanted]) -> None:
    """A working directory that somebody named is there, or nothing starts: elsewhere a program would read and
    write other files than it was meant to."""
    project = request.project
    if project is None or not project.named or request.directory in OWN_PLACES:
        return
    places = (*opened, *(want.path for want in state), *RUNTIME_LINKS)
    if any(contains(place, request.directory) for place in places):
        return
    reason = f"it is the working directory, and the plugin is not shown it: {project.refusal}"
    raise PlanRefused([Denial("project", project.path, reason, project.hint, where=project.where)])


def _refusal(want: _Wanted, refused: Refused) -> Denial:
    """The denial for one path, with the origin of the request."""
    denial = Denial(refused.rule, refused.asked, refused.reason, refused.hint, where=want.where)
    if want.origin == "manifest":
        return denial
    denial = denial._replace(origin=want.origin)
    if want.origin == _PLUGIN_FOLDER and refused.rule == "denylist":
        return denial._replace(
            reason=f"the plugin's own folder cannot be shown to it: {refused.reason}",
            hint="move the plugin to a folder of its own, for example below /opt",
        )
    if refused.rule == "scan_limit":
        # The manifest does not name this path, so it cannot ask for less of it.
        remedy = "move the files it does not need elsewhere, or raise scan_limit in your policy"
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
                        "ask for a writable folder that contains no other path of the manifest",
                        where=asked_at or where,
                    )
                )
    if refusals:
        raise PlanRefused(refusals)


def _directory(request: PlanRequest, binds: Iterable[Bind]) -> str:
    inside = any(contains(bind.dest, request.directory) for bind in binds)
    if request.project is not None and request.project.named:
        linked = any(contains(place, request.directory) for place in RUNTIME_LINKS)
        inside = inside or linked or request.directory in OWN_PLACES
    return request.directory if inside else "/tmp"


def _environment(request: PlanRequest, grant: Grant, found: programs.Program) -> tuple[tuple[str, str], ...]:
    env: dict[str, str] = {}
    path = ":".join((*found.path_dirs, programs.SYSTEM_PATH))
    if not request.bare_environment:
        env = {"PATH": path, "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        if request.state_dir is not None:
            env[_STATE_DIR_VARIABLE] = request.state_dir
    elif found.path_dirs:
        env = {"PATH": path}  # without it the script's `env` would not find its interpreter
    env.update(grant.env)
    return tuple(sorted(env.items()))


def _require_readable(
    binds: Sequence[Bind], root: str | None, found: programs.Program, layers: Layers, owners: Decision | None
) -> None:
    """Raise Unreadable unless the plugin's uid can read its files.

    All uids of the range have the same rights on files that are not theirs: the first one stands for all.
    """
    uid = layers.uid_range[0] if layers.uid_range is not None else os.geteuid()
    gid = uid if layers.uid_range is not None else os.getegid()
    if owners is not None and owners.account is not None:
        uid, gid = owners.account.uid, owners.account.gid
    # If a uid is dropped, write permission was tried already (owners.py).
    writes = 0o2 if layers.uid_range is None else 0
    needed = [
        (bind.real, (0o5 if stat.S_ISDIR(bind.identity.mode) else 0o4) | (writes if bind.writable else 0))
        for bind in binds
        if owners is None or owners.of(bind.dest) is None  # which has been tried, with more than reading
    ]
    needed += [(path, 0o5) for path in found.files]
    needed += [(path, 0o4) for path in found.scripts]
    require_access(needed, uid, gid, own={root, *found.trees, *found.files, *found.scripts})
