"""Where groups are: those of this process, and the directories in which it can make some."""

from __future__ import annotations

from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple

PREFIX = "runner-"  # of the name of every group that a runner makes
LEAF = "-self"  # end of the name of the group to which a runner moves itself, and all of ours
HOST_LEAF = "runner-host"  # the group to which it moves its host, if the policy says so. Never swept


class Hierarchy(NamedTuple):
    version: Literal[1, 2]
    controllers: frozenset[str]
    directory: str  # our own group
    root: str  # the highest group we can see
    line: str  # our own line of /proc/self/cgroup


class Site(NamedTuple):
    """A directory in which groups can be made."""

    version: Literal[1, 2]
    controllers: frozenset[str]  # the controllers that groups made here can have
    directory: str
    line: str  # how /proc/PID/cgroup names it, without a slash at the end
    enable: tuple[str, ...] = ()  # v2: controllers that must be enabled in cgroup.subtree_control first
    leave: bool = False  # to enable them, we must leave the group ourselves
    host: bool = False  # and its other processes too: the policy lets us move them


def is_leaf(name: str) -> bool:
    """runner-PID-START-self"""
    words = name.removeprefix(PREFIX).removesuffix(LEAF).split("-")
    shaped = name.startswith(PREFIX) and name.endswith(LEAF)
    return shaped and len(words) == 2 and all(word.isdecimal() for word in words)
