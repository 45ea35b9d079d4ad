"""Names in a writable folder that stay read-only, because they tell programs outside of the cage what to run.

A plugin that works on a project may write to its folder. But what it writes into the configuration of an
editor, or into a hook of git, would later run outside of the cage. One table has these names, with the
program that obeys each. The rows of version control are here; the contracts add those of hosts.

Where the line is: guarded is what a program obeys because somebody opens the folder, enters it, or asks for
its status. What a person starts by name (make, npm, a test) runs the project's own files, which a plugin with
a writable project may change.

Not in the table, because git runs nothing from it: `info/attributes` and .gitattributes name drivers that
only a config defines, .gitmodules cannot set a command, and neither can .lfsconfig; `objects/info/alternates`
and refs are data; a bisection takes its command from the person.
"""

from __future__ import annotations

import os
import stat

from sandbox import look
from sandbox.speed.typed import Callable, Iterable, Iterator, Mapping, Sequence
from sandbox.speed.value import NamedTuple

# At most so many host configurations in nested folders are guarded: each costs a mount, and so does every
# folder on the way.
MOST_NESTED = 40
# In at most so many projects directly below a writable folder the names that are missing are guarded too:
# each has a stand-in for every row, and takes about as long as all that is guarded at the top.
MOST_PROJECTS = 8
# Installed packages: no editor opens them as a project. Only repositories count in them: `git status` runs in
# each that an index calls a submodule, and a plugin can write the index.
UNGUARDED = frozenset({"node_modules", "site-packages"})


TELLS = "tells programs outside of the cage what to run"
GUARDED = "it belongs to the configuration of a host or of git, which tells programs outside what to run"
LINKED = "tells programs outside what to run, and has another hard link, which the plugin could write to"


class GuardedName(NamedTuple):
    """A row of the table: a file or folder at the top of a project, or a part of such a folder."""

    name: str  # without a slash; "*.x" stands for every name that ends with ".x", if it exists
    obeyed_by: str  # the program, for messages
    # The content of the stand-in for a missing file, which must have no effect on the program that reads it.
    # None: the stand-in is a folder.
    content: str | None = None
    optional: bool = False  # guarded only if it exists: a stand-in would disturb
    # Of a folder in which only `parts` are guarded if it holds this name, and everything otherwise. "": every
    # such folder, and nothing if it is missing.
    sign: str | None = None
    parts: tuple[GuardedName, ...] = ()


class GuardedPath(NamedTuple):
    """One path below a writable folder."""

    path: str  # relative
    content: str | None = None
    optional: bool = False


Names = Mapping[str, GuardedName]

GIT = ".git"
_REBASE = "git rebase --continue"
# The rest of a repository can be written, so that a plugin can commit.
_GIT_PARTS = (
    GuardedName("hooks", "git"),
    GuardedName("config", "git", ""),
    GuardedName("config.worktree", "git", ""),
    GuardedName("commondir", "git", ".\n"),  # names a folder with other hooks and another config
    GuardedName("modules", "git"),  # more repositories, each with hooks and a config
    GuardedName("worktrees", "git"),
    GuardedName("remotes", "git push"),  # names a repository, whose hooks run
    GuardedName("branches", "git push"),
    # Lines of `exec`. An empty one is a rebase to git, which then refuses to begin one.
    GuardedName("rebase-merge", _REBASE, None, True),
    GuardedName("rebase-apply", _REBASE, None, True),
    GuardedName("sequencer", "git cherry-pick --continue", None, True),
)
# Folders with more repositories. In a nested repository they have no stand-in: a plugin can make new ones
# anyway.
_GIT_REPOSITORIES = frozenset(("modules", "worktrees"))
# A folder with these names is a bare repository: git obeys the hooks and the config in it. Where one of them
# is missing, that one is guarded. `refs` comes first, as a file: git asks whether it can enter it. A HEAD
# would make `git diff HEAD` ambiguous, so it is the last choice.
BARE_SIGNS = ("refs", "objects", "HEAD")
# Or `refs` and `objects` are in a folder that this file names. So it is guarded beside one of them, as a
# folder, which git does not list as new.
COMMON = "commondir"

VERSION_CONTROL = (
    GuardedName(GIT, "git", sign="HEAD", parts=_GIT_PARTS),
    GuardedName(
        ".hg",
        "Mercurial",
        sign="requires",
        parts=(
            GuardedName("hgrc", "Mercurial", ""),
            GuardedName("hgrc-not-shared", "Mercurial", ""),
            GuardedName("requires", "Mercurial", ""),  # may name another repository, with its own hgrc
        ),
    ),
    # Hooks of git, if core.hooksPath says so, which a plugin cannot set.
    GuardedName(".husky", "git", None, True),
)


def guarded_table(hosts: Iterable[GuardedName]) -> dict[str, GuardedName]:
    """The whole table by name: the rows of hosts and those of version control. Empty without hosts."""
    rows = {each.name: each for each in hosts}
    return {**rows, **{each.name: each for each in VERSION_CONTROL}} if rows else {}


def repositories(names: Names) -> dict[str, GuardedName]:
    """The rows of folders that are repositories: what counts among installed packages too."""
    return {name: row for name, row in names.items() if row.sign}


def find_row(name: str, names: Names) -> GuardedName | None:
    row = names.get(name)
    if row is None and (dot := name.rfind(".")) > 0:
        return names.get(f"*{name[dot:]}")
    return row


def endings(names: Names) -> tuple[str, ...]:
    """The ends of names that have a row as a pattern."""
    return tuple(name[1:] for name in names if name[0] == "*")


def project_paths(
    names: Names, is_complete: Callable[[str, GuardedName], bool], project: str = ""
) -> Iterator[GuardedPath]:
    """The guarded paths at the top of a writable folder, or of the project `project` in it.

    `is_complete`: whether a path is a folder with the sign of its row.
    """
    start = f"{project}/" if project else ""
    for row in names.values():
        path = start + row.name
        if row.sign is not None and is_complete(path, row):
            for part in row.parts:
                yield GuardedPath(f"{path}/{part.name}", part.content, part.optional)
        elif row.sign != "" and row.name[0] != "*":
            yield GuardedPath(path, row.content, row.optional)


def missing_signs(mode: Callable[[str], int | None], project: str = "") -> tuple[GuardedPath, ...]:
    """The names that keep git from taking a folder for a repository. Empty: the folder is one.

    `mode`: of a path; None if it does not exist. A file that cannot be executed, where git wants a folder,
    does as well as nothing. So does a stand-in of another launch.
    """
    for sign in BARE_SIGNS:
        start = f"{project}/" if project else ""
        found = mode(start + sign)
        if sign == "HEAD":
            if found is None or stat.S_ISDIR(found):
                return (GuardedPath(start + sign),)
        elif found is None or (stat.S_ISREG(found) and not found & 0o111):
            return GuardedPath(start + sign, ""), GuardedPath(start + COMMON)
    return ()


def nested_paths(path: str, row: GuardedName | None) -> Iterator[GuardedPath]:
    """The guarded paths of something that a scan found in a nested folder. `row`: of a folder in which only
    parts are guarded; None: all of it is."""
    if row is None:
        yield GuardedPath(path, None, True)
        return
    for part in row.parts:
        name = f"{path}/{part.name}" if path else part.name
        optional = part.optional or row.sign == "" or part.name in _GIT_REPOSITORIES
        yield GuardedPath(name, part.content, optional)


def is_guarded(path: str, names: Names) -> bool:
    """Whether a path has a guarded name, or lies below one."""
    parts = path.split("/")
    for number, part in enumerate(parts):
        if part in UNGUARDED:
            names = repositories(names)
        row = find_row(part, names)
        if row is None:
            continue
        if row.sign is None:
            return True
        below = parts[number + 1 : number + 2]
        if any(each.name in below for each in row.parts):
            return True
        if row.sign:
            return not below
    return False


def is_guarded_at_top(path: str, names: Names) -> bool:
    """Whether a path is guarded at the top of the folder that it is relative to, also if it does not
    exist."""
    first, _, rest = path.partition("/")
    row = find_row(first, names)
    if row is None or row.sign is None:
        return row is not None
    return any(part.name == rest.partition("/")[0] for part in row.parts)


def find_guarded_name(fd: int, names: Names) -> str | None:
    """The first guarded name at the top of an open folder, or None."""
    for name in sorted(each.name for each in names.values() if each.sign != "" and each.name[0] != "*"):
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
    return not UNGUARDED.isdisjoint(path.split("/"))


def parent_folders(paths: Sequence[str]) -> Iterator[str]:
    """The folders on the way to these paths, outermost first. Each must be a mount point: the kernel refuses
    to rename a mount point, but not a folder that contains one."""
    found: set[str] = set()
    for path in paths:
        parts = path.split("/")
        found.update("/".join(parts[:count]) for count in range(1, len(parts)))
    yield from sorted(found, key=lambda way: (way.count("/"), way))
