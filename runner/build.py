"""Which build this is: the version, with a digest of the program's own files behind it.

Two builds of one version are told apart by what they are made of, and nothing has to be written when one is
built: a checkout, a wheel and a Debian package with the same files have the same digest, and a changed file
gives another. Reading 700 files takes some 30 ms, so no launch asks.
"""

from __future__ import annotations

import os

from runner import __version__
from sandbox import CODE_ROOT
from sandbox.cache import fingerprint

_PACKAGES = ("policies", "runner", "sandbox")  # what a wheel holds
_DIGITS = 12


def build_version(root: str = CODE_ROOT) -> str:
    """The version of the files below `root`, as they are now: 0.2.0+1f0c83a5e2d7."""
    try:
        parts = [part for package in _PACKAGES for part in _files(root, package)]
    except OSError:
        return f"{__version__}+unreadable"
    return f"{__version__}+{fingerprint(*parts)[:_DIGITS]}"


def _files(root: str, folder: str) -> list[bytes]:
    """Name and content of each file, one after the other. Compiled modules and what editors leave do not
    count: a wheel does not have them."""
    parts: list[bytes] = []
    with os.scandir(os.path.join(root, folder)) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = f"{folder}/{entry.name}"
        if entry.name.startswith(".") or entry.name.endswith("~") or entry.name == "__pycache__":
            continue
        if entry.is_dir(follow_symlinks=False):
            parts += _files(root, name)
        elif entry.is_file():  # some installers link each file to their store
            with open(entry.path, "rb", buffering=0) as file:
                parts += [os.fsencode(name), file.readall()]
    return parts
