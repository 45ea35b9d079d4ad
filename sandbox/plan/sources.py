"""The sources that a finished plan cannot hold: the state directory, and what a stored plan's plugin writes.

A plan names each source by path and identity. `open_state` opens the state directory, which may not exist
before the launch has claimed it. `with_state` puts what was opened into the plan.
"""

from __future__ import annotations

import os
import stat

from sandbox.paths.denied_paths import normal
from sandbox.paths.mounts import join
from sandbox.paths.scan import SourceRefused
from sandbox.paths.source import OpenSource, SourceMissing, look_inside, open_source
from sandbox.plan.plan import Bind, Idmapped, LaunchPlan, OpenPlan, PlanOutdated, PlanRefused
from sandbox.spec import Access, Denial, GrantedPath
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.typed import TYPE_CHECKING, Iterator, Literal, Mapping, Sequence

if TYPE_CHECKING:
    from sandbox.paths.denylist import Denylist
    from sandbox.plan.owners import Decision

_STATE = "state"


def judge_written(opened: OpenPlan, denylist: Denylist, *, scan_limit: int) -> None:
    """Judge again what is in the files and folders that the plugin of a stored plan may write, but for its
    state: their content is no fact. Raises PlanOutdated if anything would be decided in another way, and what
    refuses a source."""
    from sandbox.plan.guards import guards_of

    plan, descriptors = opened.plan, opened.descriptors
    origins = _origins(plan)
    written = [
        bind
        for bind in plan.operations
        if isinstance(bind, Bind) and bind.writable and origins.get(bind.dest, "") != _STATE
    ]
    folders = [bind.real for bind in written]
    for bind in written:
        kind: Literal["dir", "file"] = "dir" if stat.S_ISDIR(bind.identity.mode) else "file"
        held = OpenSource(normal(bind.path), bind.real, descriptors[bind.dest], bind.identity, kind, "write")
        source = look_inside(held, denylist, denylist.mounts, scan_limit, denylist.guarded_names)
        owner = None if plan.owners is None else plan.owners.of(normal(bind.dest))
        if owner is not None and not owner.holds_for(source):
            raise PlanOutdated(bind.path)
        guards = guards_of(bind.dest, source, denylist, _hidden(plan, bind.dest, source), (), folders)
        if guards != tuple(each for each in plan.guards if each.dest == bind.dest):
            raise PlanOutdated(f"what is guarded in {bind.path}")


def _origins(plan: LaunchPlan) -> Mapping[str, str]:
    return {shown.inside or shown.path: shown.origin for shown in plan.shown}


def _hidden(plan: LaunchPlan, dest: str, source: OpenSource) -> list[str]:
    hidden = (each.path for each in plan.guards if each.dest == dest and each.access == "hidden")
    return [join(source.real, path) for path in hidden]


@contextmanager
def open_state(
    plan: LaunchPlan, denylist: Denylist, granted: Sequence[GrantedPath]
) -> Iterator[Mapping[str, OpenSource]]:
    """Open the state directory, or the requested folders in it, by path. Raises PlanRefused."""
    wanted: dict[str, Access] = {}
    for shown in plan.shown:
        if shown.origin == _STATE and wanted.get(shown.path) != "write":
            wanted[shown.path] = shown.access
    where = {path.path: path.where for path in granted if path.origin == _STATE}
    found: dict[str, OpenSource] = {}
    refusals: list[Denial] = []
    with ExitStack() as stack:
        for path, access in wanted.items():
            place = where.get(path, ())
            try:
                source = open_source(path, access=access, denylist=denylist, trusted=True, own_state=True)
            except SourceMissing:
                hint = "choose a place for it with --state-dir that nobody else can write"
                refusals.append(
                    Denial("missing_path", path, f"{path} does not exist", hint, where=place, origin=_STATE)
                )
                continue
            except SourceRefused as refused:
                refusals.append(
                    Denial(
                        refused.rule, refused.asked, refused.reason, refused.hint, where=place, origin=_STATE
                    )
                )
                continue
            stack.callback(os.close, source.fd)
            found[path] = source
        if refusals:
            raise PlanRefused(refusals)
        yield found


def with_state(opened: OpenPlan, state: Mapping[str, OpenSource], owners: Decision | None) -> OpenPlan:
    """The plan with its state directory and its final owners filled in."""
    plan = opened.plan
    operations = tuple(
        Bind(op.dest, held.real, held.access == "write", held.identity)
        if isinstance(op, Bind) and (held := state.get(op.dest)) is not None
        else op
        for op in plan.operations
    )
    idmapped = [each for each in plan.idmapped if each.dest not in state]
    if owners is not None and owners.maps_state:
        idmapped += [Idmapped(path, held.uid, held.gid) for path, held in state.items()]
    return OpenPlan(
        plan._replace(
            operations=operations,
            shown=tuple(
                shown._replace(state="bound") if shown.path in state else shown for shown in plan.shown
            ),
            owners=owners,
            idmapped=tuple(idmapped),
        ),
        {**opened.descriptors, **{path: held.fd for path, held in state.items()}},
    )
