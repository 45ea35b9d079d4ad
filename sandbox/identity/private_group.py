"""Tells whether a group has no other members than root and the runner's user.

Debian and others make a group for each user and let it write the user's files (umask 002), and /usr/local is
writable by a group without members. The files are read directly, as in sandbox/paths/homes.py. A group that
is not in /etc/group counts as shared: only a directory server may know its members.
"""

from __future__ import annotations

import os

from sandbox import look


def is_private(gid: int, *, group: str = "/etc/group", passwd: str = "/etc/passwd") -> bool:
    accounts = _lines(passwd, 7)
    own = {fields[0] for fields in accounts if fields[2] in (b"0", str(os.geteuid()).encode())}
    listed = [fields for fields in _lines(group, 4) if fields[2] == str(gid).encode()]
    if not listed:
        return False
    members = {name for fields in listed for name in fields[3].split(b",") if name}
    members |= {fields[0] for fields in accounts if fields[3] == str(gid).encode()}
    return members <= own


def _lines(path: str, fields: int) -> list[list[bytes]]:
    look.note_content(path)
    try:
        with open(path, "rb") as file:
            lines = [line.split(b":") for line in file.read(4 << 20).split(b"\n")]
    except OSError:
        return []
    return [line for line in lines if len(line) == fields]
