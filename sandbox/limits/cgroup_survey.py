"""Where this process is in the cgroup hierarchies, and where it can make groups.

It changes nothing: `explain` and `doctor` use it as well. The result is per controller, because hosts mix v1
for some controllers with v2 for others. A v2 tree without any controller can still freeze, kill and count
processor time.
"""

from __future__ import annotations

import os

from sandbox import facts, look
from sandbox.limits.site import HOST_LEAF, Hierarchy, Site, is_leaf
from sandbox.paths.mounts import Mounts, contains, join, relative
from sandbox.speed.typed import Iterable, Iterator, Literal
from sandbox.speed.value import NamedTuple

# The controllers that limits need, by v2's names. cpuacct is v1's: in v2 every group counts processor time.
CONTROLLERS = ("memory", "pids", "cpu", "io")
_V1_NAMES = {"blkio": "io"}
_UNITS = (".service", ".scope")
# systemd marks a delegated group (Delegate=yes) with one of these; a user's own systemd may not.
_DELEGATED = ("user.delegate", "trusted.delegate")

_NAMED = 3  # processes that a message names
_OWN_UNIT = "systemd-run --user --scope -p Delegate=yes runner …"
DELEGATE = f"run the runner in a delegated unit: {_OWN_UNIT}, or Delegate=yes in its service file"


_SERVICE = "in a systemd service: ProtectControlGroups=no"
# Remedies where cgroups are mounted read-only, by version.
READ_ONLY = {
    1: f"{_SERVICE}; in a container: on a host with cgroup v2 it can be given groups of its own",
    2: f"{_SERVICE}; in a container, with the runner as its command: docker run --security-opt\n"
    "writable-cgroups=true … (Docker 28 or later), podman run --security-opt unmask=/sys/fs/cgroup …",
}


class Lack(NamedTuple):
    """Why a controller cannot be used, and what to do about it."""

    reason: str
    remedy: str


class Survey(NamedTuple):
    sites: tuple[Site, ...]
    lacks: tuple[tuple[str, Lack], ...]  # for each of CONTROLLERS that no site has
    delegated: bool  # the runner is root, or in a delegated unit: limits can be expected to work
    own: tuple[Hierarchy, ...] = ()  # the groups of this process

    def site(self, controller: str) -> Site | None:
        return next((site for site in self.sites if controller in site.controllers), None)

    @property
    def unified(self) -> Site | None:
        """The v2 site, with or without controllers."""
        return next((site for site in self.sites if site.version == 2), None)

    @property
    def counts_cpu(self) -> Site | None:
        return self.unified or self.site("cpuacct")

    def without(self, directory: str, controllers: frozenset[str], lack: Lack) -> Survey:
        """A copy without these controllers of a site: groups there did not get them."""
        sites = []
        for site in self.sites:
            if site.directory == directory:
                left = tuple(name for name in site.enable if name not in controllers)
                site = site._replace(controllers=site.controllers - controllers, enable=left)
                if not site.controllers:
                    continue
            sites.append(site)
        lacks = {**dict(self.lacks), **dict.fromkeys(controllers, lack)}
        return self._replace(sites=tuple(sites), lacks=tuple(sorted(lacks.items())))

    def lack(self, controller: str) -> Lack:
        return dict(self.lacks).get(controller, Lack("there is no cgroup for it", DELEGATE))


def survey(mounts: Mounts, *, move_host: bool = False) -> Survey:
    """Find where this process can make groups. `move_host`: whether the policy allows to move other processes
    of our unit to a group below it."""
    found = own_hierarchies(mounts)
    sites: list[Site] = []
    lacks: dict[str, Lack] = {}
    bound: set[str] = set()  # controllers of a v1 hierarchy: v2 cannot have them
    for legacy in (h for h in found if h.version == 1):
        bound |= legacy.controllers
        if not legacy.controllers & {*CONTROLLERS, "cpuacct"}:
            continue
        if _writable(legacy.directory):
            sites.append(Site(1, legacy.controllers, legacy.directory, legacy.line.rstrip("/")))
            continue
        for name in legacy.controllers & set(CONTROLLERS):
            reason = f"groups of the {name} controller (cgroup v1) cannot be made in {legacy.directory}"
            lack = Lack(reason, "on cgroup v1 only root can: run as root, or on a host with cgroup v2")
            lacks[name] = _read_only(legacy) or lack
    unified = next((h for h in found if h.version == 2), None)
    wanted = frozenset(CONTROLLERS) - bound
    site, why = _unified_site(unified, wanted, move_host) if unified is not None else (None, _NO_CGROUPS)
    if unified is not None and site is None:
        why = _read_only(unified) or why
    if site is not None:
        sites.append(site)
    for name in wanted - (site.controllers if site is not None else frozenset()):
        lacks[name] = _not_handed_down(site.directory, name) if site is not None and site.controllers else why
    handed = any(site.version == 1 or site.controllers for site in sites)
    # A delegated unit with the host's processes in it hands nothing down yet, and still counts.
    delegated = os.geteuid() == 0 or handed or (unified is not None and _is_in_delegated_unit(unified))
    return Survey(tuple(sites), tuple(sorted(lacks.items())), delegated, found)


def _read_only(own: Hierarchy) -> Lack | None:
    """The lack if the hierarchy is mounted read-only, as container engines do; else None."""
    try:
        if not look.statvfs(own.directory).f_flag & os.ST_RDONLY:
            return None
    except OSError:
        return None
    return Lack(f"{own.directory} is mounted read-only, as in a container", READ_ONLY[own.version])


def own_hierarchies(mounts: Mounts) -> tuple[Hierarchy, ...]:
    """The group of this process in every mounted hierarchy that is visible."""
    places: dict[frozenset[str], tuple[str, str]] = {}  # controllers (none for v2) -> line, path
    look.note_content("/proc/self/cgroup")
    try:
        with open("/proc/self/cgroup", "rb") as file:
            text = file.read()
    except OSError:
        return ()  # a kernel without cgroups
    for raw in filter(None, text.split(b"\n")):  # a name may contain any other line separator
        line = os.fsdecode(raw)
        _, names, path = line.split(":", 2)
        places[frozenset(filter(None, names.split(",")))] = line, path
    found: dict[frozenset[str], Hierarchy] = {}
    for mount in mounts.all:
        if mount.fstype not in ("cgroup", "cgroup2"):
            continue
        words = set(mount.options.split(","))
        for bound, (line, path) in places.items():
            if (mount.fstype == "cgroup2") != (not bound) or not bound <= words or bound in found:
                continue
            # In a container a part of the tree is mounted. Our group may be outside of that part.
            if not contains(mount.root, path):
                continue
            directory = join(mount.point, relative(path, mount.root))
            if mount.fstype == "cgroup2":
                controllers = frozenset(_words(f"{directory}/cgroup.controllers"))
            else:
                controllers = frozenset(_V1_NAMES.get(name, name) for name in bound)
            version: Literal[1, 2] = 2 if mount.fstype == "cgroup2" else 1
            found[bound] = Hierarchy(version, controllers, directory, mount.point, line)
    return tuple(found.values())


_NO_CGROUPS = Lack("no cgroup v2 file system is mounted", "mount -t cgroup2 none /sys/fs/cgroup")


def _not_handed_down(directory: str, name: str) -> Lack:
    remedy = f"root can: echo +{name} > {directory}/cgroup.subtree_control, in it and in every group above it"
    return Lack(f"{directory} does not hand the {name} controller down", remedy)


def _unified_site(own: Hierarchy, wanted: frozenset[str], move_host: bool) -> tuple[Site | None, Lack]:
    """The group in which new groups get the most controllers of `wanted`, and why they do not get more."""
    best: Site | None = None
    why = Lack(f"{own.directory} is not ours: nothing was delegated", DELEGATE)
    for directory, ours in _candidates(own):
        if not _writable(directory):
            continue
        enabled = frozenset(_words(f"{directory}/cgroup.subtree_control"))
        available = frozenset(_words(f"{directory}/cgroup.controllers"))
        others = _others(directory, None if move_host else _NAMED)
        usable, host = enabled, False
        if ours and available - enabled and look.access(f"{directory}/cgroup.subtree_control", os.W_OK):
            # The kernel lets a group hand controllers down only if it has no process.
            lack = _occupied(directory, others, move_host) if others else None
            if lack is None:
                usable, host = usable | available, bool(others)
            else:
                why = lack
        site = Site(
            2,
            usable & wanted,
            directory,
            own.line.removesuffix(relative(own.directory, directory)).rstrip("/"),
            tuple(sorted((usable - enabled) & wanted)),
            directory == own.directory,
            host,
        )
        if best is None or len(site.controllers) > len(best.controllers):
            best = site
        if best.controllers >= wanted:
            break
    return best, why


def _occupied(directory: str, others: list[int], move_host: bool) -> Lack | None:
    """Why a group with other processes cannot hand its controllers down. None: they may be moved."""
    reason = (
        f"{directory} cannot hand its controllers down while processes are in it: {_process_names(others)}"
    )
    remedy = (
        "let the unit's processes start in a group below it (DelegateSubgroup=, systemd 254); "
        f"or start the runner in a unit of its own: {_OWN_UNIT}"
    )
    if not _is_delegated(directory):
        return Lack(reason, remedy)
    if not move_host:
        return Lack(reason, f'say host = "move" under [cgroups] in the policy; or {remedy}')
    foreign = [pid for pid in others if not facts.is_of_this_user(pid)]
    if not foreign:
        return None
    look.doubt("a process of another user is in our unit")
    return Lack(f"{reason}; those of other users are not moved: {_process_names(foreign)}", remedy)


def _candidates(own: Hierarchy) -> Iterator[tuple[str, bool]]:
    """Groups to try, best first, and whether we may change what they hand down.

    First come the groups from ours up to our unit's. A unit that has its host's processes in the same group
    cannot hand controllers down, unless the host may be moved. Then a group above that already hands them
    down is used. No group is used above one with limits: those were set for us. For root the groups above
    come first if the unit was not delegated: systemd would stop the unit after an OOM kill in it.
    """
    unit, above = _unit_and_above(own)
    allowed = list(_until_limited((*unit, *above)))
    inside = [(directory, True) for directory in allowed if directory in unit]
    beyond = [(directory, False) for directory in allowed if directory in above]
    delegated = os.geteuid() != 0 or any(map(_is_delegated, unit))
    yield from (*inside, *beyond) if delegated else (*beyond, *inside)


def _until_limited(chain: Iterable[str]) -> Iterator[str]:
    for directory in chain:
        yield directory
        if not _is_unlimited(directory):
            return


def _unit_and_above(own: Hierarchy) -> tuple[list[str], list[str]]:
    """The groups from ours up to our unit's, and those above."""
    start = own.directory
    name = os.path.basename(start)
    moved = is_leaf(name) or (name == HOST_LEAF and _is_unlimited(start))
    if moved and start != own.root:
        # A runner moved this process here from the group above, so that it can hand its controllers down. If
        # the leaf counted as our group, it would get a leaf as well: one level more at each launch. A leaf of
        # the host that has limits is left alone: they apply to us.
        start = os.path.dirname(start)
    chain = list(_upwards(start, own.root))
    unit = next((i for i, directory in enumerate(chain) if directory.endswith(_UNITS)), 0)
    return chain[: unit + 1], chain[unit + 1 :]


def _is_in_delegated_unit(own: Hierarchy) -> bool:
    unit, _ = _unit_and_above(own)
    return any(
        _is_delegated(directory)
        and _writable(directory)
        and look.access(f"{directory}/cgroup.subtree_control", os.W_OK)
        for directory in unit
    )


def _is_unlimited(directory: str) -> bool:
    """Whether a group has no limit of memory or processor time. A pids limit does not matter: systemd sets
    one for every unit."""
    files = ("memory.max", "memory.high", "cpu.max")
    return all(_words(f"{directory}/{file}")[:1] in ([], ["max"]) for file in files)


def _upwards(directory: str, root: str) -> Iterator[str]:
    yield directory
    while directory != root and directory != "/":
        directory = os.path.dirname(directory)
        yield directory


def _is_delegated(directory: str) -> bool:
    for name in _DELEGATED:
        try:
            if look.getxattr(directory, name) == b"1":
                return True
        except OSError:
            continue
    # Before systemd 251 only root could see the mark. But a group of our uid inside one of another was
    # delegated.
    own = os.geteuid()
    try:
        return own != 0 and look.stat(directory).st_uid == own != look.stat(os.path.dirname(directory)).st_uid
    except OSError:
        return False


def _writable(directory: str) -> bool:
    """Whether this process can make groups here and move processes into them."""
    return look.access(directory, os.W_OK | os.X_OK) and look.access(f"{directory}/cgroup.procs", os.W_OK)


def _others(directory: str, most: int | None) -> list[int]:
    """Processes in a group that are not ours, at most `most`. Empty for the real root group, which may hand
    down with processes in it."""
    if not look.exists(f"{directory}/cgroup.type"):
        return []
    look.note_alone(directory)
    return facts.strangers(facts.members(directory), most)


def _process_names(pids: Iterable[int]) -> str:
    names = []
    for pid in list(pids)[:_NAMED]:
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                names.append(f"{file.read().strip()} ({pid})")
        except OSError:
            names.append(str(pid))
    return ", ".join(names)


def _words(path: str) -> list[str]:
    look.note_content(path)
    return _read(path)


def _read(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []
