"""What people have of the runner on this machine is hidden from the tests.

A policy of the operator's, installed servers and the states of plugins change what tests see, and no test may
change them. Where there are some, a run as root has mounts of its own, with an empty folder over each place.
Uids that plugins have at the moment are locked in /run/runner, which stays the machine's. An ordinary user
cannot mount: the end of the run names the places that were not empty.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PLACES = ("/etc/runner", "/var/lib/runner")

_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2


def in_use(places: Sequence[str] = PLACES) -> list[str]:
    """The places where people have something that this user can see."""
    return [place for place in places if _has_entries(place)]


def _has_entries(place: str) -> bool:
    try:
        return bool(os.listdir(place))
    except OSError:
        return False


@contextmanager
def hidden(places: Sequence[str], prefix: str) -> Iterator[str]:
    """Put an empty folder over each place, for this process and its children. Each lies in what it hides, so
    that it has the same file system, and is removed at the end. Yields why that cannot be done, or ''."""
    done: list[tuple[str, str]] = []
    fault = ""
    try:
        if places:
            _check(_libc.unshare(_CLONE_NEWNS))
            _mount("none", "/", _MS_REC | _MS_PRIVATE)
        for place in places:
            folder = tempfile.mkdtemp(prefix=prefix, dir=place)
            done.append((place, folder))
            os.chmod(folder, os.stat(place).st_mode & 0o777)
            _mount(folder, place, _MS_BIND)
    except OSError as error:
        fault = str(error)
    try:
        yield fault
    finally:
        for place, folder in done:
            if not os.path.lexists(folder):  # it is hidden with the rest
                _check(_libc.umount2(place.encode(), _MNT_DETACH))
            shutil.rmtree(folder)


_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, flags: int) -> None:
    _check(_libc.mount(source.encode(), target.encode(), None, ctypes.c_ulong(flags), None))


def _check(status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
