"""The systemd unit that a launch is in, left out of what is stored.

`systemd-run --scope` makes a unit for each launch, with another name each time, and a service that is started
again has the same name and another directory. The name decides nothing. So a plan is stored without it, and
each launch asks the same questions about the unit it is in itself: who may write there, which controllers it
has, who else is in it.

Only where that is all: cgroup v2 alone, in the usual place, and the runner in the unit itself and in no group
below it. Otherwise a plan belongs to one unit.
"""

from __future__ import annotations

import os

from runner.launch.stored.entry import TEXT, UNIT, PlanEntry
from sandbox.facts import Facts, digest
from sandbox.speed.typed import TYPE_CHECKING, Any
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from runner.launch.stages import Planned
    from sandbox.limits.site import Hierarchy, Site

_OWN = "/proc/self/cgroup"
_MOUNTED = "/sys/fs/cgroup"
_SUFFIXES = (".scope", ".service")
# No path and no line contains a NUL, so these stand for nothing else.
_DIRECTORY, _LINE = "\0unit", "\0line"
BLANKS = ((UNIT, "directory"), (UNIT, "line"))
# The fields of Facts that are about paths.
_OF_PATHS = ("places", "listed", "contents", "access", "attributes", "alone", "identities")


class Unit(NamedTuple):
    slice: str  # the group around it
    name: str
    suffix: str

    @property
    def directory(self) -> str:
        return f"{_MOUNTED}{self.slice}/{self.name}"

    @property
    def line(self) -> str:
        """As in /proc/PID/cgroup."""
        return f"0::{self.slice}/{self.name}"

    @property
    def shape(self) -> bytes:
        """The digest of what must be the same about the next unit."""
        return digest(os.fsencode(f"{self.slice}\0{self.suffix}"))


def unit_of(text: bytes) -> Unit | None:
    """The unit of a process, by its /proc/PID/cgroup. None: there are other hierarchies, or it is in no unit,
    or in a group below one."""
    path = text.removeprefix(b"0::").removesuffix(b"\n")
    if text != b"0::%s\n" % path or b"\n" in path or not path.isascii():
        return None
    around, _, name = path.decode("ascii").rpartition("/")
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    return Unit(around, name, suffix) if suffix else None


# --- storing ------------------------------------------------------------------------------------------------


def unit_of_plan(planned: Planned, facts: Facts) -> Unit | None:
    """The unit that the runner was in when it made this plan: by now it may have moved to a group below."""
    own = [group for group in planned.provision.own_groups if group.version == 2]
    if len(own) != 1:
        return None
    text = os.fsencode(own[0].line) + b"\n"
    unit = unit_of(text)
    if unit is None or own[0].directory != unit.directory or facts.contents.get(_OWN) != digest(text):
        return None
    return unit


def without_unit(planned: Planned, unit: Unit) -> Planned:
    """The plan with marks for blanks in place of the unit."""

    def of_sites(sites: tuple[Site, ...]) -> tuple[Site, ...]:
        return tuple(
            site._replace(directory=_DIRECTORY, line=_LINE)
            if (site.directory, site.line) == (unit.directory, unit.line)
            else site
            for site in sites
        )

    def of_groups(groups: tuple[Hierarchy, ...]) -> tuple[Hierarchy, ...]:
        return tuple(
            group._replace(directory=_DIRECTORY, line=_LINE) if group.directory == unit.directory else group
            for group in groups
        )

    decided, limits, provision = planned.decided, planned.limits, planned.provision
    return planned._replace(
        decided=decided._replace(limits=decided.limits._replace(sites=of_sites(decided.limits.sites))),
        limits=limits._replace(sites=of_sites(limits.sites)),
        provision=provision._replace(
            sites=of_sites(provision.sites), own_groups=of_groups(provision.own_groups)
        ),
    )


def marks(first: int) -> dict[str, int]:
    """The number of the blank for each mark in a plan."""
    return {_DIRECTORY: first, _LINE: first + 1}


def facts_without_unit(facts: Facts, unit: Unit) -> Facts:
    moved = _moved(facts, unit.directory, _DIRECTORY)
    contents = {**moved.contents, _OWN: unit.shape}
    return moved._replace(contents=contents)


# --- using --------------------------------------------------------------------------------------------------


def in_own_unit(entry: PlanEntry) -> PlanEntry | None:
    """Returns a plan that was stored without its unit, for the unit of this process. None if that unit is of
    another kind, or in another place."""
    try:
        with open(_OWN, "rb", buffering=0) as file:
            text = file.read()
    except OSError:
        return None
    return in_unit(entry, text)


def in_unit(entry: PlanEntry, text: bytes) -> PlanEntry | None:
    unit, facts = unit_of(text), Facts(*entry.facts)
    if unit is None or facts.contents.get(_OWN) != unit.shape:
        return None
    moved = _moved(facts, _DIRECTORY, unit.directory)
    # It is asked again with the others: a process can be moved at any time.
    moved = moved._replace(contents={**moved.contents, _OWN: digest(text)})
    texts = {"directory": unit.directory, "line": unit.line}
    blanks = tuple((TEXT, texts[name]) if kind == UNIT else (kind, name) for kind, name in entry.blanks)
    return entry._replace(facts=tuple(moved), blanks=blanks)


def _moved(facts: Facts, before: str, after: str) -> Facts:
    """The same facts about another folder and what is below it."""
    below = f"{before}/"

    def of_path(path: str) -> str:
        return after + path[len(before) :] if path == before or path.startswith(below) else path

    def of_key(key: Any) -> Any:
        return (of_path(key[0]), *key[1:]) if isinstance(key, tuple) else of_path(key)

    fields: dict[str, Any] = {
        name: {of_key(key): found for key, found in getattr(facts, name).items()} for name in _OF_PATHS
    }
    return facts._replace(**fields)
