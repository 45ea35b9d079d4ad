"""Home directories whose credentials are hidden from plugins."""

from __future__ import annotations

import os

from sandbox import look
from sandbox.files import colon_fields
from sandbox.paths.denied_paths import HOME_BASES, lexical_fault, normal
from sandbox.paths.mounts import contains, join
from sandbox.speed.typed import Mapping, Sequence
from sandbox.speed.value import NamedTuple

# passwd gives daemons homes such as /usr/sbin or /bin. If these counted as homes, /usr would be refused.
_NOT_HOMES = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", "/proc", "/sys", "/nonexistent")


class _Account(NamedTuple):
    name: str
    uid: int
    home: str


def _accounts(passwd: str) -> list[_Account]:
    return [
        _Account(fields[0], int(fields[2]), fields[5])
        for fields in colon_fields(passwd)
        if len(fields) == 7 and fields[2].isdecimal()
    ]


def _is_person(account: _Account) -> bool:
    """Whether this is a person's account and not a daemon's, by its uid (65534 is nobody) or its home."""
    return (account.uid >= 1000 and account.uid != 65534) or account.home.startswith("/home/")


def _look_up_home(who: int | str) -> list[str]:
    """The home of an account that is not in /etc/passwd but comes from a directory server or systemd. This
    asks for one account, because listing all of them could hang."""
    home = look.home_of(who)
    return [home] if home else []


def _directories_in(base: str) -> list[str]:
    try:
        return [join(base, name) for name in look.listdir(base) if look.isdir(join(base, name))]
    except OSError:
        return []


def own_home(passwd: str = "/etc/passwd") -> str:
    """The home of the runner's user by the password database; '' if there is none that can be used."""
    uid = os.geteuid()
    found = [each.home for each in _accounts(passwd) if each.uid == uid] or _look_up_home(uid)
    return next((home for home in found if lexical_fault(home) is None), "")


def homes(
    environ: Mapping[str, str],
    *,
    euid: int | None = None,
    passwd: str = "/etc/passwd",
    bases: Sequence[str] = HOME_BASES,
) -> tuple[str, ...]:
    """The homes to protect: those of the runner's user and of the user who called sudo; for root, all.

    Each is listed as written and resolved, because /home/u may be a link to /data/u.
    """
    uid = os.geteuid() if euid is None else euid
    accounts = _accounts(passwd)
    found = [environ.get("HOME", "")]
    found += [a.home for a in accounts if a.uid == uid] or _look_up_home(uid)
    sudo_user = environ.get("SUDO_USER", "")
    if sudo_user:
        found += [a.home for a in accounts if a.name == sudo_user] or _look_up_home(sudo_user)
    if uid == 0:
        # Only homes that exist: each costs half a millisecond, and a missing home has nothing to protect.
        found += [a.home for a in accounts if _is_person(a) and look.isdir(a.home)]
        # Not every account is in /etc/passwd, so each directory in these folders counts as a home.
        found += [home for base in bases for home in _directories_in(base)]
    unique: dict[str, None] = {}
    for home in found:
        if lexical_fault(home) is not None:
            continue
        home = normal(home)
        if any(contains(system, home) for system in _NOT_HOMES):
            continue
        unique[home] = None
        unique[look.realpath(home)] = None
    return tuple(unique)
