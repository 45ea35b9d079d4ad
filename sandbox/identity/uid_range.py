"""The uids that plugins may be given, and whether another program uses one of them."""

from __future__ import annotations

import os

UidRange = tuple[int, int]


# The last 65536 uids below 2**31. No known program assigns these: systemd leaves them unused (its containers
# end at 1879048191, its images' owners at 2147418111), /etc/subuid is filled from 100000 to 600100000,
# Kubernetes takes 65536 for each pod from 65536 on, and directory services map people to at most 2000200000.
DEFAULT_RANGE: UidRange = (2147418112, 2147483647)


# systemd's range for DynamicUser. Earlier versions used it by default, and their states have these uids. It
# is still used where a user namespace has no more than 65536 ids.
DYNAMIC_USER_RANGE: UidRange = (61184, 65519)


ACCOUNTS = ("/etc/passwd", "/etc/group")


RESERVATIONS = "/var/lib/runner/uids"  # one file per reserved uid, holding the state directory's path


DYNAMIC_USERS = "/run/systemd/dynamic-uid"  # has a file named by the uid while a service uses it


def id_is_mapped(first: int, last: int | None = None, path: str = "/proc/self/uid_map") -> bool:
    """Whether all ids first…last are mapped in this user namespace."""
    from sandbox import look  # imported here, because only making a plan needs it

    look.note_content(path)
    with open(path, encoding="ascii") as file:
        ranges = sorted((int(start), int(count)) for start, _, count in (line.split() for line in file))
    wanted = first
    for start, count in ranges:
        if start <= wanted < start + count:
            wanted = start + count
    return wanted > (first if last is None else last)


def usable_range(wanted: UidRange) -> UidRange | None:
    """`wanted` if these ids are mapped in this user namespace. The default range has a replacement for
    namespaces with 65536 ids. None: no range can be used."""
    for candidate in (wanted, DYNAMIC_USER_RANGE) if wanted == DEFAULT_RANGE else (wanted,):
        if all(id_is_mapped(*candidate, path=f"/proc/self/{kind}_map") for kind in ("uid", "gid")):
            return candidate
    return None


def pools(first: int, last: int) -> tuple[UidRange, UidRange]:
    """The uids for plugins with state, and those for plugins without. A range of one uid is used for both."""
    if first == last:
        return (first, last), (first, last)
    middle = first + (last - first + 1) // 2
    return (first, middle - 1), (middle, last)


def is_ours(uid: int, first: int, last: int) -> bool:
    """Whether `uid` can be a plugin's: it is in this range, or in the default range of earlier versions."""
    return first <= uid <= last or DYNAMIC_USER_RANGE[0] <= uid <= DYNAMIC_USER_RANGE[1]


def in_use(uid: int) -> str:
    """What uses `uid`, or the gid of the same number, besides plugins; '' if nothing does.

    NSS is not used: it could ask a directory server, which may not respond.
    """
    for path in ACCOUNTS:
        try:
            with open(path, "rb") as file:
                if b":%d:" % uid in file.read():
                    return f"{path} names it"
        except OSError:
            continue
    if os.path.lexists(f"{DYNAMIC_USERS}/{uid}"):
        return "a systemd service with DynamicUser= has it"
    return _running(uid)


def _running(uid: int) -> str:
    try:
        # One system call. Reading all of /proc takes a millisecond for each hundred processes.
        os.getpriority(os.PRIO_USER, uid)
    except ProcessLookupError:
        return ""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
        except OSError:
            continue
        # A zombie of a killed plugin, which its parent has not reaped yet, does not count.
        dead = lines.get(b"State", b"").strip()[:1] in (b"Z", b"X")
        if not dead and str(uid).encode() in lines.get(b"Uid", b"").split():
            return f"process {pid} runs with it"
    return ""
