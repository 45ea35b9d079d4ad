"""The disk limit: how many bytes a plugin may hold in each folder it may write.

The kernel could enforce a quota, but a folder has none unless its administrator has set one up. So the
folder is measured, and a plugin that holds more than the limit is ended. Measuring all the time would cost
more than most plugins do. So we watch a number that costs a microsecond: the free space of the whole
filesystem. As long as its loss since the last measurement could not break the limit, even if the plugin took
all of it, nothing needs to be measured.

When to look at that number again is one fixed rule (`_pause`): as long as the fastest writer would need to
fill the room that is left, a quarter of that while the filesystem is losing space, and always between 1 and
250 ms. When to measure is another (`_needed`): at once when the limit may be broken, and otherwise once a
second, or every 50 ms while the number cannot be trusted.

A plugin can exceed the limit by as much as it writes between two looks, which near the limit are 1 ms apart.
That is mostly a few megabytes. It is more only
- on a machine with more runnable threads than processors: by what is written while we wait for our turn;
- where the filesystem updates its free space late (btrfs, ZFS, networks): by what is written in 50 ms,
  or in ten times the time that a measurement takes;
- while others free as much on the same filesystem: by the same amount.
The kernel holds a single file to RLIMIT_FSIZE meanwhile, and space cannot be allocated without writing it:
see sandbox/seccomp/preallocation.py.

Counted are: blocks, not lengths, so holes are free; each file once, whatever the number of its names; each
name for at least 4 KiB; mounts and subvolumes below; files that were deleted and are still open or mapped.
A folder that cannot be measured (a directory closed to us that the plugin can open, one nested without end)
counts as full.

Not visible are: deleted files whose descriptors wait in a unix socket, belong to an io_uring or to a
process that we may not inspect. While such things exist for half a second without a break, all space that
the filesystem has lost and that we cannot explain counts as the plugin's. If we may inspect no process (root
in a container without CAP_SYS_PTRACE), deleted files do not count at all: `blind` is then true.
"""

from __future__ import annotations

import math
import os
import time

from sandbox.limits import disk_usage
from sandbox.limits.meter import Meter
from sandbox.speed.typed import TYPE_CHECKING, Callable, Generator, Iterable, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.limits.deleted_files import File, Findings

# A single writer was measured at 5 GB/s into the page cache.
_FASTEST_BYTES_PER_SECOND = 6 << 30
# Between two looks. poll(2) counts milliseconds.
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.25
# A plugin that is writing is looked at this much more often, because we may be woken late.
_WRITING_FACTOR = 4
# A loss smaller than this part of the limit starts no measurement. Otherwise a plugin that has filled its
# folder could make us measure it for every byte that is written elsewhere.
_SMALLEST_LOSS_PARTS = 100
_QUICK_SECONDS = 0.001  # a measurement this short leaves no time to change anything
_SLICE_SECONDS = 0.01  # of a longer one, before the caller's other meters have their turn

# How often to measure in any case, because others may free the space that the plugin takes: in seconds, and
# at least this multiple of the duration of a measurement. The first pair: while that number is doubtful.
_DOUBTFUL_SECONDS, _DOUBTFUL_SHARE = 0.05, 10
_REGULAR_SECONDS, _REGULAR_SHARE = 1.0, 50
_HELD_SHARE = 10  # the plugin is held still for at most a tenth of the time
_UNSEEN_SECONDS = 0.5  # after this time, missing space that no file explains counts
_UNCOUNTED = "it holds deleted files that cannot be measured, and the free space fell by as much"

# The free space of these is correct at once, including delayed allocations.
_PROMPT = (disk_usage.EXT, disk_usage.XFS, disk_usage.TMPFS)


class _Left(NamedTuple):
    """The free space of a filesystem, in bytes. An empty file takes an inode and no space, and counts."""

    space: int
    inodes: int  # negative: the number in use, since not every filesystem knows how many there could be


class _Folder:
    """One place the plugin may write."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = os.dup(fd)
        self.device = os.fstat(fd).st_dev
        self.devices = frozenset((self.device,))  # also of the mounts below
        kind = disk_usage.filesystem(fd)
        self.ahead = kind == disk_usage.XFS
        self.prompt = kind in _PROMPT and os.fstatvfs(fd).f_blocks > 0
        self.used = 0  # bytes, at the last measurement
        # At the start of the current measurement: bytes before it, and those plus all that was lost since.
        self.at_least = self.at_most = 0

    @property
    def late(self) -> bool:
        """Whether the watched number is the wrong one, or lags behind."""
        return not self.prompt or len(self.devices) > 1

    def left(self) -> _Left:
        status = os.fstatvfs(self.fd)
        return _Left(status.f_bfree * status.f_frsize, (status.f_ffree - status.f_files) * disk_usage.ENTRY)

    def had(self, file: File) -> bool:
        """Whether a deleted file was in here, by its path: the caller's standard streams and updated
        libraries are deleted files on the same device, too."""
        if file.device is not None and file.device not in self.devices:
            return False
        if file.path is None:
            return True
        from sandbox.paths.mounts import contains

        return contains(self.path, file.path)


class _Reference(NamedTuple):
    """Free and used space at a time when every file could be seen, by device."""

    left: Mapping[int, _Left]
    used: Mapping[int, int]

    def lost(self, device: int, left: Mapping[int, _Left], used: Mapping[int, int]) -> int:
        """Bytes lost since then that no counted file explains."""
        return (self.left[device].space - left[device].space) - (used[device] - self.used[device])


class DiskMeter(Meter):
    """Measures folders, given by their path in the cage and a descriptor, which stays the caller's.

    `processes` and `freeze`: see `guard`. Without them there are no processes yet: what is measured is what
    was there before the plugin.
    """

    def __init__(
        self,
        folders: Mapping[str, int],
        limit: int,
        processes: Callable[[], Iterable[int]] | None = None,
        freeze: Callable[[bool], None] | None = None,
    ) -> None:
        self.limit = limit
        self.where: str | None = None  # the folder that is full
        self.why = ""  # why it could not be measured, if it is not full
        self.blind = False
        self.due = 0.0 if folders else math.inf
        self._peak = 0
        self._processes: Callable[[], Iterable[int]] = tuple
        self._search: Callable[[Iterable[int]], Generator[None, None, Findings]] | None = None
        self._freeze: Callable[[bool], None] | None = None
        if processes is not None:
            self.guard(processes, freeze)
        self._folders: list[_Folder] = []

        self._measuring: Generator[None, None, None] | None = None
        self._began = 0.0
        self._still = False  # the plugin is frozen
        self._alarmed = False
        self._quiet_until = 0.0  # no measurement for a loss before this time
        self._free_until = 0.0  # no freeze before this time
        self._measured = False
        self._ended = 0.0  # when the last measurement ended
        self._cost = 0.0  # how long it took, in seconds

        self._left: dict[int, _Left] = {}  # at the last look, by device
        self._lost: dict[int, _Left] = {}  # since the last measurement began
        self._given = 0  # bytes freed, by any process, since then
        self._moved = False  # any change since then
        self._loss = 0  # at the last look, since then
        self._reference: _Reference | None = None
        self._unseen_since: float | None = None
        try:
            for path, fd in folders.items():
                self._folders.append(_Folder(path, fd))
        except BaseException:
            self.close()
            raise

    def guard(
        self, processes: Callable[[], Iterable[int]], freeze: Callable[[bool], None] | None = None
    ) -> None:
        """From now on these processes may write.

        `processes`: the plugin's current processes. `freeze`: stops them (True) and continues them (False);
        without it they are sent SIGSTOP and SIGCONT.
        """
        # Imported here, while the plugin is starting: only from now on there is somebody to search and stop.
        from sandbox.limits.deleted_files import search
        from sandbox.limits.freeze import Halt
        from sandbox.paths import mounts  # noqa: F401 -- `had` needs it, when our files may be gone

        self._processes = processes
        self._search = search
        self._freeze = freeze or Halt(processes)
        # What was measured before had to be read from the disk. That must not put off the next measurement.
        self._cost = 0.0

    # --- the Meter interface ---

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now >= self.due and self._folders and not self._is_full():
            if not self._measures() and self._needed(now):
                self._begin(hold=False)
            if self._measures():
                self._advance(now)
            if self._is_full():
                self.due = math.inf
        return "disk" if self._is_full() else None

    def measure(self) -> bool:
        """Measure at once, however long it takes. Returns whether a folder is full, or cannot be measured."""
        if self._folders and not self._is_full():
            if not self._measures():
                self._begin(hold=False)
            while self._measures():
                self._advance(time.monotonic())
        return self._is_full()

    def peaks(self) -> Mapping[str, float]:
        return {"disk": self._peak}

    @property
    def usage(self) -> Mapping[str, int]:
        """Bytes in each folder when it was last measured."""
        return {each.path: each.used for each in self._folders}

    def close(self) -> None:
        self._stop_measuring()
        while self._folders:
            os.close(self._folders.pop().fd)

    def _is_full(self) -> bool:
        return self.where is not None

    def _measures(self) -> bool:
        return self._measuring is not None

    # --- when to measure ---

    def _needed(self, now: float) -> bool:
        """Read the free space. Returns whether to measure now; if not, `due` says when to look again."""
        if not self._measured:
            return True
        self._watch()
        loss = max(max(lost) for lost in self._lost.values())
        room = self.limit - max(each.used + max(self._lost[each.device]) for each in self._folders)
        full = room < 0 and self._is_worth_it(loss)
        self._alarmed = full and now >= self._quiet_until
        regular = self._next_measurement()
        if self._alarmed or (self._may_have_changed() and now >= regular):
            return True
        writing, self._loss = loss > self._loss, loss
        self.due = self._quiet_until if full else now + _pause(max(0, room), writing)
        if self._may_have_changed():
            self.due = min(self.due, regular)
        return False

    def _is_worth_it(self, loss: int) -> bool:
        return loss * _SMALLEST_LOSS_PARTS >= self.limit

    def _is_doubtful(self) -> bool:
        """Whether the free space does not show what the plugin has taken: some of it is missing there, or so
        much was freed meanwhile that the plugin's writes could be hidden."""
        least = min(self.limit - each.used for each in self._folders)
        return self._is_unwatched() or self._given > least

    def _is_unwatched(self) -> bool:
        return self._unseen_since is not None or any(each.late for each in self._folders)

    def _may_have_changed(self) -> bool:
        return self._moved or self._is_unwatched()

    def _next_measurement(self) -> float:
        """When to measure next in any case."""
        if self._is_doubtful():
            return self._ended + max(_DOUBTFUL_SECONDS, self._cost * _DOUBTFUL_SHARE)
        return self._ended + max(_REGULAR_SECONDS, self._cost * _REGULAR_SHARE)

    def _watch(self) -> None:
        """Add up the losses of the filesystems. Freed space is not subtracted: it may have been another
        program's."""
        left = self._read()
        for device, now in left.items():
            was, lost = self._left[device], self._lost[device]
            space, inodes = was.space - now.space, was.inodes - now.inodes
            self._lost[device] = _Left(lost.space + max(0, space), lost.inodes + max(0, inodes))
            self._given += max(0, -space, -inodes)
            self._moved = self._moved or space != 0 or inodes != 0
        self._left = left

    def _read(self) -> dict[int, _Left]:
        left = {}
        for each in self._folders:
            try:
                left[each.device] = each.left()
            except OSError as error:  # a server that does not answer any more
                left[each.device] = _Left(0, 0)
                self._judge(each, each.used, f"it cannot be read: {error.strerror}")
        return left

    # --- measuring ---

    def _begin(self, *, hold: bool) -> None:
        for each in self._folders:
            if not self._measures():
                each.at_least = each.at_most = each.used
            if self._lost:
                each.at_most += max(self._lost[each.device])
        self._stop_measuring()
        self._began = time.monotonic()
        if hold:
            self._hold(True)
        self._left = self._read()
        self._lost = dict.fromkeys(self._left, _Left(0, 0))
        self._given = 0
        self._moved = False
        self._loss = 0
        self._measuring = self._measurement(self._left)

    def _advance(self, now: float) -> None:
        """Go on with the measurement for one slice.

        Most folders are measured in less time than it takes to freeze a process. If this one takes longer,
        or the folder seems full, the plugin is frozen and measured again: it could have moved files away
        before we counted them, or deleted files that we had counted.
        """
        try:
            self._watch_meanwhile()
            ended = self._step(_QUICK_SECONDS if self._may_hold() else _SLICE_SECONDS)
            if not self._still and (self._is_doubted() if self._is_full() else self._may_hold()):
                self.where = None
                self._begin(hold=True)
                ended = self._step(_SLICE_SECONDS)
        except BaseException:
            self._stop_measuring()
            raise
        if ended:
            still = self._still
            self._stop_measuring()
            self._settle(time.monotonic(), still)
        else:
            self.due = now

    def _watch_meanwhile(self) -> None:
        """The plugin may cross its limit while we measure without holding it."""
        if self._measured and not self._alarmed:
            self._watch()
            over = any(each.at_most + max(self._lost[each.device]) > self.limit for each in self._folders)
            loss = max(each.at_most - each.at_least + max(self._lost[each.device]) for each in self._folders)
            self._alarmed = over and self._is_worth_it(loss) and self._began >= self._quiet_until

    def _is_doubted(self) -> bool:
        """Whether the plugin, if it is not frozen, had time to change the measured files."""
        return self._measured and time.monotonic() - self._began > _QUICK_SECONDS

    def _may_hold(self) -> bool:
        return self._alarmed and not self._still and time.monotonic() >= self._free_until

    def _step(self, seconds: float) -> bool:
        """Returns whether the measurement has ended."""
        assert self._measuring is not None
        until = time.monotonic() + seconds
        return all(time.monotonic() < until for _ in self._measuring)

    def _stop_measuring(self) -> None:
        try:
            if self._measuring is not None:
                self._measuring.close()
                self._measuring = None
        finally:
            if self._still:
                self._hold(False)

    def _hold(self, on: bool) -> None:
        self._still = on
        try:
            if self._freeze is not None:
                self._freeze(on)
        except OSError:
            pass  # the group does not exist any more

    def _settle(self, ended: float, still: bool) -> None:
        """After a measurement: decide when the next one, and the next freeze, may come."""
        cost = ended - self._began
        # If other programs took the space, their writing must not make us measure, and freeze the plugin,
        # all the time.
        loss = max(each.at_most - each.at_least for each in self._folders)
        theirs = max(each.used - each.at_least for each in self._folders) * 2 < loss
        if still:
            self._free_until = ended + cost * (_HELD_SHARE - 1) if theirs else 0.0
        self._quiet_until = ended + cost if theirs and self._alarmed else 0.0
        self._alarmed = False
        self._measured = True
        self._ended, self._cost = ended, cost
        self.due = 0.0

    def _measurement(self, left: Mapping[int, _Left]) -> Generator[None, None, None]:
        for each in self._folders:
            size = yield from disk_usage.size(each.fd, self.limit, ahead=each.ahead)
            each.devices = size.devices | {each.device}
            self._judge(each, size.used, size.fault)
            if self._is_full():
                return
        if self._search is None:
            self._explain(False, left)
            return
        found = yield from self._search(self._processes())
        self.blind = self.blind or found.blind
        unseen = found.unseen
        for each in self._folders:
            files = [file for file in found.files if each.had(file)]
            unseen = unseen or any(file.device is None for file in files)
            more = sum(disk_usage.occupied(file.taken, file.length, each.ahead) for file in files)
            self._judge(each, each.used + more)
        self._explain(unseen, left)

    def _explain(self, unseen: bool, left: Mapping[int, _Left]) -> None:
        """Charge the plugin for files that cannot be seen, by the missing space."""
        used = dict.fromkeys(left, 0)
        for each in self._folders:
            used[each.device] += each.used
        now = time.monotonic()
        if not unseen or self._reference is None:
            # Read again: `left` is from before the measurement, and space taken during it is no loss.
            self._reference = _Reference(self._read(), used)
        self._unseen_since = (self._unseen_since or now) if unseen else None
        if self._unseen_since is None or now - self._unseen_since < _UNSEEN_SECONDS:
            return
        for each in self._folders:
            lost = self._reference.lost(each.device, left, used)
            if lost * _SMALLEST_LOSS_PARTS > self.limit:
                taken = each.used + lost
                # Another program may have taken it, so the message states only what is known.
                self._judge(each, taken, _UNCOUNTED if taken > self.limit else "")

    def _judge(self, each: _Folder, used: int, fault: str = "") -> None:
        each.used = used
        self._peak = max(self._peak, used)
        if self.where is None and (used > self.limit or fault):
            self.where = each.path
            self.why = fault


def _pause(room: int, writing: bool) -> float:
    """Seconds until the next look. `room`: bytes up to the limit. `writing`: space is being lost."""
    seconds = room / _FASTEST_BYTES_PER_SECOND / (_WRITING_FACTOR if writing else 1)
    return min(max(seconds, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
