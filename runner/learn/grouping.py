"""Group the paths that a plugin missed into few folders: four hundred files of one folder become the folder.

Pure: whether a folder may be named at all is decided by the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sandbox.paths.mounts import contains

# So many paths or folders below one folder are taken to mean the folder. Fewer are named one by one.
ENOUGH_PATHS = 4


class MissedPath(NamedTuple):
    """A path that was looked for in the cage, and that the host has."""

    path: str
    times: int
    whole: bool = False  # a folder whose names the plugin wanted to read: all that is below belongs to it
    folder: bool = False
    asked: str = ""  # a link that the cage shows, and by which the plugin asked for this path
    leads_to: str = ""  # the same without links, if it has some


class PathGroup(NamedTuple):
    path: str
    members: tuple[MissedPath, ...]

    @property
    def times(self) -> int:
        return sum(each.times for each in self.members)


def group_paths(missed: Iterable[MissedPath], may_name: Callable[[str], bool]) -> tuple[PathGroup, ...]:
    """The groups, in the order of their paths. `may_name`: whether a folder may stand for what is below."""
    found = _without_steps(_merged(missed))
    inside: dict[str, list[MissedPath]] = {}
    left: list[MissedPath] = []
    wholes = sorted((each.path for each in found if each.whole), key=len)
    for each in found:
        holder = next((whole for whole in wholes if contains(whole, each.path)), None)
        if holder is None:
            left.append(each)
        else:
            inside.setdefault(holder, []).append(each)
    groups = [PathGroup(path, tuple(members)) for path, members in inside.items()]
    groups += _split("/", left, may_name)
    return tuple(sorted(groups))


def _merged(missed: Iterable[MissedPath]) -> list[MissedPath]:
    """One for each path: two spellings may lead to the same file."""
    found: dict[str, MissedPath] = {}
    for each in missed:
        known = found.get(each.path)
        found[each.path] = (
            each
            if known is None
            else known._replace(times=known.times + each.times, whole=known.whole or each.whole)
        )
    return list(found.values())


def _without_steps(found: Sequence[MissedPath]) -> list[MissedPath]:
    """Leave out folders that were only looked at on the way to what is below them."""
    above = {parent for each in found for parent in _parents(each.path)}
    return [each for each in found if each.whole or not each.folder or each.path not in above]


def _parents(path: str) -> Iterable[str]:
    while path != "/":
        path = os.path.dirname(path)
        yield path


def _split(
    folder: str, members: Sequence[MissedPath], may_name: Callable[[str], bool]
) -> Sequence[PathGroup]:
    """The groups of what is below `folder`, found from the bottom up: a folder stands for what is below it if
    too many groups would have to be named one by one."""
    children: dict[str, list[MissedPath]] = {}
    for each in members:
        name = each.path[len(folder.rstrip("/")) + 1 :].partition("/")[0]
        children.setdefault(os.path.join(folder, name), []).append(each)
    groups: list[PathGroup] = []
    for path, below in sorted(children.items()):
        groups += (
            [PathGroup(below[0].path, tuple(below))] if len(below) == 1 else _split(path, below, may_name)
        )
    if len(groups) >= ENOUGH_PATHS and may_name(folder):
        return [PathGroup(folder, tuple(members))]
    return groups


def uncovered(
    groups: Iterable[PathGroup], others: Mapping[str, object] | Iterable[str]
) -> tuple[PathGroup, ...]:
    """The groups that lie in none of the other folders."""
    places = tuple(others)
    return tuple(each for each in groups if not any(contains(place, each.path) for place in places))
