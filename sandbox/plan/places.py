"""Check where things are mounted in a cage, and choose the working directory."""

from __future__ import annotations

from sandbox.paths.denied_paths import lexical_fault, normal
from sandbox.paths.mounts import contains
from sandbox.plan.operations import RUNTIME_LINKS
from sandbox.plan.plan import OWN_PLACES, Bind, PlanRefused, PlanRequest, Symlink
from sandbox.plan.relocation import Relocation
from sandbox.spec import Access, Denial, Grant, KeyPath, Note
from sandbox.speed.typed import Iterable, Iterator, Sequence
from sandbox.speed.value import NamedTuple


class ShownPlace(NamedTuple):
    """A path of the host that the cage shows."""

    dest: str  # in the cage
    access: Access
    where: KeyPath = ()
    moved: bool = False  # it has another path on the host


def require_safe_places(
    places: Sequence[ShownPlace], links: Iterable[Symlink], request: PlanRequest, grant: Grant
) -> None:
    """Check all mount points. Raises PlanRefused."""
    refusals = [*_below_writable(places), *_in_own_places(places, links, request, grant)]
    if refusals:
        raise PlanRefused(refusals)
    _require_directory(request, [place.dest for place in places])


def _below_writable(places: Sequence[ShownPlace]) -> Iterator[Denial]:
    """Refuse mount points below a writable bind: bwrap before 0.12 follows links there, and an earlier run
    may have made some."""
    for above in places:
        if above.access == "read":
            continue
        for place in places:
            if place.dest != above.dest and contains(above.dest, place.dest):
                yield Denial(
                    "below_writable",
                    place.dest,
                    f"{place.dest} would be mounted below {above.dest}, which the plugin can write",
                    "ask for a writable folder that contains no other path of the manifest",
                    where=place.where or above.where,
                )


def _in_own_places(
    places: Sequence[ShownPlace], links: Iterable[Symlink], request: PlanRequest, grant: Grant
) -> Iterator[Denial]:
    """Refuse overlaps of paths that only the cage has with paths of the host: a memory file would be written
    to the host."""
    own = list(_own_places(request, grant))
    for dest in own:
        if lexical_fault(dest) or normal(dest) != dest or any(_overlap(dest, taken) for taken in _TAKEN):
            yield Denial("cage_place", dest, "the cage has other files at this place")
    if len(own) != len(set(own)):
        yield Denial("cage_place", own[0], "two files of the cage have one name")
    if not own:
        return
    for place in places:
        if not place.moved and (dest := next((dest for dest in own if _overlap(dest, place.dest)), "")):
            reason = (
                f"in the cage {dest} is a place of the plugin's own, and no path of the host can be there"
            )
            yield Denial("cage_place", place.dest, reason, "ask for another path", where=place.where)
    for link in links:
        if any(_overlap(dest, link.dest) for dest in own):
            yield Denial("cage_place", link.dest, "it would be a link at a place of the plugin's own")
    yield from _in_each_other(request, grant)


# Paths that every cage has. Nothing else may be put there, not even into /tmp.
_TAKEN = ("/usr", "/etc", "/proc", "/sys", "/dev", "/tmp", *RUNTIME_LINKS)


def _own_places(request: PlanRequest, grant: Grant) -> Iterator[str]:
    # A copy takes the path of the folder it is a copy of, so it is checked like a path of the host.
    if request.root is not None and request.root_inside and not request.root_is_copy:
        yield request.root_inside
    if grant.scratch is not None:
        yield grant.scratch.dest
    for file in grant.memory_files:
        yield file.dest


def _in_each_other(request: PlanRequest, grant: Grant) -> Iterator[Denial]:
    files = [file.dest for file in grant.memory_files]
    mounted = [] if grant.scratch is None else [grant.scratch.dest]
    for root in [request.root_inside] if request.root_inside else []:
        for dest in (*mounted, *files):
            if _overlap(root, dest):
                yield Denial("cage_place", dest, f"it would be in {root}, which is read-only")
    for dest in files:
        if any(other != dest and contains(dest, other) for other in (*mounted, *files)):
            yield Denial("cage_place", dest, "it is a file, and other files would be below it")


def state_link(
    request: PlanRequest, home: str, places: Iterable[str], links: Iterable[Symlink]
) -> tuple[list[Symlink], list[Note]]:
    """The link by which the plugin finds its state directory below its HOME, or a note why there is none. It
    keeps away from all that is mounted: bwrap would follow it, and make mount points in the directory."""
    assert request.state_dir is not None
    dest = f"{home.rstrip('/')}/{request.state_link}"
    if dest == request.state_dir:
        return [], []
    taken = (*places, *(link.dest for link in links), *(place for place in _TAKEN if place != "/tmp"))
    if lexical_fault(dest) or normal(dest) != dest or any(_overlap(dest, place) for place in taken):
        message = f"{dest} does not lead to the plugin's state directory: the cage has other files there"
        return [], [Note("state", message, "set another HOME, or take the path out of the manifest")]
    return [Symlink(dest, request.state_dir)], []


def _overlap(one: str, other: str) -> bool:
    return contains(one, other) or contains(other, one)


# --- the working directory ----------------------------------------------------------------------------------


def _require_directory(request: PlanRequest, places: Iterable[str]) -> None:
    """Raise PlanRefused if a named working directory is not shown: elsewhere the program would read and write
    other files than intended."""
    project = request.project
    if project is None or not project.named or request.directory in OWN_PLACES:
        return
    if any(contains(place, request.directory) for place in (*places, *RUNTIME_LINKS)):
        return
    reason = f"it is the working directory, and the plugin is not shown it: {project.refusal}"
    raise PlanRefused([Denial("project", project.path, reason, project.hint, where=project.where)])


def working_directory(request: PlanRequest, binds: Iterable[Bind], relocation: Relocation) -> str:
    dests = [bind.dest for bind in binds]
    directory = relocation.place(request.directory)
    if relocation.inside and contains(relocation.inside, directory):
        # If only parts of it are shown, the folder exists and holds just these.
        shown = any(_overlap(directory, dest) for dest in dests)
        return directory if shown else "/tmp"
    inside = any(contains(dest, request.directory) for dest in dests)
    if request.project is not None and request.project.named:
        linked = any(contains(place, request.directory) for place in RUNTIME_LINKS)
        inside = inside or linked or request.directory in OWN_PLACES
    return request.directory if inside else "/tmp"
