"""Compile a Grant into a LaunchPlan: open every source, and decide what is mounted where.

The same request on the same files gives the same plan.
"""

from __future__ import annotations

import os
import stat

from sandbox import look
from sandbox.cache import fingerprint
from sandbox.identity.host_side import host_side
from sandbox.network import ssh as ssh_places
from sandbox.network.egress import EgressPlan
from sandbox.network.ssh import SshPlan
from sandbox.paths import program as programs
from sandbox.paths.access import require_access
from sandbox.paths.denied_paths import normal
from sandbox.paths.denylist import Denylist
from sandbox.paths.executable import ProgramFault
from sandbox.paths.file_identity import FileIdentity
from sandbox.paths.mounts import contains
from sandbox.paths.scan import SourceRefused
from sandbox.paths.source import OpenSource, SourceMissing, open_source
from sandbox.paths.walk import LinkRefused, TooManyLinks, resolve
from sandbox.plan import mentions
from sandbox.plan.layers import Layers, LayerUnavailable
from sandbox.plan.operations import RUNTIME_LINKS, RUNTIME_TREES, operations, visibility_check
from sandbox.plan.places import ShownPlace, require_safe_places, state_link, working_directory
from sandbox.plan.plan import (
    OVERLAID,
    STAGED,
    Bind,
    Guard,
    Idmapped,
    LaunchPlan,
    OpenPlan,
    Operation,
    Overlay,
    PlanRefused,
    PlanRequest,
    ShownPath,
    Symlink,
    missing_note,
)
from sandbox.plan.relocation import Relocation, relocate
from sandbox.plan.ssh import plan_ssh
from sandbox.policy.policy import RUNTIME_PATHS, Policy
from sandbox.spec import INSIDE_ID, Access, Denial, Grant, KeyPath, Note
from sandbox.speed.scopes import contextmanager
from sandbox.speed.typed import TYPE_CHECKING, Collection, Iterable, Iterator, Mapping, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.plan.image import ImageCage
    from sandbox.plan.owners import Decision, WriteRequest


_PLUGIN_FOLDER = "the plugin's folder"
_PROJECT = "the project"
IMAGE = "the image"
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
    """Compile `grant` for `request`. The sources stay open until the context ends. Raises PlanRefused.

    Nothing on the machine is changed. A state directory that does not exist yet is made and opened by the
    launch (sources.py).
    """
    opened: dict[str, _OpenedPath] = {}
    try:
        plan = _compile(request, grant, policy, layers, denylist, environ, opened)
        yield OpenPlan(plan, {dest: held.source.fd for dest, held in opened.items()})
    finally:
        for held in opened.values():
            held.source.close()


class _WantedPath(NamedTuple):
    path: str
    access: Access
    required: bool
    origin: str
    trusted: bool = False
    where: KeyPath = ()
    file: bool = False  # it must not be a folder
    moved_to: str = ""  # its path in the cage, if that is another
    within: str = ""  # its real path must be below this one
    follow: bool = False  # as in its request

    @property
    def dest(self) -> str:
        return self.moved_to or self.path


class _OpenedPath(NamedTuple):
    source: OpenSource
    access: Access
    where: KeyPath
    moved_from: str = ""


def _compile(
    request: PlanRequest,
    grant: Grant,
    policy: Policy,
    layers: Layers,
    denylist: Denylist,
    environ: Mapping[str, str],
    opened: dict[str, _OpenedPath],
) -> LaunchPlan:
    egress, ssh = plan_egress(grant, policy), plan_ssh(grant, environ)
    relocation = relocate(request)
    wanted, state = _wanted(request, grant, relocation), _state_wanted(request, grant)
    overlaid = _overlaid(request, grant, state)
    root, image = None, request.image
    package = overlaid or ("" if image is None else image.package)
    if package:
        wanted.append(_WantedPath(package, "read", True, "the program"))
    if image is not None:
        from sandbox.plan.image import image_cage, image_directory, image_program, link_denials

        dests = [want.dest for want in (*wanted, *state)]
        found = image_program(request, image, dests, relocation)
        root = image_cage(image, grant, dests, layers.uid_range)
        wanted = [*_image_wanted(root), *wanted]
        links = list(root.links)
    else:
        found = relocation.program(_resolve_program(request, wanted, policy, denylist, environ), request)
        wanted += _program_wanted(found, relocation)
        links = [Symlink(path, look.readlink(path)) for path in RUNTIME_LINKS if look.islink(path)]
        links += [Symlink(link.path, link.target) for link in found.links]

    notes = [Note("program", note) for note in found.notes]
    if root is not None and image is not None:
        notes.append(root.note(image))
    folder = (request.root_inside if request.root_is_copy else request.root) or ""
    shown = tuple(_open_all(wanted, policy, denylist, opened, notes, folder))
    _judge_state(state, denylist)
    env = _environment(request, grant, found, ssh)
    if request.state_link and any(want.path == request.state_dir for want in state):
        # An image with a layer is mounted at the root: what it has not can be made.
        home, shown_at = dict(env).get("HOME", ""), [*opened, *(want.path for want in state)]
        shown_at = [dest for dest in shown_at if dest != "/"]
        link, untold = state_link(request, home, shown_at, links)
        links += link
        notes += untold
    if overlaid and not _may_be_overlaid(overlaid, opened):
        overlaid = ""
    _judge_places(request, grant, opened, state, links, overlaid, root)
    owners = _owners(request, policy, layers, opened)
    own = {request.root, *(_real(part.path) for part in relocation.parts)}
    _require_readable(_binds(opened), own, found, layers, owners)
    if owners is not None:
        notes += [Note("owner", note) for note in owners.notes()]
    staged = _staged(opened, owners) if grant.staged else {}
    notes += _staged_notes(grant, staged)
    guards = _guards(opened, denylist, request, staged)
    if guards:
        from sandbox.plan.guards import guard_notes, shown_guards

        shown += tuple(shown_guards(guards))
        notes += guard_notes(guards)
    shown += tuple(_open_all(state, policy, denylist, opened, notes))
    states = {overlaid: OVERLAID, **dict.fromkeys(staged, STAGED)}
    shown = tuple(each._replace(state=states.get(each.path, each.state)) for each in shown)

    binds = _with_state_to_make(_binds(opened, staged), shown)
    mounted = operations(request, grant, binds, links, ssh, root)
    if root is not None and image is not None and (refusals := link_denials(image, root, mounted)):
        raise PlanRefused(refusals)
    asked_binds = [bind for bind in binds if root is None or bind.dest not in root.dests]
    directory = working_directory(request, asked_binds, relocation)
    if (
        image is not None and root is not None and directory == "/tmp"
    ):  # nothing of the host that is shown has it
        directory = image_directory(image, root, dests)
    notes += _missing_notes(shown)
    notes += _mentions(request, grant, found, env, directory, mounted, denylist, environ)
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
        notes=tuple(notes),
        program_files=found.files,
        scripts=found.scripts,
        owners=owners,
        idmapped=tuple(_idmapped(owners, opened, {want.path for want in state}, staged)),
        egress=egress,
        ssh=ssh,
        guards=guards,
        overlays=(
            *_overlays(request, overlaid),
            *(Overlay(dest, "", owner) for dest, owner in staged.items()),
            *(() if root is None or not root.layer_bytes else (Overlay("/", "", None, root.layer_bytes),)),
        ),
        inside=(INSIDE_ID, INSIDE_ID) if image is None else (image.uid, image.gid),
        image="" if image is None else image.reference,
    )


def _image_wanted(root: ImageCage) -> Iterator[_WantedPath]:
    for part in root.parts:
        yield _WantedPath(part.path, "read", True, IMAGE, trusted=True, moved_to=part.dest)
    for part in root.authorities:
        yield _WantedPath(part.path, "read", False, "the system", trusted=True, moved_to=part.dest)


# --- which paths ------------------------------------------------------------------------------------------


def _wanted(request: PlanRequest, grant: Grant, relocation: Relocation) -> list[_WantedPath]:
    """The paths to show, without the state directory and what the program needs."""
    wanted = [] if request.image is not None else list(_runtime())
    shown_anyway = [*RUNTIME_LINKS, *(want.path for want in wanted)]
    places = dict(request.image.places) if request.image is not None else {}
    for part in relocation.parts:
        # Optional if parts are named: the contract took them from the manifest without looking at files.
        want = _WantedPath(part.path, "read", not request.root_parts, _PLUGIN_FOLDER, within=relocation.real)
        wanted.append(want._replace(moved_to="" if part.dest == part.path else part.dest))
    for asked in grant.paths:
        covered = asked.access == "read" and any(contains(path, asked.path) for path in shown_anyway)
        if covered and asked.required and not look.lexists(asked.path):
            covered = False  # opened below, and reported as missing
        dest = places.get(asked.path, "")
        if not dest and request.image is not None:  # of the system's runtime an image has its own
            covered = any(contains(path, asked.path) for path in RUNTIME_PATHS)
        if asked.origin != "state" and not covered:
            want = _WantedPath(asked.path, asked.access, asked.required, asked.origin, False, asked.where)
            moved_to = "" if dest == asked.path else dest
            wanted.append(want._replace(file=asked.file, follow=asked.follow, moved_to=moved_to))
    project = request.project
    if (
        project is not None
        and not project.refusal
        and not any(contains(path, project.path) for path in shown_anyway)
    ):
        wanted.append(_WantedPath(project.path, "read", project.named, _PROJECT, where=project.where))
    return wanted


def _program_wanted(found: programs.Program, relocation: Relocation) -> Iterator[_WantedPath]:
    for tree in found.trees:
        want = _WantedPath(tree, "read", True, "the program", tree.startswith("/usr/"))
        yield want._replace(moved_to=relocation.place(tree)) if relocation.moves(tree) else want


def _runtime() -> Iterator[_WantedPath]:
    trees = RUNTIME_TREES + tuple(path for path in RUNTIME_LINKS if not path.startswith("/etc"))
    for path in trees:
        if look.lexists(path) and not look.islink(path):
            yield _WantedPath(path, "read", True, "the system", trusted=True)


def _state_wanted(request: PlanRequest, grant: Grant) -> list[_WantedPath]:
    """The state directory, or the parts of it that are asked for. The whole directory includes its parts."""
    asked = [
        _WantedPath(path.path, path.access, True, "state", trusted=True, where=path.where)
        for path in grant.paths
        if path.origin == "state"
    ]
    whole = [want for want in asked if want.path == request.state_dir and want.access == "write"]
    return whole[:1] or asked


def _overlaid(request: PlanRequest, grant: Grant, state: Iterable[_WantedPath]) -> str:
    """The folder that it may change in an overlay, or ''. What it changes is state."""
    if not request.overlaid or grant.unsandboxed or request.state_dir is None:
        return ""
    overlaid = _real(request.overlaid)
    # A file that is hidden in it would be a mount point in what the plugin can change.
    hides = any(contains(overlaid, path) for path in request.conceal)
    kept = any(want.path == request.state_dir and want.access == "write" for want in state)
    return overlaid if kept and not hides else ""


def _may_be_overlaid(folder: str, opened: Mapping[str, _OpenedPath]) -> bool:
    """Not if an earlier version stored it with modes that keep its owner from writing, or if a part of it has
    a mount of its own."""
    if not opened[folder].source.identity.mode & stat.S_IWUSR:
        return False
    return not any(dest != folder and contains(folder, dest) for dest in opened)


def _overlays(request: PlanRequest, overlaid: str) -> tuple[Overlay, ...]:
    """Each folder has changes of its own: another version of a package is another folder, and changes of
    other files than those would hide or mix them."""
    if not overlaid or request.state_dir is None:
        return ()
    name = fingerprint(os.fsencode(overlaid))[:16]
    return (Overlay(overlaid, f"{host_side(request.state_dir)}/overlays/{name}"),)


def _staged(opened: Mapping[str, _OpenedPath], owners: Decision | None) -> dict[str, tuple[int, int]]:
    """The folders that it may change in a layer only, with the owner of what is new there. Raises
    PlanRefused."""
    found, refusals = {}, []

    def refuse(dest: str, held: _OpenedPath, why: str, hint: str) -> None:
        refusals.append(
            Denial("staged", dest, f"writes to {dest} cannot be staged: {why}", hint, where=held.where)
        )

    for dest, held in opened.items():
        if held.access != "write":
            continue
        ownership = None if owners is None else owners.of(dest)
        if held.source.kind != "dir":
            refuse(dest, held, "it is a file", "ask for the folder that it is in")
        elif ownership is not None and ownership.method != "idmapped":
            hint = "chown it to an ordinary user, on a filesystem with idmapped mounts"
            refuse(dest, held, ownership.why, hint)
        elif ownership is not None:
            found[dest] = ownership.uid, ownership.gid
        else:
            found[dest] = held.source.uid, held.source.gid
    if refusals:
        raise PlanRefused(refusals)
    return found


def _staged_notes(grant: Grant, staged: Mapping[str, object]) -> Iterator[Note]:
    if grant.staged and not staged:
        yield Note(
            "staged", "it may write to no folder of yours, so there is nothing to stage", "use --write"
        )


def _resolve_program(
    request: PlanRequest,
    wanted: Sequence[_WantedPath],
    policy: Policy,
    denylist: Denylist,
    environ: Mapping[str, str],
) -> programs.Program:
    def denied(path: str) -> str | None:
        hit = denylist.name_hit(path, "read")
        return hit.sentence() if hit is not None else None

    found = programs.resolve(
        request.command,
        request.args,
        directory=request.directory,
        search_path=request.search_path or environ.get("PATH") or programs.SYSTEM_PATH,
        roots=[_real(want.path) for want in wanted],
        rules=programs.ShowRules(denied, lambda path: policy.may_read(path)),
        trusted=request.trusted_command,
        environ=environ,
    )
    _require_approved(request, found)
    return found


def _require_approved(request: PlanRequest, found: programs.Program) -> None:
    """Raise ProgramFault if a person's approval is for another program."""
    program, *chosen = request.approved_program or (found.argv[0], *found.chosen)
    strays = [each for each in found.chosen if each not in chosen]
    if found.argv[0] != program or strays:
        would = found.argv[0] if found.argv[0] != program else strays[0]
        raise ProgramFault(
            f"{would} would run, and what was allowed is for {', '.join(request.approved_program)}",
            "write the program's full path into the configuration, and allow it again",
            found=True,
            denied=True,
        )


def _real(path: str) -> str:
    try:
        return look.realpath(path)
    except OSError:  # a magic link of /proc; opening it will report that
        return path


# --- whether they may be shown, and who owns them -----------------------------------------------------------


def _judge_state(state: Iterable[_WantedPath], denylist: Denylist) -> None:
    """Check the state directory before anything is made or changed there. Raises PlanRefused."""
    refusals = []
    for want in state:
        try:
            open_source(
                want.path, access=want.access, denylist=denylist, trusted=True, own_state=True
            ).close()
        except SourceMissing:
            continue
        except SourceRefused as refused:
            refusals.append(
                Denial(
                    refused.rule, refused.asked, refused.reason, "choose another directory with --state-dir"
                )
            )
    if refusals:
        raise PlanRefused(refusals)


def _judge_places(
    request: PlanRequest,
    grant: Grant,
    opened: Mapping[str, _OpenedPath],
    state: Iterable[_WantedPath],
    links: Sequence[Symlink],
    overlaid: str,
    root: ImageCage | None,
) -> None:
    if root is not None and request.image is not None:
        from sandbox.plan.image import nested_denials, place_denials

        opened = {dest: held for dest, held in opened.items() if dest not in root.own_dests}
        folders = [dest for dest, held in opened.items() if held.source.kind == "dir"]
        files = [dest for dest, held in opened.items() if held.source.kind == "file"]
        folders += [want.dest for want in state]
        shown = {dest: held.source.real for dest, held in opened.items() if held.source.kind == "dir"}
        moved = {dest for dest, held in opened.items() if held.moved_from}
        refusals = place_denials(request.image, grant, folders, files)
        if refusals or (refusals := [*nested_denials(shown, folders, files, moved)]):
            raise PlanRefused(refusals)
    places = [
        ShownPlace(dest, "write" if dest == overlaid else held.access, held.where, bool(held.moved_from))
        for dest, held in opened.items()
    ]
    places += [ShownPlace(want.path, want.access, want.where) for want in state]
    require_safe_places(places, links, request, grant)


def _guards(
    opened: Mapping[str, _OpenedPath], denylist: Denylist, request: PlanRequest, staged: Collection[str]
) -> tuple[Guard, ...]:
    """Nobody outside obeys what is in a layer: it is judged when it is applied (sandbox/staged). What cannot
    be guarded is refused all the same: a guarded link to a file that would be applied as any other."""
    written = [(dest, held.source, held.where) for dest, held in opened.items() if held.access == "write"]
    if not written:
        return ()
    from sandbox.plan.guards import all_guards

    with look.looked_at_again("what is guarded in folders that can be written is looked at each time"):
        found = all_guards(written, denylist, request.conceal)
    return tuple(each for each in found if each.dest not in staged)


def _with_state_to_make(binds: Sequence[Bind], shown: Iterable[ShownPath]) -> list[Bind]:
    """The binds in the order of their mounts, with those of folders that the launch makes."""
    made = [
        Bind(path.path, path.path, True, FileIdentity(0, 0, 0, 0))
        for path in shown
        if path.state == "made at launch"
    ]
    # A folder comes before what is in it.
    return sorted((*binds, *made), key=lambda bind: (bind.dest.count("/"), bind.dest))


def _mentions(
    request: PlanRequest,
    grant: Grant,
    found: programs.Program,
    env: Sequence[tuple[str, str]],
    directory: str,
    mounted: Sequence[Operation],
    denylist: Denylist,
    environ: Mapping[str, str],
) -> Iterable[Note]:
    """Notes about paths that its arguments or variables name and its cage does not show."""
    # Variables that the plugin did not ask for.
    unasked = [_STATE_DIR_VARIABLE, "HOME", *dict(found.env)]
    if "PATH" not in dict(grant.env):  # set by us, for the program's own folders
        unasked.append("PATH")
    whole = () if request.project is None else (request.project.path,)
    visible = visibility_check(mounted, (*whole, request.root_inside) if request.root_inside else whole)
    if request.image is not None:
        from sandbox.paths.in_tree import find_in_tree

        tree, shown = request.image.tree, visible

        def visible(path: str) -> bool:  # what it names may be the image's
            return shown(path) or find_in_tree(tree, path) is not None

    return mentions.unshown_path_notes(
        found.argv[1:],
        [pair for pair in env if pair[0] not in unasked],
        directory=request.directory,
        inside=directory,
        home=environ.get("HOME", ""),
        visible=visible,
        denied=lambda path: denylist.name_hit(path, "read") is not None,
        by_options=request.by_options,
        by_approval=request.by_approval,
    )


def _write_requests(opened: Mapping[str, _OpenedPath]) -> list[WriteRequest]:
    from sandbox.plan.owners import WriteRequest

    # By its path in the cage, which is another where an image has a place for it.
    return [
        WriteRequest(held.source._replace(path=normal(dest)), held.where)
        for dest, held in opened.items()
        if held.access == "write"
    ]


def _owners(
    request: PlanRequest, policy: Policy, layers: Layers, opened: Mapping[str, _OpenedPath]
) -> Decision | None:
    """Decide who owns what the plugin writes. None if no uid is dropped: then the caller owns it."""
    if layers.uid_range is None or not any(held.access == "write" for held in opened.values()):
        return None
    from sandbox.plan.owners import decide

    owners = decide(
        _write_requests(opened),
        policy,
        layers.uid_range,
        state_dir=request.state_dir,
        reserved_for=request.reserved_for,
    )
    if owners.denials:
        raise PlanRefused(owners.denials)
    return owners


def _idmapped(
    owners: Decision | None,
    opened: Mapping[str, _OpenedPath],
    state: Collection[str],
    staged: Collection[str],
) -> Iterator[Idmapped]:
    if owners is None:
        return
    for each in owners.paths:
        if each.method == "idmapped" and each.path not in staged:
            yield Idmapped(each.path, each.uid, each.gid)
    if owners.maps_state:
        for path in state:
            if (held := opened.get(path)) is not None:
                yield Idmapped(path, held.source.uid, held.source.gid)


def _binds(opened: Mapping[str, _OpenedPath], staged: Collection[str] = ()) -> list[Bind]:
    """A staged folder is a read-only one with an overlay: should that be missing, nothing is written."""
    return [
        Bind(
            dest,
            held.source.real,
            held.access == "write" and dest not in staged,
            held.source.identity,
            held.moved_from,
        )
        for dest, held in opened.items()
    ]


def _open_all(
    wanted: Iterable[_WantedPath],
    policy: Policy,
    denylist: Denylist,
    opened: dict[str, _OpenedPath],
    notes: list[Note],
    folder: str = "",
) -> Iterator[ShownPath]:
    """Open each path once, for writing if it is wanted for reading and writing. All refusals are raised
    together. `folder`: the program's own, as people know it."""
    refusals: list[Denial] = []
    pending = list(wanted)[::-1]
    while pending:
        want = pending.pop()
        known = opened.get(want.dest)
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
        except SourceMissing:
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
                    "create it, or do not ask for it",
                    where=want.where,
                )
            )
        except SourceRefused as refused:
            if want.origin == _PROJECT and not want.required:
                # Nobody asked for the project, so refusing it is only a note.
                notes.append(Note("project", f"the project {want.path} is not shown: {refused.reason}"))
                continue
            if want.follow and refused.rule == "symlink":
                real = _own_target(want.path)
                # A plugin may have made a link of the caller's: a folder above what it leads to is no yes.
                if real != want.path and policy.names_readable(real):
                    pending.append(want._replace(path=real, moved_to=want.path, follow=False))
                else:
                    notes.append(_not_followed(want.path, real, refused.reason, folder))
                continue
            refusals.append(_refusal(want, refused))
        else:
            if want.file and source.kind != "file":
                source.close()
                reason = f"{want.path} is a folder, and a program was asked for"
                refusals.append(Denial("not_a_file", want.path, reason, "name the file", where=want.where))
                continue
            if want.within and not contains(want.within, source.real):
                source.close()
                reason = f"{want.path} leads to {source.real}, out of the plugin's folder"
                hint = "put the files themselves into the folder instead of a link"
                refusals.append(Denial("root_part", want.path, reason, hint, origin=want.origin))
                continue
            if known is not None:
                known.source.close()
            opened[want.dest] = _OpenedPath(
                source, want.access, want.where, want.path if want.moved_to else ""
            )
            yield ShownPath(want.path, want.access, want.origin, "bound", want.moved_to)
    if refusals:
        raise PlanRefused(refusals)


def _own_target(path: str) -> str:
    """Where a path leads by links of root's and of the caller's own. The path itself, if others could change
    one."""
    try:
        return resolve(path, follow="own")
    except (OSError, LinkRefused, TooManyLinks):
        return path


def _not_followed(path: str, real: str, reason: str, folder: str) -> Note:
    hint = "put the folder itself there instead of the link"
    if real != path:
        import shlex

        command = f"{shlex.join(('runner', 'allow', folder, '--read', real))}, or " if folder else ""
        hint = (
            f'allow the folder that it leads to as well: {command}"{real}" in ceiling under [read] '
            "of the policy"
        )
    return Note("link", f"{path} is not shown: {reason}", hint)


def _missing_notes(shown: Iterable[ShownPath]) -> Iterator[Note]:
    for path in shown:
        if path.state == "missing" and path.origin not in (_PROJECT, _PLUGIN_FOLDER):
            yield missing_note(path.path, path.origin)


def _refusal(want: _WantedPath, refused: SourceRefused) -> Denial:
    """The denial for one path, with the origin of the request."""
    denial = Denial(refused.rule, refused.asked, refused.reason, refused.hint, where=want.where)
    if want.origin in ("manifest", "command line"):
        return denial
    denial = denial._replace(origin=want.origin)
    if want.origin == _PLUGIN_FOLDER and refused.rule == "denylist":
        return denial._replace(
            reason=f"the plugin's own folder cannot be shown to it: {refused.reason}",
            hint="move the plugin to a folder of its own, for example below /opt",
        )
    if refused.rule == "scan_limit":
        # The manifest does not name this path, so it cannot ask for a narrower one.
        remedy = "move the files it does not need elsewhere, or raise scan_limit in your policy"
        return denial._replace(reason=f"{want.origin} is {want.path}; {refused.reason}", hint=remedy)
    return denial


def _environment(
    request: PlanRequest, grant: Grant, found: programs.Program, ssh: SshPlan | None
) -> tuple[tuple[str, str], ...]:
    env: dict[str, str] = {}
    path = ":".join((*found.path_dirs, programs.SYSTEM_PATH))
    if request.image is not None:
        env = {"PATH": path, "HOME": request.image.home, **dict(request.image.env)}
        if request.state_dir is not None:
            env[_STATE_DIR_VARIABLE] = request.state_dir
    elif not request.bare_environment:
        env = {"PATH": path, "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        if request.state_dir is not None:
            env[_STATE_DIR_VARIABLE] = request.state_dir
    elif found.path_dirs:
        env = {"PATH": path}  # for scripts that start with #!/usr/bin/env
    env.update(found.env)
    env.update(grant.env)
    if ssh is not None:
        env["SSH_AUTH_SOCK"] = f"{ssh_places.FOLDER}/{ssh_places.SOCKET}"
    return tuple(sorted(env.items()))


def _require_readable(
    binds: Sequence[Bind],
    own: Collection[str | None],
    found: programs.Program,
    layers: Layers,
    owners: Decision | None,
) -> None:
    """Raise Unreadable unless the plugin's uid can read its files. `own`: its folder, or the parts of it.

    Only the first uid of the range is tried: all of them have the same access to files of others.
    """
    uid = layers.uid_range[0] if layers.uid_range is not None else os.geteuid()
    gid = uid if layers.uid_range is not None else os.getegid()
    if owners is not None and owners.account is not None:
        uid, gid = owners.account.uid, owners.account.gid
    # If a uid is dropped, owners.py has already tried writing.
    writes = 0o2 if layers.uid_range is None else 0
    needed = [
        (bind.real, (0o5 if stat.S_ISDIR(bind.identity.mode) else 0o4) | (writes if bind.writable else 0))
        for bind in binds
        if owners is None or owners.of(bind.dest) is None  # owners.py has tried the others
    ]
    needed += [(path, 0o5) for path in found.files]
    needed += [(path, 0o4) for path in found.scripts]
    require_access(needed, uid, gid, own={*own, *found.trees, *found.files, *found.scripts})


# --- what the gate lets through -----------------------------------------------------------------------------


_EVERY_HOST = "*:*"


def plan_egress(grant: Grant, policy: Policy) -> EgressPlan | None:
    """What the gate lets through; None if no gate is needed. Raises LayerUnavailable if this machine cannot
    enforce it."""
    network = grant.network
    if grant.unsandboxed or network.mode not in ("allowlist", "open"):
        return None
    # Beside every host, the ports of this machine that were named.
    rules = (_EVERY_HOST, *network.hosts) if network.mode == "open" else network.hosts
    if not rules:
        return None  # an empty list is no network
    rule = policy.network
    broker = None
    if grant.credentials or any(" " in each for each in rules):
        from sandbox.plan.brokered import split_requests

        rules, broker = split_requests(rules, grant)
    egress = EgressPlan(rules, rule.private, rule.limits, every_port=_has_every_port(rules), broker=broker)
    if egress.every_port:
        _require_redirect(egress)
    return egress


def _has_every_port(rules: tuple[str, ...]) -> bool:
    from sandbox.network.rules import EVERY_PORT, parse_rules

    return any(rule.ports == EVERY_PORT for rule in parse_rules(rules, ranges=True))


def _require_redirect(egress: EgressPlan) -> None:
    """Raise LayerUnavailable if nftables cannot redirect every port. Tried, because not every kernel can."""
    from sandbox.network.recipe import find_recipe
    from sandbox.network.trial import RecipeRefusal, try_recipe

    try:
        try_recipe(find_recipe(egress))
    except RecipeRefusal as refused:
        named = next((rule for rule in egress.rules if rule.endswith(":*")), egress.rules[0])
        raise LayerUnavailable(
            "network",
            f"{named} allows every port, and this machine cannot redirect every port to the gate: {refused}",
            "list the ports, as in example.com:443,8000-8010; or use a kernel built with CONFIG_NF_TABLES, "
            "CONFIG_NFT_NAT and CONFIG_NFT_REDIR",
        ) from None
