"""The cgroups of one plugin: made, limited, read, watched, killed and removed.

A plugin has one group in each hierarchy it needs. The spawner's child joins them all before it becomes bwrap,
through descriptors opened here, so bwrap itself is charged and nothing can fork its way out. The runner that
made a group holds a lock on its directory. A group without a lock was left by a runner that died, and the
next runner removes it.

On v2 a group exists as long as its members, but its controllers, and with them its limits, do not: they are
gone once the group above stops handing them down. systemd makes it stop, in groups that it did not delegate.
So a group with controllers is made inside another one of ours, which hands them down to it. The kernel takes
no controller from a group that hands it down itself (EBUSY), and systemd accepts that.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import select
import time

from sandbox.files import kernel_text, write_once
from sandbox.limits.meter import LIFTED, SHORTEST_PAUSE_SECONDS, Meter
from sandbox.limits.site import INNER, LEAF, PREFIX, Hierarchy, Site, is_leaf
from sandbox.spawn.order import CgroupHandles
from sandbox.spec import Limits
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.signals import signal
from sandbox.speed.typed import Iterable, Iterator, Literal, Mapping, Sequence
from sandbox.speed.value import NamedTuple

_NEARLY_FULL_SHARE = 0.95  # the kernel charges memory in batches, and each core may hold some in reserve
_REMOVE_SECONDS = 2.0
_STUCK_SECONDS = 0.2
_NAMES_TRIED = 100
# bwrap and the init it leaves in the cage: a plugin that may have 64 processes gets 64 of its own.
CAGE_PROCESSES = 2
_MOST_PIDS = 1 << 22  # PID_MAX_LIMIT: the kernel accepts no more
_CPU_PERIOD_MICROSECONDS = 100_000  # the kernel's default
_SHORTEST_CPU_QUOTA_MICROSECONDS = 1_000
_OOM_KILL_SECONDS = 0.01  # the kernel sends the event before it raises the counter
_OOM_LOOKS = 100
_LIFTED_SECONDS = 2.0


class CgroupFault(Exception):
    """A group could not be made or limited as the survey promised."""

    def __init__(self, site: Site, controllers: Iterable[str], path: str, code: int) -> None:
        super().__init__(f"{path}: {os.strerror(code)}")
        self.site = site
        self.controllers = frozenset(controllers)  # the controllers that the site cannot give


class Counters(NamedTuple):
    """The kernel's counters. None: not counted on this machine."""

    oom_kills: int | None = None  # also for the memory of the machine, or of a group around us
    pids_refused: int | None = None
    throttled: int | None = None  # periods in which the processes had to wait
    cpu_user: float | None = None
    cpu_system: float | None = None
    memory_peak: int | None = None
    pids_peak: int | None = None  # without the cage's own processes
    own_oom: bool = False  # the group's own limit was the reason
    lifted: tuple[str, ...] = ()  # limits that somebody lifted: None among the others may mean that


class CgroupDirectory:
    """One directory, and on v2 with controllers the one around it, which keeps them."""

    def __init__(self, site: Site, name: str, lock: int, fd: int | None = None) -> None:
        """`fd`: of the inner directory, if there are two."""
        self.site = site
        self.whole = f"{site.directory}/{name}"  # what is locked, swept and removed
        inner = "" if fd is None else f"/{INNER}"
        self.path = f"{self.whole}{inner}"
        self.line = f"{site.line}/{name}{inner}"
        self.lock = lock
        self.fd = lock if fd is None else fd

    def write(self, file: str, text: str) -> None:
        write_once(f"{self.path}/{file}", text)

    def read(self, file: str) -> str | None:
        """None if this kernel has no such file, or the group was removed."""
        try:
            return kernel_text(f"{self.path}/{file}")
        except OSError:
            return None

    def number(self, file: str) -> int | None:
        return as_number(self.read(file))

    def table(self, file: str) -> Mapping[str, int]:
        words = (self.read(file) or "").split()
        return {key: int(value) for key, value in zip(words[::2], words[1::2], strict=False)}

    def processes(self) -> list[int]:
        return [int(word) for word in (self.read("cgroup.procs") or "").split()]

    def has_changed(self, file: str, text: str) -> bool:
        """Whether a file is gone, or has another text."""
        try:
            return kernel_text(f"{self.path}/{file}") != text
        except OSError as error:  # others are a passing shortage of our own
            return error.errno in (errno.ENOENT, errno.ENODEV)


class Cgroup:
    """All groups of one plugin."""

    def __init__(self, groups: Sequence[CgroupDirectory]) -> None:
        self.groups = tuple(groups)
        self.effective: dict[str, float] = {}  # limits as the kernel has taken them
        # Group, controller, file, and the kernel's text in it.
        self._set: list[tuple[CgroupDirectory, str, str, str]] = []
        self._by: dict[str, CgroupDirectory] = {c: group for group in groups for c in group.site.controllers}
        self._unified = next((group for group in groups if group.site.version == 2), None)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that /proc/PID/cgroup has for every member."""
        return tuple(group.line for group in self.groups)

    @property
    def holds(self) -> tuple[int, ...]:
        """The locks. While one of these descriptors is open in a process, no runner sweeps the group."""
        return tuple(group.lock for group in self.groups)

    @contextmanager
    def open_handles(self) -> Iterator[CgroupHandles]:
        """Descriptors to join by. The kernel checks the rights of the process that opened a file, so the
        child may join with its uid dropped."""
        with ExitStack() as stack:

            def opened(path: str) -> int:
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                return fd

            tasks = [opened(f"{group.path}/tasks") for group in self.groups if group.site.version == 1]
            if self._unified is None:
                yield CgroupHandles(tuple(tasks))
            else:
                procs = opened(f"{self._unified.path}/cgroup.procs")
                yield CgroupHandles(tuple(tasks), self._unified.fd, procs)

    # --- reading --------------

    @property
    def counts_memory(self) -> bool:
        return "memory" in self._by

    def processes(self) -> list[int]:
        return self.groups[0].processes() if self.groups else []

    def cpu(self) -> float | None:
        """Seconds of processor time, of living and of ended processes."""
        user, system = self._cpu()
        return None if user is None or system is None else user + system

    def counters(self) -> Counters:
        memory, pids, cpu = (self._by.get(name) for name in ("memory", "pids", "cpu"))
        user, system = self._cpu()
        peak = pids.number("pids.peak") if pids is not None else None
        return Counters(
            oom_kills=None if memory is None else _oom_kills(memory),
            own_oom=memory is not None and _is_own_oom(memory),
            pids_refused=None if pids is None else pids.table("pids.events").get("max"),
            throttled=None if cpu is None else cpu.table("cpu.stat").get("nr_throttled"),
            cpu_user=user,
            cpu_system=system,
            memory_peak=None
            if memory is None
            else memory.number("memory.peak" if memory.site.version == 2 else "memory.max_usage_in_bytes"),
            pids_peak=None if peak is None else max(0, peak - CAGE_PROCESSES),
            lifted=self.lifted(),
        )

    def _cpu(self) -> tuple[float | None, float | None]:
        if self._unified is not None:
            stat = self._unified.table("cpu.stat")
            if "user_usec" in stat:
                return stat["user_usec"] / 1e6, stat["system_usec"] / 1e6
        legacy = self._by.get("cpuacct")
        if legacy is not None:
            user, system = legacy.number("cpuacct.usage_user"), legacy.number("cpuacct.usage_sys")
            if user is not None and system is not None:
                return user / 1e9, system / 1e9
        return None, None

    def memory_of_processes(self) -> int | None:
        """Memory that is charged for its processes and cannot be reclaimed: without the page cache, and
        without sockets of TCP and UDP, which only v2 charges here. v1 does not tell which of the kernel's
        memory it could reclaim."""
        memory = self._by.get("memory")
        if memory is None:
            return None
        stat = memory.table("memory.stat")
        if memory.site.version == 1:
            return stat.get("total_rss", 0) + stat.get("total_shmem", 0)
        kernel = max(0, stat.get("kernel", 0) - stat.get("slab_reclaimable", 0))
        return stat.get("anon", 0) + stat.get("shmem", 0) + kernel

    def oom_event(self) -> int | None:
        """A descriptor that becomes readable when memory runs out. Only on v1, where the kernel does not
        kill the whole group by itself. The caller closes it."""
        memory = self._by.get("memory")
        if memory is None or memory.site.version == 2:
            return None
        told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            control = os.open(f"{memory.path}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory.write("cgroup.event_control", f"{told} {control}")
            finally:
                os.close(control)
        except OSError:  # an emulation of cgroups, as in some containers: the counter is read anyway
            os.close(told)
            return None
        return told

    def lifted(self) -> tuple[str, ...]:
        """The limits that somebody else has lifted or changed since they were set."""
        return tuple(dict.fromkeys(name for group, name, *told in self._set if group.has_changed(*told)))

    # --- changing -------------

    def limit(self, limits: Limits, devices: Iterable[tuple[int, int]]) -> None:
        """Raises CgroupFault."""
        for group in self.groups:
            told: dict[str, str] = {}
            names: dict[str, str] = {}
            for controller, file, text in settings(group.site, limits, devices):
                try:
                    group.write(file, text)
                    told[file] = kernel_text(f"{group.path}/{file}")  # with what was written to it before
                except OSError as error:
                    if is_optional(file, error):
                        continue
                    path = f"{group.path}/{file}"
                    raise CgroupFault(group.site, (controller,), path, error.errno or errno.EIO) from None
                names[file] = controller
            self._set += [(group, names[file], file, text) for file, text in told.items()]
            self.effective.update(effective_limits(group.site, limits, told))

    def freeze(self, on: bool) -> None:
        """Best effort, and only on cgroup v2."""
        if self._unified is not None:
            try:
                self._unified.write("cgroup.freeze", "1" if on else "0")
            except OSError:
                pass

    @property
    def can_freeze(self) -> bool:
        return self._unified is not None and os.path.exists(f"{self._unified.path}/cgroup.freeze")

    def lift_cpu(self) -> None:
        """Remove the cpu limit: a process needs processor time to die, too."""
        cpu = self._by.get("cpu")
        if cpu is not None and "cpu" in self.effective:
            self._set = [setting for setting in self._set if setting[1] != "cpu"]
            try:
                if cpu.site.version == 2:
                    cpu.write("cpu.max", "max")
                else:
                    cpu.write("cpu.cfs_quota_us", "-1")
            except OSError:
                pass

    def kill(self) -> None:
        """Kill every process in it; by cgroup.kill where the kernel has it."""
        if self._unified is not None:
            try:
                self._unified.write("cgroup.kill", "1")
                return
            except OSError:
                pass  # before Linux 5.14
        for group in self.groups:
            for pid in group.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass

    def left(self) -> tuple[int, ...]:
        """The pids that are still in it."""
        return tuple(sorted({pid for group in self.groups for pid in group.processes()}))


class OomAround:
    """OOM kills in the runner's own group, which a plugin without a memory group shares. In a container the
    limit of this group is the container's."""

    def __init__(self, hierarchies: Iterable[Hierarchy]) -> None:
        self._file = ""
        for own in hierarchies:
            if "memory" in own.controllers:
                name = "memory.events" if own.version == 2 else "memory.oom_control"
                self._file = f"{own.directory}/{name}"
        self._before = self._count()

    def since(self) -> int | None:
        """Kills since this object was made. None: not counted here."""
        now = self._count()
        return None if now is None or self._before is None else now - self._before

    def _count(self) -> int | None:
        try:
            words = kernel_text(self._file).split()
        except OSError:  # no such group, or the root group, which has no counters
            return None
        told = dict(zip(words[::2], words[1::2], strict=False))
        return int(told["oom_kill"]) if "oom_kill" in told else None


def _oom_kills(memory: CgroupDirectory) -> int | None:
    return memory.table("memory.events" if memory.site.version == 2 else "memory.oom_control").get("oom_kill")


def _is_own_oom(memory: CgroupDirectory) -> bool:
    if memory.site.version == 2:
        return memory.table("memory.events").get("oom", 0) > 0  # counted where the limit is
    limit, most = memory.number("memory.limit_in_bytes"), memory.number("memory.max_usage_in_bytes")
    return limit is not None and most is not None and most >= _NEARLY_FULL_SHARE * limit


# --- limits as files ----------------------------------------------------------------------------------------


def settings(
    site: Site, limits: Limits, devices: Iterable[tuple[int, int]] = ()
) -> Iterator[tuple[str, str, str]]:
    """(controller, file, value to write), in order."""
    has, v2 = site.controllers, site.version == 2
    if limits.memory is not None and "memory" in has:
        if v2:
            yield "memory", "memory.max", str(limits.memory)
            yield "memory", "memory.swap.max", "0"
            yield "memory", "memory.oom.group", "1"
        else:
            yield "memory", "memory.limit_in_bytes", str(limits.memory)
            yield "memory", "memory.memsw.limit_in_bytes", str(limits.memory)  # memory and swap together
            # v1 counts memory in network sockets separately, and without this setting not at all.
            yield "memory", "memory.kmem.tcp.limit_in_bytes", str(limits.memory)
    if limits.pids is not None and "pids" in has:
        most = limits.pids + CAGE_PROCESSES
        yield "pids", "pids.max", str(most) if most <= _MOST_PIDS else "max"
    if limits.cpu is not None and "cpu" in has:
        quota = max(_SHORTEST_CPU_QUOTA_MICROSECONDS, round(limits.cpu * _CPU_PERIOD_MICROSECONDS))
        if v2:
            yield "cpu", "cpu.max", f"{quota} {_CPU_PERIOD_MICROSECONDS}"
        else:
            yield "cpu", "cpu.cfs_period_us", str(_CPU_PERIOD_MICROSECONDS)
            yield "cpu", "cpu.cfs_quota_us", str(quota)
    if limits.io is not None and "io" in has:
        for major, minor in devices:
            if v2:
                yield "io", "io.max", f"{major}:{minor} rbps={limits.io} wbps={limits.io}"
            else:
                for file in ("read", "write"):
                    yield "io", f"blkio.throttle.{file}_bps_device", f"{major}:{minor} {limits.io}"


def is_optional(file: str, error: OSError) -> bool:
    """Not every kernel counts swap; without swap there is nothing to limit. A kernel without network has no
    sockets to count."""
    if file == "memory.kmem.tcp.limit_in_bytes":
        return error.errno == errno.ENOENT
    if file not in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
        return False
    missing = error.errno in (errno.ENOENT, errno.EACCES, errno.EOPNOTSUPP)
    return missing and not has_swap()


def has_swap() -> bool:
    try:
        with open("/proc/swaps", "rb") as file:  # with names of files, which need not be ASCII
            return len(file.read().splitlines()) > 1
    except OSError:
        return False


def as_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def effective_limits(site: Site, limits: Limits, told: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """The limits in force, by name: the kernel rounds written values. `told`: what the files of the group
    have, each of which was written; "max" if the limit is beyond what the kernel counts to."""
    has, v2 = site.controllers, site.version == 2
    if limits.memory is not None and "memory" in has:
        value = as_number(told["memory.max" if v2 else "memory.limit_in_bytes"])
        if value is not None:
            yield "memory", value
    if limits.pids is not None and "pids" in has:
        value = as_number(told["pids.max"])
        if value is not None:
            yield "pids", value - CAGE_PROCESSES
    if limits.cpu is not None and "cpu" in has:
        words = told["cpu.max" if v2 else "cpu.cfs_quota_us"]
        if words.split()[:1] and words.split()[0].isdecimal():
            yield "cpu", int(words.split()[0]) / _CPU_PERIOD_MICROSECONDS
    if limits.io is not None and "io" in has:
        yield "io", limits.io


def whole_disks(devices: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The disks behind some st_dev, as (major, minor). A partition has no limits of its own. A filesystem
    that is on no single disk (overlay, btrfs, tmpfs) gives none."""
    found: dict[tuple[int, int], None] = {}
    for device in devices:
        place = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
        if os.major(device) and os.path.exists(place):
            if os.path.exists(f"{place}/partition"):
                place = os.path.dirname(os.path.realpath(place))
            try:
                major, minor = kernel_text(f"{place}/dev").strip().split(":")
            except (OSError, ValueError):
                continue
            found[int(major), int(minor)] = None
    return tuple(found)


# --- making and removing ------------------------------------------------------------------------------------


# The groups that this process has made and still has.
_held: set[str] = set()
# The number of the next group in each directory. No name is used twice: a sweeper that opened a group just
# before it was removed would otherwise take the next one of this name for it, and remove or kill that.
_next_number: dict[str, int] = {}


@contextmanager
def make_cgroup(
    sites: Sequence[Site], limits: Limits, devices: Iterable[tuple[int, int]] = ()
) -> Iterator[Cgroup]:
    """Make a group in each of `sites`, limited as far as their controllers go. Raises CgroupFault.

    `devices`: the disks that the io limit applies to.
    """
    with ExitStack() as stack:
        groups: list[CgroupDirectory] = []
        stack.callback(_remove, groups)
        owner = _identity()
        for site in sites:
            sweep(site.directory)
            if site.enable:
                _hand_down(site)
            groups.append(_make(site, owner))
        cgroup = Cgroup(groups)
        cgroup.limit(limits, devices)
        yield cgroup


def _make(site: Site, owner: str) -> CgroupDirectory:
    for _ in range(_NAMES_TRIED):
        number = _next_number.get(site.directory, 0)
        _next_number[site.directory] = number + 1
        name = f"{PREFIX}{owner}-{number}"
        try:
            held = _made_and_locked(f"{site.directory}/{name}")
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # a passing shortage of our own: no reason to go without the group
            raise CgroupFault(site, site.controllers, site.directory, error.errno or errno.EIO) from None
        if held is not None:
            inner = _make_inner(site, name, held) if site.version == 2 and site.controllers else None
            group = CgroupDirectory(site, name, held, inner)
            _held.add(group.whole)
            return group
    raise CgroupFault(site, site.controllers, site.directory, errno.EEXIST)


def _make_inner(site: Site, name: str, lock: int) -> int:
    """The group inside, with the controllers of `site`, which the one around it keeps; its descriptor."""
    around = f"{site.directory}/{name}"
    handing_down = f"{around}/cgroup.subtree_control"
    try:
        write_once(handing_down, " ".join(f"+{each}" for each in sorted(site.controllers)))
        os.mkdir(f"{around}/{INNER}", 0o700)
        return os.open(f"{around}/{INNER}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        try:
            given = frozenset(kernel_text(f"{around}/cgroup.controllers").split())
        except OSError:
            given = frozenset()
        _rmdir(around)
        os.close(lock)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        lost = site.controllers - given or site.controllers
        raise CgroupFault(site, lost, handing_down, error.errno or errno.EIO) from None


def _made_and_locked(path: str) -> int | None:
    """Make a directory and lock it; its descriptor, or None if another runner made it first, or swept it away
    before it was locked."""
    try:
        os.mkdir(path, 0o700)  # a user who can open it could lock it, and no runner would sweep it
    except FileExistsError:
        return None
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    if fd >= 0:
        os.close(fd)
    return None


def _identity() -> str:
    """A name that no other process ever has, even with the same pid. For people: only the lock counts."""
    with open("/proc/self/stat", "rb") as file:  # it has our own name, which need not be ASCII
        started = file.read().rpartition(b") ")[2].split()[19].decode("ascii")
    return f"{os.getpid()}-{started}"


def _remove(groups: Sequence[CgroupDirectory]) -> None:
    """Bounded, for all of them together: members that were just reaped count for a moment longer, and a
    process that cannot be killed keeps its groups. The next runner tries again."""
    began = time.monotonic()
    left = [group for group in groups if not _rmdir(group.whole)]
    while left and time.monotonic() < began + _REMOVE_SECONDS:
        if time.monotonic() > began + _STUCK_SECONDS:
            # Members cannot be killed, and other plugins of this process must not wait for them.
            left = [group for group in left if not group.processes()]
        time.sleep(0.002)
        left = [group for group in left if not _rmdir(group.whole)]
    for group in groups:
        _held.discard(group.whole)
        for fd in {group.lock, group.fd}:
            os.close(fd)


def _rmdir(path: str) -> bool:
    """Remove a group, with the one inside. Whether it was removed."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError:
        try:
            os.rmdir(f"{path}/{INNER}")
            os.rmdir(path)
        except OSError:
            return False
    return True


# The groups this process has moved to, with their locks, which are held until it ends.
_left_for: dict[str, int] = {}


def _hand_down(site: Site) -> None:
    """v2 hands controllers down only from a group without processes: we move to a leaf, and all of ours.

    Never undone: taking controllers back would lift the limits of any other process that uses them by then.
    The leaf is removed with its group, or by the next runner.
    """
    try:
        if site.leave or site.host:
            leaf = f"{site.directory}/{PREFIX}{_identity()}{LEAF}"
            if leaf not in _left_for:
                held = _made_and_locked(leaf)
                if held is None:
                    raise OSError(errno.EEXIST, "")
                _left_for[leaf] = held
            write_once(f"{leaf}/cgroup.procs", "0")
            from sandbox.limits.vacate import vacate

            vacate(site.directory, leaf, host=site.host)
        write_once(f"{site.directory}/cgroup.subtree_control", " ".join(f"+{name}" for name in site.enable))
    except OSError as error:
        raise CgroupFault(site, site.enable, site.directory, error.errno or errno.EIO) from None


def sweep(directory: str) -> None:
    """Remove the groups of dead runners. A process that still runs in one is killed."""
    try:
        names = os.listdir(directory)
    except OSError:
        return  # nothing of ours can be there
    for name in names:
        path = f"{directory}/{name}"
        if not _is_ours(name) or path in _held:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # removed since it was listed, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino != os.fstat(fd).st_ino:
                continue  # another group of this name by now
            if not _rmdir(path) and not name.endswith(LEAF):
                site = Site(_version(path), frozenset(), directory, "")
                both = (name, f"{name}/{INNER}")  # cgroup.kill of the first is for both
                Cgroup([CgroupDirectory(site, each, fd) for each in both]).kill()
                _rmdir(path)  # if it fails, the next runner removes it: its members take a moment to end
        except OSError:
            pass  # its runner lives
        finally:
            os.close(fd)


def _is_ours(name: str) -> bool:
    """runner-PID-START-NUMBER, or -self. Others (build farms) use names that begin with runner-, too."""
    words = name.removeprefix(PREFIX).split("-")
    numbered = name.startswith(PREFIX) and len(words) == 3 and all(word.isdecimal() for word in words)
    return numbered or is_leaf(name)


def _version(path: str) -> Literal[1, 2]:
    return 2 if os.path.exists(f"{path}/cgroup.controllers") else 1


# --- looking while a plugin runs ----------------------------------------------------------------------------


class CpuTimeMeter(Meter):
    """Total processor time. The next look is when all cores together could have used up the rest."""

    def __init__(self, cgroup: Cgroup, limit: float) -> None:
        self._cgroup = cgroup
        self._limit = limit
        self._cores = os.cpu_count() or 1
        self._used = 0.0
        self.due = time.monotonic() + max(SHORTEST_PAUSE_SECONDS, limit / self._cores)

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due:
            return None
        self._used = self._cgroup.cpu() or 0.0
        left = self._limit - self._used
        self.due = now + max(SHORTEST_PAUSE_SECONDS, left / self._cores)
        return "cpu_time" if left <= 0 else None


class MemoryMeter(Meter):
    """v1 kills one process when memory runs out, and the others run on. The runner then ends them all, as v2
    does by itself: a plugin that lost one of its processes cannot be relied on."""

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self._event = cgroup.oom_event()
        self._looks = 1
        if self._event is not None:
            self.due = 0.0  # memory may have run out before the event was registered

    def interest(self) -> Mapping[int, int]:
        return {} if self._event is None else {self._event: select.POLLIN}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if self._event is not None and self._event in ready:
            os.read(self._event, 8)
            self._looks = _OOM_LOOKS
        elif now < self.due:
            return None
        self._looks -= 1
        self.due = now + _OOM_KILL_SECONDS if self._looks > 0 else math.inf
        return "memory" if self._cgroup.counters().oom_kills else None

    def close(self) -> None:
        if self._event is not None:
            os.close(self._event)


class LiftedMeter(Meter):
    """Whether the limits of the cgroup are as they were set. The kernel keeps systemd from lifting them
    (cgroup.py). Others with the rights of the runner's user can, and no event tells: the runner looks, which
    takes 50 µs, and the cell looks once more when all has ended. When another meter has woken the loop, this
    one looks early, so that an idle plugin is not woken for this."""

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self.due = time.monotonic() + _LIFTED_SECONDS

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due - _LIFTED_SECONDS / 2:
            return None
        self.due = now + _LIFTED_SECONDS
        self.why = ", ".join(self._cgroup.lifted())
        return LIFTED if self.why else None
