"""Settings of the calling process, made with prctl(2).

Uses python-prctl where it is installed (the extra `prctl`), else the C library's own function: the package
has to be compiled, and an installation must not need a compiler.
"""

from __future__ import annotations

import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38


def load() -> None:
    """Import what the functions below need. Call it before a fork, so that no child has to."""
    try:
        import prctl  # noqa: F401
    except ImportError:
        import ctypes  # noqa: F401


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends."""
    try:
        import prctl
    except ImportError:
        _call(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        prctl.set_pdeathsig(signal.SIGKILL)


def adopt_orphans(adopt: bool) -> None:
    """Choose whether orphaned descendants become children of this process instead of pid 1."""
    try:
        import prctl
    except ImportError:
        _call(_PR_SET_CHILD_SUBREAPER, adopt)
    else:
        prctl.set_child_subreaper(adopt)


def forbid_new_privileges() -> None:
    try:
        import prctl
    except ImportError:
        _call(_PR_SET_NO_NEW_PRIVS, 1)
    else:
        prctl.set_no_new_privs(1)


def allow_dumps() -> None:
    """Give /proc/self back to this process after a change of uid."""
    try:
        import prctl
    except ImportError:
        _call(_PR_SET_DUMPABLE, 1)
    else:
        prctl.set_dumpable(True)


def _call(option: int, value: int) -> None:
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
