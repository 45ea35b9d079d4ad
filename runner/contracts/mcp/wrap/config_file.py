"""A host's configuration file, replaced in one step: it has the old content or the new one, never a part.

Hosts write some of these files while they run. So the file is read again directly before it is replaced. If
it changed, the change is made again, on what is there now.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from runner.contracts.mcp.hosts.find import MOST_BYTES
from sandbox.cache import fingerprint
from sandbox.files import write_all
from sandbox.identity.state import users_state
from sandbox.paths.walk import LinkRefused, close, walk

_TRIES = 5
_MOST_BACKUPS = 10_000


class FileRefused(Exception):
    """The file cannot be changed; the message says why, and what to do."""


class ConfigFile:
    """A configuration file, accessed through a descriptor of its folder, so that a renamed path does not
    matter."""

    def __init__(self, path: str, given: str, folder: int, name: str) -> None:
        self.path = path  # real
        self.given = given  # absolute; it says whose configuration it is, if it is a link
        self._folder = folder
        self._name = name

    def read(self) -> tuple[bytes, os.stat_result]:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW
        try:
            fd = os.open(self._name, flags, dir_fd=self._folder)
        except OSError as error:
            raise FileRefused(f"it cannot be read: {error.strerror}") from None
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FileRefused("it is not a regular file")
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise FileRefused(f"it has more than {MOST_BYTES >> 20} MiB")
        return raw, status

    def check_writable(self, status: os.stat_result) -> None:
        """A new file takes the place of this one, so it has to be the caller's own."""
        uid = os.geteuid()
        if status.st_uid != uid and uid != 0:
            raise FileRefused(f"it belongs to uid {status.st_uid}; run this command as that user")
        if status.st_nlink > 1:
            told = f"it has {status.st_nlink} hard links, and a new file would part them"
            raise FileRefused(f"{told}; copy it to a file of its own first")

    def replace(self, change: Callable[[bytes], bytes], backups: str) -> tuple[str, bytes]:
        """Write what `change` makes of the content. The path of the backup, and what was written. Raises
        FileRefused, and whatever `change` raises."""
        for _ in range(_TRIES):
            before, status = self.read()
            self.check_writable(status)
            after = change(before)
            with self._new_file(after, status) as temporary:
                backup = _write_backup(backups, self.path, before)
                try:
                    if self._take_place(temporary, before, status):
                        os.fsync(self._folder)
                        return backup, after
                except FileRefused:
                    os.unlink(backup)
                    raise
                os.unlink(backup)
        raise FileRefused("another program keeps writing it; end that program, and try again")

    def _take_place(self, temporary: str, before: bytes, status: os.stat_result) -> bool:
        """False: the file changed since it was read."""
        again, now = self.read()
        if again != before or (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino):
            return False
        try:
            os.rename(temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:  # it is mounted by itself, or its folder is sticky
            told = f"a new file cannot take its place: {error.strerror}"
            raise FileRefused(f"{told}; is it mounted from elsewhere?") from None
        return True

    @contextmanager
    def _new_file(self, content: bytes, like: os.stat_result) -> Iterator[str]:
        """A file beside it with the same owner, mode and attributes; gone unless it was renamed."""
        name = f".{self._name[:200]}.runner-{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._folder)
        except OSError as error:
            folder = os.path.dirname(self.path)
            raise FileRefused(f"no file can be made in {folder}: {error.strerror}") from None
        try:
            try:
                made = os.fstat(fd)
                if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
                    os.fchown(fd, like.st_uid, like.st_gid)
                self._copy_attributes(fd)
                os.fchmod(fd, stat.S_IMODE(like.st_mode))
                write_all(fd, content)
                os.fsync(fd)
            except OSError as error:
                raise FileRefused(f"the new file cannot be written: {error.strerror}") from None
            finally:
                os.close(fd)
            yield name
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)

    def _copy_attributes(self, fd: int) -> None:
        """Labels and access lists, where the file system has them."""
        with suppress(OSError):
            source = os.open(self._name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._folder)
            try:
                for name in os.listxattr(source):
                    with suppress(OSError):
                        os.setxattr(fd, name, os.getxattr(source, name))
            finally:
                os.close(source)


@contextmanager
def open_config(path: str) -> Iterator[ConfigFile]:
    """Raises FileRefused. A link is followed if it leads to a file of the caller's own."""
    if "\0" in path or not path:
        raise FileRefused("this cannot be the name of a file")
    given = os.path.abspath(path)
    real = os.path.realpath(given)
    try:
        status = os.stat(real)
    except OSError as error:
        raise FileRefused(f"it cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise FileRefused("it is a folder; give the path of the file, or use runner wrap --find")
    if os.path.islink(given) and status.st_uid != os.geteuid():
        raise FileRefused(f"it is a link to {real}, which belongs to uid {status.st_uid}")
    try:
        steps = walk(os.path.dirname(real), follow="none")
        try:
            folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=steps[-1].fd)
        finally:
            close(steps)
    except LinkRefused as refused:  # it was no link a moment ago
        raise FileRefused(f"its folder was replaced: {refused}") from None
    except OSError as error:
        raise FileRefused(f"its folder cannot be opened: {error.strerror}") from None
    try:
        yield ConfigFile(real, given, folder, os.path.basename(real))
    finally:
        os.close(folder)


def backups_folder(environ: Mapping[str, str]) -> str:
    return os.path.join(users_state(environ), "backups")


def _write_backup(folder: str, path: str, content: bytes) -> str:
    """Configurations hold secrets: only the owner may read a backup, wherever the file itself is."""
    stem = f"{os.path.basename(path)}-{fingerprint(os.fsencode(path))[:12]}"
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        for number in range(1, _MOST_BACKUPS):
            backup = os.path.join(folder, f"{stem}-{number}")
            try:
                fd = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            try:
                write_all(fd, content)
                os.fsync(fd)
            except BaseException:  # such as a full disk: an incomplete backup must not stay
                with suppress(OSError):
                    os.unlink(backup)
                raise
            finally:
                os.close(fd)
            return backup
    except OSError as error:
        raise FileRefused(f"no backup can be written to {folder}: {error.strerror}") from None
    raise FileRefused(f"{folder} is full of backups of this file; remove some")
