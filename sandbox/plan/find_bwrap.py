"""Find a bwrap that can be trusted.

Every launch does this, so this module starts no process and imports nothing heavy. What `runner doctor` tries
is in doctor/probes.py.
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox import look
from sandbox.paths.walk import LinkRefused, TooManyLinks, close, real_path, walk
from sandbox.speed.typed import Literal, Mapping
from sandbox.speed.value import NamedTuple

BWRAP_VARIABLE = "RUNNER_BWRAP"
# Never PATH or the working directory: a user who can put a program there could replace the cage.
BWRAP_DIRECTORIES = ("/usr/bin", "/usr/local/bin", "/bin")

Rule = Literal["missing", "path", "kind", "owner", "writable", "setuid", "capabilities"]


class Bwrap(NamedTuple):
    path: str  # absolute, without symbolic links
    version: str = ""  # known only after `bwrap --version` ran, which a launch never does
    faults: tuple[str, ...] = ()  # why earlier candidates were skipped


class BwrapUnusable(Exception):
    """No bwrap may be trusted here. `reason` says what was found, `hint` what to do."""

    def __init__(self, rule: Rule, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.rule = rule
        self.reason = reason
        self.hint = hint


def find_bwrap(environ: Mapping[str, str]) -> Bwrap:
    """The bwrap to use: the one named by RUNNER_BWRAP, else the system's own.

    A named one that is unusable is refused, never replaced by another.
    """
    if named := environ.get(BWRAP_VARIABLE):
        try:
            return Bwrap(trusted_program(named))
        except BwrapUnusable as unusable:
            reason = f"{unusable.reason} (named by {BWRAP_VARIABLE})"
            raise BwrapUnusable(unusable.rule, reason, unusable.hint) from None
    passed_over: list[BwrapUnusable] = []
    for directory in BWRAP_DIRECTORIES:
        try:
            path = trusted_program(f"{directory}/bwrap")
        except BwrapUnusable as unusable:
            if unusable.rule != "missing":
                passed_over.append(unusable)
            continue
        return Bwrap(path, faults=tuple(u.reason for u in passed_over))
    if passed_over:
        raise passed_over[0]
    raise BwrapUnusable(
        "missing",
        f"bwrap is not installed: looked in {', '.join(BWRAP_DIRECTORIES)}",
        "install bubblewrap (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)",
    )


def trusted_program(path: str) -> str:
    """The real path of a program that only root can replace and that carries no privilege of its own.

    Every directory and link on the way is checked, not only the end: a user who can rename a parent or change
    a link could replace the program.
    """
    if not path.startswith("/") or "\0" in path:
        raise BwrapUnusable(
            "path", f"bwrap path {path!r} is not absolute", f"give {BWRAP_VARIABLE} an absolute path"
        )
    real, found = _walk(path)
    if not stat.S_ISREG(found.st_mode):
        raise BwrapUnusable("kind", f"{real} is not a regular file", "name the bwrap program itself")
    if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
        # CVE-2026-41163 and similar: a setuid bwrap acts with root's rights for every user.
        raise BwrapUnusable(
            "setuid",
            f"{real} is setuid or setgid",
            f"remove the bit: chmod u-s,g-s {real} (bwrap does not need it where user namespaces work; "
            "see runner doctor)",
        )
    if not found.st_mode & 0o111:
        raise BwrapUnusable("kind", f"{real} is not executable", f"chmod 755 {real}, or reinstall bubblewrap")
    if _has_file_capabilities(real):
        raise BwrapUnusable(
            "capabilities", f"{real} carries file capabilities", f"remove them: setcap -r {real}"
        )
    return real


def _walk(path: str) -> tuple[str, os.stat_result]:
    """Follow `path` one name at a time from the root, and check each step."""
    _judge("/", look.lstat("/"))
    try:
        steps = walk(
            path, follow="system", check=lambda steps, last: _judge(real_path(steps), steps[-1].status)
        )
    except LinkRefused as refused:  # the directories above it are fine: the link itself is not root's
        raise _foreign(refused.link, look.lstat(refused.link).st_uid) from None
    except TooManyLinks:
        raise BwrapUnusable(
            "path", f"{path}: too many symbolic links", "name the program's real path"
        ) from None
    except OSError as failed:
        if failed.errno in (errno.ENOENT, errno.ENOTDIR):
            raise BwrapUnusable(
                "missing", f"{path} does not exist", f"install bubblewrap, or correct {BWRAP_VARIABLE}"
            ) from None
        raise BwrapUnusable("path", f"{path}: {failed.strerror}", "name a path this user can reach") from None
    try:
        return real_path(steps), steps[-1].status
    finally:
        close(steps)


def _judge(path: str, found: os.stat_result) -> None:
    """Raise BwrapUnusable if users other than root can change `path`."""
    if found.st_uid != 0:
        raise _foreign(path, found.st_uid)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BwrapUnusable(
            "writable",
            f"{path} can be changed by users other than root (mode {found.st_mode & 0o7777:o})",
            f"chmod go-w {path}",
        )


def _foreign(path: str, uid: int) -> BwrapUnusable:
    if uid == _overflow_uid() and not _root_is_mapped():
        return BwrapUnusable(
            "owner",
            f"{path} has an owner unknown in this user namespace",
            "start the runner outside this user namespace, or map the machine's root into it",
        )
    return BwrapUnusable("owner", f"{path} is owned by uid {uid}, not by root", f"chown -h root:root {path}")


def _overflow_uid() -> int:
    look.note_content("/proc/sys/kernel/overflowuid")
    try:
        with open("/proc/sys/kernel/overflowuid", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534


def _root_is_mapped() -> bool:
    """Whether the machine's uid 0 is mapped in our user namespace. All unmapped owners look the same."""
    look.note_content("/proc/self/uid_map")
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return any(int(line.split()[1]) == 0 for line in file)
    except (OSError, ValueError, IndexError):
        return True


def _has_file_capabilities(path: str) -> bool:
    try:
        return bool(look.getxattr(path, "security.capability"))
    except OSError as failed:
        # No such attribute, or a file system without attributes: the file has no capabilities.
        if failed.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise BwrapUnusable(
            "capabilities",
            f"{path}: its file capabilities cannot be read ({failed.strerror})",
            "use a bwrap on a local file system",
        ) from None
