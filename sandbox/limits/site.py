"""Places in the cgroup hierarchies: the groups of this process, and the directories in which it can make
some."""

from __future__ import annotations

from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple

PREFIX = "runner-"  # begins the name of every group that a runner makes
LEAF = "-self"  # ends the name of the group to which a runner moves itself and its children
INNER = "plugin"  # the inner group, with the processes, where a plugin's group is two nested ones
HOST_LEAF = "runner-host"  # the group to which it moves its host, if the policy says so. Never swept


class Hierarchy(NamedTuple):
    """A mounted hierarchy, and the group of this process in it."""

    version: Literal[1, 2]
    controllers: frozenset[str]
    directory: str  # the group of this process
    root: str  # the highest group that is visible
    line: str  # its line of /proc/self/cgroup


class Site(NamedTuple):
    """A directory in which groups can be made."""

    version: Literal[1, 2]
    controllers: frozenset[str]  # the controllers that groups made here can have
    directory: str
    line: str  # how /proc/PID/cgroup names it, without a slash at the end
    enable: tuple[str, ...] = ()  # v2: controllers that must be enabled in cgroup.subtree_control first
    leave: bool = False  # to enable them, this process must leave the group
    host: bool = False  # and the other processes too: the policy allows to move them


def is_leaf(name: str) -> bool:
    """Whether a name has the form runner-PID-START-self."""
    words = name.removeprefix(PREFIX).removesuffix(LEAF).split("-")
    shaped = name.startswith(PREFIX) and name.endswith(LEAF)
    return shaped and len(words) == 2 and all(word.isdecimal() for word in words)
