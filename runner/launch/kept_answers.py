"""Answers of the policy's commands, kept for the next launches: in the kernel's keyring of the user, which
forgets them by itself. They are in no file. No cage can ask for a key: its filter has no such call.

Where the kernel has no keyrings, or a container's filter hides them, nothing is kept.
"""

from __future__ import annotations

import os

from sandbox.cache import fingerprint
from sandbox.speed.libc import MachineWord, open_libc, writable
from sandbox.speed.typed import Mapping, Sequence

_NUMBERS = {"x86_64": (248, 250), "aarch64": (217, 219)}  # add_key, keyctl
_PROCESS_KEYRING, _USER_KEYRING = MachineWord(2**64 - 2), MachineWord(2**64 - 4)
_LINK, _UNLINK, _SEARCH, _READ, _SET_TIMEOUT = 8, 9, 10, 11, 15
_TYPE = b"user"
_MOST_BYTES = 16 << 10


def find_kept(argv: Sequence[str], environ: Mapping[str, str], seconds: float) -> bytes | None:
    """What this command answered here under these variables, if that is kept for so long and no longer."""
    calls, name = _calls(), _name(argv, environ, seconds)
    if calls is None or name is None:
        return None
    _, keyctl = calls
    libc = open_libc()
    # Only what a process's own keyrings lead to can be read by it.
    libc.syscall(keyctl, _LINK, _USER_KEYRING, _PROCESS_KEYRING)
    try:
        key = libc.syscall(keyctl, _SEARCH, _USER_KEYRING, _TYPE, name, 0)
        room = writable(_MOST_BYTES)
        size = libc.syscall(keyctl, _READ, key, room, MachineWord(len(room))) if key > 0 else 0
        answer = bytes(room.raw[:size]) if 0 < size <= len(room) else None
        room.raw = bytes(len(room))
        return answer
    finally:
        libc.syscall(keyctl, _UNLINK, _USER_KEYRING, _PROCESS_KEYRING)


def keep(argv: Sequence[str], environ: Mapping[str, str], answer: bytes, seconds: float) -> None:
    """If it cannot be kept, the next launch asks again."""
    calls, name = _calls(), _name(argv, environ, seconds)
    if calls is None or name is None or not 0 < len(answer) <= _MOST_BYTES:
        return
    add_key, keyctl = calls
    libc = open_libc()
    # In the keyring of this process, which ends with it, until the time is set.
    size = MachineWord(len(answer))
    key = libc.syscall(add_key, _TYPE, name, answer, size, _PROCESS_KEYRING)
    if key > 0 and libc.syscall(keyctl, _SET_TIMEOUT, key, max(1, int(seconds))) == 0:
        libc.syscall(keyctl, _LINK, key, _USER_KEYRING)
    if key > 0:
        libc.syscall(keyctl, _UNLINK, key, _PROCESS_KEYRING)


def _calls() -> tuple[int, int] | None:
    return _NUMBERS.get(os.uname().machine)


def _name(argv: Sequence[str], environ: Mapping[str, str], seconds: float) -> bytes | None:
    """All that may change the answer is part of it, and for how long it counts: a policy that says 10s gets
    none that is older. None: the folder that the command would start in is gone."""
    try:
        cwd = os.getcwd()
    except OSError:
        return None
    given = (f"{name}={value}" for name, value in sorted(environ.items()))
    parts = [cwd, repr(seconds), *argv, "", *given]
    return b"plugin-runner:" + fingerprint(*map(os.fsencode, parts)).encode()
