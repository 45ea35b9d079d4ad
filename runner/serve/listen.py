"""The sockets on which the daemon listens."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import stat

from sandbox.policy.load import trust_fault

_BACKLOG = 128
_MOST_DESCRIPTORS = 1 << 16


class CannotListen(Exception):
    """The message says what to change."""


def listen_unix(path: str) -> socket.socket:
    """Listen at a path in a folder that nobody else can write. A socket that a dead daemon left is replaced.
    Raises CannotListen."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise CannotListen(f"--socket {path}: {folder} cannot be made: {error.strerror}") from None
    fault = trust_fault(folder, "the folder", private_groups=True)
    if fault is not None:
        raise CannotListen(f"--socket {path}: {fault[0]}; {fault[1]}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _remove_stale(path)
        before = os.umask(0o177)  # the mode is right from the first moment on
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
    except (OSError, CannotListen) as error:
        listener.close()
        if isinstance(error, CannotListen):
            raise
        raise CannotListen(f"--socket {path}: {error.strerror or error}") from None
    return listener


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise CannotListen(f"--socket {path}: there is a file that is not a socket; name another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            pass  # nobody listens
        else:
            raise CannotListen(
                f"--socket {path}: another daemon listens there; stop it, or name another path"
            )
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def listen_tcp(address: str, *, anywhere: bool) -> socket.socket:
    """Listen at "ADDRESS:PORT", or on loopback at "PORT". Raises CannotListen, also if that is not on
    loopback, unless `anywhere`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    try:
        where = ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        raise CannotListen(f"--http {address}: write an address and a port, such as 127.0.0.1:8700") from None
    if not where.is_loopback and not anywhere:
        raise CannotListen(
            f"--http {address}: other machines could connect to it; use 127.0.0.1, or add --http-anywhere"
        )
    family = socket.AF_INET6 if where.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(where), number))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise CannotListen(f"--http {address}: {getattr(error, 'strerror', None) or error}") from None
    return listener


def raise_descriptors() -> None:
    """Each connection and each cell takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_DESCRIPTORS)), hard))
