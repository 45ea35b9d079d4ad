"""The cgroups of one plugin: made, limited, read, killed and removed.

A plugin has one group in each hierarchy it needs. The spawner's child joins them all before it becomes bwrap,
through descriptors opened here, so bwrap itself is charged and nothing can fork its way out. The runner that
made a group holds a lock on its directory. A group without a lock was left by a runner that died, and the
next runner removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

from sandbox.files import kernel_text, write_once
from sandbox.limits.cgroup_settings import CAGE_PROCESSES, as_number, effective_limits, is_optional, settings
from sandbox.limits.site import LEAF, PREFIX, Hierarchy, Site, is_leaf
from sandbox.spawn.order import CgroupDoors
from sandbox.spec import Limits
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.signals import signal
from sandbox.speed.typed import Iterable, Iterator, Literal, Mapping, Sequence
from sandbox.speed.value import NamedTuple

_NEARLY_FULL_SHARE = 0.95  # the kernel charges memory in batches, and each core may hold some in reserve
_REMOVE_SECONDS = 2.0
_STUCK_SECONDS = 0.2
_NAMES_TRIED = 100


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


class CgroupDirectory:
    """One directory."""

    def __init__(self, site: Site, name: str, fd: int) -> None:
        self.site = site
        self.path = f"{site.directory}/{name}"
        self.line = f"{site.line}/{name}"
        self.fd = fd  # holds the lock

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


class Cgroup:
    """All groups of one plugin."""

    def __init__(self, groups: Sequence[CgroupDirectory]) -> None:
        self.groups = tuple(groups)
        self.effective: dict[str, float] = {}  # limits as the kernel has taken them
        self._by: dict[str, CgroupDirectory] = {c: group for group in groups for c in group.site.controllers}
        self._unified = next((group for group in groups if group.site.version == 2), None)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that /proc/PID/cgroup has for every member."""
        return tuple(group.line for group in self.groups)

    @property
    def holds(self) -> tuple[int, ...]:
        """The locks. While one of these descriptors is open in a process, no runner sweeps the group."""
        return tuple(group.fd for group in self.groups)

    @contextmanager
    def doors(self) -> Iterator[CgroupDoors]:
        """Descriptors to join by. The kernel checks the rights of the process that opened a file, so the
        child may join with its uid dropped."""
        with ExitStack() as stack:

            def opened(path: str) -> int:
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                return fd

            tasks = [opened(f"{group.path}/tasks") for group in self.groups if group.site.version == 1]
            if self._unified is None:
                yield CgroupDoors(tuple(tasks))
            else:
                procs = opened(f"{self._unified.path}/cgroup.procs")
                yield CgroupDoors(tuple(tasks), self._unified.fd, procs)

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

    # --- changing -------------

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
        for group in groups:
            for controller, file, text in settings(group.site, limits, devices):
                try:
                    group.write(file, text)
                except OSError as error:
                    if is_optional(file, error):
                        continue
                    path = f"{group.path}/{file}"
                    raise CgroupFault(group.site, (controller,), path, error.errno or errno.EIO) from None
            cgroup.effective.update(effective_limits(group.site, limits, group.read))
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
            group = CgroupDirectory(site, name, held)
            _held.add(group.path)
            return group
    raise CgroupFault(site, site.controllers, site.directory, errno.EEXIST)


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
    left = [group for group in groups if not _rmdir(group.path)]
    while left and time.monotonic() < began + _REMOVE_SECONDS:
        if time.monotonic() > began + _STUCK_SECONDS:
            # Members cannot be killed, and other plugins of this process must not wait for them.
            left = [group for group in left if not group.processes()]
        time.sleep(0.002)
        left = [group for group in left if not _rmdir(group.path)]
    for group in groups:
        _held.discard(group.path)
        os.close(group.fd)


def _rmdir(path: str) -> bool:
    """Whether it was removed."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
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
                Cgroup([CgroupDirectory(Site(_version(path), frozenset(), directory, ""), name, fd)]).kill()
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
