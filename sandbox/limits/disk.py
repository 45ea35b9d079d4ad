"""The disk limit: how many bytes a plugin may hold in each folder it may write.

A quota would be the kernel's to enforce, but a folder has none unless its administrator has set one up. So
the folder is measured, and who holds more than the limit is ended. To measure all the time would cost more
than most plugins do; so we watch a number that costs a microsecond, what the whole filesystem has left. As
long as what it has lost since the last measurement leaves the limit unbroken, whoever took it, nothing needs
to be measured.

How far over the limit a plugin can get: as far as it writes between two looks. Near the limit that is a
fraction of a millisecond for who was seen writing, and a millisecond for who had paused: mostly less than a
megabyte, a few at most. More only
- on a machine with more to do than processors: what is written while we wait for our turn;
- where the filesystem tells late what it has left (btrfs, ZFS, networks): what is written in 50 ms,
  or in ten times the time that a measurement takes;
- while somebody else frees as much on the same filesystem: the same.
The kernel holds a single file to RLIMIT_FSIZE meanwhile, and space that is not written cannot be had: see
sandbox/seccomp/preallocation.py.

What counts: blocks, not lengths, so holes are free; each file once, whatever the number of its names; each
name for at least 4 KiB; mounts and subvolumes below; files that were deleted and are still open or mapped.
A folder that cannot be measured (a directory closed to us that the plugin can open, one nested without end)
counts as full.

What cannot be seen: deleted files whose descriptors wait in a unix socket, belong to an io_uring or to a
process that does not let us look. While there are such things for half a second on end, all that the
filesystem has lost and nobody can explain counts as the plugin's. And if no process lets us look (root in a
container without CAP_SYS_PTRACE), deleted files do not count at all: `blind` says so.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping

from sandbox.limits import deleted_files, disk_usage
from sandbox.limits.freeze import Halt
from sandbox.limits.meter import Meter
from sandbox.paths.mounts import contains
from sandbox.value import NamedTuple

_FASTEST = 6 << 30  # bytes per second; a single writer was seen to write 5 GB/s into the page cache
_SHORTEST, _LONGEST = 0.001, 0.25  # seconds between two looks; poll(2) counts milliseconds
# Who wrote at this speed or faster, lately, is writing; what is not seen again halves in _FADING seconds.
_SLOWEST, _FADING = 1 << 20, 0.01
# Who would fill the folder this soon is looked at without a pause: for a tenth of a second, and then not for
# four, so that who keeps writing and deleting there does not keep us busy.
_SOON, _AWAKE, _ASLEEP = 0.02, 0.1, 0.4
_NAP = 0.0001
# Nothing is measured for a loss smaller than this part of the limit: or who has filled a folder could have
# us measure it for every byte that is written elsewhere.
_GRAIN = 100
_QUICK = 0.001  # a measurement that nothing much can happen during
_SLICE = 0.01  # of a longer one, before the caller's other meters have their turn

# How often to measure in any case, in seconds, and at most in this multiple of what it takes: others may free
# what the plugin takes. Early, if there is reason to doubt what we see.
_REGULAR, _REGULAR_SHARE = 1.0, 50
_EARLY, _EARLY_SHARE = 0.05, 10
# It is held still for a tenth of the time at most.
_STILL_SHARE = 10
_UNSEEN_PATIENCE = 0.5
_UNCOUNTED = "it keeps files open where nobody can count them, and the filesystem has lost as much since"

_EXT, _XFS, _TMPFS = 0xEF53, 0x58465342, 0x01021994
# What these have left is true at once, also for what is written and not yet placed.
_PROMPT = (_EXT, _XFS, _TMPFS)


class _Left(NamedTuple):
    """Of a filesystem. An empty file takes an inode and nothing else, and counts."""

    space: int
    inodes: int  # less than nothing: those in use, since not every filesystem knows how many there could be


class _Folder:
    """One place the plugin may write."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = os.dup(fd)
        self.device = os.fstat(fd).st_dev
        self.devices = frozenset((self.device,))  # also those of what is mounted below
        kind = _filesystem(fd)
        self.ahead = kind == _XFS
        self.prompt = kind in _PROMPT and os.fstatvfs(fd).f_blocks > 0
        self.used = 0  # when it was last measured
        # When the measurement began that is going on: what it had before, and with all that was lost since.
        self.at_least = self.at_most = 0

    @property
    def late(self) -> bool:
        """Whether we watch the wrong number, or one that lags behind."""
        return not self.prompt or len(self.devices) > 1

    def left(self) -> _Left:
        status = os.fstatvfs(self.fd)
        return _Left(status.f_bfree * status.f_frsize, (status.f_ffree - status.f_files) * disk_usage.ENTRY)

    def had(self, file: deleted_files.File) -> bool:
        """Whether a file without a name was in here. The path tells: the caller's standard streams, and
        libraries that were updated, are deleted files on the same device, too."""
        if file.device is not None and file.device not in self.devices:
            return False
        return file.path is None or contains(self.path, file.path)


class _Reference(NamedTuple):
    """What was left and what was used when all could be seen, by device."""

    left: Mapping[int, _Left]
    used: Mapping[int, int]

    def lost(self, device: int, left: Mapping[int, _Left], used: Mapping[int, int]) -> int:
        """Bytes that went since, and not into what we have counted."""
        return (self.left[device].space - left[device].space) - (used[device] - self.used[device])


class DiskMeter(Meter):
    """Measures folders, given by their path in the cage and a descriptor, which stays the caller's.

    `processes`: the plugin's, at the moment. `freeze`: holds them still (True) and lets them go on (False);
    without it they are sent SIGSTOP and SIGCONT.
    """

    def __init__(
        self,
        folders: Mapping[str, int],
        limit: int,
        processes: Callable[[], Iterable[int]],
        freeze: Callable[[bool], None] | None = None,
    ) -> None:
        self.limit = limit
        self.where: str | None = None  # the folder that has run out
        self.why = ""  # if not because it is full: why it could not be measured
        self.blind = False
        self.due = 0.0 if folders else math.inf
        self._peak = 0
        self._processes = processes
        self._freeze = freeze or Halt(processes)
        self._folders: list[_Folder] = []

        self._measuring: Generator[None, None, None] | None = None
        self._began = 0.0
        self._still = False  # the plugin is held
        self._alarmed = False
        self._quiet_until = 0.0  # no alarm before
        self._free_until = 0.0  # not held before
        self._measured = False
        self._early = self._regular = 0.0  # when to measure in any case: in doubt, and without

        self._left: dict[int, _Left] = {}  # at the last look, by device
        self._lost: dict[int, _Left] = {}  # since the last measurement began
        self._given = 0  # bytes given back, by anybody, since then
        self._moved = False  # anything, since then
        self._sample = (0.0, 0)  # time and loss, for the speed
        self._speed = 0.0
        self._awake_until = -math.inf
        self._reference: _Reference | None = None
        self._unseen_since: float | None = None
        try:
            for path, fd in folders.items():
                self._folders.append(_Folder(path, fd))
        except BaseException:
            self.close()
            raise

    # --- as the loop sees it ---

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
        """Measure at once, however long it takes. Whether a folder is full, or cannot be measured."""
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
        """Look at what is left. Whether to measure now; if not, `due` says when to look again."""
        if not self._measured:
            return True
        self._watch()
        loss = max(max(lost) for lost in self._lost.values())
        room = self.limit - max(each.used + max(self._lost[each.device]) for each in self._folders)
        full = room < 0 and self._is_worth_it(loss)
        self._alarmed = full and now >= self._quiet_until
        regular = self._early if self._is_doubtful() else self._regular
        if self._alarmed or (self._may_have_changed() and now >= regular):
            return True
        self.due = self._quiet_until if full else now + self._pause(now, max(0, room), loss)
        if self._may_have_changed():
            self.due = min(self.due, regular)
        return False

    def _is_worth_it(self, loss: int) -> bool:
        return loss * _GRAIN >= self.limit

    def _is_doubtful(self) -> bool:
        """Whether what is left on the filesystems is no measure for what the plugin has taken: if some of it
        is not seen there, or if so much was given back meanwhile that it could hide behind that."""
        least = min(self.limit - each.used for each in self._folders)
        return self._is_unwatched() or self._given > least

    def _is_unwatched(self) -> bool:
        return self._unseen_since is not None or any(each.late for each in self._folders)

    def _may_have_changed(self) -> bool:
        return self._moved or self._is_unwatched()

    def _pause(self, now: float, room: int, loss: int) -> float:
        """As long as the fastest writer takes to fill the room; shorter for who is writing, as we may be
        woken late. Close to the end no time at all, for a while."""
        then, before = self._sample
        if now - then >= _SHORTEST:
            faded = self._speed / 2 ** ((now - then) / _FADING)
            self._speed = max((loss - before) / (now - then), faded)
            self._sample = (now, loss)
        writing = self._speed > _SLOWEST
        pause = min(room / _FASTEST / (4 if writing else 1), _LONGEST)
        if pause >= _SHORTEST:
            return pause
        if not writing or self._speed * _SOON < room:
            return _SHORTEST
        if now >= self._awake_until + _ASLEEP:
            self._awake_until = now + _AWAKE
        if now >= self._awake_until:
            return _SHORTEST
        # Not a loop without rest: who uses up its turn waits for the others', and then longer than this.
        time.sleep(_NAP)
        return 0.0

    def _watch(self) -> None:
        """Add up what the filesystems have lost. What comes back does not make up for it: it may have been
        somebody else's."""
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
            except OSError as error:  # a server that is gone
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
        self._measuring = self._measurement(self._left)

    def _advance(self, now: float) -> None:
        """Most folders are measured in less time than it takes to hold anybody. If this one takes longer, or
        if what is missing is not found, the plugin is held and measured again: it could have moved away from
        us what we had not counted yet, or deleted what we had."""
        try:
            self._watch_meanwhile()
            ended = self._step(_QUICK if self._may_hold() else _SLICE)
            if not self._still and (self._is_doubted() if self._is_full() else self._may_hold()):
                self.where = None
                self._begin(hold=True)
                ended = self._step(_SLICE)
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
        """It may cross its limit while we measure at leisure."""
        if self._measured and not self._alarmed:
            self._watch()
            over = any(each.at_most + max(self._lost[each.device]) > self.limit for each in self._folders)
            loss = max(each.at_most - each.at_least + max(self._lost[each.device]) for each in self._folders)
            self._alarmed = over and self._is_worth_it(loss) and self._began >= self._quiet_until

    def _is_doubted(self) -> bool:
        """Whether there was time for a plugin, if there is one yet, to change what we measured."""
        return self._measured and time.monotonic() - self._began > _QUICK

    def _may_hold(self) -> bool:
        return self._alarmed and not self._still and time.monotonic() >= self._free_until

    def _step(self, seconds: float) -> bool:
        """Whether the measurement has ended."""
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
            self._freeze(on)
        except OSError:
            pass  # there is no group any more

    def _settle(self, ended: float, still: bool) -> None:
        """After a measurement: when the next one is due."""
        cost = ended - self._began
        # If what was lost went to others, they must not have us measure, and hold the plugin, all the time.
        loss = max(each.at_most - each.at_least for each in self._folders)
        theirs = max(each.used - each.at_least for each in self._folders) * 2 < loss
        if still:
            self._free_until = ended + cost * (_STILL_SHARE - 1) if theirs else 0.0
        self._quiet_until = ended + cost if theirs and self._alarmed else 0.0
        self._alarmed = False
        self._measured = True
        self._early = ended + max(_EARLY, cost * _EARLY_SHARE)
        self._regular = ended + max(_REGULAR, cost * _REGULAR_SHARE)
        self._sample = (ended, 0)
        self.due = 0.0

    def _measurement(self, left: Mapping[int, _Left]) -> Generator[None, None, None]:
        for each in self._folders:
            size = yield from disk_usage.size(each.fd, self.limit, ahead=each.ahead)
            each.devices = size.devices | {each.device}
            self._judge(each, size.used, size.fault)
            if self._is_full():
                return
        found = yield from deleted_files.search(self._processes())
        self.blind = self.blind or found.blind
        unseen = found.unseen
        for each in self._folders:
            files = [file for file in found.files if each.had(file)]
            unseen = unseen or any(file.device is None for file in files)
            more = sum(disk_usage.occupied(file.taken, file.length, each.ahead) for file in files)
            self._judge(each, each.used + more)
        self._explain(unseen, left)

    def _explain(self, unseen: bool, left: Mapping[int, _Left]) -> None:
        """What nobody can see is told by what is missing."""
        used = dict.fromkeys(left, 0)
        for each in self._folders:
            used[each.device] += each.used
        now = time.monotonic()
        if not unseen or self._reference is None:
            # As of now, while `left` is as of before: what came in between is no loss.
            self._reference = _Reference(self._read(), used)
        self._unseen_since = (self._unseen_since or now) if unseen else None
        if self._unseen_since is None or now - self._unseen_since < _UNSEEN_PATIENCE:
            return
        for each in self._folders:
            lost = self._reference.lost(each.device, left, used)
            if lost * _GRAIN > self.limit:
                taken = each.used + lost
                # Somebody else may have taken it; so we say what we know and no more.
                self._judge(each, taken, _UNCOUNTED if taken > self.limit else "")

    def _judge(self, each: _Folder, used: int, fault: str = "") -> None:
        each.used = used
        self._peak = max(self._peak, used)
        if self.where is None and (used > self.limit or fault):
            self.where = each.path
            self.why = fault


def _filesystem(fd: int) -> int:
    """The magic number of statfs(2), which Python does not tell."""
    answer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).fstatfs(fd, answer) != 0:
        return 0
    return int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], "little")
