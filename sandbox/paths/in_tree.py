"""Paths in the tree of an image: links lead to files of the tree, as they do once it is the root of a cage.

The tree is the runner's own, and nobody changes it. But its links are a stranger's: on the host they lead
anywhere, so nothing here lets the kernel follow one.
"""

from __future__ import annotations

import os
import stat

from sandbox import look
from sandbox.paths.mounts import join
from sandbox.paths.walk import LINK_LIMIT, parts
from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple


class TreePlace(NamedTuple):
    path: str  # in the cage, absolute and without links
    status: os.stat_result


class TreeObstacle(NamedTuple):
    """What keeps a path from being a place to mount something on."""

    path: str  # in the cage
    kind: Literal["link", "file", "folder"]
    target: str = ""  # of a link


def find_in_tree(tree: str, path: str) -> TreePlace | None:
    """What an absolute path of the cage leads to; None: nothing."""
    steps: list[str] = []
    todo, links = parts(path), 0
    status = look.lstat(tree)
    while todo:
        name = todo.pop()
        if name == "..":
            del steps[-1:]
            continue
        inside = "/".join((*steps, name))
        try:
            status = look.lstat(join(tree, inside))
        except OSError:
            return None
        if not stat.S_ISLNK(status.st_mode):
            steps.append(name)
            continue
        links += 1
        if links > LINK_LIMIT:
            return None
        target = look.readlink(join(tree, inside))
        if target.startswith("/"):
            steps.clear()
        todo += parts(target)
    place = "/" + "/".join(steps)
    try:
        return TreePlace(place, look.lstat(join(tree, place[1:]) if steps else tree))
    except OSError:
        return None


def find_obstacle(tree: str, path: str, *, is_folder: bool) -> TreeObstacle | None:
    """Why nothing can be mounted at an absolute path of the cage, or None. bwrap before 0.12 follows links in
    the place of a mount, and outside of the cage: they are not followed here, but told."""
    steps: list[str] = []
    todo = parts(path)
    while todo:
        steps.append(todo.pop())
        inside = "/".join(steps)
        try:
            mode = look.lstat(join(tree, inside)).st_mode
        except OSError:
            return None
        if stat.S_ISLNK(mode):
            return TreeObstacle("/" + inside, "link", look.readlink(join(tree, inside)))
        if not stat.S_ISDIR(mode) and (todo or is_folder):
            return TreeObstacle("/" + inside, "file")
        if stat.S_ISDIR(mode) and not todo and not is_folder:
            return TreeObstacle("/" + inside, "folder")
    return None
