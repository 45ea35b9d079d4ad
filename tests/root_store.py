"""Root with an empty store of packages in its usual place, which only its own launches see."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from runner.install.roots import ROOT_STORE
from tests.conftest import Caller

_PLACE = Path(ROOT_STORE)


@contextmanager
def empty_root_store(root: Caller, folder: Path) -> Iterator[Caller]:
    """`folder`: the store is `store` in it."""
    (folder / "store").mkdir()
    script = f'mount --bind "$0" {_PLACE} && exec "$@"'
    alone = ("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script)
    with mount_point():
        yield replace(root, prefix=(*root.prefix, *alone, str(folder / "store")))


@contextmanager
def mount_point() -> Iterator[None]:
    """The folder is there while any test uses it. The last one removes it, if nobody put something there."""
    while True:
        _PLACE.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            used = os.open(_PLACE, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(used, fcntl.LOCK_SH)
            if _PLACE.stat().st_ino == os.fstat(used).st_ino:
                break
            os.close(used)  # its last user removed it in between
    try:
        yield
    finally:
        with suppress(OSError):  # another test uses it, or it is not empty
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _PLACE.rmdir()
        os.close(used)
