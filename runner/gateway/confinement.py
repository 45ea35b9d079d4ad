"""How far a process is confined, as the kernel tells of it.

A hub starts programs for its clients. So it must serve none that may do less than the hub itself: that one
could do by the hub what it may not do. A client that may do more loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

# Landlock and seccomp of an ordinary user come with the first of these.
_FLAGS = ("NoNewPrivs", "Seccomp", "Seccomp_filters")
_CAPABILITIES = ("CapPrm", "CapBnd")
_NAMES = ("Umask", "Gid", "Groups", *_FLAGS, *_CAPABILITIES)
_LABEL = "security label"
_UNCONFINED = ("unconfined", "(unconfined)")  # how AppArmor's labels end of what may do everything


def read_marks(process: str) -> dict[str, str]:
    """`process`: its id, or "self". Raises OSError."""
    with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
        said = dict(line.split(":", 1) for line in file if ":" in line)
    found = {name: " ".join(said[name].split()) for name in _NAMES if name in said}
    try:
        with open(f"/proc/{process}/attr/current", encoding="utf-8", errors="replace") as file:
            found[_LABEL] = file.read().strip("\0\n")
    except OSError:  # a kernel without such a module
        found[_LABEL] = ""
    return found


def less_allowed(client: Mapping[str, str], hub: Mapping[str, str]) -> str:
    """What a client may not do and the hub may, or does in another way: the kernel's name; '': nothing."""
    for name in _FLAGS:
        if int(client.get(name, "0")) > int(hub.get(name, "0")):
            return name
    for name in _CAPABILITIES:
        if int(hub.get(name, "0"), 16) & ~int(client.get(name, "0"), 16):
            return name
    if not _groups(hub) <= _groups(client):
        return "Groups"
    if client.get("Umask") != hub.get("Umask"):
        return "Umask"
    label = client.get(_LABEL, "")
    return "" if label == hub.get(_LABEL, "") or label.endswith(_UNCONFINED) else _LABEL


def is_confined(marks: Mapping[str, str]) -> bool:
    """Beyond what a session of this user usually is. Then a service manager's units may do more."""
    label = marks.get(_LABEL, "")
    by_apparmor = bool(label) and ":" not in label and not label.endswith(_UNCONFINED)
    return by_apparmor or any(int(marks.get(name, "0")) for name in _FLAGS)


def _groups(marks: Mapping[str, str]) -> set[str]:
    return {*marks.get("Groups", "").split(), *marks.get("Gid", "").split()[1:2]}  # the effective one
