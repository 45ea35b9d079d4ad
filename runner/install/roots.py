"""Where the stores of `runner install` are. Every launch protects them."""

from __future__ import annotations

import os

from sandbox import look
from sandbox.paths.homes import own_home
from sandbox.speed.typed import Mapping

ROOT_STORE = "/var/lib/runner/store"


def store_root(environ: Mapping[str, str]) -> str:
    """The store by the variables of the caller."""
    if os.geteuid() == 0:
        return ROOT_STORE
    base = environ.get("XDG_DATA_HOME", "")
    if not base.startswith("/"):
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/share")
    return os.path.join(base, "runner/store")


def main_store_root(environ: Mapping[str, str]) -> str:
    """The store that packages are installed into. It is below the home of the password database: a host
    starts wrapped servers without the caller's variables, and they have to find it. Without such a home they
    cannot be started, and the caller's variables count."""
    home = own_home()
    return store_root({"HOME": home} if home not in ("", "/") and look.isdir(home) else environ)


def store_roots(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where a program may be stored."""
    return tuple(dict.fromkeys((main_store_root(environ), store_root(environ))))
