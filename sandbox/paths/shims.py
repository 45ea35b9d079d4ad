"""Stand-ins that version managers put on PATH: python3, node and the like, which start the real one.

They find it by files in the manager's own folder, which no cage shows, so in a cage they start nothing.
"""

from __future__ import annotations

import os
import stat

# Programs that are what they were called as: shims of theirs are links to them.
_BY_TARGET = {"mise": "mise", "rtx": "rtx", "volta-shim": "volta", "proto-shim": "proto", "asdf": "asdf"}
# What the script of a shim hands over to, after `exec`.
_BY_SCRIPT = ("pyenv", "nodenv", "rbenv", "goenv", "jenv", "plenv", "asdf", "mise", "rtx")
_SCRIPT_SIZE = 4096


def manager_of(path: str) -> str:
    """The version manager whose shim `path` is; empty if it is none."""
    try:
        real = os.path.realpath(path)  # of a link that we may not read it is an error
        target = _BY_TARGET.get(os.path.basename(real), "")
        if target and os.path.basename(path) != os.path.basename(real):
            return target
        if not stat.S_ISREG(os.stat(real).st_mode):
            return ""  # opening a device can do things
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        head = os.read(fd, _SCRIPT_SIZE)
    except OSError:
        return ""
    finally:
        os.close(fd)
    if not head.startswith(b"#!"):
        return ""
    for line in head.decode("utf-8", "replace").splitlines():
        words = line.replace('"', " ").replace("'", " ").split()
        if words[:1] == ["exec"] and "exec" in words[2:3] and os.path.basename(words[1]) in _BY_SCRIPT:
            return os.path.basename(words[1])
    return ""


def remedy(name: str, manager: str) -> str:
    return f"write the program's own path in the manifest; '{manager} which {name}' prints it"
