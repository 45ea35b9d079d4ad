"""Shims of version managers on PATH: python3, node and others, which start the real program.

A shim finds that program by files in the manager's own folder. No cage shows it, so a shim fails there.
"""

from __future__ import annotations

import os
import stat

# Programs that act by the name they are called with: their shims are links to them.
_BY_TARGET = {"mise": "mise", "rtx": "rtx", "volta-shim": "volta", "proto-shim": "proto", "asdf": "asdf"}
# The programs that the script of a shim runs with `exec`.
_BY_SCRIPT = ("pyenv", "nodenv", "rbenv", "goenv", "jenv", "plenv", "asdf", "mise", "rtx")
_SCRIPT_BYTES = 4096


def manager_of(path: str) -> str:
    """The version manager whose shim `path` is; empty if it is none."""
    try:
        real = os.path.realpath(path)  # raises for a link that we may not read
        target = _BY_TARGET.get(os.path.basename(real), "")
        if target and os.path.basename(path) != os.path.basename(real):
            return target
        if not stat.S_ISREG(os.stat(real).st_mode):
            return ""  # opening a device can have effects
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        head = os.read(fd, _SCRIPT_BYTES)
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
