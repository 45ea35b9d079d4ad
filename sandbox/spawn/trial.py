"""Tries whether an overlay with a layer in memory can be mounted, in a child, as a cell's init does it."""

from __future__ import annotations

import errno
import os
import select

from sandbox.spawn.init import make_folders, mount_overlays
from sandbox.spawn.order import OverlayOrder, SpawnOrder
from sandbox.speed.libc import Library, get_errno, open_libc
from sandbox.speed.signals import signal
from sandbox.speed.typed import NoReturn
from sandbox.speed.value import NamedTuple

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_DUMPABLE = 4
_TRIAL_SECONDS = 10.0  # it takes milliseconds, unless the kernel has to load a module


class LayerTrial(NamedTuple):
    uid: int
    gid: int
    drop: bool  # to this uid: the caller is root
    lower: int  # a folder, open
    path: str  # its name
    mapped: int = -1  # a detached mount of it, in which its owner is the uid


def try_layer(trial: LayerTrial) -> int:
    """Returns 0, or the error number of the step that was refused."""
    read, write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _try(trial, write)
    os.close(write)
    try:
        watch = select.poll()
        watch.register(read, select.POLLIN)
        if not watch.poll(_TRIAL_SECONDS * 1000):
            os.kill(child, signal.SIGKILL)
            return errno.ETIMEDOUT
        told = os.read(read, 1)
        return told[0] if told else errno.EIO
    finally:
        os.close(read)
        try:
            os.waitpid(child, 0)
        except ChildProcessError:  # where SIGCHLD is ignored the kernel reaps
            pass


def _try(trial: LayerTrial, write: int) -> NoReturn:
    code = errno.EIO
    try:
        _mount(trial, open_libc())
        code = 0
    except OSError as error:
        code = error.errno or errno.EIO
    finally:
        try:
            os.write(write, bytes([code & 0xFF]))
        finally:
            os._exit(0)  # below us is the parent's stack


def _mount(trial: LayerTrial, libc: Library) -> None:
    if trial.drop:
        os.setgroups([])
        os.setresgid(trial.gid, trial.gid, trial.gid)
        os.setresuid(trial.uid, trial.uid, trial.uid)
        _call(libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))  # else our own id maps belong to root
    _call(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{trial.uid} {trial.uid} 1"),
        ("gid_map", f"{trial.gid} {trial.gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(line)
    _call(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    order = SpawnOrder(
        program="",
        argv=(),
        uid=trial.uid,
        gid=trial.gid,
        drop=False,
        keep=(),
        rlimits=(),
        keyring=False,
        folders=("size=64k,mode=755",),
        mounts=((trial.mapped, True),) if trial.mapped >= 0 else (),
        binds=() if trial.mapped >= 0 else ((trial.lower, trial.path),),
        overlays=(OverlayOrder(lower=1, changes=0, work=""),),
    )
    make_folders(order, libc)
    mount_overlays(order, libc)


def _call(result: int) -> None:
    if result < 0:
        raise OSError(get_errno(), "")
