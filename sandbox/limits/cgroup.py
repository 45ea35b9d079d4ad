"""The cgroups of one plugin: made, limited, read, watched, killed and removed.

A plugin has one group in each hierarchy it needs. The spawner's child joins them all before it becomes bwrap,
through descriptors opened here, so bwrap itself is charged and no process can escape by a fork. The runner
that made a group holds a lock on its directory. A group without a lock was left by a runner that died, and
the next runner removes it.

On v2 a group can lose its controllers, and with them its limits, while processes are in it: when the group
above stops handing them down. systemd makes it stop, in groups that it did not delegate. So a group with
controllers is made inside another group of ours, which hands them down to it. The kernel takes no controller
from a group that hands it down itself (EBUSY), and systemd accepts that.
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
_OOM_KILL_SECONDS = 0.01  # between looks at the counter: the kernel sends the event before it raises it
_OOM_LOOKS = 100
_LIFTED_SECONDS = 2.0
# A counter that cannot be read for this long is not there any more.
_UNREADABLE_SECONDS = 5.0


class CgroupFault(Exception):
    """A group could not be made or limited as the survey promised."""

    def __init__(self, site: Site, controllers: Iterable[str], path: str, code: int) -> None:
        super().__init__(f"{path}: {os.strerror(code)}")
        self.site = site
        self.controllers = frozenset(controllers)  # the controllers that the site cannot give


class Counters(NamedTuple):
    """The kernel's counters. None: not counted on this machine."""

    oom_kills: int | None = None  # by this limit, by one of a group above, or for the machine's memory
    pids_refused: int | None = None
    throttled: int | None = None  # periods in which the processes had to wait
    cpu_user: float | None = None
    cpu_system: float | None = None
    memory_peak: int | None = None
    pids_peak: int | None = None  # without the cage's own processes
    own_oom: bool = False  # the group's own limit was the reason
    lifted: tuple[str, ...] = ()  # limits that another program lifted; their counters may be None


class ChargedMemory(NamedTuple):
    """Bytes that a group is charged for."""

    pages: int = 0  # of its processes
    kernel: int = 0


class CgroupDirectory:
    """One group. On v2 with controllers it is inside another one, which hands them down."""

    def __init__(self, site: Site, name: str, lock: int, fd: int | None = None) -> None:
        """`fd`: of the inner directory, if there are two."""
        self.site = site
        self.outer_path = f"{site.directory}/{name}"  # this directory is locked, swept and removed
        inner = "" if fd is None else f"/{INNER}"
        self.path = f"{self.outer_path}{inner}"
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
        """Whether a file is gone or has another text."""
        try:
            return kernel_text(f"{self.path}/{file}") != text
        except OSError as error:  # other errors are our own, such as no free descriptor
            return error.errno in (errno.ENOENT, errno.ENODEV)


class Cgroup:
    """All groups of one plugin."""

    def __init__(self, groups: Sequence[CgroupDirectory]) -> None:
        self.groups = tuple(groups)
        self.effective: dict[str, float] = {}  # limits as the kernel has accepted them
        # Group, controller, file, and the text that the kernel then showed.
        self._set: list[tuple[CgroupDirectory, str, str, str]] = []
        self._lifted_before: tuple[str, ...] = ()  # found when the runner itself lifted the cpu limit
        self._by: dict[str, CgroupDirectory] = {c: group for group in groups for c in group.site.controllers}
        self._unified = next((group for group in groups if group.site.version == 2), None)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that /proc/PID/cgroup has for every member."""
        return tuple(group.line for group in self.groups)

    @property
    def lock_fds(self) -> tuple[int, ...]:
        """Descriptors that hold the locks. While a process has one open, no runner sweeps the group."""
        return tuple(group.lock for group in self.groups)

    @contextmanager
    def open_handles(self) -> Iterator[CgroupHandles]:
        """Descriptors to join by. The kernel checks the rights of the process that opened a file, so the
        child may join with its uid dropped."""
        with ExitStack() as stack:

            def open_for_writing(path: str) -> int:
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                return fd

            legacy = [group for group in self.groups if group.site.version == 1]
            tasks = [open_for_writing(f"{group.path}/tasks") for group in legacy]
            if self._unified is None:
                yield CgroupHandles(tuple(tasks))
            else:
                procs = open_for_writing(f"{self._unified.path}/cgroup.procs")
                yield CgroupHandles(tuple(tasks), self._unified.fd, procs)

    # --- reading --------------

    @property
    def counts_memory(self) -> bool:
        return "memory" in self._by

    def processes(self) -> list[int]:
        return self.groups[0].processes() if self.groups else []

    def cpu(self) -> float | None:
        """Seconds of processor time, with that of processes that have ended."""
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

    def charged(self) -> ChargedMemory | None:
        """What is charged for the processes and cannot be reclaimed: without the page cache, and without TCP
        and UDP sockets, which only v2 charges here. For v1 kernel memory is left out, because v1 does not
        show which part of it can be reclaimed."""
        memory = self._by.get("memory")
        if memory is None:
            return None
        stat = memory.table("memory.stat")
        if memory.site.version == 1:
            return ChargedMemory(stat.get("total_rss", 0) + stat.get("total_shmem", 0), 0)
        kernel = max(0, stat.get("kernel", 0) - stat.get("slab_reclaimable", 0))
        return ChargedMemory(stat.get("anon", 0) + stat.get("shmem", 0), kernel)

    def oom_event(self) -> int | None:
        """A descriptor that becomes readable when memory runs out; the caller closes it. None on v2, where
        the kernel kills the whole group by itself."""
        memory = self._by.get("memory")
        if memory is None or memory.site.version == 2:
            return None
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            control = os.open(f"{memory.path}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory.write("cgroup.event_control", f"{event} {control}")
            finally:
                os.close(control)
        except OSError:  # cgroups are emulated, as in some containers: the counter is read anyway
            os.close(event)
            return None
        return event

    def lifted(self) -> tuple[str, ...]:
        """The limits that another program has lifted or changed since they were set."""
        changed = (name for group, name, *setting in self._set if group.has_changed(*setting))
        return tuple(dict.fromkeys((*self._lifted_before, *changed)))

    # --- changing -------------

    def limit(self, limits: Limits, devices: Iterable[tuple[int, int]]) -> None:
        """Write the limits into the groups' files. Raises CgroupFault."""
        for group in self.groups:
            shown: dict[str, str] = {}
            names: dict[str, str] = {}
            for controller, file, text in settings(group.site, limits, devices):
                try:
                    group.write(file, text)
                    shown[file] = kernel_text(f"{group.path}/{file}")  # with what was written to it before
                except OSError as error:
                    if is_optional(file, error):
                        continue
                    path = f"{group.path}/{file}"
                    raise CgroupFault(group.site, (controller,), path, error.errno or errno.EIO) from None
                names[file] = controller
            self._set += [(group, names[file], file, text) for file, text in shown.items()]
            self.effective.update(effective_limits(group.site, limits, shown))

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
        """Remove the cpu limit: processes need processor time to end."""
        cpu = self._by.get("cpu")
        if cpu is not None and "cpu" in self.effective:
            self._lifted_before = self.lifted()
            self._set = [setting for setting in self._set if setting[1] != "cpu"]
            try:
                if cpu.site.version == 2:
                    cpu.write("cpu.max", "max")
                else:
                    cpu.write("cpu.cfs_quota_us", "-1")
            except OSError:
                pass

    def kill(self) -> None:
        """Kill every process in the groups; by cgroup.kill where the kernel has it."""
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
        """The pids that are still in the groups."""
        return tuple(sorted({pid for group in self.groups for pid in group.processes()}))


class OuterOomCounter:
    """Counts OOM kills in the runner's own group. A plugin without a memory group is in it too. In a
    container its limit is the container's."""

    def __init__(self, hierarchies: Iterable[Hierarchy]) -> None:
        self._file = ""
        for own in hierarchies:
            if "memory" in own.controllers:
                name = "memory.events" if own.version == 2 else "memory.oom_control"
                self._file = f"{own.directory}/{name}"
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._before = self._count()

    def since(self) -> int | None:
        """OOM kills since this object was made, or restarted. None: not counted on this machine."""
        now = self._count()
        return None if now is None or self._before is None else now - self._before

    def _count(self) -> int | None:
        try:
            words = kernel_text(self._file).split()
        except OSError:  # no such group, or the root group, which has no counters
            return None
        shown = dict(zip(words[::2], words[1::2], strict=False))
        return int(shown["oom_kill"]) if "oom_kill" in shown else None


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
    """The files to write for these limits: (controller, file, value), in order."""
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
    """Whether a setting may fail: swap that the kernel does not count, on a machine without swap; TCP memory,
    on a kernel without it."""
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


def effective_limits(site: Site, limits: Limits, shown: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """The limits in force, by name: the kernel rounds written values. `shown`: the text that the kernel shows
    for each written file; "max" if the limit is larger than the kernel's largest number."""
    has, v2 = site.controllers, site.version == 2
    if limits.memory is not None and "memory" in has:
        value = as_number(shown["memory.max" if v2 else "memory.limit_in_bytes"])
        if value is not None:
            yield "memory", value
    if limits.pids is not None and "pids" in has:
        value = as_number(shown["pids.max"])
        if value is not None:
            yield "pids", value - CAGE_PROCESSES
    if limits.cpu is not None and "cpu" in has:
        words = shown["cpu.max" if v2 else "cpu.cfs_quota_us"]
        if words.split()[:1] and words.split()[0].isdecimal():
            yield "cpu", int(words.split()[0]) / _CPU_PERIOD_MICROSECONDS
    if limits.io is not None and "io" in has:
        yield "io", limits.io


def whole_disks(devices: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The disks of these st_dev numbers, as (major, minor). A partition stands for its disk, because io
    limits apply to whole disks. A filesystem that is on no single disk (overlay, btrfs, tmpfs) has none."""
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


# Paths of the groups that this process has made and not removed yet.
_own_groups: set[str] = set()
# The number of the next group in each directory. No name is used twice: another runner that opened a group to
# sweep it, just before it was removed, could otherwise remove or kill the next one of the same name.
_next_number: dict[str, int] = {}


@contextmanager
def make_cgroup(
    sites: Sequence[Site], limits: Limits, devices: Iterable[tuple[int, int]] = ()
) -> Iterator[Cgroup]:
    """Make a group in each of `sites`, with the limits that its controllers can enforce. Raises CgroupFault.

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
            held = _make_and_lock(f"{site.directory}/{name}")
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # we have too many open files, which says nothing about the site
            raise CgroupFault(site, site.controllers, site.directory, error.errno or errno.EIO) from None
        if held is not None:
            inner = _make_inner(site, name, held) if site.version == 2 and site.controllers else None
            group = CgroupDirectory(site, name, held, inner)
            _own_groups.add(group.outer_path)
            return group
    raise CgroupFault(site, site.controllers, site.directory, errno.EEXIST)


def _make_inner(site: Site, name: str, lock: int) -> int:
    """Make the inner group, to which the outer one hands the controllers of `site` down. Returns its
    descriptor."""
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


def _make_and_lock(path: str) -> int | None:
    """Make a directory and lock it. Returns its descriptor, or None if another runner made it first, or swept
    it before it was locked."""
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
    except OSError:
        if fd >= 0:
            os.close(fd)
        _rmdir(path)  # nobody else would, until the next runner sweeps
        raise
    if fd >= 0:
        os.close(fd)
    return None


def _identity() -> str:
    """PID and start time of this process: a name that no other process has. It helps people; the lock decides
    whether a group is in use."""
    with open("/proc/self/stat", "rb") as file:  # it has our own name, which need not be ASCII
        started = file.read().rpartition(b") ")[2].split()[19].decode("ascii")
    return f"{os.getpid()}-{started}"


def _remove(groups: Sequence[CgroupDirectory]) -> None:
    """Remove the groups, within _REMOVE_SECONDS for all together. The kernel counts members for a moment
    after they were reaped. A group with a process that cannot be killed is left to the next runner."""
    began = time.monotonic()
    left = [group for group in groups if not _rmdir(group.outer_path)]
    while left and time.monotonic() < began + _REMOVE_SECONDS:
        if time.monotonic() > began + _STUCK_SECONDS:
            # Some members cannot be killed. Other plugins of this process must not wait for them.
            left = [group for group in left if not group.processes()]
        time.sleep(0.002)
        left = [group for group in left if not _rmdir(group.outer_path)]
    for group in groups:
        _own_groups.discard(group.outer_path)
        for fd in {group.lock, group.fd}:
            os.close(fd)


def _rmdir(path: str) -> bool:
    """Remove a group, with the inner one. Returns whether it is gone."""
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


# The leaf groups that this process has moved to, with the descriptors of their locks. They stay open.
_leaf_locks: dict[str, int] = {}


def _hand_down(site: Site) -> None:
    """Make the group of `site` hand its controllers down. v2 allows that only for a group without processes,
    so this process and its children move to a leaf group.

    Never undone: taking controllers back would lift the limits of other groups that use them by then. The
    leaf is removed with the group above it, or by the next runner.
    """
    try:
        if site.leave or site.host:
            leaf = f"{site.directory}/{PREFIX}{_identity()}{LEAF}"
            if leaf not in _leaf_locks:
                held = _make_and_lock(leaf)
                if held is None:
                    raise OSError(errno.EEXIST, "")
                _leaf_locks[leaf] = held
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
        if not _is_ours(name) or path in _own_groups:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # removed since it was listed, or owned by another user
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino != os.fstat(fd).st_ino:
                continue  # it was replaced by another group of this name
            if not _rmdir(path) and not name.endswith(LEAF):
                site = Site(_version(path), frozenset(), directory, "")
                both = (name, f"{name}/{INNER}")  # cgroup.kill of the first applies to both
                Cgroup([CgroupDirectory(site, each, fd) for each in both]).kill()
                _rmdir(path)  # if it fails, the next runner removes it: its members take a moment to end
        except OSError:
            pass  # its runner lives
        finally:
            os.close(fd)


def _is_ours(name: str) -> bool:
    """Whether a name has the form runner-PID-START-NUMBER or runner-PID-START-self. Other programs (build
    farms) use names that begin with runner-, too."""
    words = name.removeprefix(PREFIX).split("-")
    numbered = name.startswith(PREFIX) and len(words) == 3 and all(word.isdecimal() for word in words)
    return numbered or is_leaf(name)


def _version(path: str) -> Literal[1, 2]:
    return 2 if os.path.exists(f"{path}/cgroup.controllers") else 1


# --- looking while a plugin runs ----------------------------------------------------------------------------


class CpuTimeMeter(Meter):
    """The cpu_time limit. It looks again when all cores together could have used up the rest."""

    def __init__(self, cgroup: Cgroup, limit: float) -> None:
        self._cgroup = cgroup
        self._limit = limit
        self._cores = os.cpu_count() or 1
        self._unread_since = math.inf
        self.due = time.monotonic() + max(SHORTEST_PAUSE_SECONDS, limit / self._cores)

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due:
            return None
        used = self._cgroup.cpu()
        if used is None:
            return self._look_later(now)
        self._unread_since = math.inf
        left = self._limit - used
        self.due = now + max(SHORTEST_PAUSE_SECONDS, left / self._cores)
        return "cpu_time" if left <= 0 else None

    def _look_later(self, now: float) -> str | None:
        """For a moment this process may have no free descriptor: it looks again, after longer and longer
        pauses. A limit whose counter stays unreadable is enforced by nothing, so the plugin is ended."""
        self._unread_since = min(self._unread_since, now)
        unread = now - self._unread_since
        self.due = now + max(SHORTEST_PAUSE_SECONDS, unread)
        if unread < _UNREADABLE_SECONDS:
            return None
        self.why = "cpu_time"
        return LIFTED


class MemoryMeter(Meter):
    """The memory limit on v1. There the kernel kills one process and lets the others run. The runner then
    ends them all, as v2 does by itself: a plugin that lost a process may misbehave."""

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
    """Checks that the limits of the cgroup are as they were set. systemd cannot lift them (see the top of
    this module). Other programs with the rights of the runner's user can, without an event. So the runner
    looks, which takes 50 µs, and the cell looks once more at the end. When another meter has woken the loop,
    this one looks early, to save a wake-up."""

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self.due = time.monotonic() + _LIFTED_SECONDS

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due - _LIFTED_SECONDS / 2:
            return None
        self.due = now + _LIFTED_SECONDS
        self.why = ", ".join(self._cgroup.lifted())
        return LIFTED if self.why else None
