"""Names in a writable folder that stay read-only: they tell programs outside of the cage what to run.

A plugin that works on a project may write to its folder. The configuration of an editor in it, or a hook of
git, would be run outside at the next occasion. Which names a host obeys is the contracts' to say; git's are
here.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.speed.typed import Iterable, Iterator, Sequence
from sandbox.speed.value import NamedTuple

# At most so many host configurations in folders further down are guarded: each costs a mount, and so does
# every folder on the way.
MOST_NESTED = 40
# What packages bring along is opened by no editor as a project of its own.
_UNGUARDED = frozenset({"node_modules", "site-packages"})


TELLS = "tells programs outside of the cage what to run"
GUARDED = "it belongs to the configuration of a host or of git, which tells programs outside what to run"
LINKED = "tells programs outside what to run, and has another hard link, which the plugin could write to"


class GuardedName(NamedTuple):
    """A file or folder at the top of a project."""

    name: str  # without a slash
    # What stands in for a file that is missing: it has to mean nothing to the program that reads it.
    # None: a folder.
    content: str | None = None
    optional: bool = False  # guarded if it exists, and not made otherwise


class GuardedPath(NamedTuple):
    """One path below a writable folder."""

    path: str  # relative
    content: str | None = None
    optional: bool = False  # left out if it does not exist: nothing is made in its place


GIT = ".git"
# Of a repository everything else can be written, so that a plugin can commit. `commondir` names a folder with
# other hooks and another config.
_GIT_PARTS = (
    GuardedName("hooks"),
    GuardedName("config", ""),
    GuardedName("config.worktree", ""),
    GuardedName("commondir", ".\n"),
    GuardedName("modules"),
    GuardedName("worktrees"),
)
# Folders of further repositories. Further down, new repositories can be made anyway.
_GIT_REPOSITORIES = frozenset(("modules", "worktrees"))
# What makes a folder a repository without `.git`: git obeys the hooks and the config in it.
BARE_SIGNS = ("HEAD", "objects", "refs")
_GIT_NAMES = frozenset(part.name for part in _GIT_PARTS)


def top_paths(names: Iterable[GuardedName], git_is_folder: bool) -> Iterator[GuardedPath]:
    """What is guarded at the top of a writable folder."""
    for each in names:
        yield GuardedPath(each.name, each.content, each.optional)
    if not git_is_folder:
        yield GuardedPath(GIT)
        return
    for part in _GIT_PARTS:
        yield GuardedPath(f"{GIT}/{part.name}", part.content)


def nested_paths(path: str, git_is_folder: bool) -> Iterator[GuardedPath]:
    """What is guarded of a name that a scan found further down: what exists, and in a repository what would
    tell git what to run."""
    if not git_is_folder:
        yield GuardedPath(path, None, True)
        return
    for part in _GIT_PARTS:
        name = f"{path}/{part.name}" if path else part.name
        yield GuardedPath(name, part.content, part.name in _GIT_REPOSITORIES)


def is_guarded(path: str, names: frozenset[str]) -> bool:
    """Whether a path has a guarded name, or lies below one. `names`: of the contracts."""
    parts = path.split("/")
    for number, part in enumerate(parts):
        if part in _UNGUARDED:
            return False
        if part in names:
            return True
        if part == GIT:
            return number + 1 == len(parts) or parts[number + 1] in _GIT_NAMES
    return False


def is_guarded_at_top(path: str, names: frozenset[str]) -> bool:
    """Whether it is guarded in the folder that the path is relative to, existing or not."""
    first, _, rest = path.partition("/")
    return first in names or (first == GIT and rest.partition("/")[0] in _GIT_NAMES)


def held_name(fd: int, names: frozenset[str]) -> str | None:
    """A guarded name at the top of an open folder, if it holds one."""
    for name in sorted((*names, GIT)):
        look.note_below(fd, name)
        try:
            os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        except OSError:
            return name
        return name
    return None


def is_unguarded(path: str) -> bool:
    """Whether a path lies where guarded names mean nothing."""
    return not _UNGUARDED.isdisjoint(path.split("/"))


def ways(paths: Sequence[str]) -> Iterator[str]:
    """The folders on the way to these paths, outermost first. Each must be a mount point: the kernel does not
    let a mount point be renamed, but a folder that contains one."""
    found: set[str] = set()
    for path in paths:
        parts = path.split("/")
        found.update("/".join(parts[:count]) for count in range(1, len(parts)))
    yield from sorted(found, key=lambda way: (way.count("/"), way))
