"""The spawner's input and output: values only.

Like all of this package it imports only the standard library and our replacements for parts of it: parts of
this package run between a clone and an exec.
"""

from __future__ import annotations

import os
import struct

from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple


class NetlinkRequest(NamedTuple):
    """Netlink messages that are sent to the kernel as they are."""

    step: str  # for the message "could not STEP: ERRNO"
    protocol: int  # NETLINK_ROUTE or NETLINK_NETFILTER
    messages: bytes  # one or more, each with a number of its own
    version: int = 4  # 6: skipped on a kernel without IPv6


class SocketRequest(NamedTuple):
    """A socket that is made in the plugin's network namespace and served by a process outside."""

    use: Literal["dns_udp", "dns_tcp", "listener", "redirected", "closed_ports"]
    version: int  # 4 or 6; 6 is left out on a kernel without IPv6
    address: str
    port: int
    shares_port: bool = False  # another socket of the list is bound to the same port


class NetworkRecipe(NamedTuple):
    """How the network namespace of a plugin is made. Plain data: the same for every launch of one plan."""

    requests: tuple[NetlinkRequest, ...]
    # One dns_udp, one dns_tcp, then listeners, then redirected, then closed_ports.
    sockets: tuple[SocketRequest, ...]


class NetworkOrder(NamedTuple):
    recipe: NetworkRecipe
    channel: int  # takes the sockets, to the gate or the runner: it preserves message boundaries
    outside: str  # the runner's own network namespace, as /proc/self/ns/net names it
    until: float | None = None  # on the monotonic clock: how long the gate may take to get ready
    made_by_root: bool = False  # before the uid is dropped; otherwise the cell's init makes it
    # Whether a gate serves the sockets. If not, the plugin starts without them too.
    gate: bool = True


# Temporary folders are mounted here, and bwrap binds them from here: bwrap can limit the size of a tmpfs, but
# not its inodes. The mounts exist only in the mount namespace of the cell's init, where nothing reads /sys.
FOLDERS_ROOT = "/sys"
AGENT_FOLDER = f"{FOLDERS_ROOT}/agent"
AGENT_READY = b"g"

# The last message of the cell's init. It is written by a program that only copies what the kernel returns
# (sandbox/spawn/reaper.py): bwrap's wait status, whether the deadline passed, the result of statfs(2); struct
# rusage of all children (seconds and microseconds of user and of system time, the largest RSS in KiB); struct
# statfs of the folder that it looks at (type, block size, blocks, free, available, files, free files); how
# much it read of /proc/self/io at its beginning and at its end, and both texts.
ENDING = struct.Struct("=iiq4qq104x7q72xqq512s512s")
IO_BYTES = 512


class Ending(NamedTuple):
    """How a cell ended, as its init saw it."""

    status: int  # as wait(2) gives it
    expired: bool  # the deadline of the cell's init passed
    user: float  # seconds
    system: float
    max_rss: int  # bytes, of the largest single process
    read: int  # bytes, by system calls, from files, pipes and sockets
    written: int
    full: bool  # whether the scratch folder was full (SpawnOrder.scratch)


def read_ending(fd: int) -> Ending | None:
    """The last message of the cell's init; None if it was killed before it could write it."""
    raw = os.read(fd, ENDING.size)
    if len(raw) < ENDING.size:
        return None
    status, expired, looked, *numbers, length, length_after, before, after = ENDING.unpack(raw)
    user, user_micro, system, system_micro, kibibytes, _, _, _, free, _, _, free_files = numbers
    read, written = (
        now - then for now, then in zip(_io(after, length_after), _io(before, length), strict=True)
    )
    return Ending(
        status=status,
        expired=bool(expired),
        user=user + user_micro / 1e6,
        system=system + system_micro / 1e6,
        max_rss=kibibytes * 1024,
        read=read,
        written=written,
        full=looked == 0 and (free == 0 or free_files == 0),
    )


def _io(text: bytes, length: int) -> tuple[int, int]:
    """Bytes read and written, from the text of /proc/PID/io; zeros on a kernel without these counters."""
    words = text[: max(0, length)].split()
    told = dict(zip(words[::2], words[1::2], strict=False))
    return int(told.get(b"rchar:", 0)), int(told.get(b"wchar:", 0))


class SpawnError(Exception):
    """bwrap was never started. `stage` names the step that failed."""

    def __init__(self, stage: str, code: int) -> None:
        super().__init__(f"could not {stage}: {os.strerror(code)}")
        self.stage = stage
        self.errno = code


# Steps of the cell's init that concern the network.
LEAVE, MEET_GATE = "leave the host's network", "be served by the gate"

# The step that installs the filter of `runner learn`.
OBSERVE = "install the filter of runner learn"


# The step that mounts overlays. Without it their folders are read-only.
OVERLAY = "mount an overlay"

# The step that makes the socket of the ssh agent, and waits for who serves it.
AGENT = "be served by the ssh agent"


class NetworkFault(OSError):
    """A step of making the plugin's network was refused. `step` names it."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(code, "")
        self.step = step


class CgroupHandles(NamedTuple):
    """Descriptors with which a single-threaded process joins its cgroups.

    Writing to a cgroup.procs takes a machine-wide lock and waits for an RCU grace period, some 11 ms each.
    The kernel skips both for a thread that moves itself on v1, and for a process born into its group on v2.
    """

    tasks: tuple[int, ...] = ()  # v1: each a `tasks` file, opened for writing
    unified: int = -1  # v2: the group's directory
    unified_procs: int = -1  # v2: its cgroup.procs, where clone3 does not work

    @property
    def files(self) -> tuple[int, ...]:
        """The files that the program writes to. The cell's init holds the directory open."""
        return self.tasks if self.unified_procs < 0 else (*self.tasks, self.unified_procs)


class GuardOrder(NamedTuple):
    """A mount inside of a writable folder (sandbox/spawn/guards.py)."""

    folder: int  # the number of the folder
    path: str  # below it
    access: str  # "read", "write" or "hidden"
    optional: bool  # skipped if it does not exist any more


class OverlayOrder(NamedTuple):
    """A folder and the changes in it as one, mounted at folder_path of its own number."""

    lower: int  # the number of the folder that stays as it is
    changes: int  # the number of the folder that has `upper` and `work`
    work: str  # empty: `changes` is a folder in memory, in which both are made


class ObserverOrder(NamedTuple):
    """The filter of `runner learn` (sandbox/spawn/observer.py)."""

    filter: bytes
    channel: int  # takes the filter's listener, to the observer


class AgentOrder(NamedTuple):
    """The socket of the ssh agent in the cage (sandbox/spawn/agent.py)."""

    name: str  # of the socket, in AGENT_FOLDER
    channel: int  # takes the socket, to the process that serves it
    until: float | None = None  # as in NetworkOrder


class SpawnOrder(NamedTuple):
    """All inputs of a child, decided before the clone: nothing is looked up afterwards."""

    program: str
    argv: tuple[str, ...]
    uid: int  # outside the cage; the caller's own unless the caller is root
    gid: int
    drop: bool  # whether to change to uid/gid: only if the caller is root
    keep: tuple[int, ...]  # fds the program may inherit besides 0-2
    rlimits: tuple[tuple[int, int, int], ...]
    keyring: bool
    ending: int = -1  # descriptor for the Ending that the cell's init writes
    hold: tuple[int, ...] = ()  # fds the cell's init holds open as long as any process lives
    cgroups: CgroupHandles = CgroupHandles()  # the program joins, the cell's init does not
    membership: tuple[bytes, ...] = ()  # lines that /proc/self/cgroup must then contain
    until: float | None = None  # on the monotonic clock: how long `spawn` waits for processes that it started
    deadline: float | None = None  # on the monotonic clock: the cell's init then ends everything
    released_seconds: float | None = None  # the same for a parked program, from its release on
    stdio: tuple[int, int, int] = (0, 1, 2)  # the descriptors that the program gets as 0, 1 and 2
    folders: tuple[str, ...] = ()  # tmpfs options, one for each folder, mounted at folder_path of its number
    scratch: int = -1  # the number of the one that Ending.full is about; -1: none
    # Detached mounts, and whether each is a directory's. Their numbers follow those of `folders`.
    mounts: tuple[tuple[int, bool], ...] = ()
    # Folders of the host, each with its name, that are mounted for their guards. Their numbers come next.
    binds: tuple[tuple[int, str], ...] = ()
    guards: tuple[GuardOrder, ...] = ()
    overlays: tuple[OverlayOrder, ...] = ()  # their numbers come last
    network: NetworkOrder | None = None  # None: bwrap makes the network namespace, or there is none
    observer: ObserverOrder | None = None
    agent: AgentOrder | None = None


def folder_path(number: int) -> str:
    return f"{FOLDERS_ROOT}/{number}"
