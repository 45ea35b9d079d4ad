"""Files without a name that processes hold open: deleted, or never named (O_TMPFILE).

They take disk space, but no walk through the folder finds them. The kernel shows them only in the process
that holds them: in its descriptor table (each *thread* can have its own), in its mappings, and as its
program.
"""

from __future__ import annotations

import os
import stat

from sandbox.speed.libc import open_libc
from sandbox.speed.typed import Generator, Iterable
from sandbox.speed.value import NamedTuple

_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_FILES = 2
_DELETED = " (deleted)"
_STEP_ENTRIES = 32
TABLES_COMPARED = 4  # a thread's table is compared with this many others before it is read


class DeletedFile(NamedTuple):
    device: int | None  # st_dev; None: not known, and the file may take more than `taken`
    inode: int
    taken: int  # bytes on its filesystem
    length: int
    path: str | None  # its former path, as its process sees it; None: too long for the kernel to show


class DeletedFiles(NamedTuple):
    files: tuple[DeletedFile, ...]
    # There may be files that we cannot see: held by a descriptor in transit through a socket, or by a process
    # that we may not inspect. (An io_uring could hold some too, but no filter lets a plugin make one.)
    unseen: bool
    blind: bool  # we may inspect none of the processes


def search_deleted_files(pids: Iterable[int]) -> Generator[None, None, DeletedFiles]:
    """Find all deleted files that these processes hold. A generator: the caller may do other work between
    steps."""
    found = _DeletedFileSearch()
    for pid in pids:
        yield from found.process(pid)
    certain = {(file.inode, file.path) for file in found.files.values() if file.device is not None}
    files = [
        file
        for file in found.files.values()
        if file.device is not None or (file.inode, file.path) not in certain
    ]
    blind = found.closed > 0 and found.looked == 0
    return DeletedFiles(tuple(files), (found.unseen or found.closed > 0) and not blind, blind)


class TableComparison:
    """Compares the descriptor tables of threads by kcmp(2), so that a table that forty threads share is read
    once. On a kernel without kcmp no two tables count as the same."""

    def __init__(self) -> None:
        self._libc = open_libc()
        self._kcmp = _KCMP.get(os.uname().machine)

    def same(self, one: str, other: str) -> bool:
        """Whether two threads share one descriptor table."""
        if self._kcmp is None:
            return False
        return int(self._libc.syscall(self._kcmp, int(one), int(other), _KCMP_FILES, 0, 0)) == 0


class _DeletedFileSearch:
    def __init__(self) -> None:
        self.files: dict[tuple[int | None, int], DeletedFile] = {}
        self.unseen = False
        self.looked = 0
        self.closed = 0
        self._tables = TableComparison()

    def process(self, pid: int) -> Generator[None, None, None]:
        try:
            read: list[str] = []
            mapped = False
            self._program(pid)
            for thread in os.listdir(f"/proc/{pid}/task"):
                yield
                if not any(self._tables.same(thread, other) for other in read[:TABLES_COMPARED]):
                    read.append(thread)
                    yield from self._descriptors(f"/proc/{pid}/task/{thread}")
                # All threads share the mappings. Only a thread that has ended shows none.
                mapped = mapped or (yield from self._mappings(pid, thread))
            self.looked += 1
        except PermissionError:
            self.closed += 1
        except OSError:
            pass  # it has ended

    def _program(self, pid: int) -> None:
        """Add the program's own file: a process holds it even if it has unmapped all of it."""
        link = f"/proc/{pid}/exe"
        try:
            status = os.stat(link)
        except FileNotFoundError:
            return  # its main thread has ended
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            self._add(status, _read_link(link))

    def _descriptors(self, thread: str) -> Generator[None, None, None]:
        for at, name in enumerate(os.listdir(f"{thread}/fd")):
            if at % _STEP_ENTRIES == 0:
                yield
            link = f"{thread}/fd/{name}"
            try:
                status = os.stat(link)
            except OSError:
                continue  # closed since it was listed
            kind = stat.S_IFMT(status.st_mode)
            if kind == stat.S_IFREG:
                if status.st_nlink == 0 and (status.st_dev, status.st_ino) not in self.files:
                    self._add(status, _read_link(link))
            elif kind == stat.S_IFSOCK:
                self.unseen = self.unseen or _carries_descriptors(f"{thread}/fdinfo/{name}")

    def _mappings(self, pid: int, thread: str) -> Generator[None, None, bool]:
        """Add deleted files that are mapped. Returns whether the thread shows any mapping."""
        with open(f"/proc/{pid}/task/{thread}/maps", "rb") as file:
            raw = file.read()
        mark = _DELETED.encode() + b"\n"
        if mark in raw:
            known: set[bytes] = set()
            for at, line in enumerate(raw.splitlines(keepends=True)):
                if at % _STEP_ENTRIES == 0:
                    yield
                if line.endswith(mark):
                    self._mapping(pid, line, known)
        return bool(raw)

    def _mapping(self, pid: int, line: bytes, known: set[bytes]) -> None:
        """Add the file of one line of proc_pid_maps(5): start-end rights offset device inode path."""
        span, _, offset, _, inode, path = line.split(maxsplit=5)
        if inode in known:
            return
        start, end = (int(word, 16) for word in span.split(b"-"))
        was = os.fsdecode(path[: -len(_DELETED) - 1]).replace("\\012", "\n")
        try:
            status = os.stat(f"/proc/{pid}/map_files/{start:x}-{end:x}")
        except OSError:
            # Only root may read map_files, and not of a process whose main thread has ended. The file is at
            # least as long as its mapped part.
            key = (None, int(inode))
            length = int(offset, 16) + end - start
            if key not in self.files or self.files[key].taken < length:
                self.files[key] = DeletedFile(None, int(inode), length, length, was)
            return
        known.add(inode)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            self._add(status, was)

    def _add(self, status: os.stat_result, path: str | None) -> None:
        file = DeletedFile(status.st_dev, status.st_ino, status.st_blocks * 512, status.st_size, path)
        self.files.setdefault((file.device, file.inode), file)


def _read_link(link: str) -> str | None:
    try:
        return os.readlink(link).removesuffix(_DELETED)
    except OSError:  # longer than a page
        return None


def _carries_descriptors(information: str) -> bool:
    """Whether descriptors wait in a unix socket to be received."""
    try:
        with open(information, "rb") as file:
            for line in file:
                if line.startswith(b"scm_fds:"):
                    return int(line[8:]) > 0
    except OSError:
        pass  # closed since it was listed
    return False
