"""Accounts and groups of this machine, from /etc/passwd and /etc/group. An account that only a directory
server knows is named by its uid."""

from __future__ import annotations

import errno
import os

from sandbox import look
from sandbox.files import colon_fields
from sandbox.speed.typed import Sequence
from sandbox.speed.value import NamedTuple

PASSWD, GROUP = "/etc/passwd", "/etc/group"
NOBODY = 65534  # the owner of files whose real owner has no mapping
_MOST = (1 << 32) - 2


class Account(NamedTuple):
    name: str
    uid: int
    gid: int

    def __str__(self) -> str:
        return self.name if self.name == str(self.uid) else f"{self.name} (uid {self.uid})"


class UnknownAccount(Exception):
    """There is no such account, or no plugin may run as it. The message is the rest of a sentence that begins
    with the account."""


def find_account(word: str) -> Account:
    """The account with this name or uid. A uid that is not in /etc/passwd gets the gid of the same number."""
    found = _by_uid(int(word)) if word.isascii() and word.isdecimal() else _by_name(word)
    if found.uid == 0 or found.gid == 0:
        whose = "uid" if found.uid == 0 else "primary group"
        raise UnknownAccount(f"is root: the {whose} of {found.name} is 0, and no plugin runs as root")
    if found.uid >= _MOST or found.gid >= _MOST:
        raise UnknownAccount("is not a possible uid")
    if NOBODY in (found.uid, found.gid):
        raise UnknownAccount("is nobody, whose uid many programs share: name an account of its own")
    return found


def primary_group(uid: int) -> int | None:
    """The primary group of a uid; None if it is not in /etc/passwd."""
    return next((account.gid for account in _accounts() if account.uid == uid), None)


def _by_uid(uid: int) -> Account:
    return next((account for account in _accounts() if account.uid == uid), Account(str(uid), uid, uid))


def _by_name(name: str) -> Account:
    for account in _accounts():
        if account.name == name:
            return account
    raise UnknownAccount(f"names no account: {PASSWD} has no {name!r}")


def _accounts() -> list[Account]:
    return [
        Account(fields[0], int(fields[2]), int(fields[3]))
        for fields in colon_fields(PASSWD)
        if len(fields) > 3 and fields[2].isdecimal() and fields[3].isdecimal()
    ]


def is_private_group(gid: int, *, group: str = GROUP, passwd: str = PASSWD) -> bool:
    """Whether a group has no other members than root and the runner's user.

    Debian and others make a group for each user and let it write the user's files (umask 002), and /usr/local
    is writable by a group without members. A group that is not in /etc/group counts as shared: only a
    directory server may know its members.
    """
    accounts = [fields for fields in colon_fields(passwd) if len(fields) == 7]
    own = {fields[0] for fields in accounts if fields[2] in ("0", str(os.geteuid()))}
    listed = [fields for fields in colon_fields(group) if len(fields) == 4 and fields[2] == str(gid)]
    if not listed:
        return False
    members = {name for fields in listed for name in fields[3].split(",") if name}
    members |= {fields[0] for fields in accounts if fields[3] == str(gid)}
    return members <= own


def only_private_group_writes(path: str, gid: int) -> bool:
    """Whether the group's right to write `path`, which its mode shows, is that of a private group alone. If
    the file has an access control list, the mode shows the list's mask there, and others may be on the list.
    """
    return is_private_group(gid) and not _has_access_list(path)


def _has_access_list(path: str) -> bool:
    try:
        look.getxattr(path, "system.posix_acl_access")
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.EOPNOTSUPP)
    return True


def expected_refusal(path: str, account: Account) -> tuple[str, str] | None:
    """account_refusal() for a plan, by path. The launch checks again, by the directory that it has opened."""
    try:
        return account_refusal(path, account, look.lstat(path).st_uid, look.listdir(path))
    except OSError:
        return None  # it does not exist, or the launch will report the error


def account_refusal(
    path: str, account: Account, owner: int, content: Sequence[str]
) -> tuple[str, str] | None:
    """Why a state directory cannot be given to an account, and what to do; None if it can."""
    if owner == account.uid or not content:
        return None
    reason = (
        f"state directory {path} belongs to uid {owner}, is not empty, and its owner cannot be mapped "
        f"to {account}, the account that run_as in the policy names"
    )
    return (
        reason,
        f"chown -R {account.uid}:{account.gid} {path}, or choose another directory with --state-dir",
    )
