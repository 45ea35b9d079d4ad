"""Tries a network recipe on this machine: in a child process, in a namespace that ends with it."""

from __future__ import annotations

import errno
import os
import select
import signal
from contextlib import suppress

from sandbox.spawn.init import FAULT_CODE, FAULT_SIZE
from sandbox.spawn.network import make_network, outside_network
from sandbox.spawn.order import NetworkFault, NetworkOrder, NetworkRecipe
from sandbox.spawn.spawner import may_make_networks
from sandbox.speed.libc import get_errno, open_libc

_CLONE_NEWUSER = 0x10000000
_TRIAL_SECONDS = 10.0  # it takes milliseconds, unless the kernel has to load a module


class RecipeRefusal(Exception):
    """The kernel refused a step."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(f"could not {step}: {os.strerror(code)}")
        self.step = step
        self.errno = code


def try_recipe(recipe: NetworkRecipe) -> None:
    """Make the network as the spawner would: as root, or in a user namespace. Raises RecipeRefusal."""
    read, write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        told = b""
        try:
            _make_for_trial(recipe)
            told = FAULT_CODE.pack(0)
        except NetworkFault as fault:
            told = FAULT_CODE.pack(fault.errno or errno.EIO) + fault.step.encode()
        finally:
            try:
                os.write(write, told)
            finally:
                os._exit(0)  # below us is the parent's stack
    os.close(write)
    try:
        watch = select.poll()
        watch.register(read, select.POLLIN)
        if watch.poll(_TRIAL_SECONDS * 1000):
            told = os.read(read, FAULT_SIZE)
        else:
            os.kill(child, signal.SIGKILL)
            told = FAULT_CODE.pack(errno.ETIMEDOUT) + b"make a network namespace in time"
    finally:
        os.close(read)
        with suppress(ChildProcessError):  # where SIGCHLD is ignored the kernel reaps
            os.waitpid(child, 0)
    if len(told) < FAULT_CODE.size:
        raise RecipeRefusal("make a network namespace", errno.EIO)
    (code,) = FAULT_CODE.unpack_from(told)
    if code:
        raise RecipeRefusal(told[FAULT_CODE.size :].decode(), code)


def _make_for_trial(recipe: NetworkRecipe) -> None:
    import socket

    libc = open_libc()
    if not (os.geteuid() == 0 and may_make_networks()) and libc.unshare(_CLONE_NEWUSER) < 0:
        raise NetworkFault("create a user namespace", get_errno())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        make_network(NetworkOrder(recipe, ours.fileno(), outside_network()), libc)
