"""The disk limit: how many bytes a plugin may hold in each folder it may write.

A folder has no quota unless an administrator has set one up, so the runner measures it, and ends a plugin
that holds more than the limit. A measurement is slow. The free space of the filesystem is read in a
microsecond, and while what was lost of it since the last measurement cannot break the limit, nothing is
measured.

When the free space is read (`_pause`): after the time in which the fastest writer could fill the room that is
left, or a quarter of it while space is being lost; always between 1 and 250 ms.
When a folder is measured (`_needed`): at once if the limit may be broken, else once a second, or every 50 ms
while the free space cannot be trusted.

What counts: blocks, not lengths; each file once, and each of its names for at least 4 KiB; mounts and
subvolumes below; files that were deleted and are still open or mapped. A folder that cannot be measured
counts as full: one with a directory that only the plugin can open, or one that is nested too deep.

How far a plugin can exceed the limit: by what it writes in 1 ms, mostly a few megabytes. It is more
- on a busy machine: by what is written while the runner waits for its turn;
- where the filesystem tells its free space late (btrfs, ZFS, networks): by what is written in 50 ms, or in
  ten times the time of a measurement;
- while others free space on the same filesystem: by as much as they free. A single file is held to
  RLIMIT_FSIZE by the kernel, and space cannot be allocated without writing it
  (sandbox/seccomp/preallocation.py).

What is not seen: deleted files whose descriptors wait in a unix socket, or belong to a process that the
runner may not inspect. If there are such for half a second without a break, all space that was lost for no
visible reason counts as the plugin's. If the runner may inspect no process (root in a container without
CAP_SYS_PTRACE), deleted files do not count at all, and `blind` is true.
"""

from __future__ import annotations

import math
import os
import time

from sandbox.limits import disk_usage
from sandbox.limits.meter import Meter
from sandbox.speed.typed import TYPE_CHECKING, Callable, Collection, Generator, Iterable, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.limits.deleted_files import DeletedFile, DeletedFiles

# A single writer was measured at 5 GB/s into the page cache.
_FASTEST_BYTES_PER_SECOND = 6 << 30
# Between two looks. poll(2) counts milliseconds.
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.25
# The free space is read this much more often while a plugin writes, because we may be woken late.
_WRITING_FACTOR = 4
# A loss smaller than the limit divided by this starts no measurement. Otherwise, once a plugin has filled its
# folder, every byte that other programs write would start one.
_SMALLEST_LOSS_PARTS = 100
_QUICK_SECONDS = 0.001  # during a measurement this short the plugin can change next to nothing
_SLICE_SECONDS = 0.01  # of a longer measurement, before the loop's other meters have their turn

# How often to measure in any case, because other programs may free the space that the plugin takes: in
# seconds, and at least this multiple of the duration of a measurement. The first pair: while the free space
# is doubtful.
_DOUBTFUL_SECONDS, _DOUBTFUL_SHARE = 0.05, 10
_REGULAR_SECONDS, _REGULAR_SHARE = 1.0, 50
_FROZEN_SHARE = 10  # the plugin is frozen for at most a tenth of the time
_UNSEEN_SECONDS = 0.5  # after this time, missing space that no file explains counts
_UNCOUNTED = "it holds deleted files that cannot be measured, and the free space fell by as much"

# The free space of these is up to date, including delayed allocations.
_PROMPT = (disk_usage.EXT, disk_usage.XFS, disk_usage.TMPFS)


class _FreeSpace(NamedTuple):
    """The free space of a filesystem, in bytes. Inodes count as bytes: an empty file takes one, and no
    space."""

    space: int
    inodes: int  # minus those in use, because not every filesystem has a maximum


class _Folder:
    """One place the plugin may write."""

    def __init__(self, path: str, fd: int, *, is_overlaid: bool = False) -> None:
        self.path = path
        self.is_overlaid = is_overlaid  # `fd` has what was changed; in the cage an overlay shows it
        self.fd = os.dup(fd)
        self.device = os.fstat(fd).st_dev
        self.devices = frozenset((self.device,))  # also of the mounts below
        kind = disk_usage.filesystem(fd)
        self.preallocates = kind == disk_usage.XFS
        self.prompt = kind in _PROMPT and os.fstatvfs(fd).f_blocks > 0
        self.used = 0  # bytes, at the last measurement
        # At the start of the current measurement: bytes of the last one, and these plus all space lost since.
        self.at_least = self.at_most = 0

    @property
    def late(self) -> bool:
        """Whether the watched free space lags behind, or is not that of all files."""
        return not self.prompt or len(self.devices) > 1

    def free_space(self) -> _FreeSpace:
        status = os.fstatvfs(self.fd)
        return _FreeSpace(
            status.f_bfree * status.f_frsize, (status.f_ffree - status.f_files) * disk_usage.ENTRY
        )

    def held(self, file: DeletedFile) -> bool:
        """Whether a deleted file was in this folder, by its path: the caller's standard streams and updated
        libraries may be deleted files on the same device, too."""
        if file.device is not None and file.device not in self.devices and not self.is_overlaid:
            return False  # an overlay shows its files under a device of its own
        if file.path is None:
            return True
        from sandbox.paths.mounts import contains

        return contains(self.path, file.path)


class _Reference(NamedTuple):
    """Free and used space at a time when every file could be seen, by device."""

    left: Mapping[int, _FreeSpace]
    used: Mapping[int, int]

    def lost(self, device: int, left: Mapping[int, _FreeSpace], used: Mapping[int, int]) -> int:
        """Bytes lost since then that no counted file explains."""
        return (self.left[device].space - left[device].space) - (used[device] - self.used[device])


class DiskMeter(Meter):
    """Measures folders, given by their path in the cage and a descriptor, which the caller closes.

    `processes` and `freeze`: see `watch_processes`. Without them there are no processes yet. `overlaid`:
    paths of folders that are in an overlay in the cage.
    """

    def __init__(
        self,
        folders: Mapping[str, int],
        limit: int,
        processes: Callable[[], Iterable[int]] | None = None,
        freeze: Callable[[bool], None] | None = None,
        *,
        overlaid: Collection[str] = (),
    ) -> None:
        self.limit = limit
        self.where: str | None = None  # the folder that is full
        self.why = ""  # why it could not be measured, if it is not full
        self.blind = False
        self.due = 0.0 if folders else math.inf
        self._peak = 0
        self._processes: Callable[[], Iterable[int]] = tuple
        self._search: Callable[[Iterable[int]], Generator[None, None, DeletedFiles]] | None = None
        self._freeze: Callable[[bool], None] | None = None
        if processes is not None:
            self.watch_processes(processes, freeze)
        self._folders: list[_Folder] = []

        self._measuring: Generator[None, None, None] | None = None
        self._began = 0.0
        self._frozen = False  # the plugin is frozen
        self._alarmed = False
        self._quiet_until = 0.0  # no measurement for a loss before this time
        self._free_until = 0.0  # no freeze before this time
        self._measured = False
        self._ended = 0.0  # when the last measurement ended
        self._cost = 0.0  # how long it took, in seconds

        self._left: dict[int, _FreeSpace] = {}  # at the last look, by device
        self._lost: dict[int, _FreeSpace] = {}  # since the last measurement began
        self._freed = 0  # bytes freed, by any process, since then
        self._moved = False  # any change since then
        self._loss = 0  # at the last look, since then
        self._reference: _Reference | None = None
        self._unseen_since: float | None = None
        try:
            for path, fd in folders.items():
                self._folders.append(_Folder(path, fd, is_overlaid=path in overlaid))
        except BaseException:
            self.close()
            raise

    def watch_processes(
        self, processes: Callable[[], Iterable[int]], freeze: Callable[[bool], None] | None = None
    ) -> None:
        """Also count deleted files of these processes, and freeze them if necessary.

        `processes`: the plugin's current processes. `freeze`: stops them (True) and continues them (False);
        without it they are sent SIGSTOP and SIGCONT.
        """
        # Imported here, while the plugin is starting: before that there are no processes.
        from sandbox.limits.deleted_files import search_deleted_files
        from sandbox.limits.freeze import SignalFreezer
        from sandbox.paths import mounts  # noqa: F401 -- `held` needs it, when our files may be gone

        self._processes = processes
        self._search = search_deleted_files
        self._freeze = freeze or SignalFreezer(processes)
        # The first measurement had to read from the disk. Its duration must not delay the next one.
        self._cost = 0.0

    # --- the Meter interface ---

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now >= self.due and self._folders and not self._is_full():
            if not self._measures() and self._needed(now):
                self._begin(freeze=False)
            if self._measures():
                self._advance(now)
            if self._is_full():
                self.due = math.inf
        return "disk" if self._is_full() else None

    def measure(self) -> bool:
        """Measure at once, however long it takes. Returns whether a folder is full, or cannot be measured."""
        if self._folders and not self._is_full():
            if not self._measures():
                self._begin(freeze=False)
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
        """Whether the free space may not show what the plugin has taken: it is the wrong number, or so much
        was freed meanwhile that writes could be hidden."""
        least = min(self.limit - each.used for each in self._folders)
        return self._is_unwatched() or self._freed > least

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
        """Add up the space that the filesystems have lost. Freed space is not subtracted: another program may
        have freed it."""
        left = self._read()
        for device, now in left.items():
            was, lost = self._left[device], self._lost[device]
            space, inodes = was.space - now.space, was.inodes - now.inodes
            self._lost[device] = _FreeSpace(lost.space + max(0, space), lost.inodes + max(0, inodes))
            self._freed += max(0, -space, -inodes)
            self._moved = self._moved or space != 0 or inodes != 0
        self._left = left

    def _read(self) -> dict[int, _FreeSpace]:
        left = {}
        for each in self._folders:
            try:
                left[each.device] = each.free_space()
            except OSError as error:  # a file server that does not respond
                if error.errno in disk_usage.SHORTAGES:
                    raise
                left[each.device] = _FreeSpace(0, 0)
                self._judge(each, each.used, f"it cannot be read: {error.strerror}")
        return left

    # --- measuring ---

    def _begin(self, *, freeze: bool) -> None:
        for each in self._folders:
            if not self._measures():
                each.at_least = each.at_most = each.used
            if self._lost:
                each.at_most += max(self._lost[each.device])
        self._stop_measuring()
        self._began = time.monotonic()
        if freeze:
            self._set_frozen(True)
        self._left = self._read()
        self._lost = dict.fromkeys(self._left, _FreeSpace(0, 0))
        self._freed = 0
        self._moved = False
        self._loss = 0
        self._measuring = self._measurement(self._left)

    def _advance(self, now: float) -> None:
        """Continue the measurement for one slice.

        Most folders are measured in less time than it takes to freeze a process. If it takes longer, or the
        folder seems full, the plugin is frozen and the folder measured again: the plugin could have moved
        files before they were counted, or deleted files that were counted.
        """
        try:
            self._watch_meanwhile()
            ended = self._step(_QUICK_SECONDS if self._may_freeze() else _SLICE_SECONDS)
            if not self._frozen and (self._is_doubted() if self._is_full() else self._may_freeze()):
                self.where = None
                self._begin(freeze=True)
                ended = self._step(_SLICE_SECONDS)
        except BaseException:
            self._stop_measuring()
            raise
        if ended:
            frozen = self._frozen
            self._stop_measuring()
            self._schedule(time.monotonic(), frozen)
        else:
            self.due = now

    def _watch_meanwhile(self) -> None:
        """Raise the alarm if the plugin may exceed its limit while it is measured and not frozen."""
        if self._measured and not self._alarmed:
            self._watch()
            over = any(each.at_most + max(self._lost[each.device]) > self.limit for each in self._folders)
            loss = max(each.at_most - each.at_least + max(self._lost[each.device]) for each in self._folders)
            self._alarmed = over and self._is_worth_it(loss) and self._began >= self._quiet_until

    def _is_doubted(self) -> bool:
        """Whether the plugin, if it is not frozen, had time to change the measured files."""
        return self._measured and time.monotonic() - self._began > _QUICK_SECONDS

    def _may_freeze(self) -> bool:
        return self._alarmed and not self._frozen and time.monotonic() >= self._free_until

    def _step(self, seconds: float) -> bool:
        """Measure for so many seconds. Returns whether the measurement has ended."""
        assert self._measuring is not None
        until = time.monotonic() + seconds
        return all(time.monotonic() < until for _ in self._measuring)

    def _stop_measuring(self) -> None:
        try:
            if self._measuring is not None:
                self._measuring.close()
                self._measuring = None
        finally:
            if self._frozen:
                self._set_frozen(False)

    def _set_frozen(self, on: bool) -> None:
        self._frozen = on
        try:
            if self._freeze is not None:
                self._freeze(on)
        except OSError:
            pass  # the group does not exist any more

    def _schedule(self, ended: float, frozen: bool) -> None:
        """Decide when the next measurement and the next freeze may come."""
        cost = ended - self._began
        # If other programs took the space, their writes must not make us measure and freeze the plugin all
        # the time.
        loss = max(each.at_most - each.at_least for each in self._folders)
        theirs = max(each.used - each.at_least for each in self._folders) * 2 < loss
        if frozen:
            self._free_until = ended + cost * (_FROZEN_SHARE - 1) if theirs else 0.0
        self._quiet_until = ended + cost if theirs and self._alarmed else 0.0
        self._alarmed = False
        self._measured = True
        self._ended, self._cost = ended, cost
        self.due = 0.0

    def _measurement(self, left: Mapping[int, _FreeSpace]) -> Generator[None, None, None]:
        for each in self._folders:
            size = yield from disk_usage.size(each.fd, self.limit, preallocates=each.preallocates)
            each.devices = size.devices | {each.device}
            self._judge(each, size.used, size.fault)
            if self._is_full():
                return
        if self._search is None:
            self._charge_unseen(False, left)
            return
        found = yield from self._search(self._processes())
        self.blind = self.blind or found.blind
        unseen = found.unseen
        for each in self._folders:
            files = [file for file in found.files if each.held(file)]
            unseen = unseen or any(file.device is None for file in files)
            more = sum(disk_usage.occupied(file.taken, file.length, each.preallocates) for file in files)
            self._judge(each, each.used + more)
        self._charge_unseen(unseen, left)

    def _charge_unseen(self, unseen: bool, left: Mapping[int, _FreeSpace]) -> None:
        """If there may be invisible files, charge the plugin for space that was lost for no visible
        reason."""
        used = dict.fromkeys(left, 0)
        for each in self._folders:
            used[each.device] += each.used
        now = time.monotonic()
        if not unseen or self._reference is None:
            # Read again: `left` is from before the measurement, and space that was counted in it is not lost.
            self._reference = _Reference(self._read(), used)
        self._unseen_since = (self._unseen_since or now) if unseen else None
        if self._unseen_since is None or now - self._unseen_since < _UNSEEN_SECONDS:
            return
        for each in self._folders:
            lost = self._reference.lost(each.device, left, used)
            if lost * _SMALLEST_LOSS_PARTS > self.limit:
                taken = each.used + lost
                # Another program may have taken it, so the message only says what is known.
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
