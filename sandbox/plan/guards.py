"""Decide, when the plan is made, what stays read-only in the folders that a plugin may write.

The mounts are made by the cell's init (sandbox/spawn/guards.py) and not by bwrap, which follows links on the
way to a mount point. What is missing is made for the time of the launch (sandbox/paths/stand_in.py).
"""

from __future__ import annotations

import os
import stat

from sandbox import look
from sandbox.paths.guarded import (
    BARE_SIGNS,
    GIT,
    LINKED,
    MOST_NESTED,
    MOST_PROJECTS,
    TELLS,
    VERSION_CONTROL,
    GuardedName,
    GuardedPath,
    Names,
    find_row,
    is_guarded,
    is_unguarded,
    missing_signs,
    nested_paths,
    parent_folders,
    project_paths,
)
from sandbox.paths.mounts import contains, join
from sandbox.paths.source import OpenSource
from sandbox.plan.plan import Guard, PlanRefused, ShownPath
from sandbox.spawn.order import FOLDERS_ROOT
from sandbox.spec import Denial, KeyPath, Note
from sandbox.speed.typed import TYPE_CHECKING, Iterable, Iterator, Sequence

if TYPE_CHECKING:
    from sandbox.paths.denylist import Denylist

GUARD_RULE = "guarded"
GUARD_ORIGIN = "guarded: it tells programs outside of the cage what to run"
# At most so many links in guarded folders are followed, and links on the way to one target.
_MOST_LINKS, _MOST_HOPS = 500, 40


# Folders of the table itself, in which parts are guarded.
_OWN_FOLDERS = frozenset((GIT, ".hg", ".github"))


class _Unguardable(Exception):
    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


def all_guards(
    written: Iterable[tuple[str, OpenSource, KeyPath]], denylist: Denylist, conceal: Sequence[str]
) -> tuple[Guard, ...]:
    """The guards for everything that is opened for writing, by destination."""
    written = list(written)
    folders = [source.real for _, source, _ in written]
    return tuple(
        guard
        for dest, source, where in written
        for guard in guards_of(dest, source, denylist, conceal, where, folders)
    )


def guards_of(
    dest: str,
    source: OpenSource,
    denylist: Denylist,
    conceal: Sequence[str] = (),
    where: KeyPath = (),
    written: Sequence[str] = (),
) -> tuple[Guard, ...]:
    """The guards of one writable folder, in mount order. Raises PlanRefused. `written`: the real paths of
    everything that is writable in this launch."""
    if source.kind != "dir" or not denylist.guarded_names:
        return ()
    try:
        if not look.isdir(FOLDERS_ROOT):
            why = f"there is no {FOLDERS_ROOT} here, below which its guarded files would be mounted"
            raise _Unguardable(why, f"make a folder {FOLDERS_ROOT}")
        written = (source.real, *written)
        found = {guard.path: guard for guard in _guards(dest, source, denylist, conceal, written)}
        _judge_links(source, denylist.guarded_names, written)
    except _Unguardable as refused:
        reason = f"{source.real} cannot be written by a plugin: {refused}"
        raise PlanRefused([Denial(GUARD_RULE, source.path, reason, refused.hint, where=where)]) from None
    for way in parent_folders([path for path, guard in found.items() if guard.state != "link"]):
        found.setdefault(way, Guard(dest, way, "write", "bound" if way == GIT else "optional"))
    return tuple(sorted(found.values(), key=lambda guard: (guard.path.count("/"), guard.path)))


def _guards(
    dest: str, source: OpenSource, denylist: Denylist, conceal: Sequence[str], written: Sequence[str]
) -> Iterator[Guard]:
    mounted = [mount.point for mount in denylist.mounts.below(source.real)]
    for path, content, optional in _wanted(source, denylist):
        status, real = _status(source, path), join(source.real, path)
        if status is None:
            if not optional and _is_open(source, path):
                yield Guard(dest, path, "read", "made at launch", content)
            continue
        if stat.S_ISLNK(status.st_mode):
            if optional:
                _judge_link(real, denylist.guarded_names, written)
                yield Guard(dest, path, "read", "link")
                continue
            raise _Unguardable(
                f"{real} is a symbolic link, which it could replace, and {TELLS}",
                "put the files themselves there instead of the link, or ask for a narrower folder",
            )
        if any(contains(real, point) for point in mounted):
            raise _Unguardable(f"something is mounted at or below {real}, which {TELLS}", "unmount it")
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise _Unguardable(f"{real} {LINKED}", "make it a copy")
        hidden = stat.S_ISREG(status.st_mode) and real in conceal
        yield Guard(dest, path, "hidden" if hidden else "read", "optional" if optional else "bound", content)


def _wanted(source: OpenSource, denylist: Denylist) -> Iterator[GuardedPath]:
    names = denylist.guarded_names

    def is_complete(path: str, row: GuardedName) -> bool:
        return _is_complete(source, path, row)

    def mode(path: str) -> int | None:
        status = _status(source, path)
        return None if status is None else status.st_mode

    yield from project_paths(names, is_complete)
    nested = {path for path in source.guarded if _is_nested(source, path, names)}
    signs = missing_signs(mode)
    yield from signs
    if not signs:
        nested.add("")  # a bare repository
    if len(nested) > MOST_NESTED:
        raise _Unguardable(
            f"it holds {len(nested)} repositories and configurations of hosts, and at most {MOST_NESTED} can "
            f"be guarded; one of them is {join(source.real, min(nested))}",
            "ask for a narrower folder",
        )
    for path in sorted(nested):
        row = find_row(path.rpartition("/")[2], names) if path else None
        if row is None:
            yield from nested_paths(path, VERSION_CONTROL[0])  # a bare repository
        else:
            yield from nested_paths(path, row if is_complete(path, row) else None)
    projects = project_folders(nested)
    for project in projects if len(projects) <= MOST_PROJECTS else ():
        for each in project_paths(names, is_complete, project):
            if mode(each.path) is None:  # what exists is found by the scan
                yield each
        yield from missing_signs(mode, project)


def project_folders(paths: Iterable[str]) -> list[str]:
    """The folders directly below the writable one that have a guarded name in them."""
    return sorted({path.partition("/")[0] for path in paths if path.count("/") == 1})


def _is_nested(source: OpenSource, path: str, names: Names) -> bool:
    """Whether this is guarded beside the names at the top."""
    if _lies_in_guarded(path, names):
        return False
    if _is_unnamed(path, names):
        return _is_bare(source, path)
    row = names.get(path.rpartition("/")[2])
    if is_unguarded(path) and (row is None or not row.sign):
        return False
    if row is not None and row.sign == "":
        return "/" in path and any(_status(source, f"{path}/{part.name}") for part in row.parts)
    return "/" in path or row is None  # None: a pattern has found it


def _judge_links(source: OpenSource, names: Names, written: Sequence[str]) -> None:
    """Check the targets of links in guarded folders: programs outside of the cage run them too."""
    links = [path for path in source.guarded if is_guarded(path, names) and _is_link(source, path)]
    for path in set(source.guarded):
        if _is_unnamed(path, names) and _is_bare(source, path):
            links += _links_of_bare(source, f"{path}/hooks" if path else "hooks")
    if len(links) > _MOST_LINKS:
        raise _Unguardable(
            f"it holds {len(links)} symbolic links where something {TELLS}, and at most {_MOST_LINKS} are "
            f"followed; one of them is {join(source.real, links[0])}",
            "put the files themselves there instead of the links, or ask for a narrower folder",
        )
    for path in links:
        _judge_link(join(source.real, path), names, written)


def _judge_link(link: str, names: Names, written: Sequence[str]) -> None:
    """Refuse a link that leads to, or through, something the plugin could change."""
    folder, _, name = link.rpartition("/")
    rest, hops, passed = [name], 0, []
    place = folder or "/"
    while rest:
        step = rest.pop(0)
        if step in ("", "."):
            continue
        if step == "..":
            place = os.path.dirname(place)
            continue
        place = join(place, step)
        passed.append(place)
        try:
            target = look.readlink(place)
        except OSError:
            continue  # not a link, or missing
        hops += 1
        if hops > _MOST_HOPS:
            break  # a loop; what it passes is checked all the same
        place = "/" if target.startswith("/") else os.path.dirname(place)
        rest = target.split("/") + rest
    kept = _is_protected(place, names, written) and not any(contains(place, folder) for folder in written)
    # Folders above a guarded target are mount points, which cannot be renamed.
    passed = [each for each in passed[1:] if not contains(each, place)]
    if not kept or not all(_is_protected(each, names, written) for each in passed):
        raise _Unguardable(
            f"{link} is a symbolic link to {place}, which it could change, and {TELLS}",
            "put the file itself there instead of the link, or ask for a narrower folder",
        )


def _is_protected(path: str, names: Names, written: Sequence[str]) -> bool:
    """Whether the plugin cannot change what is there."""
    for folder in written:
        if contains(folder, path):
            inside = path[len(folder) :].strip("/")
            above = inside.rpartition("/")[0]
            if not is_guarded(inside, names) or not (is_guarded(above, names) or look.lexists(path)):
                return False
    return True


def _links_of_bare(source: OpenSource, hooks: str) -> Iterator[str]:
    """Links in the hooks of a bare repository. The scan does not find them, because it looks for guarded
    names."""
    if not look.isdir(join(source.real, hooks)):
        return
    for name in look.listdir(join(source.real, hooks)):
        path = f"{hooks}/{name}"
        status = _status(source, path)
        if status is None or stat.S_ISDIR(status.st_mode):
            continue  # git runs nothing in subfolders
        if status.st_nlink > 1:
            raise _Unguardable(f"{join(source.real, path)} {LINKED}", "make it a copy")
        if stat.S_ISLNK(status.st_mode):
            yield path


def _is_link(source: OpenSource, path: str) -> bool:
    status = _status(source, path)
    return status is not None and stat.S_ISLNK(status.st_mode)


def _is_unnamed(path: str, names: Names) -> bool:
    """Whether the scan has found this path by its content and not by its name."""
    return find_row(path.rpartition("/")[2], names) is None


def _is_bare(source: OpenSource, path: str) -> bool:
    """Whether git takes this folder for a bare repository. '' is the top folder."""
    if path and _is_link(source, path):
        return False
    return all(_status(source, f"{path}/{sign}" if path else sign) is not None for sign in BARE_SIGNS)


def _lies_in_guarded(path: str, names: Names) -> bool:
    above = path.rpartition("/")[0]
    return GIT in above.split("/") or is_guarded(above, names)


def _is_complete(source: OpenSource, path: str, row: GuardedName) -> bool:
    """Whether this folder has the sign of its row, such as a complete .git. An incomplete one, such as a
    stand-in, is guarded as a whole. So is one that we may not enter, which the plugin may not enter
    either."""
    status = None if row.sign is None else _status(source, path)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return False
    enterable = os.access(path, os.X_OK, dir_fd=source.fd, effective_ids=True, follow_symlinks=False)
    return enterable and (not row.sign or _status(source, f"{path}/{row.sign}") is not None)


def _is_open(source: OpenSource, path: str) -> bool:
    """Whether we, and so the plugin, could create this path. Near the top the launch finds out."""
    above, _, _ = path.rpartition("/")
    return "/" not in above or os.access(above, os.W_OK, dir_fd=source.fd, effective_ids=True)


def _status(source: OpenSource, path: str) -> os.stat_result | None:
    try:
        return os.stat(path, dir_fd=source.fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        where = join(source.real, path)
        why = f"{where}, which {TELLS}, cannot be looked at: {error.strerror}"
        raise _Unguardable(why, "let the runner read it, or ask for a narrower folder") from None


def shown_guards(guards: Iterable[Guard]) -> Iterator[ShownPath]:
    """The guards that exist and are read-only, for messages."""
    for guard in guards:
        if guard.access != "write" and guard.state in ("bound", "optional"):
            yield ShownPath(join(guard.dest, guard.path), "read", GUARD_ORIGIN, "bound")


def guard_notes(guards: Iterable[Guard]) -> Iterator[Note]:
    """Notes about names that are missing, and whether the plugin can create them."""
    missing: dict[str, list[str]] = {}
    made: dict[str, set[str]] = {}  # projects in which names are made
    held: dict[str, set[str]] = {}  # projects in which something is guarded
    for guard in guards:
        top, _, below = guard.path.partition("/")
        is_own = not below or top in _OWN_FOLDERS
        if guard.state == "made at launch":
            if is_own:
                missing.setdefault(guard.dest, []).append(guard.path)
            else:
                made.setdefault(guard.dest, set()).add(top)
        if guard.access != "write" and not is_own and _is_in_project(below):
            held.setdefault(guard.dest, set()).add(top)
    for dest, paths in missing.items():
        also = ", ".join(sorted(made.get(dest, ()))) if len(held.get(dest, ())) <= MOST_PROJECTS else ""
        listed = ", ".join(paths) + (f", nor such names in {also}" if also else "")
        yield Note(
            "guarded",
            f"in {dest} the plugin cannot make {listed}: these names tell programs outside of the cage what "
            "to run. Empty ones stand there while it runs",
        )
    for dest, projects in held.items():
        if len(projects) > MOST_PROJECTS:
            yield Note(
                "guarded",
                f"{dest} holds {len(projects)} projects, and in more than {MOST_PROJECTS} only what exists "
                "is guarded: the plugin can make new names in them that tell programs outside what to run",
                "ask for a narrower folder; what it has made is named when it has ended",
            )


def _is_in_project(below: str) -> bool:
    first, _, rest = below.partition("/")
    return not rest or first in _OWN_FOLDERS
