"""Names in a writable folder that stay read-only, because they tell programs outside of the cage what to run.

A plugin that works on a project may write to its folder. But what it writes into the configuration of an
editor, or into a hook of git, would later run outside of the cage. The contracts name the files that hosts
obey; those of git are here.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.speed.typed import Iterable, Iterator, Sequence
from sandbox.speed.value import NamedTuple

# At most so many host configurations in nested folders are guarded: each costs a mount, and so does every
# folder on the way.
MOST_NESTED = 40
# Installed packages: no editor opens them as a project.
_UNGUARDED = frozenset({"node_modules", "site-packages"})


TELLS = "tells programs outside of the cage what to run"
GUARDED = "it belongs to the configuration of a host or of git, which tells programs outside what to run"
LINKED = "tells programs outside what to run, and has another hard link, which the plugin could write to"


class GuardedName(NamedTuple):
    """A file or folder at the top of a project."""

    name: str  # without a slash
    # The content of the stand-in for a missing file, which must have no effect on the program that reads it.
    # None: the stand-in is a folder.
    content: str | None = None
    optional: bool = False  # guarded only if it exists: there is no stand-in


class GuardedPath(NamedTuple):
    """One path below a writable folder."""

    path: str  # relative
    content: str | None = None
    optional: bool = False  # guarded only if it exists: there is no stand-in


GIT = ".git"
# The rest of a repository can be written, so that a plugin can commit. `commondir` names a folder with other
# hooks and another config.
_GIT_PARTS = (
    GuardedName("hooks"),
    GuardedName("config", ""),
    GuardedName("config.worktree", ""),
    GuardedName("commondir", ".\n"),
    GuardedName("modules"),
    GuardedName("worktrees"),
)
# Folders with more repositories. In a nested repository they have no stand-in: a plugin can make new ones
# anyway.
_GIT_REPOSITORIES = frozenset(("modules", "worktrees"))
# A folder with these names is a bare repository: git obeys the hooks and the config in it.
BARE_SIGNS = ("HEAD", "objects", "refs")
_GIT_NAMES = frozenset(part.name for part in _GIT_PARTS)


def top_paths(names: Iterable[GuardedName], git_is_folder: bool) -> Iterator[GuardedPath]:
    """The guarded paths at the top of a writable folder."""
    for each in names:
        yield GuardedPath(each.name, each.content, each.optional)
    if not git_is_folder:
        yield GuardedPath(GIT)
        return
    for part in _GIT_PARTS:
        yield GuardedPath(f"{GIT}/{part.name}", part.content)


def nested_paths(path: str, git_is_folder: bool) -> Iterator[GuardedPath]:
    """The guarded paths of a name that a scan found in a nested folder: the name itself, or the parts of a
    repository that tell git what to run."""
    if not git_is_folder:
        yield GuardedPath(path, None, True)
        return
    for part in _GIT_PARTS:
        name = f"{path}/{part.name}" if path else part.name
        yield GuardedPath(name, part.content, part.name in _GIT_REPOSITORIES)


def is_guarded(path: str, names: frozenset[str]) -> bool:
    """Whether a path has a guarded name, or lies below one. `names`: those of the contracts."""
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
    """Whether a path is guarded at the top of the folder that it is relative to, also if it does not
    exist."""
    first, _, rest = path.partition("/")
    return first in names or (first == GIT and rest.partition("/")[0] in _GIT_NAMES)


def find_guarded_name(fd: int, names: frozenset[str]) -> str | None:
    """The first guarded name at the top of an open folder, or None."""
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
    """Whether a path is in a folder of installed packages, where no name is guarded."""
    return not _UNGUARDED.isdisjoint(path.split("/"))


def parent_folders(paths: Sequence[str]) -> Iterator[str]:
    """The folders on the way to these paths, outermost first. Each must be a mount point: the kernel refuses
    to rename a mount point, but not a folder that contains one."""
    found: set[str] = set()
    for path in paths:
        parts = path.split("/")
        found.update("/".join(parts[:count]) for count in range(1, len(parts)))
    yield from sorted(found, key=lambda way: (way.count("/"), way))
