"""The place of --report or --events: a path or an open descriptor, opened before anything is started."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from sandbox.files import make_draft, replace_file, write_all
from sandbox.paths.walk import LinkRefused, Step, TooManyLinks, close, real_path, walk
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


class ReportFileError(Exception):
    """A report or events cannot be written there. The message says why."""


# Names of our own descriptors. The file may have no path, or its path may belong to another file by now.
_NAMED = {"/dev/stdin": "0", "/dev/stdout": "1", "/dev/stderr": "2"}
_NUMBERED = ("/dev/fd/", "/proc/self/fd/")


class ReportFile:
    """Opens the place before the launch and writes to that descriptor at the end. So a plugin that can write
    to the folder cannot redirect the report. Links that others than root could change are refused, as for the
    sources of a cage."""

    def __init__(self, target: str | None, option: str = "--report") -> None:
        self._option = option
        self._fd: int | None = None  # a descriptor, a terminal or a FIFO to write to
        self._folder: int | None = None  # the folder in which the report replaces the file `_name`
        self._name = ""
        if target is None:
            return
        number = _number(target)
        if number is not None:
            self._fd = _descriptor(target, number, option)
            return
        try:
            self._open(target)
        except LinkRefused as refused:
            raise ReportFileError(
                f"{self._option} {target}: {refused}; use the path it leads to: {refused.leads_to}"
            ) from None
        except TooManyLinks as refused:
            raise ReportFileError(f"{self._option} {target}: {refused}") from None
        except OSError as error:
            raise ReportFileError(f"{self._option} {target}: {error.strerror}") from None

    def _open(self, target: str) -> None:
        processes = os.stat("/proc").st_dev

        def refuse_processes(steps: list[Step], last: bool) -> None:
            # A link there is not a real one: /proc/PID/fd/N only says where a file was when it was opened.
            if steps[-1].status.st_dev == processes:
                raise ReportFileError(
                    f"{self._option} {target}: is on procfs; for a descriptor, write its number: "
                    f"{self._option} N"
                )

        missing: list[str] = []
        steps = walk(os.path.join(os.getcwd(), target), check=refuse_processes, missing=missing)
        try:
            last = steps[-1]
            if not missing and (stat.S_ISDIR(last.status.st_mode) or target.endswith("/")):
                raise ReportFileError(f"{self._option} {target}: is a directory; name a file in it")
            if len(missing) > 1 or target.endswith("/"):
                folder = os.path.join(real_path(steps), *missing[: len(missing) - 1])
                raise ReportFileError(
                    f"{self._option} {target}: the directory {folder} does not exist; create it"
                )
            if missing and not stat.S_ISDIR(last.status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if not missing and not stat.S_ISREG(last.status.st_mode):
                self._fd = _open_special(target, last, self._option)
                return
            self._name = missing[0] if missing else last.name
            folder_step = last if missing else steps[-2]
            if not os.access(f"/proc/self/fd/{folder_step.fd}", os.W_OK | os.X_OK):
                folder = real_path(steps if missing else steps[:-1])
                raise ReportFileError(
                    f"{self._option} {target}: the directory {folder} is not writable by the runner"
                )
            self._folder = os.dup(folder_step.fd)
        finally:
            close(steps)

    @property
    def wanted(self) -> bool:
        return self._fd is not None or self._folder is not None

    def open(self) -> int:
        """A descriptor for writing. For a path, a new file replaces an existing one."""
        if self._fd is not None:
            return self._fd
        assert self._folder is not None
        try:
            draft, self._fd = make_draft(self._folder)
            try:
                os.rename(draft, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except OSError:
                os.unlink(draft, dir_fd=self._folder)
                raise
        except OSError as error:
            raise ReportFileError(f"{self._option} {self._name}: {error.strerror}") from None
        finally:
            os.close(self._folder)
        return self._fd

    def write(self, document: dict[str, Any]) -> None:
        import json

        text = (json.dumps(document, ensure_ascii=True) + "\n").encode()
        try:
            if self._fd is not None:
                write_all(self._fd, text)
            elif self._folder is not None:
                replace_file(self._folder, self._name, text)
        except OSError as error:
            raise ReportFileError(f"the report could not be written: {error.strerror}") from None


def is_descriptor(target: str) -> bool:
    return _number(target) is not None


def _number(target: str) -> str | None:
    """The number of the descriptor that `target` names, if it names one."""
    if target.isdecimal():
        return target
    for prefix in _NUMBERED:
        if target.startswith(prefix) and target[len(prefix) :].isdecimal():
            return target[len(prefix) :]
    return _NAMED.get(target)


def _descriptor(target: str, number: str, option: str) -> int:
    if len(number) > 9:
        raise ReportFileError(f"{option} {target}: there is no descriptor with that number")
    fd = int(number)
    # A bare 1 is most likely a mistake; /dev/stdout is not, for what is written when the plugin has ended.
    if fd == 0 or (fd == 1 and (target == number or option != "--report")):
        raise ReportFileError(
            f"{option} {target}: the plugin has descriptors 0 and 1; use 2, or open another"
        )
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError:
        file = f" (a file: ./{target})" if target == number else ""
        raise ReportFileError(f"{option} {target}: descriptor {number} is not open{file}") from None
    if flags & os.O_ACCMODE == os.O_RDONLY:
        raise ReportFileError(f"{option} {target}: descriptor {number} is open for reading only")
    # The runner gives its own copy of stdout away when the plugin has it.
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) if fd == 1 else fd


def _open_special(target: str, step: Step, option: str) -> int:
    """A terminal or a FIFO is written to, and never replaced. A FIFO without a reader is an error."""
    kind, owner = stat.S_IFMT(step.status.st_mode), step.status.st_uid
    if kind == stat.S_IFIFO and owner not in (0, os.geteuid()):
        # Its owner would get the report, and could block us for ever by not reading it.
        raise ReportFileError(
            f"{option} {target}: that FIFO belongs to uid {owner}; make one of your own, or open it and "
            "write the number of its descriptor"
        )
    # By the descriptor: the name may belong to another file by now.
    fd = os.open(f"/proc/self/fd/{step.fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd
